"""Detectors of Ultralytics, trained and judged on drawn scenes by Ultralytics' own trainers and validators.

Law: the trainer keeps the module that it is given, widths and all, and every form of a detector is trained with the
same pictures, batches, rates and seeds, and judged by the same validator: COCO's mAP, of intersections of 50 to 95 %.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.support import mapped

HOME = Path(os.environ.setdefault("YOLO_CONFIG_DIR", "/tmp/secateur-ultralytics"))
os.environ.update(YOLO_OFFLINE="true", YOLO_AUTOINSTALL="false", YOLO_VERBOSE="false")


@dataclass(frozen=True)
class Setting:
    """What is trained on, and how long.

    Attributes:
        data: the file that tells Ultralytics of the scenes.
        folder: where trainers write.
        size: of a picture's side, in pixels.
        batch: pictures of a step.
        device: as Ultralytics names it.
    """

    data: Path
    folder: Path
    size: int = 128
    batch: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Subject:
    """A detector: its name, Ultralytics' description of it, its task, its learning rate (of AdamW), and what a decoder
    is told after the classes, if not Ultralytics' defaults: width, queries, points, heads, layers, feed-forward width.
    """

    name: str
    yaml: str
    task: str = "detect"
    rate: float = 3e-3
    decoder: tuple[int, ...] = ()


SUBJECTS = {
    each.name: each
    for each in (
        Subject("YOLO11n", "yolo11n.yaml"),
        Subject("YOLO26n", "yolo26n.yaml"),
        Subject("YOLOv8n-seg", "yolov8n-seg.yaml", "segment"),
        # the smallest that Ultralytics describes takes 20 times as long for a step: 256, 300, 4, 8, 6, 1024
        Subject("RT-DETR", "yolov8n-rtdetr.yaml", "rtdetr", 4e-4, decoder=(128, 50, 4, 4, 3, 256)),
    )
}
VIEWS = 4  # of each picture, augmented
TUNING = 0.5  # times the rate, after a detector became smaller


def classes_of(task: str, *, views: bool = True) -> tuple[type[Any], type[Any]]:
    """Ultralytics' trainer and validator; a trainer that neither judges nor saves between."""
    at_home()
    if task == "rtdetr":
        from ultralytics.models.rtdetr.train import RTDETRTrainer as Trainer  # type: ignore
        from ultralytics.models.rtdetr.val import RTDETRValidator as Validator
    elif task == "segment":
        from ultralytics.models.yolo.segment import SegmentationTrainer as Trainer
        from ultralytics.models.yolo.segment import SegmentationValidator as Validator
    else:
        from ultralytics.models.yolo.detect import DetectionTrainer as Trainer
        from ultralytics.models.yolo.detect import DetectionValidator as Validator

    class Quiet(Trainer):  # type: ignore[misc, valid-type, unused-ignore]
        def get_dataloader(self, path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
            loader = super().get_dataloader(path, batch_size, rank, mode)
            return Views(loader, self.device) if views and mode == "train" else loader

        def validate(self) -> tuple[dict[str, float], float]:
            return {}, 0.0

        def save_model(self) -> bool:
            return False

        def save_metrics(self, metrics: dict[str, float]) -> None:
            pass

        def final_eval(self) -> None:
            pass

    return Quiet, Validator


class Views:
    """The batches of a few epochs of Ultralytics' own loader, augmented as it does, held on the device and given again
    and again: what is trained here is so small that to read pictures takes longer."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.epochs: list[list[dict[str, Any]]] = []
        self.epoch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if len(self.epochs) < VIEWS:
            self.epochs.append([mapped(batch, lambda tensor: tensor.to(self.device)) for batch in self.loader])
            batches = self.epochs[-1]
        else:
            batches = random.sample(self.epochs[self.epoch % VIEWS], len(self.loader))
        self.epoch += 1
        for batch in batches:
            yield dict(batch)  # a trainer puts other tensors into it


def at_home() -> None:
    """Ultralytics looks for a font whenever it reads scenes, in the network if need be: one lies where it looks. Its
    suppression leaves off after some seconds of the clock, and on a busy machine most boxes with it: here it does not.
    """
    import matplotlib
    from ultralytics.utils import LOGGER, USER_CONFIG_DIR, nms  # type: ignore[import-not-found, unused-ignore]

    LOGGER.setLevel(logging.ERROR)
    if not isinstance(nms.non_max_suppression, functools.partial):
        nms.non_max_suppression = functools.partial(nms.non_max_suppression, max_time_img=1e6)
    font = Path(USER_CONFIG_DIR) / "Arial.ttf"
    if not font.exists():
        shutil.copy(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", font)


def _told(subject: Subject, setting: Setting, **more: Any) -> dict[str, Any]:
    return {
        "data": str(setting.data), "task": "detect" if subject.task == "rtdetr" else subject.task,
        "imgsz": setting.size, "batch": setting.batch, "device": setting.device, "workers": 0,
        "project": str(setting.folder), "plots": False, "verbose": False, **more,
    }  # fmt: skip


def described(subject: Subject, width: float | None = None) -> dict[str, Any]:
    """Ultralytics' description of a detector, all of it as wide as is said."""
    from ultralytics.nn.tasks import yaml_model_load  # type: ignore[import-not-found, unused-ignore]

    told: dict[str, Any] = yaml_model_load(subject.yaml)
    if subject.decoder:
        told["head"][-1][3] = ["nc", *subject.decoder]
    if width is not None:
        scale = told.get("scale") or next(iter(told["scales"]))
        depth, _, most = told["scales"][scale]
        told = {**told, "scales": {scale: [depth, width, most]}, "scale": scale}
    return told


def built(subject: Subject, classes: int, width: float | None = None) -> nn.Module:
    """A detector with random weights."""
    from ultralytics.nn import tasks

    kind = {"detect": "DetectionModel", "segment": "SegmentationModel", "rtdetr": "RTDETRDetectionModel"}[subject.task]
    made: nn.Module = getattr(tasks, kind)(described(subject, width), nc=classes, verbose=False)
    return made


def train(model: nn.Module, subject: Subject, setting: Setting, epochs: int, seed: int, *, tuning: bool) -> nn.Module:
    """The model, trained for so many epochs; it comes back as the running mean of its weights, on the processor."""
    rate = subject.rate * (TUNING if tuning else 1.0)
    return _trained(
        model, subject, setting, epochs=epochs, seed=seed, optimizer="AdamW", lr0=rate, cos_lr=True, momentum=0.9,
        warmup_bias_lr=0.0, warmup_epochs=0 if tuning else 3, mosaic=0.0, close_mosaic=0, amp=False,
        deterministic=False, patience=0, nbs=setting.batch,
    )  # fmt: skip


def train_by_default(model: nn.Module, subject: Subject, setting: Setting, epochs: int, seed: int) -> nn.Module:
    """The same as by ``YOLO.train(data=..., epochs=..., imgsz=...)``: AdamW from 0.01 / (4 + classes) on, three epochs
    of warm-up, batches of 16, and four pictures in one until the last ten epochs."""
    return _trained(model, subject, setting, views=False, epochs=epochs, seed=seed, batch=16, amp=False)


@torch.enable_grad()
def _trained(model: nn.Module, subject: Subject, setting: Setting, *, views: bool = True, **how: Any) -> nn.Module:
    trainer_class, _ = classes_of(subject.task, views=views)
    name = f"{subject.name}-{os.getpid()}"
    usual = {"val": False, "save": False, "cache": "ram", "mode": "train", "exist_ok": True, "name": name}
    trainer = trainer_class(overrides={**_told(subject, setting, model=subject.yaml, **usual), **how})
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    trainer.model = model  # which `setup_model` leaves alone: the widths stay
    trainer.train()
    made: nn.Module = copy.deepcopy(trainer.ema.ema).cpu().float().eval()
    return made


def judge(model: nn.Module, subject: Subject, setting: Setting) -> dict[str, float]:
    """mAP50-95 of boxes, and of masks where there are some; ``"first"``: of boxes of the first class alone."""
    _, validator_class = classes_of(subject.task)
    told = _told(
        subject, setting, model=subject.yaml, mode="val", rect=False, exist_ok=True, name=f"judged-{os.getpid()}"
    )
    validator = validator_class(args=told)
    found = validator(model=copy.deepcopy(model).eval())  # a validator fuses what it is given
    judged = {
        letter: float(found[key])
        for letter, key in (("boxes", "metrics/mAP50-95(B)"), ("masks", "metrics/mAP50-95(M)"))
        if key in found
    }
    return {**judged, "first": float(validator.metrics.box.maps[0])}


def multiply_adds(model: nn.Module, size: int) -> int:
    """Of one picture in use, as torch counts them, whoever made the model."""
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        copy.deepcopy(model).eval()(torch.zeros(1, 3, size, size, device=device))
    return counter.get_total_flops() // 2
