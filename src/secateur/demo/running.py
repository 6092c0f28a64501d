"""The whole story in minutes: train a small residual network on handwritten digits; prune, shrink; report."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from secateur.demo.result import results_of
from secateur.demo.trials import (
    EPOCHS,
    SEEDS,
    SPARSITIES,
    TUNING_EPOCHS,
    Plan,
    choose_methods,
    load_digits,
    milliseconds,
    packings_of,
    pruned_trials,
    shrunken_trials,
    train_all,
    train_dense,
    untrained_networks,
)
from secateur.report import save_results


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
