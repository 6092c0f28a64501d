"""What is taken of finished models: never worse than a fixed allocation, and another one only beyond the noise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.search.costs import Judged, taken_of

losses = st.one_of(st.floats(0, 1e6), st.just(math.inf))
rows = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=4), min_size=1, max_size=4)


def judged(values, shift=0.0):
    return Judged.by([torch.tensor(each, dtype=torch.float64) + shift for each in values])


@given(st.dictionaries(st.sampled_from("abcdef"), losses, min_size=1), st.sets(st.sampled_from("abcdef")))
def test_nothing_fixed_loses_less_than_what_is_taken(found, fixed):
    named = {name: Judged(each) for name, each in found.items()}
    taken = taken_of(named, fixed)
    assert all(found[taken] <= found[name] for name in named if name in fixed)
    if math.isfinite(found[taken]):
        assert found[taken] == min(found.values())  # of numbers of which no error is known, the least


@given(rows, st.floats(-50, 50))
def test_what_is_better_everywhere_alike_is_better(values, shift):
    one, other = judged(values, 50), judged(values, 50 + shift)
    assert one.beats(other) == (other.loss > one.loss + 1e-9) or abs(shift) < 1e-9
    assert not (one.beats(other) and other.beats(one))


@given(rows)
def test_it_beats_not_itself(values):
    assert not judged(values).beats(judged(values))


def test_the_noise_is_of_rows_or_of_batches_whichever_is_more():
    draw = torch.Generator().manual_seed(0)
    base = torch.rand(64, generator=draw)
    alone = base + 0.05 * torch.randn(64, generator=draw)  # errors of rows by themselves
    error = float((alone - base).double().std()) / 8
    together = base + torch.tensor([0.05, -0.05, 0.05, -0.05]).repeat_interleave(16)  # of whole batches
    one = Judged.by(base.split(64))
    for other, noise in ((alone, error), (together, 0.05 / 3**0.5)):
        for factor, beaten in ((0.9, False), (1.1, True)):
            moved = other - other.mean() + base.mean() + factor * noise
            size = 64 if other is alone else 16
            assert Judged.by(base.split(size)).beats(Judged.by(moved.split(size))) == beaten
    assert one.loss == pytest.approx(float(base.mean()))


def test_sets_count_alike_however_many_rows_they_have():
    held, seen = [torch.tensor([4.0])], [torch.tensor([1.0, 3.0]), torch.tensor([2.0])]
    assert Judged.by(held, seen).loss == 3.0


def test_within_the_noise_the_fixed_allocation_is_taken_and_beyond_it_the_other():
    values = torch.tensor([1.0, 5.0, 2.0, 8.0])
    uniform = Judged.by([values])
    lucky = Judged.by([values + torch.tensor([-3.0, 2.9, -0.1, 0.1])])
    better = Judged.by([values - 0.5])
    assert lucky.loss < uniform.loss
    assert taken_of({"uniform": uniform, "step 1": lucky}, {"uniform"}) == "uniform"
    assert taken_of({"uniform": uniform, "step 1": better}, {"uniform"}) == "step 1"
    assert taken_of({"step 1": lucky, "step 2": better}, {"uniform"}) == "step 2"  # none was finished


def test_what_is_no_number_is_the_worst_there_is():
    broken = Judged.by([torch.tensor([1.0, math.nan])])
    assert broken.loss == math.inf
    assert taken_of({"uniform": broken, "searched": Judged(3.0)}, {"uniform"}) == "searched"
    assert taken_of({"uniform": Judged(3.0), "searched": broken}, {"uniform"}) == "uniform"
    assert Judged.by([torch.tensor([-1e-12])]).loss == 0.0  # rounding
