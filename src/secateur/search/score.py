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

from secateur.models import Tokens, check_finite, divergence, parts_of
from secateur.shrinking import running
from secateur.support import (
    Forward,
    check_data,
    device_of,
    mapped,
    moved,
    name_of,
    run_batch,
    share_of,
    tensors_in,
    unwrapped,
)

# ---- The distance of a model from the dense one: by its outputs on real inputs, or by a custom score.
#
# Law: the loss is 0 for the dense model, and more is worse, whatever the score is; the model is left as it is.

ROWS = 1024  # tokens, or examples, that outputs are compared on
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


@dataclass(frozen=True, eq=False)
class Scorer:
    """Measures the loss of a model against the dense one, by its outputs or by a custom score.

    Attributes:
        name: "kl", the Kullback-Leibler divergence of its outputs from the dense model's, taken as logits, a mean over
            tokens; "cosine", 1 less the mean cosine of its embeddings, of tokens their mean; "change", half of the
            squared change of its outputs over their variance; or the name of a function.
        measure: ``model -> lost``.
        dense: the dense model's own score, where it is a function's.
        rows: tokens or examples that it is measured on; 0 for a function's.
        share: of the batches' entries.
        function: the key of the function, see `known_by`; "" without a function, None for one that has no key.
    """

    name: str
    measure: Callable[[nn.Module], float]
    dense: float = 0.0
    rows: int = 0
    share: float = 0.0
    function: str | None = ""

    def __call__(self, model: nn.Module) -> float:
        """The loss of the model; infinite where it is NaN."""
        lost = float(self.measure(model))
        return lost if lost == lost else float("inf")


def scorer(
    model: nn.Module,
    batches: Sequence[Any],
    score: Score | None = None,
    *,
    forward: Forward | None = None,
    rows: int = ROWS,
) -> Scorer:
    """A `Scorer` that measures how far a model is from this dense one.

    Args:
        model: it is run on the first batches, as many as make so many rows of outputs.
        batches: what a DataLoader yields.
        score: "kl", "cosine" or "change"; or ``model -> float``, higher = better, of which less than the dense model's
            is lost. By default "kl" where outputs have logits, "cosine" where they have a last hidden state (of BERT
            and the like), else "change".
        forward: ``(model, batch) -> outputs``.
        rows: how many tokens or examples to compare, at least; the last batch is cut where it can be.

    Raises:
        ValueError: no such word, or outputs or a score that is not finite.

    >>> model = nn.Linear(2, 3)
    >>> kl = scorer(model, [torch.randn(8, 2)], "kl")
    >>> kl(model), kl.rows
    (0.0, 8)
    >>> _ = model.weight.data.mul_(2)
    >>> kl(model) > 0
    True
    """
    if callable(score):
        own, told = scored(score, model), score
        if not math.isfinite(own):
            raise ValueError(f"{name_of(score)} is {own} of the dense model; a score is a finite number.")
        return Scorer(name_of(score), lambda other: own - scored(told, other), own, function=known_by(score))
    if score is not None:
        check_word(score)
    held: list[tuple[Any, Any, Tensor | None]] = []
    count, share, word = 0, 0.0, score
    inner = unwrapped(model)
    sizes = [_entries(batch) for batch in batches]
    with running(inner):
        for batch, size in zip(batches, sizes, strict=True):
            batch = moved(batch, device_of(inner))
            outputs = run_batch(inner, batch, forward)
            word = word or word_for(outputs)
            its = _rows_of(outputs)
            if its > rows - count and (less := share_of(batch, (rows - count) / its)) is not batch:
                size *= _entries(less) / max(1, _entries(batch))
                batch, outputs = less, run_batch(inner, less, forward)
                its = _rows_of(outputs)
            if not all(bool(each.isfinite().all()) for each in real_tensors(outputs)):
                check_finite(inner)
                raise ValueError("the dense model's outputs hold NaN or infinity; look at the batches.")
            held.append((batch, compared(outputs, word), Tokens.of(batch).own))
            count, share = count + its, share + size
            if count >= rows:
                break
    compare = COMPARISONS[word or "change"]

    def measure(other: nn.Module) -> float:
        other, total, seen = unwrapped(other), 0.0, 0
        with running(other):
            for batch, dense, mask in held:
                more, its = compare(dense, compared(run_batch(other, batch, forward), word), mask)
                total, seen = total + more, seen + its
        return total / seen if seen and not total < 0 else 0.0  # no number stays none

    return Scorer(word or "change", measure, 0.0, count, share / (sum(sizes) or 1.0))


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


def word_for(outputs: Any) -> Literal["kl", "cosine", "change"]:
    """How outputs are compared by default."""
    if isinstance(getattr(outputs, "logits", None), Tensor):
        return "kl"
    return "cosine" if isinstance(getattr(outputs, "last_hidden_state", None), Tensor) else "change"


