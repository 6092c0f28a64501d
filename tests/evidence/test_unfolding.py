"""What reaches the gates of recurrent layers, step by step, and convolutions in groups."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from secateur.evidence import collect, patches_of
from support.evidence_models import close

WORDS = ["gram", "input_norm", "input_mean", "input_var"]
CELLS = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}


def stepped(layer, x, way, number):
    """The inputs and the states before each step of one direction of a layer, by torch's cell; x: (time, inputs)."""
    suffix = f"_l{number}{'_reverse' if way else ''}"
    weight = getattr(layer, f"weight_ih{suffix}")
    cell = CELLS[type(layer)](weight.shape[1], layer.hidden_size, bias=layer.bias)
    for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if layer.bias else 2]:
        getattr(cell, key).data.copy_(getattr(layer, key + suffix))
    state = torch.zeros(1, layer.hidden_size)
    state = (state, state.clone()) if isinstance(layer, nn.LSTM) else state
    befores, afters = [], []
    for row in x.flip(0) if way else x:
        befores.append((state[0] if isinstance(state, tuple) else state)[0])
        state = cell(row[None], state)
        afters.append((state[0] if isinstance(state, tuple) else state)[0])
    both = torch.stack(befores), torch.stack(afters)
    return [part.flip(0) for part in both] if way else both


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@torch.no_grad()
def test_gates_see_the_states_that_a_loop_over_cells_makes(kind, packed):
    torch.manual_seed(0)
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True, bias=kind is not nn.GRU)
    x, lengths = torch.randn(3, 5, 3), [5, 4, 2] if packed else [5, 5, 5]
    given = pack_padded_sequence(x, lengths, batch_first=True) if packed else x
    found = collect(layer, [(given,)], WORDS, weights={n: p for n, p in layer.named_parameters() if p.dim() == 2})
    rows = {name: [] for name in found}
    for sequence, length in zip(x, lengths, strict=True):
        inner = sequence[:length]
        for number in range(2):
            outputs = []
            for way in range(2):
                suffix = f"_l{number}{'_reverse' if way else ''}"
                before, after = stepped(layer, inner, way, number)
                rows[f"weight_ih{suffix}"].append(inner)
                rows[f"weight_hh{suffix}"].append(before)
                outputs.append(after)
            inner = torch.cat(outputs, 1)
    assert len(found) == 8
    for name, parts in rows.items():
        tokens = torch.cat(parts)
        close(found[name]["gram"], tokens.T @ tokens, rtol=1e-4, atol=1e-5)
        close(found[name]["input_norm"], tokens.norm(dim=0)[None], rtol=1e-4, atol=1e-5)
        close(found[name]["input_mean"], tokens.mean(0)[None], rtol=1e-4, atol=1e-5)
        close(found[name]["input_var"], tokens.var(0, correction=0)[None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_see_each_step(kind):
    torch.manual_seed(0)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(2, 3)

        def forward(self, x):
            state, self.states = None, []
            for step in x.unbind(1):
                hidden = state[0] if isinstance(state, tuple) else state
                self.states.append(torch.zeros(len(x), 3) if hidden is None else hidden)
                state = self.cell(step, state)
            return state

    model, x = Loop(), torch.randn(4, 5, 2)
    found = collect(model, [x], ["gram"], weights=dict(list(model.named_parameters())[:2]))
    tokens, states = x.reshape(-1, 2), torch.cat(model.states).detach()
    close(found["cell.weight_ih"]["gram"], tokens.T @ tokens)
    close(found["cell.weight_hh"]["gram"], states.T @ states)


@pytest.mark.parametrize(
    ("dimensions", "settings"),
    [
        (1, {"padding": 1, "groups": 2}),
        (2, {"padding": "same", "dilation": 2, "groups": 4}),
        (2, {"stride": (2, 1), "padding": (0, 1)}),
        (3, {"padding": "valid"}),
    ],
)
@torch.no_grad()
def test_patches_times_the_weight_of_a_group_are_its_outputs(dimensions, settings):
    torch.manual_seed(0)
    layer = getattr(nn, f"Conv{dimensions}d")(4, 8, 3, bias=False, **settings)
    x = torch.randn(2, 4, *[7] * dimensions)
    function = getattr(functional, f"conv{dimensions}d")
    weight, groups = patches_of(
        function, (x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups), {}
    )
    assert weight is layer.weight
    outputs = layer(x).movedim(1, -1).reshape(-1, 8)
    parts = layer.weight.flatten(1).chunk(layer.groups)
    made = [torch.cat(list(group.rows())) @ part.T for group, part in zip(groups, parts, strict=True)]
    torch.testing.assert_close(torch.cat(made, 1), outputs, rtol=1e-4, atol=1e-5)
