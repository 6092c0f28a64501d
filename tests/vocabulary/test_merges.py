"""What a token is made of is what byte-pair encoding makes it of, in a text and alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from secateur.vocabulary.tokens import Merges, pairs_of


@st.composite
def made(draw):
    """A model of byte pairs of few letters, in which tokens are made in several ways."""
    tokens = ["a", "b", "c"]
    pairs = []
    for _ in range(draw(st.integers(1, 12))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in pairs and len("".join(pair)) < 9:
            pairs.append(pair)
            tokens += [] if "".join(pair) in tokens else ["".join(pair)]
    return {"vocab": {token: at for at, token in enumerate(tokens)}, "merges": pairs}


@given(made())
def test_the_parents_are_the_last_merge_of_a_token_that_stands_alone(model):
    merges = Merges(model)
    whole = Tokenizer(models.BPE(vocab=model["vocab"], merges=model["merges"]))
    for token in model["vocab"]:
        parents = merges.parents(token)
        if whole.encode(token).tokens != [token]:
            continue
        if len(token) == 1:
            assert parents == ()
            continue
        assert merges.merged(*parents) == token
        # without the last merge the two are what is left
        left = [pair for pair in model["merges"] if pair != parents]
        assert Tokenizer(models.BPE(vocab=model["vocab"], merges=left)).encode(token).tokens != [token]


@given(made(), st.data())
def test_a_text_is_read_as_before_if_what_its_tokens_are_made_of_stays(model, data):
    """The law itself, over all texts of up to six letters."""
    merges = Merges(model)
    kept = {"a", "b", "c", *data.draw(st.sets(st.sampled_from(sorted(model["vocab"]))))}
    todo = list(kept)
    while todo:
        new = set(merges.parents(todo.pop())) - kept
        kept |= new
        todo += new
    old = Tokenizer(models.BPE(vocab=model["vocab"], merges=model["merges"]))
    vocabulary = {token: at for at, token in enumerate(sorted(kept))}
    less = Tokenizer(models.BPE(vocab=vocabulary, merges=merges.left(kept)))
    for length in range(1, 7):
        for letters in itertools.product("abc", repeat=length):
            before = old.encode("".join(letters)).tokens
            if set(before) <= kept:
                assert less.encode("".join(letters)).tokens == before


@pytest.mark.parametrize(
    ("model", "token", "characters"),
    [
        ({"continuing_subword_prefix": "##"}, "ab", ["a", "##b"]),
        ({"continuing_subword_prefix": "##"}, "##ab", ["##a", "##b"]),
        ({"continuing_subword_prefix": "##"}, "##", ["#", "###"]),
        ({"end_of_word_suffix": "</w>"}, "ab</w>", ["a", "b</w>"]),
        ({"end_of_word_suffix": "</w>"}, "</w>", ["<", "/", "w", ">"]),
        ({"continuing_subword_prefix": "@", "end_of_word_suffix": "$"}, "@ab$", ["@a", "@b$"]),
        ({}, "", []),
    ],
)
def test_what_merging_begins_with(model, token, characters):
    assert Merges({"vocab": {}, "merges": [], **model}).characters(token) == characters


def test_both_forms_of_merges_are_read():
    assert pairs_of({"merges": ["a b", ["c", "d e"]]}) == [("a", "b"), ("c", "d e")]


def test_a_token_with_a_letter_that_is_none_keeps_all_that_make_it():
    model = {"vocab": {"ab": 0, "c": 1, "a": 2, "bc": 3, "abc": 4}, "merges": [["ab", "c"], ["a", "bc"]]}
    assert set(Merges(model).parents("abc")) == {"ab", "c", "a", "bc"}
