"""What bench measures: inputs of the size that a configuration says."""

import shutil

import pytest
import torch
from torch import nn

from secateur.checkpoints import CheckpointError
from secateur.cli import measuring
from secateur.cli.measuring import Bench, Form, inputs_for
from secateur.inference import PackedLayer, Packing
from secateur.native import describe
from secateur.patterns import Rows


def test_images_and_sequences_get_what_their_configuration_says():
    from transformers import T5Config, T5Model, ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8))
    inputs, what = inputs_for(model, "vit", 2, 64)
    assert what == "2 × 3 × 16 × 16 pixels"
    assert model(**inputs).last_hidden_state.shape == (2, 5, 32)
    model = T5Model(T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    inputs, what = inputs_for(model, "t5", 1, 7)
    assert what == "1 × 7 tokens"
    assert model(**inputs).last_hidden_state.shape == (1, 7, 16)
    model.main_input_name = "input_values"
    with pytest.raises(ValueError, match=r"t5: its config\.json does not tell what it is given; say it"):
        inputs_for(model, "t5", 1, 7)


def test_forms_take_turns_and_the_number_of_threads_is_put_back(monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setattr(measuring, "SECONDS_A_TURN", 0.0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    before = torch.get_num_threads()
    found = measuring.measured(model, torch.randn(4, 32), {"rows": Rows()}, [0.5], threads=before + 1)
    assert (found.threads, torch.get_num_threads()) == (before + 1, before)
    assert [form.name for form in found.forms][:2] == ["dense", "rows"]
    assert {len(times) for times in found.times} == {2}
    assert all(seconds > 0 for times in found.times for seconds in times)
    assert {form.name for form in found.forms} | set(found.missing) >= {"shrink, half the work", "int8"}


def test_a_tensor_that_is_shared_counts_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert measuring.stored_bytes(model) == 2 * 8 * 8 * 4
    model[1].weight = model[0].weight
    assert measuring.stored_bytes(model) == 8 * 8 * 4


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Directories of a small Llama, and of one that has lost words and half of its units."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    for name, words, width in (("before", 60, 64), ("after", 40, 32)):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
        folder = tmp_path_factory.mktemp("two") / name
        LlamaForCausalLM(LlamaConfig(vocab_size=words, intermediate_size=width, **sizes)).save_pretrained(folder)
        found.append(folder)
    return found


def test_the_models_of_two_directories_are_timed(two):
    found = measuring.timed_directories(*two)
    assert found.call == "1 × 16 tokens"  # no more than the positions that there are, of the words that both have
    assert found.nbytes[1] < found.nbytes[0]
    assert len(found.before) >= 9


def test_what_would_not_fit_is_not_loaded(two, monkeypatch):
    monkeypatch.setattr(measuring, "MOST_BYTES", 1000)
    monkeypatch.setattr(measuring, "model_in", None)
    said = measuring.timed_directories(*two)
    assert said.startswith("Time was not measured: both models in memory are ")
    assert said.endswith(" more than 1 kB. secateur bench DIR measures one.")


def test_why_nothing_was_timed_is_said(two, tmp_path):
    said = measuring.timed_directories(two[0], tmp_path)
    assert said == f"Time was not measured: {tmp_path}: no .safetensors file here."


def test_a_pickle_beside_the_weights_is_never_read(two, tmp_path):
    shutil.copytree(two[1], tmp_path / "odd")
    (tmp_path / "odd" / "model.safetensors").rename(tmp_path / "odd" / "weights.safetensors")
    (tmp_path / "odd" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match="its model cannot be loaded"):
        measuring.model_in(tmp_path / "odd")


PACKING = Packing(
    (
        PackedLayer("a.[bold]\x1b[2J", "SparseLinear", (8, 4), 0.9, "", 4.0, 3.0, 1.5, 1000, 250),
        PackedLayer("b", "dense", (8, 8), 0.0, "no zeros", dense_bytes=2000, bytes=2000),
    )
)


def test_bench_has_a_row_a_form_beside_the_dense_one_and_on_a_page_one_a_layer():
    forms = [
        Form("dense", None, nn.Linear(10, 100, bias=False)),
        Form("rows", 0.5, nn.Linear(10, 50, bias=False), PACKING),
        Form("int8", None, nn.Linear(10, 25, bias=False)),
    ]
    times = [[0.004, 0.008, 0.002], [0.002, 0.004, 0.002], [0.008, 0.008, 0.004]]
    found = Bench(forms, times, {}, 1, "1 × 64 tokens; ")
    table, blank, *lines = found.summary()
    # medians in milliseconds; medians of the rounds' ratios, not of medians
    assert [row[:3] + row[5:] for row in table.texts()] == [
        ["dense", "", "4", "1.00", "4 kB", ""],
        ["rows", "50%", "2", "2.00", "2 kB", "1 of 2 layers"],
        ["int8", "", "8", "0.50", "1 kB", ""],
    ]
    assert [row["ms_fastest_round"] for row in table.json()] == [2.0, 2.0, 4.0]
    assert "fastest" not in str(table)
    assert (blank, lines[0]) == ("", f"1 × 64 tokens; 1 thread; {describe()}.")
    assert lines[-1].startswith("Zeros alone do nothing")
    *_, layers = found.content()
    assert layers.title == "The layers of rows 50%"
    assert [row[0] for row in layers.texts()] == [r"a.[bold]\x1b[2J", "b"]
    assert [row["times_faster"] for row in layers.json()] == [2.0, None]
    assert layers.texts()[1][-1] == "dense, no zeros"
