"""The distance of a model from the dense one: by its outputs on real inputs, or by a custom score.

Law: the loss is 0 for the dense model, and more is worse, whatever the score is; the model is left as it is.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens, divergence
from secateur.shrinking import check_finite, running
from secateur.support import Forward, device_of, moved, name_of, run_batch, share_of, tensors_in, unwrapped

__all__ = [
    "BY_ROW",
    "COMPARISONS",
    "ROWS",
    "SCORES",
    "Score",
    "Scorer",
    "check_word",
    "compared",
    "known_by",
    "lost_at",
    "real_tensors",
    "scored",
    "scorer",
    "share_left",
    "word_for",
]

ROWS = 1024  # tokens, or examples, that outputs are compared on
SCORES = ("kl", "cosine", "change")
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
