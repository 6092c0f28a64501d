"""The frameworks that prune while training, each as a function of a model, a sparsity and a recipe.

Law: each trains by its own loop or scheduler as its documentation says, on the recipe's batches, optimizer and learning
rates, set up as one who knows it would; what is missing says why. Not one is needed to import this file.

    pip install torch==2.13.0 lightning nncf
    pip install --no-deps torchvision==0.28.0 torch-pruning torchao fastai fasterai
    pip install fastdownload fasttransform fastprogress 'plum-dispatch<2.10' cloudpickle einops matplotlib pandas
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Peer = Callable[[nn.Module, float, Any], nn.Module]
RAMP_END = 0.6  # of the epochs: the same for all gradual methods
LAYERS = (nn.Linear, nn.Conv2d)  # whose weights are pruned
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")  # what it declares lives as long as itself


def missing() -> dict[str, str]:
    """``{peer: why it cannot run here}``."""
    needs = {"Lightning ModelPruning": ["lightning"], "nncf.prune": ["nncf"], "fasterai": ["fastai", "fasterai"]}
    return {
        peer: f"{', '.join(absent)} is not installed"
        for peer, packages in needs.items()
        if (absent := [package for package in packages if importlib.util.find_spec(package) is None])
    }


def ramp(sparsity: float, progress: float) -> float:
    """The cubic schedule, at a progress from 0 to 1 of the run."""
    return sparsity * (1 - (1 - min(1.0, progress / RAMP_END)) ** 3)


def declare_torchvision() -> None:
    """torchvision, which fastai (and torchmetrics, if it is there) imports, has no wheel for torch on a CPU, and so its
    operators are missing: declare those that its import looks up."""
    if importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            _TORCHVISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Neither progress lines nor warnings about data loaders, loggers and pandas."""
    declare_torchvision()
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


class Epochs(torch.utils.data.IterableDataset[Any]):
    """The recipe's batches as a data set: each pass over it is the next epoch."""

    def __init__(self, recipe: Any) -> None:
        self.epochs = recipe.epochs_of_batches()
        self.length = recipe.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(next(self.epochs))

    def __len__(self) -> int:
        return self.length


def loader(recipe: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Epochs(recipe), batch_size=None)


# --------------------------------------------------------------------------------------------------------------------
# Lightning: global magnitude by torch.nn.utils.prune, at the end of each epoch of the ramp. Left at its defaults it
# would prune `amount` of what is left at every epoch, biases and normalizations too, and rewind to the first weights.
# --------------------------------------------------------------------------------------------------------------------


def lightning_pruning(model: nn.Module, recipe: Any, sparsity: float, **settings: Any) -> Any:
    """The callback as an expert would set it up: the number that is still to go after each epoch."""
    from lightning.pytorch.callbacks import ModelPruning

    weights = [(module, "weight") for module in model.modules() if isinstance(module, LAYERS)]
    total = sum(module.weight.numel() for module, _ in weights)

    def removed(epoch: int) -> int:
        return round(total * ramp(sparsity, epoch / recipe.epochs))

    return ModelPruning(
        "l1_unstructured",
        parameters_to_prune=weights,
        parameter_names=["weight"],
        amount=lambda epoch: removed(epoch + 1) - removed(epoch),  # beyond what is gone already
        apply_pruning=lambda epoch: removed(epoch + 1) > removed(epoch),
        use_lottery_ticket_hypothesis=False,
        **settings,
    )


def lightning_fit(model: nn.Module, recipe: Any, callbacks: list[Any]) -> Any:
    """Train with Lightning's Trainer; returns the trainer."""
    import lightning.pytorch as pl

    class Task(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
            x, y = batch
            loss: Tensor = recipe.loss(self.model(x), y)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = recipe.optimizer(self.model.parameters())
            return [optimizer], [{"scheduler": recipe.rates(optimizer), "interval": "step"}]

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=recipe.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Task().train(), loader(recipe))
    return trainer


def lightning(model: nn.Module, sparsity: float, recipe: Any) -> nn.Module:
    with quietly():
        lightning_fit(model, recipe, [lightning_pruning(model, recipe, sparsity)])
    return model


