"""`shrink`: channels, heads, experts, blocks and hidden units are removed from a model, and the removal is proved."""

from secateur.shrinking.amounts import Amount
from secateur.shrinking.branches import KEPT
from secateur.shrinking.configuration import Configured, has_configuration
from secateur.shrinking.depth_directory import ShrunkDepth, shrink_depth_checkpoint
from secateur.shrinking.directory import CheckpointShrinking, coupling_on_meta, shrink_checkpoint
from secateur.shrinking.examples import example_for, example_of, shorter
from secateur.shrinking.execution import carry_out
from secateur.shrinking.expert_directory import ShrunkExperts, shrink_experts_checkpoint
from secateur.shrinking.files import load_shrunken, save_shrunken
from secateur.shrinking.grading import Grade, Grading, counts_at, gradable
from secateur.shrinking.losses import ties_around
from secateur.shrinking.measuring import OVERFLOWING, check_finite, for_slopes, not_finite, slopes_of
from secateur.shrinking.module import Shrunk, shrink
from secateur.shrinking.output_costs import running
from secateur.shrinking.plan import Plan, plan_of, plans_of
from secateur.shrinking.proof import verify_shrunken
from secateur.shrinking.remembered import Memory, remembering
from secateur.shrinking.repairing import free_in
from secateur.shrinking.request import Request
from secateur.shrinking.roles import tie_roles
from secateur.shrinking.scope import check_globs, may_leave, names_of
from secateur.shrinking.sheets import blocks_sheets, directory_sheets, experts_sheets, model_sheets
from secateur.shrinking.subject import subject_of
from secateur.shrinking.tables import checkpoint_parts, depth_parts, experts_parts, proof_words, shrunk_parts
from secateur.shrinking.ties import Tied
from secateur.shrinking.without_data import WithoutDataWarning

__all__ = [
    "Amount",
    "CheckpointShrinking",
    "Configured",
    "Grade",
    "Grading",
    "KEPT",
    "Memory",
    "OVERFLOWING",
    "Plan",
    "Request",
    "Shrunk",
    "ShrunkDepth",
    "ShrunkExperts",
    "Tied",
    "WithoutDataWarning",
    "blocks_sheets",
    "carry_out",
    "check_finite",
    "check_globs",
    "checkpoint_parts",
    "counts_at",
    "coupling_on_meta",
    "depth_parts",
    "directory_sheets",
    "example_for",
    "example_of",
    "experts_parts",
    "experts_sheets",
    "for_slopes",
    "free_in",
    "gradable",
    "has_configuration",
    "load_shrunken",
    "may_leave",
    "model_sheets",
    "names_of",
    "not_finite",
    "plan_of",
    "plans_of",
    "proof_words",
    "remembering",
    "running",
    "save_shrunken",
    "shorter",
    "shrink",
    "shrink_checkpoint",
    "shrink_depth_checkpoint",
    "shrink_experts_checkpoint",
    "shrunk_parts",
    "slopes_of",
    "subject_of",
    "tie_roles",
    "ties_around",
    "verify_shrunken",
]
