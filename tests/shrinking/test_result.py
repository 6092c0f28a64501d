"""What shrinking a directory says: on what it was proved, what was left out, and where it is."""

import dataclasses

import pytest
import torch

from secateur.shrinking import shrink
from support.told import lines_of, tables_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("shrunken")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(folder / "dense")
    torch.save({}, folder / "dense" / "pytorch_model.bin")
    return shrink(folder / "dense", sparsity=0.4, out=folder / "small")


def test_of_a_directory_it_says_what_was_left_out_and_where_it_is(directory):
    lines = lines_of(directory.summary())
    assert "Left out, as they hold the weights in other forms: pytorch_model.bin." in lines
    assert lines[-1].startswith(f"Wrote {directory.out}; from_pretrained loads it (")
    assert lines_of(dataclasses.replace(directory, out=None).summary())[-1].startswith("Nothing was written (")
    assert f"Asked: 40.0% of the params. Gone: {directory.got:.1%}." in "\n".join(lines)
    assert any(line.startswith("Proved on ") for line in lines)


def test_fewer_tokens_than_units_are_told_of(directory):
    said = "That is less than the 48 units of a group: other text will lose more. Give a longer one."
    for tokens in (3, 47, 48, 1000):
        lines = lines_of(dataclasses.replace(directory, tokens=tokens).summary())
        assert f"Chosen by what {tokens:,} tokens show." in lines
        assert (said in lines) is (tokens < 48)


def test_where_nothing_stays_whole_there_is_no_table_of_it(directory):
    assert {"groups", "whole"} <= {*tables_of(directory.content())}
    assert "whole" not in tables_of(dataclasses.replace(directory, frozen={}).content())


def test_as_json_it_has_every_group_and_why_the_rest_stays(directory):
    said = directory.json()
    assert {row["group"]: tuple(row["units"]) for row in said["groups"]} == directory.counts
    assert len(said["whole"]) == len(directory.frozen)
    assert all(row["kept_because"] for row in said["whole"])
    assert (said["got"], said["parameters"]) == (directory.got, list(directory.parameters))
