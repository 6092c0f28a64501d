"""Roles and fields of a configuration, and powers of what was counted."""

import copy
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import shrink
from secateur.coupling import Scope, find_coupling
from secateur.shrinking.apply import configurations_in, fields_in, integer_fields, same_ways, unset_fields, with_fields
from secateur.shrinking.configuration import row_echelon as _reduced
from secateur.shrinking.select import tie_roles
from support.configured import Blocks, random_of


class Config:
    """As a configuration of transformers: fields, a part that is one as well, and what is no field."""

    def __init__(self, part=None, **fields):
        vars(self).update(fields)
        self.part = part
        self._attn_implementation_internal = "eager"

    def to_dict(self):
        part = self.part.to_dict() if self.part is not None else None
        return {**{key: value for key, value in vars(self).items() if key != "part"}, "part": part}

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


def made():
    return Config(Config(width=8, unset=None), depth=[2, 3], labels={0: "no", 1: "yes"}, rate=0.5, name="it")


def test_a_change_is_made_to_a_copy():
    values = {"text": {"width": 8}, "stages": (3, 5), "same": [1]}
    before = copy.deepcopy(values)
    changed = with_fields(values, {("text", "width"): 4, ("stages", 1): 2})
    assert changed == {"text": {"width": 4}, "stages": [3, 2], "same": [1]}
    assert values == before
    assert changed["same"] is not values["same"]
    assert with_fields(values, {}) == values


def test_every_field_is_found_where_it_lies():
    config = made()
    values = config.to_dict()
    found = dict(fields_in(config, values))
    assert found == {
        ("depth",): [2, 3], ("rate",): 0.5, ("name",): "it", ("part", "width"): 8, ("part", "unset"): None,
        ("part", "part"): None,
    }  # fmt: skip
    assert dict(integer_fields(config, values)) == {("depth", 0): 2, ("depth", 1): 3, ("part", "width"): 8}
    assert list(unset_fields(config, values)) == [("part", "unset"), ("part", "part")]
    assert [place for place, _ in configurations_in(config)] == [(), ("part",)]
    for place, value in integer_fields(config, values):
        assert dict(integer_fields(config, with_fields(values, {place: value + 1})))[place] == value + 1


def test_the_same_implementations_within_as_well():
    config, other = made(), made()
    config._attn_implementation_internal = "sdpa"
    config.part._attn_implementation_internal = "flash"
    same_ways(config, other)
    assert (other._attn_implementation_internal, other.part._attn_implementation_internal) == ("sdpa", "flash")


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), max_size=5))
def test_reduced_rows_have_the_same_solutions(matrix):
    rows = [{at: Fraction(value) for at, value in enumerate(row) if value} for row in matrix]
    solved = _reduced([row for row in rows if row], range(5))
    for pivot, row in solved.items():
        assert row[pivot] == 1
        assert not any(pivot in other for each, other in solved.items() if each != pivot)
    for free in set(range(5)) - solved.keys():  # each solution of the one is one of the other
        values = {free: Fraction(1)} | {pivot: -row.get(free, Fraction(0)) for pivot, row in solved.items()}
        assert all(sum(value * values.get(at, 0) for at, value in row.items()) == 0 for row in rows)
    assert len(solved) == torch.linalg.matrix_rank(torch.tensor(matrix or [[0]], dtype=torch.float64))


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
    scope = tie_roles(Scope.of(find_coupling(model, X)))
    assert len({group.tied for group in scope.groups}) == len(scope.groups) == 2
