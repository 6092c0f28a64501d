"""From scores to a pruned model: masks, made, applied and attached; re-estimation of batch normalization."""

from secateur.pipeline.batch_normalization import BatchNormShift as BatchNormShift
from secateur.pipeline.batch_normalization import Reestimation as Reestimation
from secateur.pipeline.batch_normalization import batchnorms as batchnorms
from secateur.pipeline.batch_normalization import reestimate_batchnorm as reestimate_batchnorm
from secateur.pipeline.masks import Masks as Masks
from secateur.pipeline.masks import apply_ as apply_
from secateur.pipeline.masks import attach as attach
from secateur.pipeline.masks import attached_masks as attached_masks
from secateur.pipeline.masks import check_mask as check_mask
from secateur.pipeline.masks import choose_masks as choose_masks
from secateur.pipeline.masks import detach as detach
from secateur.pipeline.masks import iterate_masks as iterate_masks
from secateur.pipeline.masks import make_masks as make_masks
from secateur.pipeline.masks import sparsity_of as sparsity_of
