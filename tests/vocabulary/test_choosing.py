"""As many stay as were asked for, the rarest leave first, and what stays keeps what it is made of."""

import json

import numpy as np
import pytest

from secateur.vocabulary.choosing import asked, choose
from secateur.vocabulary.planning import count
from secateur.vocabulary.tokens import Tokens
from support.vocabularies import KINDS, TEXT, trained

MADE = {kind: Tokens.of(json.loads(trained(kind).to_str())) for kind in KINDS}


def chosen(tokens, text=TEXT, needed=(), rows=None, **how):
    counts = None if text is None else count(tokens.backend, [text], tokens.size).counts
    wanted = asked(**how, with_text=text is not None)
    return choose(tokens, counts, wanted, set(needed), tokens.size if rows is None else rows), counts


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_text_has_stays_and_little_else(kind):
    tokens = MADE[kind]
    kept, counts = chosen(tokens, TEXT[:300])
    assert set(np.flatnonzero(counts)) <= set(kept)
    parents = tokens.parents(kept)
    must = {*tokens.needed(), *tokens.characters(), *np.flatnonzero(counts)}
    for number in kept:
        assert number in must or any(number in parts for parts in parents.values())
    assert {part for parts in parents.values() for part in parts} <= set(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_as_many_as_asked(kind):
    tokens = MADE[kind]
    least = len(chosen(tokens, TEXT[:60])[0])
    for keep in range(least, tokens.size, max(1, (tokens.size - least) // 5)):
        assert len(chosen(tokens, TEXT[:60], keep=keep)[0]) == keep
        assert len(chosen(tokens, None, keep=keep)[0]) == keep
    with pytest.raises(ValueError, match="have to stay, more than the 3 asked for"):
        chosen(tokens, keep=3)


def test_the_rarest_leave_first():
    tokens = MADE["WordLevel"]
    kept, counts = chosen(tokens, keep=20)
    left = set(range(tokens.size)) - set(kept)
    free = set(kept) - tokens.needed()
    assert max(counts[number] for number in left) <= min(counts[number] for number in free)
    same, _ = chosen(tokens, None, keep=20)
    assert set(same) - tokens.needed() == set(range(4, 19))  # its own order, in which frequent words come first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cover", [1.0, 0.99, 0.9, 0.5])
def test_the_share_of_the_text_that_stays(kind, cover):
    kept, counts = chosen(MADE[kind], cover=cover)
    assert counts[kept].sum() >= cover * counts.sum() - 1e-6
    if cover == 1:
        assert set(kept) == set(chosen(MADE[kind])[0])


def test_both_limits_hold():
    tokens = MADE["byte level"]
    covered = len(chosen(tokens, cover=0.9)[0])
    assert len(chosen(tokens, cover=0.9, keep=covered + 9)[0]) == covered
    assert len(chosen(tokens, cover=1.0, keep=covered)[0]) == covered


@pytest.mark.parametrize("kind", KINDS)
def test_a_multiple_is_filled_with_the_next(kind):
    tokens = MADE[kind]
    kept = set(chosen(tokens, TEXT[:60])[0])
    more = set(chosen(tokens, TEXT[:60], multiple=16)[0])
    assert kept <= more
    assert len(more) % 16 == 0 or len(more) == tokens.size
    assert len(more) - len(kept) < 16


def test_letters_of_other_scripts_leave_whatever_the_text_has():
    for kind in KINDS:
        tokens = MADE[kind]
        kept, _ = chosen(tokens, script="Latin")
        parts = {part for parents in tokens.parents(kept).values() for part in parents} | tokens.needed()
        letters = [tokens.text_of(tokens.by_id[number]) for number in kept if number not in parts]
        assert not any("А" <= letter <= "я" for text in letters for letter in text or "")
        both, _ = chosen(tokens, script=["Latin", "Cyrillic"])
        assert len(both) > len(kept)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": True}, "keep must be at least 1"),
        ({"cover": 0.0}, r"cover must be in \(0, 1\]"),
        ({"cover": float("nan")}, r"cover must be in \(0, 1\]"),
        ({"multiple": 0}, "multiple must be at least 1"),
        ({"cover": 0.5, "with_text": False}, "give the text as well"),
        ({"with_text": False}, "nothing says which tokens may leave"),
        ({"script": "Elvish"}, "no script"),
    ],
)
def test_what_cannot_be_asked_is_said(how, message):
    with pytest.raises(ValueError, match=message):
        asked(**{"with_text": True, **how})
