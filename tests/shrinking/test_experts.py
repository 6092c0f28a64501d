"""Experts that leave: as many as asked, of each mixture equally many, never fewer left than are chosen at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from secateur import load_shrunken, save_shrunken, shrink, verify_shrunken
from secateur.kinds import Experts
from support.unchanged import is_unchanged, state_of
from zoo.mixtures import MixtureInTurn, MixtureOfCopies


@pytest.mark.long
def test_a_fraction_or_a_number_of_experts_leaves():
    for asked in (1 / 3, 2):
        model, inputs = zoo.ZOO["mixture_in_turn"]()
        dense = copy.deepcopy(model)
        done = shrink(model, inputs, leave=Experts(asked))
        assert model.held.experts == 4
        assert model.router.out_features == len(model.held.up) == len(model.held.down) == 4
        assert model.held.up.shape[1:] == dense.held.up.shape[1:]  # nothing else leaves
        assert len(done.plans) == 1
        verify_shrunken(dense, model, inputs)


def test_channels_make_up_what_is_missing():
    model, inputs = zoo.ZOO["mixture_of_all"]()
    before = sum(each.numel() for each in model.parameters())
    done = shrink(model, inputs, 0.5, leave=Experts(1))
    assert model.held.experts == 5
    assert len(done.plans) == 2
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(before / 2, rel=0.05)


def test_as_many_stay_as_are_chosen_and_more_cannot_be_asked_for():
    model, inputs = zoo.ZOO["mixture_in_turn"]()
    state = state_of(model)
    with pytest.raises(ValueError, match=r"at most 66\.66% of the experts can leave, not 83\.3%: as many stay as"):
        shrink(model, inputs, leave=Experts(5))
    assert is_unchanged(model, state)
    shrink(model, inputs, leave=Experts(4))
    assert model.held.experts == model.k == 2


def test_what_is_said_of_how_many_can_leave_is_so_whatever_was_asked():
    model = MixtureInTurn(experts=6, k=5)
    for asked in (2, 4):
        with pytest.raises(ValueError, match=r"at most 16\.66% of the experts can leave"):
            shrink(model, torch.randn(4, 16), leave=Experts(asked))
    shrink(model, torch.randn(4, 16), leave=Experts(1))
    assert model.held.experts == model.k == 5


@pytest.mark.parametrize("training", [False, True])
def test_where_all_are_chosen_fewer_are_chosen_afterwards(training):
    """Of shares, renormalized or not: without a logit of minus infinity the others have them all."""
    model, inputs = MixtureInTurn(experts=6, k=6).double().train(training), torch.randn(4, 16).double()
    dense = copy.deepcopy(model)
    shrink(model, inputs, leave=Experts(2))
    assert model.held.experts == model.k == 4
    verify_shrunken(dense, model, inputs)
    gone = ~(dense.router.weight[:, None] == model.router.weight).all(-1).any(-1)
    assert gone.sum() == 2
    dense.router.register_forward_hook(lambda *given: given[-1].masked_fill(gone, -torch.inf))
    torch.testing.assert_close(model(inputs), dense(inputs), rtol=1e-9, atol=1e-9)


def test_experts_stay_unless_they_are_asked_for():
    model, inputs = zoo.ZOO["mixture_in_turn"]()
    shrink(model, inputs, 0.5)
    assert model.held.experts == 6
    with pytest.raises(ValueError, match="no experts of the model can leave"):
        shrink(model, inputs, leave=Experts(1), exclude="router.*")
    with pytest.raises(ValueError, match="no experts of the model can leave"):
        shrink(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3), leave=Experts(0.5))


@pytest.mark.parametrize("wrong", [-1, 1.5, float("nan")])
def test_what_cannot_be_a_number_of_experts(wrong):
    with pytest.raises(ValueError, match="experts must be a fraction"):
        Experts(wrong)


@pytest.mark.long
def test_the_configuration_says_how_many_are_left(tmp_path):
    model, inputs = zoo.ZOO["mixtral"]()
    shrink(model, inputs, leave=Experts(1), uniform=True)
    assert model.config.num_local_experts == 2
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.long
def test_where_all_are_chosen_the_configuration_says_so_of_fewer(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "moe_intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(
        vocab_size=19, num_hidden_layers=1, num_experts=4, num_experts_per_tok=4, head_dim=8, **sizes
    )
    model, words = Qwen3MoeForCausalLM(config).eval(), torch.randint(0, 19, (2, 8))
    batches = [{"input_ids": words}, {"input_ids": words.flip(0)}]
    shrink(model, batches[0], leave=Experts(1), batches=batches, uniform=True)
    assert model.config.num_experts == model.config.num_experts_per_tok == 3
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(words).logits, model(words).logits)


@pytest.mark.long
def test_what_no_pass_used_follows_too(tmp_path):
    """The loss of the routers counts experts; and a saved plan says what left."""
    model, inputs = zoo.ZOO["mixtral"]()
    dense = copy.deepcopy(model)
    shrink(model, inputs, 0.2, leave=Experts(1), uniform=True)
    words = inputs["input_ids"]
    assert model(**inputs, labels=words, output_router_logits=True).loss.isfinite()
    save_shrunken(model, tmp_path)
    loaded = load_shrunken(dense, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    assert [set(plan.tensors) for plan in model.shrink_plans] == [set(plan.tensors) for plan in loaded.shrink_plans]


def runs(name):
    """Not so Doge's of transformers 5.6, which drops entries out of a tuple."""
    try:
        zoo.run(*zoo.ZOO[f"mixture_{name}"]())
    except TypeError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *([("doge", {"num_experts": 4})] if runs("doge") else []),
        ("jetmoe", {"num_local_experts": 4}),
        ("longcat", {"n_routed_experts": 4}),
    ],
)
@pytest.mark.long
def test_experts_that_python_counts_leave_with_what_the_configuration_says(name, said):
    """Half of the keys of pairs, of which the configuration says the square; a list of counts; a number of a place."""
    model, inputs = zoo.ZOO[f"mixture_{name}"]()
    dense = model.config.to_dict()
    shrink(model, inputs, leave=Experts(1 / 3), uniform=True)
    found = model.config.to_dict()
    assert {key: found[key] for key in said} == said != {key: dense[key] for key in said}
    zoo.run(model.train(), inputs)


