"""What each verb takes of a machine, for Llamas of 1 to 70 billion parameters in 1, 2 and 8 processes: a page.

    python -m benchmarks.scale.run            # prints the tables of docs/start/scale.md
    python -m benchmarks.scale.run --write    # puts them into the page

Law: what is counted is arithmetic on shapes, of models on the meta device; rates were measured by the commands beside
them; hours are projected and called so. What was run is in a table of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.scale.shapes import WIDER, Shapes, shapes_of

PAGE = Path(__file__).parents[2] / "docs/start/scale.md"
PROCESSES = (1, 2, 8)
SEQUENCES, LENGTH = 128, 2048  # of calibration: the defaults of `oneshot`
STEPS, BATCH, SHORT = 500, 8, 512  # of `recover`: its defaults
BASE = 0.7e9  # Python, torch and transformers

# a second, of two cores: `benchmarks/oneshot/run.py projection` (benchmarks/oneshot/RESULTS.md)
FORWARD, GRAM, SPARSEGPT, ADMM, DISK = 82.2e9, 54.9e9, 6.2e9, 34.6e9, 0.626e9
# of two cores `python -m benchmarks.scale.rates` (benchmarks/scale/RESULTS.md); the last five are of one
ELIMINATION, COMPRESS, EXPAND, INSPECT, PACK, PROBED = 2 * 23.4e9, 0.619e9, 1.88e9, 0.288e9, 5.97e6, 0.043e9
# of `cost` (benchmarks/scale/RESULTS.md): files, seconds of each beside its weights, models that are run, tokens; how
# often the files have the weights of a block, and those of the embedding or the head
FILES, A_FILE, TRIED, SERVED, OF_BLOCK, OF_WORDS = 853, 0.033, 90, 64, 20.8, 16.7
BENCHED, FORMS = 1.01e6, 9.2  # of `bench`: parameters a second, and the models in float32 that it has at once
RUNS = 9  # of each block of a transformer, in stages, the dense one beside (benchmarks/shrinking/RESULTS.md)
SLOPES = 4096  # tokens that slopes are of
CELLS, SCORED = 4, 1000  # of `sensitivity`: levels of a group, and the tokens that each is scored on
FINE, PASSES, FIRST, STEPS_OF_FIT = 18, 30, 6, 5  # of `fit`: levels, runs of what is held back, finals at once, others
GATES = 80  # steps of `fit`, of a sequence each, forwards and backwards
IN_MEMORY = 5  # times a model: `fit` between two levels of each group, with what lies between and its slopes


def size(count: float) -> str:
    """Bytes in GB, two digits."""
    number = count / 1e9
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def time(seconds: float) -> str:
    """Hours, two digits."""
    number = seconds / 3600
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def block_by_block(model: Shapes, processes: int, itemsize: int = 4) -> tuple[float, float]:
    """Bytes of `oneshot` in one process: the block and its evidence where it computes; what blocks pass on. `shrink`
    has its evidence in float64."""
    widest = max(model.inputs)
    evidence = 8 * itemsize * widest**2  # the Gram matrix, what the dense model adds, and the solver's copies
    passed_on = 2 * 2 * SEQUENCES * LENGTH * model.width / processes  # of the pruned model and the dense one, bfloat16
    return 3 * 2 * model.block + evidence, passed_on


def running(model: Shapes, tokens: float) -> float:
    """Seconds of all blocks, once."""
    return model.blocks * 2 * sum(rows * columns for rows, columns in model.matrices) * tokens / FORWARD


def summing(model: Shapes, tokens: float) -> float:
    """Seconds of all Gram matrices."""
    return model.blocks * tokens * sum(n * n for n in model.inputs) / GRAM


def leaving(model: Shapes) -> list[tuple[int, int]]:
    """Of a block the matrices whose columns are heads, and units of the MLP."""
    return [model.matrices[3], model.matrices[6]]


def measuring(model: Shapes, tokens: float, processes: int = 1) -> dict[str, float]:
    """Seconds of `shrink` until it has chosen: slopes, a walk, and all columns leave. The first process solves."""
    whole = sum(n**3 + 4 * n * n * m for m, n in model.matrices)
    return {
        "running": running(model, tokens) / processes + 6 * model.parameters * min(tokens, SLOPES) / FORWARD,
        "summing": summing(model, tokens) / processes,
        "solving": model.blocks * (whole + sum(2 * n**3 + 2 * n * n * m for m, n in leaving(model))) / ELIMINATION,
    }


def repairing(model: Shapes, tokens: float, processes: int = 1) -> dict[str, float]:
    """Seconds of the walk that repairs: every matrix is aimed, settled and compared, and what leaves leaves again."""
    whole = sum(2 * n**3 + 13 * n * n * m for m, n in model.matrices)
    return {
        "running": RUNS * running(model, tokens) / processes,
        "summing": summing(model, tokens) / processes,
        "solving": model.blocks * (whole + sum(2 * n**3 + 2 * n * n * m for m, n in leaving(model))) / ELIMINATION,
    }


def shrink_seconds(model: Shapes, processes: int, tokens: float = SEQUENCES * LENGTH) -> dict[str, float]:
    """Of the processor, by what is done."""
    first, then = measuring(model, tokens, processes), repairing(model, tokens, processes)
    return {word: first[word] + then[word] for word in first} | {"disk": 3 * 2 * model.parameters / DISK}


def levels_seconds(model: Shapes, shares: int, tokens: float) -> float:
    """Of the levels of heads and MLP units: two runs, slopes, one elimination, and a repair for each share."""
    solving = sum(3 * n**3 + 4 * n * n * m + shares * (2 * n**3 / 3 + 7 * n * n * m) for m, n in leaving(model))
    return (
        2 * running(model, tokens)
        + 6 * model.parameters * min(tokens, SLOPES) / FORWARD
        + model.blocks * tokens * sum(n * n for _, n in leaving(model)) / GRAM
        + model.blocks * solving / ELIMINATION
    )


def levels_bytes(model: Shapes, shares: int) -> float:
    """What the levels take in their store: of each share what consumes the units, as a whole, in bfloat16."""
    return model.blocks * shares * 2 * sum(m * n for m, n in leaving(model))


def sensitivity_seconds(model: Shapes, processes: int) -> float:
    """Each score runs half of the model; these are shared out, levels are not."""
    scores = 2 * CELLS * model.blocks * 0.5 * 2 * model.parameters * SCORED / FORWARD
    return levels_seconds(model, CELLS, SEQUENCES * LENGTH) + scores / processes


def fit_seconds(model: Shapes, processes: int) -> dict[str, float]:
    """By what is done: levels and what is written are one process's; a quarter of the text is held back."""
    tokens = SEQUENCES * LENGTH
    back, rest = tokens / 4, 3 * tokens / 4
    final = sum(repairing(model, rest).values()) + 2 * model.parameters * tokens / FORWARD
    return {
        "levels": levels_seconds(model, FINE, rest),
        "gates": GATES * 6 * model.parameters * LENGTH / FORWARD,
        "searching": PASSES * 2 * model.parameters * back / FORWARD / processes,
        "finals": sum(measuring(model, rest).values()) + (1 + -(-FIRST // processes) + STEPS_OF_FIT) * final,
        "writing": sum(shrink_seconds(model, 1).values()),
    }


def oneshot_seconds(model: Shapes, processes: int) -> dict[str, float]:
    """Of the processor, by what is done; runs, sums and solving are shared out, reading is not."""
    solving = sum(8 * n**3 + 46 * n * n * m for m, n in model.matrices)
    return {
        "running": RUNS * running(model, SEQUENCES * LENGTH) / processes,
        "summing": summing(model, SEQUENCES * LENGTH) / processes,
        "solving": model.blocks * solving / ADMM / processes,
        "disk": 3 * 2 * model.parameters / DISK,
    }


def cost_seconds(model: Shapes) -> float:
    """Of `cost`: the model with fewer units runs, of all groups that are alike once, and files are written."""
    weights = OF_BLOCK * model.block + OF_WORDS * 2 * model.vocabulary * model.width
    runs = TRIED * 2 * model.parameters * SERVED / FORWARD
    return 4 * model.parameters / DISK + runs + FILES * A_FILE + 4 * weights / PROBED


def of_one_core(model: Shapes, tokens: int, verb: str = "oneshot") -> tuple[float, float]:
    """Seconds and bytes of `oneshot` by `sparsegpt`, or of `shrink`, on so few tokens, with one thread: what `whole.py`
    runs."""
    passed_on = 2 * 2 * tokens * model.width
    if verb == "shrink":
        its = shrink_seconds(model, 1, tokens)
        return 2 * sum(its.values()) - its["disk"], BASE + block_by_block(model, 1, 8)[0] + passed_on
    solving = model.blocks * sum(n**3 / 3 + n * n * m for m, n in model.matrices) / SPARSEGPT
    seconds = 2 * (RUNS * running(model, tokens) + summing(model, tokens) + solving)
    return seconds + 3 * 2 * model.parameters / DISK, BASE + block_by_block(model, 1)[0] + passed_on


def experts(processes: int, gone: int = 2) -> list[str]:
    """Of `shrink --leave experts:…` of a mixture of Mixtral's shapes. Features of tokens are kept while a block is
    repaired; a block is run four times, and each matrix solved for four dampings on three quarters, and in three
    rounds."""
    width, inside, blocks, number, chosen, words = 4096, 14336, 32, 8, 2, 32000
    tokens, matrix, attention = SEQUENCES * LENGTH, width * inside, 2.5 * width**2
    block = attention + number * (3 * matrix + width)
    parameters = blocks * block + 2 * words * width
    device = 2 * 2 * block + 4 * (number - gone) * matrix + 3 * 4 * inside**2
    passed_on = (2 * 2 + 2 * 4) * tokens * width / processes + 2 * tokens * chosen * inside / processes
    running = 4 * blocks * 2 * (attention + chosen * 3 * matrix) * tokens / FORWARD / processes
    summing = blocks * (4 * 3 / 4 + 3) * tokens * chosen * inside**2 / GRAM / processes
    solving = blocks * 7 * (number - gone) * (inside**3 / 3 + 2 * inside * matrix) / ELIMINATION
    seconds = running + summing + solving + 3 * 2 * parameters / DISK
    whole = [BASE + device + passed_on, device, passed_on, 2 * parameters * (1 - gone / number)]
    return [f"{parameters / 1e9:.0f} B", str(processes), *map(size, whole), time(seconds)]


def recovering(model: Shapes, processes: int) -> float:
    """Bytes of `recover` by the outputs in one process: weights, copies, gradients and AdamW in float32, the teacher in
    bfloat16, each process its share; a block of each as a whole; the logits of its rows."""
    shares = (4 + 4 + 4 + 8 + 2) * model.parameters / processes
    whole = 0 if processes == 1 else (4 + 4 + 2) * max(model.block, model.outside)
    rows = -(-BATCH // processes) * SHORT
    return shares + whole + (2 + 4 + 4) * rows * model.vocabulary


def tables() -> Iterator[tuple[str, str]]:
    """The name of each table, and its lines."""
    models = {name: shapes_of(config) for name, config in WIDER.items()}
    head = "| model | processes | {} |\n|---|---|{}|"

    def table(columns: list[str], rows: Iterable[list[str]]) -> str:
        lines = [head.format(" | ".join(columns), "---|" * (len(columns) - 1) + "---")]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])

    def each() -> Iterator[tuple[str, Shapes, int]]:
        for name, model in models.items():
            for processes in PROCESSES:
                yield name, model, processes

    yield (
        "files",
        "\n".join(
            [
                "| model | parameters | blocks | the directory, GB | one block, GB |",
                "|---|---|---|---|---|",
                *(
                    f"| {name} | {model.parameters:,} | {model.blocks} | {size(2 * model.parameters)} | "
                    f"{2 * model.block / 1e9:.2f} |"
                    for name, model in models.items()
                ),
            ]
        ),
    )

    def walked(itemsize: int, seconds: Callable[[Shapes, int], dict[str, float]]) -> Iterator[list[str]]:
        for name, model, processes in each():
            block, passed_on = block_by_block(model, processes, itemsize)
            yield [
                name, str(processes), size(BASE + block + passed_on), size(block), size(passed_on),
                size(2 * model.parameters), time(sum(seconds(model, processes).values())),
            ]  # fmt: skip

    columns = ["host, no GPU, GB", "of a device, GB", "between blocks, GB", "disk, GB", "hours, projected"]
    yield "oneshot", table(columns, walked(4, oneshot_seconds))
    yield "shrink", table(columns, walked(8, shrink_seconds))
    yield "experts", table(columns, map(experts, PROCESSES))

    def recover() -> Iterator[list[str]]:
        for name, model, processes in each():
            tokens = STEPS * BATCH * SHORT
            seconds = (6 + 2) * model.parameters * tokens / FORWARD / processes
            yield [
                name, str(processes), size(recovering(model, processes)),
                size((2 + 2 + 4 + 8) * model.parameters), time(seconds),
            ]  # fmt: skip

    yield "recover", table(["memory, GB a process", "disk, GB", "hours, projected"], recover())

    def searching() -> Iterator[list[str]]:
        for name, model, processes in each():
            evidence, passed_on = block_by_block(model, 1, 8)
            whole = BASE + evidence + passed_on
            yield [
                name, str(processes),
                size(whole + 2 * model.parameters), size(levels_bytes(model, CELLS)),
                time(sensitivity_seconds(model, processes)),
                size(whole + IN_MEMORY * 2 * model.parameters), size(levels_bytes(model, FINE) + 2 * model.parameters),
                time(sum(fit_seconds(model, processes).values())),
            ]  # fmt: skip

    columns = [
        *("`sensitivity`: GB a process", "disk, GB", "hours"),
        *("`fit`: GB a process", "disk, GB", "hours"),
    ]
    yield "levels", table(columns, searching())

    def others() -> Iterator[list[str]]:
        for name, model in models.items():
            nbytes, tensor = 2 * model.parameters, BASE + 3 * 4 * largest(model)
            yield [
                name,
                f"{size(tensor)}, {time(2 * nbytes / DISK)}",
                f"{size(tensor)}, {time(nbytes / COMPRESS + 2 * nbytes / DISK)}",
                f"{size(tensor)}, {time(nbytes / EXPAND + 1.5 * nbytes / DISK)}",
                f"{size(BASE)}, {time(nbytes / INSPECT + nbytes / DISK)}",
                f"{size(BASE + 1.5 * 2 * nbytes)}, {time(model.parameters / PACK)}",
                f"{size(BASE + 2 * nbytes + 2 * 4 * largest(model))}, {time(cost_seconds(model))}",
                f"{size(BASE + FORMS * 2 * nbytes)}, {time(model.parameters / BENCHED)}",
            ]

    alike = "`, `".join(["sparsify", "verify --source", "vocabulary"])
    words = [alike, "compress", "expand", "inspect", "pack", "cost", "bench"]
    lines = [f"| model | {' | '.join(f'`{word}`' for word in words)} |", f"|{'---|' * (len(words) + 1)}"]
    yield "others", "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in others())])


def largest(model: Shapes) -> int:
    """Entries of the largest tensor: of a block, or the embedding."""
    return max(model.vocabulary * model.width, *(rows * columns for rows, columns in model.matrices))


def written(page: str) -> str:
    """The page with the tables as they are now."""
    for name, lines in tables():
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda found, lines=lines: found[1] + lines + found[2], page,
            flags=re.DOTALL,
        )  # fmt: skip
        if count != 1:
            raise SystemExit(f"{PAGE.name}: has {count} places for the table {name!r}, not one.")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/start/scale.md")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, lines in tables():
        print(f"{name}\n{lines}\n")


if __name__ == "__main__":
    main()
