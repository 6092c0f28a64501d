"""How many units each tensor keeps: totals exact in every pattern, formulas by hand, within earlier masks, messages."""

import functools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import Block, Channels, Rows, Unstructured, criteria, make_masks
from secateur.allocation import above, by_name, dealt_out, erk, everywhere, owl, uniform

PATTERNS = [Unstructured(), Rows(), Block(2, 3), Block(16, 1), Channels(0), Channels(1)]
EXACT = {
    "everywhere": everywhere,
    "erk": erk,
    "owl": owl,
    "owl, wide": functools.partial(owl, outlier=1.5, spread=0.5),
    "by_name": by_name({"blocks.0.*": functools.partial(everywhere, min_kept=0), "none.0.*": erk}),
}


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (24, 10), "blocks.0.attn.weight": (16, 16), "blocks.0.conv.weight": (8, 4, 3, 3),
        "blocks.1.attn.weight": (16, 16), "blocks.1.conv.weight": (8, 4, 3, 3), "blocks.2.attn.weight": (32, 48),
        "none.0.weight": (4, 6), "head.weight": (5, 16),
    }  # fmt: skip
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["blocks.1.attn.weight"][:, :2] *= 30  # outliers
    return weights


def total(masks, pattern):
    return sum(int(pattern.pool(mask.double()).sum()) for mask in masks.values())


def units(weights, pattern):
    return sum(pattern.pool(weight).numel() for weight in weights.values())


# ---- laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocate", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@settings(max_examples=5)
@given(sparsity=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.floats(0, 0.97), seed=st.integers(0, 99))
def test_totals_are_exact(pattern, allocate, sparsity, seed):
    weights = network(seed)
    count = units(weights, pattern)
    kept = count - round(sparsity * count)
    if kept < len(weights) and sparsity < 1:
        return  # everywhere says so
    if allocate is EXACT["by_name"] and kept < 100:
        return  # rounding in the named tensors may leave the others nothing
    masks = make_masks(weights, sparsity, pattern=pattern, allocate=allocate)
    assert total(masks, pattern) == kept


@pytest.mark.parametrize("allocate", [everywhere, erk, owl], ids=lambda f: f.__name__)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@settings(max_examples=3)
@given(seed=st.integers(0, 99), fine=st.integers(2, 60), random=st.booleans())
def test_any_schedule_nests(pattern, allocate, seed, fine, random):
    """However finely sparsity grows, no rounding asks for a unit that is gone, and what is gone stays gone."""
    weights = network(seed)
    count = units(weights, pattern)
    criterion = criteria.random if random else criteria.magnitude
    masks = None
    for step in range(1, 6):
        sparsity = 0.3 + step / (fine * 10)
        later = make_masks(weights, sparsity, pattern=pattern, allocate=allocate, within=masks, criterion=criterion)
        assert total(later, pattern) == count - round(sparsity * count)
        assert masks is None or all(bool((masks[name] | ~later[name]).all()) for name in weights)
        masks = later


@pytest.mark.parametrize("allocate", [everywhere, erk, owl], ids=lambda f: f.__name__)
@pytest.mark.parametrize("pattern", [Rows(), Channels()], ids=str)
def test_within_masks_that_emptied_some_rows(pattern, allocate):
    """Rows that have little left give their share to others; the total stays exact."""
    weights = network()
    earlier = {name: torch.rand(weight.shape) < 0.9 for name, weight in weights.items()}
    earlier["embed.weight"][:20] = False
    earlier["blocks.0.attn.weight"][3, 1:] = False
    earlier["head.weight"][:] = False
    count = units(weights, pattern)
    masks = make_masks(weights, 0.5, pattern=pattern, allocate=allocate, within=earlier)
    assert total({name: pattern.spread(pattern.pool(mask.double()) > 0, mask.shape) for name, mask in masks.items()},
                 pattern) == count - round(0.5 * count)  # fmt: skip
    assert all(not bool((mask & ~earlier[name]).any()) for name, mask in masks.items())


@settings(max_examples=100)
@given(left=st.lists(st.integers(0, 9), min_size=2, max_size=12), share=st.floats(0, 1))
def test_dealt_out(left, share):
    kept = round(share * sum(left))
    counts = torch.as_tensor(dealt_out(kept, torch.tensor(left))).expand(len(left)).tolist()
    assert sum(counts) == kept
    assert all(count <= most for count, most in zip(counts, left, strict=True))
    for count, most in zip(counts, left, strict=True):
        assert count == most or count >= max(counts) - 1, "unequal only where a group has no more"


