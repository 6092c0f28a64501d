"""Detectors of Ultralytics through shrink, train, resume, val, export and load: `make detectors`.

Law: what is smaller stays so, loads where secateur is not, and what it was made of is as it was.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from wild.operators import provide

provide()

import ultralytics  # noqa: E402
from ultralytics.data.augment import classify_transforms  # noqa: E402
from ultralytics.nn.tasks import yaml_model_load  # noqa: E402
from ultralytics.utils import DEFAULT_CFG  # noqa: E402

import secateur.integrations.ultralytics as ours  # noqa: E402
from secateur import recover, shrink  # noqa: E402
from secateur.integrations.ultralytics import YOLO, Pruning, keeps_widths, shrink_detector  # noqa: E402
from support.alone import deterministic, environment, set_deterministic, set_environment  # noqa: E402
from support.commands import fails, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Ultralytics' own
ROOT = Path(__file__).parents[2]
SIDE = 64
ARCHITECTURES = [
    "yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n", "yolov8n-seg", "yolo11n-pose",
    "yolo11n-obb", "yolo11n-cls", "yolo26n-seg", "yolo26n-pose", "yolo26n-obb", "yolo26n-cls", "rtdetr-resnet50",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Ultralytics sets variables of the environment, and what torch computes alike."""
    was = environment(), deterministic()
    yield
    set_environment(was[0])
    set_deterministic(was[1])


def pictures(count: int, seed: int = 0) -> list[np.ndarray]:
    """Noise with a green and a blue square, (height, width, 3)."""
    drawn = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        image = drawn.integers(0, 80, (50, 70, 3), dtype=np.uint8)
        for colour in ((0, 255, 0), (255, 0, 0)):
            x, y = (int(each) for each in drawn.integers(5, 35, 2))
            cv2.rectangle(image, (x, y), (x + 14, y + 14), colour, -1)
        found.append(image)
    return found


