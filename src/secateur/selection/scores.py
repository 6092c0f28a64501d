"""Scores that are computed when they are wanted, a tensor at a time.

Law: what is no score of its weight (of another shape, complex, NaN where it is ranked) is refused by the tensor's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.support import is_sharded, laid_out, whole

__all__ = ["LazyScores", "comparable", "named", "nan_error", "part_of", "refuse_nan", "refuse_scores", "removed_lowest"]


class LazyScores(Mapping[str, Tensor]):
    """Scores ``{name: function(weight)}`` that are computed on access and never all held.

    An *elementwise* function (``function.elementwise`` is true, or said here) is also computed piece by piece, so
    that ranking a model takes no memory of the model's size. A function that draws random numbers gives the same
    scores at every access: the state of torch's generator at the first one is kept.

    Args:
        weights: ``{name: Tensor}``, any shapes and dtypes; may itself be lazy, such as a checkpoint on disk.
        function: called with a weight, returns scores of the same shape.
        elementwise: whether each score depends on its own weight alone. ``None`` asks the function's attribute.
        evidence: ``{name: {keyword: Tensor}}``, passed on to the function.
        among: ``{name: mask}`` of an earlier pruning: what it removed has the score -inf.

    >>> scores = LazyScores({"weight": torch.tensor([3.0, -5.0])}, torch.abs)
    >>> scores["weight"]
    tensor([3., 5.])
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        function: Callable[..., Tensor],
        *,
        elementwise: bool | None = None,
        evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
        among: Mapping[str, Tensor] | None = None,
    ) -> None:
        innermost: Any = function
        while isinstance(innermost, functools.partial):
            innermost = innermost.func
        self.weights = weights
        self.function = function
        self.evidence = evidence
        self.among = among
        said = bool(getattr(innermost, "elementwise", False)) if elementwise is None else elementwise
        self.elementwise = said and evidence is None
        self._in_shards = said
        self.on_arrays = self.elementwise and bool(getattr(innermost, "on_arrays", False))
        self._generator_states: dict[str, Tensor] = {}

    def only(self, names: Iterable[str]) -> LazyScores:
        """The same scores, of some of the tensors."""
        part = LazyScores(
            part_of(self.weights, names),
            self.function,
            evidence=self.evidence,
            among=self.among,
        )
        part.elementwise, part.on_arrays = self.elementwise, self.on_arrays
        part._generator_states, part._in_shards = self._generator_states, self._in_shards
        return part

    def shape(self, name: str) -> torch.Size:
        """The shape of one weight; asks the container's ``shapes`` first, so that nothing is read from disk."""
        shapes: Mapping[str, torch.Size] | None = getattr(self.weights, "shapes", None)
        return self.weights[name].shape if shapes is None else torch.Size(shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        scores = self.before_masking(name)
        if self.among is None or name not in self.among:
            return scores
        return removed_lowest(comparable(scores), self.among[name].ne(0))

    def before_masking(self, name: str) -> Tensor:
        """The scores of one tensor, of removed weights too."""
        given = weight = self.weights[name].detach()
        evidence = {} if self.evidence is None else self.evidence.get(name, {})
        if is_sharded(weight) and not self._in_shards:  # sums and orders run over the whole tensor: one at a time
            weight, evidence = whole(weight), {word: whole(value) for word, value in evidence.items()}
        if self.elementwise:
            scores = self.function(weight)
        elif name in self._generator_states:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_states[name])
                scores = self.function(weight, **evidence)
        else:
            self._generator_states[name] = torch.get_rng_state()
            scores = self.function(weight, **evidence)
        refuse_scores(name, scores, weight)
        return laid_out(scores, given) if is_sharded(given) else scores

    def __contains__(self, name: object) -> bool:
        return name in self.weights  # the mapping's own would compute the scores

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def part_of(mapping: Mapping[str, Tensor], names: Iterable[str]) -> Mapping[str, Tensor]:
    """Some of the entries of a mapping; what loads its tensors on access still does.

    >>> part_of({"a": torch.zeros(1), "b": torch.ones(1)}, ["b"])
    {'b': tensor([1.])}
    """
    return {name: mapping[name] for name in names} if isinstance(mapping, dict) else _Part(mapping, tuple(names))


@dataclass(frozen=True)
class _Part(Mapping[str, Tensor]):
    """Some of the entries of a mapping that loads on access."""

    whole: Mapping[str, Tensor]
    names: tuple[str, ...]

    @property
    def shapes(self) -> Any:
        """The container's, if it knows them without reading; see `LazyScores.shape`."""
        return self.whole.shapes  # type: ignore[attr-defined]

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def removed_lowest(scores: Tensor, alive: Tensor) -> Tensor:
    """-inf for what an earlier mask removed, whatever it was, and for nothing else."""
    raised = scores.clamp(min=torch.finfo(scores.dtype).min)  # clamp keeps NaN
    return raised.masked_fill(~alive.to(scores.device), -torch.inf)


def refuse_scores(name: str, scores: Any, weight: Tensor) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"{name}: the criterion returned a {type(scores).__name__}, not a tensor; return one score for each weight."
        )
    if scores.shape != weight.shape:
        raise ValueError(
            f"{name}: the criterion returned scores of shape {tuple(scores.shape)} for a weight of shape "
            f"{tuple(weight.shape)}; return one score for each weight."
        )
    if scores.is_complex():
        raise ValueError(f"{named(name)}complex scores have no order.")


def comparable(scores: Tensor) -> Tensor:
    """float32 or float64 without loss of order: halves widen exactly; integers go to float64."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores
    return scores.float() if scores.dtype.is_floating_point else scores.double()


def refuse_nan(name: str, scores: Tensor) -> None:
    if bool(scores.isnan().any()):
        raise nan_error(name)


def nan_error(name: str) -> ValueError:
    return ValueError(
        f"{named(name)}a score is NaN and can't be ranked; find where the weights or the evidence became NaN."
    )


def named(name: str) -> str:
    """Where it happened; a table has no name, and whoever made it says."""
    return f"{name}: " if name else ""
