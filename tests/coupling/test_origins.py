"""What a tensor is proportional to: rows found backwards scale it, and nothing is claimed that does not hold."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from secateur.coupling import Axis
from secateur.coupling.operations import overlap, rows_of, same
from secateur.coupling.trace import Trace
from secateur.support import private

X = torch.randn(2, 3, 6)


def rows_and_output(build, *parameters):
    """The rows of what a function of parameters makes, while it is watched."""
    with torch.no_grad(), Trace() as trace:
        for parameter in parameters:
            trace.declare(parameter, [Axis(size) for size in parameter.shape])
        out = build()
    return rows_of(out, trace.origins), out, trace


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def rotated(q):
    first, second = q.chunk(2, -1)
    return q * torch.arange(4.0).cos() + torch.cat((-second, first), -1) * torch.arange(4.0).sin()


W, B, FUSED, COLUMNS, GAIN = weight(8, 6), weight(8), weight(24, 6), weight(6, 8), weight(8)
GATE = weight(8, 6)
KERNEL = weight(8, 6, 1)
BUILDS = {
    "linear": lambda: functional.linear(X, W, B),
    "heads": lambda: functional.linear(X, W, B).view(2, 3, 2, 4).transpose(1, 2).contiguous(),
    "one of three parts": lambda: functional.linear(X, FUSED).chunk(3, -1)[1],
    "a part of the weight": lambda: functional.linear(X, FUSED.split(8)[2]),
    "three, unbound": lambda: functional.linear(X, FUSED).reshape(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)[0],
    "columns": lambda: torch.addmm(B, X.view(-1, 6), COLUMNS).view(2, 3, 8),
    "transposed": lambda: X @ W.t(),
    "turned": lambda: rotated(functional.linear(X, W, B).view(2, 3, 2, 4)),
    "normalized": lambda: functional.rms_norm(functional.linear(X, W, B), (8,), GAIN),
    "normalized, with bias": lambda: functional.layer_norm(functional.linear(X, W), (8,), GAIN, B),
    "convolved": lambda: functional.conv1d(X.transpose(1, 2), KERNEL, B).flatten(0, 1),
    "by a number": lambda: functional.linear(X, W).mul(0.5).to(torch.float64) / 3,
    "by a gate": lambda: functional.linear(X, W) * functional.linear(X, GATE).sigmoid(),
}


@pytest.mark.parametrize("name", BUILDS)
def test_rows_scale_the_tensor(name):
    parameters = [W, B, FUSED, COLUMNS, GAIN, KERNEL, GATE]
    rows, out, _ = rows_and_output(BUILDS[name], *parameters)
    assert rows
    by_id = {id(each): each for each in parameters}
    saved = {key: by_id[key].data for key, _ in rows}
    try:
        for (key, at), indices in rows.items():
            by_id[key].data = saved[key].clone()
            by_id[key].data.index_copy_(at, torch.from_numpy(indices), 2 * saved[key][(slice(None),) * at + (indices,)])
        with torch.no_grad():
            torch.testing.assert_close(BUILDS[name](), 2 * out)
    finally:
        for key, value in saved.items():
            by_id[key].data = value


NOTHING = {
    "a number added": lambda: functional.linear(X, W) + 1,
    "an input added": lambda: functional.linear(X, W) + X[..., :1],
    "a square": lambda: functional.linear(X, W).mul(functional.linear(X, W)),
    "a direction": lambda: functional.normalize(functional.linear(X, W), dim=-1),
    "by its own gate": lambda: (lambda q: q * q.sigmoid())(functional.linear(X, W)),
    "bent": lambda: functional.linear(X, W).relu(),
    "divided by": lambda: torch.div(torch.ones(1), functional.linear(X, W)),
    "an input": lambda: X * 2,
    "changed in place, and viewed": lambda: functional.linear(X, W).mul_(2).view(-1),
    "changed in place": lambda: functional.linear(X, W).add_(1),
    "written into": lambda: (lambda q: (q.__setitem__((0, 0), 1.0), q.view(-1))[1])(functional.linear(X, W)),
    "places on meta": lambda: functional.linear(X, W).to("meta")[..., torch.arange(4, device="meta")],
}


@pytest.mark.parametrize("name", NOTHING)
def test_proportional_to_nothing(name):
    assert rows_and_output(NOTHING[name], W)[0] is None


@pytest.mark.parametrize("fakes", [False, True])
def test_weights_without_values_have_rows_too(fakes):
    weights = nn.Parameter(torch.empty(8, 6, device="meta"))
    with private.fake_values() if fakes else contextlib.nullcontext():
        rows, *_ = rows_and_output(lambda: functional.linear(X.to("meta"), weights).view(2, 3, 2, 4)[..., 2:], weights)
    assert rows[id(weights), 0].tolist() == [2, 3, 6, 7]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_parts_share_the_rows(sizes, data):
    """The parts of a split have disjoint rows, which together are all."""
    fused = weight(sum(sizes), 6)
    at = data.draw(st.integers(0, len(sizes) - 1))
    found = []
    for number in range(len(sizes)):
        part, _, _ = rows_and_output(lambda number=number: functional.linear(X, fused).split(sizes, -1)[number], fused)
        found.append(part)
    assert np.concatenate([each[id(fused), 0] for each in found]).tolist() == list(range(sum(sizes)))
    assert overlap(found[at], found[at])
    assert same(found[at], found[at])
    assert not any(overlap(found[at], other) for number, other in enumerate(found) if number != at)
    assert not any(same(found[at], other) for number, other in enumerate(found) if number != at)
