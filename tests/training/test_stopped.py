"""Killed while training: what is on disk goes on to the same bytes as the run that was not stopped."""

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessExitedException

from secateur import Pruner, regrowth, schedules
from secateur.support import write_whole
from support.forks import on_ranks

STEPS = 30


def train(rank, path, begins_at, killed_at):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rules = {"regrow": regrowth.rigl(until=0.9), "total_steps": STEPS, "verbose": False}
    pruner = Pruner(model, optimizer, schedules.cubic(0.8, end=0.8), **rules)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        pruner.load_state_dict(saved["pruner"])
    assert pruner.step == begins_at
    while pruner.step < STEPS:
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(pruner.step))
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].flip(1)).square().mean().backward()
        optimizer.step()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
        buffer = io.BytesIO()
        torch.save(states, buffer)
        write_whole(path, buffer.getvalue())
        if pruner.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path):
    on_ranks(train, tmp_path / "whole.pt", 0, None, ranks=1)
    for begins_at, killed_at in ((0, 7), (7, 19)):
        with pytest.raises(ProcessExitedException) as died:
            on_ranks(train, tmp_path / "killed.pt", begins_at, killed_at, ranks=1)
        assert died.value.exit_code == -signal.SIGKILL
    on_ranks(train, tmp_path / "killed.pt", 19, None, ranks=1)
    whole, killed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "killed.pt"))
    for name, value in whole["model"].items():
        assert torch.equal(value, killed["model"][name]), name
    assert torch.equal(whole["pruner"]["masks"], killed["pruner"]["masks"])
    assert whole["pruner"]["step"] == killed["pruner"]["step"] == STEPS
    states = zip(whole["optimizer"]["state"].values(), killed["optimizer"]["state"].values(), strict=True)
    assert all(torch.equal(one[key], other[key]) for one, other in states for key in one)