# ---- ERK -----------------------------------------------------------------------------------------------------------


def test_erk_is_the_formula_of_rigl():
    """Appendix of 1911.11134, as google-research/rigl computes it: saturated layers by and by, then one scale."""
    shapes = {
        "stem": (16, 3, 3, 3), "one": (16, 16, 3, 3), "two": (64, 32, 3, 3), "point": (64, 64, 1, 1), "fc": (10, 64),
    }  # fmt: skip
    scores = {name: torch.rand(shape) for name, shape in shapes.items()}
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / size[name] for name, shape in shapes.items()}
    for density in (0.5, 0.2, 0.1, 0.05, 0.02):
        dense = set()
        while True:
            budget = density * sum(size.values()) - sum(size[name] for name in dense)
            scale = budget / sum(raw[name] * size[name] for name in shapes if name not in dense)
            over = [name for name in shapes if name not in dense and raw[name] * scale > 1]
            if not over:
                break
            dense.add(max(over, key=raw.get))
        counts = erk(scores, 1 - density, Unstructured())
        assert sum(counts.values()) == sum(size.values()) - round((1 - density) * sum(size.values()))
        for name in shapes:
            expected = size[name] if name in dense else scale * raw[name] * size[name]
            assert abs(counts[name] - expected) < 1, (density, name)
        assert dense or density <= 0.1


def test_erk_by_hand():
    # Σ dims: 28 of 160 weights, 9 of 20; both saturated at first, and the third takes the rest
    scores = {"conv": torch.rand(8, 20), "small": torch.rand(5, 4), "large": torch.rand(100, 100)}
    # kept 1018 of 10180: scale = 1018 / 237 = 4.295; small would have 38.7 of 20 -> 20, scale = 998 / 228 = 4.377
    assert erk(scores, 0.9, Unstructured()) == {"conv": 123, "small": 20, "large": 875}
    # channels: kept 51 of 113 units, densities as before: 8 · 28/160, 5 · 9/20, 100 · 200/10000 = 1.4, 2.25, 2
    assert erk(scores, 62 / 113, Channels()) == {"conv": 8, "small": 5, "large": 38}
    # rows: the same counts as unstructured, dealt out
    rows = erk(scores, 0.9, Rows())
    assert rows["small"] == 4
    assert rows["conv"].tolist() == [16, 16, 16, 15, 15, 15, 15, 15]
    assert sorted(set(rows["large"].tolist())) == [8, 9]
    assert int(rows["large"].sum()) == 875


# ---- OWL -----------------------------------------------------------------------------------------------------------


def owl_as_published(blocks, sparsity, outlier, spread):
    """Densities of blocks, as the authors' code has them; shares in percent, which cancels."""
    shares = torch.tensor(
        [100 * float((scores > outlier * scores.mean()).double().mean()) for scores in blocks], dtype=torch.float64
    )
    shares = (shares - shares.min()) * (1 / (shares.max() - shares.min()) * spread * 2)
    return shares - shares.mean() + (1 - sparsity)


@pytest.mark.parametrize(("outlier", "spread", "sparsity"), [(5.0, 0.08, 0.7), (3.0, 0.15, 0.5), (7.0, 0.02, 0.6)])
def test_owl_is_the_authors_code_for_blocks_of_one_size(outlier, spread, sparsity):
    torch.manual_seed(1)
    scores = {}
    for block in range(6):
        for part, shape in {"q": (20, 20), "up": (40, 20), "down": (20, 40)}.items():
            scores[f"model.layers.{block}.{part}.weight"] = torch.randn(shape).abs() ** (1 + block / 2)
    joined = [
        torch.cat([scores[f"model.layers.{block}.{part}.weight"].reshape(-1) for part in ("q", "up", "down")])
        for block in range(6)
    ]
    density = owl_as_published(joined, sparsity, outlier, spread)
    counts = owl(scores, sparsity, Unstructured(), outlier=outlier, spread=spread)
    assert sum(counts.values()) == 12000 - round(sparsity * 12000)
    for name, kept in counts.items():
        assert abs(kept - float(density[int(name.split(".")[2])]) * scores[name].numel()) < 1
    assert float(density.max() - density.min()) == pytest.approx(2 * spread)


