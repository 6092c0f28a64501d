"""The seed of each test, and what no test may leave behind."""

import os
import random
import sys
import zlib

import numpy as np
import pytest
import torch

from support.alone import SHARED, alone, seed


def drawn():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002 the one that all share


def test_a_test_begins_with_the_seed_of_its_name(request):
    first = drawn()
    assert torch.initial_seed() == zlib.crc32(request.node.name.encode())
    seed(request.node.name)
    assert drawn() == first


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("the default device", lambda: torch.set_default_device("meta")),
        ("whether gradients are computed", lambda: torch.set_grad_enabled(False)),
        ("the number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("whether algorithms are deterministic", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("the precision of products", lambda: torch.set_float32_matmul_precision("medium")),
        ("the search for anomalies", lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
        ("the working directory", lambda: os.chdir("/")),
        ("the search path of modules", lambda: sys.path.append("elsewhere")),
        ("the environment: changed in PATH", lambda: os.environ.update(PATH="a secret")),
        ("the environment: changed in NEW", lambda: os.environ.update(NEW="a secret")),
    ],
)
def test_what_a_test_leaves_behind_fails_it_and_is_put_back(what, change):
    before = {name: read() for name, (read, _) in SHARED.items()}
    with pytest.raises(AssertionError, match=what) as raised, alone("a test"):
        change()
    assert "secret" not in str(raised.value)
    assert {name: read() for name, (read, _) in SHARED.items()} == before
