"""Laws of grading: units leave in one order, which is that of one elimination, and what cannot leave says why."""

import copy
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur import shrink
from secateur.coupling import Scope, find_coupling
from secateur.models import InMemory, divergence, parts_of, unexplained
from secateur.shrinking import grading as trying
from secateur.shrinking.grading import SCATTERED, Grading, GroupAblation, counts_at, gradable
from secateur.shrinking.kinds.branches import OutputCosts
from secateur.shrinking.measure import Measuring
from secateur.shrinking.repair import free_in
from secateur.shrinking.request import Request, pruning_target
from support.measured import text, words
from support.unchanged import is_unchanged, state_of


def graded(model, batches, shares):
    coupling = find_coupling(model, batches[0])
    tied, stays, _ = gradable(
        pruning_target(model, Scope.of(coupling), [batches[0]]), Request(round_to=1), parts_of(model), shares
    )
    counts = {g.name: [t.counts(parts)[g.name] for _, parts in counts_at(t, shares)] for t in tied for g in t.groups}
    found = {}
    groups = [group for each in tied for group in each.groups]
    free = free_in(model, parts_of(model))
    job = Grading(coupling, groups, counts, {}, free, lambda group, grades: found.update({group.name: (group, grades)}))
    InMemory(model, batches).walk(job)
    return coupling, found, stays


def test_what_left_at_a_smaller_share_left_at_a_larger_one():
    _, found, _ = graded(words(), text(), (0.2, 0.5, 0.8))
    assert found
    for _, grades in found.values():
        for less, more in itertools.pairwise(grades):
            assert not (more.kept & ~less.kept).any()
            assert less.lost <= more.lost * (1 + 1e-6)
            assert less.whole == more.whole


def test_the_order_is_that_of_measuring():
    model, batches = words(), text()
    coupling, found, _ = graded(model, batches, (0.5,))
    measuring = Measuring(coupling, [group for group, _ in found.values()])
    InMemory(model, batches).walk(measuring)
    scores = measuring.measured.scores
    for group, (grade,) in found.values():
        if group.name in measuring.measured.consumers:
            stay = scores[group.name].argsort(descending=True)[: int(grade.kept.sum())].numpy()
            assert set(np.flatnonzero(grade.kept)) == set(stay.tolist())


def test_the_stream_stays_and_says_why():
    _, found, stays = graded(words(), text(), (0.5,))
    assert stays == {"blocks.0.o.weight": SCATTERED}
    assert "blocks.0.o.weight" not in found


