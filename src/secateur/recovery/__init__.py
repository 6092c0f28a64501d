"""`recover`: trains a pruned model to match a teacher, the model it came from."""

from secateur.recovery.distillation import Distillation, Merged, merge_keeping_zeros
from secateur.recovery.local import LocalPart
from secateur.recovery.losses import loss_between
from secateur.recovery.outputs import Sampled
from secateur.recovery.recovering import recover
from secateur.recovery.result import Recovered

__all__ = [
    "Distillation",
    "LocalPart",
    "Merged",
    "Recovered",
    "Sampled",
    "loss_between",
    "merge_keeping_zeros",
    "recover",
]
