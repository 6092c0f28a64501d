"""What the trace does where there is no rule, or where rules do not reach: it freezes, and says why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.coupling import Axis, concatenated, leaves, rule
from secateur.coupling.operations import OPERATIONS
from secateur.coupling.trace import Trace
from support.traced import arguments, traced


def test_a_function_without_a_rule_freezes_what_it_touches_and_says_so():
    tensors = arguments((4, 4))
    trace, _, free = traced(torch.linalg.inv, tensors)
    assert not free
    assert any(
        "inv has no rule" in reason for dim in trace.dims(tensors[0]) for axis in leaves(dim) for reason in axis.reasons
    )


def test_a_rule_that_does_not_know_a_form_of_the_call_freezes_too(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "sinc", OPERATIONS["sinc"])

    @rule("sinc")
    def _(call):
        raise LookupError

    trace, _, free = traced(torch.sinc, arguments((3, 4)))
    assert not free
    assert trace.unknown == {"this form of sinc": 1}


def test_a_scripted_function_freezes_what_it_touches():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(6, 4))
    (x,) = arguments((3, 6))
    _, _, free = traced(scripted, [x])
    assert not free


def test_functions_inside_vmap_freeze_the_tensors_outside():
    _, _, free = traced(lambda a: torch.vmap(torch.sin)(a), arguments((3, 4)))
    assert not free


def test_a_function_of_ones_own_is_followed():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    _, _, free = traced(Twice.apply, arguments((3, 4)))
    assert len(free) == 2


def test_a_rule_of_ones_own_is_a_few_lines(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "sinc", OPERATIONS["sinc"])

    @rule("sinc")
    def _(call):
        rows, columns = call.dims(call.args[0])
        call.freeze(rows, "an example")
        call.returns([rows, columns])

    _, _, free = traced(torch.sinc, arguments((3, 4)))
    assert [axis.size for axis in free] == [4]


def test_a_sum_of_segments_is_followed_through_a_layer():
    a, b = Axis(2), Axis(3)
    trace = Trace()
    x, w = arguments((4, 5), (6, 5))
    trace.declare(x, [Axis(4), concatenated([a, b])])
    trace.declare(w, [Axis(6), Axis(5)])
    with trace:
        F.linear(x, w)
    assert list(leaves(trace.dims(w)[1])) == [a, b]
