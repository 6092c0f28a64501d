"""Each model of the zoo, shrunken: right, wrong, or left whole."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import math
import random
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.shrinking import peers
from benchmarks.shrinking.comparison import Kept, agreement, randomized, sliced, with_zeros
from benchmarks.shrinking.sizes import count_of
from benchmarks.support.models import zoo
from secateur.coupling import find_coupling
from secateur.shrinking import shrink

PATIENCE = {"ours": 60, "torch-pruning": 10}  # seconds for one model; most take less than one


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
        shrink(model, inputs, share, target="units", round_to=1, exclude=keep or None, **options)
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

    units = [group for group in coupling.groups if not group.chosen]  # those leave when they are asked for
    stayed = [group.name for group in units if not _was_cut(coupling, group, kept)]
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


def _was_cut(coupling: Any, group: Any, kept: Kept) -> bool:
    name, at = group.members[0]
    units = coupling.indices(group, name, at)[kept[name][at].numpy()]
    return len(set(units[units >= 0].tolist())) < group.size


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
    if peers.tp is not None:
        tools["torch-pruning"] = peers.theirs
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
