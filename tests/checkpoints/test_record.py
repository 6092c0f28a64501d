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
    check_places,
    places,
    previous_record,
    record_text,
)


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


def test_places_that_cannot_be(dense, tmp_path):
    check_places(dense, tmp_path / "out")
    for source, out, message in (
        (tmp_path / "none", tmp_path / "out", "no such directory"),
        (dense / "model.safetensors", tmp_path / "out", "not a directory; put the file into one"),
        (dense, dense, "the output would replace the input"),
        (dense, dense / "inside", "lies inside the input"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_places(source, out)


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
