"""The state of a run that was stopped: what was saved is what is read, or an error of one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur.checkpoints import CheckpointError
from secateur.recovery.descent import Descent, Whole
from secateur.recovery.outputs import Steps, digest_of, load_state, save_state


def made(loss="mse"):
    torch.manual_seed(0)
    model, teacher = nn.Linear(3, 3), nn.Linear(3, 3)
    return Steps(model, teacher, Descent([Whole(each) for each in model.parameters()], 6, rate=0.1), loss)


@pytest.fixture
def saved(tmp_path):
    steps = made()
    steps.descent.steps = 3
    steps.run([torch.ones(2, 3), torch.randn(2, 3)], 0)
    steps.descent.steps = 6
    save_state(tmp_path / "state.safetensors", steps)
    return tmp_path / "state.safetensors", steps


def test_what_was_saved_is_what_is_read(saved):
    path, steps = saved
    again = made(loss=None)
    load_state(path, again)
    assert (again.losses, again.rows, again.loss, again.descent.done) == (steps.losses, steps.rows, "mse", 3)
    batches = [torch.ones(2, 3), torch.randn(2, 3)]
    for each in (again, steps):
        each.run(batches, 0)
    assert again.losses == steps.losses
    assert all(torch.equal(*pair) for pair in zip(again.model.parameters(), steps.model.parameters(), strict=True))


def with_metadata(path, **changes):
    tensors = load_file(path)
    said = {"done": 3, "losses": [1.0, 1.0, 1.0], "rows": 6, "loss": "mse"} | changes
    text = json.dumps({"steps": said})
    save_file(tensors, path, metadata={"said": text, "sha256": digest_of(tensors, text)})


def test_a_damaged_file_is_one_line(saved):
    path, _ = saved
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1] + b"x", b"x" * 50):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"the state of a run that was stopped, and damaged \(.*hint"):
            load_state(path, made(), "hint")
    for change, message in (
        ({"done": 7}, "done"),
        ({"done": 2}, "losses is not one for each of 2 steps"),
        ({"losses": [1, 2, "x"]}, "losses"),
        ({"rows": -1}, "rows"),
    ):
        path.write_bytes(whole)
        with_metadata(path, **change)
        with pytest.raises(CheckpointError, match=message):
            load_state(path, made())
    path.write_bytes(whole)
    other = made()
    other.descent = Descent([Whole(nn.Linear(2, 2).weight)], 6, rate=0.1)
    with pytest.raises(CheckpointError, match="it is of another run"):
        load_state(path, other)
    save_file({"0.value": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(path, made())
