"""``secateur.json`` of a pruned directory."""

import json
import shutil

import pytest

from secateur import shrink_checkpoint
from secateur.checkpoints import CheckpointError, sparsify
from secateur.models import oneshot
from support.families import batches
from support.stacks import MAGNITUDE


def test_the_record_of_a_source_is_carried_on_or_refused(llama, tmp_path):
    (llama / "secateur.json").write_text('{"method": "shrink"}')
    oneshot(llama, batches("llama"), 0.5, out=tmp_path / "out")
    assert json.loads((tmp_path / "out/secateur.json").read_text())["previous"]["method"] == "shrink"
    (llama / "secateur.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    for call in (
        lambda out: oneshot(llama, batches("llama"), 0.5, out=out),
        lambda out: sparsify(llama, 0.5, out=out),
        lambda out: shrink_checkpoint(llama, out, 0.5),
    ):
        with pytest.raises(
            CheckpointError, match=r"secateur\.json: damaged: .*nested too deeply.*; remove it"
        ) as caught:
            call(tmp_path / "again")
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


def test_the_record_is_json(llama, tmp_path):
    def strict(word):
        raise AssertionError(f"{word} is no JSON")

    arguments = {"batches": batches("llama"), "sparsity": 0.5, "solver": MAGNITUDE, "out": tmp_path / "out"}
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "secateur.json").write_text('{"method": "oneshot", "layers": {"error": NaN}}')
    oneshot(source, **arguments)
    record = json.loads((tmp_path / "out" / "secateur.json").read_text(), parse_constant=strict)
    assert record["previous"] == {"method": "oneshot", "layers": {"error": None}}
