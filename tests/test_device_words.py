"""Every word and every function of the drop-in, on a device that is not the CPU: its laws, and what the CPU gives.

Law: on the stand-in scores, masks and counts are the CPU's bit for bit, and stay on the device.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as of_torch

from secateur import (
    Pruner,
    Rows,
    Unstructured,
    allocation,
    criteria,
    env,
    make_masks,
    oneshot,
    prune,
    regrowth,
    schedules,
    solvers,
    sparsify,
)
from support import laws
from support.device import CPU, DEVICES, distance, let_go, on_device
from tests.prune.test_against_torch import call_alike, run

each_device = pytest.mark.parametrize("device", DEVICES)
standin_only = pytest.mark.parametrize("device", [name for name in DEVICES if name == "standin"])
SPARSITIES = (0.0, 0.5, 0.9, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _no_longer():
    yield
    let_go()


def same(found, wanted, device):
    """Bit for bit on the stand-in, where the CPU computes; within rounding elsewhere."""
    assert found.device.type == device.type
    if device.type == "standin":
        assert torch.equal(found.cpu(), wanted)
    elif wanted.dtype != torch.bool:
        torch.testing.assert_close(found.cpu(), wanted)


def drawn(shape, dtype):
    """Many equal ones, stored the other way round, or channels last."""
    w = torch.randn(shape, dtype=torch.float64).mul(2).round().div(2).to(dtype)
    return w.mT.contiguous().mT if w.dim() == 2 else w.contiguous(memory_format=torch.channels_last)


def by_laws(device):
    turn = itertools.count()
    for criterion in laws.CRITERIA:
        for shape, dtype in zip([(16, 32), (16, 32, 1, 2)] * 2, laws.DTYPES, strict=True):
            weight = drawn(shape, dtype)
            evidence = laws.evidence_for(criterion, weight)
            there = {word: each.to(device) for word, each in evidence.items()}
            found = []
            for each, known in ((weight.to(device), there), (weight, evidence)):
                torch.manual_seed(5)
                found.append(criterion(each, **known))
            same(*found, device)
            laws.scores_are_sound(criterion, weight.to(device))
        for pattern in laws.PATTERNS:
            at = next(turn)
            weight = drawn([(16, 32), (16, 32, 1, 2)][at % 2], laws.DTYPES[at // 2 % 4])
            sparsity, found = SPARSITIES[at % 4], []
            for each in (weight.to(device), weight):
                torch.manual_seed(5)
                found.append(laws.counts_are_exact(pattern, criterion, each, sparsity))
            same(*found, device)
    for pattern in laws.PATTERNS:
        weight = drawn((16, 32), torch.float32).to(device)
        laws.masks_nest(pattern, criteria.magnitude, weight, 0.25, 0.75)
        laws.same_seed_same_mask(pattern, criteria.random, weight, 0.5)


@pytest.mark.filterwarnings("ignore:.* scores the weights of one output")
@each_device
def test_criteria_and_patterns_obey_the_laws(device):
    on_device(device, by_laws)


def by_allocations(device):
    shapes = {"model.layers.0.up": (48, 32), "model.layers.0.down": (32, 48), "model.layers.1.up": (64, 32)}
    shapes |= {"model.layers.1.down": (32, 64), "head": (300, 400)}  # which is looked at in pieces
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    halves = allocation.by_name({"head": 0.95, "*.up": allocation.uniform}, otherwise=allocation.erk)
    words = ["everywhere", "uniform", "erk", "owl", "progression", allocation.above(0.5), halves]
    for (word, pattern), sparsity in zip(
        itertools.product(words, (Unstructured(), Rows())), itertools.cycle((0.5, 0.93)), strict=False
    ):
        how = {"pattern": pattern, "allocate": allocation.parse(word)}
        found = []
        for each in (device, CPU):
            here = {name: weight.to(each) for name, weight in weights.items()}
            first = make_masks(here, 0.3, pattern=pattern)
            found.append(make_masks(here, sparsity, within=first, **how))
        for name in weights:
            same(found[0][name], found[1][name], device)


@each_device
def test_allocations_within_earlier_masks(device):
    on_device(device, by_allocations)


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels.to(outputs.device))


def by_criteria(device):
    for word in sorted({*criteria._words()} - {"movement", "soft_movement"}):  # which a Pruner gathers

        def verb(each, word=word):
            model = env._convolutions(each)
            sparsify(model, 0.5, criterion=word, batches=env._images(2), loss=loss)
            return model.state_dict()

        assert distance(device, verb) <= (0 if device.type == "standin" else 1e-6), word


@each_device
def test_criteria_of_data(device):
    on_device(device, by_criteria)


def by_solvers(device):
    rounding = solvers.with_rounding("sparsegpt")
    for solver in ("wanda", "dsnot", "sparsegpt", "alps", solvers.with_refit("ria"), rounding):

        def verb(each, solver=solver):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))).to(each)
            oneshot(model, [torch.randn(32, 16) for _ in range(2)], 0.5, solver=solver)
            return model.state_dict()

        # sums in another order alone
        assert distance(device, verb) <= 1e-6, solver


@each_device
def test_solvers(device):
    on_device(device, by_solvers)


PRUNERS = {
    "movement": {"criterion": "movement"},
    "soft movement": {"criterion": "soft_movement", "allocate": allocation.above(0.4)},
    "n:m": {"pattern": "2:4"},
    "rigl": {"regrow": regrowth.rigl()},
    "set": {"regrow": regrowth.sparse_evolutionary_training()},
    "sr-ste": {"regrow": regrowth.sr_ste(), "pattern": "2:4"},
    "held": {"regrow": regrowth.held()},
    "random": {"criterion": "random"},
    "cubic": {"schedule": schedules.cubic(0.8, end=1.0)},
}


def by_training(device):
    for name, how in PRUNERS.items():

        def verb(each, how=how):
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(each)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            how = dict(how)
            wanted = how.pop("schedule", None if ":" in how.get("pattern", "") else 0.75)
            pruner = Pruner(model, optimizer, wanted, total_steps=8, every=2, verbose=False, **how)
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(4, 16).to(each)).square().mean().backward()
                optimizer.step()
            state = copy.deepcopy(pruner.state_dict())
            pruner.load_state_dict(state)
            return model.state_dict() | {f"mask of {key}": mask for key, mask in pruner.masks.items()}

        assert distance(device, verb) <= (0 if device.type == "standin" else 1e-5), name


@each_device
def test_what_a_pruner_takes(device):
    on_device(device, by_training)


# ------------------------------------------------------------------------------------------------------- the drop-in


class Largest(prune.BasePruningMethod):
    PRUNING_TYPE = "global"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > 0.1)


def taken(p, layer, mask):
    """Each function and class of a package, one after the other: ``(name, what it left)``."""
    w, both = "weight", [(layer, "weight"), (layer, "bias")]
    calls = {
        "custom_from_mask": lambda: p.custom_from_mask(layer, w, mask),
        "CustomFromMask": lambda: p.CustomFromMask.apply(layer, w, mask),
        "identity": lambda: p.identity(layer, w),
        "Identity": lambda: p.Identity.apply(layer, "bias"),
        "l1_unstructured": lambda: p.l1_unstructured(layer, w, 0.3, importance_scores=layer.weight.detach().square()),
        "L1Unstructured": lambda: p.L1Unstructured.apply(layer, "bias", 3),
        "random_unstructured": lambda: p.random_unstructured(layer, w, 50),  # drawn where the weight is
        "RandomUnstructured": lambda: p.RandomUnstructured.apply(layer, w, 0.05),
        "ln_structured": lambda: p.ln_structured(layer, w, 3, n=2, dim=0),
        "LnStructured": lambda: p.LnStructured.apply(layer, w, 1, float("inf"), 1),
        "random_structured": lambda: p.random_structured(layer, w, 1, dim=1),
        "RandomStructured": lambda: p.RandomStructured.apply(layer, w, 1, 0),
        "global_unstructured": lambda: p.global_unstructured(both, p.L1Unstructured, amount=0.1),
        "is_pruned": lambda: p.is_pruned(layer),
        "PruningContainer": lambda: copy.deepcopy(next(iter(layer._forward_pre_hooks.values()))),
        "remove": lambda: p.remove(layer, w),
    }
    for name, call in calls.items():
        torch.manual_seed(1)
        call()
        left = layer.state_dict() | {"product": layer.weight.detach()}
        yield name, {key: each.clone() for key, each in left.items()}


def own(layer, mask):
    """What torch's does not have."""
    prune.custom_from_masks({(layer, "weight"): mask})
    Largest.apply(layer, "weight")
    yield "custom_from_masks and BasePruningMethod", layer.state_dict()
    pairs = [(layer, name) for name in prune.pruned_names(layer)]
    yield (
        "pruned_names and revive",
        {f"copied {name}": each for name, each in copy.deepcopy(layer).state_dict().items()},
    )
    prune.remove_all(pairs)
    yield "remove_all", layer.state_dict()


