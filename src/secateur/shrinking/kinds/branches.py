"""How far a model's outputs move without some of its residual branches. The choice of residual branches to remove."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.coupling import Axis, Branch, Coupling, Group, SameDraws, may_leave
from secateur.models import NUMBERS, OUTPUTS, ROWS, DenseOutputs, InMemory, running
from secateur.shrinking.apply import carry_out
from secateur.shrinking.gates import GateBudget, Gated, descended, ranked_start
from secateur.shrinking.plan import plan_without
from secateur.shrinking.proof import right_branches
from secateur.shrinking.select import least, select, too_few
from secateur.support import Forward, in_mode, mapped, restored, run_example, seeded, track

# How far a model's outputs move without some of its residual branches, on real inputs; and which branches to remove.
#
# Law: costs are measured on the model as it will be, with what stays in place of the modules that left; it is as it
# was afterwards. Branches leave one by one, each the one without which the outputs move least, the others being gone.

_BATCHES = 4  # at most


class OutputCosts(DenseOutputs):
    """The divergence of a changed model's outputs from its present ones; see `secateur.models.divergence`.

    Args:
        model: it stays as it is.
        batches: of which the first are used, as many as make so many rows of outputs.
        forward: how a batch is run.
        enough: rows: tokens, or examples of a classifier.
        at_most: batches.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        *,
        enough: int = ROWS,
        at_most: int = _BATCHES,
    ) -> None:
        super().__init__(model, batches[:at_most], forward, word=OUTPUTS, rows=enough)
        self._known: dict[frozenset[str], float] = {frozenset(): 0.0}

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
        """A set of ``target`` candidates whose removal moves the outputs little; see `least`."""

        def costs(gone: Sequence[Branch], more: Sequence[Branch]) -> dict[Branch | None, float]:
            return {None: self.without(gone)} | {each: self.without([*gone, each]) for each in more}

        def leaving(gone: Sequence[Branch]) -> dict[Branch, int]:
            left = gone_with(gone, every)
            sizes = {each: len(gone_with([*gone, each], every)) - len(left) for each in candidates if each not in left}
            return {each: size for each, size in sizes.items() if 0 < size <= target - len(left)}

        return least(costs, leaving, target)[0]


def gone_with(chosen: Sequence[Branch], every: Sequence[Branch]) -> list[Branch]:
    """The branches that have nothing left when these leave: they, and those within them."""
    plan = plan_without(chosen)
    return [branch for branch in every if plan.takes(branch)]


# The choice of residual branches to remove: those whose removal changes the outputs least on real inputs; without
# inputs those that change their stream least, or have the smallest weights. Each removal has to pass the proof.
#
# Law: of N branches ``ceil(share * N)`` leave, or so many as are asked, and at least one stays; those within a branch
# leave with it.

KEPT = "kept, as asked"


def influences(model: nn.Module, coupling: Coupling, inputs: Sequence[Any]) -> dict[Branch, float]:
    """``1 - E[cos(x, x + f(x))]`` for each branch f: how far it turns its stream x, between 0 and 2.

    The block influence of ShortGPT (Men et al. 2024, arXiv:2403.03853), of single branches as in He et al. 2024
    (arXiv:2406.15786): ``x`` is the sum without this term, and the mean runs over examples and positions, which are the
    dimensions that no parameter has. It is measured on ``inputs``, in evaluation mode where that was watched; random
    ones say little.

    >>> from secateur.coupling import find_coupling
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f = nn.Linear(2, 2, bias=False)
    ...         self.f.weight.data.copy_(torch.tensor([[0., -1.], [1., 0.]]))  # a quarter turn
    ...     def forward(self, x):
    ...         return x + self.f(x)
    >>> model, x = Block(), torch.randn(5, 2)
    >>> [round(value, 4) for value in influences(model, find_coupling(model, x), [x]).values()]
    [0.2929]
    """
    passes = [each for each in coupling.passes if not each[1]] or list(coupling.passes)
    totals = dict.fromkeys(coupling.branches, 0.0)
    for number, training in track(passes, "measuring branches"):
        wanted: dict[int, list[Branch]] = {}
        for branch in coupling.branches:
            wanted.setdefault(branch.terms[number, training].number, []).append(branch)
        kept: list[tuple[Branch, Tensor]] = []  # terms of which the sum is not there yet

        def seen(
            at: int,
            sides: Sequence[Any],
            *,
            here: tuple[int, bool] = (number, training),
            wanted: Mapping[int, Sequence[Branch]] = wanted,
            kept: list[tuple[Branch, Tensor]] = kept,
        ) -> Callable[[Tensor], None]:
            # a copy: the sum may be taken in place
            kept += [(each, sides[each.terms[here].position].detach().clone()) for each in wanted.get(at, ())]

            def then(total: Tensor) -> None:
                for branch, term in [each for each in kept if each[0].terms[here].final == at]:
                    totals[branch] += _turn(total.detach(), term, branch.terms[here].features) / len(passes)
                kept[:] = [each for each in kept if each[0].terms[here].final != at]

            return then

        watched = in_mode(model, training=training), restored(model)
        with watched[0], watched[1], seeded(), torch.no_grad(), SameDraws(seen=seen):
            run_example(model, inputs[number])
    return totals


