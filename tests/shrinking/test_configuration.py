"""Laws of uniform shrinking: a model that is built from the new configuration is the smaller model."""

import copy
import inspect
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map_only

import zoo
from secateur import shrink
from secateur.coupling import Scope, find_coupling
from secateur.shrinking import Configured
from secateur.shrinking.apply import configurations_in, fields_in, integer_fields, same_ways, unset_fields, with_fields
from secateur.shrinking.configuration import row_echelon as _reduced
from secateur.shrinking.select import tie_roles
from secateur.support import tensors_in
from support.configured import Blocks, Config, random_of
from support.unchanged import is_unchanged, state_of

# of each what its configuration can say, found by experiment; the widths of T5 and Gemma 2 have to stay
FIELDS = {
    "llama": {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"},
    "qwen2": {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"},
    "gemma2": {"intermediate_size", "num_attention_heads", "num_key_value_heads"},
    "phi3": {"hidden_size", "intermediate_size", "head_dim"},
    "gpt2": {"n_embd", "n_head", "n_inner"},
    "opt": {"hidden_size", "ffn_dim", "num_attention_heads", "word_embed_proj_dim"},
    "bert": {"hidden_size", "num_attention_heads", "intermediate_size"},
    "vit": {"hidden_size", "num_attention_heads", "intermediate_size", "head_dim"},
    "t5": {"d_kv", "d_ff", "num_heads"},
    "mixtral": {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"},
}


def doubled(inputs):
    return tree_map_only(torch.Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)


def outputs_of(model, inputs):
    with torch.no_grad():
        return list(tensors_in(zoo.run(model.double().eval(), doubled(inputs))))


@pytest.mark.parametrize("name", FIELDS)
def test_from_pretrained_loads_it_and_computes_the_same(name, tmp_path):
    model, inputs = zoo.ZOO[name]()
    given_config, dense = model.config, copy.deepcopy(model.config.to_dict())
    before = model.num_parameters()
    done = shrink(model, inputs, 0.5, uniform=True, round_to=1, allocate="uniform")  # all fields change
    assert done.model is model
    assert 1 - model.num_parameters() / before == pytest.approx(0.5, abs=0.01)
    changed = {key for key, value in model.config.to_dict().items() if dense.get(key) != value}
    code = Path(inspect.getfile(type(model))).read_text()  # of an older transformers ViT knows fewer
    assert changed == {field for field in FIELDS[name] if field in code}
    assert model.config is not given_config
    assert given_config.to_dict() == dense  # which other models may share
    model.save_pretrained(tmp_path)
    ways = {"attn_implementation": model.config._attn_implementation}
    loaded = type(model).from_pretrained(tmp_path, **ways, experts_implementation=model.config._experts_implementation)
    assert loaded.config.to_dict().keys() >= changed
    expected = outputs_of(model, inputs)
    found = outputs_of(loaded, inputs)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Divided(Blocks):
    def __init__(self, config):
        if config.width % config.heads:
            raise ValueError("heads")
        super().__init__(config)


class Scaled(Blocks):
    """A number that is computed from the width, and stays in a model that is shrunken."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.tensor(config.width**0.5), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


class Expected(Blocks):
    def __init__(self, config):
        super().__init__(config)
        self.scale = config.width**-0.5

    def forward(self, x):
        return super().forward(x) * self.scale


X = torch.ones(2, 3)


def says_it(model, x=X):
    """Whether a model from the configuration has the same shapes, and with the same weights the same output."""
    fresh = type(model)(type(model.config).from_dict(model.config.to_dict()))
    fresh.load_state_dict(model.state_dict())
    return torch.equal(fresh(x), model(x))


def test_a_field_is_known_by_what_it_does_not_by_its_value():
    model = shrink(random_of(Blocks), X, 0.5, uniform=True, target="units").model
    assert vars(model.config) == vars(Config(width=6, hidden=10))
    assert says_it(model)


def test_layers_choose_their_units_themselves():
    model = random_of(Blocks)
    dense = copy.deepcopy(model)
    shrink(model, X, 0.5, uniform=True, target="units", exclude="first.weight")
    assert model.config.width == 12
    kept = [
        [bool((dense_row == row).all(1).any()) for dense_row in layer[0].weight.unsqueeze(1)]
        for layer, row in zip(dense.layers, (each[0].weight for each in model.layers), strict=True)
    ]
    assert [sum(each) for each in kept] == [10, 10]
    assert kept[0] != kept[1]


def test_what_the_configuration_refuses_is_kept_a_little_larger():
    model = shrink(random_of(Divided), X, 0.4, uniform=True, target="units").model
    assert (model.config.width, model.config.hidden) == (8, 12)  # 7 is not divisible by 4
    assert says_it(model)


@pytest.mark.parametrize("kind", [Scaled, Expected])
def test_a_width_that_a_constant_depends_on_stays(kind):
    model = shrink(random_of(kind), X, 0.3, uniform=True).model
    assert model.config.width == 12
    assert model.config.hidden < 20
    assert says_it(model)


class Stubborn(Blocks):
    def __init__(self, config, *, more):
        super().__init__(config)
        self.more = more


class Fixed(Blocks):
    def __init__(self, config):
        if (config.width, config.hidden) != (12, 20):
            raise ValueError("only this")
        super().__init__(config)


class Wilful(Blocks):
    """Whatever is built anew computes something else."""

    def __init__(self, config):
        super().__init__(config)
        self.factor = nn.Parameter(torch.ones(1))
        self.sign = 1.0 if (config.width, config.hidden) == (12, 20) else -1.0

    def forward(self, x):
        return super().forward(x) * self.factor * (1 if self.sign > 0 else 2)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Stubborn(Config(), more=1), r"Stubborn cannot be built again from its configuration \(TypeError"),
        (
            lambda: Fixed(Config()),
            "no configuration of Fixed describes a smaller model of this structure .*no field sets it",
        ),
        (lambda: Wilful(Config()), "a model built from its configuration is not the smaller one: output 0 differs"),
    ],
)
def test_errors_name_the_other_way(make, error):
    model = make()
    state, config = state_of(model), model.config
    with pytest.raises(ValueError, match=error) as raised:
        shrink(model, X, 0.5, uniform=True)
    assert "save_shrunken" in str(raised.value)
    assert is_unchanged(model, state)
    assert model.config is config
    assert vars(config) == vars(Config())


def test_a_model_that_is_not_what_its_configuration_says():
    model = random_of(Blocks)
    model.last = nn.Linear(12, 3)
    with pytest.raises(ValueError, match=r"dimension 0 of last\.weight is 3, in a model built from it 2"):
        shrink(model, X, 0.5, uniform=True)
    model.extra = nn.Linear(12, 3)
    model.last = nn.Linear(12, 2)
    with pytest.raises(ValueError, match=r"dimension 0 of extra\.weight is 3, in a model built from it not there"):
        shrink(model, X, 0.5, uniform=True)


def test_more_than_the_configuration_can_say():
    model = random_of(Expected)
    state = state_of(model)
    with pytest.raises(ValueError, match=r"at most .* of the params can leave, not 99\.0%"):
        shrink(model, X, 0.99, uniform=True)
    assert is_unchanged(model, state)
    assert vars(model.config) == vars(Config())


def test_a_rule_for_several_axes_together_leaves_the_innermost_whole():
    """Width = heads x entries, and nothing scales by the entries: two of the three can be said."""

    class Heads(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.heads = config.heads
            self.first = nn.Linear(3, config.width)
            self.query = nn.Linear(config.width, config.width)
            self.out = nn.Linear(config.width, config.width)
            self.last = nn.Linear(config.width, 2)

        def forward(self, x):
            x = self.first(x)
            y = self.query(x).view(x.shape[0], self.heads, -1) * 2
            return self.last(x + self.out(y.flatten(1)))

    model = Heads(Config(width=24, heads=6))
    coupling = find_coupling(model, X)
    assert {group.size for group in coupling.groups} == {24, 6, 4}
    configured = Configured(model, Scope.of(coupling))
    groups = configured.scope.groups
    assert {group.size for group in groups} == {24, 6}
    assert len({group.tied for group in groups}) == 1
    counts = {group.name: group.size // 3 for group in groups}
    assert configured.fields(counts) == {("width",): 8, ("heads",): 2}


# ---- Roles and fields of a configuration, and powers of what was counted. ----


class Fielded:
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


def fielded():
    return Fielded(Fielded(width=8, unset=None), depth=[2, 3], labels={0: "no", 1: "yes"}, rate=0.5, name="it")


def test_a_change_is_made_to_a_copy():
    values = {"text": {"width": 8}, "stages": (3, 5), "same": [1]}
    before = copy.deepcopy(values)
    changed = with_fields(values, {("text", "width"): 4, ("stages", 1): 2})
    assert changed == {"text": {"width": 4}, "stages": [3, 2], "same": [1]}
    assert values == before
    assert changed["same"] is not values["same"]
    assert with_fields(values, {}) == values


def test_every_field_is_found_where_it_lies():
    config = fielded()
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
    config, other = fielded(), fielded()
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
