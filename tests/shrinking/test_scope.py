"""Laws of scope: what is excluded stays whole whatever is included, and tied groups leave together or not at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.coupling import Scope, find_coupling, may_leave
from secateur.shrinking.request import request
from secateur.shrinking.select import check_globs, groups_in_scope, names_of

names = st.sets(st.sampled_from(["a.weight", "a.bias", "b.weight", "c"]), min_size=1)
globs = st.lists(st.sampled_from(["a.*", "*.weight", "c", "*", "none"]))


def coupled():
    return find_coupling(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)), torch.ones(1, 4)
    )


@given(names, globs, globs)
def test_to_exclude_wins(names, include, exclude):
    assert may_leave(names, None, ())
    assert may_leave(names, include, ()) == any(may_leave({name}, include, ()) for name in names)
    if may_leave(names, include, exclude):
        assert may_leave(names, include, ())
        assert not any(may_leave({name}, exclude, ()) for name in names)
    assert not may_leave(names, include, ["*"])
    assert not may_leave(names, (), ())


def test_groups_are_known_by_all_their_members():
    coupling = coupled()
    first, second = coupling.groups

    def chosen(**given):
        return groups_in_scope(Scope.of(coupling), request(**given))

    assert chosen() == [first, second]
    assert chosen(include="0.bias") == [first]
    assert chosen(include="2.weight") == [first, second]  # the inputs of the one, the outputs of the other
    assert chosen(exclude="0.*") == [second]
    assert chosen(include=first.name, exclude="4.*") == [first]


def test_tied_groups_leave_together():
    coupling = coupled()
    scope = Scope.of(coupling).tied([[group.name for group in coupling.groups]])
    with pytest.raises(
        ValueError, match=r"nothing of the model can leave \(2 reasons\)\.\n  0\.weight dimension 1: an in"
    ):
        groups_in_scope(scope, request(exclude="0.bias"))
    with pytest.raises(ValueError, match=r"\n  include and exclude leave whole: 0\.weight, 2\.weight$"):
        groups_in_scope(scope, request(exclude="0.bias"))
    assert len(groups_in_scope(scope, request())) == 2


def test_why_no_experts_leave_is_said_once_for_many_places():
    class Tells(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
            self.tables = nn.ParameterList(torch.randn(6, 3) for _ in range(3))

        def forward(self, x):
            scores = [score(x) for score in self.scores]
            return sum(table[each.argmax(-1)] for table, each in zip(self.tables, scores, strict=True)), scores

    with pytest.raises(ValueError, match="no experts of the model can leave: no router that chooses between") as said:
        groups_in_scope(Scope.of(find_coupling(Tells(), torch.ones(1, 4))), request(), chosen=True)
    _, reasons, hint = str(said.value).split("\n  ")
    assert reasons.startswith("scores.0.weight dimension 0 and 8 others: an output of the model; ")
    assert "output_router_logits=False" in hint


def test_a_glob_has_to_match():
    known = names_of(coupled())
    assert {"0.weight", "2.bias", "4.bias"} <= known
    check_globs(known, ["0.*", "*.bias"])
    with pytest.raises(ValueError, match=r"no tensor or group matches '9\.\*'; the closest names are"):
        check_globs(known, ["0.*", "9.*"])