def _turn(total: Tensor, term: Tensor, features: Sequence[int]) -> float:
    """1 - the mean cosine between a sum and itself without a term; a stream that is zero is turned by 1."""
    total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
    term = term.to(total.dtype).expand_as(total)
    dims = list(features or range(total.dim()))
    before = total - term
    # each by its own largest number first, or squares of half precision's sums overflow
    norms = before.norm(dim=dims) * total.norm(dim=dims)
    cosine = (before * total).sum(dims) / norms.clamp_min(torch.finfo(total.dtype).tiny)
    return float(1 - cosine.double().mean())


def number_of(share: float, every: Sequence[Branch]) -> int:
    """How many leave: one stays."""
    return min(int(share) if share >= 1 else math.ceil(share * len(every) - 1e-9), len(every) - 1)


def names_in(branch: Branch) -> set[str]:
    """Those that globs may match."""
    return {branch.name, *branch.modules, *branch.parameters}


def learnt_branches(
    free: Sequence[Branch], every: Sequence[Branch], share: float, batches: Sequence[Any], costs: OutputCosts
) -> Gated:
    """Gates of the branches that may leave, which begin with those that leave one after the other. A gate is multiplied
    into what the last module of its branch gives; what leaves is judged on the model without it."""
    model, target = costs.model, number_of(share, every)
    group = Group("branches", Axis(len(free)), len(free), (), 0, ())
    budget = GateBudget.counting([[group]], target / len(free))
    first = {each: at for at, each in enumerate(costs.least(free, every, target))}
    alone = {each: costs.without([each]) for each in free}
    order = sorted(free, key=lambda each: (first.get(each, len(every)), alone[each]))
    dense = DenseOutputs(model, batches, costs.forward, numbers=NUMBERS)
    ends = _ends(model, free, lambda: dense.rows_lost(0))

    @contextlib.contextmanager
    def within(gates: Mapping[str, Tensor]) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for module, at in ends.items():
                hooks.callback(module.register_forward_hook(_multiplied(gates["branches"][at])).remove)
            yield

    @contextlib.contextmanager
    def without(gates: Mapping[str, Tensor]) -> Iterator[None]:
        undo = carry_out(model, plan_without([free[at] for at in (gates["branches"] < 0.5).nonzero().flatten()]), None)
        try:
            yield
        finally:
            undo()

    start = ranked_start([torch.tensor([float(order.index(each)) for each in free], dtype=torch.float32, device="cpu")])
    blocks = InMemory(model, batches[:1], forward=costs.forward).blocks
    return descended(dense, budget, start, within, [*blocks.values()], without)


def _ends(model: nn.Module, branches: Sequence[Branch], run: Callable[[], object]) -> dict[nn.Module, int]:
    """``{module: number of its branch}`` of those that come last in what a branch adds, as they run."""
    ends: dict[int, nn.Module] = {}
    with contextlib.ExitStack() as hooks, running(model):
        for at, branch in enumerate(branches):
            for path in (path for path, form in branch.modules.items() if form["returns"] not in ("input", "nothing")):
                called = functools.partial(lambda at, module, *_: ends.update({at: module}), at)
                hooks.callback(model.get_submodule(path).register_forward_hook(called).remove)
        run()
    return {module: at for at, module in ends.items()}


