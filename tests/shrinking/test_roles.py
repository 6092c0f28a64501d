"""Laws of roles: groups that do the same in two layers keep equally many, others do not."""

import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking.roles import tie_roles
from support.configured import Blocks, random_of

X = torch.ones(2, 3)


def test_without_a_configuration_roles_are_tied():
    model = random_of(Blocks)
    del model.config
    with torch.no_grad():
        model.layers[1][0].weight *= 10
    shrink(model, X, 0.5, uniform=True, target="units", exclude="first.weight")
    assert [layer[0].out_features for layer in model.layers] == [10, 10]


def test_groups_of_other_roles_are_not_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 2)})
    model.forward = lambda x: model["c"](model["b"](model["a"](x)).relu())
    coupling = find_coupling(model, X)
    tie_roles(coupling)
    assert len({group.tied for group in coupling.groups}) == len(coupling.groups) == 2
