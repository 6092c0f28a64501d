"""What was learnt of the experts of a directory, in a file: what they give, and what mixtures lose without some.

Law: sums of several texts add up; a file that says something else is refused, with its name and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secateur.checkpoints import CheckpointError
from secateur.report import Reported, Sheet
from secateur.shrinking.mixtures import Beyond, Curve
from secateur.shrinking.routing import RANKS, Routed
from secateur.support import Fields, Part, printable, write_whole

__all__ = ["Profile", "Text", "profile_in", "profile_values", "read_profile", "write_profile"]

_FORMAT = "secateur experts profile"
_MOST = 1e300


@dataclass(frozen=True)
class Text:
    """What was run: its name, its digest, tokens that ranked experts, and tokens that were held out."""

    data: str
    sha256: str
    tokens: int
    held_out: int


@dataclass(frozen=True, eq=False)
class Profile(Reported):
    """Of each mixture, by the name of its router, what data says.

    Attributes:
        texts: those that were run.
        rank: by what experts left where it was measured what that costs.
        routed: of the experts.
        curves: what the outputs lost, on tokens that ranked nothing.
        beyond: of a share of the experts of all mixtures, what the model's outputs lost on these tokens without them.
        source: the SHA-256 of the weights' files and ``config.json`` of the directory that was run.
    """

    texts: tuple[Text, ...]
    rank: str
    routed: Mapping[str, Routed]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    beyond: Mapping[float, Beyond] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict, repr=False)

    def _parts(self) -> Iterator[Part]:
        from secateur.shrinking.tables import profile_parts

        return profile_parts(self)

    def _sheets(self) -> list[Sheet]:
        from secateur.shrinking.sheets import profile_sheets

        return profile_sheets(self, {})

    def check_source(self, there: Mapping[str, str], path: Path) -> None:
        """Raises CheckpointError if what was run is not the directory with these files."""
        if other := sorted(name for name in {*self.source, *there} if self.source.get(name) != there.get(name)):
            raise CheckpointError(
                f"{path}: is of another model: {printable(', '.join(other[:3]), 200)} of the directory that was run "
                "differs. Name its profile, or another file for a new one."
            )

    def check_adds_up(self, sizes: Mapping[str, int], rank: str, path: Path) -> None:
        """Raises CheckpointError if what is learnt of mixtures of these sizes cannot be added."""
        if {name: len(each.tokens) for name, each in self.routed.items()} != sizes:
            raise CheckpointError(f"{path}: is of other mixtures than this directory has; name another file.")
        if self.rank != rank:
            raise CheckpointError(f"{path}: is of experts ranked by {self.rank}, not by {rank}.")

    def check_new(self, sha256: str, path: Path) -> None:
        """Raises CheckpointError if the text is one of these."""
        for text in self.texts:
            if text.sha256 == sha256:
                raise CheckpointError(f"{path}: holds {text.data} already; a text counts once.")

    def plus(self, other: Profile, path: Path) -> Profile:
        """Both texts."""
        self.check_adds_up({name: len(each.tokens) for name, each in other.routed.items()}, other.rank, path)
        for text in other.texts:
            self.check_new(text.sha256, path)
        curves = {}
        for name in self.curves:
            one, two = self.curves[name], other.curves[name]
            both = one.lost.keys() & two.lost.keys()
            curves[name] = Curve({count: one.lost[count] + two.lost[count] for count in both}, one.whole + two.whole)
        routed = {name: each.plus(other.routed[name]) for name, each in self.routed.items()}
        beyond = {share: each.plus(other.beyond[share]) for share, each in self.beyond.items() if share in other.beyond}
        return Profile((*self.texts, *other.texts), self.rank, routed, curves, beyond, self.source)


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON, complete or not at all."""
    write_whole(path, json.dumps(profile_values(profile), indent=1, allow_nan=False) + "\n")


def profile_values(profile: Profile) -> dict[str, Any]:
    """As JSON."""
    return {
        "format": _FORMAT,
        "version": 1,
        "source": dict(profile.source),
        "rank": profile.rank,
        "texts": [vars(text) for text in profile.texts],
        "outputs": [{"share": share, **_beyond_of(each)} for share, each in profile.beyond.items()],
        "mixtures": {name: _said(routed, profile.curves.get(name)) for name, routed in profile.routed.items()},
    }


def _beyond_of(each: Beyond) -> dict[str, Any]:
    streams = {name: list(both) for name, both in each.streams.items()}
    return {"lost": each.lost, "tokens": each.tokens, "streams": streams}


def _said(routed: Routed, curve: Curve | None) -> dict[str, Any]:
    found: dict[str, Any] = {key: each.tolist() for key, each in vars(routed).items()}
    if curve is not None:
        lost = sorted(curve.lost.items())
        found["without"] = [count for count, _ in lost]
        found["lost"] = [each for _, each in lost]
        found["whole"] = curve.whole
    return found


def read_profile(path: Path) -> Profile:
    """What `write_profile` wrote.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    try:
        read = Fields.read(path, error=CheckpointError, hint=" secateur experts --profile writes one.")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; secateur experts --profile writes one.") from None
    return profile_in(read)


def profile_in(read: Fields) -> Profile:
    """What `profile_values` said; an error of the fields' kind where it is something else."""
    if read.take("format", str) != _FORMAT or read.take("version", int) != 1:
        raise read.wrong("format", f"is not {_FORMAT!r}, version 1")
    texts = tuple(
        Text(
            each.take("data", str),
            each.take("sha256", str),
            each.take("tokens", int, least=0),
            each.take("held_out", int, least=0),
        )
        for each in read.inners("texts")
    )
    routed, curves = {}, {}
    for name, its in read.inners_named("mixtures"):
        sums = [its.each(key, float, least=0, most=_MOST) for key in ("tokens", "weighted", "norms")]
        if len({len(each) for each in sums}) != 1 or not sums[0]:
            raise its.wrong("tokens", "is not of as many experts as weighted and norms")
        routed[name] = Routed(*(np.array(each, dtype=float) for each in sums))
        if "without" in its.values:
            counts, lost = its.each("without", int, least=1), its.each("lost", float, least=0, most=_MOST)
            whole = its.take("whole", float, least=0, most=_MOST)
            if len(counts) != len(lost) or not math.isfinite(whole):
                raise its.wrong("lost", "is not of as many counts as without")
            curves[name] = Curve(dict(zip(counts, lost, strict=True)), whole)
    if curves and curves.keys() != routed.keys():
        raise read.wrong("mixtures", "says of some alone what they lose")
    rank = read.take("rank", str)
    if rank not in RANKS:
        raise read.wrong("rank", f"is none of {', '.join(RANKS)}")
    beyond = dict(map(_beyond_in, read.inners("outputs"))) if "outputs" in read.values else {}
    return Profile(texts, rank, routed, curves, beyond, read.each_named("source", str))


def _beyond_in(read: Fields) -> tuple[float, Beyond]:
    streams = {}
    its = read.inner("streams")
    for name in its.values:
        both = its.each(name, float, least=0, most=_MOST)
        if len(both) != 2:
            raise its.wrong(name, "is not what a stream lost and what it was")
        streams[name] = (both[0], both[1])
    lost, tokens = read.take("lost", float, least=0, most=_MOST), read.take("tokens", int, least=0)
    return read.take("share", float, least=0, most=1), Beyond(lost, tokens, streams)
