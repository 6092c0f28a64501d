"""The law is seen where it holds, and told where it does not."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateur.vocabulary.planning import agree, encoding, renaming
from secateur.vocabulary.tokens import Tokens
from support.vocabularies import trained

TOKENS = Tokens.of(json.loads(trained("byte level").to_str()))
ORDER = TOKENS.order([*range(300), *TOKENS.added.values()])
NEW = renaming(ORDER, TOKENS.size)


def test_one_that_is_read_otherwise_is_told():
    texts = ["a"]
    ids = encoding(TOKENS.backend)(texts)
    values = TOKENS.pruned(ORDER)
    a, e = (values["model"]["vocab"][letter] for letter in "ae")
    values["model"]["vocab"] |= {"a": e, "e": a}
    with pytest.raises(ValueError, match="though each of them stays"):
        agree(texts, ids, encoding(Tokens.of(values).backend), NEW, "it")
    with pytest.raises(ValueError, match="beyond its own tokens"):
        agree(texts, [np.array([10_000])], encoding(TOKENS.backend), NEW, "it")


NUMBERS = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8)


@given(NUMBERS, NUMBERS, st.lists(st.booleans(), min_size=4, max_size=4))
def test_texts_together_are_judged_as_one_by_one(first, second, kept):
    many = min(len(first), len(second))
    old, found = ([np.array(each, dtype=np.int64) for each in some[:many]] for some in (first, second))
    new = renaming(np.flatnonzero(kept), 4)
    one_by_one = [bool((new[ids] >= 0).all()) for ids in old]
    wrong = [at for at in range(many) if one_by_one[at] and new[old[at]].tolist() != found[at].tolist()]
    texts = [str(at) for at in range(many)]
    if wrong:
        with pytest.raises(ValueError, match=f"tokens of '{wrong[0]}' would be"):
            agree(texts, old, lambda _: found, new, "tokens")
    else:
        assert agree(texts, old, lambda _: found, new, "tokens")[0] == sum(one_by_one)
