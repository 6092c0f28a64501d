"""How far a token is from what is read instead: the formula by hand, what is read instead, and what follows of it."""

import json

import numpy as np
import pytest
import torch

from secateur import shrink_vocabulary
from secateur.checkpoints import open_checkpoint
from secateur.vocabulary.choosing import asked, choose, distances, rows_in_files, rows_of_tensor
from secateur.vocabulary.planning import count
from secateur.vocabulary.tokens import Tokens, backend_of
from support.vocabularies import BPES, KINDS, TEXT, model_of, trained, wrapped

MADE = {kind: Tokens.of(json.loads(trained(kind).to_str())) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_instead_is_what_the_tokenizer_without_it_reads(kind):
    tokens, checked = MADE[kind], 0
    parts = {part for its in tokens.parents(range(tokens.size)).values() for part in its}
    for token, number in tokens.model.items():
        text = tokens.text_of(token) or ""
        text = text if tokens.is_byte_level else text.replace("▁", " ").strip()
        stays = number in tokens.needed() | tokens.characters() | parts
        if stays or tokens.backend.encode(text, add_special_tokens=False).ids != [number]:
            continue
        order = tokens.order(set(range(tokens.size)) - {number})
        read = backend_of(json.dumps(tokens.pruned(order))).encode(text, add_special_tokens=False).ids
        found = [int(order[each]) for each in read]
        assert list(tokens.instead(number)) == ([] if tokens.unknown in found else found), token
        checked += 1
    assert checked >= 3  # of some kinds few words are there without a space


def test_the_distance_by_hand():
    tokens = MADE["WordPiece"]
    rows = torch.randn(tokens.size, 8)
    pieces = next(
        (number, tokens.instead(number)) for number in tokens.model.values() if len(tokens.instead(number)) > 1
    )
    number, instead = pieces[0], list(pieces[1])
    mean = rows[instead].mean(0)
    expected = 1 - float(rows[number] @ mean / rows[number].norm() / mean.norm())
    distance = distances(tokens, rows_of_tensor(rows.bfloat16()), tokens.size)
    assert distance(number) == pytest.approx(expected, abs=0.05)
    distance = distances(tokens, rows_of_tensor(rows), tokens.size)
    assert distance(number) == pytest.approx(expected, abs=1e-5)
    assert distance(tokens.unknown) == 1  # nothing is read instead
    rows[number] = mean
    assert distance(number) == pytest.approx(expected, abs=1e-5)  # computed once
    assert 0 < distances(tokens, rows_of_tensor(rows), tokens.size)(number) < 1e-5
    rows[number] = torch.nan
    assert distances(tokens, rows_of_tensor(rows), tokens.size)(number) == 1
    assert distances(tokens, rows_of_tensor(rows), number)(number) == 1  # the model has no such row


@pytest.mark.parametrize("kind", ["byte level", "Unigram", "WordPiece"])
def test_of_tokens_as_rare_the_nearest_leaves_first(kind):
    tokens = MADE[kind]
    counts = count(tokens.backend, [TEXT], tokens.size).counts
    free = set(choose(tokens, counts, asked(with_text=True), set(), tokens.size))
    near = {number: 0.01 + number % 7 for number in range(tokens.size)}
    order = choose(tokens, counts, asked(len(free) - 30, with_text=True), set(), tokens.size, near.__getitem__)
    left = free - set(order)
    assert len(left) == 30
    if kind not in BPES:  # in which what leaves makes others leaves
        fixed = tokens.needed() | tokens.characters()
        stays = [counts[each] * near[each] for each in free - left - fixed]
        assert max(counts[each] * near[each] for each in left) <= min(stays)


def test_a_model_and_its_directory_choose_alike(tmp_path):
    tokenizer = wrapped("byte level")
    model = model_of("tied", len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "dense")
    model.save_pretrained(tmp_path / "dense")
    how = {"keep": 330, "rank": "distance"}
    there = shrink_vocabulary(tmp_path / "dense", texts=[TEXT[:900]], out=tmp_path / "out", **how)
    plain = shrink_vocabulary(tmp_path / "dense", texts=[TEXT[:900]], keep=330)
    here = shrink_vocabulary(model, tokenizer, [TEXT[:900]], **how)
    assert np.array_equal(there.order, here.order)
    assert len(there.order) == len(plain.order)
    assert not np.array_equal(there.order, plain.order)
    rows = rows_in_files(open_checkpoint(tmp_path / "out"), ["nowhere", "model.embed_tokens.weight"])
    assert torch.equal(rows(7), model.model.embed_tokens.weight[7])


def test_pieces_that_no_text_is_read_as_may_leave():
    values = json.loads(trained("WordPiece").to_str())
    vocabulary = values["model"]["vocab"]
    dead = ["##,", "##!", "##花"]
    vocabulary |= {token: len(vocabulary) + at for at, token in enumerate(dead)}
    tokens = Tokens.of(values)
    assert {tokens.by_id[number] for number in tokens.unmade()} >= set(dead)
    assert not {tokens.by_id[number] for number in tokens.unmade()} & {"##a", "##1", "##я", ",", "a"}
    kept = choose(tokens, None, asked(tokens.size - 3, with_text=False), set(), tokens.size)
    assert {tokens.model[each] for each in dead}.isdisjoint(kept)
    counts = np.zeros(tokens.size, dtype=np.int64)
    counts[vocabulary["##!"]] = 1  # a tokenizer that reads it after all
    assert vocabulary["##!"] in choose(tokens, counts, asked(with_text=True), set(), tokens.size)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": "far"}, "rank must be 'count' or 'distance', not 'far'"),
        ({"rank": "distance", "keep": 9, "with_text": False}, 'rank="distance" weighs how often a text has each token'),
    ],
)
def test_what_cannot_be_asked_is_said(how, message):
    with pytest.raises(ValueError, match=message):
        asked(**{"with_text": True, **how})
