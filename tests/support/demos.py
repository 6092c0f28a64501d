"""A demo on a small plan, and what its network holds."""

from pathlib import Path

from secateur.demo import run_demo
from secateur.demo.trials import DigitsNet
from secateur.targets import find_targets

SMALL = {"seeds": (0, 1), "sparsities": (0.9,), "epochs": 3, "tuning_epochs": 1}


WEIGHTS = sum(weight.numel() for weight in find_targets(DigitsNet()).values())


PARAMETERS = sum(parameter.numel() for parameter in DigitsNet().parameters())


ONE_SHOT = ("global magnitude", "ERK", "LAMP", "random")


def run_small(out: Path) -> Path:
    return run_demo(out, **SMALL)  # type: ignore[arg-type]
