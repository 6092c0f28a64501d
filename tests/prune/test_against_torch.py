"""Random programs of pruning, training and moving, run on torch's prune and on ours: the whole trace is the same.

What differs on purpose (docs/guides/drop-in.md) is kept out of the programs, or named here where it is let pass:

* torch ranks the product of the last forward (row 2), so a program runs a forward before it prunes a changed tensor;
* a failing call leaves torch's module broken (row 1), so its side is put back before the program goes on;
* among equal scores torch's choice is unspecified, and in half precision its norms overflow (row 8): the counts and
  the values kept must agree, and the program ends there;
* torch moves the hook behind later ones at every pruning (row 15), so with several the order is not compared;
* torch squares the fractions that a user has written into a mask at every global round (row 20), so a program has
  either the one or the other;
* torch stores the product as a plain attribute (rows 3, 9, 16), so that one key of the module's dictionary is left out.

``SECATEUR_PROGRAMS`` sets how many programs run; the seeds are 0, 1, 2, ...
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as theirs

from secateur import prune as ours

PROGRAMS = int(os.environ.get("SECATEUR_PROGRAMS", "300"))
CHUNKS = 5

MODULES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), lambda dtype: torch.randn(3, 5).to(dtype), ("weight", "bias")),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), lambda dtype: torch.randn(2, 3, 5).to(dtype), ("weight", "bias")),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3), lambda dtype: torch.randn(2, 2, 4, 4).to(dtype), ("weight", "bias")),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda dtype: torch.randn(1, 2, 3, 3, 3).to(dtype), ("weight", "bias")),
    "embedding": (lambda: nn.Embedding(7, 4), lambda dtype: torch.randint(0, 7, (3,)), ("weight",)),
    "layernorm": (lambda: nn.LayerNorm(6), lambda dtype: torch.randn(2, 6).to(dtype), ("weight", "bias")),
    "batchnorm": (lambda: nn.BatchNorm1d(5), lambda dtype: torch.randn(4, 5).to(dtype), ("weight", "bias")),
    "lstm": (
        lambda: nn.LSTM(2, 3),
        lambda dtype: torch.randn(2, 1, 2).to(dtype),
        ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0"),
    ),
}
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
GOOD_AMOUNTS = (0, 1, 2, 3, 0.0, 0.1, 0.25, 0.3, 0.5, 0.5, 0.9, Fraction(1, 3), np.float32(0.4), np.int64(2))
BAD_AMOUNTS = (-1, 1000, 1.1, -0.1, "half", None, float("nan"), 1j)


class Threshold(ours.BasePruningMethod):
    """A method as users write them."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, threshold):
        self.threshold = threshold

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > self.threshold)


class TheirThreshold(theirs.BasePruningMethod):
    PRUNING_TYPE = "unstructured"
    __init__ = Threshold.__init__
    compute_mask = Threshold.compute_mask


TheirThreshold.__name__ = "Threshold"


@dataclass
class Side:
    """One of the two runs of a program."""

    prune: Any
    threshold: type
    module: nn.Module
    optimizer: Any = None
    ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = {name: id(parameter) for name, parameter in self.module.named_parameters()}


class Stop(Exception):
    """The program met a choice that torch leaves open."""


def user_hook(module: nn.Module, inputs: Any) -> None:
    """Registered before the pruning, so that positions can be compared."""


def build(rng: random.Random, seed: int, device: str | torch.device) -> tuple[Side, Side, str, torch.dtype]:
    kind = rng.choice(list(MODULES))
    torch.manual_seed(seed)
    dtype = rng.choice(DTYPES)
    module = MODULES[kind][0]().to(dtype)
    for parameter in module.parameters():
        # Distinct magnitudes, exact in every dtype: ties are met later, by training, and then said to be ties.
        order = torch.randperm(parameter.numel()) + 1
        signs = torch.randint(0, 2, order.shape) * 2 - 1
        parameter.data = (order * signs / 64).view_as(parameter).to(dtype)
    module.to(device)
    if rng.random() < 0.15:
        rng.choice(list(module.parameters())).requires_grad_(False)
    with_hook, with_optimizer, momentum = rng.random() < 0.3, rng.random() < 0.08, rng.choice((0.0, 0.9))
    sides = []
    for prune, threshold in ((theirs, TheirThreshold), (ours, Threshold)):
        side = Side(prune, threshold, copy.deepcopy(module))
        if with_hook:
            side.module.register_forward_pre_hook(user_hook)
        if with_optimizer:
            side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.125, momentum=momentum)
        sides.append(side)
    return sides[0], sides[1], kind, dtype


