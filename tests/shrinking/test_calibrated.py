"""Laws of `shrink` with data: what is chosen, what is repaired, and that a call that fails changes nothing."""

import copy
import functools

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking import calibrated, subject, verify_shrunken
from support.families import make
from support.measured import Words, answers, apart, text, words
from support.stacks import Stack, data, stack
from support.unchanged import is_unchanged, state_of


@pytest.fixture(scope="module")
def batches():
    return text()


def counts(done):
    return {group.name: int(done.kept[group.axis].sum()) for group in done.coupling.groups if group.axis in done.kept}


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, other):
    one, two = model.state_dict(), other if isinstance(other, dict) else other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# ---- nothing removed, and what costs nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_removed_changes_nothing(dtype, batches):
    model = words(dtype=dtype)
    state = state_of(model)
    done = shrink(model, batches[0], 0.0, batches=batches)
    assert is_unchanged(model, state)
    assert done.got == 0
    assert all(mask.all() for mask in done.kept.values())


def test_what_is_excluded_stays_bit_for_bit(batches):
    """Also what takes no part in what leaves: only consumers of the groups that lost units are repaired."""
    model = words()
    before = states(model)
    done = shrink(model, batches[0], 0.05, batches=batches, include="blocks.1.up.bias")
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight"}
    (group,) = [group for group in done.coupling.groups if group.axis in done.kept]
    kept = torch.from_numpy(done.kept[group.axis])
    assert torch.equal(model.blocks[1].up.weight, before["blocks.1.up.weight"][kept])  # rows are sliced, not repaired
    state = state_of(model)
    with pytest.raises(ValueError, match="nothing of the model can leave"):
        shrink(model, batches[0], 0.05, batches=batches, exclude="*")
    assert is_unchanged(model, state)


@pytest.mark.parametrize("kind", ["copies", "combinations", "dead"])
def test_units_that_others_can_replace_leave_without_error(kind):
    """Half of each MLP's units are functions of the other half, and half is asked for."""
    model = stack(layers=2).double()
    calibration = [each.double() for each in data(count=6, size=40)]
    with torch.no_grad():
        for block in model.layers:
            if kind == "copies":
                block.up.weight[6:], block.up.bias[6:] = 3 * block.up.weight[:6], 3 * block.up.bias[:6]
            elif kind == "combinations":
                block.forward = functools.partial(lambda block, x: x + block.down(block.up(x)), block)
                mixing, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
                block.up.weight[6:], block.up.bias[6:] = mixing @ block.up.weight[:6], mixing @ block.up.bias[:6]
            else:
                block.up.weight[6:], block.up.bias[6:] = 0, -1
    wanted = answers(model, calibration)
    half = sum(6 * (8 + 1 + 8) for _ in model.layers) / sum(each.numel() for each in model.parameters())
    done = shrink(
        model, calibration[0], half, batches=calibration, include="layers.*.up.bias", uniform=True
    )
    assert list(counts(done).values()) == [6, 6]
    assert apart(model, calibration, wanted) < 1e-6
