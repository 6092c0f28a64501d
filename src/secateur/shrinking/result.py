"""What left a model or a directory, as lines and tables: groups, blocks and experts, and what stays whole and why.

Law: what leaves and what stays is named as the library names it. Where it is printed, groups that differ only in the
numbers of layers share a row; a page, JSON and ``--verbose`` have all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.coupling import Group
from secateur.models import ByText, how_gates_chose
from secateur.shrinking.kinds.branches import KEPT
from secateur.support import Chart, Column, Part, Table, percent, printable, some, totals

if TYPE_CHECKING:
    from secateur.shrinking.directory import CheckpointShrinking
    from secateur.shrinking.gates import Gated
    from secateur.shrinking.kinds.blocks_directory import ShrunkDepth
    from secateur.shrinking.kinds.experts_directory import ShrunkExperts
    from secateur.shrinking.kinds.mixtures import Profile
    from secateur.shrinking.module import Shrunk
    from secateur.shrinking.request import Request

_ROOM = 60  # characters of a reason, but for the first of several
_SHOWN = 10  # rows of what stays whole, unless all are asked for
_OFF = 0.005  # from what was asked: then it is said what else there is
_NAMED = 6  # mixtures, and experts of one, that no token reached
_LONG = 10_000  # characters of a cell that names many


@dataclass(frozen=True, kw_only=True)
class ShrunkDirectory(ByText):
    """What the results of `shrink` of a directory share.

    Attributes:
        out: the directory that was written, if one was.
        counts: ``{name: (before, after)}`` of what lost some: a group's units, a router's experts, a stack's blocks.
        fields: the fields of the configuration that changed, ``{dotted name: (before, after)}``.
        parameters, nbytes: ``(before, after)``, of the tensors in the files.
        proof: on which model it was proved that nothing else changes, in words.
        left_out: files of the source that hold the weights in other forms, and were not copied.
        seconds: wall time.
    """

    out: Path | None
    counts: Mapping[str, tuple[int, int]]
    fields: Mapping[str, tuple[Any, Any]]
    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    proof: str
    left_out: tuple[Path, ...]
    seconds: float


def model_content(done: Shrunk, *, full: bool) -> Iterator[Part]:
    """What a `Shrunk` says: branches, experts, groups, what stays whole and why, totals."""
    if done.asked.branches:
        yield from _branches(done)
    if done.heads:
        yield _counts("heads", done.heads, "Heads", "Stay", full=full)
        yield ""
    if done.outputs:
        yield _counts("outputs", done.outputs, "Outputs", "Stay", full=full)
        if done.compared:
            yield "In one of its modes the model compares them, as a softmax does: now those that stay."
        if done.unread:
            still = ", ".join(f"{printable(name)} = {value}" for name, value in done.unread.items())
            yield f"Not changed, since no forward pass reads it: {still}. Set it if something else does."
        yield ""
    if done.experts:
        yield _counts("experts", done.experts, "Experts", "Stay", full=full)
        yield from unreached_lines(done.unreached, done.experts, first=done.asked.experts.unreached_first)
        yield from _mended(done.mended, done.unmended)
        yield ""
    kept = {
        group.name: int(done.kept[group.name].sum()) if group.name in done.kept else group.size
        for group in done.scope.groups
    }
    yield _with_share(_groups(done.scope.groups, kept, full=full))
    yield from _whole(done.scope.frozen, full=full)
    yield from _rotated(done.rotated)
    yield ""
    yield totals({"parameters": done.parameters, "multiply-adds": done.multiply_adds, "bytes": done.nbytes})
    yield _asked_and_got(done.asked, done.got, done.beside)
    yield from _gates(done.gates, done.lost)
    yield from in_blocks_parts(done.in_blocks)
    yield from done.by_text()
    yield "Proved on random weights that nothing else changed." if done.asked.verify else "Not proved, as asked."


def in_blocks_parts(in_blocks: Mapping[str, str]) -> Iterator[str]:
    """A line on each matrix whose evidence took a coarser form."""
    for name, note in in_blocks.items():
        yield printable(f"{name}: {note}", _LONG)


def _groups(groups: Sequence[Group], kept: Mapping[str, int], *, full: bool) -> Table:
    """A row for each group, or for those that differ in numbers alone, with what leaves together with it."""
    rows: dict[Any, list[Group]] = {}
    for group in groups:
        own, *others = _members(group) if full else dict.fromkeys(map(_any_layer, _members(group)))
        rows.setdefault((own, tuple(others), group.size, kept[group.name], group.notes), []).append(group)

    def members(alike: Sequence[Group]) -> str:
        same: dict[str, list[str]] = {}
        for group in alike:
            for each in _members(group)[1:]:
                same.setdefault(each if full else _any_layer(each), []).append(each)
        found = [_merged(each) for each in same.values()]
        if len(found) > 3 and not full:
            found = [*found[:2], f"{len(found) - 2} more"]
        notes = (*alike[0].notes, "chosen between") if alike[0].chosen else alike[0].notes
        return ", ".join(found) + (f" ({', '.join(notes)})" if notes else "")

    return Table.of(
        "groups",
        rows.values(),
        Column.name("Group", lambda alike: _counted([group.name for group in alike])),
        Column.change("Units", lambda alike: (alike[0].size, kept[alike[0].name])),
        Column.name("Leaves with", members),
        title="Group by group",
    )


def _with_share(groups: Table) -> Table:
    told = "The share of its units that each group keeps; a line joins groups that differ in numbers alone."
    return groups.drawn("units", "What is left of each group", told, label="left")


def _counts(
    name: str, counts: Mapping[str, tuple[int, int]], head: str, units: str, *, full: bool, title: str = ""
) -> Table:
    """How many there were and are, a row for those that differ in numbers alone."""
    alike: dict[tuple[str, int, int], list[str]] = {}
    for each, (size, left) in counts.items():
        alike.setdefault((each if full else _any_layer(each), size, left), []).append(each)
    return Table.of(
        name,
        alike.items(),
        Column.name(head, lambda each: _counted(each[1])),
        Column.change(units, lambda each: each[0][1:]),
        title=title,
    )


def unreached_lines(
    unreached: Mapping[str, Sequence[int]], experts: Mapping[str, tuple[int, int]], *, first: bool
) -> Iterator[Part]:
    """Lines on the experts that no token reached."""
    if unreached:
        count, every = sum(map(len, unreached.values())), sum(size for size, _ in experts.values())
        how = "these leave first, as asked" if first else "the criterion says when these leave"
        yield f"No token of the batches reached {count} of the {every} experts; {how}."
        some = [f"{printable(name)} {_numbers(its)}" for name, its in list(unreached.items())[:_NAMED]]
        more = f"; and of {len(unreached) - _NAMED} more mixtures" if len(unreached) > _NAMED else ""
        yield f"They are: {'; '.join(some)}{more}."


def _numbers(units: Sequence[int]) -> str:
    more = f" and {len(units) - _NAMED} more" if len(units) > _NAMED else ""
    return ", ".join(map(str, units[:_NAMED])) + more


def _mended(mended: Mapping[str, float], unmended: Mapping[str, str]) -> Iterator[Part]:
    """Lines on the repair of the experts that stay."""
    if mended:
        worst = min(mended, key=lambda name: mended[name])
        yield (
            f"Repair: experts that stay recover {percent(sum(mended.values()) / len(mended))} of the squared residual "
            f"behind their mixtures on held-out tokens, on average; {percent(mended[worst])} at {printable(worst)}."
        )
    yield from _left_so("repaired", unmended)


def _left_so(what: str, whole: Mapping[str, str]) -> Iterator[Part]:
    for why in dict.fromkeys(whole.values()):
        names = [name for name, other in whole.items() if other == why]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"Not {what}: {printable(names[0])}{more}: {printable(why)}."


def directory_content(done: CheckpointShrinking, *, full: bool) -> Iterator[Part]:
    """What a `CheckpointShrinking` says: groups, what stays whole and why, fields, totals, and where it is."""
    yield _with_share(_counts("groups", done.counts, "Group", "Units", full=full, title="Group by group"))
    yield from _whole(done.frozen, full=full)
    yield from _rotated(done.rotated)
    yield ""
    yield _fields(done.fields)
    yield ""
    yield totals({"parameters": done.parameters, "bytes": done.nbytes})
    yield _asked_and_got(done.asked, done.got, done.beside)
    if done.tokens is not None:
        yield f"Chosen by what {done.tokens:,} tokens show.{_repaired(done.errors)}"
        widest = max((size for size, _ in done.counts.values()), default=0)
        if done.tokens < widest:  # there are as many unknowns as tokens, so that they can be fitted nearly exactly
            yield f"That is less than the {widest:,} units of a group: other text will lose more. Give a longer one."
    yield from _gates(done.gates, done.lost)
    yield from in_blocks_parts(done.in_blocks)
    if full and done.errors:
        told = "The squared error of each weight's outputs, as a share of the variance of what they are added to."
        lost = Column.figure("Lost", lambda each: each[1], ".3%")
        share = max(done.errors.values()) <= 1  # more than all is lost where a repair went wrong
        yield Table.of("repaired", done.errors.items(), Column.name("Weight"), lost, title="What was repaired").drawn(
            "lost", "Errors of repaired weights", told, label="lost" if share else "share lost", share=share
        )
    yield ""
    yield from _written(done)


def _written(done: ShrunkDirectory) -> Iterator[Part]:
    """What texts reached, on what it was proved, what was left out, and where it is."""
    yield from done.by_text()
    yield f"{done.proof[0].upper()}{done.proof[1:]}." if done.proof.startswith("not") else f"Proved {done.proof}."
    if done.left_out:
        yield f"Left out, as they hold the weights in other forms: {some(done.left_out)}."
    if done.out is None:
        yield f"Nothing was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."


def _fields(fields: Mapping[str, tuple[Any, Any]]) -> Table:
    """The fields of the configuration that changed."""

    def shown(value: Any) -> str:
        return f"{len(value)} entries" if isinstance(value, list) and len(str(value)) > _ROOM else str(value)[:_ROOM]

    def rows(name: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
        both = isinstance(before, Mapping) and isinstance(after, Mapping)
        if not both or not any(isinstance(each, list) for each in after.values()):
            return [(name, before, after)]
        pairs = {key: (before.get(key), after.get(key)) for key in {**before, **after}}
        return [(f"{name}.{key}", *pair) for key, pair in pairs.items() if pair[0] != pair[1]]

    return Table.of(
        "fields",
        [row for name, pair in fields.items() for row in rows(name, *pair)],
        Column.name("config.json", key="field"),
        Column("before", show=shown, side="right", none="not set"),
        Column("after", show=shown, side="right", none="not set"),
    )


def _rotated(groups: Sequence[str]) -> Iterator[Part]:
    alike: dict[str, list[str]] = {}
    for name in groups:
        alike.setdefault(_any_layer(name), []).append(name)
    if alike:
        yield ""
        names = ", ".join(map(_counted, alike.values()))
        yield f"Rotated before some left: dimensions of {printable(names, _LONG)}."


def _gates(gates: Mapping[str, Gated], lost: float | None) -> Iterator[Part]:
    return how_gates_chose(gates, lost, "In the first half more and more leaves.")


def blocks_content(done: ShrunkDepth) -> Iterator[Part]:
    """What a `ShrunkDepth` says: blocks that left, repaired weights, fields, totals, and where it is."""
    yield Table.of("stacks", done.counts.items(), Column.name("Stack"), Column.change("Blocks", lambda each: each[1]))
    yield f"Gone: {printable(', '.join(done.gone), _LONG)}."
    for name, why in list(done.stayed.items())[:_SHOWN]:
        yield f"{printable(name)} stays: {printable(why, 300)}."
    if done.patched:
        yield _made_up_for(done.patched)
    yield from _gates(done.gates, None)
    yield ""
    yield _fields(done.fields)
    yield ""
    yield totals({"parameters": done.parameters, "bytes": done.nbytes})
    yield f"The outputs lose {done.lost:.3g} on the calibration, before what follows is patched."
    yield from _written(done)


def patched_tables(shares: Mapping[str, float]) -> Iterator[Table]:
    """A row for each weight that was repaired."""
    if shares:
        recovers = Column.portion("Recovers", lambda each: each[1])
        yield Table.of("patched", shares.items(), Column.name("Tensor"), recovers, title="What took over")


def _asked_and_got(asked: Request, got: float, beside: tuple[float, float]) -> str:
    if asked.sparsity is None and asked.leave:
        return f"Gone, of what leave= names: {percent(got)} of the {asked.target}."
    if asked.sparsity is None:
        return f"Without a sparsity what is zero leaves: {percent(got)} of the {asked.target}."
    said = f"Asked: {percent(asked.sparsity)} of the {asked.target}. Gone: {percent(got)}."
    if beside[0] == beside[1] or abs(got - asked.sparsity) < _OFF:
        return said
    return f"{said} The nearest that exist are {percent(beside[0])} and {percent(beside[1])}."


def _repaired(errors: Mapping[str, float]) -> str:
    if not errors:
        return ""
    worst = max(errors, key=lambda name: errors[name])
    return (
        f" Of {len(errors)} weights, repaired, the outputs lose {sum(errors.values()) / len(errors):.2%} of their "
        f"variance on average, and {errors[worst]:.2%} at most, of {printable(worst)}."
    )


def _members(group: Group) -> list[str]:
    """``name[dimension]`` of all members, the one that gave the group its name first."""
    names = [name for name, _ in group.members]
    # the second group of a name has a number
    own = group.name if group.name in names else group.name.rpartition(":")[0]
    first = names.index(own)
    members = [group.members[first], *group.members[:first], *group.members[first + 1 :]]
    return [f"{name}[{at}]" for name, at in members]


def _any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)


def _counted(names: Sequence[str]) -> str:
    return _merged(names) + (f" (x{len(names)})" if len(names) > 1 else "")


def _merged(names: Sequence[str]) -> str:
    """Names of the same parts as one, with stars for the parts that differ.

    >>> _merged(["layers.0.mlp.2.weight", "layers.1.mlp.2.weight"])
    'layers.*.mlp.2.weight'
    """
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _branches(done: Shrunk) -> Iterator[Part]:
    left = [branch for branch in done.branches if done.plans[0].takes(branch)]
    yield Table.of(
        "branches",
        left,
        Column.name("Branch", lambda branch: branch.name),
        Column.name("Leaves with", lambda branch: ", ".join(path for path in branch.modules if path != branch.name)),
        Column.count("Parameters", lambda branch: branch.entries),
    )
    yield f"{len(left)} of {len(done.branches)} residual branches leave."
    for name, why in list(done.stayed.items())[:_SHOWN]:
        if why != KEPT:
            yield f"{printable(name)} stays: {printable(why, 300)}."
    if done.patched:
        yield _made_up_for(done.patched)
    yield ""


def _made_up_for(patched: Mapping[str, float]) -> str:
    best = sorted(patched.items(), key=lambda each: -each[1])[:_SHOWN]
    said = ", ".join(f"{printable(name)} {percent(share)}" for name, share in best)
    return f"Repair: shares of the squared residual behind them that are recovered: {said}."


def _first_of(reason: str) -> str:
    """As many of several reasons as a line has room for.

    >>> _first_of("cumsum; an input of the model; softmax along it; one of it is taken by its number; not reached")
    'cumsum; an input of the model; softmax along it; 2 more'
    """
    first, *others = reason.split("; ")
    while others and len(first) + len(others[0]) < _ROOM:
        first = f"{first}; {others.pop(0)}"
    return f"{first}; {len(others)} more" if others else first


def _whole(frozen: Mapping[tuple[str, int], str], *, full: bool) -> Iterator[Part]:
    """What stays whole and why."""
    if not frozen:
        return
    yield ""
    if full:
        yield Table.of(
            "whole",
            frozen.items(),
            Column.name("Stays whole", lambda each: "{}[{}]".format(*each[0]), key="dimension"),
            Column.name("because", lambda each: each[1], key="kept_because"),
            title="What stays whole",
        )
        return
    by_reason: dict[str, list[str]] = {}
    for (name, at), reason in frozen.items():
        by_reason.setdefault(reason, []).append(f"{name}[{at}]")
    yield Table.of(
        "whole",
        list(by_reason.items())[:_SHOWN],
        Column.name("Stays whole, such as", lambda each: each[1][0]),
        Column.count("Dimensions", lambda each: len(each[1])),
        Column.name("because", lambda each: _first_of(each[0])),
    )
    if len(by_reason) > _SHOWN:
        more = len(by_reason) - _SHOWN
        yield f"and for {more} more reason{'s' * (more > 1)}; a report and JSON have all."


def experts_content(done: ShrunkExperts, *, full: bool) -> Iterator[Part]:
    """What a `ShrunkExperts` says: experts that left, their statistics, the losses, and where it is."""
    if done.counts:
        yield _counts("experts_left", done.counts, "Experts", "Stay", full=full)
    found = done.profile
    if found is not None:
        sizes = {name: (len(each.tokens), 0) for name, each in found.routed.items()}
        yield from unreached_lines(done.unreached, sizes, first=done.unreached_first)
        yield _text_line(found)
    else:
        yield f"Ranked by {done.rank}, without data."
    yield from _gates(done.gates, done.lost)
    yield from _mended(done.mended, done.unmended)
    if found is not None:
        yield from _lost(found)
    if full and found is not None:
        yield every_expert(found, done.kept)
    yield ""
    yield totals({"parameters": done.parameters, "bytes": done.nbytes})
    yield from _written(done)


def profile_content(found: Profile) -> Iterator[Part]:
    """What data says of the experts of each mixture, and what it costs to leave some out."""
    yield _text_line(found)
    yield Table.of(
        "mixtures",
        [(name, sorted(map(int, each.tokens), reverse=True)) for name, each in found.routed.items()],
        Column.name("Mixture"),
        Column.count("Experts", lambda each: len(each[1])),
        Column.count("Tokens of the busiest", lambda each: each[1][0]),
        Column.count("Of the idlest", lambda each: each[1][-1]),
        Column.count("Never reached", lambda each: each[1].count(0)),
    )
    yield from _lost(found)


def _text_line(profile: Profile) -> str:
    text = profile.text
    held = f", {text.held_out:,} held out" if text.held_out else ""
    return f"Ranked by {profile.rank} on {text.tokens:,} tokens of {printable(text.data)}{held}."


def _lost(found: Profile) -> Iterator[Part]:
    """What the model loses without experts."""
    if not found.beyond:
        return
    told = "The divergence of the model's outputs from the dense ones, a token of held-out text, against what leaves."
    yield ""
    yield "What the model's outputs lose when all mixtures lose a share: divergence from the dense ones, a token."
    yield Table.of(
        "lost",
        [(share, each.lost / max(1, each.tokens)) for share, each in found.beyond.items()],
        Column("Experts gone", None, percent, "right"),
        Column.figure("Model output"),
        title="What the model loses",
    ).drawn(
        "model_output",
        "What the model loses",
        told,
        label="divergence",
        series=["all mixtures"] * len(found.beyond),
        places=[100 * share for share in found.beyond],
        along="experts gone (%)",
    )


def every_expert(found: Profile, stay: Mapping[str, Sequence[int]]) -> Table:
    """A row an expert, with what data says of it and whether it stays."""
    mixtures = {name: at for at, name in enumerate(found.routed)}
    rows = [
        (name, at, int(routed.tokens[at]), float(score), name not in stay or at in stay[name])
        for name, routed in found.routed.items()
        for at, score in enumerate(routed.scores("reap"))
    ]
    table = Table.of(
        "experts",
        rows,
        Column.name("Router"),
        Column.count("Expert"),
        Column.count("Tokens"),
        Column.figure("Weight x norm", None, ".4g"),
        Column("Stays", show=lambda stays: "yes" if stays else "no"),
        title="Expert by expert",
    )
    told = (
        "The mean over an expert's tokens of the norm of its outputs times the weight that the router gives them: each "
        "mixture is a column of points, a point an expert."
    )
    chart = Chart(
        "What experts add",
        told,
        [f"{name}: {at}" for name, at, *_ in rows],
        [score for *_, score, _ in rows],
        "weight x norm",
        series=["stays" if stays else "leaves" for *_, stays in rows],
        places=[mixtures[name] for name, *_ in rows],
        along="the mixtures, first to last",
        joined=False,
        grid=[(f"expert {at}", mixtures[name]) for name, at, *_ in rows],
    )
    return replace(table, charts=[chart])
