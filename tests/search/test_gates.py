"""Gates of `fit`: where they are asked for the search begins with their allocation, too, and it is a candidate."""

import pytest
import torch

from secateur.checkpoints import verify_checkpoint
from secateur.search import choosing, fit, fitting
from secateur.search.costs import Judged, holds
from secateur.shrinking import calibrated, gates
from support.families import make
from support.fitting import blocks, inputs, parameters, widths
from support.measured import text, words
from support.unchanged import is_unchanged, state_of

SHARES = (0.2, 0.4, 0.6, 0.8)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(gates, "STEPS", 30)


@pytest.fixture
def learnt(monkeypatch):
    """How often gates are learnt."""
    times = []

    def counted(*args):
        times.append(len(args))
        return gates.learnt(*args)

    monkeypatch.setattr(calibrated, "learnt", counted)
    return times


@pytest.fixture
def begun(monkeypatch):
    """What each search began with, and what may be spent: ``[(the search, {name: choice}, limits)]``."""
    found, starts = [], choosing.LevelSearch._starts

    def noted(self, limits):
        found.append((self, starts(self, limits), limits))
        return found[-1][1]

    monkeypatch.setattr(choosing.LevelSearch, "_starts", noted)
    return found


def cancelling():
    """The last block takes away what the first gives, and the one between is for itself: each counts alone, and without
    both of the others nothing is missed."""
    model, draw = blocks(3, width=8, hidden=16), torch.Generator().manual_seed(5)
    up, down = torch.randn(16, 3, generator=draw), torch.randn(3, 16, generator=draw)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
        for block, sign in ((model[0], 1), (model[2], -1)):
            block.up.weight[:, :3], block.down.weight[3:6] = up, sign * 0.375 * down
        model[1].up.weight[:, :3] = torch.randn(16, 3, generator=draw)
        model[1].down.weight[6:] = torch.randn(2, 16, generator=draw) / 2
    return model


@pytest.mark.long
def test_what_leaves_together_is_found(monkeypatch, learnt):
    """What each block loses alone does not say it, and so nothing else says it that a search begins with."""
    monkeypatch.setattr(gates, "STEPS", 100)
    model = cancelling()
    done = fit(model, inputs(6, width=8), budget={"macs": 0.5}, choose="gates", shares=SHARES, finals=2)
    assert len(learnt) == 1
    assert 2 * done.candidates["gates"] < min(loss for name, loss in done.candidates.items() if name != "gates")
    assert 2 * done.finals["gates"] < done.finals["shrink, by itself"]
    assert done.finals[done.taken] < done.finals["shrink, by itself"] / 2
    assert widths(model)[1] > max(widths(model)[0], widths(model)[2])
    assert holds(done.limits, done.got)


@pytest.mark.parametrize(
    "given",
    [
        {"budget": {"params": 0.6}, "finals": 3},
        {"budget": {"macs": 0.7, "bytes": 0.65}, "finals": 2, "uniform": True},
        {"budget": {"params": 0.7}, "finals": 2, "over": ("shrink", "oneshot")},
    ],
    ids=["params", "two and uniform", "both"],
)
def test_it_is_a_candidate_and_a_start_within_the_budget(given, learnt, begun):
    model = blocks(3)
    done = fit(model, inputs(), choose="gates", shares=SHARES, **given)
    assert len(learnt) == 1  # though what is nearest may have been more than the budget
    assert "gates" in done.candidates
    assert "gates" in done.finals
    assert len(done.finals) <= given["finals"] + 1
    search, starts, limits = begun[-1]
    assert search.space.fits(starts["gates"], limits)
    assert starts["gates"] == search.space.nearest(search.gated.units, limits)
    assert holds(limits, search.gated.costs)
    assert done.loss <= done.candidates["gates"] or done.taken is not None
    assert "gates" in str(done)


@pytest.mark.parametrize("budget", [{"latency": 0.6}, {"latency": 0.9, "params": 0.5}], ids=["tightest", "beside"])
def test_a_latency_they_hold_by_what_it_is_elsewhere(budget, learnt, begun):
    """By prices of operations, so that nothing is timed."""

    def took(operation, shapes):
        return float(shapes[1][0] * shapes[1][1]) if operation == "linear" else 1.0

    done = fit(blocks(3), inputs(), budget=budget, runtime=took, choose="gates", shares=SHARES, finals=2)
    assert len(learnt) == 1
    assert "gates" in done.candidates
    assert ("gates" in done.finals) is ("params" not in budget)  # else nobody has said what time it takes
    search, _, limits = begun[-1]
    assert holds(limits, {"latency": 0.0} | search.gated.costs)
    assert done.got["latency"] <= limits["latency"] * 1.001


