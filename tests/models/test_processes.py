"""What processes share, where there is one; `test_distributed` has two."""

import pytest
import torch
from torch import nn

from secateur.models.jobs import barrier, broadcast, rank_and_world, reduced
from secateur.models.products import Products, Tokens


def test_one_process_waits_for_nobody_and_hands_out_to_nobody():
    assert rank_and_world() == (0, 1)
    barrier()
    values = torch.ones(2)
    assert broadcast("said", [values], 0) == "said"
    assert torch.equal(values, torch.ones(2))
    with pytest.raises(ValueError, match="of one"):
        broadcast(ValueError("of one"), [values], 0)


def test_what_one_process_saw_is_its_own():
    layer = nn.Linear(3, 2)
    products = Products({"weight": layer.weight}, frozenset(["input_norm"]))
    with torch.no_grad(), products.watching(Tokens()):
        layer(torch.ones(4, 3))
    ((piece, met),) = reduced(products).items()
    assert piece.name == "weight"
    assert met is products.found()[piece]
    assert met.tokens == 4
