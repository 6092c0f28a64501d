"""Drawn scenes with shapes to find, in a folder as Ultralytics reads it: pictures, a polygon for each shape, data.yaml.

A scene has shapes of eight classes, of a size between a quarter and a half of the picture, turned and stretched, one
over the other, on a ground of two colours, among strokes and pieces of shapes that count as nothing.

Law: a scene follows from its split and its number alone. A shape of which others leave less than two fifths is drawn,
but not to be found.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Points = npt.NDArray[np.float64]  # (corners, 2), within -1 and 1
SHAPES = (2, 4)  # in a scene, as many at least and at most
SIZES = (1 / 4, 1 / 2)  # of the picture's side; the logarithm is drawn evenly
CLUTTER = 3  # strokes and pieces
NOISE = 5.0  # of 255
SEEN = 0.4  # of a shape, at least, or it is not to be found
PART = 128  # scenes that one process draws
FINER = 2  # times as many pixels while it is drawn


def _around(radii: list[float], turned: float = 0.0) -> Points:
    angles = np.arange(len(radii)) * (2 * np.pi / len(radii)) + turned
    return np.array(radii)[:, None] * np.stack([np.sin(angles), -np.cos(angles)], 1)


def _of(*corners: tuple[float, float]) -> Points:
    return np.array(corners, dtype=np.float64)


_HALF = np.linspace(0, np.pi, 17)
CLASSES: dict[str, Points] = {
    "disc": _around([1.0] * 32),
    "moon": np.concatenate(
        [np.stack([np.sin(_HALF), -np.cos(_HALF)], 1), np.stack([0.45 * np.sin(_HALF), np.cos(_HALF)], 1)[1:-1]]
    ),
    "triangle": _around([1.0] * 3),
    "square": _around([1.0] * 4, np.pi / 4),
    "star": _around([1.0, 0.42] * 5),
    "cross": _of(
        (-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3),
        (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3),
    ),
    "arrow": _of((0, -1), (0.9, 0), (0.35, 0), (0.35, 1), (-0.35, 1), (-0.35, 0), (-0.9, 0)),
    "tee": _of((-1, -1), (1, -1), (1, -0.4), (0.3, -0.4), (0.3, 1), (-0.3, 1), (-0.3, -0.4), (-1, -0.4)),
}  # fmt: skip


def _colour(draw: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(each) for each in draw.integers(20, 236, 3))
    return red, green, blue


def scene(split: str, number: int, size: int) -> tuple[Image.Image, list[tuple[int, Points]]]:
    """A picture, and ``(class, corners)`` of what is to be found, in pixels within it."""
    draw = np.random.default_rng([zlib.crc32(split.encode()), number])
    side = size * FINER
    slope = np.add.outer(np.linspace(0, draw.normal(), side), np.linspace(0, draw.normal(), side))
    slope = ((slope - slope.min()) / max(float(np.ptp(slope)), 1e-6))[..., None]
    ground = slope * np.array(_colour(draw)) + (1 - slope) * np.array(_colour(draw))
    picture = Image.fromarray(ground.astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    outlines = list(CLASSES.values())
    broken = [each for each in outlines if len(each) >= 10]  # a piece of a triangle would be one

    def placed(outline: Points, reach: float) -> Points:
        angle, stretch = draw.uniform(-np.pi, np.pi), draw.uniform(0.75, 1.0, 2)
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        room = min(0.7 * reach, 0.5)
        return np.asarray(side * (draw.uniform(room, 1 - room, 2) + reach / 2 * (outline * stretch) @ turn))

    for each in range(CLUTTER):
        if each % 2:
            ends = [tuple(point) for point in draw.uniform(0, side, (2, 2))]
            pen.line(ends, fill=_colour(draw), width=int(draw.integers(1, 3 * FINER)))
        else:
            piece = broken[draw.integers(len(broken))]
            first, count = draw.integers(len(piece)), max(5, len(piece) // 3)
            corners = np.roll(piece, first, 0)[:count]
            pen.polygon([tuple(point) for point in placed(corners, draw.uniform(*SIZES))], fill=_colour(draw))

    count = int(draw.integers(SHAPES[0], SHAPES[1] + 1))
    owner = Image.new("L", (side, side), 0)  # which shape is seen at a pixel; 0 is none
    over, shapes, whole = ImageDraw.Draw(owner), [], []
    for one in range(1, count + 1):
        label = int(draw.integers(len(outlines)))
        corners = placed(outlines[label], float(np.exp(draw.uniform(*np.log(SIZES)))))
        outline = [tuple(point) for point in corners]
        alone = Image.new("1", (side, side), 0)
        ImageDraw.Draw(alone).polygon(outline, fill=1)
        whole.append(int(np.count_nonzero(np.asarray(alone))))
        over.polygon(outline, fill=one)
        edge = _colour(draw) if draw.random() < 0.5 else None
        pen.polygon(outline, fill=_colour(draw), outline=edge, width=FINER)
        shapes.append((label, np.clip(corners / FINER, 0, size)))
    seen = np.bincount(np.asarray(owner).ravel(), minlength=count + 1)[1:]
    pixels = np.asarray(picture.resize((size, size), Image.Resampling.BOX), dtype=np.float64)
    pixels = pixels + NOISE * draw.normal(size=pixels.shape)
    found = [shape for shape, left, all_of_it in zip(shapes, seen, whole, strict=True) if left >= SEEN * all_of_it > 0]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), found


def write_scenes(folder: Path, split: str, first: int, last: int, size: int) -> None:
    for number in range(first, last):
        picture, shapes = scene(split, number, size)
        picture.save(folder / "images" / split / f"{number:05d}.png")
        lines = [f"{label} {' '.join(f'{x:.5f}' for x in (corners / size).ravel())}" for label, corners in shapes]
        (folder / "labels" / split / f"{number:05d}.txt").write_text("\n".join(lines) + "\n", "utf-8")


def draw_scenes(folder: Path, counts: dict[str, int], size: int) -> Path:
    """Writes so many scenes of each split, once; data.yaml, which Ultralytics is told."""
    told = folder / "data.yaml"
    if told.exists():
        return told
    with ThreadPoolExecutor() as pool:
        for split, count in counts.items():
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True)
            every = range(0, count, PART)
            started = [
                [sys.executable, __file__, str(folder), split, str(first), str(min(first + PART, count)), str(size)]
                for first in every
            ]
            list(pool.map(functools.partial(subprocess.run, check=True), started))
    names = "\n".join(f"  {number}: {name}" for number, name in enumerate(CLASSES))
    splits = "\n".join(f"{split}: images/{split}" for split in counts)
    told.write_text(f"path: {folder.resolve()}\n{splits}\nnames:\n{names}\n", "utf-8")
    return told


def of_one_class(data: Path, label: int) -> Path:
    """Beside the scenes the same where one class alone is to be found, as number 0; those without it are not trained
    on. Its data.yaml."""
    scenes, folder = data.parent, data.parent.with_name(f"{data.parent.name}-{label}")
    told = folder / "data.yaml"
    if told.exists():
        return told
    for labels in sorted(scenes.glob("labels/*/*.txt")):
        split = labels.parent.name
        lines = [line for line in labels.read_text("utf-8").splitlines() if line.split()[:1] == [str(label)]]
        if not lines and split == "train":
            continue
        picture = Path("images") / split / f"{labels.stem}.png"
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        (folder / picture).symlink_to(scenes.resolve() / picture)
        (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
        text = "".join(f"0 {line.partition(' ')[2]}\n" for line in lines)
        (folder / "labels" / split / labels.name).write_text(text, "utf-8")
    name = [*CLASSES][label]
    told.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames:\n  0: {name}\n", "utf-8")
    return told


if __name__ == "__main__":
    write_scenes(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
