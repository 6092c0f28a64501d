"""One declaration an operation: what a user says of one reaches all who follow a model, facet by facet."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur.coupling.rules
from secateur import shrink
from secateur.coupling import SameDraws, declare, find_coupling, operation, operations, rule, unify
from secateur.coupling.operations import OPERATIONS, Operation
from secateur.kinds import Branches

LIBRARY = torch.library.Library("secateur_tests", "FRAGMENT")
OPS = torch.ops.secateur_tests
OWN = []


def define(schema, function):
    OWN.append(schema.split("(")[0])
    LIBRARY.define(schema)
    LIBRARY.impl(OWN[-1], function, "CompositeImplicitAutograd")


define("doubled(Tensor x) -> Tensor", lambda x: x * 2)
define("copied(Tensor x) -> Tensor", lambda x: x.clone())
define("joined(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y)
define("times(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w.t())
define("width(Tensor x) -> int", lambda x: x.shape[-1])
define("filled(Tensor(a!) x) -> ()", lambda x: (x.fill_(1.0), None)[1])
define("noise(Tensor x) -> Tensor", torch.randn_like)
define("dropped(Tensor x) -> Tensor", lambda x: x * (torch.rand_like(x) > 0.5))
define("directions(Tensor x) -> Tensor", lambda x: x / x.square().sum(1, keepdim=True).sqrt())
define("standard(Tensor x) -> Tensor", lambda x: F.layer_norm(x, x.shape[-1:]))


@pytest.fixture(autouse=True)
def _as_before():
    saved = dict(OPERATIONS)
    for name in OWN:  # the guide declares one of the same name
        OPERATIONS.pop(name, None)
    yield
    OPERATIONS.clear()
    OPERATIONS.update(saved)


def value_by_value(call):
    call.returns(call.dims(call.args[0]))


def times(call):
    x, weight = map(call.dims, call.args)
    unify(x[-1], weight[-1])
    call.returns([*x[:-1], weight[0]])


def standard(call):
    x = call.dims(call.args[0])
    call.flag(x[-1])
    call.returns(x)


class Between(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(5, 8), nn.Linear(8, 3), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class Blocks(nn.Module):
    """``joined(x, branch(x))``, a few times."""

    def __init__(self, branch, joined=torch.add, count=3, after=nn.Identity):
        super().__init__()
        self.first, self.branches, self.joined, self.after = nn.Linear(5, 6), nn.ModuleList(), joined, after()
        self.branches.extend(branch() for _ in range(count))

    def forward(self, x):
        x = self.first(x)
        for branch in self.branches:
            x = self.joined(x, branch(x))
        return self.after(x)


class Linear(nn.Linear):
    """A layer after a function that is none of its own."""

    def __init__(self, before=lambda x: x):
        super().__init__(6, 6)
        self.before = before

    def forward(self, x):
        return super().forward(self.before(x))


def free(model, *shape):
    return [group.size for group in find_coupling(model, torch.randn(*(shape or (2, 5)))).groups]


def of_width(model):
    return model.first.out_features


def test_every_operation_of_torch_is_declared_once(monkeypatch):
    said = Counter()

    def counted(*names, **_):
        said.update(names)

    monkeypatch.setattr(operations, "declare", counted)
    monkeypatch.setattr(operations, "rule", lambda *names, **facets: counted(*names) or (lambda function: function))
    for path in Path(secateur.coupling.rules.__file__).parent.glob("*.py"):
        runpy.run_path(str(path))
    assert len(said) > 400
    assert [name for name, times in said.items() if times > 1] == []
    assert set(said) <= set(OPERATIONS)


@pytest.mark.parametrize(
    ("facets", "words"),
    [({"value": "kept"}, "did you mean values"), ({"values": "keep"}, "did you mean kept"), ({"rows": "all"}, "moved")],
)
def test_a_facet_that_there_is_not_is_an_error_and_nothing_is_declared(facets, words):
    with pytest.raises(ValueError, match=words):
        declare("doubled", "relu", **facets)
    with pytest.raises(ValueError, match=words):
        rule("doubled", "relu", **facets)(value_by_value)
    assert "doubled" not in OPERATIONS
    assert operation("relu").values == "kept"


def test_a_rule_has_names():
    with pytest.raises(TypeError, match=r"names of functions.*rule\(\"relu\"\)"):
        rule(value_by_value)
    with pytest.raises(TypeError, match="names of functions"):
        declare(values="kept")


def test_what_is_not_said_stays_as_it_was_and_of_what_is_not_declared_nothing_is_known():
    before = operation("dropout")
    rule("dropout")(value_by_value)
    assert operation("dropout").axes is value_by_value
    assert (operation("dropout").rows, operation("dropout").steady) == (before.rows, before.steady)
    assert vars(operation("doubled")) == vars(Operation())


# ---- each facet ------------------------------------------------------------------------------------------------------


def test_axes_reach_the_trace():
    model = Between(OPS.doubled)
    assert free(model) == []
    assert find_coupling(model, torch.randn(2, 5)).frozen["first.weight", 0] == "doubled has no rule"
    rule("doubled")(value_by_value)
    assert free(model) == [8]
    assert of_width(shrink(model, torch.randn(2, 5), 0.5, target="units").model) == 4


def test_what_is_followed_instead_reaches_the_trace_and_the_proof():
    model = Between(OPS.doubled)
    seen = []
    declare("doubled", instead=lambda x: (seen.append(torch.is_grad_enabled()), x + x)[1])
    assert free(model) == [8]
    seen.clear()
    assert of_width(shrink(model, torch.randn(2, 5), 0.5, target="units").model) == 4
    assert set(seen) == {False, True}  # the proof goes backward, too


def test_values_reach_the_trace():
    model = Between(lambda x: x - OPS.doubled(x.mean(-1, keepdim=True)))
    rule("doubled")(value_by_value)
    assert free(model) == []
    assert "a statistic over it is used by doubled" in find_coupling(model, torch.ones(2, 5)).frozen["first.weight", 0]
    declare("doubled", values="kept")
    assert free(model) == [8]


class Attention(nn.Module):
    """With a function between the queries and their use."""

    def __init__(self, between):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, 8) for _ in range(3))
        self.between = between

    def forward(self, x):
        return F.scaled_dot_product_attention(self.between(self.q(x)), self.k(x), self.v(x))


@pytest.mark.parametrize(("name", "rows"), [("doubled", "same"), ("doubled", "product"), ("copied", "moved")])
def test_rows_reach_the_origins(name, rows):
    model, x = Attention(getattr(OPS, name)), torch.randn(2, 4, 5)
    rule(name)(value_by_value)
    assert "attention is scaled by the width of a head" in find_coupling(model, x).frozen["q.weight", 0]
    declare(name, rows=rows)
    coupling = find_coupling(model, x)
    scaled = coupling.scales({coupling.groups[0].name: 2})
    assert [(tensor, factor) for tensor, _, _, factor in scaled] == [("q.weight", 0.5), ("q.bias", 0.5)]
    assert shrink(model, x, 0.5, target="units").model.q.out_features == 4


def test_what_writes_reaches_the_origins():
    model, x = Attention(lambda query: (OPS.filled(query), query)[1]), torch.randn(2, 4, 5)
    rule("filled")(lambda call: None)
    assert ("q.weight", 0) not in find_coupling(model, x).frozen
    declare("filled", writes=True)
    assert "attention is scaled by the width of a head" in find_coupling(model, x).frozen["q.weight", 0]


def test_a_sum_reaches_the_residual_streams_and_the_proof():
    @rule("joined", values="kept")
    def _(call):
        one, other = map(call.dims, call.args)
        for dim, its in zip(one, other, strict=True):
            unify(dim, its)
        call.returns(one)

    model, x = Blocks(Linear, OPS.joined), torch.randn(4, 5)
    assert find_coupling(model, x).branches == []
    declare("joined", stream="sum")
    assert len(find_coupling(model, x).branches) == 3
    shrink(model, x, leave=Branches(0.5))
    assert sum(isinstance(each, Linear) for each in model.branches) == 1


def test_a_contraction_reaches_the_residual_streams():
    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return OPS.times(x, self.weight)

    rule("times")(times)
    model, x = Blocks(Times), torch.randn(4, 5)
    assert find_coupling(model, x).branches == []
    declare("times", stream="contraction")
    assert len(find_coupling(model, x).branches) == 3
    shrink(model, x, leave=Branches(0.5))
    assert sum(isinstance(each, Times) for each in model.branches) == 1


def forms(model):
    (branch, *_) = find_coupling(model, torch.randn(4, 5)).branches
    return branch.modules["branches.0"]["returns"]


def test_a_zero_reaches_what_stays_in_place_of_a_branch():
    model = Blocks(Linear, lambda x, y: x + OPS.doubled(y))
    rule("doubled")(value_by_value)
    assert forms(model)["zeros"] is not None
    declare("doubled", zero=True)
    assert forms(model) == {"zeros": None}
    shrink(model, torch.randn(4, 5), leave=Branches(0.5))


@pytest.mark.parametrize("asks", ["sizes", "facts"])
def test_a_question_reaches_the_residual_streams(asks):
    model = Blocks(Linear, lambda x, y: (OPS.width(y), x + y)[1])
    assert find_coupling(model, torch.randn(4, 5)).branches == []
    declare("width", asks=asks)
    assert (forms(model)["zeros"] is None) is (asks == "facts")


def test_draws_reach_the_residual_streams_and_the_proof():
    rule("noise")(value_by_value)

    def drawn():
        with SameDraws():
            return OPS.noise(torch.ones(3)), OPS.noise(torch.ones(3))

    assert not torch.equal(*drawn())
    model = Blocks(lambda: Linear(before=lambda x: x + OPS.noise(x)), after=lambda: lambda x: x + OPS.noise(x))
    with pytest.raises(ValueError, match="can leave"):
        shrink(model, torch.randn(4, 5), leave=Branches(0.5))
    declare("noise", draws=True)
    assert torch.equal(*drawn())
    shrink(model, torch.randn(4, 5), leave=Branches(0.5))


def test_how_it_is_called_steadily_reaches_the_trace_and_the_proof():
    model = Between(OPS.dropped)
    rule("dropped")(value_by_value)
    with pytest.raises(ValueError, match="computed something else"):
        shrink(model, torch.randn(2, 5), 0.5, target="units")
    seen = []
    declare("dropped", steady=lambda _function, x: (seen.append(torch.is_grad_enabled()), x.clone())[1])
    find_coupling(model, torch.randn(2, 5))
    assert seen
    assert of_width(shrink(model, torch.randn(2, 5), 0.5, target="units").model) == 4


def test_how_it_is_proved_reaches_the_proof():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.second = nn.Parameter(torch.randn(8, 5)), nn.Linear(8, 3, bias=False)

        def forward(self, x):
            return self.second(F.linear(x, OPS.directions(self.weight)))

    @rule("directions")
    def _(call):
        rows, columns = call.dims(call.args[0])
        call.freeze(columns)
        call.returns([rows, columns])

    model, x = Normed(), torch.randn(2, 5)
    with pytest.raises(ValueError, match=r"nothing of the model can leave|computed something else"):
        shrink(model, x, 0.5, target="units")  # a row of zeros has no direction
    declare("directions", proved=lambda function, weight: function(weight).nan_to_num(0.0))
    assert shrink(model, x, 0.5, target="units").model.weight.shape == (4, 5)


def test_what_does_not_count_reaches_the_proof():
    model = Between(OPS.standard)
    rule("standard")(standard)
    (group,) = find_coupling(model, torch.randn(2, 5)).groups
    assert group.notes == ("standard over it",)
    with pytest.raises(ValueError, match="computed something else"):
        shrink(model, torch.randn(2, 5), 0.5, target="units")
    seen = set()

    def uncounted(x, *, sums):
        seen.add(sums)
        return x / x.square().sum(-1, keepdim=True).add(1e-3).sqrt() if sums else x

    declare("standard", uncounted=uncounted)
    assert of_width(shrink(model, torch.randn(2, 5), 0.5, target="units").model) == 4
    assert True in seen
