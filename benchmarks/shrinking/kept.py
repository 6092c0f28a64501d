"""What it is worth that outputs leave: a network for three digits of ten, at equal multiply-adds.

Law: all are asked the same, which of the three a digit is: of a network that gives ten, by those three of its outputs.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shrinking.effect import by_ours
from benchmarks.shrinking.networks import train
from benchmarks.shrinking.sizes import multiply_adds
from secateur import demo
from secateur.kinds import Outputs

SHARES = (0.7, 0.85)
# of each: whether the other outputs leave, and whether the calibration is of the three digits alone
METHODS = {
    "all outputs, all digits": (False, False),
    "all outputs, the three": (False, True),
    "three outputs, all digits": (True, False),
    "three outputs, the three": (True, True),
}


def kept(seeds: int = 3, epochs: int = 40, first: int = 0, **_: Any) -> dict[str, Any]:
    """Of a digits CNN three outputs of ten stay, or all: accuracy on those three, at once."""
    data = demo.load_digits()
    rows: list[dict[str, Any]] = []
    for seed in range(first, first + seeds):
        torch.manual_seed(seed)
        dense = demo.DigitsNet()
        train(dense, data, "sgd", epochs, seed)
        dense.eval()
        keep = sorted(torch.randperm(10, generator=torch.Generator().manual_seed(seed))[:3].tolist())
        mine = data.train_images[_of(data.train_labels, keep)]
        whole = multiply_adds(dense, data.train_images)
        base = {"seed": seed, "keep": keep}
        rows.append({**base, "method": "dense", "share": 0.0, "accuracy": accuracy_on(dense, data, keep), "left": 1.0})
        for share in SHARES:
            for method, (leaves, alone) in METHODS.items():
                images = mine if alone else data.train_images
                leave = Outputs("head", keep=keep) if leaves else None
                smaller = by_ours(copy.deepcopy(dense), images, share, batches=list(images.split(64)), leave=leave)
                found = {"accuracy": accuracy_on(smaller, data, keep)}
                left = multiply_adds(smaller, data.train_images) / whole
                rows.append({**base, "method": method, "share": share, **found, "left": left})
    print_kept(rows)
    return {"rows": rows}


def _of(labels: Tensor, keep: Sequence[int]) -> Tensor:
    return torch.isin(labels, torch.tensor(keep))


def accuracy_on(model: nn.Module, data: demo.Digits, keep: Sequence[int]) -> float:
    """The share of the test images of these digits that the largest of their outputs is right about."""
    here = _of(data.test_labels, keep)
    with torch.no_grad():
        logits = model.eval()(data.test_images[here])
    logits = logits if logits.shape[1] == len(keep) else logits[:, list(keep)]
    return float((torch.tensor(keep)[logits.argmax(1)] == data.test_labels[here]).float().mean())


def print_kept(rows: Sequence[dict[str, Any]]) -> None:
    dense = [100 * row["accuracy"] for row in rows if row["method"] == "dense"]
    print(
        f"dense {statistics.mean(dense):.2f} % (accuracy on the three digits, ± standard deviation, of macs that stay)"
    )
    for method in METHODS:
        cells = []
        for share in SHARES:
            mine = [row for row in rows if (row["method"], row["share"]) == (method, share)]
            found = [100 * row["accuracy"] for row in mine]
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            cells.append(
                f"{statistics.mean(found):6.2f} ±{spread:5.2f} ({statistics.mean(r['left'] for r in mine):.3f})"
            )
        print(f"{method:28}", *cells, flush=True)
