"""What a model may spend, and what it gives up for it: levels of every group, and what each costs; `sensitivity`."""

from secateur.search.levels import Level, Levels
from secateur.search.making import make_levels

__all__ = ["Level", "Levels", "make_levels"]
