"""What each verb takes of a machine, for Llamas of 1 to 70 billion parameters in 1, 2 and 8 processes: a page.

    python -m benchmarks.scale.run            # prints the tables of docs/start/scale.md
    python -m benchmarks.scale.run --write    # puts them into the page

Law: what is counted is arithmetic on shapes, of models on the meta device; rates are those that `benchmarks/RESULTS.md`
has; hours are projected and called so. What was run is in a table of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.shapes import WIDER, Shapes, shapes_of

PAGE = Path(__file__).parents[2] / "docs/start/scale.md"
PROCESSES = (1, 2, 8)
SEQUENCES, LENGTH = 128, 2048  # of calibration: the defaults of `oneshot`
STEPS, BATCH, SHORT = 500, 8, 512  # of `recover`: its defaults
BASE = 0.7e9  # Python, torch and transformers

# a second, of two cores: `benchmarks/oneshot/run.py projection` (benchmarks/oneshot/RESULTS.md)
FORWARD, GRAM, SPARSEGPT, ADMM, DISK = 82.2e9, 54.9e9, 6.2e9, 34.6e9, 0.626e9
RUNS = 9  # of each block of a transformer, in stages, the dense one beside (benchmarks/shrinking/RESULTS.md)


def size(count: float) -> str:
    """Bytes in GB, two digits."""
    number = count / 1e9
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def time(seconds: float) -> str:
    """Hours, two digits."""
    number = seconds / 3600
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def block_by_block(model: Shapes, processes: int) -> tuple[float, float]:
    """Bytes of `oneshot` in one process: the block and its evidence where it computes; what blocks pass on."""
    widest = max(model.inputs)
    evidence = 8 * 4 * widest**2  # the Gram matrix, what the dense model adds, and the solver's copies, float32
    passed_on = 2 * 2 * SEQUENCES * LENGTH * model.width / processes  # of the pruned model and the dense one, bfloat16
    return 3 * 2 * model.block + evidence, passed_on


def oneshot_seconds(model: Shapes, processes: int) -> dict[str, float]:
    """Of the processor, by what is done; runs, sums and solving are shared out, reading is not."""
    tokens = SEQUENCES * LENGTH
    weights = sum(rows * columns for rows, columns in model.matrices)
    solving = sum(8 * n**3 + 46 * n * n * m for m, n in model.matrices)
    return {
        "running": model.blocks * RUNS * 2 * weights * tokens / FORWARD / processes,
        "summing": model.blocks * tokens * sum(n * n for n in model.inputs) / GRAM / processes,
        "solving": model.blocks * solving / ADMM / processes,
        "disk": 3 * 2 * model.parameters / DISK,
    }


def of_one_core(model: Shapes, tokens: int) -> tuple[float, float]:
    """Seconds and bytes of `oneshot` by `sparsegpt` on so few tokens, with one thread: what `whole.py` runs."""
    weights = sum(rows * columns for rows, columns in model.matrices)
    solving = sum(n**3 / 3 + n * n * m for m, n in model.matrices)
    seconds = (
        2
        * model.blocks
        * (
            RUNS * 2 * weights * tokens / FORWARD
            + tokens * sum(n * n for n in model.inputs) / GRAM
            + solving / SPARSEGPT
        )
    )
    block, _ = block_by_block(model, 1)
    return seconds + 3 * 2 * model.parameters / DISK, BASE + block + 2 * 2 * tokens * model.width


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

    def table(columns: list[str], rows: Iterator[list[str]]) -> str:
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

    def oneshot() -> Iterator[list[str]]:
        for name, model, processes in each():
            block, passed_on = block_by_block(model, processes)
            seconds = oneshot_seconds(model, processes)
            yield [
                name, str(processes), size(BASE + block + passed_on), size(block), size(passed_on),
                size(2 * model.parameters), time(sum(seconds.values())),
            ]  # fmt: skip

    yield (
        "oneshot",
        table(["host, no GPU, GB", "of a device, GB", "between blocks, GB", "disk, GB", "hours, projected"], oneshot()),
    )

    def recover() -> Iterator[list[str]]:
        for name, model, processes in each():
            tokens = STEPS * BATCH * SHORT
            seconds = (6 + 2) * model.parameters * tokens / FORWARD / processes
            yield [
                name, str(processes), size(recovering(model, processes)),
                size((2 + 2 + 4 + 8) * model.parameters), time(seconds),
            ]  # fmt: skip

    yield "recover", table(["memory, GB a process", "disk, GB", "hours, projected"], recover())
    yield (
        "others",
        "\n".join(
            [
                "| model | `sparsify`: memory, hours | `sensitivity`, `fit`: memory | `pack`, `compress`: memory |",
                "|---|---|---|---|",
                *(
                    f"| {name} | {size(BASE + 3 * 4 * largest(model))}, {time(2 * 2 * model.parameters / DISK)} | "
                    f"{size(BASE + 2 * 2 * model.parameters)} | {size(BASE + 3 * 4 * largest(model))} |"
                    for name, model in models.items()
                ),
            ]
        ),
    )


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
