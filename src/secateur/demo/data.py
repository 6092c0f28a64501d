"""The handwritten digits that the demo reads.

Law: nothing is downloaded, and the split is always the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Digits", "load_digits"]


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8), normalized by the training images, and labels 0 … 9 of shape (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """scikit-learn's 1797 handwritten digits, always split into the same 1078 training and 719 test images, by class.

    Nothing is downloaded. ``ImportError`` where scikit-learn is missing.

    >>> [tuple(part.shape) for part in load_digits()]
    [(1078, 1, 8, 8), (1078,), (719, 1, 8, 8), (719,)]
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(f"the digits come with scikit-learn ({error}): pip install 'secateur[demo]'") from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(labels, dtype=torch.int64)
    train, test = model_selection.train_test_split(range(len(classes)), test_size=719, stratify=labels, random_state=0)
    images = (images - images[train].mean()) / images[train].std()
    return Digits(images[train], classes[train], images[test], classes[test])