def pruned_names(module: nn.Module) -> list[str]:
    return [hook._tensor_name for hook in module._forward_pre_hooks.values() if hook is not user_hook]


def name_of(hook: Any) -> str:
    return "" if hook is user_hook else hook._tensor_name


def describe_hook(hook: Any) -> Any:
    if hook is user_hook:
        return "user"
    inner = [describe_hook(method) for method in hook] if type(hook).__name__ == "PruningContainer" else []
    return (
        type(hook).__name__, hook._tensor_name, str(getattr(hook, "amount", None)), str(getattr(hook, "dim", None)),
        str(getattr(hook, "n", None)), inner,
    )  # fmt: skip


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and torch.equal(torch.nan_to_num(left.detach()), torch.nan_to_num(right.detach()))
        and torch.equal(left.isnan(), right.isnan())
    )


def compare(left: Side, right: Side, stale: set[str]) -> None:
    """Raises AssertionError unless the two modules are in the same state."""
    theirs_, ours_ = left.module, right.module
    assert [*theirs_._parameters] == [*ours_._parameters]
    assert [*theirs_._buffers] == [*ours_._buffers]
    assert theirs_._non_persistent_buffers_set == ours_._non_persistent_buffers_set
    pruned = set(pruned_names(theirs_))
    assert sorted(pruned) == sorted(pruned_names(ours_))
    assert [*theirs_.state_dict()] == [*ours_.state_dict()]
    for name, tensor in theirs_._parameters.items():
        other = ours_._parameters[name]
        assert same(tensor, other), name
        assert tensor.requires_grad == other.requires_grad
        assert tensor.is_leaf
        assert other.is_leaf
        assert same(tensor.grad, other.grad), name
        plain = name.removesuffix("_orig")
        assert id(tensor) == left.ids[plain]
        assert id(other) == right.ids[plain]
    for name, tensor in theirs_._buffers.items():
        assert same(tensor, ours_._buffers[name]), name
    for name in pruned - stale:
        value, other = getattr(theirs_, name), getattr(ours_, name)
        assert same(value, other), name
        assert type(value) is type(other)
        # torch's product dates from the last call, in whatever grad mode that was; here the mode is on.
        assert not value.requires_grad or other.requires_grad
    listed = {"_flat_weights", *pruned}
    assert [key for key in theirs_.__dict__ if key not in listed] == [
        key for key in ours_.__dict__ if key not in listed
    ]
    if isinstance(theirs_, nn.RNNBase) and not stale:
        for value, other in zip(theirs_._flat_weights, ours_._flat_weights, strict=True):
            assert same(value, other)
    descriptions = [[describe_hook(hook) for hook in m._forward_pre_hooks.values()] for m in (theirs_, ours_)]
    if len(pruned) > 1:
        descriptions = [sorted(each, key=str) for each in descriptions]
    assert descriptions[0] == descriptions[1]
    assert isinstance(ours_, type(theirs_))
    assert repr(ours_) == repr(theirs_)
    if not pruned:
        assert type(ours_) is type(theirs_)
    assert theirs.is_pruned(theirs_) == theirs.is_pruned(ours_) == ours.is_pruned(theirs_) == ours.is_pruned(ours_)


