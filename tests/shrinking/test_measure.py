"""What a walk over the dense model says of units: the order in which they leave, and what their consumers lose."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.coupling import find_coupling
from secateur.models import InMemory, WeightView
from secateur.shrinking.costs import TiedGroups, by_tie
from secateur.shrinking.measure import Curve, Measured, Measuring, columns_of, counts_of
from secateur.solvers import Elimination
from support.families import make
from support.measured import Words, text, words
from support.stacks import data, stack
from support.unchanged import is_unchanged, state_of


def measured(model, batches, **options):
    """The coupling's groups by name, and what was measured of them."""
    coupling = find_coupling(model, batches[0])
    measuring = Measuring(coupling, coupling.groups, **options)
    InMemory(model, batches).walk(measuring)
    return {group.name: group for group in coupling.groups}, measuring.measured


def seen(model, module, batches):
    """What a module is given, (tokens, inputs), float64."""
    rows = []
    hook = module.register_forward_pre_hook(lambda _, given: rows.append(given[0].flatten(0, -2).double()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    return torch.cat(rows)


def test_nothing_changes():
    model = words()
    state = state_of(model)
    measured(model, text())
    assert is_unchanged(model, state)


def test_units_leave_in_the_order_of_what_least_squares_cannot_make_up_for():
    """First the one whose removal costs the outputs of its consumer least, after the best repair."""
    model = stack(layers=2)
    groups, found = measured(model, data(size=40), damping=1e-9)
    group = groups["layers.0.up.weight"]
    x = seen(model, model.layers[0].down, data(size=40))
    weight = model.layers[0].down.weight.double()
    costs = []
    for at in range(12):
        stay = [other for other in range(12) if other != at]
        there = torch.cat([x[:, stay], torch.ones(len(x), 1, dtype=x.dtype)], 1)  # a bias gives what is constant
        lost = x @ weight.T - there @ torch.linalg.lstsq(there, x @ weight.T).solution
        costs.append(lost.square().sum(0))
    stream = seen(model, model.layers[1].up, data(size=40))  # what the outputs become part of
    spread = stream.var(0, correction=0)
    shares = (torch.stack(costs) / spread / len(x)).mean(1).detach()
    assert int(found.scores[group.name].argmin()) == int(shares.argmin())
    assert found.curves[group.name](11) == pytest.approx(float(shares.min()), rel=0.01)
    assert found.consumers[group.name] == {"layers.0.down.weight"}


def test_scores_and_curves_are_those_of_ranks_and_losses():
    groups, found = measured(words(), text())
    for group in groups.values():
        if group.name not in found.scores:
            continue
        assert sorted(found.scores[group.name].tolist()) == list(range(1, group.size + 1))
        curve = found.curves[group.name]
        assert curve.counts[-1] == group.size
        assert curve(group.size) == pytest.approx(0, abs=1e-12)
        assert (np.diff(curve.losses) <= 0).all()
        assert np.isfinite(curve.losses).all()
        assert len(curve.counts) <= 2 + group.size


def test_a_batch_normalization_does_not_hide_that_others_can_take_over():
    """Its statistics are buffers, which hold the units as its weights do."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    with torch.no_grad():
        for each in (model[0].weight, model[0].bias):
            each[3:].copy_(each[:3])  # copies
    model.eval()
    groups, found = measured(model, [torch.randn(16, 1, 6, 6) for _ in range(2)])
    curve = found.curves[groups["0.weight"].name]
    assert curve(3) < 1e-3 < curve(2)


def test_a_stream_costs_what_all_its_consumers_lose():
    """Those in the blocks; each unit alone, since nothing holds all of them at once."""
    model = words()
    groups, found = measured(model, text())
    (stream,) = [group for group in groups.values() if group.size == 12 and len(group.members) > 8]
    inside = {f"blocks.{block}.{name}.weight" for block in range(2) for name in ("q", "k", "v", "up")}
    assert found.consumers[stream.name] == inside
    assert found.curves[stream.name](6) > found.curves[groups["blocks.0.up.weight"].name](10)


def test_units_of_which_nothing_is_known_cost_more_than_any_share():
    model = stack()
    coupling = find_coupling(model, data()[0])
    measuring = Measuring(coupling, coupling.groups)
    nothing = measuring.measured
    assert not nothing.scores
    for tie in by_tie(coupling.groups):
        tied = TiedGroups(tie, 1, {})
        assert nothing.loss(tied, tied.parts) == 0
        assert nothing.loss(tied, tied.parts - 1) > 1e3
        assert nothing.loss(tied, 1) > nothing.loss(tied, 2)


def test_what_is_kept_of_variances_multiplies_and_divergences_add_up():
    coupling = find_coupling(words(), text()[0])
    (tied,) = (TiedGroups(groups, 1, {}) for groups in by_tie(coupling.groups[:1]))
    axis = tied.groups[0].name

    def loss(of, slopes=None):
        curves = {axis: Curve(np.array([1, tied.groups[0].size]), np.array([of, 0.0]))}
        return Measured({}, curves, {}, slopes or {}).loss(tied, 1)

    assert loss(0.0) == 0
    assert loss(1e-3) == pytest.approx(1e-3, rel=1e-3)
    assert loss(0.3) + loss(0.4) == pytest.approx(loss(1 - 0.7 * 0.6))
    dear = [loss(each) for each in np.linspace(0, 3, 61)]
    assert (np.diff(dear, 2) >= -1e-9).all()  # it goes on straight where all of the variance is lost
    assert loss(0.9, {WeightView("w", 0, (1, 1), (1, 1)): torch.ones(1)}) == 0.9


def test_what_several_blocks_hold_is_not_measured():
    coupling = find_coupling(model := words(), text()[0])
    measuring = Measuring(coupling, coupling.groups, shared=frozenset(["blocks.0.down.weight"]))
    InMemory(model, text()).walk(measuring)
    assert "blocks.0.down.weight" not in measuring.targets
    assert not any("blocks.0.down.weight" in names for names in measuring.measured.consumers.values())
    assert any("blocks.1.down.weight" in names for names in measuring.measured.consumers.values())


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "t5"])
def test_of_every_family_the_units_of_mlps_are_measured(family):
    """Conv1D, experts in one tensor, an encoder and a decoder."""
    model = make(family)
    batch = {"input_ids": torch.randint(1, 64, (2, 12))} | (
        {"decoder_input_ids": torch.randint(1, 64, (2, 5))} if family == "t5" else {"use_cache": False}
    )
    coupling = find_coupling(model, batch)
    measuring = Measuring(coupling, coupling.groups)
    InMemory(model, [batch]).walk(measuring)
    consumers = set().union(*measuring.measured.consumers.values())
    wanted = {"gpt2": ".mlp.c_proj.weight", "t5": ".DenseReluDense.wo.weight"}
    if family in wanted:
        assert sum(name.endswith(wanted[family]) for name in consumers) >= 2
    assert any("attn" in name.lower() or "attention" in name.lower() for name in consumers)


def test_a_curve_lies_between_its_counts():
    curve = Curve(np.array([1, 3, 5]), np.array([4.0, 2.0, 0.0]))
    assert [curve(count) for count in (5, 4, 3, 1)] == [0.0, 1.0, 2.0, 4.0]


class Loud(Words):
    """One output of the stream is a thousand times as large as the others."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.embed.weight[:, 0] *= 1000


def test_what_a_loss_counts_is_a_share_of_the_variance():
    """So that an output whose variance is large does not decide alone."""
    torch.manual_seed(0)
    model, found = Loud().eval(), []

    class Looking(Measuring):
        def solve_stage(self, block, module, stage, met):
            for piece, its in met.items():
                if piece.name == "down.weight":
                    found.append(counts_of(piece.of(stage[piece.name]), its))
            return super().solve_stage(block, module, stage, met)

    coupling = find_coupling(model, text()[0])
    InMemory(model, text()).walk(Looking(coupling, coupling.groups))
    assert len(found) == 2
    for counts in found:
        assert counts[0] < 1e-3 * counts[1:].min()
        assert counts.isfinite().all()


def test_outputs_of_one_token_again_and_again_have_no_variance():
    """What rounding leaves of it would make a share of it anything."""
    found = []

    class Looking(Measuring):
        def solve_stage(self, block, module, stage, met):
            found.extend((counts_of(piece.of(stage[piece.name]), its), its.tokens) for piece, its in met.items())
            return super().solve_stage(block, module, stage, met)

    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    batches = [torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).expand(40, 8)]
    coupling = find_coupling(model, batches[0])
    InMemory(model, batches).walk(Looking(coupling, coupling.groups))
    assert found
    for counts, tokens in found:
        torch.testing.assert_close(counts, torch.full_like(counts, 1 / (len(counts) * tokens)))


def test_a_layer_that_gives_nothing_counts():
    """Outputs that are all 0 have no variance."""
    model = nn.Sequential(*stack(layers=2).layers)
    with torch.no_grad():
        model[1].down.weight.zero_()
        model[1].down.bias.zero_()
        model[1].up.weight.zero_()
    batches = [torch.zeros(6, 8)]
    groups, found = measured(model, batches)
    for curve in found.curves.values():
        assert np.isfinite(curve.losses).all()
    assert isinstance(Elimination(torch.zeros(2, 3), torch.zeros(3, 3)).loss, float)
    assert groups


# Which columns the units of a group are: by where a matrix lies in its parameter, however the code stores it.


def piece_of(parameter, name, view=None):
    """The matrix (outputs, inputs) that a view of a parameter is."""
    view = parameter if view is None else view
    return WeightView(
        name,
        view.storage_offset() - parameter.storage_offset(),
        tuple(view.shape),
        tuple(view.stride()),
    )


def found(model, inputs, name, view=None):
    """``{size of the group: its columns}``."""
    coupling = find_coupling(model, inputs)
    parameter = model.get_parameter(name)
    piece = piece_of(parameter, name, None if view is None else view(parameter))
    columns = columns_of(coupling, coupling.groups, name, piece, parameter)
    sizes = {group.name: group.size for group in coupling.groups}
    return {sizes[axis]: units for axis, units in columns.items()}


def each(count):
    return [[at] for at in range(count)]


class Transposed(nn.Module):
    """transformers' Conv1D: the weight is (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Queries, keys and values out of one matrix; three heads of width five, in a stream of width eight."""

    def __init__(self):
        super().__init__()
        self.heads, self.each = 3, 5
        self.enter = nn.Linear(4, 8)
        self.qkv, self.out = nn.Linear(8, 45, bias=False), nn.Linear(15, 8, bias=False)
        self.leave = nn.Linear(8, 2)

    def forward(self, x):
        x = self.enter(x)
        q, k, v = (part.unflatten(-1, (self.heads, self.each)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.leave(x + self.out(y))


class Experts(nn.Module):
    """Fused in one tensor of three dimensions, each (inputs, outputs) or (outputs, inputs)."""

    def __init__(self, turned):
        super().__init__()
        self.turned = turned
        self.up = nn.Parameter(torch.randn(3, 7, 4) if turned else torch.randn(3, 4, 7))
        self.down = nn.Parameter(torch.randn(3, 4, 7) if turned else torch.randn(3, 7, 4))

    def forward(self, x):
        up, down = (self.up.mT, self.down.mT) if self.turned else (self.up, self.down)
        x = x.expand(3, -1, -1)
        return torch.bmm(torch.bmm(x, up).relu(), down).sum(0)


def test_a_matrix_that_lies_turned():
    model = nn.Sequential(Transposed(4, 7), nn.GELU(), Transposed(7, 3))
    inputs = torch.zeros(2, 5, 4)
    assert found(model, inputs, "2.weight", lambda weight: weight.T) == {7: each(7)}
    assert found(model, inputs, "0.weight", lambda weight: weight.T) == {}
    strided = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))
    strided[2].weight = nn.Parameter(torch.randn(7, 3).T)
    assert not strided[2].weight.is_contiguous()
    assert found(strided, torch.zeros(2, 4), "2.weight") == {7: each(7)}


def test_heads_and_what_is_within_them():
    """Unit h of the heads has five columns side by side, and unit w of their width one in each head."""
    columns = found(Attention(), torch.randn(2, 6, 4), "out.weight")
    assert columns[3] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert columns[5] == [[at, at + 5, at + 10] for at in range(5)]
    assert set(columns) == {3, 5}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_experts_in_one_tensor(turned, number):
    """Each expert is a matrix of its own, and the hidden units of all are one group."""
    model, inputs = nn.Sequential(nn.Linear(5, 4), Experts(turned), nn.Linear(4, 2)), torch.randn(6, 5)
    columns = found(model, inputs, "1.down", lambda down: down[number] if turned else down[number].T)
    assert columns == {7: each(7)}
    columns = found(model, inputs, "1.up", lambda up: up[number] if turned else up[number].T)
    assert columns == {4: each(4)}


def test_inputs_that_were_joined():
    """Columns that belong to no unit of the group are nobody's."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.out = nn.Linear(4, 3), nn.Linear(4, 5), nn.Linear(12, 2)

        def forward(self, x):
            return self.out(torch.cat([self.one(x), x, self.two(x).relu()], -1))

    assert found(Joined(), torch.zeros(2, 4), "out.weight") == {3: [[0], [1], [2]], 5: [[at] for at in range(7, 12)]}
