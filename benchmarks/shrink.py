"""`shrink` beside Torch-Pruning: is it right, how fast is it, what is gained, what does it cost in accuracy.

    python benchmarks/shrink.py coverage|speed|effect|accuracy|depth [--seeds 3] [--only GLOB] [--json FILE]

Law: nothing here trusts the library's own proof. Whether a smaller model is right is decided by a comparison that is
written in this file, the same for both libraries; ratios are of medians of runs that alternate in one process.

Torch-Pruning is not in the project's environment. Elsewhere: `pip install --no-deps torch-pruning`, with the torch of
constraints.txt, transformers, scikit-learn and this package. Without it the script says so and measures ours alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import functools
import gc
import json
import math
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from secateur import demo
from secateur.allocation import everywhere
from secateur.coupling import find_coupling, run
from secateur.criteria import ln_norm, taylor
from secateur.evidence import collect
from secateur.shrinking import shrink

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import zoo

try:
    import torch_pruning as tp
except ImportError:
    tp = None

MISSING = "torch-pruning is not installed here: only ours is measured (the file's first lines say how to install it)."
TOLERANCE = 1e-6  # of the largest number of an output
PATIENCE = {"ours": 60, "torch-pruning": 10}  # seconds for one model; most take less than one

# --------------------------------------------------------------------------------------------------------------------
# Right or wrong: the comparison
# --------------------------------------------------------------------------------------------------------------------

Kept = dict[str, list[Tensor]]  # of each parameter, per dimension, the indices that stay


class Forms(TorchFunctionMode):
    """Everything in float64; statistics as they are ("exact"), or in a form to which zeros add nothing.

    "sums": a mean becomes a sum and a normalization divides by a root of a sum of squares, in every place, so that a
    channel that is zero and one that is gone are the same. "centred" is for normalizations that the code writes out,
    and for those to which a removed channel comes with a bias: no statistic at all, only the scale and the bias; a mean
    over one dimension that stays in place is left out. A channel in the wrong place changes any of the three.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.dtype, _wide, (args, dict(kwargs or {})))
        name = getattr(func, "__name__", "").strip("_")
        if name in ("float", "half", "bfloat16") and isinstance(args[0], Tensor):
            return args[0].double()
        if name == "weight_norm":  # a direction of length zero, normalized, is zero
            return func(*args, **kwargs).nan_to_num(0.0)
        if self.form == "exact" or name not in _STATISTICS:
            return func(*args, **kwargs)
        if name == "batch_norm":
            training = kwargs.get("training", args[5] if len(args) > 5 else False)
            return _batch_normalized(self.form, *args, **kwargs) if training else func(*args, **kwargs)
        if name in ("layer_norm", "rms_norm"):
            return _normalized(self.form, *args, **kwargs)
        if name == "group_norm":
            return _group_normalized(self.form, *args, **kwargs)
        if not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return self.statistic(name, *args, **kwargs)

    def statistic(self, name: str, x: Tensor, dim: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
        keep = bool(kwargs.get("keepdim", rest[-1] if rest and isinstance(rest[-1], bool) else False))
        over = [dim] if isinstance(dim, int) else list(dim if dim is not None else range(x.dim()))
        total = (x if name == "mean" else x.square()).sum(over, keepdim=keep) / 64
        if self.form == "centred" and keep and len(over) == 1 and over[0] in (1, -1, x.dim() - 1):
            return torch.zeros_like(total) if name == "mean" else torch.ones_like(total)
        return total


_STATISTICS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "mean", "var", "std")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _by_root_of_squares(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x / (x.square().sum(tuple(dims), keepdim=True) + 1e-3).sqrt()


def _normalized(form: str, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any) -> Tensor:
    count = 1 if isinstance(shape, int) else len(shape)
    x = _by_root_of_squares(x, range(-count, 0)) if form == "sums" else x
    x = x * weight if weight is not None else x
    return x + bias if isinstance(bias, Tensor) else x


def _group_normalized(
    form: str, x: Tensor, groups: int, weight: Any = None, bias: Any = None, *_: Any, **__: Any
) -> Tensor:
    out = _by_root_of_squares(x.reshape(x.shape[0], groups, -1), [-1]).reshape(x.shape) if form == "sums" else x
    one = [1, -1, *(1 for _ in x.shape[2:])]
    out = out * weight.reshape(one) if weight is not None else out
    return out + bias.reshape(one) if bias is not None else out


def _batch_normalized(
    form: str, x: Tensor, _mean: Any, _var: Any, weight: Any = None, bias: Any = None, *_: Any, **__: Any
) -> Tensor:
    """In training; of weights that the code standardizes."""
    out = _by_root_of_squares(x, [0, *range(2, x.dim())]) if form == "sums" else x
    one = [1, -1, *(1 for _ in x.shape[2:])]
    out = out * weight.reshape(one) if weight is not None else out
    return out + bias.reshape(one) if bias is not None else out


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002  what a model may use
        yield


@contextlib.contextmanager
def wide() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tensors_of(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def outputs(model: nn.Module, inputs: zoo.Inputs, form: str = "exact") -> list[Tensor]:
    inputs = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)
    with torch.no_grad(), wide(), seeded(), Forms(form):
        return tensors_of(zoo.run(model, inputs))


def gap(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference, of the largest number of each output; infinite where shapes or kinds differ."""
    if [each.shape for each in expected] != [each.shape for each in found]:
        return math.inf
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        if not one.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, other) else math.inf)
        elif one.numel():
            real = torch.isfinite(one)
            if not torch.equal(real, torch.isfinite(other)):
                return math.inf
            if real.any():
                scale = float(one[real].abs().max()) or 1.0
                worst = max(worst, float((one[real] - other[real]).abs().max()) / scale)
    return worst


def agreement(masked: nn.Module, smaller: nn.Module, inputs: zoo.Inputs) -> tuple[str | None, float]:
    """In which form two models agree, None in none, and how far apart they are in the exact one."""
    exact = gap(outputs(masked, inputs), outputs(smaller, inputs))
    if exact <= TOLERANCE:
        return "exact", exact
    for form in ("sums", "centred"):
        if gap(outputs(masked, inputs, form), outputs(smaller, inputs, form)) <= TOLERANCE:
            return form, exact
    return None, exact


def with_zeros(model: nn.Module, kept: Kept) -> nn.Module:
    """A copy in which what was removed is zero; parameters that the model uses twice may differ there."""
    masked = copy.deepcopy(model)
    for name, parameter in list(masked.named_parameters(remove_duplicate=False)):
        if name in kept:
            value = parameter.detach().clone()
            for at, indices in enumerate(kept[name]):
                gone = torch.ones(value.shape[at], dtype=torch.bool)
                gone[indices] = False
                value.index_fill_(at, gone.nonzero().flatten(), 0)
            path, _, key = name.rpartition(".")
            setattr(masked.get_submodule(path), key, nn.Parameter(value))
    return masked


def randomized(model: nn.Module) -> nn.Module:
    """A copy in float64 whose weights are random and near in scale to the model's."""
    probe = copy.deepcopy(model).double()
    with seeded(), torch.no_grad():
        for parameter in probe.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1:
                parameter.add_(torch.randn_like(parameter) * max(0.3 * float(parameter.std()), 0.02))
    return probe


def count_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --------------------------------------------------------------------------------------------------------------------
# Coverage
# --------------------------------------------------------------------------------------------------------------------


def uneven(scores: Mapping[str, Tensor], _: float, pattern: object) -> dict[str, int]:  # noqa: ARG001
    """Another share of each group, from a fifth to four fifths; one unit at least leaves, and one stays."""
    draw = random.Random(len(scores))
    counts = {}
    for name, each in scores.items():
        share = draw.uniform(0.2, 0.8)
        counts[name] = min(max(round(share * each.numel()), 1), each.numel() - 1)
    return counts


def ours(name: str, ratio: str, keep: Sequence[str] | None = None) -> dict[str, Any]:
    """Shrink a model of the zoo, and judge what came out."""
    model, inputs = zoo.ZOO[name]()
    fresh = copy.deepcopy(model)
    coupling = find_coupling(model, inputs)
    before = count_of(model)
    row: dict[str, Any] = {"groups": len(coupling.groups)}
    options: dict[str, Any] = {"allocate": uneven} if ratio == "uneven" else {}
    share = 0.01 if options else 0.5  # it is `uneven` that says how many stay
    start = time.perf_counter()
    try:
        shrink(model, inputs, share, target="units", round_to=1, keep=keep or None, **options)
    except ValueError as error:
        if not str(error).startswith("nothing of the model can leave"):
            raise
        return {**row, "class": "nothing", "why": str(error)[:300], "left": 1.0}
    row["seconds"] = time.perf_counter() - start
    row["left"] = count_of(model) / before
    plans = model.shrink_plans if hasattr(model, "shrink_plans") else []
    kept: Kept = {
        each: [torch.arange(size) for size in parameter.shape]
        for each, parameter in (*fresh.named_parameters(), *fresh.named_buffers())
    }
    for plan in plans:
        for each, (_, cuts) in plan.tensors.items():
            for at, indices in cuts.items():
                kept[each][at] = kept[each][at][torch.as_tensor(indices)]
    if not plans or not any(plan.tensors for plan in plans):
        return {**row, "class": "nothing", "why": "no group left"}

    def part(each: str, old: Tensor) -> Tensor:
        """What stays of a tensor; where the plan says so, scaled."""
        old = old.detach().clone()
        for plan in plans:
            for name, at, indices, factor in plan.scales:
                if name == each:
                    shape = [-1 if other == at else 1 for other in range(old.dim())]
                    factors = torch.ones(old.shape[at], dtype=old.dtype)
                    factors[torch.as_tensor(indices)] = factor
                    old *= factors.reshape(shape)
        return sliced(old, kept[each])

    # the smaller model's own values are slices of the original's
    smaller_tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for each, old in (*fresh.named_parameters(), *fresh.named_buffers()):
        if not torch.equal(smaller_tensors[each], part(each, old)):
            return {**row, "class": "WRONG", "why": f"{each} holds other values than the original's"}
    # with random weights it computes what the original does
    probe = randomized(fresh)
    smaller = copy.deepcopy(model).double()
    for each, new in (*smaller.named_parameters(), *smaller.named_buffers()):
        source = dict((*probe.named_parameters(), *probe.named_buffers()))[each]
        new.data.copy_(part(each, source))
    masks = {each: kept[each] for each, _ in fresh.named_parameters()}
    tied = {id(parameter): each for each, parameter in fresh.named_parameters()}
    for each, parameter in fresh.named_parameters(remove_duplicate=False):
        masks[each] = masks[tied[id(parameter)]]
    form, row["gap"] = agreement(with_zeros(probe, masks), smaller, inputs)
    row["form"] = form
    row["flagged"] = [group.name for group in coupling.groups if group.notes]

    stayed = [group.name for group in coupling.groups if not _was_cut(coupling, group, kept)]
    without = sorted({why for why in coupling.frozen.values() if "no rule" in why and not anyway(why)})
    if form is None:
        row |= {"class": "WRONG", "why": f"differs by {row['gap']:.2g}"}
    elif stayed or without:
        row |= {"class": "partly", "why": "; ".join([*([f"stayed: {', '.join(stayed)}"] if stayed else []), *without])}
    else:
        row |= {"class": "right"}
    if form != "exact" and keep is None and form is not None:
        # where statistics change, the rest of the groups is compared exactly
        others = {each for group in coupling.groups if not group.notes for each, _ in group.members}
        names = set()
        for group in coupling.groups:
            if group.notes:  # a tensor that no other group has, if there is one
                names |= {next((each for each, _ in group.members if each not in others), group.members[0][0])}
        rest = ours(name, ratio, sorted(glob_of(each) for each in names)) if names else {"class": "WRONG"}
        row["without flagged groups"] = {key: rest.get(key) for key in ("class", "form", "gap", "why", "left")}
        if rest["class"] == "WRONG" or rest.get("form") not in (None, "exact"):
            row |= {"class": "WRONG", "why": "differs without the groups that have statistics over them, too"}
    return row


def anyway(why: str) -> bool:
    """Whether a dimension would be frozen without the function that has no rule, too."""
    return any(reason in why for reason in ("an input of the model", "an output of the model", "a vocabulary"))


def glob_of(name: str) -> str:
    return name.replace("[", "[[]")


def sliced(tensor: Tensor, kept: Sequence[Tensor]) -> Tensor:
    for at, indices in enumerate(kept):
        tensor = tensor.index_select(at, indices)
    return tensor


def _was_cut(coupling: Any, group: Any, kept: Kept) -> bool:
    name, at = group.members[0]
    units = coupling.indices(group, name, at)[kept[name][at].numpy()]
    return len(set(units[units >= 0].tolist())) < group.size


def distinct(model: nn.Module) -> None:
    """Make the entries of every parameter differ from each other, so that each says where it came from."""
    with seeded(), torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for _ in range(50):
                values, inverse, counts = torch.unique(flat, return_inverse=True, return_counts=True)
                if len(values) == flat.numel():
                    break
                double = counts[inverse] > 1
                scale = float(flat.abs().mean()) or 1.0
                flat[double] += 1e-3 * scale * torch.randn(int(double.sum()))


def kept_by_value(before: Tensor, after: Tensor) -> list[Tensor] | None:
    """Which indices of each dimension stayed, from the values; None where they are not slices."""
    if before.shape == after.shape and torch.equal(before, after):
        return [torch.arange(size) for size in before.shape]
    if before.dim() != after.dim() or not after.numel():
        return None
    values, order = before.flatten().sort()
    places = torch.searchsorted(values, after.flatten()).clamp(max=len(values) - 1)
    if not torch.equal(values[places], after.flatten()):
        return None
    found = []
    for at, coordinate in enumerate(torch.unravel_index(order[places].reshape(after.shape), before.shape)):
        lines = coordinate.movedim(at, 0).reshape(after.shape[at], -1)
        if not (lines == lines[:, :1]).all():
            return None
        found.append(lines[:, 0])
    return found


def ignored_by_readme(model: nn.Module, inputs: zoo.Inputs) -> list[nn.Module]:
    """Torch-Pruning is told not to prune the outputs, as its README advises: by their number of channels."""
    with torch.no_grad(), seeded():
        out = tensors_of(zoo.run(model, inputs))
    sizes = {size for each in out if each.is_floating_point() for size in each.shape[1:]}
    found = []
    for module in model.modules():
        count = getattr(module, "out_features", getattr(module, "out_channels", None))
        if count in sizes:
            found.append(module)
    return found


def theirs(name: str, ratio: str) -> dict[str, Any]:
    """The same with Torch-Pruning, as its README says: magnitude of groups, L2, outputs ignored."""
    model, inputs = zoo.ZOO[name]()
    distinct(model)
    fresh = copy.deepcopy(model)
    before = count_of(model)
    expected = [each.shape for each in outputs(copy.deepcopy(fresh).double(), inputs)]
    row: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        ignored = ignored_by_readme(model, inputs)
        options: dict[str, Any] = {}
        if ratio == "uneven":
            draw = random.Random(zlib.crc32(name.encode()))
            options["pruning_ratio_dict"] = {
                module: draw.uniform(0.2, 0.8)
                for module in model.modules()
                if isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.LSTM)
            }
        pruner = tp.pruner.MagnitudePruner(
            model,
            inputs,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=0.5,
            ignored_layers=ignored,
            in_channel_groups={},  # its defaults are shared between pruners
            out_channel_groups={},
            num_heads={},
            channel_groups={},
            **options,
        )
        pruner.step()
    except Exception as error:
        return {**row, "class": "crash", "why": f"pruning: {type(error).__name__}: {error}"[:300]}
    row["seconds"] = time.perf_counter() - start
    row["left"] = count_of(model) / before
    after = dict(model.named_parameters(remove_duplicate=False))
    kept: Kept = {}
    for each, old in fresh.named_parameters(remove_duplicate=False):
        found = kept_by_value(old.detach(), after[each].detach()) if each in after else None
        if found is None:
            return {**row, "class": "WRONG", "why": f"{each} holds other values than slices of the original's"}
        kept[each] = found
    if row["left"] == 1.0:
        return {**row, "class": "nothing"}
    try:
        smaller = model.double()
        if [each.shape for each in outputs(smaller, inputs)] != expected:
            return {**row, "class": "cuts outputs"}
        form, row["gap"] = agreement(with_zeros(fresh.double(), kept), smaller, inputs)
    except Exception as error:
        return {**row, "class": "crash", "why": f"the pruned model: {type(error).__name__}: {error}"[:300]}
    row["form"] = form
    return {**row, "class": "right"} if form else {**row, "class": "WRONG", "why": f"differs by {row['gap']:.2g}"}


class TooLongError(Exception):
    pass


@contextlib.contextmanager
def patience(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def coverage(only: str = "*", **_: Any) -> dict[str, Any]:
    """Each model of the zoo, at half of the units of every group and at uneven shares."""
    rows = []
    tools: dict[str, Callable[[str, str], dict[str, Any]]] = {"ours": ours}
    if tp is not None:
        tools["torch-pruning"] = theirs
    for name in fnmatch.filter(zoo.ZOO, only):
        for tool, judge in tools.items():
            for ratio in ("half", "uneven"):
                last = rows[-1] if rows else {}
                if (last.get("model"), last.get("tool")) == (name, tool) and "TooLong" in last.get("why", ""):
                    rows.append({**last, "ratio": ratio})  # it would take as long again
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        with patience(PATIENCE[tool]):
                            row = judge(name, ratio)
                    except Exception as error:  # of the benchmark's model or of the library: it is not right
                        kind = "error" if tool == "ours" else "crash"
                        row = {"class": kind, "why": f"{type(error).__name__}: {error}"[:300]}
                row = {"model": name, "ratio": ratio, "tool": tool, **row}
                rows.append(row)
                if row["class"] != "right":
                    print(f"{tool:14} {ratio:7} {name:34} {row['class']:12} {row.get('why', '')[:150]}", flush=True)
    print_coverage(rows)
    return {"rows": rows}


def print_coverage(rows: Sequence[Mapping[str, Any]]) -> None:
    classes = ("right", "partly", "nothing", "error", "crash", "cuts outputs", "WRONG")
    print(f"\n{'':14} {'ratio':7} {'models':>6}", *(f"{each:>12}" for each in classes), f"{'weights left':>13}")
    for tool in dict.fromkeys(row["tool"] for row in rows):
        for ratio in ("half", "uneven"):
            mine = [row for row in rows if row["tool"] == tool and row["ratio"] == ratio]
            counts = Counter(row["class"] for row in mine)
            left = statistics.median([row["left"] for row in mine if row["class"] == "right"] or [math.nan])
            cells = (f"{counts[each]:12d}" for each in classes)
            print(f"{tool:14} {ratio:7} {len(mine):6d}", *cells, f"{left:13.2f}")
    mine = [row for row in rows if row["tool"] == "ours" and "form" in row]
    flagged = [row for row in mine if row["form"] in ("sums", "centred")]
    exactly = [row for row in flagged if (row.get("without flagged groups") or {}).get("form") == "exact"]
    print(f"\nours: {sum(row['form'] == 'exact' for row in mine)} exact; {len(flagged)} with statistics as sums, where")
    print(
        f"the groups without statistics were compared exactly, too, in {len(exactly)}; the others have no such group."
    )


# --------------------------------------------------------------------------------------------------------------------
# Speed
# --------------------------------------------------------------------------------------------------------------------


def deep_resnet(blocks: int) -> tuple[nn.Module, zoo.Inputs]:
    """The zoo's basic residual network with so many blocks in each of its three stages."""
    torch.manual_seed(0)
    model = zoo.convolutional.ResnetBasic()
    for stage, width in ((model.layer1, 12), (model.layer2, 20), (model.layer3, 36)):
        for _ in range(blocks - len(stage)):
            stage.append(zoo.convolutional.BasicBlock(width, width))
    return model.eval(), torch.randn(2, 3, 16, 16)


def deep_llama(layers: int, **sizes: int) -> tuple[nn.Module, zoo.Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = sizes or {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.arange(16).reshape(2, 8)}


def llama_8b(layers: int) -> tuple[nn.Module, zoo.Inputs]:
    """Llama-3-8B's shapes on the meta device: no weight is in memory."""
    with torch.device("meta"):
        model, inputs = deep_llama(
            layers,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        )
        # transformers looks into a mask that it makes itself, which meta has no values for
        inputs["attention_mask"] = torch.zeros(2, 1, 8, 8)
    return model, inputs


MODELS = {"resnet": (deep_resnet, (2, 4, 8, 16)), "llama": (deep_llama, (6, 12, 24, 48)), "llama-8b": (llama_8b, (32,))}


def couple_ours(model: nn.Module, inputs: zoo.Inputs) -> object:
    return find_coupling(model, inputs)


def couple_ours_once(model: nn.Module, inputs: zoo.Inputs) -> object:
    """In evaluation mode only, as Torch-Pruning does; the default watches training, too."""
    return find_coupling(model, inputs, modes=(False,))


def couple_theirs(model: nn.Module, inputs: zoo.Inputs) -> object:
    return tp.DependencyGraph().build_dependency(model, example_inputs=inputs)


def remove_ours(model: nn.Module, inputs: zoo.Inputs) -> object:
    return shrink(model, inputs, 0.5, target="units", round_to=1, verify=False)


def remove_ours_proved(model: nn.Module, inputs: zoo.Inputs) -> object:
    return shrink(model, inputs, 0.5, target="units", round_to=1)


def remove_theirs(model: nn.Module, inputs: zoo.Inputs) -> object:
    pruner = tp.pruner.MagnitudePruner(
        model,
        inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=ignored_by_readme(model, inputs),
    )
    return pruner.step()


STEPS: dict[str, Callable[[nn.Module, zoo.Inputs], object]] = {
    "couple": couple_ours,
    "couple, one mode": couple_ours_once,
    "couple, torch-pruning": couple_theirs,
    "remove": remove_ours,
    "remove, proved": remove_ours_proved,
    "remove, torch-pruning": remove_theirs,
}


def high_water_mark() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(kind: str, step: str, repeats: int = 5) -> None:
    """One step at all depths in a process of its own; imports, first calls and building the model are not in it."""
    warnings.simplefilter("ignore")
    make, depths = MODELS[kind]
    STEPS[step](*(deep_resnet(2) if kind == "resnet" else deep_llama(1)))
    rows = {depth: {"seconds": [], "growth": []} for depth in depths}
    for _ in range(repeats if len(depths) > 1 else 2):
        for depth in depths:
            model, inputs = make(depth)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            before = high_water_mark()
            start = time.perf_counter()
            try:
                STEPS[step](model, inputs)
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}))
                return
            rows[depth]["seconds"].append(time.perf_counter() - start)
            rows[depth]["growth"].append(high_water_mark() - before)
    print(json.dumps({**rows, "whole": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def speed(**_: Any) -> dict[str, Any]:
    """Seconds and growth of memory of coupling and removal, against depth."""
    rows = []
    print(f"{'model':10} {'step':24} {'depth':>6} {'seconds':>9} {'per layer':>10} {'growth':>9} {'whole':>9}")
    for kind, (_make, depths) in MODELS.items():
        for step in STEPS:
            if (tp is None and "torch-pruning" in step) or (kind == "llama-8b" and not step.startswith("couple")):
                continue
            command = [sys.executable, __file__, "speed", "--child", kind, step]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if lines else {"error": done.stderr[-200:]}
            if "error" in found:
                rows.append({"model": kind, "step": step, **found})
                print(f"{kind:10} {step:24} {found['error'][:90]}", flush=True)
                continue
            for depth in depths:
                runs = found[str(depth)]
                seconds, growth = statistics.median(runs["seconds"]), max(runs["growth"])
                rows.append({"model": kind, "depth": depth, "step": step, "whole": found["whole"], **runs})
                each = f"{1e3 * seconds / depth:7.1f} ms"
                print(f"{kind:10} {step:24} {depth:6d} {seconds:9.3f} {each:>10} {growth / 2**20:5.0f} MiB", end="")
                print(f" {found['whole'] / 2**20:5.0f} MiB", flush=True)
    return {"rows": rows}


# --------------------------------------------------------------------------------------------------------------------
# Methods that take a model to a share of its multiply-adds
# --------------------------------------------------------------------------------------------------------------------

Smaller = Callable[[nn.Module, Tensor, float], nn.Module]  # (model, example, share of multiply-adds that leaves)


def multiply_adds(model: nn.Module, example: Tensor) -> int:
    """As torch's own counter has them, the same for both libraries."""
    # attention as matrix products, which are what the counter knows
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).eval()(example[:1])
    return counter.get_total_flops() // 2


def by_ours(model: nn.Module, example: Tensor, share: float, **options: Any) -> nn.Module:
    return shrink(model, example[:2], share, target="macs", **{"round_to": 1, **options})


def by_theirs(
    model: nn.Module, example: Tensor, share: float, importance: Callable[[], object], **options: Any
) -> nn.Module:
    """The smallest ratio of channels at which the multiply-adds are few enough, by bisection."""

    def at(ratio: float) -> nn.Module:
        smaller = copy.deepcopy(model).eval()
        prune_theirs(smaller, example, ratio, importance, **options)
        return smaller

    goal = (1 - share) * multiply_adds(model, example)
    low, high, found = 0.0, 0.98, None
    for _ in range(9):
        middle = (low + high) / 2
        smaller = at(middle)
        if multiply_adds(smaller, example) > goal:
            low = middle
        else:
            high, found = middle, smaller
    return found if found is not None else at(high)


def prune_theirs(
    model: nn.Module, example: Tensor, ratio: float, importance: Callable[[], object], **options: Any
) -> None:
    heads = {
        linear: module.heads
        for module in model.modules()
        if isinstance(module, Attention)
        for linear in (module.query, module.key, module.value)
    }
    tp.pruner.BasePruner(
        model,
        example[:2],
        importance=importance(),
        pruning_ratio=ratio,
        ignored_layers=[model.head],
        num_heads=heads,
        in_channel_groups={},
        out_channel_groups={},
        channel_groups={},
        **options,
    ).step()


def bytes_of(model: nn.Module) -> int:
    from safetensors.torch import save

    return len(save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))


# --------------------------------------------------------------------------------------------------------------------
# Effect
# --------------------------------------------------------------------------------------------------------------------


def effect(rounds: int = 40, narrow: int = 128, wide: int = 256, **_: Any) -> dict[str, Any]:
    """Parameters, bytes and milliseconds at half of the multiply-adds, beside the dense model."""
    torch.manual_seed(0)
    dense = demo.DigitsNet(narrow, wide).eval()
    example = torch.randn(16, 1, 8, 8)
    models = {"dense": dense}
    for name, options in {"shrink, round_to=1": {"round_to": 1}, "shrink, round_to=16": {"round_to": 16}}.items():
        models[name] = by_ours(copy.deepcopy(dense), example, 0.5, **options)
    if tp is not None:
        group_norm = functools.partial(tp.importance.GroupMagnitudeImportance, p=2)
        for name, options in {"torch-pruning": {}, "torch-pruning, round_to=16": {"round_to": 16}}.items():
            models[name] = by_theirs(dense, example, 0.5, group_norm, **options).eval()
    for model in models.values():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    times: dict[str, dict[int, list[float]]] = {name: {1: [], 16: []} for name in models}
    for number in range(rounds + 3):
        for batch in (1, 16):
            for name, model in models.items():
                start = time.perf_counter()
                for _call in range(5):
                    model(example[:batch])
                if number >= 3:  # the first rounds warm up
                    times[name][batch].append((time.perf_counter() - start) / 5)
    rows = []
    whole = multiply_adds(dense, example)
    print(f"{'':28} {'channels':24} {'weights':>9} {'bytes':>9} {'of macs':>8} {'ideal':>6}", end="")
    print(f" {'ms at 1':>9} {'faster':>20} {'ms at 16':>9} {'faster':>20}")
    for name, model in models.items():
        macs = multiply_adds(model, example)
        widths = [
            model.stem.out_channels,
            *(block.conv1.out_channels for block in model.blocks),
            model.head.in_features,
        ]
        row: dict[str, Any] = {
            "model": name,
            "channels": widths,
            "weights": count_of(model),
            "bytes": bytes_of(model),
            "multiply-adds": macs,
            "ideal": whole / macs,
        }
        cells = []
        for batch in (1, 16):
            ratios = [one / other for one, other in zip(times["dense"][batch], times[name][batch], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row[f"ms at {batch}"] = 1e3 * statistics.median(times[name][batch])
            row[f"faster at {batch}"] = [low, middle, high]
            cells += [f"{row[f'ms at {batch}']:9.3f}", f"{middle:7.2f} ({low:.2f} … {high:.2f})"]
        rows.append(row)
        print(f"{name:28} {widths!s:24} {row['weights']:9d} {row['bytes']:9d} {macs / whole:8.3f}", end="")
        print(f" {row['ideal']:6.2f}", *cells, flush=True)
    return {"rows": rows}


def depth(rounds: int = 25, **_: Any) -> dict[str, Any]:
    """The time of a forward pass without a share of the residual branches, over the dense model's, in turn."""
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).eval()
    blocks = (zoo.convolutional.BasicBlock(64, 64) for _ in range(8))
    resnet = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    tokens = {"input_ids": torch.randint(0, 500, (4, 64)), "use_cache": False}
    rows = []
    print(f"{'':28} {'branches':>9} {'weights left':>13} {'time left':>24} {'proof, s':>9}")
    for name, model, example in (
        ("Llama, 4 layers", llama, tokens),
        ("ResNet, 8 blocks", resnet, torch.randn(4, 3, 32, 32)),
    ):
        for share in (0.25, 0.5):
            smaller = copy.deepcopy(model)
            start = time.perf_counter()
            shrink(smaller, example, branches=share)
            proof = time.perf_counter() - start
            with torch.no_grad():
                times = [[_seconds(each, example) for each in (smaller, model)] for _ in range(rounds + 2)][2:]
            low, middle, high = statistics.quantiles([one / other for one, other in times], n=4)
            left = count_of(smaller) / count_of(model)
            rows.append({"model": name, "share": share, "left": left, "time left": [low, middle, high], "proof": proof})
            print(
                f"{name:28} {share:9.0%} {left:13.2f} {middle:10.2f} ({low:.2f} … {high:.2f}) {proof:9.1f}", flush=True
            )
    return {"rows": rows}


def _seconds(model: nn.Module, example: Any) -> float:
    start = time.perf_counter()
    run(model, example)
    return time.perf_counter() - start


# --------------------------------------------------------------------------------------------------------------------
# Accuracy
# --------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = (
            each(x).view(count, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y: Tensor = self.project(mixed.reshape(count, length, -1))
        return y


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.widen, self.narrow = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return y


class ViT(nn.Module):
    """A vision transformer for 8x8 images, in 16 patches of 2x2."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.layers = nn.Sequential(*(Layer(width, heads, 2 * width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(dim=1))
        return logits


# how each is made, its optimizer, and epochs before pruning
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "digits CNN": (demo.DigitsNet, "sgd", 40),
    "ViT": (ViT, "adam", 60),
}
SHARES = (0.3, 0.5, 0.7, 0.85)
TUNING = 10  # epochs after


def train(
    model: nn.Module,
    data: demo.Digits,
    kind: str,
    epochs: int,
    seed: int,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """One cycle of the learning rate; images moved by up to a pixel; all randomness from the seed."""
    draw = torch.Generator().manual_seed(seed)
    batch = 128 if kind == "sgd" else 32
    steps = len(data.train_images) // batch
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        top = 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=top, momentum=0.9, weight_decay=5e-4, nesterov=True)
    else:
        top = 4e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=top, weight_decay=0.05)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, top, total_steps=max(epochs * steps, 2), pct_start=0.2)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.train_images), generator=draw)
        for rows in order[: steps * batch].reshape(steps, batch):
            moved = torch.randint(-1, 2, (2,), generator=draw).tolist()
            images = torch.roll(data.train_images[rows], moved, (2, 3))
            optimizer.zero_grad()
            functional.cross_entropy(model(images), data.train_labels[rows]).backward()
            before_step()
            optimizer.step()
            cycle.step()
    model.eval()


def right_share(model: nn.Module, data: demo.Digits) -> float:
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).double().mean())


def squared_gradients(model: nn.Module, data: demo.Digits) -> dict[str, dict[str, Tensor]]:
    """Of small batches of the training images: evidence for `criteria.taylor`."""
    model = copy.deepcopy(model)
    batches = list(zip(data.train_images.split(22), data.train_labels.split(22), strict=True))
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() > 1}
    return collect(model, batches, taylor, weights=weights, loss=functional.cross_entropy)


def methods() -> dict[str, Callable[[nn.Module, demo.Digits, float], nn.Module]]:
    """What is compared: the first is ours as it comes, and the goal is about it."""

    def mine(**options: Any) -> Callable[[nn.Module, demo.Digits, float], nn.Module]:
        return lambda model, data, share: by_ours(model, data.train_images, share, **options)

    def other(importance: Callable[[], object], **options: Any) -> Callable[..., nn.Module]:
        return lambda model, data, share: by_theirs(model, data.train_images, share, importance, **options)

    found: dict[str, Callable[[nn.Module, demo.Digits, float], nn.Module]] = {
        "shrink": mine(),
        "shrink, everywhere": mine(allocate=everywhere),
        "shrink, squares": mine(criterion=ln_norm),
        "shrink, squares everywhere": mine(criterion=ln_norm, allocate=everywhere),
        "shrink, taylor": lambda model, data, share: by_ours(
            model, data.train_images, share, criterion=taylor, evidence=squared_gradients(model, data)
        ),
    }
    if tp is not None:
        norm = functools.partial(tp.importance.GroupMagnitudeImportance, p=2)
        first = functools.partial(tp.importance.GroupMagnitudeImportance, p=1, group_reduction="first")
        found |= {
            "tp magnitude (first layer, L1)": other(first),
            "tp group norm": other(norm),
            "tp group norm, global": other(norm, global_pruning=True),
        }
    return found


def regularized(dense: nn.Module, data: demo.Digits, kind: str, share: float, seed: int) -> nn.Module:
    """Torch-Pruning's GroupNormPruner: half of the fine-tuning with its penalty, then pruning, then the other half."""
    model = copy.deepcopy(dense)
    norm = functools.partial(tp.importance.GroupMagnitudeImportance, p=2)
    penalty = tp.pruner.GroupNormPruner(
        model,
        data.train_images[:2],
        importance=norm(),
        ignored_layers=[model.head],
        in_channel_groups={},
        out_channel_groups={},
        channel_groups={},
    )
    train(model, data, kind, TUNING // 2, seed, lambda: penalty.regularize(model))
    model.zero_grad()
    smaller = by_theirs(model, data.train_images, share, norm)
    train(smaller, data, kind, TUNING - TUNING // 2, seed + 1)
    return smaller


def accuracy(seeds: int = 3, only: str = "*", tuning: int = TUNING, **_: Any) -> dict[str, Any]:
    """Accuracy on the test images after the same fine-tuning, at equal multiply-adds."""
    data = demo.load_digits()
    rows: list[dict[str, Any]] = []
    for network in fnmatch.filter(NETWORKS, only):
        make, kind, epochs = NETWORKS[network]
        for seed in range(seeds):
            torch.manual_seed(seed)
            dense = make()
            train(dense, data, kind, epochs, seed)
            whole = multiply_adds(dense, data.train_images)
            base = {"network": network, "seed": seed}
            rows.append({**base, "method": "dense", "share": 0.0, "accuracy": right_share(dense, data), "left": 1.0})
            for share in SHARES:
                for name, make_smaller in methods().items():
                    smaller = make_smaller(copy.deepcopy(dense), data, share)
                    at_once = right_share(smaller.eval(), data)
                    train(smaller, data, kind, tuning, seed)
                    rows.append(_row(base, name, share, smaller, data, whole, at_once))
                if tp is not None:
                    smaller = regularized(dense, data, kind, share, seed)
                    rows.append(_row(base, "tp GroupNormPruner", share, smaller, data, whole, None))
            print_accuracy(rows)
    return {"rows": rows}


def _row(
    base: Mapping[str, Any],
    method: str,
    share: float,
    model: nn.Module,
    data: demo.Digits,
    whole: int,
    at_once: float | None,
) -> dict[str, Any]:
    left = multiply_adds(model, data.train_images) / whole
    found = {"accuracy": right_share(model, data), "at once": at_once, "left": left, "weights": count_of(model)}
    return {**base, "method": method, "share": share, **found}


def print_accuracy(rows: Sequence[Mapping[str, Any]]) -> None:
    for network in dict.fromkeys(row["network"] for row in rows):
        mine = [row for row in rows if row["network"] == network]
        dense = [100 * row["accuracy"] for row in mine if row["method"] == "dense"]
        print(f"\n{network}: dense {statistics.mean(dense):.2f} % (of macs that stay, accuracy, ± standard deviation)")
        print(f"{'':32}", *(f"{f'-{share:.0%}':>20}" for share in SHARES), f"{'mean':>8}")
        for method in dict.fromkeys(row["method"] for row in mine if row["method"] != "dense"):
            cells, means = [], []
            for share in SHARES:
                these = [row for row in mine if row["method"] == method and row["share"] == share]
                values = [100 * row["accuracy"] for row in these]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                left = statistics.mean(row["left"] for row in these)
                means.append(statistics.mean(values))
                cells.append(f"{left:6.3f} {means[-1]:6.2f} ±{spread:4.2f}")
            print(f"{method:32}", *(f"{cell:>20}" for cell in cells), f"{statistics.mean(means):8.2f}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="*", help="a glob over the zoo's names, or over the networks of accuracy")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.child:
        child(*given.child)
        return
    about = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}, Python {platform.python_version()}",
        "torch-pruning": None if tp is None else __import__("importlib.metadata").metadata.version("torch-pruning"),
        "commit": commit(),
    }
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    if tp is None:
        print(MISSING)
    results = COMMANDS[given.what](seeds=given.seeds, only=given.only)
    if given.json:
        given.json.write_text(json.dumps({**about, **results}, indent=1))


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "coverage": coverage,
    "speed": speed,
    "effect": effect,
    "accuracy": accuracy,
    "depth": depth,
}

if __name__ == "__main__":
    main()
