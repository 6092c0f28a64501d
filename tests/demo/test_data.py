"""The digits: split by class, nothing of the test images in training."""

import pytest

from secateur.demo import load_digits


@pytest.mark.long
def test_the_split_is_by_class_and_leaks_nothing() -> None:
    data = load_digits()
    assert (len(data.train_images), len(data.test_images)) == (1078, 719)
    for label in range(10):
        share = (data.test_labels == label).sum() / (
            (data.train_labels == label).sum() + (data.test_labels == label).sum()
        )
        assert share == pytest.approx(0.4, abs=0.01)
    assert data.train_images.mean() == pytest.approx(0, abs=1e-5)
    assert data.train_images.std() == pytest.approx(1, abs=1e-5)