def _multiplied(gate: Tensor) -> Callable[[nn.Module, Any, Any], Any]:
    def times(_: nn.Module, __: Any, out: Any) -> Any:
        return mapped(out, lambda each: each * gate.to(each) if each.is_floating_point() else each)

    return times


def choose_branches(
    model: nn.Module,
    coupling: Coupling,
    share: float,
    inputs: Sequence[Any],
    *,
    score: Callable[[nn.Module, Coupling, Sequence[Any]], Mapping[Branch, float]]
    | Mapping[Branch, float]
    | OutputCosts = influences,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    verify: bool = True,
) -> tuple[list[Branch], dict[str, str]]:
    """The ``share`` of the branches with the lowest scores, or so many, and why others could not leave:
    ``{name: why}``. Costs of outputs are no scores: what one branch costs depends on which others are gone.

    Raises:
        ValueError: fewer branches than that can leave.
    """
    every = coupling.branches
    if not every:
        raise ValueError(
            "the model has no residual branch, x + f(x) where only f has its modules; leave branches out, "
            "or give an example that runs through the sums."
        )
    target = number_of(share, every)
    if not target:
        raise ValueError(f"{every[0].name} is the only residual branch of the model, and one stays at least.")
    costs = score if isinstance(score, OutputCosts) else None
    scores = {} if isinstance(score, OutputCosts) else score(model, coupling, inputs) if callable(score) else score
    if wrong := [branch.name for branch, value in scores.items() if math.isnan(value)]:
        raise ValueError(f"the score of the branch {wrong[0]} is NaN; correct the weights or the example first.")
    stayed = {branch.name: KEPT for branch in every if not may_leave(names_in(branch), include, exclude)}
    ranked = sorted((each for each in every if each.name not in stayed), key=lambda each: scores.get(each, 0.0))
    right: dict[Branch, Branch] = {}

    def propose(stayed: Mapping[str, str]) -> list[Branch]:
        left = [each for each in ranked if each.name not in stayed]
        chosen = _lowest(left, every, target) if costs is None else costs.least(left, every, target)
        if (count := len(gone_with(chosen, every))) < target:
            raise too_few(f"{count} of the {len(every)} residual branches", target, stayed)
        return chosen

    def without_wrong(stayed: dict[str, str], chosen: Sequence[Branch]) -> dict[str, str] | None:
        if not verify:
            return None
        found, wrong = right_branches(model, coupling, chosen, inputs)
        right.update(found)
        said = {each.name: f"the model without it: {words}" for each, words in wrong.items()}
        return stayed | said if said else None

    stayed, chosen = select(stayed, propose, without_wrong)
    return [right.get(each, each) for each in chosen], stayed


def named_branches(
    model: nn.Module, coupling: Coupling, names: Sequence[str], inputs: Sequence[Any], *, verify: bool = True
) -> list[Branch]:
    """The branches of these names; all of them leave.

    Raises:
        ValueError: there is no branch of a name, none would stay, or a removal fails the proof.
    """
    by_name = {branch.name: branch for branch in coupling.branches}
    for name in names:
        if name not in by_name:
            there = ", ".join([*by_name][:8]) or "none"
            raise ValueError(f"there is no residual branch {name!r} that could leave; there are: {there}.")
    chosen = [by_name[name] for name in names]
    if len(gone_with(chosen, coupling.branches)) == len(coupling.branches):
        raise ValueError(f"all {len(coupling.branches)} residual branches are to leave, and one stays at least.")
    if not verify:
        return chosen
    right, wrong = right_branches(model, coupling, chosen, inputs)
    if wrong:
        branch, words = next(iter(wrong.items()))
        raise ValueError(f"the branch {branch.name} cannot leave; the model without it: {words}.")
    return list(right.values())


def _lowest(ranked: Sequence[Branch], every: Sequence[Branch], target: int) -> list[Branch]:
    """The first so many, each with those within it."""
    chosen: list[Branch] = []
    for branch in ranked:
        if branch not in gone_with(chosen, every) and len(gone_with([*chosen, branch], every)) <= target:
            chosen.append(branch)
    return chosen
