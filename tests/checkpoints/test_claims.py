"""What records claim alike: the method, the parameters, the configuration."""

import json

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError, about_config, about_parameters, claims_of, is_made_by, open_checkpoint


@pytest.fixture
def place(tmp_path):
    save_file({"w": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text": {"size": 4}}))
    return tmp_path


def claim(place, **fields):
    (place / "secateur.json").write_text(json.dumps(fields))
    return open_checkpoint(place), claims_of(place)


def test_what_does_not_hold_is(place):
    claims = claim(place, parameters={"to": 13}, config={"text.size": {"to": 5}, "more.size": {"to": 1}})
    assert [*about_parameters(*claims)] == ["the files hold 12 parameters; secateur.json claims 13."]
    assert [*about_config(*claims)] == [
        "config.json: text.size is 4, not 5.",
        "config.json: more.size is None, not 1.",
    ]


def test_no_record_is_of_no_method_and_a_damaged_one_an_error(place):
    assert not is_made_by(place, "x")
    (place / "secateur.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"secateur\.json"):
        is_made_by(place, "x")
