"""What was measured once is what is measured again, to the last bit; all else is measured anew."""

import copy

import pytest
import torch

from secateur.shrinking import Memory, calibrated, remembering, shrink
from support.fitting import blocks, inputs


@pytest.fixture
def walks(monkeypatch):
    """The walks over a dense model that were made."""
    found, plain = [], calibrated.Measuring

    def counted(*args, **kwargs):
        found.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(calibrated, "Measuring", counted)
    return found


def shrunk(model, share, batches=None, **more):
    batches = inputs() if batches is None else batches
    return shrink(copy.deepcopy(model), batches[0], share, batches=batches, verify=False, **more).model


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("allocate", [None, "uniform"])
def test_copies_of_a_model_are_measured_once_and_come_out_as_if_each_were(walks, allocate):
    model, shares = blocks(3), (0.2, 0.4)
    alone = [shrunk(model, share, allocate=allocate) for share in shares]
    before = len(walks)
    assert before >= 2
    with remembering(Memory()):
        together = [shrunk(model, share, allocate=allocate) for share in shares]
    assert len(walks) - before == before // 2
    assert all(map(same, alone, together))


def test_what_is_tried_and_what_is_not_are_two_things():
    """Where no slopes are known, losses are tried if they are asked for."""
    model, memory = blocks(3), Memory()
    alone = [shrunk(model, 0.3, allocate=allocate) for allocate in ("uniform", None)]
    for order in ((0, 1), (1, 0)):
        with remembering(memory):
            found = {at: shrunk(model, 0.3, allocate=("uniform", None)[at]) for at in order}
        assert all(same(alone[at], each) for at, each in found.items())


@pytest.mark.parametrize("what", ["weights", "batches", "groups"])
def test_whatever_differs_is_measured_anew(walks, what):
    model, other, batches, more = blocks(3), blocks(3), inputs(), {}
    if what == "weights":
        with torch.no_grad():
            next(other.parameters()).view(-1)[0] += 1e-3
    elif what == "batches":
        batches = [each + 1e-3 for each in batches]
    else:
        more = {"exclude": "1.*"}
    with remembering(Memory()):
        shrunk(model, 0.2)
        before = len(walks)
        found = shrunk(other, 0.2, batches, **more)
        assert len(walks) > before
    assert same(found, shrunk(other, 0.2, batches, **more))
