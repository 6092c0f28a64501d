"""What a model may spend, and what it gives up for it: `sensitivity` and `fit`."""

from secateur.search.costs import budget_in_words
from secateur.search.fitting import fit
from secateur.search.levels import Level, Levels
from secateur.search.making import OVER, SHARES, make_levels
from secateur.search.result import Fitted
from secateur.search.score import SCORES, Replayed, Score, Scorer, scorer
from secateur.search.sensitivity import Sensitivity, sensitivity

__all__ = [
    "Fitted",
    "Level",
    "Levels",
    "OVER",
    "Replayed",
    "SCORES",
    "SHARES",
    "Score",
    "Scorer",
    "Sensitivity",
    "budget_in_words",
    "fit",
    "make_levels",
    "scorer",
    "sensitivity",
]
