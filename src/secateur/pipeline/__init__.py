"""From scores to a pruned model: masks, made, applied and attached; re-estimation of batch normalization."""

from secateur.pipeline.batch_normalization import BatchNormShift, Reestimation, batchnorms, reestimate_batchnorm
from secateur.pipeline.masks import (
    Masks,
    apply_,
    attach,
    attached_masks,
    check_mask,
    choose_masks,
    detach,
    iterate_masks,
    make_masks,
    sparsity_of,
)

__all__ = [
    "BatchNormShift",
    "Masks",
    "Reestimation",
    "apply_",
    "attach",
    "attached_masks",
    "batchnorms",
    "check_mask",
    "choose_masks",
    "detach",
    "iterate_masks",
    "make_masks",
    "reestimate_batchnorm",
    "sparsity_of",
]
