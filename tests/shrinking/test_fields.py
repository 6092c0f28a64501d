"""Laws of fields: what is changed is a copy, and every field is found wherever it lies."""

import copy

from secateur.shrinking.fields import (
    configurations_in,
    fields_in,
    integer_fields,
    same_ways,
    unset_fields,
    with_fields,
)


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
        ("depth",): [2, 3],
        ("rate",): 0.5,
        ("name",): "it",
        ("part", "width"): 8,
        ("part", "unset"): None,
        ("part", "part"): None,
    }
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
