"""The k largest of many tensors against sorting, on everything that makes a threshold hard to find."""

import ast
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import selection
from secateur.selection import (
    LazyScores,
    bracket,
    counts_kept_overall,
    in_threads,
    keep_largest,
    keep_largest_overall,
    overall,
    rows,
    sizes,
    sources,
)
from secateur.selection import bracket as digits
from secateur.selection import sizes as thresholds
from secateur.selection import sources as ranks
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


@pytest.mark.long
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


# The k largest of each row, and what is refused.


@settings(max_examples=60)
@given(
    groups=st.integers(0, 20),
    units=st.sampled_from([1, 2, 4, 7, 8, 9, 33]),
    seed=st.integers(0, 999),
    share=st.floats(0, 1),
    values=st.integers(1, 20),
    half=st.booleans(),
)
def test_rows(groups, units, seed, share, values, half):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(-values, values, (groups, units), generator=generator).float()
    table = table.bfloat16() if half else table
    kept = round(share * units)
    mask = keep_largest(table, kept)
    for row, keep in zip(table, mask, strict=True):
        assert torch.equal(keep, by_sorting({"row": row}, kept)["row"])
    counts = torch.randint(0, units + 1, (groups,), generator=generator)
    for row, keep, count in zip(table, keep_largest(table, counts), counts, strict=True):
        assert torch.equal(keep, by_sorting({"row": row}, int(count))["row"])
    assert torch.equal(keep_largest(table, torch.full((groups,), kept)), mask)


