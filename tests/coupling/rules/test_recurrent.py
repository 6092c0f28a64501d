"""Recurrent cells: the gates lose the same units, from their rows and from the state."""

import pytest
import torch

from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "lstm cell": (
        lambda x, h, c, wi, wh, bi, bh: torch.lstm_cell(x, (h, c), wi, wh, bi, bh),
        "b,i b,h b,h 4h,i 4h,h 4h 4h",
        3,
    ),
    "gru cell": (torch.gru_cell, "b,i b,h 3h,i 3h,h 3h 3h", 3),
    "rnn_tanh cell": (torch.rnn_tanh_cell, "b,i b,h h,i h,h h h", 3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)
