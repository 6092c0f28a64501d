"""What is lost on the batches held back: 0 of the dense model, a mean, and of a user's score the difference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.models import divergence
from secateur.search import score as held_back
from secateur.search.score import ModelLoss, share_left, split
from support.fitting import blocks, inputs


@given(st.integers(2, 40))
def test_every_batch_is_on_one_side(count):
    rest, held = split(range(count))
    assert sorted([*rest, *held]) == list(range(count))
    assert len(held) == max(1, count // 4)


def test_of_one_batch_both_sides_are_all_there_is():
    assert split(["only"]) == (["only"], ["only"])


def test_there_are_batches():
    with pytest.raises(ValueError, match="there are no batches"):
        split([])


def test_the_dense_model_loses_nothing_and_another_what_its_outputs_moved():
    model, batches = blocks(2), inputs(3)
    measured = ModelLoss(model, batches)
    with torch.no_grad():
        before = [model(each) for each in batches]
        assert measured(range(3)) == 0
        model[0].down.weight.mul_(0.5)
        moved = [divergence(one, model(each)) for one, each in zip(before, batches, strict=True)]
    for some in ([0], [1, 2], [0, 1, 2]):
        total, rows = (sum(moved[at][part] for at in some) for part in (0, 1))
        assert measured(some) == pytest.approx(total / rows)


@pytest.mark.parametrize("word", ["kl", "cosine", "change"])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_add_up_to_what_is_lost(word, padded):
    model = Classes()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]) if padded else torch.ones(2, 4, dtype=torch.long)
    batch = {"ids": torch.tensor([[0, 1, 2, 3], [4, 5, 6, 6]]), "attention_mask": mask}
    measured = ModelLoss(model, [batch, batch], lambda model, batch: model(**batch).logits, word)
    other = Classes()
    rows = measured.by_row(other)
    assert len(rows) == 2
    assert float(torch.cat(rows).mean()) == pytest.approx(measured.of(other))
    assert len(rows[0]) == (2 if word == "cosine" else 5 if padded else 8)


def test_outputs_without_rows_in_common_lose_the_mean_in_each():
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), super().forward(x).mean(0, keepdim=True)

    measured = ModelLoss(Two(2, 2), [torch.randn(4, 2)], score="change")
    other = Two(2, 2)
    (rows,) = measured.by_row(other)
    assert rows.tolist() == pytest.approx([measured.of(other)] * 4)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)

    def forward(self, ids, attention_mask=None):
        return type("Outputs", (), {"logits": self.table(ids)})()


@pytest.mark.parametrize("cut", [False, True])
def test_padding_and_what_is_left_out_do_not_count(monkeypatch, cut):
    if cut:
        monkeypatch.setattr(held_back, "_NUMBERS", 15)  # three tokens of five classes
    model = Classes()
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    measured = ModelLoss(model, [{"ids": ids, "attention_mask": mask}], lambda model, batch: model(**batch))
    with torch.no_grad():
        model.table.weight[6] += torch.randn(5)
    assert measured([0]) == 0
    with torch.no_grad():
        model.table.weight[0] += torch.randn(5)
    assert measured([0]) > 0


@given(st.floats(0.01, 1), st.sampled_from(["kl", "cosine", "change"]))
def test_what_may_be_lost_leaves_just_the_share_that_is_kept(keep, word):
    most = ModelLoss(nn.Identity(), [torch.eye(3)], score=word).most(keep)
    assert share_left(most, word) == pytest.approx(keep)
    assert most >= 0


def test_of_a_score_of_ones_own_a_share_may_be_lost():
    measured = ModelLoss(nn.Identity(), [torch.eye(3)], score=lambda _: 4.0)
    assert measured.most(0.75) == 1.0
    assert measured.lost((9.0, 3.5)) == 0.5
    with pytest.raises(ValueError, match=r"the dense model's score is -1, of which no share can be kept"):
        ModelLoss(nn.Identity(), [torch.eye(3)], score=lambda _: -1.0).most(0.75)


def test_a_score_is_what_it_is_less_than_of_the_dense_model():
    model, batches = blocks(2), inputs(3)
    measured = ModelLoss(model, batches, score=lambda model: model[0].down.bias[0].item() + 3)
    assert measured.dense_score == pytest.approx(model[0].down.bias[0].item() + 3)
    with torch.no_grad():
        model[0].down.bias[0] -= 2
    assert measured(range(3)) == pytest.approx(2)
    assert measured([0]) != pytest.approx(2)  # a part of the data is compared by outputs
    assert measured.finished() == (pytest.approx(measured.now(range(3))), pytest.approx(measured.scored()))


def test_a_score_that_is_not_finite_is_the_worst_there_is():
    model = blocks(2)
    measured = ModelLoss(model, inputs(2), score=lambda model: math.nan if model[0].down.bias[0] > 90 else 1.0)
    with torch.no_grad():
        model[0].down.bias[0] = 99
    assert measured(range(2)) == math.inf


def test_a_score_is_one_number():
    with pytest.raises(TypeError, match="the score is a str; return one number, higher is better"):
        ModelLoss(blocks(2), inputs(2), score=lambda _: "good")
    with pytest.raises(ValueError, match="the dense model's score is nan; a score is a finite number"):
        ModelLoss(blocks(2), inputs(2), score=lambda _: math.nan)


def test_a_dense_model_that_overflows_is_named():
    model, batches = blocks(2), inputs(2)
    batches[1][0] = math.inf
    with pytest.raises(ValueError, match="the dense model's outputs for held-back batch 1 hold NaN or infinity"):
        ModelLoss(model, batches)
    with torch.no_grad():
        model[0].down.bias[0] = math.inf
    with pytest.raises(ValueError, match=r"0\.down\.bias: the weight of shape \(6,\) has entries that are NaN"):
        ModelLoss(model, inputs(2))


def test_a_choice_that_overflows_is_the_worst_there_is():
    model = blocks(2)
    measured = ModelLoss(model, inputs(2))
    with torch.no_grad():
        model[0].down.bias[0] = math.nan
    assert measured(range(2)) == math.inf


def test_a_word_says_how_outputs_are_compared():
    model = Classes()
    assert ModelLoss(model, [torch.tensor([[0, 1]])]).word == "kl"
    assert ModelLoss(blocks(2), inputs(2)).word == "change"
    assert ModelLoss(blocks(2), inputs(2), score="cosine").word == "cosine"
    with pytest.raises(ValueError, match="score must be one of 'kl', 'cosine', 'change', or a function, not 'f1'"):
        ModelLoss(blocks(2), inputs(2), score="f1")
