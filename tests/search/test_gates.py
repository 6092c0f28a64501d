"""Gates between levels: where the search of `fit` begins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.checkpoints import verify_checkpoint
from secateur.models import computing_with, distance
from secateur.search import choosing, fit, score
from secateur.search.search import Gate, descended
from support.families import make
from support.fitting import blocks, inputs, parameters
from support.unchanged import is_unchanged, state_of

SHARES = (0.2, 0.4, 0.6, 0.8)


@pytest.fixture
def begun(monkeypatch):
    """What each search began with, and what may be spent: ``[(the search, {name: choice}, limits)]``."""
    found, starts = [], choosing.LevelSearch._starts

    def noted(self, limits):
        found.append((self, dict(starts(self, limits)), limits))
        return found[-1][1]

    monkeypatch.setattr(choosing.LevelSearch, "_starts", noted)
    return found


# ---- how gates move -------------------------------------------------------------------------------------------------


def amounts(saved, gates):
    return np.array(
        [its[one.low] + one.share * (its[one.high] - its[one.low]) for its, one in zip(saved, gates, strict=True)]
    )


def along(saved, slope):
    """Slopes of each gate by the slope along what its class saves."""

    def slopes(gates, _step):
        wide = [its[one.high] - its[one.low] for its, one in zip(saved, gates, strict=True)]
        return [float(each) * width for each, width in zip(slope(amounts(saved, gates)), wide, strict=True)]

    return slopes


ladders = st.lists(st.floats(0.01, 2), min_size=1, max_size=5).map(lambda steps: [0.0, *np.cumsum(steps).tolist()])


@given(st.lists(ladders, min_size=1, max_size=5), st.data())
@settings(max_examples=50, deadline=None)
def test_what_is_saved_in_all_stays(saved, data):
    start = tuple(data.draw(st.integers(0, len(its) - 1)) for its in saved)
    slope = data.draw(st.lists(st.floats(-5, 5), min_size=len(saved), max_size=len(saved)))
    seen = []

    def slopes(gates, step):
        seen.append(gates)
        return along(saved, lambda _: slope)(gates, step)

    ends = descended(saved, start, slopes, steps=12)
    much = sum(its[at] for its, at in zip(saved, start, strict=True))
    assert sum(ends) == pytest.approx(much, abs=1e-9)
    assert all(-1e-9 <= end <= its[-1] + 1e-9 for end, its in zip(ends, saved, strict=True))
    assert all(0 <= one.share <= 1 and one.low <= one.high for gates in seen for one in gates)
    assert all(sum(amounts(saved, gates)) == pytest.approx(much, abs=1e-9) for gates in seen)


@given(st.lists(st.floats(0.3, 3), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_the_least_of_a_sum_of_squares_is_found(worth):
    """``Σ worth x²`` with a given sum is least at ``x ~ 1 / worth``."""
    saved = [[0.0, 1.0, 2.0, 3.0, 4.0]] * len(worth)
    ends = np.array(descended(saved, (2,) * len(worth), along(saved, lambda x: 2 * np.array(worth) * x)))
    least = np.minimum(2 * len(worth) / np.array(worth) / sum(1 / np.array(worth)), 4.0)
    if least.max() < 4:
        assert ends == pytest.approx(least, abs=0.15)


def test_what_counts_together_is_found():
    """``(a - b)² + c²``: what each loses alone says that c leaves like the others."""
    saved = [[0.0, 0.5, 1.0]] * 3
    ends = descended(
        saved, (1, 1, 1), along(saved, lambda x: [2 * (x[0] - x[1]), 2 * (x[1] - x[0]), 2 * x[2]]), steps=200
    )
    assert ends == pytest.approx([0.75, 0.75, 0.0], abs=0.05)


def test_nothing_moves_without_a_slope():
    assert descended([[0.0, 1.0], [0.0, 1.0]], (1, 0), lambda _gates, _step: [0.0, 0.0]) == pytest.approx([1.0, 0.0])


def test_a_level_that_saves_no_more_than_one_before_is_left_out():
    seen = []

    def slopes(gates, _step):
        seen.extend(gates)
        return [0.0] * len(gates)

    ends = descended([[0.0, 2.0, 1.0, 2.0, 3.0], [0.0, 0.0], [0.0, 1.0]], (4, 1, 0), slopes, steps=1)
    assert seen == [Gate(1, 4, 1.0), Gate(0, 0, 0.0), Gate(0, 1, 0.0)]
    assert ends == pytest.approx([3.0, 0.0, 0.0])


# ---- what they move on ----------------------------------------------------------------------------------------------


def convolutions():
    torch.manual_seed(2)
    made = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3))
    return made.eval(), [torch.randn(8, 2, 9, 9) for _ in range(4)]


@pytest.mark.parametrize("of", [lambda: (blocks(3), inputs()), convolutions], ids=["blocks", "convolutions"])
def test_slopes_are_those_of_the_loss_between_two_levels(of, monkeypatch):
    """Beside differences, in float64, where units and entries may leave; channels of convolutions share tensors."""
    model, batches = of()
    model, batches = model.double(), [each.double() for each in batches]
    checked = []

    def compared(saved, start, slopes):
        search, dense = slopes.search, {name: each.clone() for name, each in slopes.dense.items()}
        gates = [Gate(at % 2, at % 2 + 1, 0.37) for at in range(len(saved))]

        def lost(at, share):
            new = {name: each.clone() for name, each in dense.items()}
            for number, gate in enumerate(gates):
                much = share if number == at else gate.share
                for level, part in ((gate.low, 1 - much), (gate.high, much)):
                    for name, value in search.levels.weights(search.inner, search.one(number, level)).items():
                        new[name] += part * (value - dense[name])
            with torch.no_grad(), computing_with(search.inner, new):
                return float(search.measured.rows_lost(slopes.order[0]).mean())

        for at, (gate, slope) in enumerate(zip(gates, slopes(gates, 0), strict=True)):
            more, less = lost(at, gate.share + 1e-4), lost(at, gate.share - 1e-4)
            assert slope == pytest.approx((more - less) / 2e-4, rel=1e-4, abs=1e-9)
        assert all(set(its) == {gate.low, gate.high} for its, gate in zip(slopes.known, gates, strict=True))
        checked.append(len(gates))
        return descended(saved, start, slopes, steps=2)

    monkeypatch.setattr(choosing, "descended", compared)
    fit(model, batches, budget={"params": 0.7}, shares=SHARES, over=("shrink", "oneshot"), finals=1)
    assert checked[0] > 3


# ---- what fit makes of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"budget": {"params": 0.6}, "finals": 3},
        {"budget": {"macs": 0.7, "bytes": 0.65}, "uniform": True, "over": ("shrink", "oneshot")},
        {"budget": {"params": 0.7}, "over": ("shrink", "oneshot")},
        {"budget": {"params": 0.5}, "over": "oneshot"},
        {"budget": {"params": 0.8}, "over": "oneshot", "pattern": "2:4"},
        {"keep": 0.9},
    ],
    ids=["params", "two and uniform", "both", "zeros", "pattern", "keep"],
)
def test_the_search_begins_there_too_within_the_budget(asked, begun):
    model = blocks(3, width=8, hidden=16)
    fit(model, inputs(width=8), **{"shares": SHARES, "finals": 1} | asked)
    assert begun
    for search, starts, limits in begun:
        assert search.space.fits(starts["gates"], limits)


def test_a_latency_by_prices_is_held(begun):
    """By prices of operations, so that nothing is timed."""

    def took(operation, shapes):
        return float(shapes[1][0] * shapes[1][1]) if operation == "linear" else 1.0

    done = fit(blocks(3), inputs(), budget={"latency": 0.6}, runtime=took, shares=SHARES, finals=1)
    assert "gates" in done.candidates
    assert done.loss <= done.candidates["gates"]
    assert "gates" in str(done)
    assert done.got["latency"] <= begun[-1][2]["latency"] * 1.001


def test_the_callers_mode_and_the_models_do_not_matter():
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        model = blocks(2)
        model[0].up.weight.requires_grad_(False)
        with mode():
            found.append(fit(model.train(), inputs(), budget={"params": 0.6}, shares=SHARES, finals=1).candidates)
        assert model.training
        assert [each.requires_grad for each in model.parameters()] == [False] + 7 * [True]
        assert all(each.grad is None for each in model.parameters())
    assert found[0] == found[1] == found[2]
    assert "gates" in found[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_in_other_dtypes(dtype):
    model, batches = blocks(3).to(dtype), [each.to(dtype) for each in inputs()]
    done = fit(model, batches, budget={"params": 0.6}, shares=SHARES, finals=1)
    assert done.loss <= done.candidates["gates"]
    assert {each.dtype for each in model.parameters()} == {dtype}


@pytest.mark.parametrize("numbers", [1, 40, 10**6])
def test_where_few_of_the_logits_are_held_other_batches_hold_fewer(numbers, monkeypatch):
    """Three batches that levels are made of share the numbers that may be held, as the one does that is held back."""
    monkeypatch.setattr(score, "_NUMBERS", numbers)
    done = fit(blocks(3), inputs(), budget={"params": 0.5}, score="kl", shares=SHARES, finals=1)
    assert done.loss <= done.candidates["gates"]


def test_without_slopes_the_search_begins_without_them():
    model, how = blocks(2), {"forward": lambda model, batch: model(batch).detach(), "example_inputs": inputs()[0]}
    done = fit(model, inputs(), budget={"params": 0.6}, shares=SHARES, finals=1, **how)
    assert "gates" not in done.candidates
    assert parameters(model) <= 0.6 * done.dense["params"]


def test_texts_without_a_share_do_not_count(monkeypatch):
    """Of four batches a text, three are seen and one is held back; two texts have a share to be kept."""
    orders = []

    def noted(saved, start, slopes):
        orders.append((len(slopes.measured.held), {*slopes.order}, len(slopes.search.measured.held)))
        return descended(saved, start, slopes, steps=1)

    monkeypatch.setattr(choosing, "descended", noted)
    texts = {name: inputs() for name in ("other", "mine", "theirs")}
    fit(blocks(3), texts, keep={"mine": 0.5, "theirs": 0.4}, score="change", shares=SHARES, finals=1)
    assert orders
    assert all(each == (12, {1, 2, *range(6, 12)}, 3) for each in orders)


def test_where_one_class_alone_can_save_nothing_moves(monkeypatch):
    monkeypatch.setattr(choosing, "descended", None)
    done = fit(blocks(2), inputs(), budget={"params": 0.6}, shares=SHARES, finals=1, uniform=True)
    assert "gates" not in done.candidates


def test_one_seed_is_one_result():
    done = [fit(blocks(3), inputs(), budget={"params": 0.5}, shares=SHARES, finals=1, seed=7) for _ in range(2)]
    assert done[0].candidates == done[1].candidates
    assert all(map(torch.equal, done[0].model.parameters(), done[1].model.parameters()))


def test_a_failure_while_they_move_changes_nothing(monkeypatch):
    def failing(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing._Slopes, "__call__", failing)
    model = blocks(2)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        fit(model, inputs(), budget={"params": 0.6}, shares=SHARES, finals=1)
    assert is_unchanged(model, before)


def test_blocks_are_computed_again_where_a_backward_pass_would_hold_too_much(monkeypatch):
    found = []
    for room in (1 << 31, 0):
        monkeypatch.setattr(distance, "ROOM", room)
        found.append(fit(blocks(3), inputs(), budget={"params": 0.5}, shares=SHARES, finals=1).candidates["gates"])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.long
def test_a_directory_begins_there(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    tokens = [torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(at)) for at in range(4)]
    how = {"budget": {"params": 0.8}, "shares": (0.25, 0.5), "finals": 2}
    done = fit(tmp_path / "dense", tokens, out=tmp_path / "out", **how)
    assert "gates" in done.candidates
    assert done.got["params"] <= 0.8 * done.dense["params"]
    assert verify_checkpoint(tmp_path / "out", tmp_path / "dense").ok
