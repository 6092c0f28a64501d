"""In the Trainer of transformers: pruned, stopped and resumed."""

import shutil

import pytest
import torch

from secateur import regrowth, schedules
from support.loops import assert_same, sparsity


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
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "logging_steps": 6}
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=3, learning_rate=1e-2, save_steps=5, report_to=[], disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, **{**usual, **options},
    )  # fmt: skip
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
            made.args, made.state, made.control, model=made.model, optimizer=made.optimizer,
            train_dataloader=made.get_train_dataloader(),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_the_trainer_is_one_also_where_max_steps_end_the_run(tmp_path):
    from secateur.integrations.transformers import PruningCallback

    callback = PruningCallback(schedules.cubic(0.5, end="1ep"), verbose=False)
    trainer(tmp_path, callback, max_steps=8).train()
    assert callback.pruner.schedule.end == 6, "48 / (4 · 2) steps an epoch, though 8 steps are 2 begun"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_trainer_learns_from_a_teacher_and_keeps_zeros(tmp_path, share):
    import copy

    from secateur import sparsify
    from secateur.integrations.transformers import DistillationCallback

    torch.manual_seed(1)
    run = trainer(tmp_path, DistillationCallback(torch.nn.Identity()))
    teacher = copy.deepcopy(run.model)
    for each in teacher.parameters():
        torch.nn.init.normal_(each, std=0.3) if each.dim() > 1 else None
    masks = sparsify(run.model, 0.6)
    run = trainer(tmp_path, DistillationCallback(teacher, share=share))
    run.model.load_state_dict({name: each.clone() for name, each in teacher.state_dict().items()})
    for name, mask in masks.items():
        run.model.get_parameter(name).data.mul_(mask)

    def distance():
        tokens = torch.stack([Texts()[at]["input_ids"] for at in range(48)])
        with torch.no_grad():
            p, q = (model.eval()(tokens).logits.log_softmax(-1) for model in (teacher, run.model))
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = distance()
    run.train()
    for name, mask in masks.items():
        assert bool(run.model.get_parameter(name)[~mask].eq(0).all())
    if share == 1:
        assert distance() < before
        first, last = ([each["loss"] for each in run.state.log_history if "loss" in each][at] for at in (0, -1))
        assert last < first
        assert first < 3 * before, "the mean over tokens, also of batches that are accumulated"
    assert not run.model._forward_hooks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("from_label", [0, 7])
def test_the_loss_of_accumulated_batches_is_that_of_one(tmp_path, share, from_label):
    import copy

    from secateur.integrations.transformers import DistillationCallback

    def loss(each, accumulated):
        """Of one step over the same eight texts."""
        callback = DistillationCallback(torch.nn.Identity(), share=share)
        options = {"max_steps": 1, "logging_steps": 1, "max_grad_norm": 0.0}
        options |= {"per_device_train_batch_size": each, "gradient_accumulation_steps": accumulated}
        run = trainer(tmp_path, callback, **options)
        run.train_dataset = [
            {"input_ids": row, "labels": torch.where(torch.arange(12) < from_label, -100, row)}
            for row in torch.arange(96).reshape(8, 12) % 32
        ]
        teacher = callback.distillation.teacher = copy.deepcopy(run.model)
        torch.nn.init.normal_(teacher.transformer.wte.weight, std=0.5)
        tokens = torch.stack([row["input_ids"] for row in run.train_dataset])
        with torch.no_grad():
            p, q = (model.eval()(tokens).logits.log_softmax(-1) for model in (teacher, run.model))
            labels = torch.stack([row["labels"] for row in run.train_dataset])
            counted = labels.ne(-100).sum()  # as the Trainer does of this model, the first label too
            own = float(run.model(tokens, labels=labels, num_items_in_batch=counted).loss)
        wanted = share * float((p.exp() * (p - q)).sum(-1).mean()) + (1 - share) * own
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        run.train()
        return run.state.log_history[0]["loss"], wanted

    for found, wanted in (loss(8, 1), loss(2, 4)):
        assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_failed_leaves_one_teacher_to_the_next(tmp_path):
    import copy

    from secateur.integrations.transformers import DistillationCallback

    callback = DistillationCallback(torch.nn.Identity(), share=0.5)
    run = trainer(tmp_path, callback, max_steps=1)
    teacher = callback.distillation.teacher = copy.deepcopy(run.model)
    runs = []
    teacher.register_forward_hook(lambda *_: runs.append(0))
    run.create_optimizer_and_scheduler(1)
    given = {"model": run.model, "optimizer": run.optimizer}
    callback.on_train_begin(run.args, run.state, run.control, **given)  # and it is never told of the end
    run.train()
    assert len(runs) == 2, "one for each of two accumulated batches"
    assert not run.model._forward_hooks
