"""Detectors of Ultralytics without a part of their multiply-adds: what they find at once, and after so many epochs.

    python benchmarks/detectors/run.py figures FOLDER [--rows FILE] [--only NAMES] [--seconds 480] [--slots 16]
    python benchmarks/detectors/run.py times FOLDER [--rows FILE] [--rounds 40]
    python benchmarks/detectors/run.py table --rows FILE

`figures` draws scenes in FOLDER, trains each detector from nothing in three seeds, makes it smaller by `shrink` on 128
training pictures without labels, and trains it on for 1, 5 and 20 epochs, also as Ultralytics' `train` does of itself.
Beside it: Torch-Pruning 1.6.1 by the steps of its own example, and a narrower detector of the family that is trained
from nothing for as many epochs in all. At once alone: with steps of `recover` on the same pictures, in eights, by
milliseconds of ONNX Runtime, and for one class, where the others leave and pictures of it decide.
`times` are of ONNX Runtime and torch, of one picture and one thread, every form of a detector in turns.

Law: forms of one detector share pictures, batches, learning rates and seeds; multiply-adds are counted by torch on the
model that is left. What was not done in time has no row, and what failed has a row that says how.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder, whose names would hide packages
from benchmarks.detectors.jobs import Job, Work, do
from benchmarks.support.rows import add_row, read_rows
from benchmarks.support.tables import head, row, spread

LEVELS = (0.2, 0.4, 0.6)
LATE = 10
EPOCHS = (1, 5, 20)  # of training after a detector became smaller
DENSE, OURS, THEIRS, NARROWER = "dense", "shrink", "Torch-Pruning", "narrower"
EIGHTS, TIMED, ONE = "shrink in eights", "shrink by time", "shrink for one class"
OWN = ", then Ultralytics' defaults"
TAUGHT, STEPS = "shrink, then recover", 400  # on the pictures that shrink is given
PRUNED_BY_PEER = {"YOLOv8n-seg": 1e9, "YOLO11n": 150.0, "YOLO26n": 600.0}  # seconds, after which it is stopped


@dataclass(frozen=True)
class Told:
    """What all jobs share, as the command was told."""

    folder: Path
    device: str
    epochs: int
    batch: int
    scenes: tuple[int, int]
    calibrated: int
    size: int
    shrink_on: str


def jobs_of(subjects: Sequence[str], seeds: int, peers: bool) -> Iterator[Job]:
    """All, in the order of what is asked first: the dense detectors; ours and Torch-Pruning's by detector; narrower
    ones. RT-DETR, which learns slowly from nothing, comes last."""
    for place, subject in enumerate(subjects):
        late = LATE * (subject == "RT-DETR")
        for seed in range(seeds):
            job = functools.partial(Job, subject=subject, seed=seed)
            yield job((late, place, seed), method=DENSE)
            for number, level in enumerate(LEVELS):
                yield job((late + 1, place, 0, seed), method=OURS, level=level)
                for epochs in EPOCHS:
                    yield job((late + 1, place, 1, seed, -epochs, number), method=OURS, level=level, epochs=epochs)
                    if not late:
                        own = (late + 1, place, 1, seed, -epochs, number, 1)
                        yield job(own, method=OURS + OWN, level=level, epochs=epochs, start=OURS)
                yield job((late + 1, place, 0, seed, 1), method=TAUGHT, level=level)
                if not peers:
                    continue
                if subject in PRUNED_BY_PEER and (subject == "YOLOv8n-seg" or (seed, number) == (0, 0)):
                    limit = PRUNED_BY_PEER[subject]
                    yield job((late + 1, place, 2, seed, number), method=THEIRS, level=level, seconds=limit)
                    for epochs in EPOCHS:
                        after = (late + 1, place, 2, seed, -epochs, number)
                        yield job(after, method=THEIRS, level=level, epochs=epochs)
                        yield job((*after, 1), method=THEIRS + OWN, level=level, epochs=epochs, start=THEIRS)
                yield job((late + 2, abs(number - 1), seed), method=NARROWER, level=level)  # the middle is asked most
            yield job((late + 3, place, seed), method=DENSE, epochs=max(EPOCHS))
            for epochs in () if late else EPOCHS:
                yield job((late + 3, place, seed, 1), method=DENSE + OWN, epochs=epochs, start=DENSE)
        if peers:
            for level in LEVELS:
                for number, method in enumerate((ONE, EIGHTS, TIMED)):
                    if method != ONE or subject == "YOLO11n":
                        yield Job((4, place, number, level), subject, 0, method, level)


def with_operators() -> None:
    """Beside a torch for processors, torchvision's wheel has no operators of its own."""
    import torch

    if torch.version.cuda is None:
        from tests.wild.operators import provide

        provide()