def test_rows_by_rank_on_a_device():
    table = torch.randint(0, 4, (500, 4)).float()
    ranked = rows._first_of_ranks_on_device(table, 2)
    assert torch.equal(ranked, keep_largest(table, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: keep_largest(torch.zeros(3), 1), r"shape \(groups, units\), not \(3,\)"),
        (lambda: keep_largest(torch.zeros(2, 3), 4), "can't keep 4 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), -1), "can't keep -1 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), torch.tensor([1, 9])), "can't keep 9 of 3 units"),
        (lambda: keep_largest(torch.zeros(2, 3), torch.tensor([1.0, 2.0])), "must be integers of shape"),
        (lambda: keep_largest(torch.full((2, 3), math.nan), 1), "NaN"),
        (lambda: keep_largest(torch.full((2, 30), math.nan), 1), "NaN"),
        (lambda: keep_largest(torch.full((1, 30), math.nan), 0), "NaN"),
        (lambda: keep_largest_overall({"a": torch.zeros(2)}, 3), "can't keep 3 of 2 entries"),
        (lambda: keep_largest_overall({"a": torch.zeros(2, dtype=torch.cfloat)}, 1), "a: complex scores"),
        (lambda: keep_largest_overall({"a": torch.zeros(2, device="meta")}, 1), "a: on the meta device"),
        (
            lambda: keep_largest_overall({"a": torch.zeros(2)}, 1, among={"a": torch.ones(3)}),
            r"a: a mask of shape \(3,\)",
        ),
        (lambda: LazyScores({"a": torch.zeros(2)}, lambda w: w[:1])["a"], r"returned scores of shape \(1,\)"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_are_integers_and_rows_may_be_empty():
    assert keep_largest(torch.zeros(5, 0), 0).shape == (5, 0)
    assert keep_largest(torch.randn(3, 9), np.int64(2)).sum(1).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="can't keep 99 of 9 units"):
        keep_largest(torch.zeros(1, 9), np.int64(99))
    with pytest.raises(TypeError, match="a count is an integer"):
        keep_largest(torch.zeros(3, 9), 1.5)


# Scores that are computed on access.


def test_lazy_scores_are_computed_piece_by_piece_only_when_elementwise(path):
    sizes = []

    def scored(weight):
        sizes.append(weight.numel())
        return weight.abs()

    weights = {"a": torch.randn(40, 50), "b": torch.randn(1000)}
    expected = {name: weight.abs() for name, weight in weights.items()}
    check(expected, 700, LazyScores(weights, scored, elementwise=True))
    if path != "plain":
        assert max(sizes) <= 192
    sizes.clear()
    check(expected, 700, LazyScores(weights, scored))
    assert set(sizes) == {2000, 1000}


def test_lazy_random_scores_are_the_same_at_every_access():
    torch.manual_seed(5)
    scores = LazyScores({"a": torch.zeros(7), "b": torch.zeros(7)}, lambda w: torch.rand(w.shape))
    first = {name: scores[name].clone() for name in scores}
    state = torch.get_rng_state()
    assert torch.equal(scores["a"], first["a"])
    assert torch.equal(scores["b"], first["b"])
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first["a"], first["b"])


def test_what_an_elementwise_function_returns_is_checked(path):
    def arrays(weight):
        return (abs(weight) * 100).astype(int) if isinstance(weight, np.ndarray) else (abs(weight) * 100).long()

    arrays.on_arrays = True
    weights = {"w": torch.randn(3000)}
    found = keep_largest_overall(LazyScores(weights, arrays, elementwise=True), 1000)
    assert torch.equal(found["w"], by_sorting({"w": (weights["w"].abs() * 100).long()}, 1000)["w"])
    scale = torch.ones((), requires_grad=True)
    check({"w": weights["w"].abs()}, 1000, LazyScores(weights, lambda w: w.abs() * scale, elementwise=True))
    for function, error, message in (
        (lambda w: w.mean(), ValueError, r"w: the criterion returned scores of shape \(\)"),
        (lambda w: w.reshape(-1, 1), ValueError, r"w: the criterion returned scores of shape \(\d+, 1\)"),
        (lambda _: [1.0], TypeError, "w: the criterion returned a list, not a tensor"),
        (lambda w: w * 1j, ValueError, "w: complex scores have no order"),
    ):
        for elementwise in (True, False):
            with pytest.raises(error, match=message):
                keep_largest_overall(LazyScores(weights, function, elementwise=elementwise), 1000)


# What selecting is made of: digits and sizes, sources and pieces, ranks and threads, and thresholds.


SIZES = {name for name in vars(sizes) if name.isupper()} - {"COMPLETE"}  # which is a bracket


def test_more_than_two_to_the_31_entries(monkeypatch):
    """Index arithmetic, on a tensor of stride 0 that occupies a few bytes, seen at its far end only."""
    rows = 2**31 // 1024 + 3
    huge = torch.tensor([[1.0, 3.0] * 512]).expand(rows, 1024)
    (source,), entries = sources.competitors({"huge": huge}, 0, None)
    assert entries == source.numel == rows * 1024
    sample = bracket.sample_of([source])
    assert set(sample.tolist()) == {1.0, 3.0}
    assert bracket.bracket_of(sample, 0.1) == (3.0, 3.0)
    far = 2**31 + 1024
    monkeypatch.setattr(sources, "segments_of", lambda tensor: iter([(far, huge[-2:].reshape(-1))]))
    source.mask = torch.from_numpy(np.empty(source.numel, dtype=np.bool_))  # pages are not touched until written
    ((at, segment),) = sources.segments_of(huge)
    found = bracket._classify(source, at, segment, 2.0, 4.0, collect=True, scratch=threading.local())
    assert (found.start, found.above, found.inside) == (far, 0, 1024)
    assert (found.offsets[0], found.offsets[-1]) == (1, 2047)
    assert far + 2047 == source.numel - 1
    assert set(found.values.tolist()) == {3.0}
    assert source.mask[far:].tolist() == [False, True] * 1024
    at = [at for at, _ in sources.pieces_of(source)]
    assert at[0] == far


@settings(max_examples=60)
@given(data=st.data())
def test_any_floats_by_digits(data):
    """The fall-back that shards use, on its own."""
    values = data.draw(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60))
    tensors = {"a": torch.tensor(values, dtype=torch.float64)}
    kept = data.draw(st.integers(1, len(values)))
    competing, _ = sources.competitors(tensors, kept, None)
    competing[0].mask = torch.empty(len(values), dtype=torch.bool)
    overall._write_masks(competing, digits.search_by_digits(competing, kept))
    assert torch.equal(competing[0].mask, by_sorting(tensors, kept)["a"])


def test_plain_tensors_are_here_and_count_here():
    tensor = torch.ones(2, 3)
    (source,), _ = sources.competitors({"w": tensor}, 1, None)
    assert ranks.as_dtensor(tensor) is None
    assert ranks.local_of(tensor) is tensor
    assert ranks.mesh_of([source]) is None
    assert ranks.counts_here(source, None) == 1
    assert ranks.totals([source], [5]) == [5]


def test_counts_are_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        assert ranks.integers([1, 2]).tolist() == [1, 2]


