"""The results that the report shows: the table, the sanity checks, what is smaller and faster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from secateur.demo.data import Digits
from secateur.demo.measuring import Packed, compressed_size, file_size, memory_of, network_of, parameters_of, run_of
from secateur.demo.telling import checks_in_words, notes, smaller_in_words, story
from secateur.demo.trials import Plan, Trial
from secateur.report import Check, History, Results, summarize
from secateur.targets import find_targets

__all__ = ["results_of", "with_shrunken"]


def results_of(
    plan: Plan,
    trials: Sequence[Trial],
    checks: Mapping[str, Sequence[Trial]],
    latencies: Mapping[int, float],
    data: Digits,
    seconds: float,
) -> Results:
    """The table, the networks of the first seed in detail, the checks, and what is said of them."""
    runs = [run_of(trial, latencies.get(id(trial))) for trial in trials]
    sparsities = sorted({trial.asked for trial in trials if trial.asked})
    shown = 0.9 if 0.9 in sparsities or not sparsities else sparsities[len(sparsities) // 2]
    first = [trial for trial in trials if trial.seed == plan.seeds[0] and trial.asked in (shown, None)]
    return Results(
        f"Pruning a network that reads digits ({parameters_of(trials[0].model):,} parameters)",
        tuple(runs),
        tuple(network_of(trial) for trial in first),
        text=story(runs, shown),
        notes=notes(plan, data, seconds, checked=bool(checks)),
        examples=len(data.test_images),
        histories=tuple(History(trial.label, *zip(*trial.history, strict=True)) for trial in first if trial.history),
        checks=_checks(trials, checks, plan.tuning_epochs),
    )


def with_shrunken(
    results: Results,
    trials: Sequence[Trial],
    packed: Sequence[Packed],
    latencies: Mapping[int, float],
    batches: Mapping[int, float],
) -> Results:
    """The same results with the table of what is smaller and faster, and what it says in words."""
    dense, runs, skipping = trials[0], [], []
    known = {(each.trial.label, each.trial.asked): each for each in packed}
    for trial in trials:
        run = replace(
            run_of(trial, latencies.get(id(trial))),
            zipped=None,
            batch_ms=batches.get(id(trial)),
            memory=memory_of(trial.model),
            compressed=compressed_size(trial.model),
        )
        if trial.label.startswith("channels"):
            now, whole = find_targets(trial.model).values(), trial.originals.values()
            removed = 1 - sum(weight.numel() for weight in now) / sum(weight.numel() for weight in whole)
            run = replace(run, sparsity=removed, overall=1 - parameters_of(trial.model) / parameters_of(dense.model))
        elif trial.masks:
            run = replace(run, method=f"{run.method} (zeros)")
            each = known[trial.label, trial.asked]
            # The other seeds' accuracy is that of their masked networks
            measured = each if each.trial is trial else None
            skipping.append(
                replace(
                    run,
                    method=f"{trial.label}, packed",
                    bytes=None if measured is None else file_size(each.many),
                    memory=None if measured is None else memory_of(each.many),
                    latency_ms=latencies.get(id(measured)),
                    batch_ms=batches.get(id(measured)),
                )
            )
        runs.append(run)
    channels = [run for run in runs if run.method.startswith("channels")]
    runs = [*(run for run in runs if run not in channels), *skipping, *channels]
    said = smaller_in_words(summarize(runs), packed[-1])
    return replace(results, shrunken=tuple(runs), text=(*results.text, *said))


def _checks(trials: Sequence[Trial], spoilt: Mapping[str, Sequence[Trial]], epochs: int) -> tuple[Check, ...]:
    if not spoilt:
        return ()
    one = next(iter(spoilt.values()))[0]
    sound = [trial for trial in trials if (trial.label, trial.asked) == (one.label, one.asked)]
    told = checks_in_words(one.label, epochs)
    groups = [sound, *spoilt.values()]
    return tuple(
        Check(name, tells, tuple(run_of(trial) for trial in group))
        for (name, tells), group in zip(told.items(), groups, strict=True)
    )
