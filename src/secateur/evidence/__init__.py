"""Evidence about weights from data: statistics of layers' inputs, and gradients."""

from secateur.evidence.collection import collect as collect
from secateur.evidence.statistics import VOCABULARY as VOCABULARY
from secateur.evidence.statistics import Sums as Sums
from secateur.evidence.statistics import add_gram as add_gram
from secateur.evidence.statistics import in_range as in_range
from secateur.evidence.statistics import mirrored as mirrored
from secateur.evidence.statistics import needs as needs
from secateur.evidence.statistics import sum_over_ranks as sum_over_ranks
from secateur.evidence.unfolding import CONVOLUTIONS as CONVOLUTIONS
from secateur.evidence.unfolding import RECURRENT as RECURRENT
from secateur.evidence.unfolding import Patches as Patches
from secateur.evidence.unfolding import gates as gates
from secateur.evidence.unfolding import patches_of as patches_of
