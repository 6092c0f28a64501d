"""The k largest of many tensors against sorting, on everything that makes a threshold hard to find."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.selection import LazyScores, counts_kept_overall, keep_largest_overall
from support.selecting import by_sorting, check

HARD = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "all equal": lambda n, g: torch.full((n,), 0.25),
    "two values": lambda n, g: (torch.rand(n, generator=g) < 0.3).float(),
    "sorted": lambda n, g: torch.arange(n, dtype=torch.float32),
    "reversed": lambda n, g: -torch.arange(n, dtype=torch.float32),
    "denormals": lambda n, g: torch.randint(0, 1000, (n,), generator=g).float() * 1e-45,
    "signed zeros": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, 0.0, -0.0),
    "infinities": lambda n, g: (
        torch.randn(n, generator=g).masked_fill(torch.rand(n, generator=g) < 0.4, -torch.inf)
        + torch.where(torch.rand(n, generator=g) < 0.1, torch.inf, 0.0).nan_to_num(posinf=3e38)
    ),
    "mostly zeros": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.05),
    "few values": lambda n, g: torch.randint(0, 7, (n,), generator=g).float(),
    "one in a million": lambda n, g: torch.zeros(n).index_fill_(0, torch.tensor([n // 2]), 1.0),
}


@pytest.mark.parametrize("kind", HARD)
def test_hard_inputs(kind, path):
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 700, 0, 2900, 64]
    tensors = {
        f"t{i}": HARD[kind](size, generator) for i, size in enumerate(sizes) if size or kind != "one in a million"
    }
    total = sum(tensor.numel() for tensor in tensors.values())
    for kept in (0, 1, 2, total // 10, total // 2, total - 1, total):
        check(tensors, kept)


@settings(max_examples=60)
@given(
    tensors=st.lists(
        st.lists(st.floats(allow_nan=False, width=32) | st.sampled_from([0.0, -0.0, 1.0]), max_size=40),
        min_size=1,
        max_size=4,
    ),
    share=st.floats(0, 1),
    doubles=st.booleans(),
)
def test_any_floats(tensors, share, doubles):
    named = {f"t{i}": torch.tensor(values, dtype=torch.float64 if doubles and i % 2 else torch.float32)
             for i, values in enumerate(tensors)}  # fmt: skip
    check(named, round(share * sum(map(len, tensors))))


def test_a_threshold_between_the_numbers_of_a_narrower_type(path):
    """0.1 in float64 is no float32: comparing after rounding would tie it with float32(0.1)."""
    third = torch.tensor([0.1], dtype=torch.float32).double()
    tensors = {
        "narrow": torch.tensor([0.1] * 100, dtype=torch.float32),
        "wide": torch.cat([third, third + 1e-12, third - 1e-12]).repeat(40),
        "half": torch.tensor([0.1, 0.2, 65504.0], dtype=torch.float16),
        "brain": torch.tensor([0.1, 3e38], dtype=torch.bfloat16),
        "whole": torch.tensor([0, 1, 2**40]),
    }
    total = sum(tensor.numel() for tensor in tensors.values())
    for kept in range(0, total + 1, 7):
        check(tensors, kept)


def test_strides_and_scalars(path):
    base = torch.randn(8, 6, 10, 12)
    tensors = {
        "transposed": base[0, 0].t(),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "every other": base[:, :, ::2, ::3],
        "expanded": torch.randn(5, 1, 7).expand(5, 9, 7),
        "scalar": torch.tensor(0.3),
        "empty": torch.zeros(0, 3),
        "column": base[:, 0, 0, 0],
        "flipped": torch.randn(700).flip(0).unsqueeze(0).t(),
    }
    total = sum(tensor.numel() for tensor in tensors.values())
    for kept in (1, total // 3, total - 5):
        check(tensors, kept)


def test_large_enough_for_threads_and_a_sample():
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(1_500_000, generator=generator), "b": torch.randn(1300, 1000, generator=generator).t()}
    for kept in (5, 1_234_567, 2_799_999):
        check(tensors, kept)
    scores = LazyScores(tensors, torch.abs, elementwise=True)
    check({name: tensor.abs() for name, tensor in tensors.items()}, 777_777, scores)


def test_among(path):
    generator = torch.Generator().manual_seed(2)
    tensors = {"a": torch.randn(900, generator=generator), "b": torch.randn(30, 40, generator=generator)}
    tensors["a"][5] = torch.nan  # a removed weight may be anything
    among = {"a": torch.rand(900, generator=generator) < 0.6, "b": torch.rand(30, 40, generator=generator) < 0.1}
    among["a"][5] = False
    alive = sum(int(mask.sum()) for mask in among.values())
    dead = {name: tensor.masked_fill(~among[name], -torch.inf) for name, tensor in tensors.items()}
    for kept in (1, alive // 2, alive):
        found = keep_largest_overall(tensors, kept, among=among)
        expected = by_sorting(dead, kept)
        assert all(torch.equal(found[name], expected[name]) for name in tensors)
    found = keep_largest_overall(tensors, alive + 50, among=among)
    assert all(torch.equal(found[name], among[name]) for name in tensors)
    numbers = {name: mask.to(torch.float16) for name, mask in among.items()}
    assert counts_kept_overall(tensors, alive, among=numbers) == {n: int(m.sum()) for n, m in among.items()}


def test_nan_is_named(path):
    tensors = {"fine": torch.randn(1000), "conv.weight": torch.randn(1000)}
    for position in (0, 500, 999):
        tensors["conv.weight"] = torch.randn(1000).index_fill_(0, torch.tensor([position]), torch.nan)
        for kept in (0, 1, 1000, 2000):
            with pytest.raises(ValueError, match=r"conv\.weight: a score is NaN"):
                keep_largest_overall(tensors, kept)
    with pytest.raises(ValueError, match="NaN"):
        keep_largest_overall({"a": torch.ones(1000).index_fill_(0, torch.tensor([3]), torch.nan)}, 10)
