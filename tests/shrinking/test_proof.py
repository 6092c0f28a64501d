"""Laws of the proof: what is wrong is refused on any model, and rounding is not taken for it."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from secateur import shrink, verify_shrunken
from secateur.coupling import find_coupling
from secateur.shrinking import proof
from secateur.shrinking import proof as comparison
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.proof import (
    BLIND,
    IncomparableError,
    Unsure,
    certain,
    compared,
    difference,
    differs,
    on_calm_probes,
    outputs,
    probe_of,
    would_show,
    wrong_groups,
)
from support.unchanged import is_unchanged, state_of

# hand-written models whose every slice has an effect; those of attention have a bias of keys that has none
SPOILT = [
    "mlp", "resnet_basic", "mobilenet_v2", "unet_bilinear", "lstm_two_layers", "gru_by_hand", "gqa_interleave",
    "res2net", "layer_norm_mlp",
]  # fmt: skip


class Encoder(nn.Module):
    """An LSTM over many steps, then a direction. With weights this large one unit in the last place becomes all."""

    def __init__(self, *, larger=1.0, width=24, steps=100):
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, width, 2, batch_first=True), nn.Linear(width, width)
        self.x = 0.1 * torch.randn(4, steps, 8)
        with torch.no_grad():
            for parameter in self.lstm.parameters():
                parameter.mul_(larger)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        found = self.linear(hidden[-1]).relu()
        return found / found.norm(dim=1, keepdim=True)


def chaotic():
    torch.manual_seed(0)
    model = Encoder(larger=24.0)
    return model, model.x


class Map(nn.Module):
    """``x -> 4 x (1 - x)``, which doubles what is rounded in every step, on weights of any size."""

    def __init__(self, steps=70):
        super().__init__()
        self.steps, self.up, self.down = steps, nn.Linear(4, 96), nn.Parameter(torch.randn(96) / 10)

    def forward(self, x):
        x = (self.up(x).tanh() * self.down).sum(-1).square()
        x = x / (1 + x)
        for _ in range(self.steps):
            x = 4 * x * (1 - x)
        return x


def half(coupling):
    return {group.name: np.arange(group.size) % 2 == 0 for group in coupling.groups}


def test_a_chaotic_model_is_proved_on_smaller_weights():
    model, x = chaotic()
    probe = probe_of(model)
    expected = outputs(probe, x)
    (move,) = comparison._moves(probe, expected, [lambda: outputs(probe, x)])
    assert move > 1e-3  # it is chaotic indeed
    original = copy.deepcopy(model)
    shrink(model, x, 0.2)
    assert model.lstm.hidden_size < original.lstm.hidden_size
    verify_shrunken(original, model, x)


def test_what_is_no_pair_of_models_is_one_line_and_nothing_changes():
    model, x = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(2, 4)
    small = shrink(copy.deepcopy(model), x, 0.5).model
    lazy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.LazyLinear(3))
    for original, example, error, said in (
        (0.5, x, TypeError, "two models are compared, and one is of type float"),
        (copy.deepcopy(model).to("meta"), x, ValueError, "0.weight is on the meta device"),
        (lazy, x, ValueError, "weights without a shape yet"),
        (model, torch.zeros(2, 5), ValueError, "the model does not run on the example"),
        (nn.Sequential(nn.Linear(4, 16)), x, ValueError, "does not fit|does not compute"),
    ):
        with pytest.raises(error, match=said):
            verify_shrunken(original, small, example)
    assert nn.parameter.is_lazy(lazy[2].weight)


class Found(nn.Module):
    """As detectors: what is too large to be a box is not returned."""

    def __init__(self):
        super().__init__()
        self.hidden, self.branch, self.boxes = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.hidden(x).relu()
        boxes = self.boxes(hidden + self.branch(hidden).relu())
        return boxes[boxes.abs().amax(1) < 0.05]


def test_where_random_weights_find_nothing_smaller_ones_are_looked_at():
    torch.manual_seed(0)
    model, example = Found(), torch.randn(8, 4)
    assert [len(proof.probe_of(model, calm)(example.double())) for calm in (1, 0.125)] == [0, 8]
    coupling = find_coupling(model, example)
    with pytest.raises(IncomparableError, match="returns no finite number"):
        proof._differs_without(proof.probe_of(model), 1.0, coupling, coupling.branches, [example])
    assert proof.right_branches(model, coupling, coupling.branches, [example]) == (
        {each: each for each in coupling.branches},
        {},
    )
    assert shrink(model, example, 0.5).got > 0.45


class Deep(nn.Module):
    """As detectors with a deep backbone: on random weights its numbers grow from layer to layer, until no box is in the
    picture; on weights that are a little smaller they vanish."""

    def __init__(self, depth=12, width=16):
        super().__init__()
        parts = [[nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()] for _ in range(depth)]
        self.layers = nn.Sequential(*(each for part in parts for each in part))
        self.boxes = nn.Linear(width, 3)
        with torch.no_grad():
            for each in self.layers[::3]:
                each.weight.mul_(4)
            self.boxes.weight.mul_(0.01)

    def forward(self, x):
        if self.training:
            raise ValueError("there are no targets.")
        boxes = 1 + self.boxes(self.layers(x))
        return boxes[((boxes > 0) & (boxes < 2)).all(1)]


def test_batch_normalizations_are_settled_where_a_deep_network_finds_nothing(monkeypatch):
    torch.manual_seed(0)
    model, example = Deep().eval(), torch.randn(8, 16)
    probe = proof.probe_of(model).eval()
    state = state_of(probe)
    assert not len(probe(example.double()))
    settled = proof._settled(copy.deepcopy(probe), example)
    assert len(settled(example.double())) == 8
    assert is_unchanged(probe, state)
    unlike = {name for name, each in settled.state_dict().items() if not torch.equal(each, probe.state_dict()[name])}
    assert unlike == {name for name, _ in probe.named_buffers() if "running_var" in name}
    original, made, calm = copy.deepcopy(model), proof.probe_of, []
    monkeypatch.setattr(proof, "probe_of", lambda model, by=1.0: calm.append(by) or made(model, by))
    assert shrink(model, example, 0.5).got > 0.45
    assert calm == [1, 1]
    verify_shrunken(original, model, example)


class Sampled(nn.Module):
    """As variational autoencoders: what the backward pass needs of ``exp`` is written over, in evaluation alone."""

    def __init__(self):
        super().__init__()
        self.hidden, self.mean, self.spread, self.out = (
            nn.Linear(*each) for each in ((4, 16), (16, 3), (16, 3), (3, 2))
        )

    def forward(self, x):
        hidden = self.hidden(x).relu()
        spread = (0.5 * self.spread(hidden)).exp()
        spread = torch.randn_like(spread) * spread if self.training else spread
        return self.out(spread.add_(self.mean(hidden)))


def test_code_that_has_no_backward_pass_is_compared_without_one():
    model, example = Sampled(), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.eval()(example).sum().backward()
    assert shrink(model, example, 0.5).got > 0.45


def test_what_can_be_compared_on_no_weights_is_said_to_be_so():
    torch.manual_seed(0)
    model, x = Map(), torch.randn(16, 4)
    state = state_of(model)
    with pytest.raises(IncomparableError, match="could not be compared with the original, which is no proof that"):
        shrink(model, x, 0.5)
    assert is_unchanged(model, state)
    small = shrink(copy.deepcopy(model), x, 0.5, verify=False).model
    with pytest.raises(IncomparableError, match="weights do by one unit in the last place"):
        verify_shrunken(model, small, x)
    calm = Map(steps=3)
    shrink(calm, x, 0.5)
    assert calm.up.out_features < 96


def test_what_rounding_moves_from_one_whole_number_to_another_is_no_difference():
    class Last(nn.Module):
        """The last bits of what is computed, as numbers."""

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3))

        def forward(self, x):
            x = self.body(x)
            return x, (x * 2.0**58).long() % 64

    said = "output 1 differs"  # a processor whose sums come out the same has nothing to say
    try:
        shrink(Last(), torch.randn(8, 4), 0.5)
    except IncomparableError as error:  # not the ValueError of something else that was computed
        said = str(error)
    assert "output 1 differs" in said


def wrong_slice(plan, tensors, draw):
    """The plan with one kept slice of one parameter taken from beside it; None where all of a dimension stay."""
    names = [name for name in plan.tensors if name in tensors]
    name = names[int(draw.integers(len(names)))]
    shape, cuts = plan.tensors[name]
    at = list(cuts)[int(draw.integers(len(cuts)))]
    gone = np.setdiff1d(np.arange(shape[at]), cuts[at])
    indices = cuts[at].copy()
    indices[int(draw.integers(len(indices)))] = draw.choice(gone)
    spoilt = {**plan.tensors, name: (shape, {**cuts, at: np.sort(indices)})}
    return Plan(spoilt, plan.numbers, plan.scales), f"{name}[{at}]"


def differs_without(coupling, kept, x):
    return lambda probe, calm: differs(probe, coupling, coupling.groups, kept, [x], calm)


@pytest.mark.parametrize("name", ["chaotic", *(each for each in zoo.names("hand") if each in SPOILT)])
def test_a_single_wrong_slice_is_refused(name, monkeypatch):
    """Refused as wrong, or as what cannot be compared; never let pass. Which groups it is, is not asked: the plan stays
    wrong whatever they are."""
    torch.manual_seed(0)
    model, x = chaotic() if name == "chaotic" else zoo.ZOO[name]()
    coupling = find_coupling(model, x)
    kept = half(coupling)
    draw = np.random.default_rng(0)
    for _ in range(6 if name == "chaotic" else 3):
        spoilt, where = wrong_slice(plan_of(model, coupling, kept), dict(model.named_parameters()), draw)
        monkeypatch.setattr(proof, "plan_of", lambda *_, spoilt=spoilt: spoilt)
        try:
            assert on_calm_probes(model, differs_without(coupling, kept, x)) is not None, where
        except IncomparableError:
            assert name == "chaotic", where


@pytest.mark.long
def test_a_wrong_slice_of_a_chaotic_model_is_found_on_calmer_weights(monkeypatch):
    """Not only not let pass: it is said that it is wrong, of every tensor."""
    model, x = chaotic()
    coupling = find_coupling(model, x)
    kept = half(coupling)
    right = plan_of(model, coupling, kept)
    for name, (shape, cuts) in right.tensors.items():
        for at, indices in cuts.items():
            wrong = np.sort(np.r_[indices[:-1], np.setdiff1d(np.arange(shape[at]), indices)[-1]])
            spoilt = Plan({**right.tensors, name: (shape, {**cuts, at: wrong})}, right.numbers)
            monkeypatch.setattr(proof, "plan_of", lambda *_, spoilt=spoilt: spoilt)
            assert wrong_groups(model, coupling, coupling.groups, kept, [x]), f"{name}[{at}]"


def test_weights_on_which_nothing_wrong_would_show_prove_nothing():
    """A long way through small weights: all that comes out is the last bias."""
    torch.manual_seed(0)
    layers = [part for _ in range(30) for part in (nn.Linear(8, 8), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(8, 2)), torch.randn(4, 8)
    coupling = find_coupling(model, x)
    kept = half(coupling)
    probe = probe_of(model, 0.02)
    with pytest.raises(IncomparableError, match="would not show"):
        proof.differs(probe, coupling, coupling.groups, kept, [x], 0.02)
    assert proof.differs(probe_of(model), coupling, coupling.groups, kept, [x]) is None


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


class ScaledByWidth(nn.Module):
    """The width gets into the values by a way that no trace sees: Python multiplies a float by any integer itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
        self.hidden, self.last = nn.Linear(3, 10), nn.Linear(10, 3)

    def forward(self, x):
        x = F.relu(self.up(x))
        return self.last(F.relu(self.hidden(self.down(x * (1.0 / x.shape[-1])))))


