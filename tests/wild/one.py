"""Tries every verb on one model of a registry; the row is written after each of them."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from secateur import Pruner, oneshot, shrink, sparsify
from secateur.coupling import Scope, find_coupling
from secateur.shrinking import load_shrunken, pruning_target, save_shrunken
from secateur.shrinking.counting import solve_counts
from secateur.shrinking.request import request
from secateur.shrinking.select import groups_in_scope

from .checker import Verdict, disturbed, in_double, judge
from .models import Wild

VERBS = ("sparsify", "pruner", "saved", "oneshot")  # beside `shrink`
LAYOUTS = ("channels_last", "bfloat16", "float16", "meta")  # in which `shrink` is tried, on its own; what is coupled
SHARE, LESS = 0.3, 0.2  # of the parameters; in a layout
STAGED = 5e6  # parameters: a network of one block runs its batches once for each stage, a layer; larger ones have one
_MOST = re.compile(r"at most ([0-9.]+) ?% of the params can leave")
_REASONS = 3  # of what stays whole, that a row says


def tried(wild: Wild, path: Path, verbs: Collection[str]) -> None:
    """Write what the row of a model has of some verbs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {}

    def note(**entries: Any) -> None:
        row.update(entries)
        path.write_text(json.dumps(row))

    torch.manual_seed(0)
    model = disturbed(wild.build()).eval()
    torch.manual_seed(1)
    plain = wild.example()
    example = in_double(plain)
    if not _runs(model, example):  # such as code that makes numbers of float32 itself
        model, example = model.float(), plain
    done = None
    if "shrink" in verbs:
        note(parameters=sum(each.numel() for each in model.parameters()))
        found, done = _shrunk(model, example)
        note(**found)
        note(most=_most(model, example, done))
        less = 0.8 * row["most"] / 100
        if row["status"] == "refused" and less > 0.001:
            again, _ = _shrunk(model, example, less)
            note(less={key: again.get(key) for key in ("status", "message", "got", "whole")})
    elif "saved" in verbs:
        done = shrink(copy.deepcopy(model), example, SHARE, verify=False)  # the row has what the proof found
    others: dict[str, Callable[[], str]] = {
        "sparsify": lambda: _sparsified(model),
        "pruner": lambda: _stepped(model, example),
        "channels_last": lambda: _in_channels_last(model, example),
        "bfloat16": lambda: _in_half(model, example, torch.bfloat16),
        "float16": lambda: _in_half(model, example, torch.float16),
        "meta": lambda: _on_meta(model, example),
    }
    if done is not None:
        others["saved"] = lambda: _saved(wild, done.model, example)
    if wild.images:
        others["oneshot"] = lambda: _oneshot(wild, model)
    for verb in verbs:
        if verb in others:
            note(**{verb: _tried(others[verb])})


def _runs(model: nn.Module, example: Any) -> bool:
    try:
        with torch.no_grad():
            _called(copy.deepcopy(model), example)
    except RuntimeError:
        return False
    return True


def _tried(what: Callable[[], str]) -> str:
    """What it says, or what it raises: "refused: ..." for an error that a user is to read, else "crash: ..."."""
    try:
        return what()
    except Exception as error:
        kind = "refused" if isinstance(error, ValueError) else "crash"
        return f"{kind}: {type(error).__name__}: {str(error)[:300]}{'' if kind == 'refused' else _where(error)}"