def end_at_ties(left: Side, right: Side, step: Step) -> None:
    """Different masks are allowed where scores are equal: the same number and the same values stay."""
    theirs_, ours_ = left.module, right.module
    names = step.names
    names = tuple(name for name in names if name + "_mask" in theirs_._buffers and name + "_mask" in ours_._buffers)
    masks = [[module._buffers[name + "_mask"] for name in names] for module in (theirs_, ours_)]
    if all(torch.equal(*pair) for pair in zip(*masks, strict=True)):
        return
    origs = [theirs_._parameters[name + "_orig"].detach() for name in names]
    half = origs[0].dtype in (torch.float16, torch.bfloat16)
    if step.norm is not None:
        dim, n = step.norm
        axes = [axis for axis in range(origs[0].dim()) if axis != dim % origs[0].dim()]
        kept_channels = [each[0].amax(axes) != 0 for each in masks]
        if origs[0].dim() == 1:
            raise Stop  # a vector is one row of channels to a container, and those already pruned tie at 0
        if not half and not step.scored:  # the channels that only one of the two keeps are equally strong
            either = origs[0] * torch.maximum(*(each[0] for each in masks))
            norms = torch.linalg.vector_norm(either, 2 if n is None else n, axes)
            only = [norms[one & ~other] for one, other in (kept_channels, kept_channels[::-1])]
            only = [norm[norm > 0].sort().values for norm in only]
            assert only[0].shape == only[1].shape
            assert torch.allclose(*only)
        raise Stop
    counts = [sum(int(mask.count_nonzero()) for mask in each) for each in masks]
    assert counts[0] == counts[1]
    if half:
        raise Stop  # random draws of few bits tie too
    kept = [
        torch.sort(torch.cat([(orig * mask).abs().flatten() for orig, mask in zip(origs, each, strict=True)])).values
        for each in masks
    ]
    assert torch.equal(*kept)
    raise Stop


@dataclass
class Step:
    """What to do to one side; `names` are the tensors whose masks it makes."""

    label: str
    act: Any
    names: tuple[str, ...] = ()
    norm: tuple[int, Any] | None = None  # (dim, n) where channels are ranked by their norm
    scored: bool = False  # by importance_scores
    makes_stale: bool = False
    refreshes: bool = False


def amount(rng: random.Random) -> Any:
    return rng.choice(BAD_AMOUNTS) if rng.random() < 0.12 else rng.choice(GOOD_AMOUNTS)


def pruning_step(rng: random.Random, names: tuple[str, ...], soft: bool) -> Step:
    name = rng.choice(names)
    if rng.random() < 0.03:
        name = "nothing"
    how, dim, n = amount(rng), rng.choice((0, 1, -1, -2, 2, 5, -9)), rng.choice((1, 2, 2, 0.5, 3))
    kind = rng.choice(
        ("identity", "random_unstructured", "l1", "l1", "random_structured", "ln", "ln", "custom", "mask", "global")
    )
    seed = rng.randrange(2**31)
    as_class = rng.random() < 0.4

    def importance(side: Side) -> Tensor | None:
        if rng_scores is None:
            return None
        tensor = getattr(side.module, name)
        shape = tensor.shape if rng_scores < 0.9 else (*tensor.shape, 1)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(torch.Size(shape).numel(), generator=generator).view(shape).to(tensor)

    rng_scores = rng.random() if rng.random() < 0.2 else None

    def act(side: Side) -> Any:
        p, m = side.prune, side.module
        if kind == "identity":
            return p.Identity.apply(m, name) if as_class else p.identity(m, name)
        if kind == "random_unstructured":
            return p.RandomUnstructured.apply(m, name, how) if as_class else p.random_unstructured(m, name, how)
        if kind == "l1":
            scores = importance(side)
            if as_class:
                return p.L1Unstructured.apply(m, name, how, importance_scores=scores)
            return p.l1_unstructured(m, name, amount=how, importance_scores=scores)
        if kind == "random_structured":
            if as_class and dim == -1:
                return p.RandomStructured.apply(m, name, how)
            return p.random_structured(m, name, how, dim)
        if kind == "ln":
            scores = importance(side)
            if as_class:
                return p.LnStructured.apply(m, name, how, n, dim, importance_scores=scores)
            return p.ln_structured(m, name, how, n, dim, importance_scores=scores)
        if kind == "custom":
            return side.threshold.apply(m, name, 0.1 if not isinstance(how, float) else how / 8)
        if kind == "mask":
            generator = torch.Generator().manual_seed(seed)
            tensor = getattr(m, name)
            mask = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device)
            return p.custom_from_mask(m, name, mask.bool() if as_class else mask)
        method = p.RandomUnstructured if as_class else p.L1Unstructured
        return p.global_unstructured([(m, each) for each in chosen], method, amount=how)

    if soft and kind == "global":
        kind = "l1"
    chosen = tuple(rng.sample(names, rng.randint(1, len(names))))
    made = chosen if kind == "global" else (name,)
    return Step(
        f"{kind} {made} {how!r} dim={dim} n={n}", act, made, (dim, n) if kind == "ln" else None, rng_scores is not None
    )


