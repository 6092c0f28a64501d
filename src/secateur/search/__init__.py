"""What a model may spend, and what it gives up for it: levels of every group, what each costs, and a choice; `fit`."""

from secateur.search.fitted import Fitted
from secateur.search.fitting import fit
from secateur.search.levels import Level, Levels
from secateur.search.making import make_levels

__all__ = ["Fitted", "Level", "Levels", "fit", "make_levels"]
