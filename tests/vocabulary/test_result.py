"""What shrinking a vocabulary says: sizes, where it is, and tables of tensors and tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from secateur.vocabulary import ShrunkVocabulary
from support.told import lines_of, tables_of

DONE = ShrunkVocabulary(
    np.array([0, 2]), "BPE", (4, 2), (100, 80), (400, 320), {}, {"a.weight": 0, "b": 0}, None, None, None, None,
    "proved on 3 of 3 texts", 1.04, 0.5, {"ro\x1bse": 2, "hedge": 1},
)  # fmt: skip


def test_it_says_where_it_is_and_what_was_left_out():
    assert lines_of(DONE.summary())[-1] == "Nothing was written (1.0 s, 0.5 of them for counting)."
    alone = lines_of(replace(DONE, out=Path("out")).summary())  # a table of tokens, which no configuration counts
    assert alone[-1] == "Wrote out (1.0 s, 0.5 of them for counting)."
    fields = {"vocab_size": (4, 2)}
    more = replace(DONE, fields=fields, out=Path("out"), left_out=(Path("a.bin"),), left_whole=("other",))
    said = lines_of(more.summary())
    assert said[-1] == "Wrote out; from_pretrained loads it (1.0 s, 0.5 of them for counting)."
    assert any("Left out" in each and "a.bin" in each for each in said)
    assert any("Left whole" in each and "other" in each for each in said)


def test_tables_are_of_tensors_and_of_tokens():
    found = tables_of(DONE.content())
    assert [row["tokens"] for row in found["tensors"].json()] == [[4, 2], [4, 2]]
    assert [row["in_the_text"] for row in found["gone"].json()] == [2, 1]
    assert "\x1b" not in str(found["gone"])
    assert [*tables_of(replace(DONE, gone={}, tensors={}).content())] == ["total"]
    assert [row[1:] for row in found["total"].texts()] == [
        ["4", "2", "50.0%"], ["100", "80", "80.0%"], ["400 B", "320 B", "80.0%"]
    ]  # fmt: skip
