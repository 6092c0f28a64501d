"""Watching a model: what is found is of all passes, what is frozen says why, and nothing changes."""

import copy
import functools
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.coupling import Axis, concatenated, find_coupling, leaves, rule
from secateur.coupling.operations import OPERATIONS
from secateur.coupling.trace import Trace
from support.traced import arguments, traced
from support.unchanged import is_unchanged, state_of


def network(width=9):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))


def test_several_inputs_and_modes_are_joined():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

        def forward(self, x, sort=False):
            x = F.relu(self.up(x))
            return self.down(x.sort(-1).values if sort else x)

    x = torch.randn(2, 4)
    assert find_coupling(Either(), x).groups
    assert not find_coupling(Either(), {"x": x}, more_inputs=[{"x": x, "sort": True}]).groups


@pytest.mark.long
def test_code_that_asks_for_values_is_followed_on_meta_as_well():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 176}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100, use_cache=False)

    def found(device, **more):
        with torch.device(device):
            model, inputs = LlamaForCausalLM(config), {"input_ids": torch.zeros(1, 7, dtype=torch.long)}
        more = {name: each.to(device) for name, each in more.items()}
        return {(group.name, group.size) for group in find_coupling(model, {**inputs, **more}).groups}

    mask = (torch.arange(7) > 1).long()[None]
    real, units = found("cpu", attention_mask=mask), {each for each in found("meta") if each[1] == 176}
    assert found("meta", attention_mask=mask) == real
    assert found("cpu") <= found("meta")  # where values are known some versions go a way in which less can leave
    assert len(units) == 2
    assert units <= real


def test_what_is_frozen_says_why():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.unused = nn.Linear(4, 12), nn.Linear(12, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.down(self.up(x).view(-1, 3, 4).flatten(1))

    coupling = find_coupling(Fixed(), torch.randn(2, 4))
    assert coupling.frozen["up.weight", 1] == "an input of the model"
    assert coupling.frozen["down.weight", 0] == "an output of the model"
    assert "a view to 3" in coupling.frozen["up.weight", 0]
    assert coupling.frozen["unused.weight", 0] == "not used in the forward pass"


@pytest.mark.parametrize("modes", [None, [False], [True]])
def test_nothing_changes(modes):
    """Also not what counts: buffers, modes, hooks, gradients, random numbers."""
    model = network()
    model[1].eval()
    model(torch.randn(5, 4)).sum().backward()
    state, random = state_of(model), torch.get_rng_state()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    gradients = [parameter.grad for parameter in model.parameters()]
    coupling = find_coupling(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), modes=modes)
    assert coupling.passes == [(0, training) for training in ([False, True] if modes is None else modes)]
    assert is_unchanged(model, state)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_mode_that_the_example_cannot_run_is_left_out_unless_it_was_asked_for():
    """A batch normalization cannot train on a batch of one."""
    model, x = network(), torch.randn(1, 4)
    assert find_coupling(model, x).passes == [(0, False)]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        find_coupling(model, x, modes=[True])


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_of_layers_has_a_group_for_each_width_between(seed):
    """Whatever the widths are; equal ones stay apart."""
    widths = torch.randint(2, 7, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
    coupling = find_coupling(model, torch.randn(2, widths[0]))
    found = [(group.name, group.size, set(group.members)) for group in coupling.groups]
    assert found == [
        (f"{at}.weight", width, {(f"{at}.weight", 0), (f"{at}.bias", 0), (f"{at + 2}.weight", 1)})
        for at, width in zip(range(0, 6, 2), widths[1:-1], strict=True)
    ]


def test_an_example_that_holds_nothing_says_so():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3, 8, 0\) holds nothing .*at least one sample"):
        find_coupling(model, torch.zeros(2, 3, 8, 0))


def test_an_error_of_the_model_is_the_callers():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            self.layer(x)
            raise KeyError("own")

    model = Fails()
    with pytest.raises(KeyError, match="own"):
        find_coupling(model, torch.ones(1, 2))
    assert not model.layer._forward_hooks
    assert model.training