def worker(told: Told) -> Work:
    """Imports what is heavy, once a process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    with_operators()
    return functools.partial(_done, told)


def _done(told: Told, job: Job) -> dict[str, Any]:
    import torch

    from benchmarks.detectors.peers import pruned_to
    from benchmarks.detectors.scenes import CLASSES, of_one_class
    from benchmarks.detectors.training import (
        SUBJECTS,
        Setting,
        built,
        judge,
        multiply_adds,
        train,
        train_by_default,
    )

    setting = Setting(told.folder / "scenes/data.yaml", told.folder / "runs", told.size, told.batch, told.device)
    subject, found = SUBJECTS[job.subject], {}
    if job.method == ONE:
        setting = replace(setting, data=of_one_class(setting.data, 0))
    models = told.folder / "models"
    torch.manual_seed(job.seed)
    if job.needs is None and job.method == DENSE:
        model = built(subject, len(CLASSES))
        model = train(model, subject, setting, told.epochs, job.seed, tuning=False)
    elif job.needs is None:
        model = built(subject, len(CLASSES), width_for(subject, job.level, told.size))
        model = train(model, subject, setting, told.epochs + max(EPOCHS), job.seed, tuning=False)
    else:
        model = torch.load(models / f"{job.needs}.pt", weights_only=False)
        started = time.process_time(), time.perf_counter()
        if job.epochs:
            tune = train_by_default if job.method.endswith(OWN) else functools.partial(train, tuning=True)
            model = tune(model, subject, setting, job.epochs, job.seed)
        elif job.method == THEIRS:
            model = pruned_to(model, job.level, told.size)
        else:
            model = shrunk(model, job, subject, setting, told)
        spent = time.process_time() - started[0], time.perf_counter() - started[1]
        found = {"processor": round(spent[0], 1), "s": round(spent[1], 1)}
    judged = judge(model, subject, setting)
    found |= {"first": judged["first"]} if job.method == ONE else judged
    found |= {
        "multiply_adds": multiply_adds(model, told.size),
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    if not job.epochs:
        torch.save(model, models / f"{job.name}.unfinished")
        (models / f"{job.name}.unfinished").rename(models / f"{job.name}.pt")
        if not job.seed:
            exported(model, subject.task, models / f"{job.name}.pt", told.size)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def shrunk(model: Any, job: Job, subject: Any, setting: Any, told: Told) -> Any:
    """By what a reader would write: the detector, a folder of pictures without labels, and how much."""
    import ultralytics  # type: ignore[import-not-found, unused-ignore]

    from secateur.integrations.ultralytics import shrink_detector

    dense = (ultralytics.RTDETR if subject.task == "rtdetr" else ultralytics.YOLO)(subject.yaml)
    dense.model = model.to(told.shrink_on)
    folder = setting.data.parent / "images/train"
    how = {
        EIGHTS: {"round_to": 8},
        TIMED: {"target": "latency", "runtime": "onnxruntime"},
        ONE: {"classes": [0]},
        TAUGHT: {"steps": STEPS},
    }.get(job.method, {})
    return shrink_detector(dense, folder, job.level, imgsz=told.size, samples=told.calibrated, **how).model.cpu()


def width_for(subject: Any, level: float, size: int) -> float:
    """The width of a whole detector of the family that leaves so many multiply-adds, as nearly as there is one."""
    from benchmarks.detectors.scenes import CLASSES
    from benchmarks.detectors.training import built, described, multiply_adds

    told = described(subject)
    width = told["scales"][told.get("scale") or next(iter(told["scales"]))][1]
    whole = multiply_adds(built(subject, len(CLASSES)), size)
    widths = [width * (step / 16) for step in range(8, 16)]
    counts = [multiply_adds(built(subject, len(CLASSES), each), size) for each in widths]
    return min(zip(widths, counts, strict=True), key=lambda each: abs(each[1] - (1 - level) * whole))[0]


def figures(options: argparse.Namespace) -> None:
    import onnx  # noqa: F401  # the exporter needs it, when what takes hours is trained

    from benchmarks.detectors.scenes import draw_scenes
    from benchmarks.detectors.training import classes_of

    started = time.perf_counter()
    told = Told(
        options.folder.resolve(), options.device, options.epochs, options.batch, tuple(options.scenes),
        options.calibrated, options.size, options.shrink_on,
    )  # fmt: skip
    (told.folder / "models").mkdir(parents=True, exist_ok=True)
    train, val = told.scenes
    data = draw_scenes(told.folder / "scenes", {"train": train, "val": val}, told.size)
    read_once(data, told.size, classes_of)
    print(f"{train} + {val} scenes of {told.size}×{told.size} after {time.perf_counter() - started:.0f} s", flush=True)
    do(
        (
            job
            for job in jobs_of(options.subjects.split(","), options.seeds, not options.without_peers)
            if re.search(options.only, job.name)
        ),
        worker,
        (told,),
        rows=options.rows,
        slots=options.slots,
        seconds=options.seconds - (time.perf_counter() - started),
        gigabytes=options.gigabytes,
    )


def read_once(data: Path, size: int, prepare: Callable[[str], object]) -> None:
    """Ultralytics notes beside the labels what it read of them; processes that do so at once would meet."""
    with_operators()
    prepare("detect")
    from ultralytics.cfg import get_cfg  # type: ignore[import-not-found, unused-ignore]
    from ultralytics.data.build import build_yolo_dataset  # type: ignore[import-not-found, unused-ignore]
    from ultralytics.data.utils import check_det_dataset  # type: ignore[import-not-found, unused-ignore]

    found = check_det_dataset(str(data))
    for split in ("train", "val"):
        build_yolo_dataset(get_cfg(overrides={"imgsz": size}), found[split], 16, found, mode="val", stride=32)


def times(options: argparse.Namespace) -> None:
    """Milliseconds of each form of the first seed, as it was exported, and in torch."""
    import torch

    from benchmarks.detectors.training import at_home
    from benchmarks.support.timing import alternating

    torch.set_num_threads(1)
    with_operators()
    at_home()
    x = torch.rand(1, 3, options.size, options.size)
    for subject in options.subjects.split(","):
        calls: dict[str, Callable[[], object]] = {}
        for file in sorted((options.folder / "models").glob(f"{subject}-0-*.onnx")):
            model = torch.load(file.with_suffix(".pt"), weights_only=False).eval().requires_grad_(False)
            calls[f"ONNX Runtime {file.stem}"] = in_runtime(file, options.size)
            calls[f"torch {file.stem}"] = functools.partial(model.fuse(verbose=False), x)
        if not calls:
            continue
        with torch.inference_mode():
            found = alternating(calls, options.rounds, warm_up=3, repeats=2, middle=True)
        for name, own in found.items():
            engine, _, form = name.rpartition(" ")
            milliseconds = round(1e3 * statistics.median(own), 3)
            add_row(options.rows, {"name": name, "engine": engine, "form": form, "ms": milliseconds})
            print(f"{milliseconds:8.2f} ms  {name}", flush=True)


def exported(model: Any, task: str, file: Path, size: int) -> None:
    """What Ultralytics' exporter makes of a copy, beside the file."""
    from ultralytics.engine.exporter import Exporter  # type: ignore[import-not-found, unused-ignore]

    served = copy.deepcopy(model).cpu()
    served.pt_path, served.task = str(file), "detect" if task == "rtdetr" else task
    Exporter(overrides={"format": "onnx", "imgsz": size, "batch": 1, "simplify": False, "device": "cpu"})(model=served)


