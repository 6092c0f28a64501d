"""Laws of what follows: nearer to what is aimed at or as it was, and what is given is what it is."""

import pytest
import torch

from secateur.models import InMemory
from secateur.shrinking.repair import StreamCorrection
from support.deep import batches, deep


def walked(model, given, moved, **options):
    held = batches()
    InMemory(model, held).walk(StreamCorrection(given, moved, **options))
    return torch.cat([model(each) for each in held]).detach()


def dense_outputs():
    model = deep()
    return torch.cat([model(each) for each in batches()]).detach()


def zeros(model, at):
    return {f"{at}.down.{name}": torch.zeros_like(each) for name, each in model[at].down.named_parameters()}


def error_at_the_end(stream, dense):
    return float((stream - dense).norm() / dense.norm())


@pytest.mark.parametrize("at", [1, 2])
def test_what_follows_comes_nearer(at):
    dense, model = dense_outputs(), deep()
    given = zeros(model, at)
    alone = walked(model, given, [])
    assert not model[at].down.weight.any()
    assert not model[at].down.bias.any()
    model = deep()
    moved = [f"{behind}.down.weight" for behind in range(at + 1, 6)]
    followed = walked(model, given, moved)
    assert error_at_the_end(followed, dense) < error_at_the_end(alone, dense)
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, deep().get_parameter(name))}
    assert changed <= {*given, *moved}


def test_where_nothing_leaves_nothing_is_moved():
    model, before = deep(), deep()
    walked(model, {"2.down.weight": before[2].down.weight.detach()}, ["3.down.weight", "4.down.weight"])
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))


def test_nothing_of_the_way_is_nothing():
    model, given = deep(), zeros(deep(), 1)
    walked(model, given, ["3.down.weight"], aim=0.0)
    assert torch.equal(model[3].down.weight, deep()[3].down.weight)


def test_what_is_given_may_be_no_matrix():
    model = deep()
    given = zeros(model, 2) | {"3.norm.weight": torch.full((6,), 2.0), "3.norm.bias": torch.ones(6)}
    walked(model, given, ["3.down.weight"])
    assert model[3].norm.weight.tolist() == [2.0] * 6
    assert model[3].norm.bias.tolist() == [1.0] * 6
