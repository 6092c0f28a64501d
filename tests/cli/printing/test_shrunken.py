"""What shrink says: what its result says, whether it was proved, and lines of Python that load what was written."""

import ast
import copy

import pytest
import torch
from torch import nn

from secateur import load_shrunken, shrink
from secateur.cli.printing import directory_parts, model_parts, print_loading
from secateur.shrinking import directory_sheets, save_shrunken, shrink_checkpoint, shrunk_parts
from secateur.support import Rows


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def done():
    return shrink(build(), torch.zeros(1, 4), 0.5, exclude="2.bias")


def lines_of(parts):
    return [part for part in parts if isinstance(part, str)]


def test_it_says_what_the_result_says(done):
    parts = [*model_parts(done, None, 1.25)]
    assert parts[: len([*shrunk_parts(done)])] == [*shrunk_parts(done)]
    assert parts[-2:] == ["Proved on random weights that nothing else changed (1.2 s).", "Nothing was written."]
    everything = [*model_parts(done, None, 1.25, verbose=True)]
    assert everything[:-3] == [*shrunk_parts(done, verbose=True)]


def test_the_lines_that_load_it_do(done, tmp_path, capsys):
    out = tmp_path / "it's [red] here"
    out.mkdir()
    save_shrunken(done.model, out)
    print_loading(out, "somewhere.models:Nested.build", "Nested.build()")
    text = capsys.readouterr().out
    code = [line.strip() for line in text.splitlines()[2:]]
    assert code[0] == "from secateur import load_shrunken"
    assert code[1] == "from somewhere.models import Nested"
    call = ast.parse(code[2]).body[0].value
    assert ast.unparse(call.args[0]) == "Nested.build()"
    loaded = load_shrunken(build(), ast.literal_eval(call.args[1]))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, done.model.state_dict()[name])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("shrunken")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(folder / "dense")
    torch.save({}, folder / "dense" / "pytorch_model.bin")
    return shrink_checkpoint(folder / "dense", folder / "small", 0.4)


def test_of_a_directory_it_says_what_was_left_out_and_where_it_is(directory):
    lines = lines_of(directory_parts(directory))
    assert "Left out, as they hold the weights in other forms: pytorch_model.bin." in lines
    assert lines[-1] == f"Wrote {directory.out}; from_pretrained loads it."
    dry = copy.copy(directory)
    object.__setattr__(dry, "out", None)
    assert lines_of(directory_parts(dry))[-1] == "Nothing was written."
    assert any(line.startswith("Proved on ") for line in lines)


def test_fewer_tokens_than_units_are_told_of(directory):
    said = "That is less than the 48 units of a group: other text will lose more. Give a longer one."
    for tokens in (3, 47, 48, 1000):
        chosen = copy.copy(directory)
        object.__setattr__(chosen, "tokens", tokens)
        lines = lines_of(directory_parts(chosen))
        assert f"Chosen by what {tokens:,} tokens show." in lines
        assert (said in lines) is (tokens < 48)


def test_a_result_in_which_nothing_stays_whole_has_no_sheet_of_it(directory):
    bare = copy.copy(directory)
    object.__setattr__(bare, "frozen", {})
    object.__setattr__(bare, "counts", {})
    assert directory_sheets(bare) == []
    assert isinstance(next(iter(directory_parts(bare))), Rows)
    assert not [part for part in directory_parts(bare) if isinstance(part, Rows) and "whole" in part.columns[0]]
