"""Searches of tests make few passes."""

import pytest

from secateur.search import fitting


@pytest.fixture(autouse=True, scope="package")
def few_passes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "PASSES", 8.0)
        yield
