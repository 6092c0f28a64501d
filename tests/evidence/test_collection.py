"""Collecting evidence leaves a model as it was, whatever the batches, losses and modes, and says what is wrong."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from secateur.evidence import collect
from secateur.support import loss_of, repeatable, run_batch, unchanged
from support.evidence_models import close, cross_entropy, network, pairs


def test_what_torchs_own_hooks_leave_behind_stays():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    weight = model[0].weight
    found = collect(model, pairs(), ["grad", "flow"], loss=cross_entropy)
    assert not found["0.weight_orig"]["flow"][model[0].weight_mask == 0].any()
    assert model[0].weight is weight


class Restless(nn.Module):
    """Everything that a forward pass can change."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("wide", torch.zeros(1).expand(4))

    def forward(self, x):
        self.seen = self.seen + 1
        random.random()
        np.random.random()  # noqa: NPY002
        return self.drop(self.norm(self.layer(x)))


def everything(model):
    return (
        [module.training for module in model.modules()],
        [(p.requires_grad, p.grad, None if p.grad is None else p.grad.clone(), p.clone()) for p in model.parameters()],
        [(id(b), b.clone()) for b in model.buffers()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002
    )


def assert_same(after, before):
    if isinstance(before, torch.Tensor):
        assert torch.equal(after, before)
    elif isinstance(before, list | tuple):
        for one, other in zip(after, before, strict=True):
            assert_same(one, other)
    else:
        assert after == before


def failing(*_):
    raise RuntimeError("stop here")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("loss", [cross_entropy, failing])
@pytest.mark.parametrize("words", [["grad", "input_norm"], ["hessian_grad", "flow"], ["grad_sq", "gram"]])
def test_the_model_is_as_it_was(train, loss, words):
    model = Restless()
    model.norm.eval()
    model.layer.bias.requires_grad_(False)
    model.layer.weight.grad = torch.ones(3, 6)
    before = everything(model)
    with contextlib.nullcontext() if loss is cross_entropy else pytest.raises(RuntimeError, match="stop here"):
        collect(model, pairs(), words, loss=loss, train=train)
    assert_same(everything(model), before)


def test_unchanged_puts_back_even_what_the_body_replaced():
    model = Restless()
    before = everything(model)
    with pytest.raises(KeyError), unchanged(model):
        model.norm.running_mean.fill_(3)
        model.norm.running_var = torch.full((3,), 7.0)
        model.eval().requires_grad_(False)
        model.layer.weight.grad = torch.zeros(3, 6)
        torch.rand(3)
        raise KeyError
    assert_same(everything(model), before)


def test_batches_of_every_kind():
    x = torch.ones(2, 3)
    model = nn.Linear(3, 1)
    for batch in (x, (x, "target"), [x], {"input": x}):
        assert torch.equal(run_batch(model, batch), model(x))
    assert torch.equal(run_batch(model, 5, lambda m, b: m(x) * b), model(x) * 5)
    for batch, what in ((3, "not a int"), ((), "not an empty tuple"), ("x", "not a str")):
        with pytest.raises(TypeError, match=f"a batch is a tensor.*{what}; pass forward="):
            run_batch(model, batch)


def test_losses_of_every_kind():
    weight = torch.ones(2, requires_grad=True)
    total = weight.sum()
    assert loss_of(total, None) is not None
    for outputs in ({"loss": total}, type("Output", (), {"loss": total}), total):
        assert loss_of(outputs, weight).item() == 2
    assert loss_of(weight, (0, 3, 4), lambda out, a, b: out.sum() * a * b).item() == 24
    assert loss_of(weight, {"labels": 5}, lambda out, batch: out.sum() * batch["labels"]).item() == 10
    assert loss_of(weight, weight, lambda out: out.sum().reshape(1, 1)).shape == ()


@pytest.mark.parametrize(
    ("outputs", "loss", "error", "message"),
    [
        (torch.ones(2, 3), None, TypeError, r"outputs \(Tensor\) hold no loss; pass loss="),
        ({"loss": None}, None, TypeError, r"outputs \(dict\) hold no loss"),
        (torch.ones(3), lambda out: out, TypeError, r"the loss is a tensor of shape \(3,\), not one number"),
        (torch.ones(3), lambda out: 2.0, TypeError, "the loss is a float, not one number"),
        (torch.ones(3), lambda out: out.sum() * torch.inf, ValueError, "the loss of batch 7 is inf"),
        (torch.ones(3), lambda out: out.sum() * torch.nan, ValueError, "the loss of batch 7 is nan"),
        (torch.ones(3), torch.sum, ValueError, "depends on no parameter"),
    ],
)
def test_messages_of_losses(outputs, loss, error, message):
    with pytest.raises(error, match=message):
        loss_of(outputs, torch.ones(1), loss, 7)


def test_generators_are_kept_only_if_they_must_be():
    generator = (batch for batch in pairs())
    assert len(repeatable(generator)) == 3
    batches = pairs()
    assert repeatable(batches) is batches


def test_compiled_models_run_uncompiled():
    model, batches = network(), pairs()
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    expected = collect(model, batches, ["grad", "input_norm", "flow"], loss=cross_entropy)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    found = collect(compiled, batches, ["grad", "input_norm", "flow"], loss=cross_entropy)
    close(found["_orig_mod.4.weight"], expected["4.weight"])
    inplace = copy.deepcopy(model)
    inplace.compile(backend=backend)
    close(collect(inplace, batches, ["grad", "input_norm"], loss=cross_entropy)["4.weight"]["grad"],
          expected["4.weight"]["grad"])  # fmt: skip
    assert not calls


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: collect(network(), pairs(), ["colour"]), TypeError, "this call asks for .* collects: colour"),
        (lambda: collect(network(), pairs(), "movement"), TypeError, "movement adds up over training steps.*a Pruner"),
        (lambda: collect(network(), [], "grad"), ValueError, "there are no batches"),
        (lambda: collect(network(), [torch.zeros(0, 6)], "gram"), ValueError, "hold no token and no sample"),
        (lambda: collect(network(), pairs(), "grad"), TypeError, "pass loss="),
        (lambda: collect(network(), [3], "flow"), TypeError, "pass forward="),
        (
            lambda: collect(network(), pairs(), "grad", weights={"w": torch.ones(2, 2)}),
            ValueError,
            r"w is no parameter of this Sequential; pass weights=find_targets\(model\)",
        ),
        (
            lambda: collect(Unused(), pairs(), "input_norm"),
            ValueError,
            r"unused.weight: .* never ran unused \(Linear\)",
        ),
        (
            lambda: collect(Unused(), pairs(), "grad", loss=cross_entropy),
            ValueError,
            "unused.weight: the loss of no batch depends on it",
        ),
        (lambda: collect(Unused(), pairs(), "flow"), ValueError, "unused.weight: the outputs do not depend on it"),
        (
            lambda: collect(Bare(), pairs(), "gram"),
            TypeError,
            r"weight belongs to \(Bare\), of which gram can't be gathered; leave it out with exclude=",
        ),
        (
            lambda: collect(nn.Conv2d(4, 4, 1, groups=2), pairs(), ["gram", "input_norm"]),
            TypeError,
            r"weight belongs to \(Conv2d\), of which gram can't",
        ),
        (
            lambda: collect(nn.Linear(2, 2), [torch.full((1, 2), torch.inf)], "input_norm"),
            ValueError,
            "weight: input_norm has entries that are NaN or infinite",
        ),
        (
            lambda: collect(network(), pairs(), "flow", forward=lambda m, b: torch.no_grad()(m)(b[0])),
            ValueError,
            "the outputs depend on no weight",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


# The words for evidence, and what a criterion names.


def test_a_criterion_names_what_is_collected():
    def score(weight, *, grad, input_norm):
        return weight * grad * input_norm

    found = collect(network(), pairs(), score, loss=cross_entropy)
    assert {tuple(entry) for entry in found.values()} == {("grad", "input_norm")}
    assert collect(network(), [], ["grad"], weights={}) == {}
    assert collect(network(), [], torch.abs) == {"0.weight": {}, "2.weight": {}, "4.weight": {}}


# Where a model holds its weights.


def test_two_parameters_over_one_memory_are_one_weight():
    model, batches = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)), pairs()
    tied = copy.deepcopy(model)
    tied[1].weight = tied[0].weight
    model.load_state_dict(tied.state_dict())
    model[1].weight = nn.Parameter(model[0].weight.data)
    words = ["grad", "grad_sq", "hessian_grad", "flow", "input_norm"]
    found, expected = (collect(each, batches, words, loss=cross_entropy) for each in (model, tied))
    assert list(found) == ["0.weight"]
    for word in words:
        close(found["0.weight"][word], expected["0.weight"][word])
    both = collect(model, batches, words, loss=cross_entropy, weights=dict(model.named_parameters()))
    assert all(both["1.weight"][word] is both["0.weight"][word] for word in words)