def disturbed(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def built(name: str) -> ultralytics.YOLO:
    torch.manual_seed(0)
    found = (ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO)(f"{name}.yaml")
    disturbed(found.model)
    if found.task == "pose":  # as trainers leave it
        found.model.kpt_shape = found.model.yaml["kpt_shape"]
    if found.task == "classify":
        found.model.transforms = classify_transforms(SIDE)
    return found


def numbers(model: nn.Module, side: int) -> list[torch.Tensor]:
    example = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return [each for each in tree_leaves(model.eval()(example)) if isinstance(each, torch.Tensor)]


def in_training(model: ultralytics.YOLO) -> nn.Module:
    """What the trainer of its task trains, on data of the same classes."""
    trainer = object.__new__(keeps_widths(model.task_map[model.task]["trainer"]))
    described = model.model.yaml
    trainer.data = {"nc": described["nc"], "channels": 3, "kpt_shape": described.get("kpt_shape"), "names": model.names}
    trainer.args, trainer.resume = copy.copy(DEFAULT_CFG), False
    return trainer.get_model(cfg=described, weights=model.model, verbose=False)


def raw(outputs: object) -> dict[str, torch.Tensor]:
    """The boxes and scores of a head, before they are decoded."""
    if isinstance(outputs, dict):
        return outputs if "scores" in outputs else raw(outputs["one2many"])
    return raw(outputs[-1] if isinstance(outputs[-1], dict | tuple) else outputs[0])


def size(model: ultralytics.YOLO) -> int:
    return sum(each.numel() for each in model.model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of eight pictures, and a YOLO11 of an eighth of the width that was trained on it: ``dense.pt``."""
    root = tmp_path_factory.mktemp("detectors")
    for split in ("train", "val"):
        (root / "images" / split).mkdir(parents=True)
        (root / "labels" / split).mkdir(parents=True)
        for at, image in enumerate(pictures(8, seed=len(split))):
            cv2.imwrite(str(root / "images" / split / f"{at}.png"), image)
            (root / "labels" / split / f"{at}.txt").write_text("0 0.4 0.4 0.2 0.3\n1 0.6 0.5 0.2 0.3\n")
    text = f"path: {root}\ntrain: images/train\nval: images/val\nnames: "
    (root / "data.yaml").write_text(text + "{0: green, 1: blue}\n")
    (root / "three.yaml").write_text(text + "{0: green, 1: blue, 2: red}\n")
    described = {**yaml_model_load("yolo11n.yaml"), "scales": {"n": [0.5, 0.125, 1024]}}
    described.pop("yaml_file")
    from ultralytics.utils import YAML

    YAML.save(root / "yolo11n-tiny.yaml", described)
    dense = ultralytics.YOLO(str(root / "yolo11n-tiny.yaml"))
    dense.train(**how(root), epochs=1, name="dense")
    Path(dense.trainer.best).rename(root / "dense.pt")
    return root


def how(root: Path) -> dict[str, object]:
    return {
        "data": str(root / "data.yaml"), "imgsz": SIDE, "batch": 4, "plots": False, "workers": 0, "verbose": False,
        "project": str(root / "runs"), "mosaic": 0.0, "exist_ok": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def small(folder: Path) -> YOLO:
    """The smaller one, saved as ``small.pt``."""
    found = shrink_detector(folder / "dense.pt", folder / "images" / "train", 0.3)
    found.save(folder / "small.pt")
    return found


def alone(script: str, *arguments: object) -> str:
    """What a process says that has Ultralytics, and not secateur."""
    text = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from wild.operators import provide; provide()\n"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [sys.executable, "-c", text + script, *map(str, arguments)], capture_output=True, text=True, env=kept, cwd="/"
    )
    assert said.returncode == 0, said.stderr[-2000:]
    return said.stdout


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gets_smaller_and_is_saved_as_one_of_theirs(name: str, tmp_path: Path) -> None:
    side = 160 if name.startswith("rtdetr") else SIDE
    dense = built(name)
    before = copy.deepcopy(dense.model.state_dict())
    small = shrink_detector(dense, None, 0.3, imgsz=side)
    assert small.shrunk.got == pytest.approx(0.3, abs=0.03)
    assert all(map(torch.equal, before.values(), dense.model.state_dict().values())), "the dense one is as it was"
    assert isinstance(small, type(dense))
    small.save(tmp_path / "small.pt")
    again = YOLO(tmp_path / "small.pt")
    assert type(again).__mro__[2] is type(dense) or type(again) is YOLO
    assert size(again) == small.shrunk.parameters[1] < size(dense)
    half = copy.deepcopy(small.model).half().float()
    for found, wanted in zip(numbers(again.model, side), numbers(half, side), strict=True):
        assert torch.equal(found, wanted)
    assert ours._is_narrower(again.model)
    assert not ours._is_narrower(dense.model)
    assert {each.shape for each in in_training(again).parameters()} == {each.shape for each in half.parameters()}
    assert len(again.predict(pictures(1), imgsz=side, verbose=False)) == 1
    exported = torch.jit.load(again.export(format="torchscript", imgsz=side))(torch.rand(1, 3, side, side))
    assert all(each.isfinite().all() for each in tree_leaves(exported))
    batches = [torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    done = recover(small.model.requires_grad_(True), dense.model, batches, steps=3, local=0, rate=1e-5)
    words = {"classify": "mse", "detect": "detector + what selects" if name.startswith("rtdetr") else "detector"}
    assert done.loss == words.get(dense.task, "detector")
    assert size(small) == size(again)


@pytest.mark.parametrize("name", ["yolo26n", "yolo11n-pose"])
def test_steps_learn_what_the_dense_detector_finds(name: str) -> None:
    dense = built(name)
    asked = [each.requires_grad for each in dense.model.parameters()]
    before = copy.deepcopy(dense.model.state_dict())
    how = {"imgsz": SIDE, "samples": 8}
    small = shrink_detector(dense, pictures(8), 0.4, steps=24, **how)
    assert small.recovered.loss == "detector"
    assert len(small.recovered.losses) == 24
    assert small.recovered.judged.after < small.recovered.judged.before
    assert all(map(torch.equal, before.values(), dense.model.state_dict().values())), "the dense one is as it was"
    assert [each.requires_grad for each in small.model.parameters()] == asked
    again = shrink_detector(dense, pictures(8), 0.4, **how)
    assert size(again) == size(small)
    for own, other in zip(_projections(small.model), _projections(again.model), strict=True):
        assert torch.equal(own, other), "what distances are made by has no slope"
    assert not all(map(torch.equal, again.model.parameters(), small.model.parameters()))
    with pytest.raises(ValueError, match="steps=4 learn from pictures, and there are none: give some, or steps=0"):
        shrink_detector(dense, None, 0.4, steps=4)


def _projections(model: nn.Module) -> list[torch.Tensor]:
    return [each for name, each in model.named_parameters() if ".dfl." in name]


def test_steps_of_a_detector_of_fewer_classes(folder: Path) -> None:
    small = shrink_detector(folder / "dense.pt", pictures(8), 0.3, classes=[1], imgsz=SIDE, samples=8, steps=8)
    assert small.names == {0: "blue"}
    assert small.recovered.loss == "detector"
    assert small.recovered.judged.before < 0.1, "of a dense one with this class alone"


def test_what_is_saved_needs_no_secateur(small: YOLO, folder: Path) -> None:
    script = """
import ultralytics
model = ultralytics.YOLO(sys.argv[1])
print("size", sum(each.numel() for each in model.model.parameters()))
model.val(data=sys.argv[2], imgsz=64, plots=False, workers=0, project=sys.argv[3])
model.export(format="torchscript", imgsz=64)
try:
    model.train(data=sys.argv[2], imgsz=64, epochs=1, project=sys.argv[3])
except KeyError as error:
    print("says", error)
assert "secateur" not in sys.modules
"""
    said = alone(script, folder / "small.pt", folder / "data.yaml", folder / "runs")
    assert f"size {small.shrunk.parameters[1]}" in said
    assert ours._NARROWER in said, "a trainer that would build the whole model says why it does not"
    assert (folder / "small.torchscript").exists()


def test_pictures_are_those_of_the_models_own_predictor(folder: Path) -> None:
    for dense in (ultralytics.YOLO(str(folder / "dense.pt")), built("yolo11n-cls")):
        given = pictures(3)
        seen = []
        dense.predict(given[:1], imgsz=SIDE, rect=False, verbose=False)
        theirs = dense.predictor.preprocess

        def watched(images, theirs=theirs, seen=seen):
            seen.append(theirs(images))
            return seen[-1]

        dense.predictor.preprocess = watched
        dense.predict(given, imgsz=SIDE, rect=False, batch=3, verbose=False)
        found = ours._batches(dense, given, SIDE, 3, 0)
        assert torch.equal(torch.cat(found), torch.cat(seen))
    files = folder / "images" / "train"
    assert torch.cat(ours._batches(dense, files, SIDE, 5, 0)).shape == (5, 3, SIDE, SIDE)
    assert torch.equal(ours._batches(dense, files, SIDE, 5, 0)[0], ours._batches(dense, files, SIDE, 5, 0)[0])
    (folder / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="there are no pictures"):
        shrink_detector(dense, folder / "empty", 0.3)


class Stopped(Exception):
    pass


def test_widths_survive_training_resuming_validation_and_export(small: YOLO, folder: Path) -> None:
    wanted = small.shrunk.parameters[1]

    def stop(trainer):
        raise Stopped

    model = YOLO(folder / "small.pt")
    model.add_callback("on_model_save", stop)
    with pytest.raises(Stopped):
        model.train(**how(folder), epochs=2, name="kept")
    last = folder / "runs" / "kept" / "weights" / "last.pt"
    model = YOLO(last)
    model.train(resume=True)
    assert model.trainer.epoch == 1
    assert size(model) == wanted
    best = ultralytics.YOLO(str(last.with_name("best.pt")))
    assert size(best) == wanted
    best.val(**{key: value for key, value in how(folder).items() if key in ("data", "imgsz", "workers", "project")})
    exported = YOLO(last.with_name("best.pt")).export(format="torchscript", imgsz=SIDE)
    image = torch.rand(1, 3, SIDE, SIDE)
    with torch.no_grad():
        found, wanted = torch.jit.load(exported)(image), best.model.eval()(image)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


def test_weights_move_and_other_data_is_refused(small: YOLO, folder: Path) -> None:
    model = YOLO(folder / "small.pt")
    before = copy.deepcopy(model.model.state_dict())
    model.train(**how(folder), epochs=1, name="moved", nbs=4, optimizer="SGD", lr0=0.1, warmup_epochs=0)
    after = model.model.state_dict()
    assert any(not torch.equal(before[name], each) for name, each in after.items() if each.dim() == 4)
    with pytest.raises(ValueError, match=re.escape("other classes (3) than the smaller detector (2)")):
        YOLO(folder / "small.pt").train(**{**how(folder), "data": str(folder / "three.yaml")}, epochs=1, name="three")
    dense = YOLO(folder / "dense.pt")
    dense.train(**{**how(folder), "data": str(folder / "three.yaml")}, epochs=1, name="dense3")
    assert dense.model.nc == 3, "a detector that is not narrower trains as ever"


def test_tuning_keeps_widths(small: YOLO, folder: Path) -> None:
    YOLO(folder / "small.pt").tune(**how(folder), epochs=1, iterations=1, name="tuned")
    (best,) = {size(ultralytics.YOLO(str(path))) for path in (folder / "runs").rglob("tuned*/weights/best.pt")}
    assert best == small.shrunk.parameters[1]


def test_the_dense_detector_teaches_in_their_trainer(small: YOLO, folder: Path) -> None:
    model = YOLO(folder / "small.pt")
    model.train(**how(folder), epochs=1, name="taught", distill_model=str(folder / "dense.pt"))
    assert size(model) == small.shrunk.parameters[1]
    assert "dis_loss" in model.trainer.loss_names


def test_zeros_of_a_pruner_are_in_the_checkpoints_and_leave(folder: Path) -> None:
    model = YOLO(folder / "dense.pt")
    pruning = Pruning(0.5, pattern="channels").attach(model)
    model.train(**how(folder), epochs=3, name="sparse")
    masks = pruning.pruner.masks
    assert sum(int((~mask).sum()) for mask in masks.values()) > 0
    weights = dict(model.model.named_parameters())
    for name, mask in masks.items():
        assert not weights[name][~mask].any(), name
    assert (folder / "runs" / "sparse" / "weights" / "pruner.pt").exists()


def test_checkpoints_with_means_in_half_precision_or_folded_are_taken(folder: Path, tmp_path: Path) -> None:
    example = torch.rand(2, 3, SIDE, SIDE)
    read = torch.load(folder / "dense.pt", weights_only=False)
    mean = copy.deepcopy(read["model"])
    with torch.no_grad():
        for each in mean.parameters():
            each.mul_(0.5)
    torch.save({**read, "ema": mean}, tmp_path / "mean.pt")
    found = ours._loaded(tmp_path / "mean.pt").model
    assert torch.equal(found.model[0].conv.weight, mean.model[0].conv.weight.float()), "the mean is what counts"
    half = ultralytics.YOLO(str(folder / "dense.pt"))
    half.model.half()
    assert next(shrink_detector(half, None, 0.3, imgsz=SIDE).model.parameters()).dtype == torch.float32
    assert next(half.model.parameters()).dtype == torch.float16
    folded = ultralytics.YOLO(str(folder / "dense.pt"))
    folded.fuse()
    small = shrink_detector(folded, pictures(4), 0.2, imgsz=SIDE)
    small.save(tmp_path / "folded.pt")
    again = ultralytics.YOLO(str(tmp_path / "folded.pt"))
    assert not any(isinstance(each, nn.BatchNorm2d) for each in again.model.modules())
    assert again.model.eval()(example)[0].isfinite().all()


@pytest.mark.parametrize("name", ["dense.pt", "yolo26n.yaml", "yolov8n-seg.yaml"])
def test_only_the_classes_that_are_used(name: str, folder: Path) -> None:
    dense = ultralytics.YOLO(str(folder / name) if name.endswith(".pt") else name)
    disturbed(dense.model)
    small = shrink_detector(dense, None, classes=[1], imgsz=SIDE)
    assert small.names == {0: dense.names[1]}
    assert small.model.yaml["nc"] == small.model.model[-1].nc == 1
    example = torch.rand(1, 3, SIDE, SIDE)
    with torch.no_grad():
        wanted, found = (raw(model.model.eval()(example)) for model in (dense, small))
    assert torch.equal(found["boxes"], wanted["boxes"])
    torch.testing.assert_close(found["scores"], wanted["scores"][:, 1:2])


def test_classes_of_a_classifier_which_ends_in_a_softmax(tmp_path: Path) -> None:
    dense = built("yolo11n-cls")
    small = shrink_detector(dense, None, classes=[3, 7], imgsz=SIDE)
    assert (small.names, small.model.yaml["nc"]) == ({0: dense.names[3], 1: dense.names[7]}, 2)
    example = torch.rand(1, 3, SIDE, SIDE)
    with torch.no_grad():
        (_, wanted), (shares, found) = (model.model.eval()(example) for model in (dense, small))
    torch.testing.assert_close(found, wanted[:, [3, 7]])
    torch.testing.assert_close(shares, wanted[:, [3, 7]].softmax(1))
    small.save(tmp_path / "small.pt")
    assert YOLO(tmp_path / "small.pt").predict(pictures(1), imgsz=SIDE, verbose=False)[0].probs.data.shape == (2,)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_files_of_other_classes_and_files_that_are_not_there_are_refused(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = torch.load(folder / "dense.pt", weights_only=False)
    torch.save({**read, "more": Evil()}, "evil.pt")
    with pytest.raises(ValueError, match="other classes"):
        shrink_detector("evil.pt", None, 0.3)
    Path("pickle.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="other classes"):
        shrink_detector("pickle.pt", None, 0.3)
    assert not Path("evil").exists(), "no code of the file ran"
    for name in ("yolo11n.pt", "yolo11n.yaml", "https://example.com/a.pt"):
        with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
            shrink_detector(name, None, 0.3)
    Path("yolov5n.pt").write_bytes((folder / "dense.pt").read_bytes())
    with pytest.raises(ValueError, match="give yours another name"):
        shrink_detector("yolov5n.pt", None, 0.3)
    with pytest.raises(TypeError, match="not Linear"):
        shrink_detector(nn.Linear(2, 2), None, 0.3)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "small.pt", tmp_path / "page.html"
    usual = ["detector", folder / "dense.pt", "--data", folder / "images" / "train", "--samples", 4]
    done = run(*usual, "--budget", "macs=0.8", "--out", out, "--report", page)
    assert done.exit_code == 0, done.stderr
    assert "Asked: 20.0% of the macs." in done.stdout
    assert "--round-to 8" in done.stdout
    assert "--steps 400" in done.stdout
    taught = run(*usual, "--budget", "macs=0.8", "--steps", 4, "--out", tmp_path / "taught.pt")
    assert "the loss (detector) was" in taught.stdout
    assert size(YOLO(tmp_path / "taught.pt")) == size(YOLO(out))
    assert "secateur.integrations.ultralytics import YOLO" in done.stdout
    assert size(YOLO(out)) < size(YOLO(folder / "dense.pt"))
    assert "milliseconds" in page.read_text() or "ms" in page.read_text()
    fails(run(*usual, "--budget", "macs=0.8", "--out", out), "name a .pt that does not exist")
    fails(run(*usual, "--out", tmp_path / "b.pt"), "give --budget macs=0.6")
    fails(run(*usual, "--budget", "macs=0.8", "--runtime", "openvino", "--dry-run"), "where a latency is measured")
    fails(run(*usual, "--budget", "macs=0.8"), "--out small.pt")
    fails(run(*usual, "--budget", "macs=300", "--dry-run"), "one share")
    fails(run("detector", folder / "dense.pt", "--budget", "macs=0.8", "--dry-run"), "give --data FOLDER")
    nothing = run("detector", tmp_path / "none.pt", "--budget", "macs=0.8", "--dry-run", "--without-data")
    fails(nothing, "nothing is downloaded")


def test_the_page_runs(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """The Python of docs/guides/detector.md, on the small data set."""
    text = (ROOT / "docs" / "guides" / "detector.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    for name, place in (("best.pt", "dense.pt"), ("data.yaml", "data.yaml"), ("pictures", "images/train")):
        Path(name).symlink_to(folder / place)
    usual = {**how(folder), "data": "data.yaml", "project": str(tmp_path / "runs")}
    short = ", ".join(f"{key}={value!r}" for key, value in usual.items() if key != "data")
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        block = re.sub(r"steps=\d+", "steps=8", re.sub(r"epochs=\d+", f"epochs=1, {short}", block))
        exec(compile(block, "detector.md", "exec"), names)


def test_the_tutorial_runs(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """docs/start/tutorial-detector.md, with few scenes, one epoch and the small YOLO."""
    text = (ROOT / "docs" / "start" / "tutorial-detector.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    less = {
        '"train": 1024, "val": 256': '"train": 16, "val": 4',
        '"yolo11n.yaml"': repr(str(folder / "yolo11n-tiny.yaml")),
        '"plots": False': f'"plots": False, "verbose": False, "batch": 4, "project": {str(tmp_path / "runs")!r}',
    }
    for words, other in less.items():
        assert text.count(words) == 1, words
        text = text.replace(words, other)
    names: dict[str, object] = {"__name__": "tutorial"}
    for block in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(re.sub(r"epochs=\d+", "epochs=1", block), "tutorial-detector.md", "exec"), names)
    assert size(names["trained"]) < size(names["dense"])


class Layers(nn.Sequential):
    """What the heads of a detector of torchvision read: three convolutions."""

    def __init__(self, *, named: bool) -> None:
        sizes = ((3, 16), (16, 32), (32, 32))
        super().__init__(*(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes))
        self.named, self.out_channels = named, [32] if named else 32

    def forward(self, x):
        return {"0": super().forward(x)} if self.named else super().forward(x)


@pytest.mark.parametrize("name", ["RetinaNet", "SSD", "DETR"])
def test_detectors_of_torchvision_and_transformers_by_data(name: str) -> None:
    torch.manual_seed(0)
    images = [torch.rand(3, SIDE, SIDE) for _ in range(2)]
    if name == "DETR":
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        deep = ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        sides = {f"{side}_{what}": count for side in ("encoder", "decoder")
                 for what, count in (("layers", 1), ("ffn_dim", 32), ("attention_heads", 2))}  # fmt: skip
        model = DetrForObjectDetection(
            DetrConfig(backbone_config=deep, use_timm_backbone=False, d_model=32, num_queries=5, num_labels=3, **sides)
        )
        example, batch = {"pixel_values": torch.stack(images)}, {"pixel_values": torch.stack(images)}
    else:
        from torchvision.models import detection
        from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator

        if name == "SSD":
            model = detection.ssd.SSD(Layers(named=True), DefaultBoxGenerator([[2]]), (SIDE, SIDE), 3, score_thresh=0.0)
        else:
            anchors = AnchorGenerator(((8, 16),), ((0.5, 1.0, 2.0),))
            model = detection.RetinaNet(
                Layers(named=False), 3, anchor_generator=anchors, score_thresh=0.0, min_size=SIDE, max_size=SIDE
            )
        example, batch = (images,), (images, [{}, {}])  # what a DataLoader of pictures without labels gives
    model.eval()
    done = shrink(model, example, 0.2, target="macs", batches=[batch, batch])
    assert done.got == pytest.approx(0.2, abs=0.03)
    assert done.parameters[1] == sum(each.numel() for each in model.parameters()) < done.parameters[0]
    found = model(**example) if isinstance(example, dict) else model(*example)
    assert found.logits.shape == (2, 5, 4) if name == "DETR" else len(found[0]["boxes"]) == len(found[0]["scores"]) > 0


def test_a_network_of_timm_takes_a_folder_of_pictures(tmp_path: Path) -> None:
    import timm
    from timm.data import create_transform, resolve_data_config

    from secateur.models import read_pictures

    for at, picture in enumerate(pictures(3)):
        cv2.imwrite(str(tmp_path / f"{at}.png"), picture)
    model = timm.create_model("test_resnet", num_classes=4).eval()
    found = read_pictures(tmp_path, model, samples=3)
    prepare = create_transform(**resolve_data_config({}, model=model))
    expected = [prepare(Image.open(tmp_path / f"{at}.png").convert("RGB"))[None] for at in range(3)]
    assert {each.shape for each in found} == {(1, *model.pretrained_cfg["input_size"])}
    assert all(any(torch.equal(mine, other) for other in expected) for mine in found)
    before = sum(each.numel() for each in model.parameters())
    shrink(model, found[0], 0.2, batches=found, verify=False)
    assert sum(each.numel() for each in model.parameters()) < 0.85 * before


def test_a_version_that_loses_normalizations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    described = (ROOT / "pyproject.toml").read_text()
    assert 'ultralytics = ["ultralytics>=8.4.150"]' in described
    monkeypatch.setattr(ultralytics, "__version__", "8.4.99")
    found = importlib.util.spec_from_file_location("too_old", ours.__file__)
    assert found is not None
    assert found.loader is not None
    with pytest.raises(ImportError, match=re.escape("Ultralytics (8.4.150 or newer, not 8.4.99): pip install")):
        found.loader.exec_module(importlib.util.module_from_spec(found))
