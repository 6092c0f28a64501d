"""Pruning in Lightning: a callback that makes a Pruner when training starts; its state travels in the checkpoints.

Law: checkpoints have no other weights than the module's own, and a run resumed from one is the run that was not
stopped.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl

from secateur.training import Pruner

__all__ = ["Pruning"]


class Pruning(pl.Callback):
    """``Trainer(callbacks=[Pruning(0.9)])``; the arguments are those of `Pruner`, without the model's.

    The length of the run comes from ``trainer.estimated_stepping_batches``. ``sparsity`` and ``sparsity_churn`` are
    logged every epoch. After training, ``callback.pruner.masks``.

    Args:
        schedule: a sparsity or a schedule.
        options: further arguments of `Pruner`.
    """

    def __init__(self, schedule: Any = None, **options: Any) -> None:
        self.schedule, self.options = schedule, options
        self.pruner: Pruner | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(include=str(self.options.get("include")))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        length: dict[str, Any] = {}
        if not math.isinf(steps):
            length["total_steps"] = int(steps)
            if trainer.max_epochs and trainer.max_epochs > 0:
                length["steps_per_epoch"] = steps / trainer.max_epochs
        options = {"verbose": trainer.is_global_zero, **length, **self.options}
        self.pruner = Pruner(pl_module, trainer.optimizers, self.schedule, **options)
        if self._loaded is not None:
            self.pruner.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.pruner is not None
        metrics = self.pruner.metrics()
        pl_module.log_dict({"sparsity": metrics["sparsity"], "sparsity_churn": metrics["churn"]})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.pruner is not None:
            self.pruner.finish()

    def state_dict(self) -> dict[str, Any]:
        if self.pruner is not None:
            return self.pruner.state_dict()
        return self._loaded or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None
