"""What a model may spend, and what it gives up for it: `sensitivity` and `fit`."""

from secateur.fit.costs import budget_in_words
from secateur.fit.directory import fit_checkpoint
from secateur.fit.fitting import fit
from secateur.fit.levels import Level, Levels
from secateur.fit.making import OVER, SHARES, make_levels
from secateur.fit.result import Fitted, fitted_sheets, sensitivity_sheets
from secateur.fit.score import SCORES, Replayed, Score, Scorer, scorer
from secateur.fit.sensitivity import Sensitivity, sensitivity

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
    "fit_checkpoint",
    "fitted_sheets",
    "make_levels",
    "scorer",
    "sensitivity",
    "sensitivity_sheets",
]
