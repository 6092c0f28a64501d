"""Networks of the table: same networks for all methods, and zeros stay zero."""

import pytest
import torch

from secateur.demo import load_digits, trials
from secateur.demo.trials import choose_methods
from secateur.report import Results, Run, summarize
from support.demos import ONE_SHOT, PARAMETERS, WEIGHTS


def masked(results: Results) -> list[Run]:
    return [run for run in results.runs if run.method != "channels (shrink)"]


def test_every_method_meets_every_sparsity_and_seed(results: Results) -> None:
    rows = [(run.method, round(run.sparsity, 3), run.seed) for run in masked(results)]
    assert len(rows) == len(set(rows))
    wanted = {(m, s, k) for m in (*ONE_SHOT, "gradual") for s in (0.9,) for k in (0, 1)}
    stem = 16 * 9
    two_of_four = round((WEIGHTS - stem) / 2 / WEIGHTS, 3)
    wanted |= {("2:4", two_of_four, k) for k in (0, 1)} | {("dense", 0.0, k) for k in (0, 1)}
    assert set(rows) == wanted


def test_zeros_stay_zero_through_fine_tuning(results: Results) -> None:
    """Sparsity is measured on the fine-tuned networks, and it is what was asked for, to one weight."""
    for run in masked(results):
        if run.method not in {"dense", "2:4"}:
            assert abs(run.sparsity - 0.9) <= 1 / WEIGHTS
            assert run.overall == pytest.approx(run.sparsity * WEIGHTS / PARAMETERS)


def test_what_prunes_while_it_trains_has_no_accuracy_before(results: Results) -> None:
    assert {run.method for run in results.runs if run.before is None} == {"gradual"}


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


def test_random_masks_know_nothing_of_the_weights() -> None:
    """A seed draws weights and masks from streams of their own: one stream for both would keep the largest weights."""
    from rich.progress import Progress

    first = trials.untrained_networks([3])
    plan = trials.Plan(choose_methods(["random,lamp"]), (3,), (0.5,), 1, 1)
    with Progress(disable=True) as bars, torch.random.fork_rng(devices=[]):
        pruned = trials.pruned_trials(plan, first, load_digits(), bars)
    drawn = [trial for trial in pruned if trial.label == "random"]
    assert len(drawn) == 1
    for trial in drawn:
        for name, mask in trial.masks.items():
            weight = first[3].get_parameter(name)
            if mask.numel() > 1000:
                kept = mask.flatten().float()
                related = torch.corrcoef(torch.stack([weight.detach().flatten(), kept]))[0, 1]
                assert abs(related) < 4 / mask.numel() ** 0.5, (trial.label, name)
