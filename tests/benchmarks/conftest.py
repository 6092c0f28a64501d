"""A benchmark has a process of its own, whose threads and random numbers it may set; here it has not."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)
