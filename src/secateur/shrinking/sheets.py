"""The tables of `shrink` on a page: groups, blocks and experts, what left, and what stays whole and why.

Law: what leaves and what stays is named as the library names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from secateur.report import Cells, Chart, Sheet
from secateur.support import percent, printable

if TYPE_CHECKING:
    from secateur.shrinking.depth_directory import ShrunkDepth
    from secateur.shrinking.directory import CheckpointShrinking
    from secateur.shrinking.expert_directory import ShrunkExperts
    from secateur.shrinking.module import Shrunk
    from secateur.shrinking.profiles import Profile

__all__ = ["blocks_sheets", "directory_sheets", "experts_sheets", "model_sheets", "profile_sheets"]


def model_sheets(done: Shrunk) -> list[Sheet]:
    """The sheets of a `Shrunk`: the groups, and the dimensions that stay whole."""
    counts = {
        group.name: (group.size, int(done.kept[group.axis].sum()) if group.axis in done.kept else group.size)
        for group in done.coupling.groups
    }
    members = [", ".join(f"{name}[{at}]" for name, at in group.members) for group in done.coupling.groups]
    return [_groups(counts, members), *_whole(done.coupling.frozen)]


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
