"""Which call took what, in which modules; sums are numbered alike wherever their terms become zero."""

import pytest
import torch
from torch import nn

from secateur.coupling import Axis, SameDraws
from secateur.coupling.flow import Flow, Strange
from secateur.coupling.trace import Trace, Unseen


class Model(nn.Module):
    """A branch beside a stream; something that is computed and not returned; a write into a view."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.lost = nn.Linear(4, 2)

    def forward(self, x, flag="word"):
        self.lost(x).exp()
        out = x + self.branch(x)
        out.view(-1).mul_(2)
        return {"out": out, "flag": flag}


def watched(model, *inputs):
    trace = Trace()
    for tensor in (*model.parameters(), *inputs):
        trace.declare(tensor, [Axis(size) for size in tensor.shape])
    flow = Flow(model, trace, (0, False), inputs)
    with torch.no_grad(), Unseen(trace), trace, flow:
        out = model(*inputs)
    flow.end([each for each in out.values() if isinstance(each, torch.Tensor)])
    return flow, out


def test_a_write_makes_other_values_of_all_that_share_the_memory():
    flow, _ = watched(Model(), torch.randn(3, 4))
    (written,) = [call for call in flow.calls if call.name == "mul"]
    (total,) = [call for call in flow.calls if call.name == "add"]
    (view,) = [call for call in flow.calls if call.name == "view"]
    assert written.mutated == set(view.outputs)
    assert {*view.outputs, *total.outputs} <= {value for _, value in written.inputs}
    assert len(written.outputs) == 2
    assert any(flow.values[each].escapes for each in written.outputs)
    assert not any(flow.values[each].escapes for each in total.outputs)


def test_what_a_module_returns_is_told_within_plain_containers():
    flow, out = watched(Model(), torch.randn(3, 4))
    (visit,) = [flow.visits[at] for at in flow.visits_of[""]]
    assert visit.returns.keys() == {"out", "flag"}
    assert visit.returns["flag"] == "word"
    value, dims = visit.returns["out"]
    assert flow.values[value].escapes
    assert len(dims) == out["out"].dim()

    class Odd(nn.Module):
        def forward(self, x):
            return {"odd": {1: x}, "out": x}

    flow, _ = watched(Odd(), torch.randn(2))
    assert flow.visits[flow.visits_of[""][0]].returns["odd"] is Strange


def test_hooks_are_gone_after_a_pass_that_fails():
    model = Model()
    trace = Trace()
    with pytest.raises(RuntimeError), trace, Flow(model, trace, (0, False), ()):
        model(torch.randn(3, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_draws_do_not_depend_on_what_is_not_there():
    torch.manual_seed(5)
    with SameDraws():
        first = torch.rand(3)
        torch.rand(9)
        assert torch.equal(torch.rand(3), first)
    with SameDraws(zeroed=[(1, 1)]):
        x = torch.ones(2)
        assert (x + x).sum() == 4
        assert (x + 2 * x).sum() == 2
        torch.arange(2) + 1  # sums of integers are not counted


@pytest.mark.parametrize("form", ["add", "iadd", "torch.add", "sub", "by name"])
def test_a_term_that_is_zero_is_zero_in_every_form_of_a_sum(form):
    def summed(a, b):
        if form == "iadd":
            a += b
            return a
        if form == "by name":
            return torch.add(input=a, other=b)
        return {"add": lambda: a + b, "torch.add": lambda: torch.add(a, b, alpha=2), "sub": lambda: a - b}[form]()

    a, b = torch.randn(3), torch.randn(3)
    for position, terms in ((0, (torch.zeros(3), b)), (1, (a, torch.zeros(3)))):
        with SameDraws(zeroed=[(0, position)]) as mode:
            found = summed(a.clone(), b.clone())
        assert mode.sums == 1
        torch.testing.assert_close(found, summed(*(term.clone() for term in terms)))


def test_sums_are_seen_with_both_sides_and_their_result():
    a, b, told = torch.randn(3), torch.randn(3), []

    def seen(number, sides):
        told.append((number, [each.clone() for each in sides]))
        return lambda out: told.append((number, out.clone()))

    with SameDraws(seen=seen):
        first = a + b
        second = first - b
    assert [number for number, _ in told] == [0, 0, 1, 1]
    assert torch.equal(told[0][1][1], b)
    assert torch.equal(told[1][1], first)
    assert torch.equal(told[3][1], second)