def other_step(rng: random.Random, kind: str, names: tuple[str, ...], soft: bool) -> Step:
    seed = rng.randrange(2**31)
    name = rng.choice(names)
    action = rng.choice(
        ("forward", "forward", "forward", "step", "load", "cast", "edit", "remove", "remove", "lightning", "zero_grad")
    )

    def forward(side: Side) -> Any:
        torch.manual_seed(seed)
        first = next(side.module.parameters())
        example = MODULES[kind][1](first.dtype).to(first.device)
        out = side.module(example)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.float().square().sum().backward()
        return out.detach()

    def train(side: Side) -> None:
        if side.optimizer is not None:
            side.optimizer.step()
            return
        with torch.no_grad():
            for parameter in side.module.parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    parameter.sub_(parameter.grad, alpha=0.125)

    def load(side: Side) -> Any:
        state = {}
        for key, value in side.module.state_dict().items():
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randperm(value.numel(), generator=generator).view(value.shape) / 32
            state[key] = value if key.endswith("_mask") or not value.is_floating_point() else noise.to(value.dtype)
        return str(side.module.load_state_dict(state))

    def cast(side: Side) -> None:
        side.module.to(target)

    def edit(side: Side) -> None:
        mask = side.module._buffers.get(name + "_mask")
        if mask is not None:
            generator = torch.Generator().manual_seed(seed)
            mask[torch.randint(0, 2, mask.shape, generator=generator).bool()] = value

    def remove(side: Side) -> Any:
        return side.prune.remove(side.module, name)

    def lightning(side: Side) -> None:
        for child in side.module.modules():
            # Lightning goes by position; by name, the order of torch's hooks after several prunings does not matter.
            for key in sorted(child._forward_pre_hooks, key=lambda key: name_of(child._forward_pre_hooks[key])):
                hook = child._forward_pre_hooks[key]
                if isinstance(hook, theirs.BasePruningMethod):
                    hook.remove(child)
                    del child._forward_pre_hooks[key]

    def zero_grad(side: Side) -> None:
        side.module.zero_grad()

    target, value = rng.choice(DTYPES), rng.choice((0.0, 1.0, 0.5 if soft else 0.0))
    if action == "forward":
        return Step("forward", forward, refreshes=True)
    if action in ("remove", "lightning"):
        return Step(f"{action} {name}", {"remove": remove, "lightning": lightning}[action])
    if action == "zero_grad":
        return Step(action, zero_grad)
    return Step(
        f"{action} {target} {value}",
        {"step": train, "load": load, "cast": cast, "edit": edit}[action],
        makes_stale=True,
    )


def generators(device: torch.device) -> Tensor:
    """The state of the CPU's, and of the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def attempt(side: Side, step: Step, seed: int) -> tuple[Any, Any]:
    """(outcome, states of the random generators); torch's module is put back after a failure, as ours is by itself."""
    torch.manual_seed(seed)
    module = side.module
    # Kept for torch's side only: a second reference to a parameter would have ours look for another owner.
    before = dict(module.__dict__) if side.prune is theirs else {}
    tables = {key: copy.copy(before[key]) for key in ("_parameters", "_buffers", "_forward_pre_hooks") if before}
    flat = list(module._flat_weights) if before and isinstance(module, nn.RNNBase) else None
    containers = [
        (hook, hook._pruning_methods)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, theirs.PruningContainer)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = step.act(side)
    except Exception as error:
        if side.prune is theirs and step.names:
            module.__dict__.clear()
            module.__dict__.update(before)
            for key, table in tables.items():
                module.__dict__[key].clear()
                module.__dict__[key].update(table)
            if flat is not None:
                module._flat_weights[:] = flat
            for hook, methods in containers:
                hook._pruning_methods = methods
        outcome = (type(error), said(error))
    if isinstance(outcome, nn.Module):
        assert outcome is module
        outcome = "the module"
    elif isinstance(outcome, ours.BasePruningMethod):
        assert any(outcome is hook for hook in module._forward_pre_hooks.values())
        outcome = describe_hook(outcome)
    return outcome, generators(next(module.parameters()).device)


