"""Functions that choose along a dimension: of what is chosen between the call follows, of all else it stays whole."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.coupling import find_coupling
from support.traced import assert_a_call_on_slices_gives_the_slices_of_its_result

# name: (function of tensors, their sizes, how many axes stay free)
CALLS = {
    "softmax": (functools.partial(torch.softmax, dim=1), "a,b,c", 2),
    "log_softmax": (functools.partial(F.log_softmax, dim=0), "a,b", 1),
    "cumsum": (functools.partial(torch.cumsum, dim=1), "a,b,c", 2),
    "topk": (lambda a: a.topk(2, dim=1).values, "a,B,c", 2),
    "places that are not used": (lambda a: a.topk(2, dim=1), "a,B,c", 2),
    "the largest": (lambda a: a.amax(1), "a,b,c", 2),
    "the place of the largest": (lambda a: a.argmax(-1).float(), "a,b", 1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slices_gives_the_slices_of_its_result(name, seed):
    assert_a_call_on_slices_gives_the_slices_of_its_result(*CALLS[name], seed)


class Chooses(nn.Module):
    """Rows of a table, by what a layer says of them."""

    def __init__(self, take, rows=5):
        super().__init__()
        self.rows, self.take = rows, take
        self.score, self.out = nn.Linear(3, rows), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(rows, 4))

    def forward(self, x):
        return self.out(self.take(self, self.score(x)))


def weighed(self, mask):
    return mask.to(self.table.dtype) @ self.table


# how rows are taken by scores, of which the rows may be fewer
FOLLOWED = {
    "rows by places": lambda self, scores: self.table[scores.topk(2).indices].sum(1),
    "rows by the largest": lambda self, scores: self.table[scores.argmax(-1)],
    "the largest, with its place": lambda self, scores: self.table[scores.max(-1)[1]],
    "looked up": lambda self, scores: F.embedding(scores.topk(2).indices, self.table).sum(1),
    "selected": lambda self, scores: self.table.index_select(0, scores.argmax(-1)),
    "one_hot": lambda self, scores: weighed(self, F.one_hot(scores.argmax(-1), self.rows)),
    "one_hot with one more": lambda self, scores: weighed(
        self, F.one_hot(scores.argmax(-1), self.rows + 1)[:, : self.rows]
    ),
    "scattered": lambda self, scores: weighed(
        self, torch.zeros_like(scores).scatter(1, scores.topk(2).indices, scores.topk(2).values)
    ),
    "gathered": lambda self, scores: (
        scores.softmax(-1).gather(1, scores.topk(2).indices).unsqueeze(-1) * self.table[scores.topk(2).indices]
    ).sum(1),
    "joined places": lambda self, scores: self.table[
        torch.cat([scores.argmax(-1, keepdim=True), scores.topk(2).indices], 1)
    ].sum(1),
    "counted": lambda self, scores: weighed(
        self, torch.bincount(scores.argmax(-1), minlength=self.rows).expand(scores.shape[0], -1)
    ),
    "where it is true": lambda self, scores: torch.zeros(
        scores.shape[0], self.table.shape[1], dtype=scores.dtype
    ).index_add(
        0, *(lambda token, row: (token, self.table[row]))(*torch.where(scores == scores.amax(-1, keepdim=True)))
    ),
}

# and of which they may not
WHOLE = {
    "a number in the code": lambda self, scores: self.table[scores.argmax(-1)] + (scores.argmax(-1) == 1)[:, None],
    "out of torch": lambda self, scores: self.table[scores.argmax(-1)] + scores.argmax(-1)[0].item(),
    "one_hot of a number": lambda self, scores: weighed(self, F.one_hot(scores.argmax(-1), 5)),
    "the smallest": lambda self, scores: self.table[scores.topk(2, largest=False).indices].sum(1),
    "computed places": lambda self, scores: self.table[(scores.argmax(-1) + 1) % self.rows],
    "written over": lambda self, scores: self.table[scores.argmax(-1).mul_(0)],
    "sorted": lambda self, scores: self.table[scores.sort(-1).indices[:, 0]],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_rows_that_scores_choose_between_may_be_fewer(name):
    model = Chooses(FOLLOWED[name])
    coupling = find_coupling(model, torch.randn(6, 3))
    (rows,) = [group for group in coupling.groups if group.chosen]
    assert rows.size == model.rows
    assert set(rows.members) == {("score.weight", 0), ("score.bias", 0), ("table", 0)}


@pytest.mark.parametrize("name", WHOLE)
def test_rows_stay_where_it_is_not_known_that_scores_alone_choose(name):
    coupling = find_coupling(Chooses(WHOLE[name]), torch.randn(6, 3))
    assert not any(group.chosen for group in coupling.groups)
    assert ("score.weight", 0) in coupling.frozen or ("table", 0) in coupling.frozen


def test_as_many_stay_as_are_chosen():
    coupling = find_coupling(Chooses(FOLLOWED["rows by places"]), torch.randn(6, 3))
    (rows,) = [group for group in coupling.groups if group.chosen]
    assert not coupling.contradicted({rows.name: 2})
    assert coupling.contradicted({rows.name: 1}) == [rows]
    assert coupling.least(rows) == 2
