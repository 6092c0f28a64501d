"""`fit` and `sensitivity`: compression levels of every group, what each costs, and the best choice within a budget.

Modules and the functions in them share names; here the name is the function.
"""

from secateur.search.budgets import budget_in_words
from secateur.search.directory import fit_checkpoint
from secateur.search.fitted import Fitted, cost_text
from secateur.search.fitting import fit
from secateur.search.levels import Level, Levels, shown_name, told, told_share
from secateur.search.making import OVER, SHARES, make_levels
from secateur.search.replaying import Replayed
from secateur.search.scoring import ROWS, SCORES, Score, Scorer, scorer
from secateur.search.sensitivity import Sensitivity, sensitivity
from secateur.search.sheets import fitted_sheets, sensitivity_sheets

__all__ = [
    "Fitted",
    "Level",
    "Levels",
    "OVER",
    "ROWS",
    "Replayed",
    "SCORES",
    "SHARES",
    "Score",
    "Scorer",
    "Sensitivity",
    "budget_in_words",
    "cost_text",
    "fit",
    "fit_checkpoint",
    "fitted_sheets",
    "make_levels",
    "scorer",
    "sensitivity",
    "sensitivity_sheets",
    "shown_name",
    "told",
    "told_share",
]
