"""Laws of scores: nothing is lost by the dense model, more is worse, padding does not count, and what is refused."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.models import NamedTexts, divergence
from secateur.models.slopes import slopes
from secateur.search import score as held_back
from secateur.search.costs import Judged, taken_of
from secateur.search.score import SCORES, ModelLoss, lost_at, share_left, split
from support.fitting import blocks, inputs
from support.measured import text, words
from support.stacks import stack


class Named(nn.Module):
    """Outputs under a name, as transformers gives them."""

    def __init__(self, name):
        super().__init__()
        self.body, self.name = words(), name

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(**{self.name: self.body(input_ids, attention_mask)})


def loss_of(model, batches, score=None, rows=1024):
    return ModelLoss(model, batches, score=score, rows=rows)


def spoiled(model, by):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("score", SCORES)
def test_nothing_is_lost_by_the_dense_model_and_more_is_worse(score):
    lost = loss_of(words(), text(), score)
    found = [lost.of(spoiled(words(), by)) for by in (0.0, 0.01, 0.1)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found == sorted(found)
    assert found[-1] > 0


@pytest.mark.parametrize(("name", "word"), [("logits", "kl"), ("last_hidden_state", "cosine"), ("other", "change")])
def test_what_fits_the_model(name, word):
    lost = loss_of(Named(name), text())
    assert (lost.word, lost.rows, lost.share) == (word, 6 * 3 * 12, 1.0)


class Several(nn.Module):
    """Answers twice, as a detector and a reader do, and says what it was thinking."""

    def __init__(self, names):
        super().__init__()
        self.names, self.body = names, nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in names)

    def forward(self, x):
        states = self.body(x)
        answers = {name: head(states) for name, head in zip(self.names, self.heads, strict=True)}
        return SimpleNamespace(last_hidden_state=states, **answers)


@pytest.mark.parametrize(
    "names", [("logits", "pred_boxes"), ("start_logits", "end_logits")], ids=lambda names: names[1]
)
def test_all_answers_count_and_states_do_not(names):
    torch.manual_seed(0)
    model, batches = Several(names), [torch.randn(2, 5, 4)]
    loss = loss_of(model, batches)
    assert loss.word == "change"
    narrower = copy.deepcopy(model)
    narrower.body = nn.Linear(4, 5)
    for head, whole in zip(narrower.heads, model.heads, strict=True):
        head.weight = nn.Parameter(whole.weight[:, :5])
    with torch.no_grad():
        narrower.body.weight.copy_(model.body.weight[:5])
        narrower.body.bias.copy_(model.body.bias[:5])
    assert loss.of(narrower) > 0
    for name, head in zip(names, model.heads, strict=True):
        (found,) = slopes(model, batches, ["body.weight"]).values()
        kept = head.weight.data.clone()
        head.weight.data.zero_()
        assert loss() > 0, f"{name} is not compared"
        (other,) = slopes(model, batches, ["body.weight"]).values()
        assert not torch.equal(other, found), f"{name} has no slope"
        head.weight.data.copy_(kept)


def test_of_one_column_and_of_pictures_it_is_no_divergence():
    for shape in ((3, 1), (2, 3, 4, 4)):
        model = nn.Linear(4, shape[-1])
        loss = ModelLoss(
            model, [torch.randn(*shape[:-1], 4)], lambda model, x: SimpleNamespace(logits=model(x)), rows=99
        )
        assert loss.word == "change"
        model.bias.data += 1
        assert loss() > 0.01


def test_it_is_the_divergence_of_logits():
    dense, other = words(), spoiled(words(), 0.1)
    batch = torch.cat(text())
    with torch.no_grad():
        p, q = (model(batch).log_softmax(-1) for model in (dense, other))
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert loss_of(dense, text(), "kl").of(other) == pytest.approx(expected, rel=1e-4)


def test_it_is_the_cosine_of_mean_states():
    dense, other = words(), spoiled(words(), 0.1)
    batch = torch.cat(text())
    with torch.no_grad():
        one, two = (model(batch).mean(1) for model in (dense, other))
    expected = float(1 - torch.cosine_similarity(one, two).mean())
    assert loss_of(dense, text(), "cosine").of(other) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("score", ["kl", "cosine"])
def test_padding_does_not_count(score):
    short = [{"input_ids": each[:, :8], "attention_mask": torch.ones(3, 8)} for each in text()]
    long = [
        {"input_ids": torch.cat([each[:, :8], each[:, :4]], 1), "attention_mask": torch.ones(3, 12)} for each in text()
    ]
    for batch in long:
        batch["attention_mask"][:, 8:] = 0
    other = spoiled(words(), 0.1)
    assert loss_of(words(), short, score).of(other) == pytest.approx(loss_of(words(), long, score).of(other), rel=1e-3)


def test_so_many_rows_are_run():
    lost = loss_of(words(), text(), "kl", rows=50)
    assert (lost.rows, round(lost.share, 6)) == (60, round(60 / 216, 6))  # 36, and two of three texts of 12


def test_a_function_is_higher_better():
    model = stack()
    lost = loss_of(model, [], lambda each: float(each.head.weight.detach().sum()))
    assert lost.of(model) == 0
    assert (lost.rows, lost.share) == (0, 0)
    with torch.no_grad():
        model.head.weight -= 1
    assert lost.of(model) == pytest.approx(model.head.weight.numel(), rel=1e-5)


# What is taken of finished models: never worse than a fixed allocation, and another one only beyond the noise.


losses = st.one_of(st.floats(0, 1e6), st.just(math.inf))


rows = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=4), min_size=1, max_size=4)


def judged(values, shift=0.0):
    return Judged.by([torch.tensor(each, dtype=torch.float64) + shift for each in values])


@given(st.dictionaries(st.sampled_from("abcdef"), losses, min_size=1), st.sets(st.sampled_from("abcdef")))
def test_nothing_fixed_loses_less_than_what_is_taken(found, fixed):
    named = {name: Judged(each) for name, each in found.items()}
    taken = taken_of(named, fixed)
    assert all(found[taken] <= found[name] for name in named if name in fixed)
    if math.isfinite(found[taken]):
        assert found[taken] == min(found.values())  # of numbers of which no error is known, the least


@given(rows, st.floats(-50, 50))
def test_what_is_better_everywhere_alike_is_better(values, shift):
    one, other = judged(values, 50), judged(values, 50 + shift)
    assert one.beats(other) == (other.loss > one.loss + 1e-9) or abs(shift) < 1e-9
    assert not (one.beats(other) and other.beats(one))


@given(rows)
def test_it_beats_not_itself(values):
    assert not judged(values).beats(judged(values))


def test_the_noise_is_of_rows_or_of_batches_whichever_is_more():
    draw = torch.Generator().manual_seed(0)
    base = torch.rand(64, generator=draw)
    alone = base + 0.05 * torch.randn(64, generator=draw)  # errors of rows by themselves
    error = float((alone - base).double().std()) / 8
    together = base + torch.tensor([0.05, -0.05, 0.05, -0.05]).repeat_interleave(16)  # of whole batches
    one = Judged.by(base.split(64))
    for other, noise in ((alone, error), (together, 0.05 / 3**0.5)):
        for factor, beaten in ((0.9, False), (1.1, True)):
            moved = other - other.mean() + base.mean() + factor * noise
            size = 64 if other is alone else 16
            assert Judged.by(base.split(size)).beats(Judged.by(moved.split(size))) == beaten
    assert one.loss == pytest.approx(float(base.mean()))


def test_sets_count_alike_however_many_rows_they_have():
    held, seen = [torch.tensor([4.0])], [torch.tensor([1.0, 3.0]), torch.tensor([2.0])]
    assert Judged.by(held, seen).loss == 3.0


def test_within_the_noise_the_fixed_allocation_is_taken_and_beyond_it_the_other():
    values = torch.tensor([1.0, 5.0, 2.0, 8.0])
    uniform = Judged.by([values])
    lucky = Judged.by([values + torch.tensor([-3.0, 2.9, -0.1, 0.1])])
    better = Judged.by([values - 0.5])
    assert lucky.loss < uniform.loss
    assert taken_of({"uniform": uniform, "step 1": lucky}, {"uniform"}) == "uniform"
    assert taken_of({"uniform": uniform, "step 1": better}, {"uniform"}) == "step 1"
    assert taken_of({"step 1": lucky, "step 2": better}, {"uniform"}) == "step 2"  # none was finished


def test_what_is_no_number_is_the_worst_there_is():
    broken = Judged.by([torch.tensor([1.0, math.nan])])
    assert broken.loss == math.inf
    assert taken_of({"uniform": broken, "searched": Judged(3.0)}, {"uniform"}) == "searched"
    assert taken_of({"uniform": Judged(3.0), "searched": broken}, {"uniform"}) == "uniform"
    assert Judged.by([torch.tensor([-1e-12])]).loss == 0.0  # rounding


# ---- What is lost on the batches held back: 0 of the dense model, a mean, and of a user's score the difference. ----


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


def test_of_several_texts_each_has_a_share_of_its_own():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    mine, theirs = torch.zeros(6, 4), torch.zeros(6, 4)
    mine[:, :2], theirs[:, 2:] = torch.randn(6, 2), torch.randn(6, 2)
    batches = NamedTexts.of({"mine": [mine[:3], mine[3:]], "theirs": [theirs]})
    loss = ModelLoss(model, batches, score="change", keep={"mine": 0.9, "theirs": 0.5})
    most = loss.most(loss.keep)
    assert (loss(), loss.kept(), most) == (0.0, {"mine": 1.0, "theirs": 1.0}, lost_at(0.9, "change"))
    with torch.no_grad():
        model.weight[:, 2:] *= 0.4  # keeps 1 - 0.6 ** 2 of what theirs are
    kept = loss.kept()
    assert kept["mine"] == 1.0
    assert loss() == pytest.approx(most * (1 - kept["theirs"]) / 0.5)
    assert loss([0, 1]) == 0.0
    assert loss() <= most or kept["theirs"] < 0.5
    assert ModelLoss(model, batches, score="change", keep={"mine": 0.9}).most({"mine": 0.9}) == most
    with pytest.raises(ValueError, match="keep= names the text 'others'; those of the batches are mine, theirs"):
        ModelLoss(model, batches, keep={"others": 0.9})
    with pytest.raises(ValueError, match="those of the batches are none: give several texts by name"):
        ModelLoss(model, [mine], keep={"mine": 0.9})
    with pytest.raises(ValueError, match="a score of your own is one number of all"):
        ModelLoss(model, batches, score=lambda _: 1.0, keep={"mine": 0.9})


def test_of_each_text_that_has_a_name_a_quarter_is_held_back():
    rest, back = split(NamedTexts.of({"a": [torch.full((1,), float(at)) for at in range(8)], "b": [torch.ones(1)]}))
    assert [float(each) for each in back] == [3.0, 7.0, 1.0]
    assert (back.names, rest.names) == (("a", "a", "b"), ("a",) * 6 + ("b",))
