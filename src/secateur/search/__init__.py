"""What a model may spend, and what it gives up for it: `sensitivity` and `fit`."""

from secateur.search.costs import budget_in_words as budget_in_words
from secateur.search.costs import shares_in_words as shares_in_words
from secateur.search.deploying import Deployed as Deployed
from secateur.search.deploying import deploy as deploy
from secateur.search.fitting import fit as fit
from secateur.search.latency import Probes as Probes
from secateur.search.latency import write_probes as write_probes
from secateur.search.levels import Level as Level
from secateur.search.levels import Levels as Levels
from secateur.search.making import OVER as OVER
from secateur.search.making import SHARES as SHARES
from secateur.search.making import make_levels as make_levels
from secateur.search.result import Fitted as Fitted
from secateur.search.score import SCORES as SCORES
from secateur.search.score import ModelLoss as ModelLoss
from secateur.search.score import Replayed as Replayed
from secateur.search.score import Score as Score
from secateur.search.sensitivity import Sensitivity as Sensitivity
from secateur.search.sensitivity import sensitivity as sensitivity
