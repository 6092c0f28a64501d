"""What masks are worth that are learnt on the loss of the whole model, the weights frozen, beside those of `oneshot`.

Law: all rows remove the same share and see the same batches; every start is the mask that `oneshot` chooses; a mask is
then solved again by the same walk, which may not change it; what is judged is on data that no row saw.

- **hard**: the library's gates (``oneshot(choose="gates")``): a number for each weight, the best of each group stay.
- **soft**: a distribution over the patterns of each group of n:m, sampled soft by Gumbel softmax, with the settings of
  MaskLLM (arXiv:2409.17481) but for the rate and the number of steps.
- **repaired**: hard, and what is frozen is the weights that `oneshot` repaired, the dense ones where it removed.
- **recover**: the mask of `oneshot`, and as many steps in which the weights learn, by `recover`.
- **wanda**, **wanda+gates**, and so with other solvers: what `oneshot` gives, without ``choose="gates"`` and with it.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.tables import head, row
from secateur import oneshot, recover
from secateur.models import NUMBERS, DenseOutputs, WeightView
from secateur.models.solving import Chosen, best_gates, learnt
from secateur.patterns import NM, Pattern
from secateur.solvers import admm

SOFT_RATE, SOFT_HEAT, SCALE, PRIOR = 3e-4, (4.0, 0.05), (1e2, 5e2), 3.0
WAYS = ("hard", "soft", "repaired", "recover")
SOLVERS = ("wanda", "magnitude", "sparsegpt", "admm")
Masks = Mapping[str, Tensor]


def walked(
    model: nn.Module, batches: Sequence[Any], setting: tuple[float | None, Pattern], masks: Masks | None = None
) -> dict[str, Tensor]:
    """`oneshot` of the model, in place: the masks that it chooses, or keeps if they are given."""
    given, found = iter({} if masks is None else masks.values()), []

    def solve(weight: Tensor, sparsity: float | None, pattern: Pattern, *, gram: Tensor) -> tuple[Tensor, Tensor]:
        how = (sparsity, pattern) if masks is None else (None, Chosen(next(given)))
        new, mask = admm(weight, *how, gram=gram)
        found.append(mask)
        return new, mask

    done = oneshot(model, batches, setting[0], pattern=setting[1], solver=solve)
    return dict(zip([layer.name for layer in done.layers], found, strict=True))  # a call a layer, in their order


def chosen(
    model: nn.Module,
    batches: Sequence[Any],
    start: Masks,
    frozen: Mapping[str, Tensor],
    pattern: Pattern,
    steps: int,
    *,
    soft: bool = False,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> tuple[dict[str, Tensor], float, float]:
    """Masks, and how far the outputs are from the dense ones with those of the start and with these; the model, which
    is a dense one to be spent, is left with the frozen weights under the new masks."""
    dense, draw = DenseOutputs(model, batches, forward, numbers=NUMBERS), torch.Generator().manual_seed(0)
    matrices = {
        name: [(WeightView(name, 0, (mask.shape[0], mask.shape[1]), (mask.shape[1], 1)), pattern)]
        for name, mask in start.items()
    }
    with torch.no_grad():
        for name, each in frozen.items():
            model.get_parameter(name).copy_(each)
    gates_of = (lambda name, _: _Soft(start[name], pattern, draw)) if soft else best_gates(start, matrices)
    found, masks = learnt(dense, start, gates_of, steps=steps)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    return masks, found.before, found.after


class _Soft:
    """A distribution over the patterns of each group."""

    def __init__(self, start: Tensor, pattern: Pattern, draw: torch.Generator) -> None:
        assert isinstance(pattern, NM)
        some = itertools.combinations(range(pattern.m), pattern.n)
        self.options = torch.tensor([[float(at in each) for at in range(pattern.m)] for each in some])
        self.start, self.shape, self.draw, self.has_moved = start, start.shape, draw, False
        over = pattern.pool(start.float()) @ self.options.T
        logits = 0.01 * torch.randn(over.shape, generator=draw)
        self.logits = (logits + (over - pattern.n) * logits.std() * PRIOR).requires_grad_()
        self.optimizer = torch.optim.Adam([self.logits], SOFT_RATE)

    def sampled(self, progress: float) -> Tensor:
        heat, scale = (first + (last - first) * progress for first, last in (SOFT_HEAT, SCALE))
        chances = torch.softmax((self.logits * scale + _gumbel(self.logits.shape, self.draw)) / heat, 1)
        self.given = (chances @ self.options).reshape(self.shape)
        return self.given.detach()

    def step(self, slope: Tensor) -> None:
        self.optimizer.zero_grad()
        self.given.backward(slope)
        self.optimizer.step()
        self.has_moved = True

    def mask(self) -> Tensor:
        if not self.has_moved:
            return self.start
        return self.options[self.logits.detach().argmax(1)].reshape(self.shape).bool()


def _gumbel(shape: torch.Size, draw: torch.Generator) -> Tensor:
    return -torch.rand(shape, generator=draw).clamp_(1e-9, 1 - 1e-7).log_().neg_().log_()


def _named(model: nn.Module, batch: Any) -> Any:
    """Outputs of a classifier are logits."""
    return model(**batch) if isinstance(batch, Mapping) else SimpleNamespace(logits=model(batch))


def masks(
    subject_of: Callable[[int], Any],
    settings: Mapping[str, tuple[float | None, Pattern]],
    ways: Sequence[str],
    seeds: int,
    steps: int,
    most: int | None = None,
) -> list[dict[str, Any]]:
    """A row a way, means over seeds, of at most so many batches: the loss on the batches, and the gap to the dense
    model on others, of the mask alone and solved again; entries that changed; seconds of the processor to learn."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        subject = subject_of(seed)
        batches = subject.batches(seed)[:most]
        for setting, how in settings.items():
            pruned, began = copy.deepcopy(subject.model), time.process_time()
            start = walked(pruned, batches, how)
            rows.append({"setting": setting, "way": "oneshot", "s": time.process_time() - began})
            rows[-1] |= _gaps(subject, pruned)
            for way in ways:
                if way != "soft" or isinstance(how[1], NM):
                    found = _tried(subject, batches, how, way, start, pruned, steps)
                    rows.append({"setting": setting, "way": way, **found})
                print(table(rows), flush=True)
    return rows


