"""How far what leaves is from what was asked, on the shapes of published models, on the meta device."""

from __future__ import annotations

import fnmatch
import time
from typing import Any

from benchmarks.support.models import PUBLISHED
from secateur.coupling import Coupling, Scope, find_coupling
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import cost_of
from secateur.shrinking.counting import solve_counts
from secateur.shrinking.request import PruningTarget, Request, pruning_target

ASKED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


def nearest(only: str = "*", **_: Any) -> dict[str, Any]:
    """Of each model and target the furthest that what leaves is from what was asked, and what cannot leave."""
    rows = []
    print(f"{'':16} {'uniform':>7} {'target':>7} {'off by at most':>14} {'refused':>24} {'seconds':>8}")
    for name in fnmatch.filter(PUBLISHED, only):
        make, inputs = PUBLISHED[name]
        model = make()
        coupling = find_coupling(model, inputs)
        for uniform in (False, True):
            configured = Configured(model, Scope.of(coupling)) if uniform else None
            scope = Scope.of(coupling) if configured is None else configured.scope
            subject = pruning_target(model, scope, [inputs], configured=configured)
            for target in ("params", "macs"):
                row = {"model": name, "uniform": uniform, "target": target, **_off(subject, coupling, inputs, target)}
                refused = " ".join(f"{share:.0%}" for share in row["refused"])
                print(f"{name:16} {uniform!s:>7} {target:>7} {row['off']:14.3%} {refused:>24} {row['seconds']:8.2f}")
                rows.append(row)
    return {"rows": rows}


def _off(subject: PruningTarget, coupling: Coupling, inputs: Any, target: str) -> dict[str, Any]:
    cost = cost_of(subject.model, coupling, inputs, target)
    whole, off, refused, started = cost({}), 0.0, [], time.process_time()
    for share in ASKED:
        try:
            counts = solve_counts(subject, subject.scope.groups, Request(sparsity=share, target=target)).counts
        except ValueError:
            refused.append(share)
            continue
        off = max(off, abs(1 - cost(counts) / whole - share))
    return {"off": off, "refused": refused, "seconds": (time.process_time() - started) / len(ASKED)}
