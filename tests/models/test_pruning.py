"""`oneshot`: a block is pruned by what reaches it from the pruned blocks before it, all its matrices at once."""

import copy

import pytest
import torch
from torch import nn

from secateur import Rows, criteria
from secateur.models import oneshot
from secateur.solvers import from_criterion
from secateur.support import to_int8
from support.stacks import MAGNITUDE, WANDA, data, stack


def test_how_samples_are_batched_changes_no_mask():
    one, other = stack(), stack()
    oneshot(one, data(), 0.5, solver=WANDA)
    oneshot(other, [torch.cat(data()[:3]), data()[3]], 0.5, solver=WANDA)
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(weight, other.state_dict()[name])
        assert torch.equal(weight == 0, other.state_dict()[name] == 0)


@pytest.mark.parametrize("solver", ["sparsegpt", "magnitude"])
def test_what_is_kept_is_rounded_and_made_up_for(solver):
    model = stack(width=8)
    done = oneshot(model, data(), 0.5, solver=solver, values="int8")
    assert all(0.5 <= layer.sparsity < 0.6 for layer in done.layers)
    for layer in model.layers:
        for weight in (layer.up.weight, layer.down.weight):
            numbers, scales = to_int8(weight)
            assert torch.equal(numbers * scales[:, None], weight)


def test_scores_that_compare_within_an_output_compete_there_unless_told_otherwise():
    model = stack()
    oneshot(model, data(), 0.5, solver=WANDA)
    for layer in model.layers:
        assert (layer.up.weight.eq(0).sum(1) == 4).all()
        assert (layer.down.weight.eq(0).sum(1) == 6).all()
    model = stack()
    oneshot(model, data(), 0.5, solver=MAGNITUDE)
    assert any((layer.up.weight.eq(0).sum(1) != 4).any() for layer in model.layers)
    one, other = stack(), stack()
    oneshot(one, data(), 0.5, solver=MAGNITUDE, pattern="rows")
    oneshot(other, data(), 0.5, solver=MAGNITUDE, pattern=Rows())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_each_layer_is_told_when_it_is_solved_in_the_order_of_the_model():
    told = []
    done = oneshot(stack(), data(), 0.5, on_layer=told.append)
    assert [layer.name for layer in told] == [
        f"layers.{at}.{name}.weight" for at in range(3) for name in ("up", "down")
    ]
    assert list(done.layers) == told


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"solver": from_criterion(criteria.snip)}, TypeError, "asks for grad; a walk over blocks gathers gram"),
        ({"solver": "magnet"}, ValueError, "no solver is called 'magnet'"),
        ({"values": "int4"}, ValueError, "values is 'int8' or None, not 'int4'"),
        ({"pattern": "diagonal"}, ValueError, "no pattern is called 'diagonal'"),
        ({"allocate": "fair"}, ValueError, "no allocation is called 'fair'"),
        ({"model": "nowhere"}, ValueError, r"nowhere is a directory, which is not changed; .* out="),
    ],
)
def test_what_is_wrong_at_the_door_changes_nothing(keywords, kind, message):
    model = keywords.pop("model", None) or stack()
    before = copy.deepcopy(model)
    with pytest.raises(kind, match=message):
        oneshot(model, data(), 0.5, **keywords)
    if isinstance(model, nn.Module):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))