def test_owl_by_hand():
    """Two blocks of unequal size, and a tensor on its own."""
    quiet, loud, lone = torch.ones(100), torch.ones(300), torch.ones(50)
    loud[:30] = 91  # mean 10, above 5 times that: 10 %
    lone[:1] = 51  # mean 2, above 10: 2 %
    counts = owl({"h.0.a": quiet, "h.1.a": loud, "norm": lone}, 0.6, Unstructured(), spread=0.1)
    # tilts 0, .2, .04; shift c: 100 c + 300 (c + .2) + 50 (c + .04) = 180 kept -> c = 118 / 450
    shift = 118 / 450
    assert counts == {
        "h.0.a": round(100 * shift),
        "h.1.a": round(300 * (shift + 0.2)),
        "norm": round(50 * (shift + 0.04)),
    }


def test_owl_with_wanda_and_rows_as_published():
    torch.manual_seed(0)
    weights = {f"layers.{block}.{part}": torch.randn(12, 40) for block in range(4) for part in "ab"}
    evidence = {name: {"input_norm": torch.rand(1, 40) ** (1 + 3 * int(name[7]))} for name in weights}
    masks = make_masks(weights, 0.7, criterion=criteria.wanda, pattern=Rows(), allocate=owl, evidence=evidence)
    densities = [float(masks[f"layers.{block}.a"].double().mean()) for block in range(4)]
    assert sum(int(mask.sum()) for mask in masks.values()) == 3840 - round(0.7 * 3840)
    assert densities == sorted(densities)
    for mask in masks.values():
        rows = mask.sum(1)
        assert int(rows.max() - rows.min()) <= 1


# ---- by name -------------------------------------------------------------------------------------------------------


def test_by_name():
    scores = {"body.0.weight": torch.rand(60), "body.1.weight": torch.rand(40), "head.weight": torch.rand(20)}
    # the others make up what is missing, by one threshold
    counts = by_name({"head*": 0.0})(scores, 0.75, Unstructured())
    assert counts["head.weight"] == 20
    others = {name: scores[name] for name in scores if name != "head.weight"}
    assert {name: counts[name] for name in others} == everywhere(others, 0.9, Unstructured())
    # the first glob that matches decides, and the order of the tensors stays
    counts = by_name({"body.1.*": 0.25, "body.*": 0.5})(scores, 0.45, Unstructured())
    assert list(counts.items()) == [("body.0.weight", 30), ("body.1.weight", 30), ("head.weight", 6)]


def test_by_name_with_allocations_and_with_otherwise():
    weights = network()
    allocate = by_name({"blocks.*": erk, "head.*": 0.25}, otherwise=uniform)
    counts = allocate(weights, 0.8, Unstructured())
    blocks = {name: weight for name, weight in weights.items() if name.startswith("blocks")}
    assert {name: counts[name] for name in blocks} == erk(blocks, 0.8, Unstructured())
    assert counts["head.weight"] == 60
    assert counts["embed.weight"] == 48
    assert counts["none.0.weight"] == 5
    # along a schedule from 0 the named tensors may be ahead of the whole
    masks = make_masks(weights, 0.01, allocate=by_name({"head.*": 0.5}, otherwise=everywhere))
    assert int(masks["head.weight"].sum()) == 40


def test_by_name_through_the_pipeline_and_within_masks():
    weights = network()
    size = units(weights, Rows())
    allocate = by_name({"head.*": 0.0, "embed.*": 0.95})
    masks = make_masks(weights, 0.5, pattern=Rows(), allocate=allocate)
    later = make_masks(weights, 0.8, pattern=Rows(), allocate=allocate, within=masks)
    for found, sparsity in [(masks, 0.5), (later, 0.8)]:
        assert total(found, Rows()) == size - round(sparsity * size)
        assert bool(found["head.weight"].all())
        assert found["embed.weight"].sum(1).tolist() == [0] * 24  # 0.95 of 10 rounds to all
    assert all(bool((masks[name] | ~later[name]).all()) for name in weights)


# ---- above ---------------------------------------------------------------------------------------------------------