def _where(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "secateur" in each.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _shrunk(model: nn.Module, example: Any, share: float = SHARE) -> tuple[dict[str, Any], Any]:
    """Shrinks a copy and has it judged; the seconds are those of the processor, in one thread."""
    smaller = copy.deepcopy(model)
    start = time.process_time()
    try:
        done = shrink(smaller, example, share)
    except Exception as error:
        refused = isinstance(error, ValueError)
        text = str(error) if refused else f"{type(error).__name__}: {error}{_where(error)}"
        row = {"status": "refused" if refused else "crash", "message": text[:500]}
        return row | {"seconds": round(time.process_time() - start, 2), "peak": _peak()}, None
    row = {"seconds": round(time.process_time() - start, 2), "peak": _peak(), "got": round(done.got, 4)}
    verdict = judge(model, done, example)
    lost = sum(1 for mask in done.kept.values() if not mask.all())
    judged = {
        "status": verdict.status, "message": verdict.words, "gap": verdict.gap,
        "groups": [lost, len(done.scope.groups)], "whole": _whole(model, done),
    }  # fmt: skip
    return row | judged, done


def _peak() -> int:
    """Megabytes that the process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _whole(model: nn.Module, done: Any) -> list[str]:
    """The reasons that keep most parameters whole, and an example of each."""
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    weight, first = Counter[str](), dict[str, str]()
    for (name, _), reason in done.scope.frozen.items():
        if reason not in ("an input of the model", "an output of the model"):
            weight[reason] += sizes.get(name, 0)
            first.setdefault(reason, name)
    return [f"{first[reason]}: {reason}" for reason, _ in weight.most_common(_REASONS)]


def _most(model: nn.Module, example: Any, done: Any) -> float:
    """How many percent can leave at most, as the refusal of nearly all says."""
    scope = Scope.of(find_coupling(model, example)) if done is None else done.scope
    asked = request(sparsity=0.9999)
    try:
        solve_counts(pruning_target(model, scope, [example]), groups_in_scope(scope, asked), asked)
    except Exception as error:
        found = _MOST.search(str(error))
        return float(found[1]) if found else 0.0
    return 99.99


def _in_channels_last(model: nn.Module, example: Any) -> str:
    """`shrink` of weights, and on pictures, whose channels lie beside each other; they still do."""
    dims = 5 if any(each.dim() == 5 for each in model.parameters()) else 4
    layout = torch.channels_last if dims == 4 else torch.channels_last_3d
    model = copy.deepcopy(model).to(memory_format=layout)
    example = _each(example, lambda value: value.contiguous(memory_format=layout), of=dims)
    if not _runs(model, example):
        return "none: the model does not run in channels_last"
    done = shrink(copy.deepcopy(model), example, LESS)
    for name, weight in done.model.named_parameters():
        if weight.dim() == dims and not weight.is_contiguous(memory_format=layout):
            return f"wrong: {name} is no longer in channels_last"
    return _said(judge(model, done, example))


def _in_half(model: nn.Module, example: Any, half: torch.dtype) -> str:
    """`shrink` of weights in a half; what is left of them is judged in float64."""
    wide, model = next(model.parameters()).dtype, copy.deepcopy(model).to(half)
    narrow = _each(example, lambda value: value.to(half))
    if not _runs(model, narrow):
        return f"none: the model does not run in {half}"
    done = shrink(copy.deepcopy(model), narrow, LESS)
    before, after = ({name: each.dtype for name, each in of.named_parameters()} for of in (model, done.model))
    if before != after:
        return "wrong: a parameter has another dtype"
    if not _runs(done.model, narrow):
        return f"wrong: it does not run in {half}"
    rounded = any(plan.scales for plan in done.plans)  # what is multiplied is rounded
    smaller = replace(done, model=copy.deepcopy(done.model).to(wide))
    return _said(judge(model.to(wide), smaller, example, torch.finfo(half).eps if rounded else None))


def _on_meta(model: nn.Module, example: Any) -> str:
    """What leaves together in a model without values is what does in one with them, or less."""
    empty, places = copy.deepcopy(model).to("meta"), tree_map(_emptied, example)
    first: dict[int, str] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        if (of := first.setdefault(id(each), name)) != name:  # moving to meta unties
            owner, _, field = name.rpartition(".")
            setattr(empty.get_submodule(owner), field, empty.get_parameter(of))
    if not _runs(empty, places):
        return "none: the model does not run on meta"
    with_values, without = (
        {(each.name, each.size, each.members) for each in find_coupling(*of).groups}
        for of in ((model, example), (empty, places))
    )
    if more := without - with_values:
        return f"wrong: without values {min(more)[0]} may leave, too"
    return "right" if without == with_values else f"less: {len(without)} of {len(with_values)} groups"


def _emptied(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _each(example: Any, change: Callable[[Tensor], Tensor], of: int | None = None) -> Any:
    """The example with its real tensors changed, all or those of so many dimensions."""

    def of_one(value: Any) -> Any:
        is_changed = isinstance(value, Tensor) and value.is_floating_point() and of in (None, value.dim())
        return change(value) if is_changed else value

    return tree_map(of_one, example)


def _said(verdict: Verdict) -> str:
    return verdict.status if verdict.status == "right" else f"{verdict.status}: {verdict.words}"


def _sparsified(model: nn.Module) -> str:
    pruned = copy.deepcopy(model)
    masks = sparsify(pruned, 0.5)
    weights = dict(pruned.named_parameters())
    gone = sum(int((~mask).sum()) for mask in masks.values())
    if any(bool(weights[name][~mask].any()) for name, mask in masks.items()):
        return "wrong: a removed weight is not zero"
    total = sum(mask.numel() for mask in masks.values())
    return "right" if abs(gone - total / 2) < 1 else f"wrong: {gone} of {total} left"


def _stepped(model: nn.Module, example: Any) -> str:
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-6)
    pruner = Pruner(trained, optimizer, lambda step: 0.5, every=1, total_steps=2, verbose=False)
    try:
        loss = _sum(_called(trained, example))
    except Exception:
        trained.eval()
        loss = _sum(_called(trained, example))
    if loss is None or not loss.requires_grad:
        loss = torch.stack([each.sum() for each in trained.parameters()]).sum()
    loss.backward()
    optimizer.step()
    weights = dict(trained.named_parameters())
    masks = pruner.masks
    if not masks or any(bool(weights[name][~mask].any()) for name, mask in masks.items()):
        return "wrong: a removed weight is not zero"
    return "right"


def _oneshot(wild: Wild, model: nn.Module) -> str:
    pruned = copy.deepcopy(model).float()
    stages = None if sum(each.numel() for each in model.parameters()) <= STAGED else False
    examples = [wild.example(), wild.example()]
    several = isinstance(examples[0], tuple) and len(examples[0]) > 1  # of a batch of a loader only the first is input
    forward = (lambda model, batch: model(*batch)) if several else None
    batches = [each if isinstance(each, tuple) else (each,) for each in examples]
    oneshot(pruned, batches, 0.5, solver="sparsegpt", stages=stages, forward=forward)
    return "right" if any(bool((each == 0).any()) for each in pruned.parameters()) else "wrong: nothing is zero"


def _saved(wild: Wild, smaller: nn.Module, example: Any) -> str:
    """Saved in each of three ways and loaded again, it computes the same."""
    expected = _numbers(smaller, example)
    with tempfile.TemporaryDirectory() as directory:
        whole = smaller
        try:
            torch.save(smaller, f"{directory}/whole.pt")
        except Exception:  # such as of parametrized modules, and of hooks that are local functions
            if _is_saved_whole(_dense(wild, smaller), example, directory):
                raise
        else:
            whole = torch.load(f"{directory}/whole.pt", weights_only=False)
        other = copy.deepcopy(smaller)
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        other.load_state_dict(smaller.state_dict(), strict=True)
        save_shrunken(smaller, f"{directory}/shrunken")
        torch.manual_seed(0)
        loaded = load_shrunken(_dense(wild, smaller), f"{directory}/shrunken")
    for what, each in (("torch.save", whole), ("load_state_dict", other), ("load_shrunken", loaded)):
        found = _numbers(each, example)
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            return f"wrong: behind {what} it computes something else"
    return "right"


def _dense(wild: Wild, smaller: nn.Module) -> nn.Module:
    """The model as it was, in the dtype of the smaller one."""
    return wild.build().to(next(smaller.parameters()).dtype).eval()


def _is_saved_whole(dense: nn.Module, example: Any, directory: str) -> bool:
    """Whether ``torch.save`` takes the dense model, once it ran."""
    with torch.no_grad():
        _called(dense, example)
    try:
        torch.save(dense, f"{directory}/dense.pt")
    except Exception:
        return False
    return True


def _numbers(model: nn.Module, example: Any) -> list[Tensor]:
    from .checker import _outputs

    return [each.nan_to_num() for each in _outputs(model, example, contextlib.nullcontext(), training=False)]


def _called(model: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _sum(out: Any) -> Tensor | None:
    from .checker import _flat

    real = [each.sum() for each in _flat(out) if each.is_floating_point() and each.requires_grad]
    return torch.stack(real).sum() if real else None