class Normed(nn.Module):
    """A norm by hand over the hidden units, whose mean counts those that left."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.up(x)
        x = x - x.mean(-1, keepdim=True)
        return self.down(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def test_units_that_a_statistic_counts_are_graded():
    torch.manual_seed(0)
    _, found, stays = graded(Normed(), [torch.randn(50, 4)], (0.5, 0.75))
    assert not stays
    _, (less, more) = found["up.weight"]
    assert (int(less.kept.sum()), int(more.kept.sum())) == (6, 3)
    assert less.lost < 1e-6 * less.whole < more.lost < more.whole  # four inputs, of which the units are linear


def test_columns_that_left_are_zeros_and_the_dense_model_stays():
    model = words()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    _, found, _ = graded(model, text(), (0.5,))
    _group, (grade,) = found["blocks.0.up.weight"]
    assert not grade.values["blocks.0.down.weight"][:, torch.from_numpy(~grade.kept)].any()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("shares", [(0.01,), ()])
def test_no_share_that_comes_to_a_unit(shares):
    model, batches = words(), text()
    coupling = find_coupling(model, batches[0])
    tied, stays, _ = gradable(
        pruning_target(model, Scope.of(coupling), [batches[0]]), Request(round_to=1), parts_of(model), shares
    )
    assert not tied
    assert stays["blocks.0.up.weight"] == "it has too few units for any of the shares"


# ---- What the outputs of a model lose by one group alone, tried: where no slopes say what groups are worth. ----


class Layer(nn.Module):
    def __init__(self, width=8, hidden=24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.query, self.key = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.value, self.project = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (
            each(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        return x + self.project(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Pooled(nn.Module):
    """A classifier of all positions together."""

    def __init__(self, *layers, width=8):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(4, width), nn.Sequential(*layers), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean(1))


def texts(count=4, rows=24):
    return [torch.randn(rows, 5, 4) for _ in range(count)]


def both(model, batches):
    """The groups by name, what was measured, and the job that tries."""
    coupling = find_coupling(model, batches[0])
    job = GroupAblation(Measuring(coupling, coupling.groups), free_in(model, parts_of(model)))
    InMemory(model, batches).walk(job)
    return {group.name: group for group in coupling.groups}, job.measuring.measured, job


def test_the_model_is_left_as_it_was():
    model = Pooled(Attention(), Layer())
    state, batches = state_of(model), texts()
    _, measured, job = both(model, batches)
    found = job.tried(model, measured, batches)
    assert is_unchanged(model, state)
    assert found.tried
    assert not measured.tried
    assert found.scores == measured.scores


def test_a_loss_that_was_tried_is_what_the_outputs_lost():
    """The units of a group leave, what multiplies them is repaired, and nothing else changes."""
    model, batches = Pooled(Layer(), Layer()), texts()
    groups, measured, job = both(model, batches)
    found = job.tried(model, measured, batches)
    group = groups["layers.0.up.weight"]
    for grade in job._grades[group.name]:
        other = Pooled(Layer(), Layer())
        other.load_state_dict(model.state_dict() | dict(grade.values))
        with torch.no_grad():
            pairs = [(model(batch), other(batch), None) for batch in batches]
        lost = unexplained(pairs)
        assert found.curves[group.name](int(grade.kept.sum())) == pytest.approx(lost, rel=1e-4)
    assert [int(grade.kept.sum()) for grade in job._grades[group.name]] == [18, 12, 6]


def test_curves_never_rise_with_what_stays():
    model, batches = Pooled(Attention(), Layer()), texts()
    _, measured, job = both(model, batches)
    found = job.tried(model, measured, batches)
    for curve in found.curves.values():
        assert (curve.losses[:-1] >= curve.losses[1:]).all()
        assert curve.losses[-1] == 0


def test_what_the_outputs_do_not_read_leaves_first():
    """Shares of the stream's variance say that both layers are worth the same; the head reads only what one writes."""
    model, batches = Pooled(Layer(), Layer()), texts()
    with torch.no_grad():
        for layer in model.layers:
            layer.norm = nn.Identity()
        model.layers[0].down.weight[4:] = 0
        model.layers[0].down.bias[4:] = 0
        model.layers[1].up.weight[:, :4] = 0
        model.head.weight[:, :4] = 0
    groups, measured, job = both(model, batches)
    found = job.tried(model, measured, batches)
    unread, read = (groups[f"layers.{at}.up.weight"].name for at in (0, 1))
    assert measured.curves[unread](12) > 0
    assert found.curves[unread](12) < 1e-6 < found.curves[read](12)
    done = shrink(model, batches[0], 0.2, batches=batches, include="layers.*.up.bias", round_to=1)
    left = {group.name: int(done.kept[group.name].sum()) for group in done.scope.groups if group.name in done.kept}
    assert left["layers.0.up.weight"] < left["layers.1.up.weight"] == 24


def test_widths_of_queries_and_keys_are_tried():
    """No matrix multiplies them, and they are worth what the scores between them are."""
    model, batches = Pooled(Attention(), Attention()), texts()
    with torch.no_grad():
        for at in (1, 3, 5, 7, 9, 11, 13, 15):  # of these the queries are small, so that their keys count little
            model.layers[0].query.weight[at] *= 1e-4
            model.layers[0].query.bias[at] *= 1e-4
            model.layers[0].key.weight[at] *= 10
    groups, measured, job = both(model, batches)
    group = groups["layers.0.query.weight:2"]
    assert sorted(measured.scores[group.name].argsort()[:4].tolist()) == [1, 3, 5, 7]
    found = job.tried(model, measured, batches)
    assert found.curves[group.name](4) < 1e-6 < found.curves[group.name](2)


