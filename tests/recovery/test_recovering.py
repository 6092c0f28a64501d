"""The verb: nearer to the teacher, the zeros as they were, and nothing else changed; or nothing at all."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from secateur import attach, sparsify
from secateur.models import same_rows
from secateur.recovery import recover
from secateur.recovery.descent import Descent, Whole
from secateur.recovery.outputs import Steps
from support.families import make
from support.measured import TwoStage


def contents(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("options", [{}, {"local": 0}, {"adapters": 2}, {"local": 0, "loss": "mse"}], ids=str)
def test_zeros_stay_and_outputs_come_nearer(pair, options):
    model, teacher, tokens = pair
    before, theirs = contents(model), contents(teacher)
    done = recover(model, teacher, tokens, steps=30, rate=1e-2, **options)
    assert done.last < done.first
    assert same(contents(teacher), theirs)
    assert len(done.zeros) == 14
    for name, each in model.named_parameters():
        if name in done.zeros:
            assert torch.equal(each.eq(0), before[name].eq(0))
            assert not torch.equal(each, before[name])
        elif "adapters" in options and "layers" not in name:
            assert torch.equal(each, before[name]), f"{name}: adapters move the weights that pruning may touch"
    assert all(was == now == int(before[name].eq(0).sum()) for name, (was, now) in done.zeros.items())
    assert done.rows == 30 * 48
    assert str(done)


def test_one_seed_is_one_result_and_generators_and_modes_stay(pair):
    model, teacher, tokens = pair
    model.train()
    teacher.model.layers[0].train()
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones(16)
    others = [copy.deepcopy(model) for _ in range(2)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    modes = [each.training for each in (*model.modules(), *teacher.modules())]
    recover(model, teacher, tokens, steps=4, adapters=2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    assert [each.training for each in (*model.modules(), *teacher.modules())] == modes
    assert not model.lm_head.weight.requires_grad
    assert torch.equal(model.lm_head.weight, others[0].lm_head.weight)
    assert torch.equal(model.model.norm.weight.grad, torch.ones(16))
    assert all(each.grad is None for name, each in model.named_parameters() if name != "model.norm.weight")
    assert all(each.grad is None and each.requires_grad for each in teacher.parameters())
    recover(others[0], teacher, tokens, steps=4, adapters=2)
    assert same(contents(model), contents(others[0]))
    recover(others[1], teacher, tokens, steps=4, adapters=2, seed=1)
    assert not same(contents(model), contents(others[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapters", [None, 2])
def test_half_precision_is_trained_as_float32_and_rounded_once(pair, dtype, adapters):
    model, teacher, tokens = pair
    model.to(dtype)
    wide = copy.deepcopy(model).float()
    places = {name: each.data_ptr() for name, each in model.named_parameters()}
    recover(wide, teacher, tokens, steps=6, rate=1e-3, adapters=adapters)
    done = recover(model, teacher, tokens, steps=6, rate=1e-3, adapters=adapters)
    assert all(was == now for was, now in done.zeros.values())
    expected = dict(wide.named_parameters())
    for name, each in model.named_parameters():
        assert each.dtype == dtype
        assert each.data_ptr() == places[name], "the model's own memory"
        rounded = expected[name].to(dtype)
        assert torch.equal(each, rounded) or name in done.zeros
        assert torch.equal(each[rounded.ne(0)], rounded[rounded.ne(0)])


def test_attached_masks_stay_attached_and_what_they_hide_stays_too(pair):
    model, teacher, tokens = pair
    masks = sparsify(model, 0.5)
    plain = copy.deepcopy(model)
    attach(model, masks)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(f"{name}_orig")[~mask] = 5.0  # hidden
    done = recover(model, teacher, tokens, steps=4, rate=1e-3, local=0)
    recover(plain, teacher, tokens, steps=4, rate=1e-3, local=0)
    weights = dict(plain.named_parameters())
    assert all(was == now for was, now in done.zeros.values())
    for name, mask in masks.items():
        assert bool(model.get_parameter(f"{name}_orig")[~mask].eq(5).all())
        module, _, key = name.rpartition(".")
        assert torch.allclose(getattr(model.get_submodule(module), key), weights[name], atol=1e-6)


def test_a_network_with_batch_normalization_keeps_its_statistics():
    teacher = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model = copy.deepcopy(teacher).train()
    sparsify(model, 0.5)
    before = model[1].running_mean.clone()
    done = recover(model, teacher, [torch.randn(6, 1, 8, 8) for _ in range(3)], steps=20, rate=1e-2, adapters=2)
    assert torch.equal(model[1].running_mean, before)
    assert done.loss == "kl"
    assert done.last < done.first


WRONG = {
    "a loss that is nan": (
        {"loss": lambda outputs, wanted, batch: outputs.logits.sum() * torch.nan},
        "the loss of step 1",
    ),
    "a loss that ends": ({"loss": lambda outputs, wanted, batch: 1 / 0}, "division by zero"),
    "a rate too high": ({"rate": 1e37}, "not finite|is nan|is inf|grew beyond"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_that_fails_changes_nothing(pair, what, dtype):
    model, teacher, tokens = pair
    model.to(dtype)
    before, objects = contents(model), list(model.parameters())
    options, message = WRONG[what]
    with pytest.raises((ValueError, ZeroDivisionError), match=message):
        recover(model, teacher, tokens, steps=20, **options)
    assert same(contents(model), before)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert all(each.grad is None and each.dtype == dtype for each in model.parameters())
    assert not any("forward" in vars(each) for each in (*model.modules(), *teacher.modules()))


def test_what_is_wrong_is_said(pair):
    model, teacher, tokens = pair
    with pytest.raises(TypeError, match="recover takes two modules, or two directories"):
        recover("somewhere", teacher, tokens)
    with pytest.raises(ValueError, match=r"q_proj.weight is the teacher's own .*pass a copy"):
        recover(model, model, tokens)
    with pytest.raises(TypeError, match=r"pass \[batch\]"):
        recover(model, teacher, tokens[0])
    for local in (0, 1):
        with pytest.raises(ValueError, match="there are no batches"):
            recover(model, teacher, [], local=local)
        with pytest.raises(ValueError, match=r"batch 1 of 2 \(input_ids of shape \(0, 12\), .* holds no token"):
            recover(model, teacher, [tokens[0], {"input_ids": tokens[0]["input_ids"][:0]}], local=local)
    with pytest.raises(ValueError, match="adapters= finds no weight of"):
        recover(model, teacher, tokens, local=0, adapters=2, include="*norm*")
    with pytest.raises(ValueError, match="no parameter of LlamaForCausalLM is to be trained"):
        recover(model.requires_grad_(False), teacher, tokens)


def test_batches_may_be_gone_through_once_and_a_tied_head_moves_once():
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64,
    }  # fmt: skip
    teacher = LlamaForCausalLM(LlamaConfig(**size, tie_word_embeddings=True))
    model = copy.deepcopy(teacher)
    sparsify(model, 0.6)
    done = recover(model, teacher, ({"input_ids": torch.randint(3, 64, (2, 8))} for _ in range(2)), steps=5)
    assert done.steps == 5
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("which", ["model", "teacher"])
def test_weights_that_are_no_numbers_are_named(pair, which):
    model, teacher, tokens = pair
    wrong = {"model": model, "teacher": teacher}[which]
    with torch.no_grad():
        wrong.lm_head.weight[0, 1] = torch.inf
    before = contents(model)
    with pytest.raises(ValueError, match=r"lm_head.weight: the weight of shape .* NaN or infinite"):
        recover(model, teacher, tokens, steps=1)
    assert same(contents(model), before)
    if which == "model":
        model = copy.deepcopy(model).to("meta")
    else:
        teacher = copy.deepcopy(teacher).to("meta")
    with pytest.raises(ValueError, match="is on the meta device and has no values; load the weights first"):
        recover(model, teacher, tokens, steps=1)


def test_the_local_part_of_several_processes_is_refused(pair, monkeypatch):
    from secateur.recovery import recovering

    monkeypatch.setattr(recovering, "rank_and_world", lambda: (1, 2))
    with pytest.raises(ValueError, match="2 processes train by the outputs alone: pass local=0; what local= does runs"):
        recover(*pair)


def test_a_model_of_fewer_tokens_is_refused_unless_they_are_translated():
    teacher, model = make("llama"), make("llama", vocab_size=60)
    tokens = [{"input_ids": torch.randint(3, 60, (2, 6))}]
    with pytest.raises(ValueError, match="the model knows 60 tokens and the teacher 64"):
        recover(model, teacher, tokens)

    def forward(each, batch):
        return each(**batch).logits[..., :60]

    assert recover(model, teacher, tokens, steps=2, local=1, forward=forward).steps == 2


def test_steps_that_end_worse_are_not_kept_and_it_is_said(pair):
    model, teacher, tokens = pair
    for options in ({"local": 0}, {"local": 1}, {"local": 0, "adapters": 2}, {"local": 0, "autocast": "bfloat16"}):
        each, alone = copy.deepcopy(model), copy.deepcopy(model)
        with pytest.warns(
            UserWarning, match=r"Over 1 batch the loss \(kl\) was .* they are not kept\. Lower rate= \(3;"
        ):
            done = recover(each, teacher, tokens, steps=6, rate=3.0, **options)
        assert done.judged.after > done.judged.before
        assert not done.judged.is_kept
        assert "they are not kept." in str(done)
        if options["local"]:
            recover(alone, teacher, tokens, steps=0, local=1)  # what came before the steps is kept
        assert same(contents(each), contents(alone))


def test_what_is_judged_is_the_loss_of_the_same_batches(pair):
    model, teacher, tokens = pair
    before, seen = copy.deepcopy(model), []

    def loss(outputs, wanted, batch):
        if not torch.is_grad_enabled():
            seen.append(batch)
        return (outputs.logits - wanted.logits).square().mean()

    done = recover(model, teacher, tokens, steps=70, local=0, rate=1e-2, loss=loss)
    assert [id(each) for each in seen] == [id(each) for each in tokens] * 2, "1 + 70 // 32 of them, before and after"
    for each, word in ((before, "before"), (model, "after")):
        with torch.no_grad():
            found = [loss(each(**batch), teacher(**batch), batch) for batch in tokens]
        assert getattr(done.judged, word) == pytest.approx(float(torch.stack(found).mean()), rel=1e-4)
    assert done.judged.is_kept
    assert f"Over 3 batches the loss (loss) was {done.judged.before:.5f} before" in str(done)


@pytest.mark.parametrize("options", [{}, {"adapters": 2}], ids=str)
def test_rows_that_the_teacher_selects_are_learned_from(options):
    torch.manual_seed(0)
    teacher, batches = TwoStage(), [{"x": torch.randn(9, 17, 6)} for _ in range(4)]
    given = [{**batch, "rows": teacher.select(**batch)[1]} for batch in batches]
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.features.weight[:, ::2] = 0
    assert not torch.equal(model.select(**batches[0])[1], given[0]["rows"])
    found, wanted = copy.deepcopy(model), copy.deepcopy(model)
    said = [
        recover(each, teacher, its, steps=20, local=0, rate=1e-2, loss="mse", **options).judged
        for each, its in ((found, batches), (wanted, given))
    ]
    assert same(contents(found), contents(wanted))
    assert said[0] == said[1]
    assert said[0].after < said[0].before


def overlap(model, teacher, batches):
    """Of the rows that the teacher selects the share that the model selects by itself."""
    both = [(each.select(**batch)[1] for each in (model, teacher)) for batch in batches]
    return float(torch.stack([(a[:, :, None] == b[:, None]).any(1).float().mean() for a, b in both]).mean())


def choosing(fill=None):
    """A teacher that selects rows, a model that differs in what it selects by alone, and batches."""
    torch.manual_seed(0)
    teacher = TwoStage() if fill is None else Masking(fill)
    model = copy.deepcopy(teacher)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
    return model, teacher, [{"x": torch.randn(9, 17, 6)} for _ in range(4)]


class Masking(TwoStage):
    """Selects no row whose first number is large."""

    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def select(self, x):
        features = self.features(self.first(x).relu())
        scores = self.score(features).squeeze(-1).masked_fill(x[..., 0] > 0.8, self.fill)
        return features, scores.topk(self.most, dim=1).indices


def my_loss(outputs, wanted, batch):
    return (outputs - wanted).square().mean()


@pytest.mark.parametrize(
    ("fill", "loss"), [(None, "mse"), (None, my_loss), (-torch.inf, "mse"), (torch.finfo().min, "mse"), (-1e9, "mse")]
)
def test_what_the_teacher_selects_is_learned_to_be_selected(fill, loss):
    """Given the teacher's rows, outputs say nothing of what the model itself would select."""
    model, teacher, batches = choosing(fill)
    asked = {"local": 0, "loss": loss, "rate": 1e-2}
    assert recover(copy.deepcopy(teacher), teacher, batches, steps=1, **asked).judged.before == 0
    before = overlap(model, teacher, batches)
    assert before < 0.6
    done = recover(model, teacher, batches, steps=200, **asked)
    assert done.judged.before > 0.1
    assert done.judged.after < 0.01
    assert overlap(model, teacher, batches) > 0.95
    assert "+ what selects) was" in str(done)


