"""Patterns: what competes with what, on a 3×4 matrix by hand; and that what a table keeps the mask keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import NM, Block, Channels, Rows, make_masks
from secateur.allocation import uniform
from secateur.patterns import GroupedColumns, parse, word_of
from support import laws

W = torch.tensor([[1.0, -4.0, 0.5, 2.0], [3.0, -0.25, 6.0, -1.5], [-5.0, 0.75, -2.5, 0.1]])


def kept(mask):
    return mask.int().tolist()


@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_what_a_table_keeps_the_mask_keeps(pattern, data, seed):
    shape = data.draw(laws.shapes(pattern))
    laws.spread_of_ones_is_true(pattern, shape)
    laws.ties_keep_the_first(pattern, shape)
    laws.pool_inverts_spread(pattern, shape, torch.Generator().manual_seed(seed))


def test_unstructured():
    mask = make_masks({"w": W}, 0.5)["w"]
    assert kept(mask) == [[0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 1, 0]]


def test_rows():
    mask = make_masks({"w": W}, 0.5, pattern=Rows(), allocate=uniform)["w"]
    assert kept(mask) == [[0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 1, 0]]
    mask = make_masks({"w": W * torch.tensor([[10.0], [1.0], [0.1]])}, 0.75, pattern=Rows(), allocate=uniform)["w"]
    assert kept(mask) == [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]


def test_n_of_m():
    assert kept(make_masks({"w": W}, pattern=NM(1, 2))["w"]) == [[0, 1, 0, 1], [1, 0, 1, 0], [1, 0, 1, 0]]
    assert kept(make_masks({"w": W}, pattern=NM(1, 3, axis=0))["w"]) == [[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]


def test_n_of_m_runs_along_the_inputs_of_a_convolution():
    weight = torch.zeros(2, 4, 1, 3)
    weight[:, 1] = 5
    weight[:, 3] = 7
    mask = make_masks({"w": weight}, 0.5, pattern=NM(2, 4))["w"]
    assert mask[:, [1, 3]].all()
    assert not mask[:, [0, 2]].any()


def test_blocks():
    # means of 2x2 tiles, ragged at the bottom: (1+4+3+.25)/4, (.5+2+6+1.5)/4, (5+.75)/2, (2.5+.1)/2
    assert torch.allclose(Block(2, 2).pool(W.abs()), torch.tensor([[2.0625, 2.5, 2.875, 1.3]]))
    assert kept(make_masks({"w": W}, 0.5, pattern=Block(2, 2))["w"]) == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    assert kept(make_masks({"w": W}, 0.5, pattern=Block(3, 1))["w"]) == [[1, 0, 1, 0]] * 3
    grouped = GroupedColumns(2)  # the third output is a group of its own
    assert torch.allclose(grouped.pool(W.abs()), torch.stack([W.abs()[:2].mean(0), W.abs()[2]]))
    both = grouped.spread(torch.tensor([[True, False, True, False], [False, True, True, False]]), W.shape)
    assert kept(both) == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 0]]
    largest = Block(3, 2, reduce=lambda tiles: tiles.amax(1))
    assert largest.pool(W.abs()).tolist() == [[5.0, 6.0]]


def test_channels():
    assert kept(make_masks({"w": W}, 1 / 3, pattern=Channels())["w"]) == [[0] * 4, [1] * 4, [1] * 4]
    assert kept(make_masks({"w": W}, 0.25, pattern=Channels(1))["w"]) == [[1, 1, 1, 0]] * 3
    maxima = Channels(1, reduce=lambda channels: channels.amax(1))
    assert maxima.pool(W.abs()).tolist() == [[5.0, 4.0, 6.0, 2.0]]


@pytest.mark.parametrize("pattern", [Channels(0), Channels(1), Block(64, 64), Block(16, 1)], ids=str)
def test_sums_are_taken_in_one_order_whatever_the_layout(pattern):
    for weight in (torch.randn(64, 48, 3, 3), torch.randn(300, 200)):
        expected = pattern.pool(weight.abs())
        transposed = weight.transpose(0, 1).contiguous().transpose(0, 1)
        last = weight.movedim(1, -1).contiguous().movedim(-1, 1)
        for layout in (transposed, last, torch.stack([weight, weight], -1)[..., 0]):
            assert torch.equal(pattern.pool(layout.abs()), expected)


def test_patterns_of_ones_own_need_no_base_class():
    class Checkerboard:
        density = None

        def pool(self, scores):
            return scores.reshape(2, -1)

        def spread(self, keep, shape):
            return keep.reshape(shape)

    mask = make_masks({"w": torch.arange(8.0).reshape(2, 4)}, 0.5, pattern=Checkerboard(), allocate=uniform)["w"]
    assert kept(mask) == [[0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
def test_a_pattern_is_told_by_its_word_or_by_what_it_is(pattern):
    word = word_of(pattern)
    assert parse(pattern) is pattern
    if word != repr(pattern):
        assert parse(word) == pattern
        assert parse(word.upper().replace("COLUMNS", "columns")) == pattern
    else:  # what no word says: another axis, a reduction of one's own
        assert getattr(pattern, "axis", 1) != 1 or pattern.reduce is not None


@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 999))
def test_a_table_has_a_row_a_competition_and_the_same_shape_without_values(pattern, data, seed):
    shape = data.draw(laws.shapes(pattern))
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    table = pattern.pool(scores)
    assert table.dim() == 2
    assert pattern.pool(torch.empty(shape, device="meta")).shape == table.shape
    inside = table.isfinite() & (table >= scores.min() - 1e-6) & (table <= scores.max() + 1e-6)
    assert inside.all()  # a weight, or the mean or another reduction of some
    none = pattern.spread(torch.zeros(table.shape, dtype=torch.bool), shape)
    assert none.shape == shape
    assert not none.any()


@pytest.mark.parametrize("pattern", laws.PATTERNS, ids=laws.name)
@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 999))
def test_a_unit_is_kept_as_a_whole_and_by_itself(pattern, data, seed):
    """The masks of single units do not overlap, and together they are everything."""
    shape = data.draw(laws.shapes(pattern))
    table = pattern.pool(torch.zeros(shape))
    units = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(seed))[:20]
    whole = torch.zeros(shape, dtype=torch.int64)
    for unit in units.tolist():
        keep = torch.zeros(table.numel(), dtype=torch.bool)
        keep[unit] = True
        whole += pattern.spread(keep.reshape(table.shape), shape)
    assert whole.max() <= 1
    keep = torch.zeros(table.numel(), dtype=torch.bool)
    keep[units] = True
    assert torch.equal(whole.bool(), pattern.spread(keep.reshape(table.shape), shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NM(3, 2), "0 <= n <= m"),
        (lambda: NM(0, 0), "m >= 1"),
        (
            lambda: NM(2, 4).pool(torch.zeros(10, 30)),
            r"2:4 needs an input dimension divisible by 4; .* is \(10, 30\)",
        ),
        (lambda: NM(2, 4, axis=0).pool(torch.zeros(10, 30)), "2:4 needs a dimension 0 divisible by 4"),
        (lambda: NM(2, 4).pool(torch.zeros(8)), "needs more dimensions"),
        (lambda: Block(0, 2), "at least 1 output and 1 input"),
        (lambda: Block(2, 2).pool(torch.zeros(8)), "2x2 blocks need a weight of 2 or more dimensions"),
        (lambda: Block(2, 2, reduce=torch.amax).pool(torch.zeros(3, 4)), "must divide 3x4"),
        (lambda: GroupedColumns(0), "a group of columns has at least 1 output; got 0"),
        (lambda: GroupedColumns(4).pool(torch.zeros(8)), "columns grouped by 4 outputs need a weight of 2 or more"),
        (lambda: Channels(3).pool(torch.zeros(2, 2)), "channels along dimension 3 need more dimensions"),
        (lambda: Rows().pool(torch.zeros(())), "a scalar has no rows"),
        (lambda: parse("diagonal"), "no pattern is called 'diagonal'"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pattern_is_a_value_or_a_word():
    for wrong in (Rows, 4, None):
        with pytest.raises(TypeError, match="a pattern is a value such as Rows"):
            parse(wrong)
