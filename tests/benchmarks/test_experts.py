"""The benchmark of mixtures: its oracle tells right from wrong, and its rows say what they are to say."""

import itertools

import pytest
import torch

from benchmarks.experts import choosing, coverage, quality, routers, training
from benchmarks.support.models import zoo

NAME = "mixture_granite"


def test_a_mixture_is_right():
    assert coverage.judged_experts(NAME) == {"experts": "right", "why": ""}
    assert coverage.widths_of(NAME) == {"leave": "model attention inner experts"}


@pytest.mark.parametrize("wrong", ["router", "experts"])
def test_another_expert_that_leaves_is_told(monkeypatch, wrong):
    """Its tensors lose another row than the plan says."""
    shrink = coverage.shrink

    def shrunk(model, *given, **options):
        (plan,) = (done := shrink(model, *given, **options)).plans
        for name, (_, cuts) in plan.tensors.items():
            if ("experts" not in name) == (wrong == "router"):
                dense = dict(zoo.ZOO[NAME]()[0].named_parameters())[name]
                cuts[0][:] = torch.arange(len(cuts[0])).numpy() + (0 if cuts[0][0] else 1)
                model.get_parameter(name).data = dense.data[torch.from_numpy(cuts[0])]
        return done

    monkeypatch.setattr(coverage, "shrink", shrunk)
    row = coverage.judged_experts(NAME)
    assert row["experts"] == "WRONG"
    assert row["why"].startswith("differs by")


@pytest.fixture
def mixture(monkeypatch):
    """Two mixtures of four experts, the second in the last block, and sequences."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
    monkeypatch.setitem(training.SIZES, "tiny", sizes)
    return training.mixture("tiny").eval(), torch.randint(training.VOCABULARY, (3, 16))


def test_what_a_mixture_adds_is_told_of_all_choices(mixture):
    model, ids = mixture
    for at, each in enumerate(choosing.mixtures_of(model)):
        seen = []
        hook = each.register_forward_hook(lambda _, args, out: seen.append(out))  # noqa: B023
        given = choosing.given_to(model, at, ids)
        hook.remove()
        assert torch.allclose(given.added(range(4)), seen[0].flatten(0, 1), atol=1e-6)


def test_the_enumerated_choice_is_the_best_of_the_models_without_others(mixture):
    model, ids = mixture
    kept, found, tried = choosing.enumerated(model, 3, ids)
    every = choosing.subsets(model, 3)
    costs = {
        pair: quality.perplexity(choosing.without_others(model, pair), ids) for pair in itertools.product(every, every)
    }
    assert tried == len(costs) == 16
    assert kept == min(costs, key=costs.get)
    assert found == pytest.approx(costs[kept])


def test_by_its_outputs_is_the_choice_that_moves_them_least(mixture):
    model, ids = mixture
    kept = choosing.by_outputs(model, 3, ids)
    given = choosing.given_to(model, 1, ids)
    moved = {stay: (given.added(stay) - given.added(range(4))).norm() for stay in choosing.subsets(model, 3)}
    assert kept[1] == min(moved, key=moved.get)


def test_training_runs_experts_as_their_class_does(mixture):
    model, _ = mixture
    experts = choosing.mixtures_of(model)[0].experts
    rows, places = torch.randn(9, 192), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    found = []
    for forward in (type(experts).forward, training._at_once):
        experts.zero_grad()
        out = forward(experts, rows, places, weights)
        out.square().sum().backward()
        found.append((out, experts.gate_up_proj.grad, experts.down_proj.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_router_that_is_told_a_bias_runs_as_its_class_does(mixture):
    gate = choosing.mixtures_of(mixture[0])[0].gate
    torch.nn.init.normal_(gate.weight)
    hidden = torch.randn(9, 192)
    expected = gate(hidden)
    routers.give_bias(gate, torch.ones(4))  # the same for all, which changes no share
    logits, weights, places = gate(hidden)
    assert torch.allclose(logits, expected[0] + 1, atol=1e-5)
    assert torch.allclose(weights, expected[1], atol=1e-6)
    assert torch.equal(places, expected[2])
    routers.Move.named("scales and bias", gate).carry_out(gate)
    assert torch.equal(gate(hidden)[0], logits)


def test_a_router_that_was_moved_is_moved_back(mixture):
    """Where only a scale or a bias is wrong, that is found, and seen on tokens that are held out."""
    gate = choosing.mixtures_of(mixture[0])[0].gate
    torch.nn.init.normal_(gate.weight, std=0.1)
    rows, outputs = torch.randn(200, 192), torch.randn(4, 200, 8)
    for name, wrong in (("scale", routers.Move(torch.tensor([0.7]))), ("bias", routers.Move(bias=torch.randn(4)))):
        router = routers.Router(gate, rows, outputs, torch.zeros(200, 8), torch.arange(200) % 4 == 3)
        residual = router.added(wrong.scores(router)) - router.added(routers.Move().scores(router))
        assert routers.moved(routers.Router(gate, rows, outputs, residual, router.unseen), name) > 0.5
    assert routers.moved(router, "scales") == 0.0  # nothing is residual_cross


def test_routers_are_compared_on_one_choice_of_experts(mixture, monkeypatch, tmp_path):
    model, ids = mixture
    each = dict.fromkeys(training.KINDS, ids.repeat(3, 1))
    monkeypatch.setattr(routers, "data", lambda scratch: (training.Data({}, each, each), scratch))
    monkeypatch.setattr(routers, "trained", lambda *told: model)
    monkeypatch.setattr(routers, "_EPOCHS", 1)
    ways = ("repair", "repair > scales and bias > repair", "repair > by the loss")
    tries = routers.Tries(tmp_path, "tiny", 1, (0,), ways, (0.25,), tmp_path / "rows")
    found = list(routers.rows(tries))
    assert [len(row["losses"]) for row in found] == [27] * 3
    assert [len(row["gains"]) for row in found] == [0, 2, 0]
    monkeypatch.setattr(routers, "losses", None)
    assert list(routers.rows(tries)) == found
    assert "| 25% | repair |" in routers.table(found)