def _tried(
    subject: Any, batches: Sequence[Any], how: Any, way: str, start: Masks, pruned: nn.Module, steps: int
) -> dict[str, float]:
    model, began = copy.deepcopy(pruned if way == "recover" else subject.model), time.process_time()
    if way == "recover":
        recover(model, subject.model, batches, steps=steps, local=0, forward=_named)
        return {"s": time.process_time() - began, **_gaps(subject, model)}
    solver, _, gates = way.partition("+")
    if solver in SOLVERS:
        oneshot(model, batches, how[0], pattern=how[1], solver=solver, choose=gates or None, forward=_named)
        return {"s": time.process_time() - began, **_gaps(subject, model)}
    frozen = {name: subject.model.get_parameter(name).detach().clone() for name in start}
    if way == "repaired":
        frozen = {name: torch.where(start[name], pruned.get_parameter(name), own) for name, own in frozen.items()}
        frozen = {name: each.detach() for name, each in frozen.items()}
    new, before, after = chosen(model, batches, start, frozen, how[1], steps, soft=way == "soft", forward=_named)
    seconds, solved = time.process_time() - began, copy.deepcopy(subject.model)
    walked(solved, batches, how, new)
    changed = sum(int((new[name] != start[name]).sum()) for name in start)
    return {
        "before": before,
        "after": after,
        **_gaps(subject, model, "alone"),
        **_gaps(subject, solved),
        "changed": changed / sum(each.numel() for each in start.values()),
        "s": seconds,
    }


def _gaps(subject: Any, model: nn.Module, when: str = "solved") -> dict[str, float]:
    """The gap to the dense model, on each kind of text where there is more than one."""
    found = subject.measure(model)
    return {name.replace("gap", when, 1): each for name, each in found.items() if name.startswith("gap")}


COLUMNS = {
    "before": "lost on the batches before",
    "after": "after",
    "alone": "gap, mask alone",
    "alone of the manual": "of the manual",
    "solved": "gap, solved",
    "solved of the manual": "of the manual",
    "changed": "entries that changed",
    "s": "processor s",
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = [key for key in COLUMNS if any(key in each for each in rows)]
    lines = [head(["setting", "way", *(COLUMNS[key] for key in shown)])]
    for setting, way in dict.fromkeys((each["setting"], each["way"]) for each in rows):
        these = [each for each in rows if (each["setting"], each["way"]) == (setting, way)]
        means = [statistics.mean(each[key] for each in these) if key in these[0] else None for key in shown]
        lines.append(row([setting, way, *("" if mean is None else f"{mean:.4g}" for mean in means)]))
    return "\n".join(lines)
