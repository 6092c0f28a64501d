"""Who else holds a parameter: the other ends of tied weights, also of models that know nothing of each other."""

from torch import nn

from secateur.support import other_owners, replicating_group, sharded_parameter


def test_a_parameter_that_nobody_shares_has_no_other_owner():
    layer = nn.Linear(2, 2)
    assert other_owners(layer, "weight") == []
    assert other_owners(layer, "none") == []
    assert replicating_group(layer, "weight") is sharded_parameter(layer, "weight") is None


def test_every_other_place_is_found_under_its_name():
    class Odd(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.mine, self.again = weight, weight

    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = layer.weight
    odd = Odd(layer.weight)
    found = {(id(module), name) for module, name in other_owners(layer, "weight")}
    assert found == {(id(other), "weight"), (id(odd), "mine"), (id(odd), "again")}
    assert (odd, "again") in other_owners(odd, "mine")


def test_a_module_that_is_gone_owns_nothing():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = layer.weight
    assert len(other_owners(layer, "weight")) == 1
    del other
    assert other_owners(layer, "weight") == []
