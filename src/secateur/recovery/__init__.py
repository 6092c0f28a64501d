"""`recover`: trains a pruned model to match a teacher, the model it came from."""

from secateur.recovery.distillation import Distillation as Distillation
from secateur.recovery.distillation import Merged as Merged
from secateur.recovery.distillation import merge_keeping_zeros as merge_keeping_zeros
from secateur.recovery.local import LocalPart as LocalPart
from secateur.recovery.losses import loss_between as loss_between
from secateur.recovery.outputs import Sampled as Sampled
from secateur.recovery.recovering import rate_for as rate_for
from secateur.recovery.recovering import recover as recover
from secateur.recovery.result import Recovered as Recovered
