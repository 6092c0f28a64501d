"""The benchmark of vocabularies: neighbours by hand, perplexity of characters, and who is right and who is not."""

import math

import pytest
import torch

from benchmarks.vocabulary import combinations as combining
from benchmarks.vocabulary import peers
from benchmarks.vocabulary.run import bits, embeddings, kept_in, overlap, sentences
from support.vocabularies import TEXT, model_of, wrapped


def test_neighbours_by_hand(monkeypatch):
    monkeypatch.setattr("benchmarks.vocabulary.run.NEIGHBOURS", 1)
    first = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]))
    assert overlap(first, first, size=3) == 1
    assert overlap(first, first[[0, 2, 1, 3]]) == 0  # each pair is torn apart


def test_a_string_that_is_padded_has_the_same_vector():
    tokenizer = wrapped("byte level")
    model = model_of("encoder", len(tokenizer))
    several = embeddings(model, tokenizer, ["a rose", "a rose and a hedge, and much more of both"], "it")
    alone = embeddings(model, tokenizer, ["a rose"], "it")
    torch.testing.assert_close(several[0], alone[0])


def test_vectors_that_are_kept_are_not_made_again(tmp_path):
    tokenizer = wrapped("byte level")
    model, texts = model_of("encoder", len(tokenizer)), ["a rose", "a hedge, too"]

    def found(count):
        kept = kept_in(tmp_path, tmp_path, texts, model.config.hidden_size)
        return embeddings(model, tokenizer, texts[:count], "it", kept[:count])

    first = found(1)
    whole = found(2)  # goes on with those
    torch.testing.assert_close(whole[:1], first)  # of two rows a norm is added up in another order
    torch.testing.assert_close(whole, embeddings(model, tokenizer, texts, "it"))
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    assert torch.equal(found(2), whole)


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


def test_who_is_right_and_who_is_not(monkeypatch, capsys):
    chosen = [each for each in combining.COMBINATIONS if each[1] in ("BertModel", "T5ForConditionalGeneration")]
    monkeypatch.setattr(combining, "COMBINATIONS", tuple(chosen))

    def careless(source, out, model, texts):
        """Rows leave the model, and none the tokenizer."""
        whole, tokenizer = peers._loaded(source, model)
        whole.resize_token_embeddings(700)
        return whole, tokenizer

    def fails(*_):
        raise LookupError("no")

    monkeypatch.setitem(peers.TOOLS, "careless", careless)
    monkeypatch.setitem(peers.TOOLS, "failing", fails)
    monkeypatch.setitem(peers.PACKAGES, "gone", "no_such_package")
    combining.combinations(["secateur", "careless", "failing", "gone"])
    printed = capsys.readouterr().out
    assert "gone is left out: no_such_package is not installed" in printed
    rows = [line for line in printed.splitlines() if "Model" in line or "ForCond" in line]
    assert [row.split(" | ")[2] for row in rows] == ["right", "right"]
    assert all("raises LookupError" in row for row in rows)
    assert not any(row.split(" | ")[3] == "right" for row in rows)
    assert "| right | 2 of 2 | 0 of 2 | 0 of 2 |" in printed
