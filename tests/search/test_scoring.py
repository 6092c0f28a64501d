"""Laws of scores: nothing is lost by the dense model, more is worse, padding does not count, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from secateur.search import ModelLoss
from secateur.search.score import SCORES
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