def test_nobody_takes_a_size_by_value():
    """``from sizes import PIECE`` would keep the old value where a test sets another."""
    for path in sorted(Path(selection.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "secateur.selection.sizes":
                assert not SIZES & {alias.name for alias in node.names}, path.name
            if isinstance(node, ast.Name) and path.name != "sizes.py":
                assert node.id not in SIZES, path.name


# DEVICE_SEGMENT is read on accelerators only: test_sources.py asks for it on the meta device
@pytest.mark.parametrize("name", sorted(SIZES - {"DEVICE_SEGMENT"}))
def test_no_result_depends_on_a_size(name, monkeypatch):
    tensors = {"a": torch.randn(3000), "b": torch.randint(0, 5, (50, 40)).float()}
    table = torch.randn(300, 8)
    expected = keep_largest_overall(tensors, 1700), keep_largest(table, 3)
    small = {"AT_ONCE": 0, "SAMPLE": 64}  # without these a model so small is ranked in one piece, and reads no other
    small[name] = {"ROUNDS": 1, "STANDARD_DEVIATIONS": 0.01, "AT_ONCE": 0}.get(name, 128)
    for each, size in small.items():
        monkeypatch.setattr(sizes, each, size)
    found = keep_largest_overall(tensors, 1700), keep_largest(table, 3)
    assert all(torch.equal(found[0][name], mask) for name, mask in expected[0].items())
    assert torch.equal(found[1], expected[1])


TENSORS = {
    "contiguous": torch.arange(600.0).view(20, 30),
    "transposed": torch.arange(600.0).view(30, 20).t(),
    "long rows": torch.arange(1200.0).view(2, 600)[:, ::2],
    "channels last": torch.arange(2 * 3 * 10 * 10.0).view(2, 3, 10, 10).to(memory_format=torch.channels_last),
    "one number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_pieces_are_all_entries_in_row_major_order(name, path):
    (source,), entries = sources.competitors({name: TENSORS[name]}, 0, None)
    pieces = list(sources.pieces_of(source))
    assert entries == TENSORS[name].numel()
    assert [at for at, _ in pieces] == [sum(part.numel() for _, part in pieces[:index]) for index in range(len(pieces))]
    assert torch.equal(torch.cat([torch.zeros(0), *(part for _, part in pieces)]), TENSORS[name].reshape(-1))
    most = max([part.numel() for _, part in pieces], default=0)
    assert most <= sizes.PIECE
    assert path == "plain" or entries <= sizes.PIECE or len(pieces) > 1  # what a fixture sets is what is read


def test_segments_on_an_accelerator_have_a_size_of_their_own(monkeypatch):
    monkeypatch.setattr(sizes, "DEVICE_SEGMENT", 128)
    table = torch.empty(50, 6, device="meta")  # no values, but the way of every device that is not the processor
    assert [(at, len(part)) for at, part in sources.segments_of(table)] == [(0, 128), (128, 128), (256, 44)]
    parts = [(at, len(part)) for at, part in sources.segments_of(table.t())]
    assert [at for at, _ in parts] == [sum(size for _, size in parts[:number]) for number in range(len(parts))]
    assert sum(size for _, size in parts) == 300
    assert max(size for _, size in parts) <= 128


def test_what_cannot_be_ranked_is_refused_by_name():
    for tensor, message in (
        (torch.zeros(2, dtype=torch.complex64), "w: complex scores have no order"),
        (torch.zeros(2, device="meta"), "w: on the meta device there are no values"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.competitors({"w": tensor}, 1, None)
    with pytest.raises(ValueError, match=r"w: a mask of shape \(3,\) for shape \(2,\)"):
        sources.competitors({"w": torch.zeros(2)}, 1, {"w": torch.ones(3)})


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_and_few_parts_are_taken_ahead(threads):
    taken = []

    def parts():
        for part in range(20):
            taken.append(part)
            yield part

    for done, result in enumerate(in_threads(lambda part: part * part, parts(), threads)):
        assert result == done * done
        assert len(taken) <= done + 1 + threads


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_part_raises_is_raised(threads):
    def work(part):
        if part == 2:
            raise ValueError("part 2")
        return part

    found = in_threads(work, range(10), threads)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="part 2"):
        next(found)


THRESHOLDS = [0.1, float(np.float32(0.1)), 0.0, -0.1, 1e-50, 1e300, -1e300, float("inf"), float("-inf")]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparisons_are_those_of_float64(threshold, dtype):
    near = torch.tensor(THRESHOLDS, dtype=torch.float64).to(dtype)
    piece = torch.cat([near, near.nextafter(torch.full_like(near, torch.inf)), near.nextafter(-torch.ones_like(near))])
    above, equal = thresholds.above_and_equal(piece, threshold)
    assert torch.equal(above, piece.double() > threshold)
    assert torch.equal(equal, piece.double() == threshold)


@pytest.mark.parametrize("value", THRESHOLDS)
def test_a_number_is_rounded_to_the_side_that_is_asked_for(value):
    dtype = np.dtype(np.float32)
    down, up = (float(thresholds.rounded(value, dtype, up=up)) for up in (False, True))
    assert down <= value <= up
    with np.errstate(over="ignore"):
        assert np.nextafter(np.float32(down), np.float32(np.inf)) >= np.float32(up)
