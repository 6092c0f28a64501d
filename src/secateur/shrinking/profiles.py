"""What was learnt of the experts of a directory, in a file: what they give, and what the model loses without some.

Law: a file that says something else is refused, with its name and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secateur.checkpoints import CheckpointError
from secateur.report import Reported, Sheet
from secateur.shrinking.mixtures import Beyond
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
        text: that was run.
        rank: by what experts left where it was measured what that costs.
        routed: of the experts.
        beyond: of a share of the experts of all mixtures, what the model's outputs lost without them, on tokens that
            ranked nothing.
        source: the SHA-256 of the weights' files and ``config.json`` of the directory that was run.
    """

    text: Text
    rank: str
    routed: Mapping[str, Routed]
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
        "text": vars(profile.text),
        "outputs": [{"share": share, **vars(each)} for share, each in profile.beyond.items()],
        "mixtures": {
            name: {key: each.tolist() for key, each in vars(routed).items()} for name, routed in profile.routed.items()
        },
    }


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
    its = read.inner("text")
    text = Text(
        its.take("data", str),
        its.take("sha256", str),
        its.take("tokens", int, least=0),
        its.take("held_out", int, least=0),
    )
    routed = {}
    for name, its in read.inners_named("mixtures"):
        sums = [its.each(key, float, least=0, most=_MOST) for key in ("tokens", "weighted")]
        if len({len(each) for each in sums}) != 1 or not sums[0]:
            raise its.wrong("tokens", "is not of as many experts as weighted")
        routed[name] = Routed(*(np.array(each, dtype=float) for each in sums))
    rank = read.take("rank", str)
    if rank not in RANKS:
        raise read.wrong("rank", f"is none of {', '.join(RANKS)}")
    beyond = dict(map(_beyond_in, read.inners("outputs"))) if "outputs" in read.values else {}
    return Profile(text, rank, routed, beyond, read.each_named("source", str))


def _beyond_in(read: Fields) -> tuple[float, Beyond]:
    lost, tokens = read.take("lost", float, least=0, most=_MOST), read.take("tokens", int, least=0)
    return read.take("share", float, least=0, most=1), Beyond(lost, tokens)
