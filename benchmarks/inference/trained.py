"""One trained network in every form that there is for it: accuracy beside milliseconds of one image, in one thread.

Law: everything that is timed takes turns in one process. An accuracy is of the very call that is timed: a model in
int8 is judged in int8, a packed one packed.

What was trained (in as many threads as torch has), and what was judged, stays in ``--cache``; a second run only
measures time. OpenVINO's rows are there where it is installed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inference.convolutions import frozen
from benchmarks.inference.exported import onnx_file, onnx_file_of_convolutions, openvino_session, session
from benchmarks.inference.products import in_milliseconds
from benchmarks.inference.scenes import Trained
from benchmarks.inference.whole_models import Accuracies
from benchmarks.support.tables import head, row
from benchmarks.support.timing import ratio
from secateur.inference import pack
from secateur.native import describe

ZEROS = (0.8, 0.9, 0.95, 0.98)
SHARES = (0.75, 0.9, 0.95)  # of the multiply-adds, that leave
CALIBRATED = 64  # images, for the ranges of activations
FLOATS = ("dense, torch", "dense, torch.compile frozen", "dense, ONNX Runtime", "dense, OpenVINO")
INTS = ("dense int8, ONNX Runtime", "dense int8, OpenVINO")

Row = tuple[str, str, str, Callable[[Tensor], Any]]  # (what, asked, told, call)


def engines(model: nn.Module, trained: Trained, folder: Path) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """The exported network in each engine, in float32 and int8."""
    folder.mkdir()
    x = trained.scenes.test_images[:1]
    generator = torch.Generator().manual_seed(3)
    ranges = trained.scenes.batch(CALIBRATED, generator, trained.scenes.size)[0]
    plain = onnx_file(folder / "float.onnx", model, (x,), False)
    rounded = onnx_file_of_convolutions(folder / "int8.onnx", model, (x,), [(image,) for image in ranges.split(1)])
    for name, path, precision in (
        ("OpenVINO", plain, "f32"),
        ("bfloat16, OpenVINO", plain, "bf16"),
        ("int8, OpenVINO", rounded, "f32"),
    ):
        if (made := openvino_session(path, 1, precision)) is not None:
            yield name, partial(_first, made)
    yield "ONNX Runtime", session(plain, 1)
    yield "int8, ONNX Runtime", session(rounded, 1)


def _first(call: Callable[..., Any], x: Tensor) -> Any:
    return call(x)[0]


def packed(model: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, str]:
    """A packed copy, and how many layers were packed."""
    served = copy.deepcopy(model)
    packing = pack(served, x, **options)
    return served, f"{len(packing.packed)} of {len(packing.layers)} layers packed"


def rows(trained: Trained, folder: Path, compiling: bool) -> Iterator[Row]:
    x, dense = trained.scenes.test_images[:1], trained.dense().requires_grad_(False)
    yield "dense, torch", "", "", dense
    if compiling:
        yield "dense, torch.compile frozen", "", "", frozen(copy.deepcopy(dense), x)
    for engine, call in engines(dense, trained, folder / "dense"):
        yield f"dense {engine}" if engine.startswith(("int8", "bfloat16")) else f"dense, {engine}", "", "", call
    for share in SHARES:
        model, asked = trained.shrunken(share).requires_grad_(False), f"−{share:.0%}"
        yield "`shrink`, torch", asked, "", model
        for engine, call in engines(model, trained, folder / f"shrunken-{share:g}"):
            if not engine.startswith("bfloat16"):
                yield f"`shrink`, {engine}", asked, "", call
    for zeros in ZEROS:
        model, asked = trained.sparse(zeros).requires_grad_(False), f"{zeros:.0%} zeros"
        yield "`Pruner`, torch", asked, "", model
        for name, options in (("`pack`", {}), ("`pack` in int8", {"values": "int8", "inputs": "int8"})):
            served, told = packed(model, x, **options)
            yield f"`Pruner`, {name}", asked, told, served


def bench_trained(options: argparse.Namespace) -> None:
    trained = Trained(options.cache, options.scene_size, *options.scene_steps)
    trained.all(ZEROS, SHARES)
    torch.set_num_threads(1)
    known = Accuracies(trained.cache / "right.json")
    x = trained.scenes.test_images[:1]
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    facts: dict[tuple[str, str], tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for what, asked, told, call in rows(trained, Path(folder), not options.without_compiling):
            # what is packed is chosen by this run's times, so it is judged anew
            judge = partial(trained.right, call, 1)
            right = judge() if "pack" in what else known.of(f"{what} {asked}".strip(), judge)
            calls[what, asked], facts[what, asked] = partial(call, x), (right, told)
            print(f"  {what} {asked}: {right:.2f} {told}", flush=True)
        times = in_milliseconds(calls, options.rounds, options.clock)
    medians = {name: statistics.median(own) for name, own in times.items()}
    fastest, fastest_int8 = (
        min(((name, "") for name in names if (name, "") in medians), key=lambda key: medians[key])
        for names in (FLOATS, INTS)
    )
    print(
        f"\n{describe()}; one image of {options.scene_size}×{options.scene_size}, one thread, {options.clock} clock;"
        f" {len(trained.scenes.test_labels)} unseen images\n"
    )
    print(f"trained for {options.scene_steps[0]} steps, then each form for {options.scene_steps[1]}", end="; ")
    print(f"fastest dense in float32: {fastest[0]}; in int8: {fastest_int8[0]}\n")
    print(
        head(["what", "asked", "ms", "times the fastest dense float32", "times the fastest dense int8", "right, %", ""])
    )
    for key, (right, told) in facts.items():
        faster = [f"{ratio(times[key], times[rival]):.2f}" for rival in (fastest, fastest_int8)]
        print(row([*key, f"{medians[key]:.2f}", *faster, f"{right:.1f}", told]), flush=True)
