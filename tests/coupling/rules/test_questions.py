"""Questions for sizes are answered with what they are the sizes of; what leaves torch stays."""

import pytest
import torch

from secateur.coupling.operations import operation
from support.traced import arguments, assert_a_call_on_slices_gives_the_slices_of_its_result, traced

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "shape": (lambda x: torch.ones(x.shape[1], x.shape[0]), "a,b", 2),
    "size": (lambda x: torch.ones(x.size(1), x.size(-2)), "a,b", 2),
    "size by name": (lambda x: torch.ones(x.size(dim=1)), "a,b", 2),
    "size of all": (lambda x: torch.ones(x.size()), "a,b", 2),
    "numel": (lambda x: torch.ones(x.numel()), "a,b", 2),
    "nelement": (lambda x: torch.ones(x.nelement() // x.size(0)), "a,b,c", 3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_size_remembers_what_it_is_the_size_of(name, seed):
    """What is made with it loses what that loses."""
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


@pytest.mark.parametrize("leaves", [lambda x: x.tolist(), lambda x: len(x), lambda x: x.stride()])
def test_what_leaves_torch_is_frozen(leaves):
    (x,) = arguments((3, 4))

    def asked(given):
        leaves(given)
        return given + 1

    _, _, free = traced(asked, [x])
    assert free == []


@pytest.mark.parametrize("fact", ["dtype", "device", "is_leaf", "layout", "requires_grad"])
def test_facts_cost_nothing(fact):
    (x,) = arguments((3, 4))

    def asked(given):
        assert getattr(given, fact) == getattr(torch.ones(1), fact)
        return given + 1

    _, _, free = traced(asked, [x])
    assert len(free) == 2
    assert operation(fact).asks == "facts"