def run(seed: int, device: str | torch.device = "cpu") -> str:
    """Runs one program on both; says how it ended."""
    rng = random.Random(seed)
    left, right, kind, dtype = build(rng, seed, device)
    names = MODULES[kind][2]
    soft = rng.random() < 0.5
    stale: set[str] = set()
    log = [f"seed {seed}: {kind} {dtype}"]
    try:
        for number in range(rng.randint(3, 10)):
            if rng.random() < 0.55:
                step = pruning_step(rng, names, soft)
                if stale & set(step.names) and step.names:
                    queue = [refresh(kind), step]
                else:
                    queue = [step]
            else:
                queue = [other_step(rng, kind, names, soft)]
            for each in queue:
                log.append(each.label)
                outcome, generator = attempt(left, each, seed * 100 + number)
                other, other_generator = attempt(right, each, seed * 100 + number)
                failures = [isinstance(each, tuple) and isinstance(each[0], type) for each in (outcome, other)]
                if any(failures):
                    assert outcome == other
                end_at_ties(left, right, each)
                if isinstance(outcome, Tensor):
                    assert same(outcome, other)
                else:
                    assert outcome == other
                assert torch.equal(generator, other_generator)
                if each.refreshes and not any(failures):
                    stale.clear()
                if each.makes_stale:
                    stale |= set(names)
                stale &= set(pruned_names(left.module))
                compare(left, right, stale)
    except Stop:
        return "tie"
    except Exception as error:
        raise AssertionError("\n".join([*log, repr(error)])) from error
    return "whole"


def refresh(kind: str) -> Step:
    """A forward without gradients, which brings torch's product up to date where the module can run at all."""

    def act(side: Side) -> None:
        for hook in side.module._forward_pre_hooks.values():
            hook(side.module, ())

    return Step("refresh", act, refreshes=True)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_leave_the_same_trace(chunk: int) -> None:
    ends = [run(seed) for seed in range(chunk, PROGRAMS, CHUNKS)]
    assert ends.count("tie") <= 0.25 * len(ends) + 1


def said(error: Exception) -> str:
    """Its message as every torch says it: before 2.9 without the two shapes, and with the spaces of its code."""
    text = " ".join(str(error).split())
    return text.partition(", got ")[0] if text.startswith("importance_scores") else text


def outcome_of(call: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call()
    except Exception as error:
        return type(error), said(error)
    return result


def one_call(rng: random.Random, prune: Any, seed: int, device: str | torch.device) -> Any:
    """A method, a container or a helper used on its own, on a tensor without a module."""
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator).to(device)
    default = (torch.rand(shape, generator=generator) < 0.8).to(device, rng.choice((torch.float32, torch.int64)))
    how, dim = amount(rng), rng.choice((0, 1, 2, -1, -2, 4, -6))
    # Orders for which torch accepts several axes; the others are row 14.
    n = rng.choice((1, 2, 3, 0.5))
    make = rng.choice(
        (
            lambda: prune.Identity(), lambda: prune.L1Unstructured(how), lambda: prune.RandomUnstructured(how),
            lambda: prune.RandomStructured(how, dim), lambda: prune.LnStructured(how, n, dim),
            lambda: prune.CustomFromMask(default.bool()),
        )
    )  # fmt: skip
    kind = rng.choice(("mask", "container", "prune", "helper"))
    torch.manual_seed(seed)
    if kind == "mask":
        return outcome_of(lambda: make().compute_mask(t, default))
    if kind == "prune":
        return outcome_of(lambda: make().prune(t, default, importance_scores=rng.choice((None, t, t[:0]))))
    if kind == "container":

        def contained() -> Tensor:
            container, method = prune.PruningContainer(), make()
            container._tensor_name = method._tensor_name = "weight"
            container.add_pruning_method(method)
            return container.compute_mask(t, default)

        return outcome_of(contained)
    helper = rng.choice(
        (
            lambda: prune._validate_pruning_amount_init(how),
            lambda: prune._validate_pruning_amount(how, 2),
            lambda: prune._validate_structured_pruning(t),
            lambda: prune._validate_pruning_dim(t, dim),
            lambda: prune._compute_nparams_toprune(how, 7),
            lambda: prune._compute_norm(t, n, dim),
        )
    )
    return outcome_of(helper)


def call_alike(seed: int, device: str | torch.device = "cpu") -> None:
    left, right = (one_call(random.Random(seed), library, seed, device) for library in (theirs, ours))
    if isinstance(left, Tensor):
        assert same(left, right), seed
    else:
        assert left == right, seed


def test_methods_containers_and_helpers_on_their_own():
    for seed in range(PROGRAMS // 2):
        call_alike(seed)
