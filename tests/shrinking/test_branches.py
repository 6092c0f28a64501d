"""Laws of branches: the least leave, as many as asked, and those within a branch with it.

Their forms in code, and how they are found, are in tests/coupling/test_residual_streams.py.
"""

import math

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.kinds import Branches
from secateur.shrinking import KEPT
from secateur.shrinking.kinds import branches as depth
from secateur.shrinking.kinds.branches import choose_branches, influences, named_branches
from support.unchanged import is_unchanged, state_of

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for each in self.each:
            x = x + each(x)
        return x


def scaled(*sizes):
    model = Residual(len(sizes))
    with torch.no_grad():
        for each, size in zip(model.each, sizes, strict=True):
            each.weight.mul_(size)
            each.bias.mul_(size)
    return model


def test_what_does_nothing_has_no_influence():
    model = scaled(1.0, 0.0, 1.0)
    state = state_of(model)
    found = {branch.name: value for branch, value in influences(model, find_coupling(model, X), [X]).items()}
    assert found["each.1"] == pytest.approx(0, abs=1e-6)
    assert all(-1e-6 <= value <= 2 + 1e-6 for value in found.values())
    assert max(found, key=found.get) != "each.1"
    assert is_unchanged(model, state)


def test_the_least_leave_and_what_is_excluded_stays():
    model = scaled(1.0, 0.01, 1.0, 0.02, 1.0)
    coupling = find_coupling(model, X)

    def names(**given):
        chosen, stayed = choose_branches(model, coupling, 0.4, [X], **given)
        return {branch.name for branch in chosen}, stayed

    assert names() == ({"each.1", "each.3"}, {})
    gone, stayed = names(exclude=["each.1*"])
    assert "each.3" in gone
    assert stayed == {"each.1": KEPT}
    assert names(include=["each.0", "each.4.weight"])[0] == {"each.0", "each.4"}


def test_what_the_proof_keeps_is_named_and_the_next_leaves(monkeypatch):
    model = scaled(1.0, 0.01, 0.02, 1.0)

    def wrong(_model, _coupling, branches, _inputs):
        found = {each: "output 0 differs" for each in branches if each.name == "each.1"}
        return {each: each for each in branches if each not in found}, found

    monkeypatch.setattr(depth, "right_branches", wrong)
    coupling = find_coupling(model, X)
    chosen, stayed = choose_branches(model, coupling, 0.25, [X])
    assert [branch.name for branch in chosen] == ["each.2"]
    assert stayed == {"each.1": "the model without it: output 0 differs"}
    chosen, _ = choose_branches(model, coupling, 0.25, [X], verify=False)
    assert [branch.name for branch in chosen] == ["each.1"]


def test_a_score_that_is_no_number_is_refused():
    model = Residual()
    with pytest.raises(ValueError, match=r"the score of the branch each\.0 is NaN"):
        choose_branches(
            model, find_coupling(model, X), 0.2, [X],
            score=lambda _model, coupling, _inputs: dict.fromkeys(coupling.branches, math.nan),
        )  # fmt: skip


def test_those_of_which_the_names_are_given_leave():
    model = scaled(1.0, 0.5, 1.0)
    expected = model.each[0](X) + X
    done = shrink(model, X, leave=Branches(["each.1", "each.2"]), repair=False)
    assert [name for name, _ in model.named_parameters()] == ["each.0.weight", "each.0.bias"]
    torch.testing.assert_close(model(X), expected)
    assert "2 of 3 residual branches leave" in str(done)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["each.7"], r"there is no residual branch 'each.7' that could leave; there are: each.0, each.1, each.2"),
        (["each.0", "each.1", "each.2"], "all 3 residual branches are to leave, and one stays at least"),
    ],
)
def test_names_that_cannot_leave_are_refused(names, message):
    model = scaled(1.0, 1.0, 1.0)
    state = state_of(model)
    with pytest.raises(ValueError, match=message):
        shrink(model, X, leave=Branches(names))
    assert is_unchanged(model, state)


def test_a_name_that_the_proof_keeps_is_an_error_that_says_why(monkeypatch):
    model = scaled(1.0, 1.0, 1.0)
    monkeypatch.setattr(
        depth, "right_branches", lambda _, __, chosen, ___: ({}, {chosen[0]: "it is read after the sum"})
    )
    with pytest.raises(ValueError, match=r"the branch each.1 cannot leave; the model without it: it is read after"):
        named_branches(model, find_coupling(model, X), ["each.1"], [X])