def test_above():
    scores = {"a": torch.tensor([[0.9, 0.2, 0.5, 0.1], [0.0, 0.1, 0.05, 0.2]]), "b": torch.tensor([[0.1, 0.3]])}
    assert above(0.15)(scores, 1.0, Unstructured()) == {"a": 4, "b": 1}
    counts = above(0.15)(scores, 1.0, Rows())
    assert counts["a"].tolist() == [3, 1]
    assert counts["b"] == 1
    assert above(5)(scores, 1.0, Rows()) == {"a": 0, "b": 0}
    assert above(5)(scores, 0.5, Rows()) == {"a": 2, "b": 1}
    assert above(-math.inf)(scores, 1.0, Unstructured()) == {"a": 8, "b": 2}
    assert above(0.2)(scores, 1.0, Channels(1)) == {"a": 2, "b": 1}  # of channels the means: .45, .15, .275, .15


# ---- messages ------------------------------------------------------------------------------------------------------

SCORES = {"layers.0.weight": torch.rand(8), "layers.1.weight": torch.rand(8), "head.weight": torch.rand(4)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: owl(SCORES, 0.5, Unstructured(), outlier=0), "outlier is a positive multiple of the mean"),
        (lambda: owl(SCORES, 0.5, Unstructured(), spread=1.5), r"spread lies in \[0, 1\]; got 5.0, 1.5"),
        (lambda: owl({"h.0.w": -torch.rand(4)}, 0.5, Unstructured()), r"h\.0\.w: scores that are negative on average"),
        (lambda: owl(SCORES, 50, Unstructured()), "For 50 percent write 0.5"),
        (lambda: erk(SCORES, 50, Unstructured()), "For 50 percent write 0.5"),
        (lambda: above(0.5)(SCORES, 50, Unstructured()), "For 50 percent write 0.5"),
        (lambda: above(math.nan), "not NaN"),
        (lambda: by_name({"*": 50}), "For 50 percent write 0.5"),
        (lambda: by_name({"*": 0.5})(SCORES, 50, Unstructured()), "For 50 percent write 0.5"),
        (lambda: by_name({"layer.*": 0.5})(SCORES, 0.5, Unstructured()),
         r"no tensor matches 'layer\.\*'; the closest names are layers\.1\.weight, head"),
        (lambda: by_name({"*": 0.5, "head.*": 0.1})(SCORES, 0.5, Unstructured()),
         r"'head\.\*' matches only tensors that an earlier glob took; put it before"),
        (lambda: by_name({"layers.*": 0.0})(SCORES, 0.5, Unstructured()),
         "the named tensors keep 16 units, and sparsity 0.5 keeps 10 in all: none are left for the others; name"),
        (lambda: by_name({"layers.*": 0.5})(SCORES, 0.6, Unstructured()),
         "the named tensors keep 8 units, and sparsity 0.6 keeps 8 in all: none are left"),
        (lambda: by_name({"layers.*": 0.75})(SCORES, 0.25, Unstructured()),
         "keep 4 units and the others have 4, fewer than the 15 in all that sparsity 0.25 keeps; name lower"),
        (lambda: by_name({"*": 0.5})(SCORES, 0.9, Unstructured()),
         "every tensor has a glob, and together they keep 10 of 20 units, where sparsity 0.9 keeps 2"),
        (lambda: make_masks(SCORES, 0.2, allocate=erk, within={"layers.0.weight": torch.zeros(8)}),
         "the model: the earlier masks keep fewer units"),
    ],
)  # fmt: skip
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_allocation_that_is_made_is_a_value():
    """It goes to another process, where it says the same counts and over what it ranks."""
    scores = {name: weight.abs() for name, weight in network().items()}
    for made, name, scope in (
        (by_name({"head.*": 0.0}), "by_name", "model"),
        (by_name({"head.*": 0.25}, otherwise=uniform), "by_name", "layer"),
        (above(1.5), "above", "model"),
    ):
        again = pickle.loads(pickle.dumps(made))
        assert again.compares == made.compares == scope
        assert again.__name__ == made.__name__ == name
        ours, theirs = (each(scores, 0.6, Unstructured()) for each in (again, made))
        assert {n: int(count) for n, count in ours.items()} == {n: int(count) for n, count in theirs.items()}
