"""Plain tensors go through every function unchanged; what ranks do is in the tests of distributed pruning."""

import torch

from secateur.support import count_nonzero, is_sharded, laid_out, local, whole


def test_plain_tensors_are_themselves():
    tensor = torch.tensor([0.0, 2.0, -0.0])
    assert not is_sharded(tensor)
    assert local(tensor) is whole(tensor) is laid_out(tensor, torch.zeros(2)) is tensor
    assert count_nonzero(tensor) == 1
