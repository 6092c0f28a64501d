"""The loss of the whole model on held-back batches, which levels were not made of.

Law: less is better, and 0 is the dense model's; the model is run and left as it is; a mean, so that the loss on some of
the batches compares with that on others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens
from secateur.search.scoring import (
    BY_ROW,
    COMPARISONS,
    Score,
    check_word,
    compared,
    lost_at,
    real_tensors,
    scored,
    word_for,
)
from secateur.shrinking import check_finite, running
from secateur.support import Forward, device_of, moved, run_batch, unwrapped

__all__ = ["HeldBack", "split"]

_QUARTER = 4  # one of so many batches is held back
_NUMBERS = 2**26  # of the dense model's logits that are held


def split(batches: Sequence[Any], held_back: int | None) -> tuple[list[Any], list[Any]]:
    """Splits batches into those that levels are made of and those held back: every fourth, or ``held_back`` of them. A
    single batch is used for both.

    Raises:
        ValueError: no batches, or not as many that one is left for the levels.

    >>> split(range(8), None), split(range(4), 1)
    (([0, 1, 2, 4, 5, 6], [3, 7]), ([0, 1, 2], [3]))
    """
    every = list(batches)
    if not every:
        raise ValueError("there are no batches: pass at least one, since the loss is measured by running the model.")
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