def compared(outputs: Any, word: str | None) -> Any:
    """What is compared of the outputs."""
    named = {"kl": "logits", "cosine": "last_hidden_state"}.get(word or "")
    found = getattr(outputs, named, None) if named else None
    if isinstance(found, Tensor):
        return found
    if word in ("kl", "cosine"):
        return next(real_tensors(outputs))
    return list(real_tensors(outputs))


def real_tensors(outputs: Any) -> Iterator[Tensor]:
    """Those that hold numbers and no ids."""
    plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return (each for each in tensors_in(plain) if each.is_floating_point())


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


def _rows_of(outputs: Any) -> int:
    """Tokens of its outputs, or examples."""
    return max((each[..., 0].numel() if each.dim() > 1 else each.numel() for each in real_tensors(outputs)), default=0)


def _by_kl(dense: Tensor, found: Tensor, mask: Tensor | None) -> tuple[float, int]:
    rows = _rows_by_kl(dense, found, mask)
    return float(rows.sum()), len(rows)


def _rows_by_kl(dense: Tensor, found: Tensor, mask: Tensor | None) -> Tensor:
    p, q = (_rows(each, mask).float().log_softmax(-1) for each in (dense, found))
    lost: Tensor = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
    return lost


def _by_cosine(dense: Tensor, found: Tensor, mask: Tensor | None) -> tuple[float, int]:
    rows = _rows_by_cosine(dense, found, mask)
    return float(rows.sum()), len(rows)


def _rows_by_cosine(dense: Tensor, found: Tensor, mask: Tensor | None) -> Tensor:
    one, other = _pooled(dense, mask).double(), _pooled(found, mask).double()
    norms = (one.norm(dim=-1) * other.norm(dim=-1)).clamp_min(1e-30)
    lost: Tensor = 1 - (one * other).sum(-1) / norms
    return lost


def _rows_by_change(dense: Any, found: Any, mask: Tensor | None) -> Tensor:
    """Of each row its share; of outputs that have no rows in common the mean."""
    total, count = divergence(dense, found, mask)
    pairs = [
        [_rows(each if each.dim() > 1 else each[:, None], mask).double() for each in pair]
        for pair in zip(dense, found, strict=True)
    ]
    if any(len(before) != count for before, _ in pairs):
        return torch.full((count,), total / count, dtype=torch.float64)
    rows = torch.zeros(count, dtype=torch.float64)
    for before, after in pairs:
        varied = float((before - before.mean(0)).square().sum()) or float(before.square().sum()) or 1.0
        rows += (count * (after - before).square().sum(-1) / varied / 2).cpu()
    return rows


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of an example's tokens, padding left out."""
    if states.dim() < 3:
        return states.reshape(-1, states.shape[-1])
    if mask is None or mask.shape != states.shape[:2]:
        return states.flatten(1, -2).mean(1)
    weights = mask.to(states).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def _rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    if mask is None or tensor.shape[:-1] != mask.shape:
        return rows
    return rows[mask.reshape(-1).to(rows.device)]


COMPARISONS: dict[str, Callable[[Any, Any, Tensor | None], tuple[float, int]]] = {
    "kl": _by_kl,
    "cosine": _by_cosine,
    "change": divergence,
}


BY_ROW: dict[str, Callable[[Any, Any, Tensor | None], Tensor]] = {
    "kl": _rows_by_kl,
    "cosine": _rows_by_cosine,
    "change": _rows_by_change,
}
"""What each row loses, of which `COMPARISONS` are the sums."""


