"""What `make real` writes, and how it makes a row, on a network of our own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from real import networks, run

ROOT = Path(__file__).resolve().parent.parent


def likeness(one: torch.Tensor, other: torch.Tensor) -> float:
    return 100 * float(torch.cosine_similarity(one, other).detach().mean())


def own(verb) -> networks.Network:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batches = [torch.randn(16, 8) for _ in range(2)]
    return networks.Network(
        "own", "own==1.0", "MIT", "says what it is given", lambda _: model, lambda *_: batches,
        lambda _, found: {"likeness, %": likeness(model(batches[0]), found(batches[0]))},
        {"verb": verb},
    )  # fmt: skip


def test_a_row_says_what_a_verb_did_and_leaves_the_network_as_it_is() -> None:
    network = own(networks.shrunk(0.5))
    before = [each.clone() for each in network.load(Path()).parameters()]
    row = run.row_of(network, Path())
    found = row["verbs"]["verb"]
    assert found["parameters"] < 0.6 * row["before"]["parameters"]
    assert 50 < found["likeness, %"] < row["before"]["likeness, %"]
    assert all(map(torch.equal, before, network.load(Path()).parameters()))
    assert run.lines_of(row)[-1].startswith(f"| verb | {found['parameters']:,} |")


def test_a_verb_that_fails_is_said() -> None:
    row = run.row_of(own(networks.pruned(1.5)), Path())
    assert "ValueError" in row["verbs"]["verb"]["failed"]
    assert "ValueError" in run.lines_of(row)[-1]


def test_what_is_tried_is_what_is_installed() -> None:
    wanted = (ROOT / "tests" / "real" / "requirements.txt").read_text().split()
    assert {network.package for network in networks.NETWORKS} <= {*wanted}


def test_silero_keeps_its_state_from_frame_to_frame() -> None:
    torch.manual_seed(0)
    model, waves = networks.Silero().eval(), torch.randn(2, 4 * 512)
    with torch.no_grad():
        whole, first = model(waves), model(waves[:, : 2 * 512])
        torch.testing.assert_close(whole[:, :2], first)
        assert not torch.allclose(model(waves[:, 2 * 512 :])[:, 0], whole[:, 2])


def test_the_page_is_what_the_rows_say() -> None:
    rows = json.loads((ROOT / "tests" / "real" / "rows.json").read_text())
    assert {*rows} == {network.name for network in networks.NETWORKS}
    assert (ROOT / "docs" / "real.md").read_text(encoding="utf-8") == run.page(rows), "write it again: make real"