def test_a_width_that_several_blocks_share_is_tried_by_a_walk():
    model, batches = Pooled(Layer(), Layer()), texts()
    groups, measured, job = both(model, batches)
    stream = groups["stem.weight"].name
    assert stream not in job._grades
    found = job.tried(model, measured, batches)
    assert 0 < found.curves[stream](6) < found.curves[stream](4) < found.curves[stream](2)


def test_too_few_examples_say_nothing():
    model, batches = Pooled(Layer()), [torch.randn(1, 5, 4) for _ in range(2)]
    _, measured, job = both(model, batches)
    assert job.tried(model, measured, batches) is measured


def test_outputs_that_never_move_say_nothing():
    model, batches = Pooled(Layer(), Layer()), texts()
    with torch.no_grad():
        model.head.weight.zero_()
    _, measured, job = both(model, batches)
    assert job.tried(model, measured, batches) is measured


def test_what_does_not_run_is_not_tried(monkeypatch):
    """A width that the code compares: then it counts as the median of the others."""
    model, batches = Pooled(Layer(), Layer()), texts()
    state = state_of(model)
    groups, measured, job = both(model, batches)

    def fails(*_):
        raise ValueError("no such plan")

    monkeypatch.setattr(trying, "carry_out", fails)
    found = job.tried(model, measured, batches)
    assert is_unchanged(model, state)
    stream = groups["stem.weight"].name
    ratios = [found.curves[stream](count) / measured.curves[stream](count) for count in (2, 4, 6)]
    assert ratios == pytest.approx([ratios[0]] * 3)


def test_slopes_or_an_allocation_ask_for_no_trials(monkeypatch):
    def never(*_, **__):
        raise AssertionError("tried")

    monkeypatch.setattr(trying.GroupAblation, "tried", never)
    batches = texts()
    shrink(Pooled(Layer(), Layer()), batches[0], 0.2, batches=batches, allocate="uniform")
    several = nn.Sequential(nn.Linear(4, 8), Layer(), Layer(), nn.Linear(8, 3))  # an output for each position
    shrink(several, batches[0], 0.2, batches=batches)
    with pytest.raises(AssertionError, match="tried"):
        shrink(Pooled(Layer(), Layer()), batches[0], 0.2, batches=batches)


def test_a_scale_and_a_shift_are_explained_and_noise_is_not():
    before = torch.randn(400, 3)
    assert unexplained([(before, before * torch.tensor([2.0, -1.0, 0.5]) + 3, None)]) == 0
    assert unexplained([(before, torch.randn(400, 3), None)]) == pytest.approx(0.5, abs=0.02)
    halves = [(before[:100], before[:100] ** 3, None), (before[100:], before[100:] ** 3, None)]
    assert unexplained(halves) == pytest.approx(unexplained([(before, before**3, None)]))
    assert unexplained([(before[:3], before[:3], None)]) == math.inf
    mask = torch.arange(20) < 10
    rows = torch.randn(20, 20, 2)
    noisy = torch.where(mask[None, :, None], rows, torch.randn(20, 20, 2))
    assert unexplained([(rows, noisy, mask.expand(20, 20))]) == 0


def test_costs_of_so_many_rows():
    costs = OutputCosts(Pooled(Layer()), texts(count=9, rows=24), enough=100, at_most=9)
    assert [len(batch) for batch, *_ in costs.held] == [24, 24, 24, 24, 4]


class Finding(nn.Module):
    """A detector of vectors: it finds any number of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        found = self.layers(x)
        return found[found[:, 0] > 0]


def test_outputs_of_another_number_are_not_compared():
    torch.manual_seed(0)
    model, batches = Finding(), [torch.randn(40, 6) for _ in range(4)]
    found = shrink(copy.deepcopy(model), batches[0], 0.5, batches=batches).model
    shapes = [(len(each(batch)), 5) for each in (found, model) for batch in batches]
    assert shapes[:4] != shapes[4:]
    assert unexplained([(model(batch), found(batch), None) for batch in batches]) == math.inf
    at = next(at for at in range(4) if shapes[at] != shapes[at + 4])
    with pytest.raises(ValueError, match=re.escape(f"an output is of shape {shapes[at]} and was of shape")):
        divergence(model(batches[at]), found(batches[at]))
