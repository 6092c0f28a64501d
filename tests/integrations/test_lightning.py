"""In Lightning's Trainer: pruned, stopped and resumed."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from secateur import regrowth, schedules
from support.loops import assert_same, sparsity


class Regression:
    """Made in a function, since lightning is imported where it is used."""

    def __new__(cls):
        import lightning.pytorch as pl

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

            def training_step(self, batch, _index):
                inputs, targets = batch
                return (self.net(inputs) - targets).square().mean()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.01)

        return Module()


def fit(folder, callback, epochs, resume=None, accumulate=1, max_steps=-1):
    import lightning.pytorch as pl

    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4] * inputs[:, 4:])
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=False)
    module = Regression()
    trainer = pl.Trainer(
        max_epochs=10,
        max_steps=max_steps,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback, pl.callbacks.ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")],
    )
    if epochs < 10:
        trainer.fit_loop.max_epochs = epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


@pytest.mark.filterwarnings("ignore")
def test_lightning_prunes_saves_and_resumes(tmp_path):
    from secateur.integrations.lightning import Pruning

    callback = Pruning(0.9, verbose=False)
    module, trainer = fit(tmp_path / "whole", callback, 10)
    assert callback.pruner.step == trainer.global_step == 120
    zeros, entries = sparsity(module, callback.pruner.masks)
    assert zeros == round(0.9 * entries)
    assert trainer.callback_metrics["sparsity"] == pytest.approx(zeros / entries)

    checkpoint = torch.load(tmp_path / "whole" / "epoch=3.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(module.state_dict()), "the module's own keys"
    again = Pruning(0.9, verbose=False)
    resumed, _ = fit(tmp_path / "again", again, 10, resume=tmp_path / "whole" / "epoch=3.ckpt")
    assert_same(module.state_dict(), resumed.state_dict())
    assert again.pruner.metrics() == callback.pruner.metrics()


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_accumulation_and_regrowth(tmp_path):
    from secateur.integrations.lightning import Pruning

    callback = Pruning(schedules.constant(0.5), regrow=regrowth.rigl(), every="1ep", verbose=False)
    module, trainer = fit(tmp_path, callback, 10, accumulate=3)
    assert callback.pruner.step == trainer.global_step == 40
    zeros, entries = sparsity(module, callback.pruner.masks)
    assert zeros == entries / 2


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_lightning_is_one_also_where_max_steps_end_the_run(tmp_path):
    from secateur.integrations.lightning import Pruning

    callback = Pruning(schedules.cubic(0.5, end="1ep"), verbose=False)
    module, trainer = fit(tmp_path, callback, 10, max_steps=18)
    assert callback.pruner.schedule.end == 12
    trainer.fit_loop.epoch_loop.max_steps = 30
    before = callback.pruner.masks
    trainer.fit(module, trainer.train_dataloader)
    assert callback.pruner.step == 30, "fit once more goes on"
    assert_same(before, callback.pruner.masks)


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_with_its_own_state_or_not_at_all(tmp_path):
    from secateur.integrations.lightning import Pruning

    fit(tmp_path / "one", Pruning(0.5, verbose=False, include="net.0.weight"), 3)
    with pytest.raises(
        ValueError, match=r"the checkpoint has no state of Pruning.*name the callback's include as it was"
    ):
        fit(tmp_path / "two", Pruning(0.5, verbose=False), 10, resume=tmp_path / "one" / "epoch=1.ckpt")
    # a state that came with a checkpoint to test is none to begin a new run with
    callback = Pruning(0.5, verbose=False, include="net.0.weight")
    checkpoint = torch.load(tmp_path / "one" / "epoch=1.ckpt", weights_only=True)
    callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
    fit(tmp_path / "three", callback, 3)
    assert callback.pruner.step == 36


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_lightning_learns_from_a_teacher_and_keeps_zeros(tmp_path, share):
    import lightning.pytorch as pl

    from secateur import sparsify
    from secateur.integrations.lightning import Distillation

    module = Regression()
    teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    module.net.load_state_dict(teacher.state_dict())
    masks = sparsify(module.net, 0.7)
    inputs = torch.randn(96, 8)

    def distance():
        with torch.no_grad():
            return float((module.net(inputs) - teacher(inputs)).square().mean())

    before = distance()
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4] * inputs[:, 4:])
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    callback = Distillation(teacher, "net", "mse", share=share)
    trainer = pl.Trainer(max_epochs=8, accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback], **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    for name, mask in masks.items():
        assert bool(module.net.get_parameter(name)[~mask].eq(0).all())
    assert distance() < (before if share == 1 else 50 * before)
    assert "training_step" not in vars(module)
    assert not module.net._forward_hooks


def test_a_run_that_fails_lets_go_of_the_module_and_can_begin_again(tmp_path):
    import lightning.pytorch as pl

    from secateur.integrations.lightning import Distillation

    module, data = Regression(), torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 4))
    callback, fails = Distillation(nn.Linear(8, 4), "net", "mse", share=0.5), [True, False]
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip

    class Failing(pl.Callback):
        def on_train_batch_end(self, *_):
            if fails.pop(0):
                raise RuntimeError("stopped")

    for wrong in (True, False):
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback, Failing()], **quiet
        )
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="stopped") if wrong else nullcontext():
            warnings.simplefilter("ignore")
            trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
        assert "training_step" not in vars(module)
        assert not module.net._forward_hooks
