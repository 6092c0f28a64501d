"""Laws of scope: what is excluded stays whole whatever is included, and tied groups leave together or not at all."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo
from secateur import sensitivity, shrink
from secateur.coupling import Coupling, Scope, find_coupling, leaves, may_leave
from secateur.criteria import magnitude
from secateur.kinds import Experts
from secateur.shrinking.request import pruning_target, request
from secateur.shrinking.select import check_globs, groups_in_scope, names_of, rows_at_once, scores_of
from support.configured import Blocks, random_of
from support.measured import text, words
from zoo import ZOO

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


class Narrows(nn.Module):
    """A comparison in its code changes its result when fewer than seven of eight are left."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.third((self.second(hidden) * (1 if hidden.shape[-1] > 6 else 2)).relu())


CALLS = {
    "units": lambda: shrink(Narrows(), torch.ones(2, 4), 0.3),
    "zeros": lambda: shrink(Narrows(), torch.ones(2, 4)),
    "roles": lambda: shrink(Narrows(), torch.ones(2, 4), 0.3, uniform=True),
    "fields": lambda: shrink(
        random_of(Blocks, width=8, hidden=12, layers=2), torch.ones(2, 3), 0.2, include="layers.*.0.bias", uniform=True
    ),
    "data": lambda: shrink(words(), text()[0], 0.2, batches=text()),
    "experts": lambda: shrink(*ZOO["mixture_of_all"](), leave=Experts(1)),
    "levels": lambda: sensitivity(words(), text()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_coupling_is_never_changed(monkeypatch, call):
    seen = []
    find = Coupling.__init__

    def found(coupling, *args, **kwargs):
        find(coupling, *args, **kwargs)
        seen.append((coupling, state_of(coupling)))

    monkeypatch.setattr(Coupling, "__init__", found)
    CALLS[call]()
    assert seen
    for coupling, before in seen:
        assert state_of(coupling) == before


def state_of(coupling):
    axes = {axis for name in coupling.names() for dim in coupling.dims(name) for axis in leaves(dim)}
    inner = {axis: (axis.size, axis.bound, tuple(axis.reasons), tuple(axis.looks), axis.tied) for axis in axes}
    return str(coupling), coupling.groups, dict(coupling.frozen), list(coupling.compared), coupling.used(), inner


# ---- Laws of scores: a unit is worth what its entries are together, and blocks of rows what the whole is. ----


def subject(width=12):
    model, x = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)), torch.zeros(1, 4)
    return pruning_target(model, Scope.of(find_coupling(model, x)), [x])


def scored(subject, **given):
    groups = subject.coupling.groups
    return scores_of(subject, groups, request(**given))[groups[0].name]


def test_a_unit_is_worth_the_entries_of_its_matrices():
    it = subject()
    up, _, down = it.model
    by_hand = (up.weight.abs().sum(1) + down.weight.abs().sum(0)).double()  # no bias: there are matrices
    torch.testing.assert_close(scored(it), by_hand / by_hand.mean())


def test_where_there_are_only_vectors_they_count():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.down(self.norm(self.up(x)))

    model, x = Scale(), torch.zeros(2, 4)
    whole = pruning_target(model, Scope.of(find_coupling(model, x)), [x])
    vectors = replace(whole, weights={name: each for name, each in whole.weights.items() if each.dim() == 1})
    vectors = replace(vectors, blocks=lambda name, _: [vectors.weights[name].detach()])
    by_hand = (model.up.bias.abs() + model.norm.weight.abs() + model.norm.bias.abs()).double()
    torch.testing.assert_close(scored(vectors), by_hand.detach() / by_hand.mean().detach())


@given(st.integers(1, 9), st.integers(1, 60))
def test_blocks_are_worth_what_the_whole_is(rows, piece):
    it = subject()

    def blocks(name, step):
        assert step == rows_at_once(it.weights[name].shape)
        yield from torch.split(it.weights[name].detach(), rows * step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateur.shrinking.select._PIECE", piece)
        assert torch.equal(scored(replace(it, blocks=blocks)), scored(it))


def test_evidence_goes_to_the_weight_of_its_name():
    it = subject(5)
    evidence = {name: {"grad": torch.full_like(each, 2.0)} for name, each in it.weights.items()}
    seen = []

    def criterion(weight, *, grad):
        seen.append(grad)
        return magnitude(weight) * grad

    torch.testing.assert_close(scored(it, criterion=criterion, evidence=evidence), scored(it))
    assert [each.shape for each in seen] == [(5, 4), (3, 5)]


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"a score of 0\.weight is NaN; correct the weights"):
        scored(subject(), criterion=lambda weight: weight * torch.nan)


def test_a_key_of_pairs_is_worth_what_leaves_with_it():
    model, x = zoo.ZOO["mixture_of_pairs"]()
    it = pruning_target(model, Scope.of(find_coupling(model, x)), [x])
    (keys,) = [group for group in it.coupling.groups if group.chosen]
    held = sum(each.detach().abs().sum((1, 2)).double() for each in (model.held.up, model.held.down)).view(4, 4)
    by_hand = held.sum(0) + held.sum(1) + model.router.weight.detach().abs().sum(1).double().view(2, 4).sum(0)
    torch.testing.assert_close(scores_of(it, [keys], request())[keys.name], by_hand / by_hand.mean())
