"""In transformers' Trainer: a callback that makes a Pruner when training begins and saves it with checkpoints, and one
that trains towards a teacher.

Law: the Trainer's checkpoints gain one file, and a run resumed from one is the run that was not stopped.
"""

from __future__ import annotations

import io
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from secateur.recovery import Distillation
from secateur.support import warn, write_whole
from secateur.training import Pruner

FILE = "pruner.pt"


class PruningCallback(TrainerCallback):
    """``Trainer(..., callbacks=[PruningCallback(0.9)])``; the arguments are those of `Pruner`, without the model's.

    The length of the run and of its epochs come from the Trainer. The state lies as ``pruner.pt`` in each checkpoint
    folder; ``sparsity`` and ``sparsity_churn`` join the Trainer's logs. After training, ``callback.pruner.masks``.

    Args:
        schedule: a sparsity or a schedule.
        resume_from: the checkpoint folder, where it is not ``output_dir/checkpoint-<step>``.
        options: further arguments of `Pruner`.
    """

    def __init__(self, schedule: Any = None, *, resume_from: str | os.PathLike[str] | None = None, **options: Any):
        self.schedule, self.resume_from, self.options = schedule, resume_from, options
        self.pruner: Pruner | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if args.load_best_model_at_end:
            warn("load_best_model_at_end may bring back weights from before they were pruned.")
        told: dict[str, Any] = {"verbose": state.is_world_process_zero, "total_steps": state.max_steps}
        with suppress(TypeError):  # an iterable dataset has no length; the state's number of epochs is rounded up
            told["steps_per_epoch"] = math.ceil(len(given["train_dataloader"]) / args.gradient_accumulation_steps)
        path = Path(self.resume_from or Path(str(args.output_dir)) / f"checkpoint-{state.global_step}") / FILE
        if state.global_step and not path.exists():
            raise FileNotFoundError(
                f"{path}: the run goes on, but its pruning can't; pass resume_from=, its checkpoint."
            )
        pruner = Pruner(given["model"], given["optimizer"], self.schedule, **{**told, **self.options})
        if state.global_step:
            pruner.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.pruner = pruner

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        assert self.pruner is not None
        buffer = io.BytesIO()
        torch.save(self.pruner.state_dict(), buffer)  # on all ranks: a sharded model's masks are gathered
        if state.is_world_process_zero:
            write_whole(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FILE, buffer.getvalue())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.pruner is not None:
            metrics = self.pruner.metrics()
            told = {"sparsity": metrics["sparsity"], "sparsity_churn": metrics["churn"]}
            given["logs"].update(told)
            state.log_history[-1].update(told)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.pruner is not None and not args.load_best_model_at_end:
            self.pruner.finish()


class DistillationCallback(TrainerCallback):
    """``Trainer(..., callbacks=[DistillationCallback(teacher)])``: the Trainer's loss becomes the distance of the
    model's outputs to the teacher's, and what is zero in the model stays zero.

    Labels are needed only where ``share`` leaves something to the model's own loss. Evaluation keeps that.

    Args:
        teacher: the model that this one came from, on any device.
        loss: a word, such as ``"kl"``, or ``(outputs, wanted, batch) -> scalar``, as for `recover`.
        share: how much of the loss is the teacher's, above 0 and at most 1.
    """

    def __init__(self, teacher: torch.nn.Module, loss: Any = None, share: float = 1.0) -> None:
        self.distillation = Distillation(teacher, loss, share)
        self.pruner: Pruner | None = None
        self._hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._let_go()  # of a run that failed, whose end is not told
        self.pruner = Distillation.keeping_zeros(given["model"], given["optimizer"])
        self._hook = given["model"].register_forward_hook(self._with_loss, with_kwargs=True)

    def _with_loss(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        if not model.training:
            return outputs
        found = self.distillation.loss_of(outputs, args, kwargs)
        items = kwargs.get("num_items_in_batch")
        if items is not None:  # the Trainer sums over accumulated batches: each is to be its share of their labels
            self.distillation.last = found * Distillation.labelled(model, kwargs) / items, 0
        outputs["loss"] = self.distillation.mixed(outputs.get("loss"))
        return outputs

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._let_go()
        if self.pruner is not None:
            self.pruner.finish()

    def _let_go(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self.distillation.last = None
