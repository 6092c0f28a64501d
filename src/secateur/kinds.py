"""What may leave a model beside units, as ``leave=`` of `secateur.shrink` says: experts, branches, heads, outputs,
blocks.

Law: a kind holds what is its own, so that the verb does not have to; words stand for values where people type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

__all__ = ["Blocks", "Branches", "Experts", "Heads", "Kind", "Outputs", "RANKS", "parse"]

RANKS = ("reap", "frequency", "criterion")


@dataclass(frozen=True)
class Experts:
    """Experts that leave each mixture, never so many that fewer are left than are chosen at a time.

    Attributes:
        remove: the fraction of the experts of each mixture, or how many (1, 2, ...). 0: none, of a directory with a
            ``profile`` alone.
        rank: which leave, those of the least: ``"reap"``, the mean over an expert's tokens of its outputs' norm times
            its weight (REAP, arXiv:2510.13999), the default with data; ``"frequency"``, its tokens; or the score by the
            ``"criterion"``, the default without.
        unreached_first: experts that no token of the batches is sent to leave first. Otherwise they leave when the
            rank says so, since a text may just not have what they are for.
        profile: of a directory, a file for what the batches say, which must not exist. A quarter of the batches ranks
            nothing then, and says what the model's outputs lose without experts.
        plan: of a directory, such a file, in place of batches: nothing is run.
        text: what the profile calls the batches.

    >>> Experts(0.25) == parse("experts:25%")[0]
    True
    """

    remove: float = 0.0
    rank: str | None = None
    unreached_first: bool = False
    profile: Path | str | None = None
    plan: Path | str | None = None
    text: str = "batches"

    def __post_init__(self) -> None:
        _check_amount("experts", self.remove)
        if self.rank not in (None, *RANKS):
            raise ValueError(f"the rank of experts is one of {', '.join(map(repr, RANKS))}, not {self.rank!r}.")


@dataclass(frozen=True)
class Branches:
    """Residual branches of a module, the f of ``x + f(x)``, that leave; one stays at least.

    Those leave whose loss moves the model's outputs least, one after the other, by the batches; without, those of the
    least influence on the examples, which have to be real ones then (`influences` of ``shrinking/kinds/branches.py``).

    Attributes:
        remove: the fraction of the branches, rounded up, or how many (1, 2, ...). Or the names of those that leave.

    >>> Branches(3) == parse("branches:3")[0], Branches(["layers.0.mlp", "layers.1.mlp"]).names
    (True, ('layers.0.mlp', 'layers.1.mlp'))
    """

    remove: float | str | Iterable[str]

    def __post_init__(self) -> None:
        _check_amount("branches", self.share)

    @property
    def share(self) -> float:
        """The fraction or the number; 0 where there are names."""
        return self.remove if isinstance(self.remove, int | float) else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Those that leave, where they are named."""
        if isinstance(self.remove, int | float):
            return ()
        return (self.remove,) if isinstance(self.remove, str) else tuple(dict.fromkeys(self.remove))


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of a directory, as its configuration counts them, that leave; one of each stack stays.

    Which leave is chosen by what the outputs lose on the batches, one after the other, and what they added is merged
    into the last weight before them whose outputs are added to the stream (ReplaceMe, arXiv:2505.02819), or into the
    scales of a layer normalization (LinearPatch, arXiv:2505.24680).

    Attributes:
        remove: the fraction of the blocks, rounded up, or how many (1, 2, ...).

    >>> Blocks(0.1) == parse("blocks:10%")[0]
    True
    """

    remove: float

    def __post_init__(self) -> None:
        _check_amount("blocks", self.remove)


@dataclass(frozen=True)
class Heads:
    """Attention heads of a module that leave by their numbers, as ``prune_heads`` of transformers 4 took them.

    Attributes:
        remove: ``{layer: numbers of heads}``. A layer is the number of a block, counted over the whole model from 0, or
            the name of a module; heads are counted as they are now. One of each layer stays.

    >>> Heads({0: [1, 2], "decoder.layers.3.encoder_attn": [0]}).remove[0]
    [1, 2]
    """

    remove: Mapping[int | str, Sequence[int]]


@dataclass(frozen=True)
class Outputs:
    """Outputs of a head that leave a module, such as classes that nobody asks for; what stays is computed as before.

    Attributes:
        name: the module that gives them, or a glob over several with equally many, such as a head for each scale, or
            several globs. Where each of several gives a single one, they are modules of a class each.
            Left out: those of which a model's configuration counts the labels.
        keep: those that stay: their numbers, in ascending order since they keep their order, or what the model calls
            them. None of them: the module leaves as a whole, where the model runs without it.

    >>> Outputs("classifier", keep=[0, 2]).keep, Outputs(keep=["person", "car"]) == parse("outputs:person,car")[0]
    ((0, 2), True)
    """

    name: str | Sequence[str] = ""
    keep: Sequence[int | str] = ()

    def __post_init__(self) -> None:
        keep = (self.keep,) if isinstance(self.keep, str) else self.keep
        object.__setattr__(self, "keep", tuple(each if isinstance(each, str) else int(each) for each in keep))
        numbers = [each for each in self.keep if isinstance(each, int)]
        if numbers != sorted({*numbers}):
            raise ValueError(f"outputs stay in their order: give keep= in ascending order, once each, not {self.keep}.")
        if not (self.name or self.keep):
            raise ValueError(
                "Outputs takes the labels that stay, keep=, or the name of a module that leaves as a whole."
            )

    @property
    def remove(self) -> bool:
        """Something leaves."""
        return True


Kind = Experts | Branches | Heads | Outputs | Blocks


def parse(leave: Kind | str | Iterable[Kind | str] | None) -> tuple[Kind, ...]:
    """The kinds that leave, one of each: values, or words such as ``"experts:2"`` and ``"branches:25%"``.

    Raises:
        ValueError: a word that says nothing, or a kind twice. TypeError: what is neither a kind nor a word.

    >>> parse(["branches:3", Experts(2)])
    (Branches(remove=3), Experts(remove=2, rank=None, unreached_first=False, profile=None, plan=None, text='batches'))
    >>> parse("experts")
    Traceback (most recent call last):
    ValueError: leave= is a kind and what of it, as in 'experts:25%', 'branches:3' or 'outputs:cat,dog'; got 'experts'.
    """
    given: Iterable[Any] = () if leave is None else (leave,)
    if isinstance(leave, Iterable) and not isinstance(leave, str):
        given = leave
    kinds = tuple(_of_word(each) if isinstance(each, str) else each for each in given)
    for each in kinds:
        if not isinstance(each, Kind):
            names = ", ".join(kind.__name__ for kind in get_args(Kind))
            raise TypeError(f"leave= is a value of {names}, or a word such as 'experts:25%', not {each!r}.")
    if twice := [type(each).__name__ for at, each in enumerate(kinds) if type(each) in map(type, kinds[:at])]:
        raise ValueError(f"leave= names {twice[0]} twice; say once how much of them leaves.")
    return kinds


def _of_word(word: str) -> Kind:
    if word.startswith("heads"):
        raise ValueError(f"heads leave by their numbers: leave=Heads({{0: [1, 4]}}), in Python; got {word!r}.")
    if word.startswith("outputs:") and word != "outputs:":
        return Outputs(keep=word.removeprefix("outputs:").split(","))
    found = re.fullmatch(r"(experts|branches|blocks):(\d+(?:\.\d+)?)(%?)", word.strip())
    if found is None:
        raise ValueError(
            f"leave= is a kind and what of it, as in 'experts:25%', 'branches:3' or 'outputs:cat,dog'; got {word!r}."
        )
    kind, number, percent = found.groups()
    amount = float(number) / 100 if percent else float(number)
    if percent and amount >= 1:
        raise ValueError(f"leave={word!r}: a share is less than 100 %; a number of {kind} is written without the sign.")
    of = int(amount) if amount >= 1 and amount == int(amount) else amount
    return Experts(of) if kind == "experts" else Branches(of) if kind == "branches" else Blocks(of)


def _check_amount(what: str, amount: float) -> None:
    if not (0 <= amount < 1 or (amount >= 1 and amount == int(amount))):
        raise ValueError(f"{what} must be a fraction in [0, 1), or a number of {what}, not {amount}.")
