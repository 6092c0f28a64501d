"""What records claim alike: the parameters, the configuration."""

import json

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError, claims_of, open_checkpoint
from secateur.checkpoints.record import about_config, about_parameters


@pytest.fixture
def place(tmp_path):
    save_file({"w": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"size": 4, "eps": 0.5}, "kinds": ["a", "b"]}))
    return tmp_path


def claim(place, **fields):
    (place / "secateur.json").write_text(json.dumps(fields))
    return open_checkpoint(place), claims_of(place)


def test_what_does_not_hold_is(place):
    claims = claim(place, parameters={"to": 13}, config={"text_config.size": {"to": 5}, "more.size": {"to": 1}})
    odd = claim(place, config={name: {"to": 1} for name in ("kinds.9", "kinds.a", "text_config.size.more")})
    assert [each.split(" is ")[0] for each in about_config(*odd)] == [
        "config.json: kinds.9",
        "config.json: kinds.a",
        "config.json: text_config.size.more",
    ]
    assert [*about_parameters(*claims)] == ["the files hold 12 parameters; secateur.json claims 13."]
    assert [*about_config(*claims)] == [
        "config.json: text_config.size is 4, not 5.",
        "config.json: more is None, not {'size': 1}.",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text_config": {"size": 4, "eps": 0.25}}, "text_config.eps is 0.25, not 0.5"),
        ({"text_config": {"size": 4}}, "text_config.eps is None, not 0.5"),
        ({"more": 1}, "more is 1, not None"),
        ({"kinds": ["a", "a"]}, "kinds is ['a', 'a'], not ['a', 'c']"),
    ],
)
def test_every_field_that_is_not_recorded_is_the_sources(place, tmp_path, change, problem):
    checkpoint, claims = claim(place, config={"text_config.size": {"to": 4}, "kinds.1": {"to": "c"}})
    values = {"text_config": {"size": 8, "eps": 0.5}, "kinds": ["a", "b"]}
    dense = type(checkpoint)(place, (), {}, {}, values)
    ours = type(checkpoint)(place, (), {}, {}, {"text_config": {"size": 4, "eps": 0.5}, "kinds": ["a", "c"]})
    assert [*about_config(ours, claims, dense)] == []
    ours = type(checkpoint)(place, (), {}, {}, {**ours.config, **change})
    assert [*about_config(ours, claims, dense)] == [f"config.json: {problem}."]


def test_a_configuration_that_says_all_is_compared_with_what_the_source_means(tmp_path):
    """As verbs write it where the file of the source leaves out a part that changed."""
    from transformers import LlamaConfig

    short = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "rms_norm_eps": 0.5}
    whole = LlamaConfig(**short).to_dict() | {"intermediate_size": 5, "transformers_version": "of another time"}
    found = []
    for name, values in (("dense", short), ("small", whole), ("other", whole | {"rms_norm_eps": 0.25})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
        save_file({"w": torch.zeros(3, 4)}, tmp_path / name / "model.safetensors")
        checkpoint, claims = claim(tmp_path / name, config={"intermediate_size": {"to": 5}})
        found.append(checkpoint)
    dense, small, other = found
    assert [*about_config(small, claims, dense)] == []
    assert [*about_config(other, claims, dense)] == ["config.json: rms_norm_eps is 0.25, not 0.5."]


def test_a_damaged_record_is_an_error(place):
    (place / "secateur.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"secateur\.json"):
        claims_of(place)