class OfStatistics(MixtureOfCopies):
    """Scores that meet a statistic over all of them."""

    def prepare(self, experts, changed):
        super().prepare(experts)
        self.changed = changed

    def route(self, x):
        best, chosen = self.changed(self.router(x)).topk(self.k, -1)
        return best, chosen


@pytest.mark.parametrize(
    "changed",
    [
        lambda scores: (scores - scores.mean(-1, keepdim=True)).softmax(-1),
        lambda scores: F.layer_norm(scores, scores.shape[-1:]),
        lambda scores: scores.softmax(-1) / scores.softmax(-1).mean(-1, keepdim=True),
    ],
    ids=["centered", "normalized", "shares"],
)
def test_experts_whose_scores_meet_a_statistic_stay(changed):
    """Without some of them it is another number, and that of minus infinity is none."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"no experts of the model can leave.*\n.*computed something else"):
        shrink(OfStatistics(changed=changed), torch.randn(2, 3, 16), leave=Experts(1))


def test_a_statistic_of_scores_that_moves_no_output_keeps_no_experts():
    class Told(OfStatistics):
        def route(self, x):
            self.load = self.router(x).softmax(-1).mean()
            return super().route(x)

    torch.manual_seed(0)
    model = Told(changed=lambda scores: scores.softmax(-1))
    assert shrink(model, torch.randn(2, 3, 16), leave=Experts(1)).experts == {"router.weight": (6, 5)}
