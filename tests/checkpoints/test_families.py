"""A configuration is a model of transformers' own, of no more than the files hold, or one line that names it."""

import gc
import json
import logging

import pytest
import torch

from secateur.checkpoints import (
    CheckpointError,
    blaming_config,
    family_of,
    meta_model_of,
    most_parameters,
    open_checkpoint,
)
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


def test_what_transformers_logs_before_an_error_is_not_shown_beside_it(folder):
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with pytest.raises(CheckpointError, match="no model can be made of it"), blaming_config(folder):
            with blaming_config(folder):
                logging.getLogger("transformers.some").error("within")
            logger.error("noise")
            raise ValueError("wrong")
        assert shown == []
        with blaming_config(folder):
            logging.getLogger("transformers.some").error("heard")
            assert shown == []
        assert shown == ["heard"]
        logger.error("as before")
        assert shown == ["heard", "as before"]
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_afterwards_as_before(folder, on):
    """Only while transformers' modules are imported it is not."""
    (gc.enable if on else gc.disable)()
    try:
        family_of(open_checkpoint(folder))
        assert gc.isenabled() is on
    finally:
        gc.enable()
