"""The whole story in minutes: train a small residual network on handwritten digits; prune, shrink; report. What the
report says in words is ``story.txt.j2`` beside this file, and the figures that go into it.

Law: every figure is a cell of the table, a setting of the run, or what `pack` measured.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from secateur.demo.trials import (
    BATCH,
    EPOCHS,
    LESS_WORK,
    SEEDS,
    SPARSITIES,
    TUNING_EPOCHS,
    Digits,
    Plan,
    Trial,
    choose_methods,
    load_digits,
    milliseconds,
    packings_of,
    parameters_of,
    pruned_trials,
    run_of,
    shrunken_trials,
    train_all,
    train_dense,
    untrained_networks,
)
from secateur.inference import Packing
from secateur.report import Results, Row, Run, save_results, summarize


def run_demo(
    out: Path | None = None,
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    sparsities: Sequence[float] = SPARSITIES,
    epochs: int = EPOCHS,
    tuning_epochs: int = TUNING_EPOCHS,
) -> Path:
    """Train, prune, fine-tune, measure; print the table; write ``report.html`` and ``results.json``; return the page.

    Args:
        out: the folder for the two files, made if missing; ``secateur-demo`` by default. Files of these names in it are
            replaced once the new ones are complete.
        methods: names among `METHODS`; all if None.
        seeds: one dense network is trained for each.
        sparsities: fractions of the weights that each method removes; 2:4 has its own.
        epochs: of dense training.
        tuning_epochs: of fine-tuning, the same for all methods and for the dense network.

    Raises:
        ValueError: a method is unknown.
        ImportError: scikit-learn, matplotlib or jinja2 is missing; the message says what to install.
        NotADirectoryError: ``out`` is a file.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    chosen = choose_methods(methods)
    plan = Plan(chosen, tuple(seeds), tuple(sparsities), epochs, tuning_epochs)
    folder = Path("secateur-demo") if out is None else Path(out)
    _check_extras()  # everything that can be missing is asked for before a minute has gone
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the demo needs a folder for its report: give another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    data = load_digits()
    started = time.perf_counter()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Pruners in parallel threads fork the global generator, each over the others: it is put back when all are done
    with _one_thread(), torch.random.fork_rng(devices=[]), Progress(*columns, console=console) as progress:
        dense = train_dense(untrained_networks(seeds), data, epochs, progress)
        trials = pruned_trials(plan, dense, data, progress)
        trials += shrunken_trials(dense, data, tuning_epochs, progress)
        train_all(trials, data, progress)
        first = [trial for trial in trials if trial.seed == seeds[0]]
        times = milliseconds([trial.model for trial in first], progress)
        packings = packings_of(first, data)
    words = ["secateur demo", *(f"--method {name}" for name in methods or ()), *["--out DIR"] * (out is not None)]
    latencies = dict(zip(map(id, first), times, strict=True))
    seconds = time.perf_counter() - started
    results = results_of(plan, trials, latencies, packings, data, seconds, " ".join(words))
    save_results(results, folder / "results.json")
    page = results.report(folder / "report.html")
    print(f"\n{results}\n\nThe report is in {page}, its numbers in {folder / 'results.json'}.")
    return page


def _check_extras() -> None:
    try:
        import jinja2
        import matplotlib
        import sklearn
    except ImportError as error:
        raise ImportError(f"the demo needs its extra ({error}): pip install 'secateur[demo]'") from error
    del jinja2, matplotlib, sklearn


@contextmanager
def _one_thread() -> Iterator[None]:
    """On tensors this small a second thread gains little, and on busy cores the two wait for each other for minutes."""
    threads = torch.get_num_threads()
    bars = os.environ.get("SECATEUR_PROGRESS")
    torch.set_num_threads(1)
    os.environ["SECATEUR_PROGRESS"] = "0"  # the demo has bars of its own
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        del os.environ["SECATEUR_PROGRESS"]
        if bars is not None:
            os.environ["SECATEUR_PROGRESS"] = bars


def results_of(
    plan: Plan,
    trials: Sequence[Trial],
    latencies: Mapping[int, float],
    packings: Sequence[Packing],
    data: Digits,
    seconds: float,
    command: str,
) -> Results:
    """The table, and what is said of it."""
    dense = trials[0].model
    runs = [run_of(trial, dense, latencies.get(id(trial))) for trial in trials]
    sparsities = sorted({trial.asked for trial in trials if trial.masks and trial.asked})
    shown = 0.9 if 0.9 in sparsities or not sparsities else sparsities[len(sparsities) // 2]
    return Results(
        f"Pruning a network that reads digits ({parameters_of(dense):,} parameters)",
        tuple(runs),
        text=story(runs, shown, packings),
        notes=notes(plan, data, seconds),
        command=command,
        examples=len(data.test_images),
    )


def story(runs: Sequence[Run], sparsity: float, packings: Sequence[Packing]) -> tuple[str, ...]:
    """What the table says."""
    rows = summarize(runs)
    channels = [row for row in rows if row.method.startswith("channels")]
    masked = [row for row in rows if row not in channels]
    there = [row for row in masked if abs(row.sparsity - sparsity) < 0.01] or masked[1:]
    slim = max(masked, key=lambda row: row.sparsity)
    barest = [row for row in masked if abs(row.sparsity - slim.sparsity) < 0.01]
    told = _paragraphs(
        "story",
        dense=rows[0],
        best=_best(there),
        at_random=[row for row in there if row.method == "random"],
        slim=slim,
        hardest=_best(barest) if len(barest) > 1 and slim not in there else None,
        channels=channels[-1] if channels else None,
        packings=[_packed(each) for each in packings],
        batch=BATCH,
    )
    return tuple(re.sub(r"(?<=\d) (?=%|kB|ms)", "\N{NO-BREAK SPACE}", paragraph) for paragraph in told)


def _packed(packing: Packing) -> dict[str, Any]:
    """How many layers skip their zeros, how much faster they are, and why the others do not."""
    stay = Counter(each.why for each in packing.layers if each.kind == "dense")
    return {
        "layers": len(packing.layers),
        "faster": sorted(each.speedup for each in packing.packed if each.speedup),
        "stay": [f"{why} ({count})" for why, count in stay.most_common()],
    }


def notes(plan: Plan, data: Digits, seconds: float) -> tuple[str, ...]:
    """How it was measured."""
    return _paragraphs(
        "notes",
        plan=plan,
        names={method.name for method in plan.methods},
        train_images=len(data.train_images),
        test_images=len(data.test_images),
        batch=BATCH,
        less_work=LESS_WORK,
        seconds=seconds,
    )


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.after or 0.0)


def _paragraphs(block: str, **figures: Any) -> tuple[str, ...]:
    """The paragraphs of one block of the template."""
    import jinja2

    words = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # plain text: the page escapes it
    )
    words.filters |= {"fixed": _fixed, "percent": _percent, "kilobytes": _kilobytes}
    template = words.get_template("story.txt.j2")
    text = "".join(template.blocks[block](template.new_context(figures)))
    return tuple(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip())


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _kilobytes(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e3:.0f} kB"