def drop_in(device):
    layer, known = nn.Conv2d(8, 16, 3), set()
    mask = torch.rand(layer.weight.shape) < 0.7
    there, mask_there = copy.deepcopy(layer).to(device), mask.to(device)
    ours = taken(prune, copy.deepcopy(there), mask_there)
    theirs = taken(of_torch, copy.deepcopy(there), mask_there)
    for (name, found), (_, wanted) in zip(ours, theirs, strict=True):
        known.add(name)
        assert found.keys() == wanted.keys(), name
        for key, tensor in found.items():
            assert tensor.device.type == device.type
            assert torch.equal(tensor, wanted[key]), (name, key)
    for (name, found), (_, wanted) in zip(own(there, mask_there), own(layer, mask), strict=True):
        known |= {*name.split(" and ")}
        for key, tensor in found.items():
            same(tensor, wanted[key], device)
    assert known == {*prune.__all__}


@each_device
def test_each_function_of_the_drop_in(device):
    on_device(device, drop_in)


def programs(device):
    assert [run(seed, device) for seed in range(60)].count("tie") <= 16
    for seed in range(150):
        call_alike(seed, device)


@standin_only
def test_random_programs_of_the_drop_in_leave_the_trace_that_torchs_leaves(device):
    on_device(device, programs)
