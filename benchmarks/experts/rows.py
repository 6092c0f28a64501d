"""Of which mixtures it is seen what the last matrix of each expert is multiplied with: these can be repaired.

Law: rows count where outputs move as they say when the last matrices are moved, on the miniatures of the coverage.
"""

from __future__ import annotations

import fnmatch
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.support.models import zoo
from secateur.coupling import Group, find_coupling
from secateur.models import prepared
from secateur.shrinking.kinds.routing import output_rows, places_of, rows_of_experts
from secateur.support import run_example


def rows(only: str = "*") -> list[dict[str, Any]]:
    """Whether the rows of each mixture are seen, and how far off they are."""
    found = []
    for name in zoo.names("transformers"):
        if not fnmatch.fnmatch(name, f"mixture_{only}"):
            continue
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model, inputs = zoo.ZOO[name]()
                coupling = find_coupling(model.eval(), inputs)
            except Exception as error:  # whatever the model raises
                print(f"{name}: {type(error).__name__}: {error}"[:200], flush=True)
                continue
        groups = [group for group in coupling.groups if group.chosen]
        if not groups:
            continue  # experts do not leave it
        off = [_off(model, group, inputs) for group in groups]
        seen = all(each is not None and each < 1e-4 for each in off)
        found.append({"mixture": name, "seen": seen, "off": off})
        print(found[-1], flush=True)
    print(f"{sum(row['seen'] for row in found)} of {len(found)} are seen.")
    return found


def _off(model: nn.Module, group: Group, inputs: Any) -> float | None:
    """How far what the rows say is from what the outputs do, relatively; None where there are no rows."""
    for path in places_of(model, group):
        module, given = model.get_submodule(path), []
        hook = module.register_forward_hook(
            lambda _, args, kwargs, __, given=given: given.append((args, kwargs)), with_kwargs=True
        )
        with prepared(model), torch.no_grad():
            run_example(model, inputs)
            hook.remove()
            if not given or (seen := rows_of_experts(model, group, given[0], None, path)) is None:
                continue
            args, kwargs = given[0]
            before = output_rows(module.forward(*args, **kwargs), None).double()
            expected, changes = torch.zeros_like(before), {}
            for one in seen:
                matrix = one.piece.of(model.get_parameter(one.piece.name))
                if one.piece not in changes:
                    changes[one.piece] = 0.1 * torch.randn(matrix.shape)
                expected.index_add_(0, one.tokens, one.weighted().double() @ changes[one.piece].double().T)
            for piece, change in changes.items():
                piece.of(model.get_parameter(piece.name)).add_(change)
            moved = output_rows(module.forward(*args, **kwargs), None).double() - before
            for piece, change in changes.items():
                piece.of(model.get_parameter(piece.name)).sub_(change)
        return float((moved - expected).norm() / expected.norm())
    return None
