"""Killed while training: what is on disk goes on to the same bytes as the run that was not stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = """
import os, sys
import torch
from torch import nn
from secateur import Pruner, criteria, regrowth, schedules
from secateur.support import write_whole
import io

path, steps = sys.argv[1], 30
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
pruner = Pruner(
    model, optimizer, schedules.cubic(0.8, end=0.8), regrow=regrowth.rigl(until=0.9), total_steps=steps, verbose=False
)
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    pruner.load_state_dict(saved["pruner"])
print("from", pruner.step, flush=True)
while pruner.step < steps:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(pruner.step))
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :4].flip(1)).square().mean().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    buffer = io.BytesIO()
    torch.save(states, buffer)
    write_whole(path, buffer.getvalue())
    print("step", pruner.step, flush=True)
    if sys.argv[2] == str(pruner.step):
        sys.stdin.read()  # wait to be killed
"""


def train(path, kill_at=None):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(kill_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if kill_at is not None and line.strip() == f"step {kill_at}":
            os.kill(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()
    return process.wait(), lines


def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path):
    assert train(tmp_path / "whole.pt")[0] == 0
    code, lines = train(tmp_path / "killed.pt", kill_at=7)
    assert code == -signal.SIGKILL
    assert "step 8" not in lines
    code, lines = train(tmp_path / "killed.pt", kill_at=19)
    assert code == -signal.SIGKILL
    assert lines[0] == "from 7"
    assert train(tmp_path / "killed.pt")[0] == 0
    whole, killed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "killed.pt"))
    for name, value in whole["model"].items():
        assert torch.equal(value, killed["model"][name]), name
    assert torch.equal(whole["pruner"]["masks"], killed["pruner"]["masks"])
    assert whole["pruner"]["step"] == killed["pruner"]["step"] == 30
    states = zip(whole["optimizer"]["state"].values(), killed["optimizer"]["state"].values(), strict=True)
    assert all(torch.equal(one[key], other[key]) for one, other in states for key in one)
