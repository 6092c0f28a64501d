"""The drop-in for ``torch.nn.utils.prune``: the same names, state, hooks, draws and errors, with its faults mended.

A pruned tensor ``name`` lives on as the parameter ``<name>_orig`` and the buffer ``<name>_mask``, and a forward
pre-hook, which is the pruning method itself, marks it. Every call computes first and changes the module last, so
that a call that fails leaves everything as it was. What differs on purpose is listed in ``docs/guides/drop-in.md``.
"""

from secateur.prune.amounts import (  # noqa: F401  torch's own tests call these
    _compute_norm,
    _compute_nparams_toprune,
    _validate_pruning_amount,
    _validate_pruning_amount_init,
    _validate_pruning_dim,
    _validate_structured_pruning,
)
from secateur.prune.functions import (
    custom_from_mask,
    custom_from_masks,
    global_unstructured,
    identity,
    is_pruned,
    l1_unstructured,
    ln_structured,
    pruned_names,
    random_structured,
    random_unstructured,
    remove,
    remove_all,
)
from secateur.prune.masked_weight import revive
from secateur.prune.methods import (
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    PruningContainer,
    RandomStructured,
    RandomUnstructured,
)

__all__ = [
    "BasePruningMethod",
    "CustomFromMask",
    "Identity",
    "L1Unstructured",
    "LnStructured",
    "PruningContainer",
    "RandomStructured",
    "RandomUnstructured",
    "custom_from_mask",
    "custom_from_masks",
    "global_unstructured",
    "identity",
    "is_pruned",
    "l1_unstructured",
    "ln_structured",
    "pruned_names",
    "random_structured",
    "random_unstructured",
    "remove",
    "remove_all",
    "revive",
]

# Pickles name the methods and `revive` by this package, whose name stays; which file of it they are in may change.
for _name in ("revive", *(_name for _name in __all__ if _name[0].isupper())):
    globals()[_name].__module__ = __name__
del _name
