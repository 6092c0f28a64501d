"""The benchmark of vocabularies: neighbours by hand, perplexity of characters, and who is right and who is not."""

import math

import pytest
import torch

from benchmarks.support.corpora import languages
from benchmarks.vocabulary.run import bits, sentences
from support.vocabularies import TEXT, model_of, wrapped


def test_the_perplexity_of_a_character_counts_characters():
    tokenizer = wrapped("byte level")
    model = model_of("tied", len(tokenizer))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # each token is as likely
    found, characters = bits(model, tokenizer, TEXT, 16, 4)
    ids = tokenizer(TEXT, return_offsets_mapping=True)
    end = ids["offset_mapping"][16 * 4 - 1][1]
    assert characters == pytest.approx(end / 64)
    assert found == pytest.approx(math.exp(64 * math.log(len(tokenizer)) / end))


def test_what_is_counted_and_what_is_measured_share_nothing(tmp_path):
    (tmp_path / "sentences.json").write_text('["a", "b", "c", "d"]')
    counted, held_out = sentences(tmp_path, 2)
    assert not {*counted} & {*held_out}
    with pytest.raises(SystemExit, match="hold out at most half"):
        sentences(tmp_path, 3)


def test_languages_are_split_by_files_and_code_has_no_comments():
    found = languages()
    assert [*found] == ["English", "Python", "C++"]
    for name, (first, second) in found.items():
        assert min(len(first), len(second)) > 100_000, name
        assert first[:2000] not in second
    assert '"""' not in found["Python"][0][:50_000]
    assert "/*" not in found["C++"][0]
    assert "virtual" in found["C++"][0] + found["C++"][1]
