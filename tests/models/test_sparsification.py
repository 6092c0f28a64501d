"""One call, with data: the evidence of each round, nested masks, and nothing changed by a call that fails."""

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from secateur import NM, Channels, Pruner, Rows, attach, criteria, make_masks, prune, schedules, sparsify, sparsity_of
from secateur.allocation import everywhere, uniform
from secateur.evidence import collect
from secateur.pipeline import reestimate_batchnorm
from secateur.targets import find_targets

cross_entropy = functional.cross_entropy


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def convolutions(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def pairs(*shape, count=3, size=6):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(count)
    ]


def wanda(weight, *, input_norm):
    return weight.abs() * input_norm


def saliency(weight, *, grad):
    return (weight * grad).abs()


def synflow(weight, *, flow):
    return weight.abs() * flow


def same(state, other):
    return all(torch.equal(value, other[key]) for key, value in state.items())


@pytest.mark.parametrize("pattern", [None, Rows(), NM(2, 4), Channels()], ids=str)
@pytest.mark.parametrize("criterion", [wanda, saliency, synflow, criteria.lamp], ids=lambda each: each.__name__)
def test_with_batches_is_collect_and_make_masks(pattern, criterion):
    sparsity = None if isinstance(pattern, NM) else 0.5
    model, batches = network(), pairs(8)
    weights = find_targets(model)
    evidence = collect(model, batches, criterion, loss=cross_entropy)
    expected = make_masks(weights, sparsity, pattern=pattern, criterion=criterion, evidence=evidence)
    before = copy.deepcopy(model.state_dict())
    masks = sparsify(model, sparsity, pattern=pattern, criterion=criterion, batches=iter(batches), loss=cross_entropy)
    assert same(masks, expected)
    assert all(torch.equal(weight, before[name] * masks[name]) for name, weight in weights.items())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name not in weights)


@settings(max_examples=25)
@given(
    sparsity=st.sampled_from([0.0, 0.3, 0.75, 0.9]),
    rounds=st.integers(1, 5),
    criterion=st.sampled_from([saliency, synflow, wanda, criteria.lamp]),
    options=st.sampled_from([{}, {"pattern": Rows(), "allocate": uniform}, {"pattern": Channels()}]),
    earlier=st.booleans(),
)
def test_rounds_hit_the_target_exactly(sparsity, rounds, criterion, options, earlier):
    model = network()
    exact = options.get("allocate") is not uniform
    within = sparsify(model, sparsity / 2, **options) if earlier else None
    masks = sparsify(
        model, sparsity, criterion=criterion, batches=pairs(8), loss=cross_entropy, rounds=rounds, within=within,
        **options,
    )  # fmt: skip
    if within:
        assert all((mask <= within[name]).all() for name, mask in masks.items())
    if exact and "pattern" not in options:
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == total - round(sparsity * total)
        assert sparsity_of(model) == sparsity_of(masks)
    elif exact:
        units = sum(len(mask) for mask in masks.values())
        assert sum(int(mask.any(1).sum()) for mask in masks.values()) == units - round(sparsity * units)
    else:
        once = sparsify(network(), sparsity, **options)
        assert all(torch.equal(mask.sum(1), once[name].sum(1)) for name, mask in masks.items())


def test_rounds_are_the_exponential_schedule_on_what_is_left():
    by_hand, model, batches = network(), network(), pairs(8)
    within = None
    for sparsity in (1 - 0.1 ** (1 / 3), 1 - 0.1 ** (2 / 3), 0.9):
        evidence = collect(by_hand, batches, saliency, loss=cross_entropy)
        masks = make_masks(find_targets(by_hand), sparsity, criterion=saliency, evidence=evidence, within=within)
        within = masks
        for name, weight in find_targets(by_hand).items():
            weight.data *= masks[name]
    found = sparsify(model, 0.9, criterion=saliency, batches=iter(batches), loss=cross_entropy, rounds=3)
    assert same(found, masks)
    assert same(model.state_dict(), by_hand.state_dict())


def test_from_earlier_masks_on_the_rounds_go():
    seen = []

    def watched(scores, sparsity, pattern):
        seen.append(sparsity)
        return uniform(scores, sparsity, pattern)

    model = network()
    within = sparsify(model, 0.5, allocate=uniform)
    sparsify(model, 0.875, allocate=watched, within=within, rounds=2)
    assert seen == pytest.approx([0.75, 0.875])
    seen.clear()
    sparsify(network(), 0.75, allocate=watched, rounds=4)
    assert seen == pytest.approx([1 - 0.25 ** (k / 4) for k in range(1, 5)])
    sparsify(network(), 1.0, rounds=3)


def test_synflow_in_rounds_never_collapses_a_layer_where_one_shot_does():
    def deep():
        torch.manual_seed(0)
        layers = [each for _ in range(6) for each in (nn.Linear(20, 20, bias=False), nn.ReLU())]
        return nn.Sequential(nn.Linear(20, 200, bias=False), nn.ReLU(), nn.Linear(200, 20, bias=False), *layers)

    free = functools.partial(everywhere, min_kept=0)
    x = [torch.randn(1, 20)]
    once = sparsify(deep(), 0.99, criterion=synflow, batches=x, allocate=free)
    model = deep()
    rounds = sparsify(model, 0.99, criterion=synflow, batches=iter(x), allocate=free, rounds=30)
    assert not all(mask.any() for mask in once.values())
    assert all(mask.any() for mask in rounds.values())
    assert all((entry["flow"] * rounds[name]).any() for name, entry in collect(model, x, "flow").items())


