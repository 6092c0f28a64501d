"""The whole story in minutes: train, prune, shrink and pack a small network; report."""

from secateur.demo.data import Digits, load_digits
from secateur.demo.methods import METHODS
from secateur.demo.network import DigitsNet
from secateur.demo.running import run_demo
from secateur.demo.training import EPOCHS, RATE, TUNING_EPOCHS, train

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
