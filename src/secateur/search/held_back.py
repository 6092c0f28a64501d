"""What the whole model loses, on batches that levels were not made of.

Law: less is better, and 0 is the dense model's; the model is run and left as it is; a mean, so that the loss on some of
the batches compares with that on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens, divergence
from secateur.shrinking import running
from secateur.support import Forward, device_of, moved, run_batch, tensors_in

__all__ = ["HeldBack", "Score", "split"]

Score = Callable[[nn.Module], float]  # of the model as it is then; higher is better

_QUARTER = 4  # one of so many batches is held back
_NUMBERS = 2**26  # of the dense model's logits that are held


def split(batches: Sequence[Any], held_back: int | None) -> tuple[list[Any], list[Any]]:
    """What levels are made of, and what is held back from them: every fourth batch, or as many as are asked for. Of a
    single batch both are all there is.

    Raises:
        ValueError: no batches, or not as many that one is left for the levels.

    >>> split(range(8), None), split(range(4), 1)
    (([0, 1, 2, 4, 5, 6], [3, 7]), ([0, 1, 2], [3]))
    """
    every = list(batches)
    if not every:
        raise ValueError("there are no batches: what a budget costs the model is learned from running it.")
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
    """How far the outputs are from the dense model's: `secateur.blockwise.divergence`, a mean over tokens or examples.

    Args:
        model: the dense one, which is run once on all batches.
        batches: that are held back. Of logits over many classes only as many tokens as make 64 million numbers are
            compared, evenly over each batch.
        forward: how a batch is run.
        score: what counts instead where all batches are asked for: what the score is less than the dense model's. Some
            batches are compared by their outputs all the same.

    Raises:
        ValueError: the dense model's outputs, or its score, are not finite.
        TypeError: a score is no number.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], forward: Forward | None = None, score: Score | None = None
    ) -> None:
        self.model, self.forward, self.score = model, forward, score
        self.batches = [moved(each, device_of(model)) for each in batches]
        with running(model):
            self._dense = [self._outputs(each) for each in self.batches]
        for at, outputs in enumerate(self._dense):
            if not all(bool(each.isfinite().all()) for each in tensors_in(vars(outputs)) if each.is_floating_point()):
                raise ValueError(f"the dense model's outputs for held-back batch {at} hold NaN or infinity.")
        self.dense_score = None if score is None else self.scored()

    def __call__(self, some: Sequence[int]) -> float:
        """The loss of the model as it is now, on the batches of these numbers."""
        if self.score is not None and len(some) == len(self.batches):
            assert self.dense_score is not None
            return self.dense_score - self.scored()
        return self._diverged(some)

    def _diverged(self, some: Sequence[int]) -> float:
        total, rows = 0.0, 0
        with running(self.model):
            for at in some:
                more, count = divergence(self._dense[at].held, self._outputs(self.batches[at]).held, self._mask(at))
                total, rows = total + more, rows + count
        return total / rows if rows and not math.isnan(total) else math.inf

    def finished(self) -> tuple[float, float | None]:
        """The divergence on all batches, and the user's score, if there is one."""
        return self._diverged(range(len(self.batches))), None if self.score is None else self.scored()

    def scored(self) -> float:
        """The user's score of the model as it is now."""
        assert self.score is not None
        with running(self.model):
            found = self.score(self.model)
        try:
            number = float(found)
        except (TypeError, ValueError):
            raise TypeError(f"the score is a {type(found).__name__}; return one number, higher is better.") from None
        if not math.isfinite(number):
            if getattr(self, "dense_score", None) is None:
                raise ValueError(f"the dense model's score is {number}; a score is a finite number.")
            return -math.inf
        return number

    def _mask(self, at: int) -> Tensor | None:
        return None if self._dense_is_cut(at) else Tokens.of(self.batches[at]).own

    def _dense_is_cut(self, at: int) -> bool:
        return isinstance(self._dense[at].held, SimpleNamespace)

    def _outputs(self, batch: Any) -> SimpleNamespace:
        """What of the outputs is compared, in ``held``."""
        outputs = run_batch(self.model, batch, self.forward)
        logits = getattr(outputs, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() > 1 and logits.shape[-1] > 1:
            rows = logits.reshape(-1, logits.shape[-1])
            mask = Tokens.of(batch).own
            if mask is not None and mask.shape == logits.shape[:-1]:
                rows = rows[mask.reshape(-1).to(rows.device)]
            most = max(1, _NUMBERS // (rows.shape[-1] * max(1, len(self.batches))))
            if len(rows) > most:
                rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).round().long()]
            return SimpleNamespace(held=SimpleNamespace(logits=rows.detach().clone()))
        plain = dict(outputs) if isinstance(outputs, Mapping) else outputs
        return SimpleNamespace(held=[each.detach().clone() for each in tensors_in(plain)])
