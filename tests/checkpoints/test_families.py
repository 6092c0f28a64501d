"""A configuration is a model of transformers' own, of no more than the files hold, or one line that names it."""

import gc
import json

import pytest
import torch

from secateur.checkpoints import CheckpointError, family_of, meta_model_of, most_parameters, open_checkpoint
from support.families import make


@pytest.fixture
def folder(tmp_path):
    make("llama").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_the_model_is_that_of_the_configuration_without_weights(folder):
    checkpoint = open_checkpoint(folder)
    model = meta_model_of(checkpoint)
    assert type(model) is family_of(checkpoint)[0] is type(make("llama"))
    assert {parameter.device for parameter in model.parameters()} == {torch.device("meta")}
    assert most_parameters(["fc.weight"]) > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "names no architectures"),
        ({"architectures": ["NoSuchModel"]}, "has no model of that name"),
        ({"architectures": ["BertModel"]}, "which is another family's"),
        ({"attn_implementation": "somebody/kernels"}, "code from elsewhere"),
        ({"num_hidden_layers": 10**7}, "damaged, or another model's"),
    ],
)
def test_what_is_no_model_is_said(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        meta_model_of(open_checkpoint(folder))


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_afterwards_as_before(folder, on):
    """Only while transformers' modules are imported it is not."""
    (gc.enable if on else gc.disable)()
    try:
        family_of(open_checkpoint(folder))
        assert gc.isenabled() is on
    finally:
        gc.enable()
