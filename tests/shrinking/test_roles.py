"""Laws of roles: groups that do the same in two layers keep equally many, others do not."""

import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.shrinking.roles import tie_roles


class Config:
    """The least that is needed; ``other`` equals ``hidden`` and says nothing of it."""

    def __init__(self, **values):
        vars(self).update({"width": 12, "hidden": 20, "other": 20, "layers": 2, "heads": 4, "inner": None}, **values)

    def to_dict(self):
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


class Blocks(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.first = nn.Linear(3, config.width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(config.width, config.hidden), nn.GELU(), nn.Linear(config.hidden, config.width, bias=False)
            )
            for _ in range(config.layers)
        )
        self.last = nn.Linear(config.width, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


X = torch.ones(2, 3)


def random_of(kind, **values):
    torch.manual_seed(0)
    return kind(Config(**values))


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
