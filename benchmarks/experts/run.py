"""Mixtures of experts: which widths of them leave, whether experts do, and whether what is left is right; and how good.

    python benchmarks/experts/run.py coverage [--only GLOB] [--json FILE]
    python benchmarks/experts/run.py rows [--only GLOB] [--json FILE]
    python benchmarks/experts/run.py sparse [--experts N] [--layers N] [--samples N] [--length N] [--folder DIR]
        [--discard] [--steps plan,slice,run,repair]
    python benchmarks/experts/run.py quality --scratch FOLDER [--model wide|eight] [--seeds 0,1,2] [--steps N]
        [--methods "reap;random"] [--cache FILE] [--peer PYTHON]
    python benchmarks/experts/run.py routers --scratch FOLDER [--seeds 0,1,2] [--steps N] [--methods "repair;nothing"]
        [--cache FILE]

Law: nothing here trusts the library's own proof. Widths are judged by the comparison of benchmarks/shrinking; experts
by an oracle of its own: in the original the router's products, and what is added to them, are minus infinity for those
that left. "right" says that something left and the rest computes the same; "refused", that nothing did, and why;
"WRONG", that it computes something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.experts.coverage import coverage
from benchmarks.experts.quality import METHODS, THEIRS, TRIED, Options, quality
from benchmarks.experts.routers import METHODS as MOVED
from benchmarks.experts.routers import MORE, Tries, routers
from benchmarks.experts.rows import rows as seen_rows
from benchmarks.experts.sparse import EXPERTS, STEPS, sparse
from benchmarks.experts.training import CHOOSE, SIZES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("coverage", help=(coverage.__doc__ or "").split("\n")[0])
    one.add_argument("--only", default="*", help="a glob over the mixtures' names, without mixture_")
    one.add_argument("--json", type=Path, help="write the rows there")
    three = commands.add_parser("rows", help=(seen_rows.__doc__ or "").split("\n")[0])
    three.add_argument("--only", default="*", help="a glob over the mixtures' names, without mixture_")
    three.add_argument("--json", type=Path, help="write the rows there")
    five = commands.add_parser("sparse", help=(sparse.__doc__ or "").split("\n")[0])
    five.add_argument(
        "--experts", type=int, default=EXPERTS, help="of a layer, more than 8; fewer for a smaller trial (%(default)s)"
    )
    five.add_argument("--layers", type=int, default=8, help="that are sliced: each takes 0.9 GB of disk")
    five.add_argument("--samples", type=int, default=4, help="that are run through two layers")
    five.add_argument("--length", type=int, default=256, help="of a sample, in tokens")
    five.add_argument("--folder", type=Path, help="where the directories are made for a while")
    five.add_argument("--discard", action="store_true", help="make holes of each file once it is on the disk")
    five.add_argument("--steps", default=",".join(STEPS), help="which to measure (%(default)s)")
    five.add_argument("--json", type=Path, help="write the rows there")
    six = commands.add_parser("routers", help=(routers.__doc__ or "").split("\n")[0])
    six.add_argument("--scratch", type=Path, required=True, help="where texts and trained models are kept")
    six.add_argument("--model", choices=SIZES, default="wide", help="(%(default)s)")
    six.add_argument("--steps", type=int, default=500, help="of training (%(default)s)")
    six.add_argument("--shares", default="0.25,0.5", help="of the experts, that leave (%(default)s)")
    six.add_argument("--seeds", default="0,1,2", help="of training (%(default)s)")
    six.add_argument("--methods", default=";".join(MOVED), help=f"separated by ; (%(default)s); also {'; '.join(MORE)}")
    six.add_argument("--cache", type=Path, help="a file for the rows, which a run that was interrupted goes on with")
    six.add_argument("--json", type=Path, help="write the rows there")
    two = commands.add_parser("quality", help=(quality.__doc__ or "").split("\n")[0])
    two.add_argument("--scratch", type=Path, required=True, help="where texts and trained models are kept")
    two.add_argument("--model", choices=SIZES, default="wide", help="(%(default)s)")
    two.add_argument("--steps", type=int, default=1000, help="of training (%(default)s)")
    two.add_argument("--choose", type=int, default=CHOOSE, help="by so many sequences of each kind (%(default)s)")
    two.add_argument("--shares", default="0.25,0.5", help="of the experts, that leave (%(default)s)")
    two.add_argument("--seeds", default="0,1,2", help="of training (%(default)s)")
    two.add_argument("--methods", help=f"separated by ;, of {'; '.join((*METHODS, THEIRS, *TRIED))}")
    two.add_argument("--cache", type=Path, help="a file for the rows, which a run that was interrupted goes on with")
    two.add_argument("--peer", help="the Python of an environment with llm-compressor")
    two.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what in ("quality", "routers"):
        mixtures: dict[str, Any] = {
            "scratch": given.scratch,
            "name": given.model,
            "steps": given.steps,
            "seeds": tuple(map(int, given.seeds.split(","))),
            "shares": tuple(map(float, given.shares.split(","))),
            "cache": given.cache,
        }
    if given.what == "quality":
        by = METHODS + ((THEIRS,) if given.peer else ()) + (TRIED if given.model == "eight" else ())
        methods = by if given.methods is None else tuple(given.methods.split(";"))
        rows = quality(Options(**mixtures, methods=methods, peer=given.peer, choose=given.choose))
    elif given.what == "sparse":
        rows = []
        steps = tuple(given.steps.split(","))
        sizes = (given.layers, given.samples, given.length)
        for row in sparse(*sizes, given.folder, given.experts, discard=given.discard, steps=steps):
            rows.append(row)
            print({key: round(each, 3) if isinstance(each, float) else each for key, each in row.items()}, flush=True)
    elif given.what == "routers":
        rows = routers(Tries(**mixtures, methods=tuple(given.methods.split(";"))))
    elif given.what == "rows":
        rows = seen_rows(given.only)
    else:
        rows = coverage(given.only)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
