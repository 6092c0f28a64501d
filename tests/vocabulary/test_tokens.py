"""The law for every kind of tokenizer: a text whose tokens all stay is read as before, under new numbers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from secateur.vocabulary.choosing import asked, choose
from secateur.vocabulary.planning import count, random_texts
from secateur.vocabulary.tokens import Tokens, backend_of
from support.vocabularies import KINDS, TEXT, renamed_alike, trained

PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
MADE = {kind: Tokens.of(json.loads(trained(kind).to_str())) for kind in KINDS}


def smaller(tokens, order):
    return backend_of(json.dumps(tokens.pruned(order)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(st.data())
def test_whatever_leaves_the_others_are_read_as_before(kind, data):
    tokens = MADE[kind]
    text = data.draw(st.lists(st.sampled_from(TEXT.split()), min_size=1, max_size=40).map(" ".join))
    counts = count(tokens.backend, [text], tokens.size).counts
    scripts = data.draw(st.sampled_from([None, "Latin", ["Latin", "Cyrillic"]]))
    most = choose(tokens, counts, asked(script=scripts, with_text=True), set(), tokens.size)
    keep = data.draw(st.integers(min(len(most), tokens.size - 1), tokens.size - 1))
    chosen = choose(tokens, counts, asked(keep, script=scripts, with_text=True), set(), tokens.size)
    assert len(chosen) <= keep
    order = tokens.order(chosen)
    new = smaller(tokens, order)
    drawn = data.draw(st.lists(st.text(max_size=12), max_size=20))
    words = data.draw(st.lists(st.lists(st.sampled_from(TEXT.split()), max_size=5).map(" ".join), max_size=20))
    texts = [text, *drawn, *words, *random_texts(tokens, order, count=60, seed=keep)]
    assert renamed_alike(tokens.backend, new, order, texts)
    assert renamed_alike(tokens.backend, new, order, texts, special=False)
    assert new.get_vocab_size() == len(order)
    assert {new.token_to_id(tokens.by_id[number]): number for number in order} == dict(enumerate(order))


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_that_stays_is_still_made_of_its_text(kind):
    tokens = MADE[kind]
    counts = count(tokens.backend, [TEXT[:60]], tokens.size).counts
    order = tokens.order(choose(tokens, counts, asked(with_text=True), set(), tokens.size))
    assert len(order) < tokens.size
    new, checked = smaller(tokens, order), 0
    for number in order:
        text = tokens.backend.decode([int(number)], skip_special_tokens=False)
        before = tokens.backend.encode(text, add_special_tokens=False).tokens
        if before == [tokens.by_id[number]]:
            assert new.encode(text, add_special_tokens=False).tokens == before
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_to_stay_stays(kind):
    tokens = MADE[kind]
    least = choose(tokens, None, asked(script="Hiragana", with_text=False), set(), tokens.size)
    kept = {tokens.by_id[number] for number in least}
    assert {"<pad>", "<s>", "</s>", "<unk>", "<|rose|>"} <= kept
    assert tokens.needed() <= set(least)
    if kind in ("byte level", "ignore merges"):
        assert tokens.falls_back
        assert sum(len(each) == 1 for each in kept) == 256
    if "bytes" in kind or kind == "byte fallback":
        assert tokens.falls_back
        assert {"<0x00>", "<0xFF>"} <= kept
    if kind in ("characters", "suffix", "WordPiece", "Unigram"):
        assert not tokens.falls_back
        least = len(tokens.needed() | tokens.characters())
        some = choose(tokens, None, asked(least, with_text=False), set(), tokens.size)
        assert tokens.characters() <= set(some)
    if kind.startswith("Unigram"):
        scores = dict(tokens.values["model"]["vocab"])
        assert min(scores.values()) in {scores[each] for each in kept & scores.keys()}


def test_the_token_that_pads_stays_and_its_number_follows():
    """Whatever it is: here an ordinary one."""
    values = dict(MADE["WordPiece"].values)
    token, number = max(values["model"]["vocab"].items(), key=lambda each: each[1])
    tokens = Tokens.of({**values, "padding": {**PADDING, "pad_id": number, "pad_token": token}})
    order = choose(tokens, None, asked(script="Hiragana", with_text=False), set(), tokens.size)
    smaller = backend_of(json.dumps(tokens.pruned(order)))
    assert smaller.token_to_id(token) == tokens.pruned(order)["padding"]["pad_id"] < number


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_follow_and_nothing_else_changes(kind):
    values = {**MADE[kind].values, "padding": {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0,
              "pad_type_id": 0, "pad_token": "<pad>", "pad_to_multiple_of": None}}  # fmt: skip
    tokens = Tokens.of(values)
    order = tokens.order(sorted({*tokens.needed(), *tokens.characters()} - {0} | {0}))
    pruned = tokens.pruned(order)
    assert pruned["padding"]["pad_id"] == list(order).index(0)
    same = {key for key in values if values[key] == pruned[key]}
    assert same >= {"version", "normalizer", "pre_tokenizer", "decoder", "truncation"}
    assert Tokenizer.from_str(json.dumps(pruned)).encode("a").ids[0] == list(order).index(1)
    assert [each["content"] for each in pruned["added_tokens"]] == [each["content"] for each in values["added_tokens"]]


def test_merges_keep_the_form_in_which_they_were_written():
    values = json.loads(trained("byte level").to_str())
    values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
    tokens = Tokens.of(values)
    pruned = tokens.pruned(tokens.order([*range(300), *tokens.added.values()]))
    assert all(isinstance(each, str) for each in pruned["model"]["merges"])
    assert Tokens.of(pruned).merges.pairs == [
        pair for pair in tokens.merges.pairs if tokens.model[tokens.merges.merged(*pair)] < 300
    ]


def wordpieces(*tokens):
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({each: at for at, each in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokens.of(json.loads(tokenizer.to_str()))


def test_a_word_that_was_unknown_stays_unknown():
    tokens = wordpieces("<unk>", "a", "ab", "##bc", "##b")  # abc: ab, and no piece begins with c
    assert tokens.backend.encode("abc").tokens == ["<unk>"]
    assert tokens.open_pieces() == {3}
    kept = choose(tokens, None, asked(keep=3, with_text=False), set(), 5)
    assert 3 not in kept
    assert wordpieces("<unk>", "a", "ab", "##bc", "##b", "##c").open_pieces() == set()
    assert MADE["WordPiece"].open_pieces() == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["model"].update(dropout=0.1), "draws lots"),
        (lambda values: values["model"].update(type="Mine"), "no tokenizer that the tokenizers library reads"),
        (lambda values: values.pop("model"), "no tokenizer that the tokenizers library reads"),
        (lambda values: values["model"].update(merges=[["x", "y"]]), "no tokenizer that the tokenizers library reads"),
        (lambda values: values["model"].update(vocab=[]), "no tokenizer that the tokenizers library reads"),
        (lambda values: values["model"].update(continuing_subword_prefix="x"), "does not begin with x"),
        (lambda values: values["model"]["vocab"].update(far=1 << 31), "'far' the number 2,147,483,648"),
        (lambda values: values["added_tokens"].append({**values["added_tokens"][0], "content": ""}), "leaves out"),
        (lambda values: values.update(model=[]), "no tokenizer that the tokenizers library reads"),
    ],
)
def test_what_is_no_tokenizer_is_said(change, message):
    values = json.loads(trained("byte level").to_str())
    change(values)
    with pytest.raises(ValueError, match=message):
        Tokens.of(values)


def test_words_without_one_for_the_unknown_are_refused():
    from tokenizers import models

    values = json.loads(Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).to_str())
    with pytest.raises(ValueError, match="no token for what is unknown"):
        Tokens.of(values)
    values["model"]["vocab"] = {"a": 0, "<unk>": 0}
    with pytest.raises(ValueError, match="two tokens of one number"):
        Tokens.of(values)


def test_the_order_is_the_old_one_and_added_tokens_come_last():
    tokens = MADE["Unigram"]
    rose = tokens.added["<|rose|>"]
    assert list(tokens.order({rose, 5, 3, 9_999})) == [3, 5, rose, 9_999]
    assert np.array_equal(tokens.order([]), np.array([], dtype=np.int64))


def test_merges_that_make_each_other_in_a_circle_stay():
    """One of a token with the prefix alone makes that token again; two may make each other."""
    values = json.loads(trained("suffix").to_str())
    model = values["model"]
    for token in ("@@", "@", "@@@", "@@q", "@@@q"):
        model["vocab"].setdefault(token, max(model["vocab"].values()) + 2)
    model["merges"] += [["a", "@@"], ["@", "@@@q"], ["@@@", "@@q"]]
    tokens = Tokens.of(values)
    kept = choose(tokens, None, asked(keep=len(model["vocab"]) - 3, with_text=False), set(), tokens.size)
    assert {model["vocab"][each] for each in ("a", "@@q", "@@@q")} <= set(kept.tolist())
    Tokens.of(tokens.pruned(tokens.order(kept)))
