"""Who else holds a parameter: the other ends of tied weights, also of models that know nothing of each other."""

from torch import nn

from secateur.support import other_owners


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
