"""Each mixture of the zoo: its widths and its experts, right, refused or wrong."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.shrinking.comparison import TOLERANCE, gap, outputs, randomized, sliced
from benchmarks.shrinking.correctness import ours
from benchmarks.support.models import zoo
from secateur import Experts
from secateur.coupling import find_coupling
from secateur.shrinking import shrink

__all__ = ["coverage", "judged_experts", "widths_of"]

_PREFIX = "mixture_"


def coverage(only: str = "*") -> list[dict[str, Any]]:
    """Each mixture of the zoo: which widths leave, whether experts do, and whether what is left is right."""
    names = [name for name in zoo.names("transformers") if fnmatch.fnmatch(name, f"{_PREFIX}{only}")]
    rows = [_row(name) for name in names if name.startswith(_PREFIX)]
    print(f"\n{len(rows)} mixtures. Widths: {_counts(rows, 'widths')}. Experts: {_counts(rows, 'experts')}.")
    return rows


def _row(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name.removeprefix(_PREFIX), **_said(lambda: widths_of(name), "leave")}
    about = _said(lambda: ours(name, "uneven"), "widths")
    row |= {"widths": about["class"], "why not all": about.get("why", ""), "left": about.get("left", 1.0)}
    row |= _said(lambda: judged_experts(name), "experts")
    row["seconds"] = time.perf_counter() - start
    cells = (row["model"], row.get("leave", ""), row["widths"], row.get("experts", ""), row.get("why", "")[:160])
    print("{:24} {:32} {:8} {:22} {}".format(*cells), flush=True)
    return row


def _said(judge: Any, what: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found: dict[str, Any] = judge()
        except Exception as error:  # of the benchmark's model or of the library: it is not right
            return {what: "error", "class": "error", "why": f"{type(error).__name__}: {error}"[:300]}
    return found


def _counts(rows: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(row.get(key) for row in rows).most_common())


def widths_of(name: str) -> dict[str, Any]:
    """Which kinds of units the coupling finds free."""
    model, inputs = zoo.ZOO[name]()
    coupling = find_coupling(model, inputs)
    shapes = {each: parameter.shape for each, parameter in model.named_parameters()}
    embeddings = {f"{path}.weight" for path, each in model.named_modules() if isinstance(each, nn.Embedding)}
    kinds: dict[str, None] = {}
    for group in coupling.groups:
        names = {each for each, _ in group.members}
        if group.chosen:
            kinds["experts"] = None
        elif names & embeddings:
            kinds["model"] = None
        elif any("attn" in each or "attention" in each for each in names):
            kinds["attention"] = None
        elif any(len(shapes.get(each, ())) == 3 or "expert" in each for each in names):
            kinds["inner"] = None
    return {"leave": " ".join(kind for kind in ("model", "attention", "inner", "experts") if kind in kinds)}


def judged_experts(name: str) -> dict[str, Any]:
    """A third of the experts leave, with the configuration where it can say so."""
    model, inputs = zoo.ZOO[name]()
    dense = copy.deepcopy(model)
    uniform = True
    try:
        shrink(model, inputs, leave=Experts(1 / 3), uniform=True)
    except ValueError as error:
        said, uniform = str(error), False
        try:
            shrink(model, inputs, leave=Experts(1 / 3))
        except ValueError as other:
            return {"experts": "refused", "why": " ".join(str(other).split())}
    with torch.no_grad():
        zoo.run(model, inputs)  # as it is, in its own precision
    (plan,) = model.shrink_plans
    kept = {
        each: [torch.as_tensor(cuts.get(at, range(size))) for at, size in enumerate(shape)]
        for each, (shape, cuts) in plan.tensors.items()
    }
    here = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for each, old in (*dense.named_parameters(), *dense.named_buffers()):
        if not torch.equal(here[each], sliced(old, kept[each]) if each in kept else old):
            return {"experts": "WRONG", "why": f"{each} holds other values than the original's"}
    probe, smaller = randomized(dense), copy.deepcopy(model).double()
    theirs = {**dict(probe.named_parameters()), **dict(probe.named_buffers())}
    for each, new in (*smaller.named_parameters(), *smaller.named_buffers()):
        new.data.copy_(sliced(theirs[each], kept[each]) if each in kept else theirs[each])
    with evenly(smaller, kept):
        found = outputs(smaller, inputs)
    worst = math.inf
    for added in (True, False):
        with evenly(probe, kept, gone=True, added=added):
            worst = min(worst, gap(outputs(probe, inputs), found))
    if not worst <= TOLERANCE:
        return {"experts": "WRONG", "why": f"differs by {worst:.2g}"}
    if uniform:
        built = type(model)(type(model.config).from_dict(model.config.to_dict()))
        shapes = {each: parameter.shape for each, parameter in model.named_parameters()}
        if {each: parameter.shape for each, parameter in built.named_parameters()} != shapes:
            return {"experts": "WRONG", "why": "its configuration does not say what it is"}
    return {
        "experts": "right" if uniform else "right, not the config",
        "why": "" if uniform else " ".join(said.split()),
    }


class _Forbids(TorchFunctionMode):
    """The products of routers are minus infinity for the rows that left."""

    def __init__(self, rows: dict[int, tuple[int, Tensor]]) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("linear", "matmul", "mm", "__matmul__") and isinstance(out, Tensor):
            given = [*args, *(kwargs or {}).values()]
            for each in given:
                if isinstance(each, Tensor) and each.data_ptr() in self.rows:
                    size, gone = self.rows[each.data_ptr()]
                    if out.shape[-1] == size:
                        out = out.masked_fill(gone, -math.inf)
        return out


@contextlib.contextmanager
def evenly(
    model: nn.Module, kept: dict[str, list[Tensor]], *, gone: bool = False, added: bool = True
) -> Iterator[None]:
    """Within, experts that are ``gone`` are never chosen; ``added``: nor by what is added to a router's scores."""
    rows: dict[int, tuple[int, Tensor]] = {}
    saved: list[tuple[Tensor, Tensor]] = []
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, indices in kept.items() if gone else ():
        tensor = tensors[name]
        mask = torch.ones(tensor.shape[0], dtype=torch.bool)
        mask[indices[0]] = False
        if tensor.dim() == 2:
            rows[tensor.data_ptr()] = tensor.shape[0], mask
        elif tensor.dim() == 1 and added and tensor.is_floating_point():
            saved.append((tensor, tensor.data))
            tensor.data = tensor.data.masked_fill(mask, -math.inf)
    with _Forbids(rows):
        yield
    for tensor, data in saved:
        tensor.data = data