def in_runtime(file: Path, size: int) -> Callable[[], object]:
    """A call in one thread."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: np.random.default_rng(0).random((1, 3, size, size), dtype=np.float32)}
    return functools.partial(session.run, None, given)


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table a detector, of the means and deviations over seeds, and one of times."""
    subjects = list(dict.fromkeys(each["subject"] for each in rows if "subject" in each))
    for subject in subjects:
        own = [each for each in rows if each.get("subject") == subject and "multiply_adds" in each]
        for key, what in (("boxes", "boxes"), ("masks", "masks"), ("first", "boxes of the first class")):
            if any(key in each for each in own):
                yield f"\n{subject}, mAP50-95 of {what}; seeds: {len({each['seed'] for each in own if key in each})}\n"
                yield from _table(own, key)
        for each in rows:
            if each.get("subject") == subject and "failed" in each:
                yield f"\n{each['name']}: {each['failed']}"
        yield from _milliseconds(subject, rows)


def _table(own: Sequence[dict[str, Any]], key: str) -> Iterator[str]:
    yield head(["", "multiply-adds", "parameters", "at once", *(f"after {epochs}" for epochs in EPOCHS)])
    own = [each for each in own if key in each]
    dense = {each["seed"]: each for each in own if each["method"] == DENSE and not each["epochs"]}

    def cell(method: str, level: float, epochs: int) -> str:
        found = [each for each in own if (each["method"], each["level"], each["epochs"]) == (method, level, epochs)]
        if not found:
            return ""
        of_dense = [each[key] / whole for each in found if (whole := dense.get(each["seed"], {}).get(key))]
        share = f" ({statistics.mean(of_dense):.1%})" if of_dense else ""
        return spread([each[key] for each in found], 3) + share

    def left(method: str, level: float, what: str) -> str:
        found = [
            each[what] / dense[each["seed"]][what]
            for each in own
            if (each["method"], each["level"]) == (method, level) and each["seed"] in dense
        ]
        return f"{statistics.mean(found):.3f}" if found else ""

    for method, level in dict.fromkeys((each["method"], each["level"]) for each in sorted(own, key=_place)):
        told = method if method.startswith(DENSE) else f"−{level:.0%}, {method}"
        cells = [cell(method, level, epochs) for epochs in (0, *EPOCHS)]
        if method == NARROWER:  # from nothing, for as long as the others in all
            cells = ["", "", "", cells[0]]
        yield row([told, left(method, level, "multiply_adds"), left(method, level, "parameters"), *cells])


