"""In Lightning: a callback that makes a Pruner when training starts, whose state travels in the checkpoints, and one
that trains towards a teacher.

Law: checkpoints have no other weights than the module's own, and a run resumed from one is the run that was not
stopped.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch

from secateur.recovery import Distillation as Towards
from secateur.training import Pruner


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
        steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        length: dict[str, Any] = {} if math.isinf(steps) else {"total_steps": int(steps)}
        if not math.isinf(batches):  # max_steps may end the run within an epoch
            length["steps_per_epoch"] = math.ceil(batches / trainer.accumulate_grad_batches)
        state = self.state_dict() if self._loaded is None else self._loaded  # its own where fit is called once more
        if trainer.global_step and not state:
            raise ValueError(
                f"the run goes on at step {trainer.global_step}, but the checkpoint has no state of {self.state_key}: "
                "name the callback's include as it was, or load the weights alone and begin a new run."
            )
        options = {"verbose": trainer.is_global_zero, **length, **self.options}
        pruner = Pruner(pl_module, trainer.optimizers, self.schedule, **options)
        if trainer.global_step:  # a state that came with weights to test is none to begin with
            pruner.load_state_dict(state)
        self.pruner, self._loaded = pruner, None

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


class Distillation(pl.Callback):
    """``Trainer(callbacks=[Distillation(teacher, module="model")])``: what ``training_step`` returns becomes the
    distance of the module's outputs to the teacher's, and what is zero in the module stays zero.

    Args:
        teacher: the network that this one came from.
        module: the attribute of the LightningModule that holds the network, which ``training_step`` runs once.
        loss: a word, such as ``"kl"``, or ``(outputs, wanted, batch) -> scalar``, as for `recover`.
        share: how much of the loss is the teacher's, above 0 and at most 1; the rest is the step's own.
    """

    def __init__(self, teacher: torch.nn.Module, module: str = "model", loss: Any = None, share: float = 1.0) -> None:
        self.distillation = Towards(teacher, loss, share)
        self.module = module
        self.pruner: Pruner | None = None
        self._undo: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        network = pl_module.get_submodule(self.module)
        self.distillation.teacher.to(pl_module.device)
        self.pruner = Towards.keeping_zeros(network, trainer.optimizers)
        handle, step = self.distillation.attach(network), pl_module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            found = step(*args, **kwargs)
            own: Any = found["loss"] if isinstance(found, dict) else found
            return self.distillation.mixed(own)

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._undo = [handle.remove, lambda: vars(pl_module).pop("training_step", None)]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._let_go()

    def _let_go(self) -> None:
        for undo in self._undo:
            undo()
        self._undo, self.distillation.last = [], None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._let_go()
        if self.pruner is not None:
            self.pruner.finish()
