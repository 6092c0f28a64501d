"""``secateur detector``: a detector of Ultralytics gets smaller by unlabelled pictures, and stays one of theirs.

Law: of the file that is named no code is run; what is written appears whole or not at all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from secateur.cli.options import command
from secateur.cli.terminal import Answer, Asked, one_process, waiting, warnings_as_lines


@command(
    "detector", "Make a detector of Ultralytics smaller, by pictures without labels.", "detector",
    "pictures", "budget", "runtime", "classes", "out", "samples", "steps", "imgsz", "round_to", "without_data",
    "dry_run",
    verb="integrations/ultralytics.py:shrink_detector",
)  # fmt: skip
def detector(asked: Asked) -> Iterator[Any]:
    """Take channels out of a YOLO or RT-DETR of Ultralytics, and write a smaller one, which is read as any other.

    Pictures without labels say which channels are missed least, and what stays is repaired; with --steps 400 it then
    learns what the dense one finds in them. They are prepared by the model's own predictor. OUT.pt predicts, validates
    and exports where only Ultralytics is installed; YOLO of secateur.integrations.ultralytics trains it with the widths
    that it has.
    """
    one_process("detector")
    sparsity, target = _how_much(asked)
    if asked.out is None and not asked.dry_run:
        raise ValueError("give --out small.pt, the file to write, or --dry-run.")
    if asked.out is not None and (asked.out.suffix != ".pt" or asked.out.exists()):
        raise ValueError(f"--out {asked.out}: name a .pt that does not exist.")
    if (asked.pictures is None) != asked.without_data:
        raise ValueError(
            "give --data FOLDER, some dozens of pictures such as the detector is to see; or --without-data, to train "
            "it afterwards: what leaves by weights alone leaves a detector that finds nothing."
        )
    from secateur.integrations.ultralytics import YOLO, shrink_detector
    from secateur.support import printable

    started = time.monotonic()
    how = asked.only("samples", "steps", "imgsz", "round_to", "runtime")
    if asked.classes is not None:
        how["classes"] = [int(each) if each.isdigit() else each for each in asked.classes.split(",")]
    with waiting("Choosing what leaves, and repairing what stays"), warnings_as_lines():
        small = shrink_detector(asked.detector, asked.pictures, sparsity, target=target, **how)
    more = [small.recovered.judged.said()] if small.recovered and small.recovered.judged else []
    if not asked.steps and asked.pictures is not None:
        more.append("To learn what the dense one finds in these pictures, too: --steps 400.")
    if asked.round_to is None:
        more.append("Counts are multiples of 16, or fewer where that is coarse. TensorRT and most NPUs: --round-to 8.")
    if asked.out is None or asked.dry_run:
        more.append(f"Nothing was written ({time.monotonic() - started:.1f} s).")
    else:
        small.save(asked.out)
        out = printable(str(asked.out), 1000)
        more += [
            f"Wrote {out} ({time.monotonic() - started:.1f} s), a pickle as every .pt of Ultralytics. To train it:",
            "",
            "    from secateur.integrations.ultralytics import YOLO",
            f"    YOLO({out!r}).train(data=..., epochs=20)",
        ]
    timed = None
    if asked.report is not None:
        import torch

        from secateur.report import before_and_after

        dense, side = YOLO(asked.detector), asked.imgsz or small.overrides.get("imgsz") or 640
        example = torch.zeros(1, dense.model.yaml.get("channels", 3), side, side, dtype=torch.float32, device="cpu")
        timed = functools.partial(before_and_after, dense.model, small.model, example, call="a picture")
    yield Answer(small.shrunk, more=more, title=", smaller", timed=timed)


def _how_much(asked: Asked) -> tuple[float | None, str]:
    """The share that leaves, and of what."""
    from secateur.search import budget_in_words

    if not asked.budget:
        if asked.classes is None:
            raise ValueError("give --budget macs=0.6, the share that may be left; or --classes, what is to be found.")
        return None, "macs"
    ((target, share),) = budget_in_words(asked.budget[:1]).items()
    if len(asked.budget) > 1 or not 0 < share < 1:
        raise ValueError("--budget: of a detector one share, such as latency=0.6 of what it takes.")
    return 1 - share, target