def test_what_no_rule_sees_the_proof_does():
    model, x = ScaledByWidth(), torch.randn(2, 4)
    shrink(model, x, 0.5, target="units")
    assert model.up.out_features == 12
    assert model.hidden.out_features == 5
    wrong = ScaledByWidth()
    original = copy.deepcopy(wrong)
    shrink(wrong, x, 0.5, target="units", verify=False)
    units = (wrong.up.out_features, wrong.down.out_features, wrong.hidden.out_features)
    assert sum(units) == 12  # of 25 units 12 or 13 leave: the smaller of two that are equally near
    assert units[0] < 12
    with pytest.raises(ValueError, match="does not compute what the original does: output 0 differs by"):
        verify_shrunken(original, wrong, x)


class Pooled(nn.Module):
    """A mean over the hidden units gates them; one over tokens is the result; a norm by hand is only a norm."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.up, self.down, self.gate = kind, nn.Linear(4, 12), nn.Linear(12, 3), nn.Linear(1, 1)

    def forward(self, x):
        x = self.up(x)
        mean = x.mean(-1, keepdim=True)
        if self.kind == "gate":
            x = x * self.gate(mean).sigmoid()
        elif self.kind == "norm":
            variance = (x - mean).pow(2).mean(-1)
            x = (x - mean) * torch.rsqrt(variance.unsqueeze(-1) + 1e-5)
        elif self.kind == "result":
            return self.down(x), mean
        return self.down(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gate", "a statistic over it is used by linear"), ("result", "a statistic over it is an output"), ("norm", None)],
)
def test_a_mean_that_is_more_than_a_norm_keeps_its_axis_whole(kind, reason):
    coupling = find_coupling(Pooled(kind), torch.randn(2, 4))
    if reason is None:
        (group,) = coupling.groups
        assert group.notes == ("mean over it",)
        model = Pooled(kind)
        original = copy.deepcopy(model)
        shrink(model, torch.randn(2, 4), 0.5, target="units")
        assert model.up.out_features == 6
        verify_shrunken(original, model, torch.randn(2, 4))
    else:
        assert not coupling.groups
        assert reason in coupling.frozen["up.weight", 0]


def test_verify_shrunken_leaves_both_as_they_are_and_knows_where_a_model_comes_from():
    original, x = small(), torch.randn(2, 4)
    shrunken = shrink(copy.deepcopy(original), x, 0.5).model
    states = state_of(original), state_of(shrunken)
    verify_shrunken(original, shrunken, x)
    assert is_unchanged(original, states[0])
    assert is_unchanged(shrunken, states[1])
    with pytest.raises(ValueError, match="was not made from the first"):
        verify_shrunken(original, small(7), x)
    twice = shrink(copy.deepcopy(shrunken), x, 0.5).model
    verify_shrunken(original, twice, x)
    verify_shrunken(shrunken, twice, x)


class NumbersOfPython(nn.Module):
    """As pools over regions of interest find the scale of a map: a tensor becomes a number of Python's."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        scale = 2 ** float(torch.tensor(0.3).log2().round()) + torch.tensor(2.0).__float__()
        return self.head(self.inner(x).relu() * scale)


