"""Queries and keys of attention that is scaled by their width lose width, and compute what they did."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from secateur.allocation import by_name, uniform
from secateur.coupling import find_coupling
from secateur.shrinking import plans_of, shrink, verify_shrunken
from secateur.shrinking.apply import carry_out

X = torch.randn(2, 5, 12)


class Attention(nn.Module):
    """Attention over four heads of eight; each test says how queries, keys and values are made."""

    def __init__(self, outputs=96):
        super().__init__()
        self.heads = 4
        self.made = nn.Linear(12, outputs)
        self.out = nn.Linear(32, 12)

    def forward(self, x):
        q, k, v = self.parts(x)
        mixed = scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def parts(self, x):
        return [self.split(each) for each in self.made(x).chunk(3, -1)]


class Interleaved(Attention):
    def parts(self, x):
        return self.made(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


class Apart(Attention):
    def parts(self, x):
        made, bias = self.made.weight, self.made.bias
        return [self.split(linear(x, *each)) for each in zip(made.chunk(3), bias.chunk(3), strict=True)]


class Normalized(Attention):
    def __init__(self):
        super().__init__()
        self.q_gain, self.k_gain = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8) + 0.5)

    def parts(self, x):
        q, k, v = super().parts(x)
        return rms_norm(q, (q.shape[-1],), self.q_gain), rms_norm(k, (k.shape[-1],), self.k_gain), v


class Rotated(Attention):
    """Values are made apart: their width need not be that of two equal halves."""

    def __init__(self):
        super().__init__(64)
        self.value = nn.Linear(12, 32)

    def parts(self, x):
        q, k = (self.split(each) for each in self.made(x).chunk(2, -1))
        first, second = q.chunk(2, -1)
        return q * 0.8 + torch.cat((-second, first), -1) * 0.6, k, self.split(self.value(x))


class Shared(Attention):
    """Queries and keys are the same: scaling the one would scale the other."""

    def __init__(self):
        super().__init__(64)

    def parts(self, x):
        q, v = (self.split(each) for each in self.made(x).chunk(2, -1))
        return q, q, v


class Bounded(Attention):
    def parts(self, x):
        q, k, v = super().parts(x)
        return q.tanh(), k, v


@pytest.mark.parametrize("make", [Attention, Interleaved, Apart, Normalized])
def test_widths_leave_and_nothing_changes(make):
    model = make()
    original = copy.deepcopy(model)
    shrink(model, X, 0.5, target="units", allocate=uniform)
    (plan,) = plans_of(model)
    widths = len(plan.tensors["made.weight"][1][0])
    assert model.heads == 2
    assert widths == 3 * 2 * 4  # all of queries, keys and values, at half of the heads and half of the widths
    assert {factor for *_, factor in plan.scales} == {0.5**0.5}
    verify_shrunken(original, model, X)


def test_widths_of_rotated_queries_leave_in_both_halves():
    model = Rotated()
    original = copy.deepcopy(model)
    shrink(model, X, 0.5, target="units", allocate=uniform)
    assert (model.made.out_features, model.value.out_features, model.heads) == (2 * 2 * 4, 2 * 4, 2)
    verify_shrunken(original, model, X)


@pytest.mark.parametrize("make", [Shared, Bounded])
def test_widths_stay_where_no_weight_can_make_up(make):
    model = make()
    coupling = find_coupling(model, X)
    assert [group.size for group in coupling.groups] == [4]  # the heads; values are of equal width, as chunks
    assert "attention is scaled by the width of a head" in coupling.frozen["made.weight", 0]


def test_the_shrunken_model_is_the_masked_one():
    """By hand: all without two places of each head, divided by the root of what the width was."""
    model = Attention()
    masked = copy.deepcopy(model)
    shrink(model, X, 0.25, target="units", verify=False, allocate=by_name({"made.weight": 0.0}, otherwise=uniform))
    (plan,) = plans_of(model)
    gone = torch.ones(96, dtype=torch.bool)
    gone[torch.from_numpy(plan.tensors["made.weight"][1][0])] = False
    assert gone.sum() == 3 * 4 * 2
    with torch.no_grad():
        masked.made.weight[gone] = 0
        masked.made.bias[gone] = 0
    torch.testing.assert_close(model(X), masked(X))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    model = Attention().to(dtype)
    before = model.made.weight.detach().clone()
    shrink(model, X.to(dtype), 0.5, target="units", allocate=uniform)
    (plan,) = plans_of(model)
    kept = torch.from_numpy(plan.tensors["made.weight"][1][0])
    expected = before[kept].float()
    expected[kept < 32] *= torch.tensor(0.5).sqrt()
    assert torch.equal(model.made.weight, expected.to(dtype))


def test_a_plan_that_scales_what_is_not_there(tmp_path):
    model = shrink(Attention(), X, 0.5).model
    (plan,) = plans_of(model)
    plan.scales.append(("out.weight", 7, plan.scales[0][2], 0.5))
    fresh = Attention()
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match=r"the plan scales entries of out\.weight that it does not make smaller"):
        carry_out(fresh, plan, None)
    assert all(torch.equal(before[name], each) for name, each in fresh.state_dict().items())


def test_heads_stay_by_default_while_widths_can_leave():
    assert shrink(Attention(), X, 0.5).model.heads == 4
    assert shrink(Attention(), X, 0.5, allocate=uniform).model.heads < 4
    # with one of eight widths left the heads would be 5 % of the weights
    assert shrink(Attention(), X, 0.96).model.heads < 4


class Encoder(nn.Module):
    """torch's own layers, whose width is the heads times the width of a head."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 5)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.last(self.layers(self.first(x)))


def test_torch_s_own_layers_lose_the_width_of_the_stream():
    model = Encoder()
    original = copy.deepcopy(model)
    shrink(model, X, 0.5, target="units", round_to=1)
    attention = model.layers.layers[1].self_attn
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (16, 4, 4)
    assert tuple(attention.in_proj_weight.shape) == (48, 16)
    assert model.layers.layers[0].linear1.out_features == 32
    verify_shrunken(original, model, X)


def test_a_list_that_other_models_hold_is_not_changed():
    sizes = [4, 8]

    class Listed(Attention):
        def __init__(self):
            super().__init__()
            self.sizes = sizes

        def split(self, x):
            return x.view(*x.shape[:2], self.sizes[0], -1).transpose(1, 2)

    model = shrink(Listed(), X, 0.5, target="units", allocate=uniform).model
    assert model.sizes[0] == 2
    assert sizes == [4, 8]
