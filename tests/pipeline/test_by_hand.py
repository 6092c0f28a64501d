"""Published formulas on a 3×4 matrix, worked out by hand; and one test an error message."""

import itertools
import math

import pytest
import torch

from secateur import NM, Block, Channels, Rows, Unstructured, criteria, make_masks, schedules
from secateur.allocation import check_sparsity, erk, everywhere, uniform
from secateur.evidence import VOCABULARY, needs

W = torch.tensor([[1.0, -4.0, 0.5, 2.0], [3.0, -0.25, 6.0, -1.5], [-5.0, 0.75, -2.5, 0.1]])


def kept(mask):
    return mask.int().tolist()


def test_lamp_by_hand():
    scores = criteria.lamp(torch.tensor([[1.0, -2.0], [2.0, 4.0]]))
    # ascending squares 1, 4, 4, 16; of the two equal weights the first counts as the larger
    assert torch.allclose(scores, torch.tensor([[1 / 25, 4 / 20], [4 / 24, 1.0]], dtype=torch.float64))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # two ways to sort, one order
        weight = torch.randn(7, 9).mul(3).round().to(dtype)
        order = torch.sort(weight.abs().reshape(-1), descending=True, stable=True).indices
        assert torch.equal(criteria._descending(weight.abs().reshape(-1)), order)
    tiny = torch.tensor([1e-30, 2e-30], dtype=torch.float32)
    assert torch.allclose(criteria.lamp(tiny), torch.tensor([0.2, 1.0], dtype=torch.float64))


def test_lamp_never_empties_a_layer_first():
    masks = make_masks({"large": 100 * torch.randn(50, 50), "small": 0.001 * torch.randn(5, 5)}, 0.98,
                       criterion=criteria.lamp, allocate=everywhere)  # fmt: skip
    assert masks["small"].any()
    assert masks["large"].any()


def test_erk_by_hand():
    scores = {"a": torch.rand(10, 20), "b": torch.rand(40, 10, 3, 3), "c": torch.rand(5, 4)}
    raw = {"a": 30 / 200, "b": 56 / 3600, "c": 9 / 20}
    total = 200 + 3600 + 20
    left = total - round(0.9 * total)
    counts = erk(scores, 0.9, Unstructured())
    assert sum(counts.values()) == left
    # c would be more than dense: it is dense, and the rest is shared again
    assert counts["c"] == 20
    scale = (left - 20) / (30 + 56)
    assert abs(counts["a"] - scale * raw["a"] * 200) < 1
    assert abs(counts["b"] - scale * raw["b"] * 3600) < 1
    assert erk(scores, 0.0, Unstructured()) == {"a": 200, "b": 3600, "c": 20}
    assert erk(scores, 1.0, Unstructured()) == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("pattern", [Unstructured(), Rows(), Block(2, 2), Channels()], ids=str)
@pytest.mark.parametrize("allocate", [everywhere, erk], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.77, 0.9, 1.0])
def test_totals_are_exact(pattern, allocate, sparsity):
    torch.manual_seed(0)
    weights = {"a": torch.randn(32, 17), "b": 5 * torch.randn(16, 8, 3, 3), "c": 0.1 * torch.randn(20, 30)}
    masks = make_masks(weights, sparsity, pattern=pattern, allocate=allocate)
    tables = [pattern.pool(mask.float()) for mask in masks.values()]
    units = sum(table.numel() for table in tables)
    assert sum(int(table.sum()) for table in tables) == units - round(sparsity * units)


def test_everywhere_keeps_some_of_every_tensor():
    weights = {"strong": 100 + torch.rand(1000), "weak": torch.rand(10), "zero": torch.zeros(10)}
    masks = make_masks(weights, 0.9)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"strong": 100, "weak": 1, "zero": 1}
    assert masks["zero"].tolist() == [True] + [False] * 9

    def freely(scores, sparsity, pattern):
        return everywhere(scores, sparsity, pattern, min_kept=0)

    masks = make_masks(weights, 0.9, allocate=freely)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"strong": 102, "weak": 0, "zero": 0}
    assert not any(mask.any() for mask in make_masks(weights, 1.0).values())


