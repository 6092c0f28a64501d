"""`Distillation`: adds the loss against a teacher to a custom training loop.

Law: the teacher is only run, in evaluation mode and without gradients; what the model returns is not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise import Tokens
from secateur.pipeline import Masks
from secateur.recovery.losses import OutputLoss, chosen_for, count_rows, features_of, loss_between, parse
from secateur.recovery.zeros import removed_of
from secateur.support import device_of, in_mode, moved, unwrapped
from secateur.training import Pruner

__all__ = ["Distillation"]


class Distillation:
    """The loss between a model's outputs and its teacher's on the same inputs, and the zeros that stay meanwhile.

    Args:
        teacher: any module that takes what the model takes.
        loss: as for `recover`.
        share: of this loss, in [0, 1]; the rest is the loop's own.

    >>> distillation = Distillation(nn.Linear(2, 2), loss="mse")
    >>> model = nn.Linear(2, 2)
    >>> inputs = torch.randn(3, 2)
    >>> distillation.loss_of(model(inputs), (inputs,), {}).requires_grad
    True
    """

    def __init__(self, teacher: nn.Module, loss: str | OutputLoss | None = None, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, the teacher's part of the loss; got {share!r}.")
        self.teacher, self.loss, self.share = teacher, parse(loss), float(share)
        self.last: tuple[Tensor, int] | None = None

    def loss_of(self, outputs: Any, args: Any, kwargs: Any) -> Tensor:
        """How far the outputs are from the teacher's on the same arguments; without labels, which it needs not."""
        given = {name: value for name, value in kwargs.items() if name not in ("labels", "num_items_in_batch")}
        device = device_of(self.teacher)
        with torch.no_grad(), in_mode(self.teacher, training=False):
            wanted = self.teacher(*moved(tuple(args), device), **moved(given, device))
        if self.loss is None:
            self.loss = chosen_for(wanted)
        mask = Tokens.of(given).own
        found = loss_between(outputs, wanted, given, self.loss, mask)
        rows = 0 if callable(self.loss) else count_rows(features_of(outputs), mask)
        self.last = found, rows
        return found

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within, each run of the model in training mode leaves its loss in ``last``: ``(loss, rows)``."""
        handle = self.attach(model)
        try:
            yield
        finally:
            handle.remove()

    def attach(self, model: nn.Module) -> Any:
        """As `watching`; what is returned is to be removed."""

        def see(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if module.training:
                self.loss_of(outputs, args, kwargs)

        return model.register_forward_hook(see, with_kwargs=True)

    def mixed(self, own: Tensor | None) -> Tensor:
        """The loop's own loss and that of the last run, in their shares; that of the last run is used up.

        Raises:
            ValueError: the model was not run since.
        """
        if self.last is None:
            raise ValueError("the model that was to be watched has not been run: name the module that training runs.")
        (found, _), self.last = self.last, None
        return found if own is None or self.share == 1 else self.share * found + (1 - self.share) * own

    @staticmethod
    def labelled(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
        """How many of the labels that a model of transformers was given its Trainer counts: of the next token's there
        is none for the first. (Trainers that count that one, too, weigh their own loss less, and this one alike.)

        >>> int(Distillation.labelled(nn.Identity(), {"labels": torch.tensor([[1, 2, -100]])}))
        2
        """
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        labels = given.get("shift_labels")
        if labels is None:
            model = unwrapped(model)
            causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
            causal = causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            labels = given["labels"][..., 1:] if causal else given["labels"]
        return torch.as_tensor(labels.ne(-100).sum())

    @staticmethod
    def keeping_zeros(model: nn.Module, optimizer: Any) -> Pruner | None:
        """A `Pruner` that removes nothing and keeps what is removed, as `recover` finds it; None where nothing is."""
        masks: Masks = removed_of(model)
        if not masks:
            return None
        return Pruner(model, optimizer, lambda _step: 0.0, within=masks, include=list(masks), verbose=False)
