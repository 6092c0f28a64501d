"""Networks of the table: same networks for all methods, zeros stay zero, checks spoil one thing and no more."""

import copy
from pathlib import Path

import pytest
import torch

from secateur import sparsify
from secateur.criteria import magnitude
from secateur.demo import METHODS, load_digits, run_demo, trials
from secateur.demo.trials import DigitsNet, choose_methods
from secateur.report import Results, load_results, summarize
from support.demos import ONE_SHOT, PARAMETERS, WEIGHTS


def test_every_method_meets_every_sparsity_and_seed(results: Results) -> None:
    rows = [(run.method, round(run.sparsity, 3), run.seed) for run in results.runs]
    assert len(rows) == len(set(rows))
    wanted = {(m, s, k) for m in (*ONE_SHOT, "gradual") for s in (0.9,) for k in (0, 1)}
    stem = 16 * 9
    two_of_four = round((WEIGHTS - stem) / 2 / WEIGHTS, 3)
    wanted |= {("2:4", two_of_four, k) for k in (0, 1)} | {("dense", 0.0, k) for k in (0, 1)}
    assert set(rows) == wanted


def test_zeros_stay_zero_through_fine_tuning(results: Results) -> None:
    """Sparsity is measured on the fine-tuned networks, and it is what was asked for, to one weight."""
    for run in results.runs:
        if run.method not in {"dense", "2:4"}:
            assert abs(run.sparsity - 0.9) <= 1 / WEIGHTS
            assert run.overall == pytest.approx(run.sparsity * WEIGHTS / PARAMETERS)


def test_what_prunes_while_it_trains_has_no_accuracy_before(results: Results) -> None:
    assert {run.method for run in results.runs if run.before is None} == {"gradual"}


def test_the_checks_share_the_budget_and_the_sparsity(results: Results) -> None:
    assert len(results.checks) == 4
    own = [run for run in results.runs if run.method == "LAMP"]
    assert [(run.sparsity, run.after) for run in results.checks[0].runs] == [(run.sparsity, run.after) for run in own]
    for check in results.checks:
        assert [run.seed for run in check.runs] == [0, 1]
        for run in check.runs:
            assert run.sparsity == own[0].sparsity
    spoilt = [summarize(check.runs)[0].after for check in results.checks]
    assert spoilt[0] > max(spoilt[1:]) + 5  # one epoch mends little


def test_fine_tuning_and_choosing_both_help(results: Results) -> None:
    def after(method: str, sparsity: float) -> float:
        [row] = [row for row in rows if row.method == method and abs(row.sparsity - sparsity) < 0.01]
        assert row.after is not None
        return row.after

    rows = summarize(results.runs)
    for method in ("global magnitude", "ERK", "LAMP"):
        assert after(method, 0.9) > after("random", 0.9) + 10
    before = {(run.method, round(run.sparsity, 2), run.seed): run.before for run in results.runs}
    assert all(
        run.after > (before[run.method, 0.9, run.seed] or 0)
        for run in results.runs
        if (run.method, run.sparsity > 0.8) == ("LAMP", True)
    )


def test_masked_networks_with_about_as_much_work_stand_beside() -> None:
    dense = DigitsNet()

    def trial(method: str, sparsity: float) -> trials.Trial:
        model = copy.deepcopy(dense)
        masks = sparsify(model, sparsity, criterion=METHODS[method].choices.get("criterion", magnitude))  # type: ignore[union-attr]
        return trials.Trial(METHODS[method].label, sparsity, 0, model, masks, 1, 0, METHODS[method])

    first = trials.Trial("dense", 0.0, 0, dense, {}, 1, 0)
    every = [first, *(trial(method, sparsity) for method in ("random", "lamp") for sparsity in (0.5, 0.8, 0.95))]
    shrunken = trials.Trial("channels (shrink)", 0.5, 0, DigitsNet(8, 8), {}, 1, 0)
    chosen = [(one.label, one.asked) for one in trials.those_beside(every, [shrunken])]
    assert chosen == [("dense", 0.0), ("random", 0.5), ("random", 0.8), ("channels (shrink)", 0.5)]
    assert trials.those_beside([first], [shrunken]) == [first, shrunken]


def test_a_pattern_alone_has_nothing_to_spoil(tmp_path: Path) -> None:
    page = run_demo(tmp_path, methods=["2:4"], seeds=(0,), sparsities=(0.9,), epochs=1, tuning_epochs=1)
    results = load_results(page.with_name("results.json"))
    assert [run.method for run in results.runs] == ["dense", "2:4"]
    assert results.checks == ()


def test_spoilt_masks_keep_their_counts() -> None:
    """Shuffled: of each output channel. Random: of each layer. Re-initialized: the mask itself, on other weights."""
    torch.manual_seed(0)
    dense = DigitsNet()
    pruned = copy.deepcopy(dense)
    masks = sparsify(pruned, 0.95)
    trial = trials.Trial("LAMP", 0.95, 7, pruned, masks, 1, 1007, METHODS["lamp"])
    with torch.random.fork_rng(devices=[]):
        checks = trials.spoilt_trials([trial], {7: dense}, (0.5, 0.95))
    [shuffled], [drawn], [fresh] = checks["shuffled"], checks["random"], checks["re-initialized"]
    for name, mask in masks.items():
        assert torch.equal(shuffled.masks[name].flatten(1).sum(1), mask.flatten(1).sum(1))
        assert int(drawn.masks[name].sum()) == int(mask.sum())
        assert torch.equal(fresh.masks[name], mask)
        for one in (shuffled, drawn):
            kept = one.masks[name]
            assert torch.equal(one.model.get_parameter(name), dense.get_parameter(name) * kept)
        assert not torch.equal(fresh.model.get_parameter(name), pruned.get_parameter(name))
    large = "blocks.2.conv1.weight"
    assert not torch.equal(drawn.masks[large].flatten(1).sum(1), masks[large].flatten(1).sum(1))
    assert not torch.equal(shuffled.masks[large], masks[large])
    assert {one.epochs for one in (shuffled, drawn, fresh)} == {1}


def test_random_masks_know_nothing_of_the_weights() -> None:
    """A seed draws weights and masks from streams of their own: one stream for both would keep the largest weights."""
    from rich.progress import Progress

    first = trials.untrained_networks([3])
    plan = trials.Plan(choose_methods(["random,lamp"]), (3,), (0.5,), 1, 1)
    with Progress(disable=True) as bars, torch.random.fork_rng(devices=[]):
        pruned = trials.pruned_trials(plan, first, load_digits(), bars)
        checks = trials.spoilt_trials(pruned, first, (0.5,))
    drawn = [trial for trial in pruned if trial.label == "random"]
    assert len(drawn) == 1
    for trial in [*drawn, *checks["shuffled"], *checks["random"]]:
        for name, mask in trial.masks.items():
            weight = first[3].get_parameter(name)
            if mask.numel() > 1000:
                kept = mask.flatten().float()
                related = torch.corrcoef(torch.stack([weight.detach().flatten(), kept]))[0, 1]
                assert abs(related) < 4 / mask.numel() ** 0.5, (trial.label, name)
