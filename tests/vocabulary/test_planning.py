"""A plan is proved before anything changes, and says of unseen text what the same choice does to it."""

import json
import math

import pytest

from secateur.vocabulary import planning
from secateur.vocabulary.axes import axes_of, builder
from secateur.vocabulary.choosing import asked
from secateur.vocabulary.planning import planned, positions_begin_behind
from secateur.vocabulary.tokens import Tokens
from support.vocabularies import KINDS, TEXT, model_of, trained

pytestmark = pytest.mark.usefixtures("few_random_texts")

MADE = {kind: Tokens.of(json.loads(trained(kind).to_str())) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_what_becomes_of_the_text(kind):
    tokens = MADE[kind]
    texts = [TEXT, "Hedges and roses.\n" * 40]
    cover = asked(cover=0.95, with_text=True)
    found = planned(tokens, texts, cover, set(), tokens.size, "it")
    every = [tokens.backend.encode(text, add_special_tokens=False).ids for text in found.counted.passages]
    assert found.counted.counts.sum() == sum(map(len, every))
    after = [found.smaller.backend.encode(text, add_special_tokens=False).ids for text in found.counted.passages]
    assert found.after == sum(map(len, after))
    assert found.seen == sum(number in set(found.order) for ids in every for number in ids)
    assert sum(found.gone.values()) <= found.counted.tokens - found.seen
    assert list(found.gone.values()) == sorted(found.gone.values(), reverse=True)
    assert found.proof.startswith("proved on ")


@pytest.mark.parametrize("kind", KINDS)
def test_unseen_text_is_the_last_tenth(kind, monkeypatch):
    monkeypatch.setattr("secateur.vocabulary.planning.PASSAGE", 1)
    tokens = MADE[kind]
    common = ["The rose and the hedge.\n"] * 18
    found = planned(
        tokens, [*common, "The rose.\n", TEXT[:90]], asked(exact=True, with_text=True), set(), tokens.size, "it"
    ).unseen
    assert found.passages[0] == 2
    assert found.passages[1] == 1
    assert 0 < found.tokens[1] < found.tokens[0]
    assert (found.unknown > 0) == (kind == "WordLevel")
    assert (found.pieces > 0) == (kind != "WordLevel")
    assert planned(tokens, ["The rose."], asked(exact=True, with_text=True), set(), tokens.size, "it").unseen is None


def test_what_would_be_read_otherwise_is_refused(monkeypatch):
    tokens = MADE["byte level"]
    whole = Tokens.pruned

    def wrong(self, order):
        values = whole(self, order)
        vocabulary = values["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        return values

    monkeypatch.setattr(Tokens, "pruned", wrong)
    with pytest.raises(ValueError, match=r"it: the tokens of .* though each of them stays"):
        planned(tokens, ["a hedge"], asked(exact=True, with_text=True), set(), tokens.size, "it")
    monkeypatch.setattr(planning, "agree", lambda texts, *_, **__: (0, [[] for _ in texts]))
    with pytest.raises(ValueError, match=r"it: the pair .* would be read otherwise"):
        planned(tokens, ["a hedge"], asked(exact=True, with_text=True), set(), tokens.size, "it")


def test_nothing_that_leaves_is_said():
    tokens = MADE["WordLevel"]
    with pytest.raises(ValueError, match=r"it: all .* tokens would stay"):
        planned(tokens, None, asked(keep=999, with_text=False), set(), tokens.size, "it")


def test_positions_that_are_counted_from_the_padding_keep_its_number():
    for family, expected in [("roberta", {0, 1, 2}), ("bert", set()), ("tied", set())]:
        model = model_of(family, 48)
        model.config.pad_token_id = 3
        model = type(model)(model.config)
        axes = axes_of(model, builder(type(model)))
        assert positions_begin_behind(model, axes, 3) == expected
        assert positions_begin_behind(model, axes, None) == set()


def test_a_sample_keeps_what_unseen_text_needs():
    """The fewest of the tokenizer's own order with which 99.5 % of the last tenth stay; one fewer is too few."""
    tokens = MADE["byte level"]
    texts = ["Pruned hedges and gardeners.\n" * 2000, "Pruned hedges, a rose.\n" * 100]
    found = planned(tokens, texts, asked(with_text=True), set(), tokens.size, "it")
    exact = planned(tokens, texts, asked(exact=True, with_text=True), set(), tokens.size, "it")
    sample, unseen = found.sample, found.unseen
    assert exact.sample is None
    assert set(exact.order) <= set(found.order)
    assert sample.tokens == unseen.tokens[0]
    assert unseen.tokens[1] >= sample.share * unseen.tokens[0] - 1e-6
    assert sample.share >= 0.995
    assert set(tokens.ranked()[: sample.first]) <= set(found.order)
    once = found.counted.counts == 1
    assert sample.once[0] == once.sum() / found.counted.tokens >= sample.once[1]


def test_of_a_short_text_those_that_it_has_once_say_what_is_missing():
    """The last tenth has no new token, and many of the others were met once: so more are to come."""
    tokens = MADE["byte level"]
    order = tokens.ranked()
    texts = [tokens.backend.decode(order[len(order) // 2 : len(order) * 4 // 5]) + "\n", "Pruned hedges.\n" * 2000]
    counted = planning.count(tokens.backend, texts, tokens.size)
    sample = planning._sample(tokens, counted, asked(with_text=True), set(), tokens.size)
    rare = [at for at, number in enumerate(order) if counted.counts[number] == 1]
    assert sample.share == 1
    assert sample.once[0] > 0.0015
    assert sample.once[1] <= 0.0015 or sample.first == math.ceil(0.9 * len(order))
    assert rare[0] < sample.first < len(order)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_too_short_keeps_nine_tenths_of_the_order(kind):
    tokens = MADE[kind]
    sample = planning._sample(
        tokens, planning.count(tokens.backend, ["a rose"], tokens.size), asked(with_text=True), set(), tokens.size
    )
    assert sample.share is None
    assert sample.first >= 0.9 * len(tokens.model) == 0.9 * sample.of
    assert sorted(tokens.ranked()) == sorted(tokens.model.values())


def test_exact_is_of_a_text_alone():
    for how in ({"keep": 9}, {"cover": 0.5}, {"script": "Latin", "with_text": False}):
        with pytest.raises(ValueError, match="exact keeps the tokens that a text has"):
            asked(**{"exact": True, "with_text": True, **how})
