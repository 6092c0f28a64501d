"""Units that physically leave: what to take, the plan, carrying it out, and the proof; `shrink`."""

from secateur.shrinking.branches import KEPT
from secateur.shrinking.configuration import Configured
from secateur.shrinking.directory import CheckpointShrinking, shrink_checkpoint
from secateur.shrinking.expert_directory import ShrunkExperts, shrink_experts_checkpoint
from secateur.shrinking.expert_verification import has_fewer_experts, verify_experts_checkpoint
from secateur.shrinking.files import load_shrunken, save_shrunken
from secateur.shrinking.module import Shrunk, shrink
from secateur.shrinking.plan import plans_of
from secateur.shrinking.profiles import Profile
from secateur.shrinking.proof import verify_shrunken
from secateur.shrinking.request import Request
from secateur.shrinking.scope import check_globs, may_leave
from secateur.shrinking.tables import checkpoint_parts, experts_parts, proof_words, shrunk_parts
from secateur.shrinking.verification import is_shrunken, verify_shrunken_checkpoint
from secateur.shrinking.without_data import WithoutDataWarning

__all__ = [
    "CheckpointShrinking",
    "Configured",
    "KEPT",
    "Profile",
    "Request",
    "Shrunk",
    "ShrunkExperts",
    "WithoutDataWarning",
    "check_globs",
    "checkpoint_parts",
    "experts_parts",
    "has_fewer_experts",
    "is_shrunken",
    "load_shrunken",
    "may_leave",
    "plans_of",
    "proof_words",
    "save_shrunken",
    "shrink",
    "shrink_checkpoint",
    "shrink_experts_checkpoint",
    "shrunk_parts",
    "verify_experts_checkpoint",
    "verify_shrunken",
    "verify_shrunken_checkpoint",
]