def test_of_one_final_gates_are_where_it_begins_and_no_more(learnt):
    done = fit(blocks(3), inputs(), budget={"params": 0.6}, choose="gates", shares=SHARES, finals=1)
    assert len(learnt) == 1
    assert done.loss <= done.candidates["gates"]
    assert not done.finals


def test_nobody_learns_them_unasked(learnt):
    done = fit(blocks(3), inputs(), budget={"params": 0.6}, shares=SHARES, finals=2)
    assert not learnt
    assert "gates" not in {*done.candidates, *done.finals}


def test_where_they_are_taken_their_counts_are_what_stays(monkeypatch):

    lost = iter(range(9, 0, -1))  # what shrink does by itself is asked first, and then gates
    monkeypatch.setattr(fitting.Executor, "_lost", lambda *_: Judged(float(next(lost))))
    monkeypatch.setattr(fitting.Executor, "judged", lambda *_: Judged(1e9))
    model = blocks(4)
    done = fit(model, inputs(), budget={"params": 0.6}, choose="gates", shares=SHARES, finals=3)
    assert done.taken == "gates"
    assert widths(model) == [done.units.get(f"{at}.up.weight", 20) for at in range(4)]
    assert done.got["params"] == done.predicted["params"] == parameters(model) <= 0.6 * done.dense["params"]
    with torch.no_grad():
        assert done.model(inputs()[0]).isfinite().all()


def test_what_no_level_reaches_they_reach(learnt):
    model = words()
    done = fit(model, text(), budget={"params": 809}, choose="gates", shares=(0.2,), finals=1)
    assert {*done.finals} == {*done.candidates} == {"shrink, by itself", "gates"}
    assert done.taken in done.finals
    assert parameters(model) <= 809
    assert len(learnt) == 1


def test_one_seed_is_one_result():
    done = [fit(blocks(3), inputs(), budget={"params": 0.5}, choose="gates", shares=SHARES, finals=2) for _ in range(2)]
    assert (done[0].candidates, done[0].finals) == (done[1].candidates, done[1].finals)
    assert all(map(torch.equal, done[0].model.parameters(), done[1].model.parameters()))


def test_the_callers_mode_does_not_matter():
    model = blocks(2)
    with torch.inference_mode():
        done = gated(model, finals=2)
    assert {"shrink, by itself", "gates"} < {*done.finals}
    assert parameters(model) <= 0.6 * done.dense["params"]


def gated(model=None, **given):
    return fit(model or blocks(2), inputs(), **{"budget": {"params": 0.6}, "choose": "gates", "shares": (0.5,)} | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choose": "luck"}, "choose must be \"gates\", or left out, not 'luck'."),
        ({"over": "oneshot"}, "gates choose which units leave, not which entries become zero"),
        ({"budget": None, "keep": 0.9}, "gates learn what leaves at a budget, and with keep= that is what is searched"),
        (
            {"budget": {"bytes": 0.5, "latency": 0.9}, "runtime": "onnxruntime:mixed"},
            "gates choose no bits, and with a mixed runtime these are chosen",
        ),
    ],
    ids=["word", "zeros", "keep", "bits"],
)
def test_what_has_no_gates_is_refused(given, message, learnt):
    model = blocks(2)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        gated(model, **given)
    assert is_unchanged(model, before)
    assert not learnt


def test_gates_that_cannot_be_learnt_are_an_error_that_changes_nothing(monkeypatch):
    monkeypatch.setattr(gates.DenseOutputs, "rows_lost", lambda self, at: torch.zeros(len(inputs()[0])))
    model = blocks(2)
    before = state_of(model)
    with pytest.raises(
        ValueError, match=r'choose="gates": how far the outputs .* has no gradient along any gate: leave'
    ):
        gated(model)
    assert is_unchanged(model, before)


@pytest.mark.long
def test_a_directory_begins_there_and_chooses_anew_without(tmp_path, learnt):
    make("llama").save_pretrained(tmp_path / "dense")
    tokens = [torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(at)) for at in range(4)]

    def fitted(out, choose):
        how = {"budget": {"params": 0.8}, "shares": (0.25, 0.5), "finals": 2, "store": tmp_path / "store"}
        return fit(tmp_path / "dense", tokens, out=tmp_path / out, choose=choose, **how)

    one = fitted("one", "gates")
    assert {"gates"} < {*one.finals}
    assert "gates" in one.candidates
    assert one.got["params"] <= 0.8 * one.dense["params"]
    assert verify_checkpoint(tmp_path / "one", tmp_path / "dense").ok
    assert fitted("again", "gates").chosen == one.chosen
    assert len(learnt) == 1
    assert "gates" not in fitted("without", None).candidates