@pytest.mark.parametrize("experts", [4, 40])
def test_experts_that_no_token_of_the_example_goes_to_are_watched_too(experts):
    """Of modules that are chosen between each has a width of its own, and all have the model's."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.inp, self.out = nn.Linear(5, experts), nn.Linear(3, 5), nn.Linear(5, 2)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5)) for _ in range(experts)
            )

        def forward(self, x):
            x = self.inp(x)
            made = torch.zeros_like(x)
            best, chosen = self.router(x).max(-1)
            for number in chosen.unique().tolist():
                made[chosen == number] = self.experts[number](x[chosen == number])
            return self.out(made * best[:, None])

    coupling = find_coupling(Listed(), torch.randn(7, 3))
    assert coupling.turns > 0
    assert not any("not used" in why for why in coupling.frozen.values())
    stream, *inside = coupling.groups
    assert len([name for name, _ in stream.members if name.startswith("experts.")]) == 3 * experts
    assert [group.name for group in inside] == [f"experts.{number}.0.weight" for number in range(experts)]


def test_a_choice_that_fails_is_none():
    """What other choices use is only known if the model takes them."""

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.up, self.down, self.other = (nn.Linear(a, b) for a, b in ((3, 2), (3, 6), (6, 2), (3, 6)))

        def forward(self, x):
            with torch.no_grad():
                chosen = self.router(x).add(torch.tensor([9.0, 0.0])).argmax(-1)
            if chosen.any():
                self.other(x)
                raise ValueError("not implemented")
            return self.down(self.up(x))

    coupling = find_coupling(Fails(), torch.randn(4, 3))
    assert coupling.turns == 0
    assert coupling.frozen["other.weight", 0] == "not used in the forward pass"
    assert coupling.multiply_adds({}) == 4 * (3 * 2 + 3 * 6 + 6 * 2)
    assert [group.name for group in coupling.groups] == ["up.weight"]


def test_sizes_that_einops_met_before_are_followed_all_the_same(monkeypatch):
    @functools.lru_cache
    def heads(sizes):
        rows, width = sizes
        return [rows, 2, width // 2]

    module = types.ModuleType("einops.einops")
    module._reconstruct_from_shape = heads
    monkeypatch.setitem(sys.modules, "einops.einops", module)

    class Rearranged(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

        def forward(self, x):
            x = self.up(x)
            return self.down(x.reshape(module._reconstruct_from_shape(tuple(x.shape))).flatten(1))

    model, x = Rearranged(), torch.randn(2, 4)
    model(x)
    assert [group.name for group in find_coupling(model, x).groups] == ["up.weight"]
    assert module._reconstruct_from_shape is heads


# What the trace does where there is no rule, or where rules do not reach: it freezes, and says why.


def test_a_rule_that_does_not_know_a_form_of_the_call_freezes_too(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "sinc", OPERATIONS["sinc"])

    @rule("sinc")
    def _(call):
        raise LookupError

    trace, _, free = traced(torch.sinc, arguments((3, 4)))
    assert not free
    assert trace.unknown == {"this form of sinc": 1}


def test_a_scripted_function_freezes_what_it_touches():
    scripted = torch.jit.script(nn.Linear(6, 4))
    (x,) = arguments((3, 6))
    _, _, free = traced(scripted, [x])
    assert not free


def test_functions_inside_vmap_freeze_the_tensors_outside():
    _, _, free = traced(lambda a: torch.vmap(torch.sin)(a), arguments((3, 4)))
    assert not free


def test_a_sum_of_segments_is_followed_through_a_layer():
    a, b = Axis(2), Axis(3)
    trace = Trace()
    x, w = arguments((4, 5), (6, 5))
    trace.declare(x, [Axis(4), concatenated([a, b])])
    trace.declare(w, [Axis(6), Axis(5)])
    with trace:
        F.linear(x, w)
    assert list(leaves(trace.dims(w)[1])) == [a, b]


def test_a_lazy_module_is_run_before():
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet; run the model once on an example before"):
        find_coupling(nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2)), torch.ones(1, 4))