def test_the_steps_are_judged_by_what_selects():
    model, teacher, batches = choosing()
    with torch.no_grad():
        model.score.weight.copy_(teacher.score.weight)
        model.head[0].weight[::3] = 0
    before = contents(model)

    def turn(number, _loss):
        if number == 20:
            with torch.no_grad():
                model.score.weight.neg_()

    with pytest.warns(UserWarning, match="they are not kept"):
        done = recover(model, teacher, batches, steps=20, local=0, rate=1e-2, loss="mse", on_step=turn)
    assert done.last < done.first
    assert same(contents(model), before)


def test_a_share_counts_for_what_selects_too():
    model, teacher, batches = choosing()
    labelled = [{**batch, "labels": torch.zeros(1)} for batch in batches[:1]]

    def forward(each, batch):
        outputs = each(batch["x"])
        return {"logits": outputs, "loss": outputs.sum() * 0}

    whole, quarter = (
        recover(copy.deepcopy(model), teacher, labelled, steps=1, local=0, loss="mse", share=share, forward=forward)
        for share in (1, 0.25)
    )
    assert quarter.first == pytest.approx(0.25 * whole.first, rel=1e-5)
    assert quarter.loss == "0.25 (mse + what selects) + 0.75 the text's own"


def test_an_rt_detr_learns_the_scores_of_places_that_its_teacher_does_not_select():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 20],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        d_model=16,
        encoder_hidden_dim=16,
        encoder_in_channels=[12, 16, 20],
        encoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_layers=1,
        decoder_ffn_dim=24,
        decoder_attention_heads=2,
        decoder_n_points=2,
        decoder_in_channels=[16, 16, 16],
        num_queries=9,
        num_labels=3,
    )
    teacher = transformers.RTDetrForObjectDetection(config).eval()
    with torch.no_grad():
        for each in teacher.parameters():
            if each.dim() > 1:
                each.normal_(std=each[0].numel() ** -0.5)
    model, pictures = copy.deepcopy(teacher), {"pixel_values": torch.rand(2, 3, 64, 64)}
    with torch.no_grad():
        model.model.enc_score_head.weight.normal_()
    rows, seen = {}, []
    with same_rows(teacher, rows, records=True), torch.no_grad():
        teacher(**pictures)
    model.model.enc_score_head.register_forward_hook(lambda _module, _args, scores: seen.append(scores))
    steps = Steps(model, teacher, Descent([Whole(model.model.enc_score_head.weight)], 1, rate=1e-3), "mse")
    with torch.enable_grad():
        lost, _ = steps._lost(pictures)
    (slopes,) = torch.autograd.grad(lost, seen)
    (selected,) = rows.values()
    others = torch.ones(slopes.shape[:2]).scatter(1, selected, 0).bool()
    assert others.sum() == 2 * (84 - 9)
    assert slopes.ne(0).any(-1)[others].float().mean() > 0.5
    assert steps.word == "mse + what selects"
