"""What selecting is made of: digits and sizes, sources and pieces, ranks and threads, and thresholds."""

import ast
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import selection
from secateur.selection import bracket, in_threads, keep_largest, keep_largest_overall, overall, sizes, sources
from secateur.selection import bracket as digits
from secateur.selection import sizes as thresholds
from secateur.selection import sources as ranks
from support.selecting import by_sorting

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
