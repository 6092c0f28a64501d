"""Laws of experts' rows: what a mixture's outputs do when last matrices move is what the rows say, in any precision."""

import copy
from types import SimpleNamespace

import pytest
import torch

import zoo
from secateur.coupling import find_coupling
from secateur.models import prepared
from secateur.shrinking.kinds.routing import output_rows, places_of, rows_of_experts
from support.unchanged import is_unchanged, state_of

SUMS = ["mixtral", "mixture_gpt_oss", "mixture_llama4", "mixture_deepseek_v3", "mixture_qwen3", "mixture_lfm2"]


def seen(name, dtype=torch.float32):
    """A mixture of the zoo, in a model that runs: ``(model, group, path, (args, kwargs))``."""
    model, inputs = zoo.ZOO[name]()
    group = next(each for each in find_coupling(model, inputs).groups if each.chosen)
    model = model.to(dtype).eval()
    found = []
    for path in places_of(model, group):
        given = []
        hook = model.get_submodule(path).register_forward_hook(
            lambda _, args, kwargs, __, given=given: given.append((args, kwargs)), with_kwargs=True
        )
        with prepared(model), torch.no_grad():
            model(**inputs)
        hook.remove()
        found.append((path, given[0]))
    return model, group, found


def rows(model, group, path, given, own=None):
    with prepared(model), torch.no_grad():
        return rows_of_experts(model, group, given, own, path)


def moved(model, path, given, found):
    """By how much the outputs move when the last matrices do, and by how much the rows say."""
    with prepared(model), torch.no_grad():
        other = copy.deepcopy(model)
        module = other.get_submodule(path)
        before = output_rows(module.forward(*given[0], **given[1]), None).double()
        expected, changes = torch.zeros_like(before), {}
        for one in found:
            matrix = one.piece.of(other.get_parameter(one.piece.name))
            if one.piece not in changes:
                changes[one.piece] = torch.randn(matrix.shape, dtype=torch.float32).to(matrix.dtype)
                matrix += changes[one.piece]
            expected.index_add_(0, one.tokens, one.weighted().double() @ changes[one.piece].double().T)
        after = output_rows(module.forward(*given[0], **given[1]), None).double()
    return after - before, expected


@pytest.mark.parametrize("name", SUMS)
def test_outputs_move_as_the_rows_say(name):
    model, group, [(path, given), *_] = seen(name)
    found = rows(model, group, path, given)
    got, expected = moved(model, path, given, found)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_tokens_are_told_exactly(dtype):
    model, group, [(path, given), *_] = seen("mixtral", dtype)
    found = rows(model, group, path, given)
    got, expected = moved(model, path, given, found)
    assert float((got - expected).norm()) < 0.03 * float(expected.norm())
    count = given[0][0].shape[:-1].numel()
    times = torch.cat([one.tokens for one in found]).bincount(minlength=count)
    assert times.tolist() == [2] * count  # so many experts are chosen at a time


def test_padding_has_no_rows_and_tokens_are_numbered_without_it():
    model, group, [(path, given), *_] = seen("mixtral")
    shape = given[0][0].shape[:-1]
    own = torch.arange(shape.numel()).reshape(shape) % 3 != 0
    every, some = rows(model, group, path, given), rows(model, group, path, given, own)
    number = own.flatten().cumsum(0) - 1
    for one, other in zip(every, some, strict=True):
        keep = own.flatten()[one.tokens]
        assert torch.equal(number[one.tokens[keep]], other.tokens)
        assert torch.equal(one.features[keep], other.features)


def test_a_part_of_the_mixture_is_the_sum_where_something_comes_behind_it():
    model, group, places = seen("mixture_gemma4")
    assert len(places) == 2
    assert [rows(model, group, path, given) is None for path, given in places] == [True, False]
    got, expected = moved(model, *places[1], rows(model, group, *places[1]))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_what_mixes_outputs_is_told_and_nothing_changes():
    model, inputs = zoo.ZOO["mixture_in_turn"]()
    group = next(each for each in find_coupling(model, inputs).groups if each.chosen)
    state = state_of(model)
    path = places_of(model, group)[0]
    with torch.no_grad():
        assert rows_of_experts(model, group, ((inputs,), {}), None, path) is None
    assert is_unchanged(model, state)


def test_a_few_columns_tell_many_tokens():
    """The number of a token has more digits than the outputs columns."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Parameter(torch.randn(3, 2))
            self.up = torch.nn.Parameter(torch.randn(3, 5, 2))
            self.down = torch.nn.Parameter(torch.randn(3, 2, 5))

        def forward(self, x):
            scores, chosen = (x @ self.router.T).softmax(-1).topk(1)
            out = torch.zeros_like(x)
            for at in range(len(self.up)):
                here = torch.where(chosen[:, 0] == at)[0]
                hidden = torch.relu(torch.nn.functional.linear(x[here], self.up[at]))
                gives = torch.nn.functional.linear(hidden, self.down[at])
                out = out.index_add(0, here, gives * scores[here])
            return out

    model, x = Mixture(), torch.randn(40, 2)
    group = SimpleNamespace(name="router", members=[("router", 0), ("up", 0), ("down", 0)])
    found = rows_of_experts(model, group, ((x,), {}), None, "")
    told = torch.cat([one.tokens for one in found])
    assert told.unique().numel() == told.numel() > 20
    got, expected = moved(model, "", ((x,), {}), found)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