def test_uniform_rounds_within_each():
    assert uniform({"a": torch.rand(5), "b": torch.rand(3, 7)}, 0.5, Unstructured()) == {"a": 3, "b": 11}
    assert uniform({"b": torch.rand(3, 7)}, 0.5, Rows()) == {"b": 3}


@pytest.mark.parametrize("make", [schedules.linear, schedules.cubic, schedules.cosine, schedules.exponential])
def test_schedules(make):
    schedule = make(0.9, initial=0.2, begin=10, end=110)
    values = [schedule(step) for step in range(200)]
    assert values[:11] == [0.2] * 11
    assert values[110:] == [0.9] * 90, "the target is hit exactly"
    assert all(after > before for before, after in itertools.pairwise(values[10:111]))
    assert make(0.9, begin=5, end=5)(5) == 0.9
    assert make(0.2, initial=0.2, end=5)(3) == pytest.approx(0.2)
    assert make(0.1, initial=0.6, end=10)(5) == pytest.approx(sorted([0.1, make(0.1, initial=0.6, end=10)(5), 0.6])[1])


def test_cubic_is_zhu_and_guptas():
    schedule = schedules.cubic(0.8, initial=0.1, begin=0, end=100)
    for step in range(101):
        assert schedule(step) == pytest.approx(0.8 + (0.1 - 0.8) * (1 - step / 100) ** 3)
    assert schedules.exponential(0.75, end=2)(1) == pytest.approx(0.5)


def test_needs():
    assert needs(criteria.magnitude) == ()
    assert needs(torch.abs) == ()
    assert needs(lambda weight, *, grad, input_norm, power=2: weight) == ("grad", "input_norm")
    with pytest.raises(TypeError, match="colour") as caught:
        needs(lambda weight, *, colour: weight)
    assert all(word in str(caught.value) for word in VOCABULARY)


def test_a_criterion_receives_the_evidence_it_names():
    def wanda(weight, *, input_norm):
        return weight.abs() * input_norm

    evidence = {"w": {"input_norm": torch.tensor([1.0, 0.1, 10.0, 1.0]), "grad": torch.ones(3, 4)}}
    mask = make_masks({"w": W}, 0.75, pattern=Rows(), allocate=uniform, criterion=wanda, evidence=evidence)["w"]
    assert kept(mask) == [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    with pytest.raises(TypeError, match="w: the criterion asks for input_norm"):
        make_masks({"w": W}, 0.5, criterion=wanda)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_sparsity(math.nan), "got nan"),
        (lambda: check_sparsity(True), "got True"),
        (lambda: check_sparsity(80), "For 80 percent write 0.8"),
        (lambda: check_sparsity("0.5"), "got '0.5'"),
        (lambda: check_sparsity(torch.tensor(0.5)), r"Pass a Python number: float\(sparsity\)"),
        (lambda: criteria.ln_norm(W, n=0), "positive and finite"),
        (lambda: schedules.linear(1.5, end=3), "final is a sparsity"),
        (lambda: schedules.cubic(0.5, initial=-1, end=3), "initial is a sparsity"),
        (lambda: schedules.cubic(0.5, begin=4, end=3), "0 <= begin <= end"),
        (lambda: schedules.exponential(1, end=3), "never reaches sparsity 1"),
        (lambda: make_masks({}, 0.5), "there are no weights"),
        (lambda: make_masks({"w": W}), "needs a sparsity"),
        (lambda: make_masks({"w": W}, 0.6, pattern=NM(2, 4)), "removes 0.5 of the weights, not 0.6"),
        (lambda: make_masks({"layer.3.weight": torch.zeros(10, 30)}, pattern=NM(2, 4)), r"layer\.3\.weight: 2:4 needs"),
        (lambda: make_masks({"a": W, "b": W}, 0.98), "leaves 0 of 24 units, too few for 1 in each of 2 tensors"),
        (lambda: make_masks({"w": W * math.nan}, 0.5), "w: a score is NaN"),
        (lambda: make_masks({"w": W * math.nan}, pattern=NM(2, 4)), "w: .*a score is NaN"),
        (lambda: make_masks({"w": W * math.nan}, 0.5, pattern=Rows()), "w: .*a score is NaN"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