def lightning_checkpoint(model: nn.Module, recipe: Any, sparsity: float | None) -> int:
    """Bytes of a checkpoint that a run can go on from, hence with the masks; unpruned where there is no sparsity."""
    with quietly(), tempfile.TemporaryDirectory() as folder:
        callbacks = []
        if sparsity is not None:
            callbacks.append(lightning_pruning(model, recipe, sparsity, make_pruning_permanent=False))
        file = Path(folder) / "model.ckpt"
        lightning_fit(model, recipe, callbacks).save_checkpoint(file)
        return file.stat().st_size


# --------------------------------------------------------------------------------------------------------------------
# nncf: magnitudes relative to the layer's norm, one threshold over all layers, masks as hooks in the traced graph. Its
# own scheduler: each epoch removes the same share of what is left. (At 98 % its other one, by steps, ties with it when
# handed the cubic's values, and the whole sparsity at once is worse.)
# --------------------------------------------------------------------------------------------------------------------


def nncf_model(model: nn.Module, sparsity: float, example: Tensor) -> nn.Module:
    import nncf

    mode = nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL
    pruned: nn.Module = nncf.prune(model, mode=mode, ratio=sparsity, examples_inputs=example)
    return pruned


def nncf_prune(model: nn.Module, sparsity: float, recipe: Any) -> nn.Module:
    with quietly():
        import nncf
        from nncf.torch.function_hook.pruning.magnitude.schedulers import ExponentialMagnitudePruningScheduler

        model = nncf_model(model, 0.0, recipe.example)
        scheduler = ExponentialMagnitudePruningScheduler(
            model,
            mode=nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL,
            initial_ratio=0.0,
            target_ratio=sparsity,
            target_epoch=max(1, round(RAMP_END * recipe.epochs)),
        )
        recipe.fit(model, before_epoch=lambda epoch: scheduler.step(min(epoch, scheduler.target_epoch)))
        stripped: nn.Module = nncf.strip(
            model, do_copy=False, strip_format=nncf.StripFormat.IN_PLACE, example_input=recipe.example
        )
        return stripped


# --------------------------------------------------------------------------------------------------------------------
# fasterai: global magnitude by a callback of fastai's Learner, a new mask at every step of its cubic schedule, which is
# told to end where the others do (by default it ends with the run and leaves no time to recover).
# --------------------------------------------------------------------------------------------------------------------


def fasterai_callback(sparsity: float) -> Any:
    from fasterai.core.criteria import large_final
    from fasterai.core.schedule import Schedule, sched_agp
    from fasterai.sparse.sparsify_callback import SparsifyCallback

    schedule = Schedule(sched_agp, start_pct=0.0, end_pct=RAMP_END)
    return SparsifyCallback(sparsity, "weight", "global", large_final, schedule, layer_type=LAYERS)


def fasterai_sparsified(model: nn.Module, sparsity: float) -> nn.Module:
    """The model as it is between two steps of a training with the callback."""
    from fasterai.core.criteria import large_final
    from fasterai.sparse.sparsifier import Sparsifier

    Sparsifier(model, "weight", "global", large_final, layer_type=LAYERS).sparsify_model(sparsity)
    return model


def fastai_fit(model: nn.Module, recipe: Any, callbacks: list[Any]) -> None:
    """Train with fastai's Learner."""
    import fastai.callback.progress  # noqa: F401  (it gives a Learner no_bar and no_logging)
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Rates(Callback):  # type: ignore[misc]
        def before_fit(self) -> None:
            self.rates = recipe.rates(self.learn.opt.opt)

        def after_batch(self) -> None:
            if self.training:
                self.rates.step()

    def optimizer(parameters: Any, lr: float) -> Any:
        del lr  # the recipe's rates set it
        return OptimWrapper(opt=recipe.optimizer(parameters))

    data = DataLoaders(loader(recipe), [], device=torch.device("cpu"))
    learner = Learner(data, model, loss_func=recipe.loss, opt_func=optimizer, cbs=[Rates(), *callbacks])
    with learner.no_bar(), learner.no_logging():
        learner.fit(recipe.epochs)


def fasterai(model: nn.Module, sparsity: float, recipe: Any) -> nn.Module:
    with quietly():
        fastai_fit(model, recipe, [fasterai_callback(sparsity)])
    return model


PEERS: dict[str, Peer] = {"Lightning ModelPruning": lightning, "nncf.prune": nncf_prune, "fasterai": fasterai}
