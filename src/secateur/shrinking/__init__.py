"""`shrink`: channels, heads, experts, blocks and hidden units are removed from a model, and the removal is proved."""

from secateur.kinds import Blocks, Branches, Experts
from secateur.shrinking.apply import carry_out
from secateur.shrinking.configuration import Configured, has_configuration
from secateur.shrinking.costs import CostPolynomial, TiedGroups, ties_around
from secateur.shrinking.directory import CheckpointShrinking, coupling_on_meta
from secateur.shrinking.files import load_shrunken, save_shrunken
from secateur.shrinking.grading import Grading, RepairedLevel, counts_at, gradable
from secateur.shrinking.kinds.blocks_directory import ShrunkDepth
from secateur.shrinking.kinds.branches import KEPT, running
from secateur.shrinking.kinds.experts_directory import ShrunkExperts
from secateur.shrinking.measure import OVERFLOWING, Memory, check_finite, for_slopes, not_finite, remembering, slopes_of
from secateur.shrinking.module import Shrunk, shrink
from secateur.shrinking.plan import Plan, plan_of, plans_of
from secateur.shrinking.proof import verify_shrunken
from secateur.shrinking.reach import Reach, reached
from secateur.shrinking.repair import free_in
from secateur.shrinking.request import Request, WithoutDataWarning, example_for, example_of, pruning_target, shorter
from secateur.shrinking.result import in_blocks_parts
from secateur.shrinking.select import check_globs, names_of, tie_roles

__all__ = [
    "Blocks",
    "Branches",
    "CheckpointShrinking",
    "Configured",
    "CostPolynomial",
    "Experts",
    "Grading",
    "KEPT",
    "Memory",
    "OVERFLOWING",
    "Plan",
    "Reach",
    "RepairedLevel",
    "Request",
    "Shrunk",
    "ShrunkDepth",
    "ShrunkExperts",
    "TiedGroups",
    "WithoutDataWarning",
    "carry_out",
    "check_finite",
    "check_globs",
    "counts_at",
    "coupling_on_meta",
    "example_for",
    "example_of",
    "for_slopes",
    "free_in",
    "gradable",
    "has_configuration",
    "in_blocks_parts",
    "load_shrunken",
    "names_of",
    "not_finite",
    "plan_of",
    "plans_of",
    "pruning_target",
    "reached",
    "remembering",
    "running",
    "save_shrunken",
    "shorter",
    "shrink",
    "slopes_of",
    "tie_roles",
    "ties_around",
    "verify_shrunken",
]
