"""What vocabulary says: the result's own words, where it is, and sheets of tensors and tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from secateur.cli.printing import shrunken_parts
from secateur.vocabulary import ShrunkVocabulary, shrunken_sheets, vocabulary_parts

DONE = ShrunkVocabulary(
    np.array([0, 2]), "BPE", (4, 2), (100, 80), (400, 320), {}, {"a.weight": 0, "b": 0}, None, None, None, None,
    "proved on 3 of 3 texts", 1.04, 0.5, {"ro\x1bse": 2, "hedge": 1},
)  # fmt: skip


def test_it_says_what_the_result_says_and_where_it_is():
    parts = [*shrunken_parts(DONE)]
    assert parts[: len([*vocabulary_parts(DONE)])] == [*vocabulary_parts(DONE)]
    assert parts[-1] == "Nothing was written (1.0 s, 0.5 of them for counting)."
    alone = [*shrunken_parts(replace(DONE, out=Path("out")))]  # a table of tokens, which no configuration counts
    assert alone[-1] == "Wrote out (1.0 s, 0.5 of them for counting)."
    fields = {"vocab_size": (4, 2)}
    more = replace(DONE, fields=fields, out=Path("out"), left_out=(Path("a.bin"),), left_whole=("other",))
    said = [part for part in shrunken_parts(more) if isinstance(part, str)]
    assert said[-1] == "Wrote out; from_pretrained loads it (1.0 s, 0.5 of them for counting)."
    assert any("Left out" in each and "a.bin" in each for each in said)
    assert any("Left whole" in each and "other" in each for each in said)


def test_sheets_are_of_tensors_and_of_tokens():
    tensors, tokens = shrunken_sheets(DONE)
    assert [cells.head for cells in tensors.cells] == ["tensor", "dimension", "before", "after"]
    assert list(tokens.cells[1].values) == [2, 1]
    assert "\x1b" not in str(tokens.cells[0].values)
    assert shrunken_sheets(replace(DONE, gone={}, tensors={})) == []
