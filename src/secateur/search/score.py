"""The distance of a model from the dense one: by its outputs on real inputs, or by a custom score. Measures models that
differ from the dense one in a few blocks; outputs of blocks before those are cached. The loss of the whole model on
held-back batches, which levels were not made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.models import DenseOutputs, NamedTexts, parts_of, running
from secateur.support import Forward, check_data, mapped, running_as, tensors_in, unwrapped

# ---- The distance of a model from the dense one: by its outputs on real inputs, or by a custom score.
#
# Law: the loss is 0 for the dense model, and more is worse, whatever the score is; the model is left as it is.

SCORES = ("kl", "cosine", "change")
# ---- Measures models that differ from the dense one in a few blocks; outputs of blocks before those are cached.
#
# Law: what is measured is what a whole run measures. A run that is given other inputs than the dense one was, or
# passes on a cache, is run whole.

_PLAIN = (int, float, str, bytes, type(None))
Score = Literal["kl", "cosine", "change"] | Callable[[nn.Module], float]


def check_word(score: str) -> None:
    """ValueError where no score is called so."""
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, or a function, not {score!r}.")


def scored(score: Callable[[nn.Module], float], model: nn.Module) -> float:
    """The custom score of a model, computed in evaluation mode, without gradients.

    Raises:
        TypeError: it is no number.
    """
    with running(unwrapped(model)):
        found = score(model)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the score is a {type(found).__name__}; return one number, higher is better.") from None


def known_by(score: Callable[..., Any]) -> str | None:
    """A key that identifies a function: SHA-256 of its name, its code and its defaults. None of a lambda, a partial, a
    method, and what is made within another function: what these know is not in their code.

    >>> known_by(lambda model: 0.0) is None, known_by(known_by) == known_by(known_by)
    (True, True)
    """
    name = getattr(score, "__qualname__", "<")
    if not isinstance(score, types.FunctionType) or "<" in name or score.__closure__:
        return None
    given = (score.__defaults__ or (), score.__kwdefaults__ or {})
    if not all(isinstance(each, _PLAIN) for each in (*given[0], *given[1].values())):
        return None
    text = repr((score.__module__, name, *given, _told_by(score.__code__)))
    return hashlib.sha256(text.encode()).hexdigest()


def _told_by(code: types.CodeType) -> tuple[Any, ...]:
    """Of code what it does, and not where it stands; sets have no order."""
    constants = [
        _told_by(each)
        if isinstance(each, types.CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else each
        for each in code.co_consts
    ]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def share_left(lost: float, word: str) -> float:
    """The share of the dense model's quality that is left after such a loss; 1 is all.

    Of "kl" the factor by which the model's probabilities fall, in the geometric mean over what the dense model would
    have said; of "cosine" the mean cosine; of "change" the share of the outputs' variance that is as before.

    >>> share_left(0.0, "kl"), share_left(0.25, "cosine"), share_left(0.25, "change")
    (1.0, 0.75, 0.5)
    """
    if word == "kl":
        return math.exp(-lost)
    return 1 - lost if word == "cosine" else 1 - 2 * lost


def lost_at(share: float, word: str) -> float:
    """The loss at which this share is left: the inverse of `share_left`.

    >>> round(lost_at(0.99, "kl"), 5), round(lost_at(0.99, "cosine"), 5), round(lost_at(0.99, "change"), 5)
    (0.01005, 0.01, 0.005)
    """
    if word == "kl":
        return -math.log(share)
    return 1 - share if word == "cosine" else (1 - share) / 2


_BYTES = 2**31  # of what blocks returned, that is kept
_REPLAYING_PLAIN = (Tensor, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def pieces_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are cached: the blocks, or the modules with tensors of their own and no children."""
    parts = parts_of(model)
    if "" not in parts:
        return parts
    return {
        name: module
        for name, module in model.named_modules()
        if name and not any(module.children()) and any(True for _ in module.parameters())
    }


@dataclass(eq=False)
class _Pass:
    """One forward pass of the dense model: which pieces ran, and what each returned."""

    given: list[Tensor]  # to the model
    names: list[str] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    whole: bool = False  # it has to be run whole


