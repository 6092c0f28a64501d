"""The whole story in minutes: train, prune, shrink and pack a small network; report."""

from secateur.demo.running import run_demo
from secateur.demo.trials import EPOCHS, METHODS, RATE, TUNING_EPOCHS, Digits, DigitsNet, load_digits, train

__all__ = [
    "Digits",
    "DigitsNet",
    "EPOCHS",
    "METHODS",
    "RATE",
    "TUNING_EPOCHS",
    "load_digits",
    "run_demo",
    "train",
]
