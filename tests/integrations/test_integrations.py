"""In the frameworks' own training loops: Trainer, Lightning, Accelerate, a plain loop; each stopped and resumed."""

import runpy
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur import regrowth, schedules

ROOT = Path(__file__).parents[2]


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def sparsity(model, names):
    weights = [model.get_parameter(name) for name in names]
    return sum(int((weight == 0).sum()) for weight in weights), sum(weight.numel() for weight in weights)


def test_adapters_are_short():
    for path in (ROOT / "src/secateur/integrations").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 80, path.name
        assert "torchvision" not in path.read_text(encoding="utf-8")
    for name in ("accelerate_loop.py", "plain_loop.py"):
        assert len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 80


class Texts(torch.utils.data.Dataset):
    """Token sequences of which the model has to learn the successor of each token."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = (torch.arange(12) * (index % 5 + 1) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder, callback, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=5,
        logging_steps=6,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[callback])


@pytest.mark.filterwarnings("ignore")  # the framework's own
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_prunes_saves_and_resumes(tmp_path, bf16, capsys):
    from secateur.integrations.transformers import PruningCallback

    callback = PruningCallback(0.8)
    whole = trainer(tmp_path / "whole", callback, bf16=bf16)
    whole.train()
    assert whole.state.max_steps == callback.pruner.step == 18, "48 / (4 · 2) steps an epoch"
    assert "step       11  sparsity 0.8000" in capsys.readouterr().out
    names = list(callback.pruner.masks)
    assert len(names) == 8, "Conv1D's weights; the head is tied to the embedding and left alone"
    zeros, entries = sparsity(whole.model, names)
    assert zeros == round(0.8 * entries)
    logged = [entry["sparsity"] for entry in whole.state.log_history if "loss" in entry]
    assert logged == sorted(logged)
    assert logged[-1] == pytest.approx(0.8, abs=1e-3)
    assert "transformer.h.0.attn.c_attn.weight" in whole.model.state_dict()

    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole" / "checkpoint-5", half / "checkpoint-5")
    assert (half / "checkpoint-5" / "pruner.pt").exists()
    again = trainer(half, PruningCallback(0.8, verbose=False), bf16=bf16)
    again.train(resume_from_checkpoint=str(half / "checkpoint-5"))
    assert_same(whole.model.state_dict(), again.model.state_dict())

    (half / "checkpoint-5" / "pruner.pt").unlink()
    with pytest.raises(FileNotFoundError, match="pass resume_from="):
        trainer(half, PruningCallback(0.8, verbose=False)).train(resume_from_checkpoint=str(half / "checkpoint-5"))


@pytest.mark.filterwarnings("ignore")
def test_trainer_with_regrowth_and_a_best_model(tmp_path):
    from secateur.integrations.transformers import PruningCallback

    callback = PruningCallback(schedules.constant(0.5), regrow=regrowth.rigl(), every=2, verbose=False)
    made = trainer(tmp_path, callback)
    made.train()
    zeros, entries = sparsity(made.model, callback.pruner.masks)
    assert zeros == entries / 2
    made.args.load_best_model_at_end = True
    with pytest.warns(UserWarning, match="from before they were pruned"):
        callback.on_train_begin(
            made.args,
            made.state,
            made.control,
            model=made.model,
            optimizer=made.optimizer,
            train_dataloader=made.get_train_dataloader(),
        )


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_the_trainer_is_one_also_where_max_steps_end_the_run(tmp_path):
    from secateur.integrations.transformers import PruningCallback

    callback = PruningCallback(schedules.cubic(0.5, end="1ep"), verbose=False)
    trainer(tmp_path, callback, max_steps=8).train()
    assert callback.pruner.schedule.end == 6, "48 / (4 · 2) steps an epoch, though 8 steps are 2 begun"


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


@pytest.mark.parametrize("name", ["plain_loop.py", "accelerate_loop.py"])
def test_example_loops_resume_where_they_were_stopped(name, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / name))
        return capsys.readouterr().out.splitlines()

    whole = run(tmp_path / "whole.pt")
    run(tmp_path / "stopped.pt", "--stop-after", 4)
    resumed = run(tmp_path / "stopped.pt")
    assert whole[-1] == resumed[-1]
    assert whole[-1].startswith("90.0 % of the weights are zero")
    first, second = (torch.load(tmp_path / f"{stem}.pt", weights_only=True) for stem in ("whole", "stopped"))
    assert_same(first["model"], second["model"])
