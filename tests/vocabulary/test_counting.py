"""Every token of a text is counted once, and passages joined are the text."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.vocabulary import planning as counting
from secateur.vocabulary.planning import count, encoded, passages
from secateur.vocabulary.tokens import Tokens
from support.vocabularies import TEXT, trained

TOKENS = Tokens.of(json.loads(trained("byte level").to_str()))


@given(st.text(st.sampled_from("ab \n\té"), max_size=400), st.integers(1, 50), st.integers(51, 90))
def test_passages_are_the_text(text, short, long):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "PASSAGE", short)
        patch.setattr(counting, "LONGEST", long)
        found = list(passages(text))
    assert "".join(found) == text
    assert all(len(each) <= long for each in found)


def test_counts_are_those_of_the_passages(monkeypatch):
    monkeypatch.setattr(counting, "_AT_ONCE", 3)
    found = count(TOKENS.backend, [TEXT, "", TEXT[:99]], TOKENS.size)
    every = np.concatenate(encoded(TOKENS.backend, [*passages(TEXT), TEXT[:99]]))
    assert np.array_equal(found.counts, np.bincount(every, minlength=TOKENS.size))
    assert found.tokens == len(every)
    assert found.words == len(TEXT.split()) + len(TEXT[:99].split())
    assert "".join(found.passages) == TEXT + TEXT[:99]
    assert np.array_equal(np.concatenate(found.ids), every)
    monkeypatch.setattr(counting, "HELD", 300)
    less = count(TOKENS.backend, [TEXT], TOKENS.size)
    assert sum(map(len, less.passages)) <= 300
    assert less.counts.sum() > sum(map(len, less.ids))


def test_of_texts_with_names_the_last_tenth_of_each_stands_last():
    lines = {"code": "a rose\n" * 400, "maths": "an edge\n" * 800}
    found = count(TOKENS.backend, {name: [text] for name, text in lines.items()}, TOKENS.size)
    alone = {name: count(TOKENS.backend, [text], TOKENS.size) for name, text in lines.items()}
    tenths = [len(each.passages) // 10 for each in alone.values()]
    assert min(tenths) > 0
    assert found.passages[-sum(tenths) :] == [
        *alone["code"].passages[-tenths[0] :],
        *alone["maths"].passages[-tenths[1] :],
    ]
    assert sorted(found.passages) == sorted(alone["code"].passages + alone["maths"].passages)
    assert np.array_equal(found.counts, alone["code"].counts + alone["maths"].counts)
    assert found.by_text == {name: (len(each.passages), int((each.counts > 0).sum())) for name, each in alone.items()}
    assert alone["code"].by_text == {}


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ValueError, match="the text 'maths' has no tokens"):
        count(TOKENS.backend, {"code": ["a"], "maths": [""]}, TOKENS.size)
    with pytest.raises(ValueError, match="no text has a name"):
        count(TOKENS.backend, {}, TOKENS.size)
    with pytest.raises(ValueError, match="no tokens: there is nothing to count"):
        count(TOKENS.backend, [""], TOKENS.size)
    with pytest.raises(TypeError, match=r"a list of them, \[text\] for a single one"):
        count(TOKENS.backend, "a rose", TOKENS.size)
    with pytest.raises(TypeError, match="texts are strings, not bytes"):
        count(TOKENS.backend, [b"a"], TOKENS.size)
    with pytest.raises(ValueError, match="half of a surrogate pair at character 1,"):
        count(TOKENS.backend, ["a\ud800b"], TOKENS.size)


def test_a_text_that_the_tokenizer_fails_on_is_said():
    values = json.loads(trained("Unigram").to_str())
    values["model"]["unk_id"] = None
    with pytest.raises(ValueError, match=r"fails on a text .*unknown token"):
        count(Tokens.of(values).backend, ["a rose \U00010123"], 500)
