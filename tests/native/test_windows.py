"""The layout of windows holds the matrix, bit for bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.native import windows


@settings(max_examples=30)
@given(data=st.data())
def test_windows_hold_the_matrix(data):
    """Wide ones too, whose lanes are far apart, and rows of very different lengths."""
    rows, columns = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 900))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    shares = torch.rand(rows, 1, generator=generator) ** data.draw(st.integers(1, 9))
    weight = torch.randn(rows, columns, generator=generator) * (torch.rand(rows, columns, generator=generator) < shares)
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))
    layout = windows.to_windows(weight)
    windows.check(**layout, rows=rows, columns=columns)
    assert torch.equal(windows.from_windows(**layout, rows=rows, columns=columns).to(weight.dtype), weight)
    taken = layout["values"].ne(0).sum()
    assert taken == weight.ne(0).sum()


def test_a_layout_by_hand():
    """Three rows of 40 columns: columns 0 and 39 are more than a window apart; 31 is the last in the first one."""
    weight = torch.zeros(3, 40)
    weight[0, 0], weight[0, 39], weight[1, 31], weight[2, 1:4] = 1.0, 2.0, 3.0, torch.tensor([4.0, 5.0, 6.0])
    layout = windows.to_windows(weight)
    assert layout["order"].tolist() == [-1] * 13 + [1, 0, 2]
    # from 0 the rows take 31, 0 and 1; from 2 and 3 row 2 takes its others, while 39 is out of sight; the last step
    # begins at 8, for it must not look beyond column 39
    assert layout["moves"].tolist() == [[0, 2, 1, 5, 0, 0]]
    numbers = [[word >> 5 * step & 31 for word in layout["words"][0, 13:].tolist()] for step in range(6)]
    assert numbers == [[31, 0, 1], [0, 0, 0], [0, 0, 0], [0, 31, 0], [0, 0, 0], [0, 0, 0]]
    values = [[3.0, 1.0, 4.0], [0.0, 0.0, 5.0], [0.0, 0.0, 6.0], [0.0, 2.0, 0.0]]
    assert layout["values"][0, :, 13:].tolist() == [*values, [0.0] * 3, [0.0] * 3]
    assert layout["pointers"].tolist() == [0, 1]
