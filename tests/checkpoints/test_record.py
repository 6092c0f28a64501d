"""``secateur.json``: JSON that every reader takes, and a source's own carried on."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from secateur import sparsify
from secateur.checkpoints import (
    RECORD,
    CheckpointError,
    called_as,
    claims_of,
    open_checkpoint,
    places,
    previous_record,
    record_text,
)
from secateur.checkpoints.record import about_config, about_parameters


def refused(word):
    raise AssertionError(f"{word} is no JSON")


def strictly(text):
    return json.loads(text, parse_constant=refused)


@pytest.fixture
def dense(tmp_path):
    (tmp_path / "dense").mkdir()
    save_file({"a.weight": torch.randn(8, 8), "b.weight": torch.zeros(0, 8)}, tmp_path / "dense/model.safetensors")
    return tmp_path / "dense"


@pytest.mark.parametrize("odd", [math.nan, math.inf, {"deep": [math.nan]}, {1, 2}, object()], ids=range(5))
def test_what_is_no_json_is_refused_before_anything_is_done(dense, tmp_path, odd):
    with (
        pytest.raises(ValueError, match=r"secateur\.json is JSON and cannot say of the arguments: seed is"),
        called_as({"sparsity": 0.5, "seed": odd}),
    ):
        sparsify(dense, 0.5, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_what_a_record_says_of_the_call_holds_within_the_context_alone():
    with called_as({"a": 1}):
        with pytest.raises(OSError, match="full"), called_as({"b": 2}):
            raise OSError("full")
        assert strictly(record_text("m", {}))["arguments"] == {"a": 1}
    assert strictly(record_text("m", {}))["arguments"] == {}


def test_no_number_that_is_none_comes_from_a_record_before(dense, tmp_path):
    """Python reads NaN, and earlier records had it where a layer's error overflowed."""
    (dense / RECORD).write_text('{"layers": {"a": {"error": NaN}, "b": [Infinity, 1.5]}, "pruned": {}}')
    sparsify(dense, 0.5, out=tmp_path / "out")
    record = strictly((tmp_path / "out" / RECORD).read_text())
    assert record["previous"] == {"layers": {"a": {"error": None}, "b": [None, 1.5]}, "pruned": {}}
    assert record["pruned"] == {"a.weight": 0.5}


def test_the_writer_has_no_way_to_write_them():
    for odd in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            record_text("sparsify", {"pruned": {"a": odd}})
    assert strictly(record_text("sparsify", {"ä": 0.1}))["ä"] == 0.1


def test_every_record_begins_alike():
    with called_as({"a": 2}):
        record = strictly(record_text("m", {"found": 1}, previous={"b": 3}, versions={"other": "4"}))
    assert list(record) == ["secateur", "torch", "other", "method", "arguments", "found", "previous"]
    assert (record["torch"], record["method"], record["arguments"]) == (torch.__version__, "m", {"a": 2})
    assert list(strictly(record_text("m", {}))) == ["secateur", "torch", "method", "arguments"]


def test_a_source_without_a_record_and_one_that_is_damaged(dense):
    assert previous_record(dense) is None
    (dense / RECORD).write_text("[1]")
    with pytest.raises(CheckpointError, match=r"secateur\.json: damaged: not a JSON object\. It is not the record"):
        previous_record(dense)


def test_places_are_checked_before_anything_is_read(tmp_path):
    dense = tmp_path / "dense"
    dense.mkdir()
    assert places(str(dense), str(tmp_path / "out")) == (dense, tmp_path / "out")
    assert places(dense, None) == (dense, None)
    (tmp_path / "taken").mkdir()
    for source, out, message in (
        (tmp_path / "gone", None, "gone: no such directory"),
        (dense, dense / "out", "inside the input"),
        (dense, tmp_path / "taken", "taken: already exists; nothing is overwritten"),
        (dense, tmp_path / "no/such", "no: no such directory; create it first"),
    ):
        with pytest.raises(ValueError, match=message):
            places(source, out)


# What records claim alike: the parameters, the configuration.


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