def _entries(batch: Any) -> float:
    return float(max((each.numel() for each in tensors_in(batch)), default=0))


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
        originals = {name: vars(piece).get("forward") for name, piece in self.pieces.items()}
        handles = [
            self.model.register_forward_pre_hook(lambda _, *given: self._begin(given), with_kwargs=True),
            self.model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        try:
            for name, piece in self.pieces.items():
                piece.forward = self._stand_in(name, piece.forward)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, piece in self.pieces.items():
                if originals[name] is None:
                    vars(piece).pop("forward", None)
                else:
                    vars(piece)["forward"] = originals[name]

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
_NUMBERS = 2**26  # of the dense model's logits that are held


def split(batches: Sequence[Any], held_back: int | None) -> tuple[list[Any], list[Any]]:
    """Splits batches into those that levels are made of and those held back: every fourth, or ``held_back`` of them. A
    single batch is used for both.

    Raises:
        ValueError: no batches, none with a sample, or not as many that one is left for the levels.

    >>> split(range(8), None), split(range(4), 1)
    (([0, 1, 2, 4, 5, 6], [3, 7]), ([0, 1, 2], [3]))
    """
    every = list(batches)
    check_data(every, "since the loss is measured by running the model")
    if len(every) == 1 and held_back is None:
        return every, every
    count = max(1, len(every) // _QUARTER) if held_back is None else held_back
    if not 0 < count < len(every):
        raise ValueError(
            f"held_back is how many of the {len(every)} batches are held back from the levels: at least one, and one "
            f"less than there are, not {held_back}."
        )
    back = {(at + 1) * len(every) // count - 1 for at in range(count)}
    return [each for at, each in enumerate(every) if at not in back], [every[at] for at in sorted(back)]


class HeldBack:
    """The loss on held-back batches: the distance of the outputs from the dense model's, or the drop of a custom score.

    Args:
        model: the dense one, which is run once on all batches.
        batches: that are held back. Of logits over many classes only as many tokens as make 64 million numbers are
            compared, evenly over each batch.
        forward: how a batch is run.
        score: a word of `secateur.search.scorer`; by default what fits the outputs. Or ``model -> float``, higher is
            better: it counts where all batches are asked for, and some of them are compared by their outputs.

    Attributes:
        word: how outputs are compared.
        score: the function, None where there is none.
        dense_score: its value of the dense model.

    Raises:
        ValueError: no such word; the dense model's outputs, or its score, are not finite.
        TypeError: a score is no number.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], forward: Forward | None = None, score: Score | None = None
    ) -> None:
        if isinstance(score, str):
            check_word(score)
        self.model, self.forward = unwrapped(model), forward
        self.score: Callable[[nn.Module], float] | None = score if callable(score) else None
        self.batches = [moved(each, device_of(model)) for each in batches]
        self.word = score if isinstance(score, str) else ""
        with running(self.model):
            self._dense = [self._compared(each) for each in self.batches]
        for at, held in enumerate(self._dense):
            if not all(bool(each.isfinite().all()) for each in real_tensors(held)):
                check_finite(self.model)
                raise ValueError(f"the dense model's outputs for held-back batch {at} hold NaN or infinity.")
        self.dense_score: float | None = None
        if self.score is not None:
            self.dense_score = self.scored()
            if not math.isfinite(self.dense_score):
                raise ValueError(f"the dense model's score is {self.dense_score}; a score is a finite number.")

    def __call__(self, some: Sequence[int]) -> float:
        """The loss of the model as it is now, on the batches of these numbers."""
        if self.dense_score is not None and len(some) == len(self.batches):
            found = self.scored()
            return self.dense_score - found if math.isfinite(found) else math.inf
        return self.by_outputs(some)

    def finished(self) -> tuple[float, float | None]:
        """The distance of the outputs on all batches, and the score, if there is one."""
        return self.by_outputs(range(len(self.batches))), None if self.score is None else self.scored()

    def of(self, model: nn.Module) -> float:
        """The loss of another model, on all batches."""
        with self._instead(model):
            return self(range(len(self.batches)))

    def finished_by(self, model: nn.Module) -> tuple[float, float | None]:
        """What `finished` says, of another model."""
        with self._instead(model):
            return self.finished()

    @contextlib.contextmanager
    def _instead(self, model: nn.Module) -> Iterator[None]:
        mine, self.model = self.model, unwrapped(model)
        try:
            yield
        finally:
            self.model = mine

    def by_row(self, model: nn.Module) -> list[Tensor]:
        """Of each batch what each row of another model's outputs loses, whatever the score is."""
        rows = []
        with self._instead(model), running(self.model):
            for batch, dense in zip(self.batches, self._dense, strict=True):
                rows.append(BY_ROW[self.word](dense, self._compared(batch), self._mask_of(batch)).cpu())
        return rows

    def _mask_of(self, batch: Any) -> Tensor | None:
        return None if self.word == "kl" else Tokens.of(batch).own  # those logits are without padding

    def most(self, keep: float) -> float:
        """The largest loss that keeps this share of the dense model's score, or of its outputs.

        Raises:
            ValueError: the score of the dense model is not above 0.
        """
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

    def by_outputs(self, some: Sequence[int]) -> float:
        """The distance of the outputs, whatever the score is."""
        total, rows = 0.0, 0
        with running(self.model):
            for at in some:
                batch, dense = self.batches[at], self._dense[at]
                more, count = COMPARISONS[self.word](dense, self._compared(batch), self._mask_of(batch))
                total, rows = total + more, rows + count
        return max(0.0, total / rows) if rows and not math.isnan(total) else math.inf

    def _compared(self, batch: Any) -> Any:
        """What of the outputs is compared; of logits some rows."""
        outputs = run_batch(self.model, batch, self.forward)
        self.word = self.word or word_for(outputs)
        found = compared(outputs, self.word)
        if self.word != "kl":
            return found
        rows: Tensor = found.reshape(-1, found.shape[-1])
        mask = Tokens.of(batch).own
        if mask is not None and mask.shape == found.shape[:-1]:
            rows = rows[mask.reshape(-1).to(rows.device)]
        most = max(1, _NUMBERS // (rows.shape[-1] * len(self.batches)))
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).round().long()]
        return rows.clone()  # and the others are let go of