def _place(each: dict[str, Any]) -> tuple[float, int, bool]:
    bare = each["method"].removesuffix(OWN)
    place = (DENSE, OURS, TAUGHT, ONE, EIGHTS, TIMED, THEIRS, NARROWER).index(bare)
    return each["level"], place, each["method"] != bare


def _milliseconds(subject: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = [each for each in rows if "ms" in each and each["form"].startswith(f"{subject}-0-")]
    if found:
        forms = list(dict.fromkeys(each["form"] for each in found))
        of = {(each["engine"], each["form"]): each["ms"] for each in found}
        yield f"\n{subject}, milliseconds of one picture in one thread\n"
        engines = list(dict.fromkeys(each["engine"] for each in found))
        yield head(["", *engines])
        for form in forms:
            whole = [of[engine, f"{subject}-0-dense-0-0"] for engine in engines]
            own = [of[engine, form] for engine in engines]
            yield row(
                [
                    re.sub(r"(-0)+$", "", form.removeprefix(f"{subject}-0-")).replace("-0.", " −0."),
                    *(f"{one:.2f} ({one / other:.2f})" for one, other in zip(own, whole, strict=True)),
                ]
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("figures", "times", "table"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/tmp/secateur-detectors"))
    parser.add_argument("--rows", type=Path, help="a file to which rows are added; what is there is not done again")
    parser.add_argument("--subjects", default="YOLO11n,YOLO26n,YOLOv8n-seg,RT-DETR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression that the names of jobs have, as rows say them")
    parser.add_argument("--scenes", type=int, nargs=2, default=(1024, 256), metavar=("TRAIN", "VAL"))
    parser.add_argument("--size", type=int, default=128, help="of a picture's side")
    parser.add_argument("--epochs", type=int, default=90, help="of the dense detectors")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--calibrated", type=int, default=128, help="training pictures that shrink is given")
    parser.add_argument("--device", default="cpu", help="on which is trained, as Ultralytics names it")
    parser.add_argument("--shrink-on", default="cpu", help="as torch names it")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which what is not done stays undone")
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of a process, which is stopped above that")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args(arguments)
    options.rows = options.rows or options.folder / "rows.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "figures":
        figures(options)
    if options.what == "times":
        times(options)
    print("\n".join(tables(read_rows(options.rows))))


if __name__ == "__main__":
    main()
