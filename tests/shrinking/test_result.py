"""What shrinking a directory says: on what it was proved, what was left out, and where it is."""

import dataclasses
import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.shrinking.result import unreached_lines
from secateur.support import Table
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


# ---- Laws of tables: what is printed is what the result holds, and one line is one row. ----


def stack(count=3):
    blocks = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU()) for _ in range(count))
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks), head=nn.Linear(4, 2)))


def test_what_is_printed_is_what_the_result_holds():
    model = stack()
    before = sum(each.numel() for each in model.parameters())
    done = shrink(model, torch.zeros(1, 4), 0.4)
    after = sum(each.numel() for each in model.parameters())
    assert done.parameters == (before, after)
    assert done.nbytes == (4 * before, 4 * after)
    assert done.got == pytest.approx(1 - after / before)
    assert done.asked.sparsity == 0.4
    assert done.got in done.beside
    assert done.beside[0] <= 0.4 <= done.beside[1]
    text = str(done)
    assert re.search(rf"^parameters +{before} +{after} +{after / before:.1%}$", text, re.MULTILINE)
    assert f"\nAsked: 40.0% of the params. Gone: {done.got:.1%}." in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_without_a_sparsity_it_says_what_was_zero():
    model = stack(1)
    assert "what is zero leaves: 0% of the params" in str(shrink(model, torch.zeros(1, 4)))


def test_layers_that_are_alike_share_a_row_unless_all_are_asked_for():
    done = shrink(stack(), torch.zeros(1, 4), 0.4, target="units")
    few, every = (
        next(part for part in parts if isinstance(part, Table)).texts() for parts in (done.summary(), done.content())
    )
    assert "blocks.*.0.weight (x3)" in [row[0] for row in few]
    assert len(every) == len(done.scope.groups)
    assert {row[0] for row in every} == {group.name for group in done.scope.groups}


def test_of_many_reasons_the_first_are_printed_and_a_reader_of_python_is_told_of_no_option():
    made = shrink(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 4), 0.5)
    many = dataclasses.replace(
        made, scope=SimpleNamespace(groups=(), frozen={(f"{at}", 0): f"{at}" for at in range(12)})
    )
    assert "and for 2 more reasons; a report and JSON have all." in lines_of(many.summary())
    assert len(tables_of(many.content())["whole"].json()) == 12


def test_a_name_that_holds_control_characters_is_fit_to_be_printed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a\x1b[2J", nn.Linear(4, 8))
            self.down = nn.Linear(8, 2)

        def forward(self, x):
            return self.down(getattr(self, "a\x1b[2J")(x))

    text = str(shrink(Odd(), torch.zeros(1, 4), 0.4))
    assert "\x1b" not in text
    assert "a\\x1b[2J.weight" in text


def test_of_many_that_no_token_reached_the_first_are_named():
    unreached = {f"layers.{at}.router": tuple(range(9)) for at in range(8)}
    (said, named) = unreached_lines(unreached, dict.fromkeys(unreached, (10, 5)), first=True)
    assert said == "No token of the batches reached 72 of the 80 experts; these leave first, as asked."
    assert named.startswith("They are: layers.0.router 0, 1, 2, 3, 4, 5 and 3 more; layers.1.router 0, ")
    assert named.endswith("layers.5.router 0, 1, 2, 3, 4, 5 and 3 more; and of 2 more mixtures.")
