"""`recover`: trains a pruned model to match a teacher, the model it came from."""

from secateur.recovery.directory import recover_checkpoint
from secateur.recovery.distillation import Distillation
from secateur.recovery.local import LocalPart
from secateur.recovery.losses import loss_between
from secateur.recovery.merging import Merged, merge_keeping_zeros
from secateur.recovery.outcome import Recovered
from secateur.recovery.recovering import recover
from secateur.recovery.sampling import Sampled
from secateur.recovery.sheets import recovered_sheets

__all__ = [
    "Distillation",
    "LocalPart",
    "Merged",
    "Recovered",
    "Sampled",
    "loss_between",
    "merge_keeping_zeros",
    "recover",
    "recover_checkpoint",
    "recovered_sheets",
]
