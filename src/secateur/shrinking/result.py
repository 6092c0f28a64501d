"""Tables of what left a model or a directory, for `print` and for the command line. The tables of `shrink` on a page:
groups, blocks and experts, what left, and what stays whole and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from secateur.coupling import Group
from secateur.report import Cells, Chart, Sheet
from secateur.shrinking.kinds.branches import KEPT
from secateur.support import Part, Rows, bytes_text, percent, printable

if TYPE_CHECKING:
    from secateur.shrinking.directory import CheckpointShrinking
    from secateur.shrinking.kinds.blocks_directory import ShrunkDepth
    from secateur.shrinking.kinds.experts_directory import ShrunkExperts
    from secateur.shrinking.kinds.mixtures import Profile
    from secateur.shrinking.module import Shrunk
    from secateur.shrinking.request import Request

# ---- Tables of what left a model or a directory, for `print` and for the command line.
#
# Law: a table holds text that is fit to be printed; groups that differ only in the numbers of layers share a row.

_ROOM = 60  # characters of a reason, but for the first of several
_SHOWN = 10  # rows of what stays whole, unless all are asked for
_OFF = 0.005  # from what was asked: then it is said what else there is
_NAMED = 6  # mixtures, and experts of one, that no token reached
_LONG = 10_000  # characters of a cell that names many


def shrunk_parts(done: Shrunk, *, verbose: bool = False) -> Iterator[Part]:
    """The printed lines and tables of a `Shrunk`: branches, groups, what stays whole and why, totals."""
    if done.plans[0].modules:
        yield from _branch_parts(done)
    if done.experts:
        alike: dict[tuple[str, int, int], list[str]] = {}
        for name, (size, left) in done.experts.items():
            alike.setdefault((name if verbose else _any_layer(name), size, left), []).append(name)
        counts = [(printable(_counted(names)), f"{size} -> {left}") for (_, size, left), names in alike.items()]
        yield Rows(("~Experts", ">Stay"), [*counts])
        yield from unreached_parts(done.unreached, done.experts, first=done.asked.unreached_first)
        yield from mended_parts(done.mended, done.unmended)
        yield ""
    rows: dict[Any, list[Group]] = {}
    for group in done.scope.groups:
        own, *others = _members(group) if verbose else dict.fromkeys(map(_any_layer, _members(group)))
        kept = int(done.kept[group.name].sum()) if group.name in done.kept else group.size
        rows.setdefault((own, tuple(others), group.size, kept, group.notes), []).append(group)
    shown: list[tuple[str, ...]] = []
    for (_, _, size, kept, notes), groups in rows.items():
        same: dict[str, list[str]] = {}
        for group in groups:
            for each in _members(group)[1:]:
                same.setdefault(each if verbose else _any_layer(each), []).append(each)
        members = [_merged(each) for each in same.values()]
        if len(members) > 3 and not verbose:
            members = [*members[:2], f"{len(members) - 2} more"]
        notes = (*notes, "chosen between") if groups[0].chosen else notes
        said = f" ({', '.join(notes)})" if notes else ""
        units = f"{size} -> {kept}" if kept < size else f"{size}"
        names = _counted([group.name for group in groups])
        shown.append((printable(names), units, printable(", ".join(members), _LONG) + said))
    yield Rows(("~Group", ">Units", "~Leaves with"), shown)
    yield from _whole_parts(done.scope.frozen, verbose=verbose)
    yield ""
    numbers = "{:,}".format
    multiply_adds = ("multiply-adds", *done.multiply_adds, numbers)
    yield _totals(("parameters", *done.parameters, numbers), multiply_adds, ("bytes", *done.nbytes, bytes_text))
    yield _asked_and_got(done.asked, done.got, done.beside)
    yield from in_blocks_parts(done.in_blocks)


def in_blocks_parts(in_blocks: Mapping[str, str]) -> Iterator[str]:
    """A line on each matrix whose evidence took a coarser form."""
    for name, note in in_blocks.items():
        yield printable(f"{name}: {note}", _LONG)


def unreached_parts(
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


def mended_parts(mended: Mapping[str, float], unmended: Mapping[str, str]) -> Iterator[Part]:
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


def checkpoint_parts(done: CheckpointShrinking, *, verbose: bool = False) -> Iterator[Part]:
    """The printed lines and tables of a `CheckpointShrinking`: groups, what stays whole and why, fields, totals."""
    rows: dict[tuple[str, int, int], list[str]] = {}
    for name, (size, kept) in done.counts.items():
        rows.setdefault((name if verbose else _any_layer(name), size, kept), []).append(name)
    counts = [(printable(_counted(names)), f"{size} -> {kept}") for (_, size, kept), names in rows.items()]
    yield Rows(("~Group", ">Units"), [*counts])
    yield from _whole_parts(done.frozen, verbose=verbose)
    yield ""
    fields = [
        (printable(name), "not set" if before is None else str(before), str(after))
        for name, (before, after) in done.fields.items()
    ]
    yield Rows(("config.json", ">before", ">after"), [*fields])
    yield ""
    yield _totals(("parameters", *done.parameters, "{:,}".format), ("bytes", *done.nbytes, bytes_text))
    yield _asked_and_got(done.asked, done.got, done.beside)
    if done.tokens is not None:
        yield f"Chosen by what {done.tokens:,} tokens show.{_repaired(done.errors)}"
        widest = max((size for size, _ in done.counts.values()), default=0)
        if done.tokens < widest:  # there are as many unknowns as tokens, so that they can be fitted nearly exactly
            yield f"That is less than the {widest:,} units of a group: other text will lose more. Give a longer one."
    yield from in_blocks_parts(done.in_blocks)


def depth_parts(done: ShrunkDepth) -> Iterator[Part]:
    """The printed lines and tables of a `ShrunkDepth`: blocks that left, repaired weights, fields, totals."""
    rows = [(printable(name), f"{before} -> {after}") for name, (before, after) in done.counts.items()]
    yield Rows(("~Stack", ">Blocks"), [*rows])
    yield f"Gone: {printable(', '.join(done.gone), _LONG)}."
    for name, why in list(done.stayed.items())[:_SHOWN]:
        yield f"{printable(name)} stays: {printable(why, 300)}."
    if done.patched:
        yield _made_up_for(done.patched)
    yield ""
    fields = [(printable(name), str(before), str(after)) for name, (before, after) in done.fields.items()]
    yield Rows(
        ("config.json", ">before", ">after"), [(name, before[:_ROOM], after[:_ROOM]) for name, before, after in fields]
    )
    yield ""
    yield _totals(("parameters", *done.parameters, "{:,}".format), ("bytes", *done.nbytes, bytes_text))
    yield f"The outputs lose {done.lost:.3g} on the calibration, before what follows is patched."
    yield f"{proof_words(done)}."


def proof_words(done: CheckpointShrinking | ShrunkDepth | ShrunkExperts) -> str:
    """The model on which the removal was proved, as the beginning of a sentence."""
    return done.proof[0].upper() + done.proof[1:] if done.proof.startswith("not") else f"Proved {done.proof}"


def _asked_and_got(asked: Request, got: float, beside: tuple[float, float]) -> str:
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


def _totals(*rows: tuple[str, int, int, Callable[[int], str]]) -> Rows:
    shown = [
        (what, show(before), show(after), percent(after / before if before else None))
        for what, before, after, show in rows
    ]
    return Rows(("Total", ">before", ">after", ">left"), [*shown])


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


def _branch_parts(done: Shrunk) -> Iterator[Part]:
    left = [branch for branch in done.branches if done.plans[0].takes(branch)]
    others = [", ".join(path for path in branch.modules if path != branch.name) for branch in left]
    yield Rows(
        ("~Branch", "~Leaves with", ">Parameters"),
        [
            (printable(branch.name), printable(other, _LONG), f"{branch.entries:,}")
            for branch, other in zip(left, others, strict=True)
        ],
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
    """As many of several reasons as a line has room for; --verbose shows all.

    >>> _first_of("cumsum; an input of the model; softmax along it; one of it is taken by its number; not reached")
    'cumsum; an input of the model; softmax along it; 2 more'
    """
    first, *others = reason.split("; ")
    while others and len(first) + len(others[0]) < _ROOM:
        first = f"{first}; {others.pop(0)}"
    return f"{first}; {len(others)} more" if others else first


def _whole_parts(frozen: Mapping[tuple[str, int], str], *, verbose: bool) -> Iterator[Part]:
    if not frozen:
        return
    yield ""
    if verbose:
        every = [(printable(f"{name}[{at}]"), printable(reason, 1000)) for (name, at), reason in frozen.items()]
        yield Rows(("~Stays whole", "~because"), [*every])
        return
    by_reason: dict[str, list[str]] = {}
    for (name, at), reason in frozen.items():
        by_reason.setdefault(reason, []).append(f"{name}[{at}]")
    shown = [
        (printable(names[0]), f"{len(names):,}", printable(_first_of(reason)))
        for reason, names in list(by_reason.items())[:_SHOWN]
    ]
    yield Rows(("~Stays whole, such as", ">Dimensions", "~because"), [*shown])
    if len(by_reason) > _SHOWN:
        more = len(by_reason) - _SHOWN
        yield f"and for {more} more reason{'s' * (more > 1)}: --verbose shows all."


def experts_parts(done: ShrunkExperts) -> Iterator[Part]:
    """The printed lines and tables of a `ShrunkExperts`: experts that left, their statistics, and the losses."""
    if done.counts:
        alike: dict[tuple[str, int, int], list[str]] = {}
        for name, (size, left) in done.counts.items():
            alike.setdefault((_any_layer(name), size, left), []).append(name)
        counts = [(printable(_counted(names)), f"{size} -> {left}") for (_, size, left), names in alike.items()]
        yield Rows(("~Experts", ">Stay"), counts)
    profile = done.profile
    if profile is not None:
        sizes = {name: (len(each.tokens), 0) for name, each in profile.routed.items()}
        yield from unreached_parts(done.unreached, sizes, first=done.unreached_first)
        yield _text_line(profile)
    else:
        yield f"Ranked by {done.rank}, without data."
    yield from mended_parts(done.mended, done.unmended)
    if profile is not None:
        yield from _lost_parts(profile)
    yield ""
    numbers = "{:,}".format
    yield _totals(("parameters", *done.parameters, numbers), ("bytes", *done.nbytes, bytes_text))


def profile_parts(profile: Profile) -> Iterator[Part]:
    """What data says of the experts of each mixture, and what it costs to leave some out."""
    yield _text_line(profile)
    rows = []
    for name, routed in profile.routed.items():
        met = sorted((int(each) for each in routed.tokens), reverse=True)
        unreached = sum(not each for each in met)
        rows.append((printable(name), f"{len(met):,}", f"{met[0]:,}", f"{met[-1]:,}", f"{unreached:,}"))
    yield Rows(("~Mixture", ">Experts", ">Tokens of the busiest", ">Of the idlest", ">Never reached"), rows)
    yield from _lost_parts(profile)


def _text_line(profile: Profile) -> str:
    text = profile.text
    held = f", {text.held_out:,} held out" if text.held_out else ""
    return f"Ranked by {profile.rank} on {text.tokens:,} tokens of {printable(text.data)}{held}."


def _lost_parts(profile: Profile) -> Iterator[Part]:
    if profile.beyond:
        yield ""
        yield "What the model's outputs lose when all mixtures lose a share: divergence from the dense ones, a token."
        shares = [(percent(share), f"{each.lost / max(1, each.tokens):.3g}") for share, each in profile.beyond.items()]
        yield Rows((">Experts gone", ">Model output"), shares)


# ---- The tables of `shrink` on a page: groups, blocks and experts, what left, and what stays whole and why.
#
# Law: what leaves and what stays is named as the library names it.


def model_sheets(done: Shrunk) -> list[Sheet]:
    """The sheets of a `Shrunk`: the groups, and the dimensions that stay whole."""
    counts = {
        group.name: (group.size, int(done.kept[group.name].sum()) if group.name in done.kept else group.size)
        for group in done.scope.groups
    }
    members = [", ".join(f"{name}[{at}]" for name, at in group.members) for group in done.scope.groups]
    return [_groups(counts, members), *_whole(done.scope.frozen)]


def blocks_sheets(done: ShrunkDepth) -> list[Sheet]:
    """The sheets of a `ShrunkDepth`: the blocks that left, in the order of the choice, and the repaired weights."""
    gone = [printable(name, 1000) for name in done.gone]
    sheets = [Sheet("Block by block", [Cells("block", gone), Cells("order of leaving", list(range(1, len(gone) + 1)))])]
    if done.patched:
        names, shares = [printable(name, 1000) for name in done.patched], list(done.patched.values())
        cells = [Cells("tensor", names), Cells("makes up for", shares, [percent(share) for share in shares], shares)]
        sheets.append(Sheet("What took over", cells))
    return sheets


def directory_sheets(done: CheckpointShrinking) -> list[Sheet]:
    """The sheets of a `CheckpointShrinking`: the groups that lost units, and the dimensions that stay whole."""
    errors = [_errors(done.errors)] if done.errors else []
    return [*([_groups(done.counts)] if done.counts else []), *errors, *_whole(done.frozen)]


def _groups(counts: Mapping[str, tuple[int, int]], members: list[str] | None = None) -> Sheet:
    names = [printable(name, 1000) for name in counts]
    shares = [kept / size if size else None for size, kept in counts.values()]
    cells = [
        Cells("group", names),
        Cells("units", [size for size, _ in counts.values()], [f"{size:,}" for size, _ in counts.values()]),
        Cells("left", [kept for _, kept in counts.values()], [f"{kept:,}" for _, kept in counts.values()]),
        Cells("share left", shares, [percent(share) for share in shares], shares),
        *([Cells("its members", [printable(each, 10_000) for each in members])] if members else []),
    ]
    told = "The share of its units that each group keeps; a line joins groups that differ in numbers alone."
    return Sheet(
        "Group by group", cells, [Chart("What is left of each group", told, names, shares, "left", share=True)]
    )


def _errors(errors: Mapping[str, float]) -> Sheet:
    """What repaired matrices lost: a row each."""
    names, lost = [printable(name, 1000) for name in errors], list(errors.values())
    told = "The squared error of each repaired weight's outputs, as a share of the variance of what they are added to."
    share = max(lost, default=0) <= 1  # more than all is lost where a repair went wrong
    chart = Chart("Errors of repaired weights", told, names, lost, "lost" if share else "share lost", share=share)
    cells = [Cells("weight", names), Cells("lost", lost, [f"{each:.3%}" for each in lost])]
    return Sheet("What was repaired", cells, [chart])


def _whole(frozen: Mapping[tuple[str, int], str]) -> list[Sheet]:
    if not frozen:
        return []
    cells = [
        Cells("dimension", [printable(f"{name}[{at}]", 1000) for name, at in frozen]),
        Cells("stays whole, because", [printable(why, 1000) for why in frozen.values()]),
    ]
    return [Sheet("What stays whole", cells)]


def experts_sheets(done: ShrunkExperts) -> list[Sheet]:
    """The experts' statistics and the mixtures' losses, with the experts that stay."""
    return [] if done.profile is None else profile_sheets(done.profile, done.kept)


def profile_sheets(profile: Profile, stay: Mapping[str, Sequence[int]]) -> list[Sheet]:
    """A row an expert, with what data says of it; and what the model loses."""
    mixtures = {name: at for at, name in enumerate(profile.routed)}
    names, numbers, tokens, reap, stays = [], [], [], [], []
    for name, routed in profile.routed.items():
        scores = routed.scores("reap")
        kept = stay.get(name)
        for at in range(len(scores)):
            names.append(name)
            numbers.append(at)
            tokens.append(int(routed.tokens[at]))
            reap.append(float(scores[at]))
            stays.append("yes" if kept is None or at in kept else "no")
    cells = [
        Cells("router", [printable(name, 1000) for name in names]),
        Cells("expert", numbers),
        Cells("tokens", tokens, [f"{each:,}" for each in tokens]),
        Cells("weight x norm", reap, [f"{each:.4g}" for each in reap]),
        Cells("stays", stays),
    ]
    told = (
        "The mean over an expert's tokens of the norm of its outputs times the weight that the router gives them: each "
        "mixture is a column of points, a point an expert."
    )
    chart = Chart(
        "What experts add",
        told,
        [f"{name}: {at}" for name, at in zip(names, numbers, strict=True)],
        reap,
        "weight x norm",
        series=["stays" if each == "yes" else "leaves" for each in stays],
        places=[mixtures[name] for name in names],
        along="the mixtures, first to last",
        joined=False,
        grid=[(f"expert {at}", mixtures[name]) for name, at in zip(names, numbers, strict=True)],
    )
    sheets = [Sheet("Expert by expert", cells, [chart])]
    return [*sheets, *_lost_sheets(profile)]


def _lost_sheets(profile: Profile) -> Iterator[Sheet]:
    """What the model loses without experts."""
    if not profile.beyond:
        return
    shares = list(profile.beyond)
    lost = [each.lost / max(1, each.tokens) for each in profile.beyond.values()]
    cells = [
        Cells("experts gone", shares, [percent(share) for share in shares]),
        Cells("model output", lost, [f"{each:.3g}" for each in lost]),
    ]
    told = "The divergence of the model's outputs from the dense ones, a token of held-out text, against what leaves."
    gone = [100 * share for share in shares]
    chart = Chart("What the model loses", told, [percent(each) for each in shares], lost, "divergence",
                  series=["all mixtures"] * len(lost), places=gone, along="experts gone (%)")  # fmt: skip
    yield Sheet("What the model loses", cells, [chart])
