"""The whole story in minutes: train, prune, shrink and pack a small network; report."""

from secateur.demo.story import DEFAULT_METHODS, METHODS, Digits, load_digits, run_demo

__all__ = ["DEFAULT_METHODS", "Digits", "METHODS", "load_digits", "run_demo"]