class Replayed:
    """Runs a measure of a model again and again.

    Args:
        model: the dense one, which is measured once to begin with.
        measure: ``() -> T``, which runs the model any number of times, and each time alike.
        limit: bytes of what pieces returned that are kept; passes beyond are run whole.

    Attributes:
        dense: what the measure is of the dense model.
        passes: how much was run since, in runs of the measure; a run of which half of the pieces were remembered is a
            half.
    """

    def __init__(self, model: nn.Module, measure: Callable[[], float], *, limit: int = _BYTES) -> None:
        self.model, self.measure = model, measure
        self.pieces = pieces_of(model)
        self.passes = 0.0
        self._left = limit
        self._known: list[_Pass] = []
        self._changed: Collection[str] | None = None  # None: the dense run, which is remembered
        self._at = -1
        self._place = self._ran = 0
        self._inside = self._trusted = False
        with self._watched():
            self.dense = measure()
        self._calls = sum(len(each.names) for each in self._known)

    def __call__(self, names: Collection[str]) -> float:
        """The measure of the model as it is now, which differs from the dense one in these tensors alone."""
        homes = {self._home_of(name) for name in names}
        self._changed = self.pieces.keys() if None in homes else {each for each in homes if each is not None}
        self._at, self._ran = -1, 0
        try:
            with self._watched():
                found = self.measure()
        finally:
            self._changed = None
        self.passes += self._ran / self._calls if self._calls else 1.0
        return found

    def _home_of(self, name: str) -> str | None:
        parts = name.split(".")
        return next((path for at in range(len(parts), 0, -1) if (path := ".".join(parts[:at])) in self.pieces), None)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        handles = [
            self.model.register_forward_pre_hook(lambda _, *given: self._begin(given), with_kwargs=True),
            self.model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        try:
            with running_as({each: self._stand_in(name, each.forward) for name, each in self.pieces.items()}):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, given: Any) -> None:
        self._at, self._place, self._inside = self._at + 1, 0, True
        tensors = list(tensors_in(given))
        if self._changed is None:
            self._known.append(_Pass([each.clone() for each in tensors], whole=not _is_plain(given)))
            return
        known = self._known[self._at] if self._at < len(self._known) else None
        self._trusted = known is not None and not known.whole and len(known.given) == len(tensors)
        self._trusted = self._trusted and known is not None and all(map(_same, tensors, known.given))

    def _end(self) -> None:
        self._inside = self._trusted = False

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._changed is None:
                return self._remember(name, original, args, kwargs) if self._inside else original(*args, **kwargs)
            known, place = self._known[self._at] if self._trusted else None, self._place
            self._place += 1
            if known is None or name in self._changed or place >= len(known.names) or known.names[place] != name:
                self._trusted = False  # what follows is given something else
                self._ran += 1
                return original(*args, **kwargs)
            return mapped(known.outputs[place], lambda tensor: tensor.clone())  # the model may write to it

        return forward

    def _remember(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        known = self._known[self._at]
        output = original(*args, **kwargs)
        known.names.append(name)
        held = sum(each.nbytes for each in tensors_in(output))
        if known.whole or held > self._left or not (_is_plain((args, kwargs)) and _is_plain(output)):
            known.whole = True
            self._left += sum(each.nbytes for out in known.outputs for each in tensors_in(out))
            known.outputs.clear()
        else:
            self._left -= held
            known.outputs.append(mapped(output, lambda tensor: tensor.detach().clone()))
        return output


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_plain(value: Any) -> bool:
    """Whether it is nothing but tensors and numbers: a cache that a block writes to is none."""
    if isinstance(value, Mapping):
        return type(value).__module__ == "builtins" and all(map(_is_plain, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _REPLAYING_PLAIN)


# ---- The loss of the whole model on held-back batches, which levels were not made of.
#
# Law: less is better, and 0 is the dense model's; the model is run and left as it is; a mean, so that the loss on
# some of the batches compares with that on others.

_QUARTER = 4  # one of so many batches is held back
_NONE = 1e-12  # the loss where all has to stay
_NUMBERS = 2**26  # of the dense model's logits that are held


def split(batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits batches into those that levels are made of and those held back: every fourth, of each text that has a
    name. A single batch is used for both.

    Raises:
        ValueError: no batches, or none with a sample.

    >>> split(range(8)), split(range(2))
    (([0, 1, 2, 4, 5, 6], [3, 7]), ([0], [1]))
    """
    why = "since the loss is measured by running the model"
    if isinstance(batches, NamedTexts):
        check_data([*batches], why)  # there may be no texts
        parts = {name: split(its) for name, its in batches.by_name().items()}
        one, other = (NamedTexts.of({name: its[at] for name, its in parts.items()}) for at in (0, 1))
        return one, other
    every = list(batches)
    check_data(every, why)
    if len(every) == 1:
        return every, every
    count = max(1, len(every) // _QUARTER)
    back = {(at + 1) * len(every) // count - 1 for at in range(count)}
    return [each for at, each in enumerate(every) if at not in back], [every[at] for at in sorted(back)]


def guarded_of(keep: float | Mapping[str, float] | None, batches: Sequence[Any], score: Score | None) -> Sequence[str]:
    """Of each batch the name of its text; ValueError where shares of texts cannot be kept."""
    names = batches.names if isinstance(batches, NamedTexts) else ()
    if not isinstance(keep, Mapping):
        return names
    if unknown := [name for name in keep if name not in names]:
        known = ", ".join(dict.fromkeys(names)) or "none: give several texts by name"
        raise ValueError(f"keep= names the text {unknown[0]!r}; those of the batches are {known}.")
    if callable(score):
        raise ValueError("keep= of each text is a share of the outputs: a score of your own is one number of all.")
    return names


class ModelLoss(DenseOutputs):
    """The loss of a model against the dense one: the distance of its outputs, or the drop of a custom score.

    Args:
        model: the dense one, which is run once.
        batches: what a DataLoader yields; of which the first are held, as many as make so many ``rows`` of outputs.
        forward: ``(model, batch) -> outputs``.
        score: "kl", the Kullback-Leibler divergence of its outputs from the dense model's, taken as logits, a mean over
            tokens; "cosine", 1 less the mean cosine of its embeddings, of tokens their mean; "change", half of the
            squared change of its outputs over their variance. By default "kl" where logits are all that a model answers
            (no boxes beside them, no picture of them), "cosine" where outputs have a last hidden state (of BERT and the
            like), else "change". Or ``model -> float``, higher is better: it counts where all batches are asked for,
            and some of them are compared by their outputs.
        keep: ``{text: share}``, of texts that have names: the loss is that on the one that is nearest to what it may
            lose, of which all others are scaled to the least.
        rows: how many tokens or examples to compare, at least; the last batch is cut where it can be. None: all batches
            are held, of logits over many classes only as many tokens as make 64 million numbers, evenly over each.

    Attributes:
        word: how outputs are compared.
        score: the function, None where there is none.
        dense_score: its value of the dense model.

    Raises:
        ValueError: no such word; the dense model's outputs, or its score, are not finite; no text is called so.
        TypeError: a score is no number.

    >>> model = nn.Linear(2, 3)
    >>> loss = ModelLoss(model, [torch.randn(8, 2)], score="kl", rows=1000)
    >>> loss(), loss.rows
    (0.0, 8)
    >>> _ = model.weight.data.mul_(2)
    >>> loss() > 0
    True
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        score: Score | None = None,
        *,
        keep: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        if isinstance(score, str):
            check_word(score)
        self.keep, self.names = keep, guarded_of(keep, batches, score)
        word, numbers = score if isinstance(score, str) else "", _NUMBERS if rows is None else None
        called = "held-back batch" if rows is None else "batch"
        super().__init__(model, batches, forward, word=word, rows=rows, numbers=numbers, called=called)
        self.score: Callable[[nn.Module], float] | None = score if callable(score) else None
        self.dense_score: float | None = None
        if self.score is not None:
            self.dense_score = self.scored()
            if not math.isfinite(self.dense_score):
                raise ValueError(f"the dense model's score is {self.dense_score}; a score is a finite number.")

    def __call__(self, some: Sequence[int] | None = None) -> float:
        """The loss of the model as it is now, on the batches of these numbers, or on all."""
        if self.dense_score is not None and (some is None or len(some) == len(self.held)):
            found = self.scored()
            return self.dense_score - found if math.isfinite(found) else math.inf
        return self.now(some)

    def now(
        self,
        some: Sequence[int] | None = None,
        within: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> float:
        """The distance of the outputs; of guarded texts that of the one that is nearest to what it may lose."""
        if self.keep is None:
            return super().now(some, within)
        most = self.most(self.keep)
        lost = self._by_name(some, within).items()
        return max((its * most / max(lost_at(self.keep[name], self.word), _NONE) for name, its in lost), default=0.0)

    def kept(self, model: nn.Module | None = None) -> dict[str, float]:
        """Of each guarded text the share of the dense model's outputs that this model, or another, keeps."""
        with self.instead(self.model if model is None else model):
            return {name: share_left(its, self.word) for name, its in self._by_name().items()}

    @property
    def unguarded(self) -> list[int]:
        """The batches of texts that have no share to be kept, where others have one."""
        return [at for at in range(len(self.held)) if self.keep and self.names[at] not in self.keep]

    def _by_name(
        self,
        some: Sequence[int] | None = None,
        within: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> dict[str, float]:
        """What is lost on each guarded text."""
        numbers: dict[str, list[int]] = {}
        unguarded = {*self.unguarded}
        for number in range(len(self.held)) if some is None else some:
            if self.keep and number not in unguarded:
                numbers.setdefault(self.names[number], []).append(number)
        return {name: DenseOutputs.now(self, its, within) for name, its in numbers.items()}

    def finished(self, model: nn.Module | None = None) -> tuple[float, float | None]:
        """The distance of the outputs of this model, or another, on all batches, and the score, if there is one."""
        with self.instead(self.model if model is None else model):
            return self.now(), None if self.score is None else self.scored()

    def most(self, keep: float | Mapping[str, float]) -> float:
        """The largest loss that keeps this share of the dense model's score, or of its outputs.

        Raises:
            ValueError: the score of the dense model is not above 0.
        """
        if isinstance(keep, Mapping):
            return max(lost_at(max(keep.values()), self.word), _NONE)
        if self.dense_score is None:
            return lost_at(keep, self.word)
        if self.dense_score <= 0:
            raise ValueError(
                f"the dense model's score is {self.dense_score:g}, of which no share can be kept; return one above 0."
            )
        return self.dense_score - keep * self.dense_score

    def lost(self, finished: tuple[float, float | None]) -> float:
        """Of what `finished` says that which `most` is compared with."""
        outputs, score = finished
        return outputs if score is None or self.dense_score is None else self.dense_score - score

    def scored(self) -> float:
        """The custom score of the model as it is now."""
        assert self.score is not None
        return scored(self.score, self.model)
