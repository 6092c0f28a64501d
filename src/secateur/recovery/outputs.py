"""Training of the whole model on the teacher's outputs: a step over a batch follows from its number alone.

Law: the teacher is only run; the batches of a list come in an order that follows from the seed and the round, so that a
run that was stopped after any step goes on as if it had not been. Numbers are narrow within the two runs alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens, naming_batch
from secateur.recovery.descent import Descent, order_of
from secateur.recovery.losses import OutputLoss, chosen_for, count_rows, features_of, loss_between, text_loss
from secateur.recovery.moving import widened_batch
from secateur.recovery.outcome import Judged
from secateur.recovery.sampling import writes_text
from secateur.support import Forward, device_of, mapped, moved, run_batch, track

__all__ = [
    "NO_BATCHES",
    "OnStep",
    "ROUTERS_FIRST",
    "Steps",
    "batches_from",
    "casting",
    "narrower_routers",
    "spread_over",
]

OnStep = Callable[[int, float], None]
NO_BATCHES = "there are no batches: recovery is learned from running both models."
ROUTERS_FIRST = 0.2  # of the steps, where experts have left: the routers alone move
JUDGED = 8  # batches at most, before the first step and after the last one
STEPS_EACH = 32  # for each of them beyond the first: they take a thirtieth of the time


def batches_from(batches: Iterable[Any], seed: int, start: int) -> Iterator[Any]:
    """The batches of steps from ``start`` on, without end: of a sequence each round in an order of its own, else as
    they come."""
    while not isinstance(batches, Sequence):
        count = 0
        for batch in batches:
            count += 1
            yield batch
        if not count:
            raise ValueError(NO_BATCHES)
    if not len(batches):
        raise ValueError(NO_BATCHES)
    round_, at = divmod(start, len(batches))
    while True:
        for number in order_of(seed, round_, len(batches))[at:]:
            yield batches[number]
        round_, at = round_ + 1, 0


def spread_over(batches: Iterable[Any], count: int) -> list[Any]:
    """So many of the batches: of a sequence from its beginning to its end, since it may be in the order of lengths;
    else the first.

    >>> spread_over(range(10), 4), spread_over(iter(range(10)), 4), spread_over(range(3), 4)
    ([0, 2, 5, 7], [0, 1, 2, 3], [0, 1, 2])
    """
    if not isinstance(batches, Sequence) or len(batches) <= count:
        return list(itertools.islice(batches, count))
    return [batches[at * len(batches) // count] for at in range(count)]


def narrower_routers(model: nn.Module, teacher: nn.Module, routers: Iterable[str]) -> list[str]:
    """Of these weights those that choose among fewer experts than the teacher's of the same name."""
    ours, theirs = (dict(each.named_parameters()) for each in (model, teacher))
    return [name for name in routers if name in theirs and theirs[name].shape[0] > ours[name].shape[0]]


def casting(device: torch.device | None, narrow: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to this dtype, or to none, whatever the caller has around it.

    It keeps no cache: a caller's autocast would let it outlive this, and then it holds weights of an earlier step.

    >>> with torch.autocast("cpu", torch.bfloat16), casting(None, None):
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    kind = "cpu" if device is None else device.type
    if narrow is None and not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=narrow, enabled=narrow is not None, cache_enabled=False)


class Steps:
    """The steps by the outputs.

    Args:
        model, teacher: in evaluation mode; the model's trained parameters ask for gradients.
        descent: what moves.
        loss: a word, a function, or None: chosen by the teacher's first outputs.
        forward: how a batch is run.
        first: parameters that alone move in the first steps.
        share: of the loss, that is the teacher's; the rest is the text's own. 0: the teacher is not run.
        narrow: in which both multiply matrices; None: in what their weights are.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        descent: Descent,
        loss: str | OutputLoss | None,
        *,
        forward: Forward | None = None,
        first: Sequence[Tensor] = (),
        share: float = 1.0,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.narrow = narrow
        self.share, self.writes = share, share < 1 and writes_text(model)
        self.model, self.teacher, self.descent, self.loss, self.forward = model, teacher, descent, loss, forward
        self.first = {id(each) for each in first}
        self.alone = round(ROUTERS_FIRST * descent.steps) if self.first else 0
        self.losses: list[float] = []
        self.rows = 0
        self.judging: Sequence[Any] = ()
        self.every: Sequence[Any] = ()  # batches, by whose place a batch is named that does not run
        self.before = math.nan

    @property
    def word(self) -> str:
        """What the loss is called."""
        if not self.share:
            return "the text's own"
        word = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", "loss")
        return word if self.share == 1 else f"{self.share:g} {word} + {1 - self.share:g} the text's own"

    def begin(self, batches: Iterable[Any]) -> None:
        """Chooses what is judged on, and sees how the model does there before the first step."""
        self.judging = spread_over(batches, min(JUDGED, 1 + self.descent.steps // STEPS_EACH))
        if not self.judging:
            raise ValueError(NO_BATCHES)
        self.every = batches if isinstance(batches, Sequence) else ()
        self.before = self._mean_loss()

    def judged(self) -> Judged:
        """How it does there now."""
        return Judged(len(self.judging), self.before, self._mean_loss(), self.word)

    @torch.no_grad()
    def _mean_loss(self) -> float:
        return sum(float(self._lost(batch)[0]) for batch in self.judging) / len(self.judging)

    def run(self, batches: Iterable[Any], seed: int, after: OnStep | None = None) -> None:
        """Takes the steps that are left; ``after`` is called with the number and the loss of each."""
        left = range(self.descent.done, self.descent.steps)
        self.every = batches if isinstance(batches, Sequence) else ()
        source = batches_from(batches, seed, self.descent.done)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        with torch.enable_grad():
            for number in track(left, "recovering"):
                for each in trained:
                    each.requires_grad_(number >= self.alone or id(each) in self.first)
                found, rows = self._lost(next(source))
                self.losses.append(self.descent.step(found))
                del found  # and with it what the model's run has left
                self.rows += rows
                if after is not None:
                    after(self.descent.done, self.losses[-1])

    def _lost(self, batch: Any) -> tuple[Tensor, int]:
        """The loss of one of the batches, and of how many rows."""
        wanted = None
        if self.share:
            where = device_of(self.teacher) or device_of(self.model)  # a teacher in files is nowhere yet
            with (
                torch.no_grad(),
                casting(where, self.narrow),
                naming_batch(self.every, batch, self.forward, "the teacher"),
            ):
                wanted = run_batch(self.teacher, moved(batch, where), self.forward)
        device = device_of(self.model)
        here = moved(mapped(batch, widened_batch) if self._is_widened else batch, device)
        with casting(device, self.narrow), naming_batch(self.every, batch, self.forward):
            outputs = run_batch(self.model, here, self.forward)
        mask = Tokens.of(batch).own
        parts = []
        if self.share:
            if self.loss is None:
                self.loss = chosen_for(wanted)
            parts.append(self.share * loss_between(outputs, wanted, batch, self.loss, mask))
        if self.share < 1:
            parts.append((1 - self.share) * text_loss(outputs, batch, mask, writes=self.writes))
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0], _rows(outputs, mask)

    @property
    def _is_widened(self) -> bool:
        first = next((each for each in self.model.parameters() if each.is_floating_point()), None)
        return first is not None and first.element_size() >= 4


def _rows(outputs: Any, mask: Tensor | None) -> int:
    try:
        return count_rows(features_of(outputs), mask)
    except TypeError:  # what a custom loss understands
        return 0