def test_attached_masks_are_earlier_masks():
    model = network()
    attach(model, make_masks(find_targets(model), 0.5))
    earlier = {name: mask.bool() for name, mask in model.named_buffers()}
    masks = sparsify(model, 0.8, criterion=saliency, batches=pairs(8), loss=cross_entropy, rounds=3)
    for name, mask in masks.items():
        assert (mask <= earlier[name.replace("_orig", "_mask")]).all()
    assert sparsity_of(masks) == pytest.approx(0.8, abs=0.002)
    assert prune.is_pruned(model)


# batch normalization


@pytest.mark.parametrize("rounds", [1, 3])
def test_batch_normalization_is_re_estimated_if_there_is_data(rounds):
    batches = pairs(3, 10, 10)
    model, plain, untouched = convolutions(), convolutions(), convolutions()
    options = {"criterion": saliency, "loss": cross_entropy}
    sparsify(untouched, 0.7, batches=batches, reestimate=False, rounds=rounds, **options)
    assert not untouched[1].running_mean.any()
    masks = sparsify(model, 0.7, batches=iter(batches), rounds=rounds, **options)
    within = None
    for done in range(1, rounds + 1):  # each round's evidence passes through the statistics of the one before
        sparsity = 1 - 0.3 ** (done / rounds)
        within = sparsify(plain, sparsity, batches=batches, reestimate=False, within=within, **options)
        reestimate_batchnorm(plain, batches)
    assert same(masks, within)
    assert same(model.state_dict(), plain.state_dict())
    assert model[4].num_batches_tracked == 3
    assert model.training


# failures


def breaks_after(calls):
    count = itertools.count()

    def loss(outputs, targets):
        value = cross_entropy(outputs, targets)
        return value if next(count) < calls else value * torch.nan

    return loss


@pytest.mark.parametrize("calls", [0, 1, 4, 8])
def test_a_round_that_fails_leaves_the_model_as_it_was(calls):
    model = convolutions()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the loss of batch \d is nan"):
        sparsify(model, 0.9, criterion=saliency, batches=pairs(3, 10, 10), loss=breaks_after(calls), rounds=3)
    assert same(model.state_dict(), before)
    assert model[0].weight.grad.eq(1).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"criterion": saliency}, TypeError, "asks for grad; pass batches=, and for gradients loss="),
        ({"criterion": saliency, "batches": []}, ValueError, "there are no batches"),
        ({"criterion": saliency, "batches": pairs(8)}, TypeError, "pass loss="),
        ({"reestimate": True}, TypeError, "re-estimated from data; pass batches="),
        ({"rounds": 0}, ValueError, "1 to 1,000,000; got 0"),
        ({"rounds": 2.0}, ValueError, "1 to 1,000,000; got 2.0"),
        ({"rounds": True}, ValueError, "1 to 1,000,000; got True"),
        ({"rounds": 2**63}, ValueError, "1 to 1,000,000; got 9223372036854775808"),
        ({"rounds": 2, "sparsity": None}, ValueError, "2 rounds need a sparsity that grows"),
        ({"rounds": 2, "sparsity": None, "pattern": NM(2, 4)}, ValueError, r"2 rounds need .* NM\(n=2, m=4"),
        ({"rounds": 2, "sparsity": 90}, ValueError, "For 90 percent write 0.9"),
        ({"rounds": 2, "criterion": saliency, "evidence": {}}, ValueError, "serves one round; pass batches= instead"),
        ({"evidence": {}, "criterion": saliency}, TypeError, "0.weight: the criterion asks for grad"),
    ],
)
def test_messages(options, error, message):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        sparsify(model, **{"sparsity": 0.5, **options})
    assert same(model.state_dict(), before)


class Conv1D(nn.Module):
    """As transformers has it: the weight is stored (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_patterns_run_along_the_inputs_whatever_the_layout():
    torch.manual_seed(0)
    x = torch.randn(32, 8) * torch.arange(1, 9)
    for criterion in (criteria.magnitude, criteria.wanda, criteria.ria):
        for pattern, sparsity in ((NM(2, 4), None), (Rows(), 0.5)):
            stored = Conv1D(12, 8)
            linear = nn.Linear(8, 12)
            with torch.no_grad():
                linear.weight.copy_(stored.weight.t())
            trained = copy.deepcopy(stored)
            options = {"criterion": criterion, "pattern": pattern, "allocate": uniform, "batches": [x]}
            found = sparsify(stored, sparsity, **options)["weight"]
            assert torch.equal(found.t(), sparsify(linear, sparsity, **options)["weight"])
            assert found.shape == (8, 12)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            pruner = Pruner(trained, optimizer, schedules.constant(0.5), verbose=False, **options)
            assert torch.equal(pruner.masks["weight"], found)
