"""Views: how sizes that the code asked for, or wrote as numbers, cut axes apart and join them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.coupling import find_coupling
from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "view that splits": (lambda a: a.view(3, -1, 2), "3,2b", 1),
    "view by shape": (lambda a: a.view(a.shape[0], a.shape[1] // 2, 2), "a,2b", 2),
    "view that joins": (lambda a: a.view(a.size(0), -1), "a,b,c", 3),
    "view by number": (lambda a: a.view(3, 6), "3,2,3", 0),
    "view that cuts across": (lambda a: a.view(4, 9), "6,6", 0),
    "view that cuts across what is before": (lambda a: a.view(2, 15, -1), "3,5,2b", 1),
    "heads": (lambda a: a.view(a.shape[0], 3, -1).transpose(0, 1).reshape(-1, a.shape[1] // 3), "a,3b", 2),
    "flatten": (lambda a: a.flatten(1), "a,b,c", 3),
    "unflatten": (lambda a: a.unflatten(1, (2, -1)), "a,2b", 2),
    "permute": (lambda a: a.permute(2, 0, 1), "a,b,c", 3),
    "transpose": (lambda a: a.transpose(0, -1), "a,b,c", 3),
    "t": (lambda a: a.t(), "a,b", 2),
    "mT": (lambda a: a.mT, "a,b,c", 3),
    "movedim": (lambda a: a.movedim(0, -1), "a,b,c", 3),
    "unsqueeze": (lambda a: a.unsqueeze(-1), "a,b", 2),
    "squeeze": (lambda a: a.squeeze(1), "a,1,b", 2),
    "expand": (lambda a, b: a.expand(b.shape[0], -1), "1,b c,d", 3),
    "expand_as": (lambda a, b: a.expand_as(b), "b c,b", 3),
    "repeat": (lambda a: a.repeat(2, 3), "a,b", 2),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=1), "a,b", 2),
    "channel_shuffle": (lambda a: F.channel_shuffle(a, 2), "a,2b,c,d", 4),
    "ravel": (lambda a: a.ravel(), "a,b", 2),
    "view_as": (lambda a, b: a.view_as(b), "ab b,a", 4),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


def test_what_is_squeezed_wherever_it_is_one_keeps_more_than_one():
    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.down(self.up(x).squeeze())

    coupling = find_coupling(Squeezed(), torch.zeros(4, 3))
    (group,) = coupling.groups
    assert not coupling.contradicted({group.name: 2})
    assert coupling.contradicted({group.name: 1}) == [group]
