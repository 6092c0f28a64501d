"""Mixtures of experts: which widths of them leave, whether experts do, and whether what is left is right.

    python benchmarks/experts/run.py coverage [--only GLOB] [--json FILE]

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

import torch

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.experts.coverage import coverage


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("coverage", help=(coverage.__doc__ or "").split("\n")[0])
    one.add_argument("--only", default="*", help="a glob over the mixtures' names, without mixture_")
    one.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = coverage(given.only)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
