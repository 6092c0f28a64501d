"""What tests of the operators share."""

import pytest

from support.kernels import at_level, libraries


@pytest.fixture(params=libraries(), ids=str)
def library(request):
    with at_level(request.param):
        yield request.param
