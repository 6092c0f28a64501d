"""Every verb on a device that is not the CPU gives what it gives on the CPU, from memory and from a directory.

Law: tests run on each device that is there: on the stand-in, where a C++ compiler is, whose results are the CPU's but
for the order of a few sums; and on a GPU. A tensor of the CPU that meets one of the device is an error on both.
"""

import copy
import ctypes
import signal

import pytest
import torch
from torch import multiprocessing, nn

from secateur import env
from support.device import DEVICES, on_device

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
each_device = pytest.mark.parametrize("device", DEVICES)
standin_only = pytest.mark.parametrize("device", [name for name in DEVICES if name == "standin"])


# ----------------------------------------------------------------------------------------------- what the device is


def meets_the_cpu(device):
    here, there = torch.ones(3), torch.ones(3, device=device)
    for wrong in (
        lambda: here + there,
        lambda: there.mul_(here),
        lambda: here.add_(there),
        lambda: torch.cat([here, there]),
        lambda: torch.stack([here, there]),
        lambda: nn.Linear(3, 2).to(device)(here),
        lambda: nn.Conv1d(3, 2, 1).to(device)(torch.ones(1, 3, 4)),
        lambda: there.index_select(0, torch.tensor([0])),
        lambda: torch.where(here > 0, there, there),
    ):
        with pytest.raises(RuntimeError, match=r"device|should be the same"):
            wrong()
    # what a GPU takes, too: single numbers and indices
    assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]
    with pytest.raises(TypeError, match="convert"):
        there.numpy()


@each_device
def test_tensors_of_two_devices_do_not_meet(device):
    on_device(device, meets_the_cpu)


def reads_its_memory(device):
    ctypes.string_at(torch.ones(3, device=device).data_ptr(), 4)


@standin_only
def test_its_memory_cannot_be_read_from_elsewhere(device):
    with pytest.raises(multiprocessing.ProcessExitedException) as found:
        on_device(device, reads_its_memory)
    assert found.value.exit_code == -signal.SIGSEGV


def is_a_device(device):
    x = torch.arange(24.0).reshape(2, 3, 4).to(device)
    assert x.transpose(0, 2)[1:, ::2].contiguous().tolist() == torch.arange(24.0).reshape(2, 3, 4).T[1:, ::2].tolist()
    view = x[0]
    view[1] = -1.0
    assert x.cpu()[0, 1].tolist() == [-1.0] * 4
    norm = copy.deepcopy(nn.BatchNorm1d(3)).to(device)
    norm(x)
    assert float(norm.running_mean.sum()) != 0.0
    y = (x * 2).requires_grad_()
    (y.softmax(-1) * x).sum().backward()
    assert y.grad.device == x.device
    assert torch.equal(y.grad.cpu(), slope_on_the_cpu(x.cpu()))


def slope_on_the_cpu(x):
    y = (x * 2).requires_grad_()
    (y.softmax(-1) * x).sum().backward()
    return y.grad


@standin_only
def test_it_computes_as_the_cpu(device):
    on_device(device, is_a_device)


# ------------------------------------------------------------------------------------------------------- every verb


def check(device, verb):
    raised = []

    def keep():
        import traceback

        raised.append(traceback.format_exc())

    env._CHECKS = {verb: env._CHECKS[verb]}
    (row,) = env.checked(device, on_error=keep)
    assert row.holds, "".join([str(row), *raised])
    if device.type == "standin" and not row.says.startswith("left out"):
        assert row.memory > 0
        # sums in another order alone: AdamW of `recover` makes them large where a slope is nearly zero
        assert row.distance <= (1e-2 if "recover" in verb else 1e-6)


@each_device
@pytest.mark.parametrize("verb", env._CHECKS)
def test_a_verb_gives_what_it_gives_on_the_cpu(device, verb):
    on_device(device, check, verb)
