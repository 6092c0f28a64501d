"""Laws of grading: units leave in one order, which is that of one elimination, and what cannot leave says why."""

import itertools

import numpy as np
import pytest
import torch

from secateur.coupling import Scope, find_coupling
from secateur.models import InMemory, parts_of
from secateur.shrinking.grading import SCATTERED, Grading, counts_at, gradable
from secateur.shrinking.measure import Measuring
from secateur.shrinking.repair import free_in
from secateur.shrinking.request import Request, pruning_target
from support.measured import text, words


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
