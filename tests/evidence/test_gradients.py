"""Gradients, their squares, Hessian products and the flow: against torch's autograd on the same batches."""

import copy
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional

import secateur.prune as prune
from secateur import attach
from secateur.evidence import collect
from secateur.targets import find_targets
from support.evidence_models import Language, by_hand, close, cross_entropy, network, pairs


def test_gradients_are_means_over_batches():
    model, batches = network(), pairs()
    found = collect(model, batches, ["grad", "grad_sq"], loss=cross_entropy)
    first, second = by_hand(model, batches), by_hand(model, batches, power=2)
    assert list(found) == list(find_targets(model))
    for name, entry in found.items():
        assert list(entry) == ["grad", "grad_sq"]
        close(entry["grad"], first[name])
        close(entry["grad_sq"], second[name])


def test_hessian_product_is_that_of_the_explicit_hessian():
    model, batches = network(), pairs(2)
    found = collect(model, iter(batches), "hessian_grad", loss=cross_entropy)
    weights = {name: weight.detach() for name, weight in find_targets(model).items()}
    sizes = [weight.numel() for weight in weights.values()]

    def mean_loss(flat):
        parts = flat.split(sizes)
        values = {name: part.view_as(weights[name]) for name, part in zip(weights, parts, strict=True)}
        losses = [cross_entropy(torch.func.functional_call(model, values, x), y) for x, y in batches]
        return torch.stack(losses).mean()

    flat = torch.cat([weight.reshape(-1) for weight in weights.values()])
    gradient = torch.func.grad(mean_loss)(flat)
    expected = torch.autograd.functional.hessian(mean_loss, flat) @ gradient
    close(torch.cat([entry["hessian_grad"].reshape(-1) for entry in found.values()]), expected)


def test_hessian_product_by_hand():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    # loss = (w·x)²: g = 2(w·x)x, H = 2xx', Hg = 4(w·x)|x|²x; w·x = 5, |x|² = 10
    found = collect(layer, [torch.tensor([[-1.0, 3.0]])], "hessian_grad", loss=lambda y: y.square().sum())
    close(found["weight"]["hessian_grad"], 4 * 5 * 10 * torch.tensor([[-1.0, 3.0]]))
    found = collect(layer, [torch.ones(1, 2)], "hessian_grad", loss=torch.sum)
    assert found["weight"]["hessian_grad"].tolist() == [[0, 0]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(q, k, v))


def test_hessian_product_passes_fused_attention():
    torch.manual_seed(0)
    found = collect(Attention(), [torch.randn(2, 4, 8)], "hessian_grad", loss=lambda y: y.square().mean())
    assert all(entry["hessian_grad"].any() for entry in found.values())


def test_gradients_of_other_weights_are_never_held():
    model, batches = network(), pairs(2)
    held = []

    def forward(module, batch):
        out = module(batch[0])
        out.register_hook(lambda grad: held.append([p.grad is not None for p in module.parameters()]))
        module[0].weight.register_hook(lambda grad: held.append([p.grad is not None for p in module.parameters()]))
        return out

    weights = {"0.weight": model[0].weight}
    found = collect(model, batches, ["grad"], weights=weights, loss=cross_entropy, forward=forward)
    assert list(found) == ["0.weight"]
    assert held
    assert not any(map(any, held))
    close(found["0.weight"]["grad"], by_hand(model, batches)["0.weight"])


def test_sparse_gradients_arrive_dense():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    weights = {"0.weight": model[0].weight}
    found = collect(model, [torch.tensor([1, 1, 3])], "grad", weights=weights, loss=lambda y: y.square().sum())
    assert found["0.weight"]["grad"].any(1).tolist() == [False, True, False, True, False]


def test_an_optimizer_that_steps_in_the_backward_pass_does_not():
    model, batches = network(), pairs()
    fired = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    collect(model, batches, "grad", loss=cross_entropy)
    assert not fired
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    assert len(fired) == 6


def deep(layers=40, width=100):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def test_flow_is_the_gradient_of_the_absolute_network():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
    model[2].weight.data = torch.tensor([[-7.0, 8.0]])
    found = collect(model, [(torch.randn(9, 3), "never looked at")], "flow")
    assert found["0.weight"]["flow"].tolist() == [[7.0] * 3, [8.0] * 3]
    assert found["2.weight"]["flow"].tolist() == [[6.0, 15.0]]
    assert found["0.weight"]["flow"].dtype == torch.float64


def test_flow_through_forty_layers_needs_float64():
    model = deep()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data *= 4
    state = copy.deepcopy(model.state_dict())
    found = collect(model, [torch.randn(4, 100)], "flow")
    for entry in found.values():
        assert entry["flow"].isfinite().all()
        assert (entry["flow"] > 0).all()
    assert max(entry["flow"].max() for entry in found.values()) > torch.finfo(torch.float32).max
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    # the same in float32
    x = {name: tensor.abs() for name, tensor in state.items()}
    out = torch.func.functional_call(model.eval(), x, torch.ones(1, 100)).sum()
    assert not out.isfinite()


def test_flow_takes_token_ids_mappings_and_forwards_as_they_are():
    model = Language()
    batch = UserDict(input_ids=torch.tensor([[1, 2, 3], [4, 0, 0]]), labels=torch.zeros(2, 3, dtype=torch.long))
    head = find_targets(model, include="head.weight")  # of a vocabulary, which is no target unless it is asked for
    found = collect(model, iter([batch]), "flow", weights=head)
    again = collect(model, [batch], "flow", weights=head, forward=lambda m, b: m(b["input_ids"])["logits"])
    close(found["head.weight"]["flow"], again["head.weight"]["flow"])
    hidden = functional.linear(model.embed.weight[[1, 2, 3]].abs(), model.flat.weight.abs(), model.flat.bias.abs())
    close(found["head.weight"]["flow"], hidden.sum(0).double().expand(9, 4))
    with pytest.raises(TypeError, match="flow sums the model's outputs, and there is no tensor in a str"):
        collect(model, [batch], "flow", forward=lambda m, b: "words")


def test_flow_respects_attached_masks():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[1].weight.data = torch.tensor([[2.0, 3.0]])
    attach(model, {"1.weight": torch.tensor([[True, False]])})
    found = collect(model, [torch.randn(1, 3)], ["flow", "input_norm", "grad"], loss=torch.sum)
    assert set(found) == {"0.weight", "1.weight_orig"}
    assert found["0.weight"]["flow"].tolist() == [[2.0] * 3, [0.0] * 3]
    assert found["1.weight_orig"]["flow"][0, 1] == 0
    assert found["1.weight_orig"]["grad"][0, 1] == 0
    assert prune.is_pruned(model)
    assert model[1].weight.dtype == torch.float32