def test_a_tensor_that_becomes_a_number_is_no_tensor_in_the_proof():
    done = shrink(NumbersOfPython(), torch.randn(2, 4), 0.5)
    assert done.model.inner.out_features == 8


class Averaging(NumbersOfPython):
    """Each step of training writes a new tensor to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        hidden = self.inner(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.head((hidden - self.mean).relu())


def test_a_buffer_that_training_replaces_is_put_back_in_the_proof():
    model = Averaging()
    before = model.mean
    done = shrink(model, torch.randn(2, 4), 0.5)
    assert done.model.mean is before
    assert done.model.mean.tolist() == [0] * 8


# ---- Laws of comparing: rounding is told from a difference, and what cannot be told is said to be so. ----


A = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def test_nothing_differs_from_itself():
    for one in (A, A.long(), A > 2, A + 1j, torch.full((2,), torch.inf), A.half()):
        words = difference([one], [one.clone()])
        assert words is None or "no finite number" in words
    assert difference([], []) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "0 tensors came out where 1 did before"),
        ([A.reshape(3, 2)], r"output 0 has shape \(3, 2\), it was \(2, 3\)"),
        ([A + 1e-4], "output 0 differs by 2e-05 of its largest number"),
        ([A / (A - 1)], "output 0 is not finite at other places"),
    ],
)
def test_a_difference_is_said_in_words(found, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(difference([A], found))


def test_what_a_unit_in_the_last_place_does_is_no_difference():
    model = nn.Linear(3, 2).double()
    expected = [model(A).detach()]

    def chaotic():
        weight = next(model.parameters())
        return [expected[0] + 1e14 * (weight - original).abs().sum().detach()]

    original = next(model.parameters()).detach().clone()
    off = [expected[0] * 1.01]
    assert type(compared(model, expected, off, [lambda: expected])) is str
    state = state_of(model)
    words = compared(model, expected, off, [chaotic])
    assert isinstance(words, Unsure)
    assert is_unchanged(model, state)
    with pytest.raises(IncomparableError, match="by one unit in the last place"):
        certain(words)
    assert certain("output 0 differs") == "output 0 differs"
    assert certain(None) is None


def test_probes_are_random_and_the_model_stays():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = state_of(model)
    probe, calm = probe_of(model), probe_of(model, 0.5)
    assert is_unchanged(model, state)
    for one, other, own in zip(probe.parameters(), calm.parameters(), model.parameters(), strict=True):
        assert one.dtype == torch.float64
        assert not torch.equal(one, own.double())
        torch.testing.assert_close(other, 0.5 * one)


def test_the_least_calm_probe_decides():
    asked = []

    def compare(probe, calm):
        asked.append(calm)
        if calm > 0.5:
            raise IncomparableError(str(calm))
        return calm

    assert on_calm_probes(nn.Linear(2, 2), compare) == asked[-1] <= 0.5
    assert asked == sorted(asked, reverse=True)

    def between(probe, calm):
        if not 0.8 < calm < 0.85:
            raise IncomparableError("rounding" if calm > 0.8 else BLIND)
        return calm

    assert on_calm_probes(nn.Linear(2, 2), between) > 0.8

    def never(*_):
        raise IncomparableError(BLIND)

    with pytest.raises(IncomparableError, match=f"no proof that it is wrong: {BLIND}; nor on smaller weights"):
        on_calm_probes(nn.Linear(2, 2), never)


def test_a_slice_that_has_no_effect_would_not_show():
    model = nn.Linear(3, 2, bias=False).double()
    plan = Plan({"weight": ((2, 3), {0: torch.arange(2).numpy()})}, [])
    assert would_show(model, plan, [lambda: [model(A).detach()]])
    assert not would_show(model, plan, [lambda: [A]])
    with torch.no_grad():
        model.weight[1] = model.weight[0]  # its neighbour's
    assert not would_show(model, plan, [lambda: [model(A).detach()]])


def test_what_the_slopes_clearly_say_is_not_run():
    """And what they say is small is: of weights that hardly reach the outputs."""
    torch.manual_seed(0)
    model, ran = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2)).double(), []

    def run():
        ran.append(1)
        return [model(A).detach()]

    plan = Plan({f"{at}.weight": (tuple(model[at].weight.shape), {0: torch.arange(2).numpy()}) for at in (0, 1)}, [])
    outputs(model, A, backward=True)
    assert would_show(model, plan, [run])
    assert len(ran) == 1
    with torch.no_grad():
        model[0].weight.mul_(1e-5)
        model[1].bias.fill_(1.0)
    model.zero_grad()
    outputs(model, A, backward=True)
    assert would_show(model, plan, [run])
    assert len(ran) == 4
