"""In Ultralytics: detectors that get smaller, and that stay so when they train; and a Pruner while they do.

Law: a smaller detector is a checkpoint of Ultralytics, which predicts, validates and exports where nothing else is
installed. Training keeps its widths, or says that it cannot.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import ultralytics
    from ultralytics.engine import trainer as training
    from ultralytics.nn import tasks
    from ultralytics.utils.checks import check_yolov5u_filename

    if torch.torch_version.TorchVersion(ultralytics.__version__) < "8.4.150":  # whose `val` folds a model in place
        raise ImportError(f"8.4.150 or newer, not {ultralytics.__version__}")
except ImportError as error:
    raise ImportError(f"detectors need Ultralytics ({error}): pip install 'secateur[ultralytics]'.") from error

from secateur.kinds import Outputs
from secateur.recovery import Recovered, rate_for, recover
from secateur.shrinking import Shrunk, shrink
from secateur.support import write_whole
from secateur.training import Pruner

_BATCH = 8  # pictures at once
_FILE = "pruner.pt"
# in front of the layers that model.yaml names: whoever builds the whole model of it stops here, and reads this
_NARROWER = "this detector is narrower than its yaml says: train it by secateur.integrations.ultralytics.YOLO"


def shrink_detector(
    model: Any,
    pictures: Any,
    sparsity: float | None = None,
    *,
    target: str = "macs",
    classes: Sequence[int | str] | None = None,
    imgsz: int | None = None,
    samples: int = 128,
    steps: int = 0,
    seed: int = 0,
    **options: Any,
) -> YOLO:
    """A smaller detector, as `secateur.shrink` makes it of unlabelled pictures; what it is made of stays as it is.

    Args:
        model: a ``.pt`` of Ultralytics, or a model of it (``ultralytics.YOLO``, ``RTDETR``). A file is a pickle, which
            can run any code; so it is read by ``weights_only``, as classes of torch and Ultralytics alone. Of one that
            holds others, whoever trusts it gives ``ultralytics.YOLO(path)``.
        pictures: a folder, files, arrays, a video: what ``model.predict`` takes. They go through the model's own
            predictor, with ``rect=False``. None: weights alone choose, which ruins a trained detector.
        sparsity, target: how much leaves, and of what: multiply-adds, ``"params"``, ``"latency"`` (of a picture, in
            torch, on the model's device) or ``"units"``.
        classes: those that stay, by name or number; the others leave, with what only they needed, and names and numbers
            follow. With ``sparsity`` None nothing else leaves.
        imgsz: the side of a picture in pixels; None: what the model was trained at.
        samples: how many pictures, of more that many are drawn by ``seed``.
        steps: of `secateur.recover` afterwards, each on eight of the pictures: by what the detector finds in them.
        options: further arguments of `secateur.shrink`, such as ``round_to=8`` for TensorRT and most NPUs.

    Returns:
        A `YOLO`, in float32, which trains, validates, exports and tracks as Ultralytics does; ``.shrunk`` is what left,
        and ``.recovered`` what steps came to, or None.

    Raises:
        FileNotFoundError: there is no such file; none is loaded from elsewhere. TypeError: what is no model.
            ValueError: a file that is damaged or holds other classes; no pictures; what `secateur.shrink` refuses.
    """
    if steps and pictures is None:
        raise ValueError(f"steps={steps} learn from pictures, and there are none: give some, or steps=0.")
    dense = _loaded(model)
    size = imgsz or dense.overrides.get("imgsz") or 640
    small: YOLO = _copied(dense)
    batches = None if pictures is None else _batches(dense, pictures, size, samples, seed)
    channels = small.model.yaml.get("channels", 3)
    on = next(small.model.parameters()).device
    example = batches[0][:1].to(on) if batches else torch.zeros(1, channels, size, size, dtype=torch.float32, device=on)
    if classes is not None:
        names = [each for each in ("cv3", "one2one_cv3", "linear") if hasattr(small.model.model[-1], each)]
        options["leave"] = Outputs([f"model.{len(small.model.model) - 1}.{name}" for name in names], keep=classes)
    with _without_features(small.model):
        small.shrunk = shrink(small.model, example, sparsity, target=target, batches=batches, **options)
    for module in small.model.modules():
        if hasattr(module, "forward_split"):  # which exporters call, and which splits by a number that no pass reads
            module.c = module.cv1.conv.out_channels // 2
    if classes is not None:  # a classifier reads its number of them in no pass
        small.model.yaml = {**small.model.yaml, "nc": len(small.names)}
    if steps and batches:
        teacher = dense if classes is None else shrink_detector(dense, None, classes=classes, imgsz=size)
        still = [each for each in small.model.parameters() if not each.requires_grad]  # all, of a file
        own, theirs = small.model.requires_grad_(True), copy.deepcopy(teacher.model).float()
        small.recovered = recover(own, theirs, batches, steps=steps, local=0, rate=rate_for(steps), seed=seed)
        for each in still:
            each.requires_grad_(False)
    if vars(small.model).pop("shrink_plans", None):  # of classes that a process without secateur has not
        small.model.yaml = _marked(small.model.yaml)
    return small


class _KeepsWidths:
    """What an object of Ultralytics does otherwise where its model is narrower than its yaml says."""

    model: Any
    shrunk: Shrunk
    recovered: Recovered | None

    def train(self, trainer: Any = None, **kwargs: Any) -> Any:
        """As Ultralytics trains, with the widths that the model has. The rate that it takes of itself suits a smaller
        detector (benchmarks/detectors), so none is set here."""
        return super().train(trainer=keeps_widths(trainer or self._trainer()), **kwargs)  # type: ignore[misc]

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        """As Ultralytics tunes, in this process, with the widths that the model has."""
        own = self._trainer()

        class Here(training.MultiTrainer):  # Ultralytics gives None, and trains by its command
            def __init__(self, trainer: Any, *others: Any, **options: Any) -> None:
                super().__init__(keeps_widths(trainer or own), *others, **options)

        theirs, training.MultiTrainer = training.MultiTrainer, Here
        try:
            return super().tune(*args, **kwargs)  # type: ignore[misc]
        finally:
            training.MultiTrainer = theirs

    def save(self, filename: Path | str = "saved_model.pt") -> None:
        """As Ultralytics saves, whole or not at all; what is exported then lies beside this file."""
        buffer = io.BytesIO()
        super().save(buffer)  # type: ignore[misc]
        write_whole(filename, buffer.getvalue())
        self.model.pt_path = str(filename)

    def _trainer(self) -> Any:
        return self.task_map[self.task]["trainer"]  # type: ignore[attr-defined]


class YOLO(_KeepsWidths, ultralytics.YOLO):
    """``ultralytics.YOLO``, whose ``train``, ``tune`` and ``resume`` keep the widths of a smaller detector.

    Of a checkpoint that is not narrower, nothing differs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__class__ = _keeping(type(self))  # which Ultralytics made another, such as RTDETR


def _keeping(kind: Any) -> Any:
    return kind if issubclass(kind, _KeepsWidths) else type(kind.__name__, (_KeepsWidths, kind), {})


def keeps_widths(trainer: Any) -> Any:
    """A trainer of Ultralytics that trains a narrower model as it is, where it would build the whole one.

    ``ultralytics.YOLO("small.pt").train(trainer=keeps_widths(DetectionTrainer), data=...)``
    """

    class Keeping(trainer):
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
            if weights is None or not _is_narrower(weights):
                return super().get_model(cfg, weights, verbose)
            described = _unmarked(weights.yaml)
            asked = super().get_model(copy.deepcopy(described), None, verbose=False).yaml
            for key, what in (("nc", "classes"), ("channels", "channels of a picture"), ("kpt_shape", "keypoints")):
                has, wanted = described.get(key), asked.get(key)
                if has is not None and wanted is not None and has != wanted:
                    raise ValueError(
                        f"the data has other {what} ({wanted}) than the smaller detector ({has}): train the dense one "
                        "on this data, and shrink that."
                    )
            model = copy.deepcopy(weights).float()
            model.criterion = None
            for module in model.modules():
                if isinstance(module, nn.Dropout) and self.args.dropout:
                    module.p = self.args.dropout
            return model.requires_grad_(True)

    Keeping.__name__ = Keeping.__qualname__ = trainer.__name__
    return Keeping


class Pruning:
    """``Pruning(0.9).attach(model)``, then ``model.train(...)``; the arguments are those of `Pruner`, without the
    model's.

    The length of the run comes from the trainer. What is removed is zero in the checkpoints too, which are means over
    steps (EMA), and ``best.pt`` is the best of those that are as sparse as asked. The state lies beside them as
    ``pruner.pt``. After training, ``.pruner.masks``.

    Args:
        schedule: a sparsity or a schedule.
        options: further arguments of `Pruner`.
    """

    def __init__(self, schedule: Any = None, **options: Any) -> None:
        self.schedule, self.options = schedule, options
        self.pruner: Pruner | None = None
        self._was = 0.0

    def attach(self, model: Any) -> Pruning:
        """Follow what this model of Ultralytics trains."""
        model.add_callback("on_train_start", self._begin)
        model.add_callback("on_train_epoch_end", self._zero_mean)
        model.add_callback("on_model_save", self._save)
        return self

    def _begin(self, trainer: Any) -> None:
        each = max(1, math.ceil(len(trainer.train_loader) / trainer.accumulate))
        told = {"total_steps": each * trainer.epochs, "steps_per_epoch": each, "verbose": False}
        pruner = Pruner(trainer.model, trainer.optimizer, self.schedule, **{**told, **self.options})
        if trainer.start_epoch:
            pruner.load_state_dict(torch.load(trainer.wdir / _FILE, map_location="cpu", weights_only=True))
        self.pruner = pruner

    def _zero_mean(self, trainer: Any) -> None:
        assert self.pruner is not None
        if trainer.epoch + 1 >= trainer.epochs:  # before the last checkpoint
            self.pruner.finish()
        now = self.pruner.metrics()["sparsity"]
        if now != self._was:  # what was best so far is less sparse
            self._was, trainer.best_fitness = now, None
        means = dict(trainer.ema.ema.named_parameters())
        with torch.no_grad():
            for name, mask in self.pruner.masks.items():
                means[name].mul_(mask.to(means[name].device))

    def _save(self, trainer: Any) -> None:
        assert self.pruner is not None
        buffer = io.BytesIO()
        torch.save(self.pruner.state_dict(), buffer)
        write_whole(trainer.wdir / _FILE, buffer.getvalue())


# ---- The model, as it is given, and its copy.


def _loaded(model: Any) -> Any:
    if isinstance(model, Path | str):
        path = Path(model)
        if path.suffix != ".pt" or not path.is_file():
            raise FileNotFoundError(f"{path} is no .pt file; nothing is downloaded: load it with ultralytics.YOLO.")
        if check_yolov5u_filename(str(path), verbose=False) != str(path):
            raise ValueError(f"{path}: for this name Ultralytics downloads another file; give yours another name.")
        safe, tasks.SAFE_LOAD = tasks.SAFE_LOAD, True
        try:
            model = YOLO(str(path))
        except TypeError as error:
            raise ValueError(
                f"{path} is damaged, or holds other classes than those of torch and Ultralytics, whose code would run: "
                "if you trust it, give ultralytics.YOLO of it in its place, in Python."
            ) from error
        finally:
            tasks.SAFE_LOAD = safe
    if not isinstance(getattr(model, "model", None), tasks.BaseModel):
        raise TypeError(f"give a .pt, or a model of Ultralytics in PyTorch, not {type(model).__name__}.")
    return model


def _copied(dense: Any) -> Any:
    """The same with a model, options and callbacks of its own, named after the file that it is of."""
    kind = _keeping(type(dense))
    small = kind.__new__(kind)
    nn.Module.__init__(small)
    del small.training  # as Ultralytics does: that of its model counts
    callbacks = {event: list(each) for event, each in dense.callbacks.items()}
    trained = {"epoch": -1, "train_args": (dense.ckpt or {}).get("train_args", {})}  # no optimizer, which is wider
    own = dict.fromkeys(("predictor", "trainer", "metrics", "recovered")) | {"callbacks": callbacks, "ckpt": trained}
    for name, value in {**vars(dense), **own, "overrides": dict(dense.overrides)}.items():
        if name not in vars(small):
            setattr(small, name, value)
    small.model = copy.deepcopy(dense.model).float().eval()
    path = Path(getattr(dense.model, "pt_path", None) or dense.model_name or "model")
    small.model.pt_path = str(path.with_name(f"{path.stem}-small.pt"))
    return small


def _batches(dense: Any, pictures: Any, size: int, samples: int, seed: int) -> list[Tensor]:
    """The pictures as the model's own predictor prepares them: (pictures, channels, size, size), at most so many."""
    device = next(dense.model.parameters()).device
    asked = {"imgsz": size, "rect": False, "save": False, "verbose": False, "mode": "predict", "batch": _BATCH}
    made = dense.task_map[dense.task]["predictor"](overrides={**dense.overrides, **asked, "device": str(device)})
    made.setup_model(model=dense.model, verbose=False)
    found: list[Tensor] = []
    try:
        made.setup_source(pictures)
        files = getattr(made.dataset, "files", None)
        if files and len(files) > samples:
            made.setup_source(sorted(random.Random(seed).sample(files, samples)))
        for _, images, _ in made.dataset:
            found += made.preprocess(images).float().split(1)
            if len(found) >= samples:
                break
    except FileNotFoundError:
        found = []
    if not found:
        raise ValueError(f"{pictures}: there are no pictures; give a folder or files that Ultralytics reads.")
    return [torch.cat(found[at : at + _BATCH]).clone() for at in range(0, min(samples, len(found)), _BATCH)]


@contextmanager
def _without_features(model: nn.Module) -> Iterator[None]:
    """Within, a detector does not return the features before its head, of which training reads the shapes alone."""
    handle = model.register_forward_hook(lambda _module, _args, outputs: _featureless(outputs))
    try:
        yield
    finally:
        handle.remove()


def _featureless(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {key: _featureless(each) for key, each in outputs.items() if key != "feats"}
    return tuple(map(_featureless, outputs)) if isinstance(outputs, tuple) else outputs


# ---- What model.yaml says of a narrower model.


def _marked(described: dict[str, Any]) -> dict[str, Any]:
    return {**described, "backbone": [[-1, 1, _NARROWER, []], *_unmarked(described)["backbone"]]}


def _unmarked(described: dict[str, Any]) -> dict[str, Any]:
    return {**described, "backbone": [layer for layer in described["backbone"] if layer[2] != _NARROWER]}


def _is_narrower(model: Any) -> bool:
    """Whether a tensor has another shape than in the model that its yaml describes."""
    described = copy.deepcopy(_unmarked(model.yaml))
    whole = type(model)(described, ch=described.get("channels", 3), verbose=False).state_dict()
    return any(name in whole and each.shape != whole[name].shape for name, each in model.state_dict().items())
