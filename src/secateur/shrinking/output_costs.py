"""How far a model's outputs move without some of its residual branches, on real inputs; and which branches to remove.

Law: costs are measured on the model as it will be, with what stays in place of the modules that left; it is as it was
afterwards. Branches leave one by one, each the one without which the outputs move least, the others being gone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from secateur.blockwise import Tokens, divergence, prepared, unexplained
from secateur.coupling import Branch
from secateur.shrinking.execution import carry_out
from secateur.shrinking.measuring import check_finite
from secateur.shrinking.plan import plan_without
from secateur.support import Forward, device_of, moved, run_batch, seeded, share_of, tensors_in, track, unchanged

__all__ = ["OutputCosts", "few_batches", "gone_with", "running"]

_ROWS = 1024  # tokens, or examples of a classifier, that outputs are compared on: ranks move little with more
_BATCHES = 4  # at most


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """A context for running batches; the model's mode, buffers and gradients are restored at its end."""
    with unchanged(model), prepared(model), torch.no_grad(), seeded():
        yield


class OutputCosts:
    """Measures the divergence of a changed model's outputs from its present ones; see `secateur.blockwise.divergence`.

    Args:
        model: it stays as it is.
        batches: of which the first are used, as many as make so many rows of outputs.
        forward: how a batch is run.
        enough: rows: tokens, or examples of a classifier; by default a thousand.
        at_most: batches; by default four.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        *,
        enough: int | None = None,
        at_most: int | None = None,
    ) -> None:
        self.model, self.forward = model, forward
        enough = _ROWS if enough is None else enough
        self.held: list[tuple[Any, Any]] = []  # batches, and the dense model's outputs
        self._known: dict[frozenset[str], float] = {frozenset(): 0.0}
        rows = 0
        with running(model):
            for batch in batches[: _BATCHES if at_most is None else at_most]:
                batch = moved(batch, device_of(model))
                outputs = self._run(batch)
                count = divergence(outputs, outputs, Tokens.of(batch).own)[1]
                if count > enough - rows:
                    less = share_of(batch, (enough - rows) / count)
                    batch, outputs = (batch, outputs) if less is batch else (less, self._run(less))
                if not _is_finite(outputs):
                    check_finite(model)  # else the model itself overflows, and costs are infinite
                self.held.append((batch, outputs))
                rows += count
                if rows >= enough:
                    break

    def _run(self, batch: Any) -> Any:
        return run_batch(self.model, batch, self.forward)

    def now(self, watched: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> float:
        """The divergence of the model as it is now: the mean over rows. Each batch is run within ``watched``."""
        total, rows = 0.0, 0
        with running(self.model):
            for batch, dense in self.held:
                with watched():
                    outputs = self._run(batch)
                more, count = divergence(dense, outputs, Tokens.of(batch).own)
                total, rows = total + more, rows + count
        return total / rows if rows and math.isfinite(total) else math.inf

    def unexplained(self) -> float:
        """The share of the original outputs that the present ones do not explain; see
        `secateur.blockwise.unexplained`.
        """
        with running(self.model):
            found = unexplained((dense, self._run(batch), Tokens.of(batch).own) for batch, dense in self.held)
        return found if math.isfinite(found) else math.inf

    def without(self, branches: Sequence[Branch]) -> float:
        """The divergence without these branches; infinite where the model does not run without them."""
        plan = plan_without(branches)
        key = frozenset(plan.modules)
        if key not in self._known:
            undo = carry_out(self.model, plan, None)
            try:
                self._known[key] = self.now()
            except Exception:  # the proof says why, if it is to leave all the same
                self._known[key] = math.inf
            finally:
                undo()
        return self._known[key]

    def least(self, candidates: Sequence[Branch], every: Sequence[Branch], target: int) -> list[Branch]:
        """A set of ``target`` candidates whose removal moves the outputs little; fewer where there are no more.

        Next leaves what adds the least divergence per branch. A cost that was measured with fewer branches gone counts
        as a lower bound, so that few are measured again.
        """
        chosen: list[Branch] = []
        adds: dict[Branch, float] = {}
        fresh: dict[Branch, int] = {}
        for _ in track(range(target), "choosing branches"):
            count, cost = len(gone_with(chosen, every)), self.without(chosen)
            sizes = {
                each: len(gone_with([*chosen, each], every)) - count
                for each in candidates
                if each not in gone_with(chosen, every)
            }
            sizes = {each: size for each, size in sizes.items() if 0 < size <= target - count}
            if not sizes:
                break
            while fresh.get(best := min(sizes, key=lambda each: adds.get(each, -math.inf))) != len(chosen):
                more = self.without([*chosen, best])
                adds[best] = (more - cost) / sizes[best] if math.isfinite(more) else math.inf
                fresh[best] = len(chosen)
            chosen.append(best)
        return chosen


def few_batches(batches: Sequence[Any]) -> list[Any]:
    """The first batches, until they hold a thousand tokens, or examples."""
    held: list[Any] = []
    rows = 0
    for batch in batches[:_BATCHES]:
        tensors = [each for each in tensors_in(batch) if each.dim()]
        ids = [each.numel() for each in tensors if each.dim() > 1 and not each.is_floating_point()]
        count = max(ids or [each.shape[0] for each in tensors], default=0)
        held.append(share_of(batch, (_ROWS - rows) / count) if count > _ROWS - rows else batch)
        rows += count
        if rows >= _ROWS:
            break
    return held


def gone_with(chosen: Sequence[Branch], every: Sequence[Branch]) -> list[Branch]:
    """The branches that have nothing left when these leave: they, and those within them."""
    plan = plan_without(chosen)
    return [branch for branch in every if plan.takes(branch)]


def _is_finite(outputs: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors_in(outputs) if each.is_floating_point())
