"""What oneshot says: sums as the result holds them, every reason, every warning, every expert without tokens."""

from pathlib import Path

import pytest

from secateur.cli.printing import pruned_blocks_parts
from secateur.models import OneShot, pruned_blocks_sheets
from secateur.models.jobs import Layer


def layer(number, shape, sparsity, error, **more):
    return Layer(
        f"blocks.{number}.up.weight", f"blocks.{number}", shape, sparsity, error, more.pop("tokens", 64), 0.25, **more
    )


@pytest.fixture
def done():
    return OneShot(
        (
            layer(0, (4, 8), 0.5, 0.125),
            layer(1, (16, 8), 0.75, 0.25, warnings=("damped \x1b[2J twice",)),
            layer(2, (2, 2), 0.0, None, tokens=0, without_tokens=(3, 5)),
        ),
        {"routers": ("a.gate", "b.gate"), "outside the blocks": ("head.weight",)},
        12.34,
        Path("out[red]"),
    )


def test_every_reason_warning_and_idle_expert_is_said(done):
    lines = [*pruned_blocks_parts(done)]
    assert "Left alone, routers: 2, such as a.gate." in lines
    assert "Left alone, outside the blocks: 1, such as head.weight." in lines
    assert r"Warning: blocks.1.up.weight: damped \x1b[2J twice" in lines
    assert [line for line in lines if "no token was sent to" in line] == [
        "1 weights have experts that no token was sent to, and were pruned by magnitude there, such as "
        "blocks.2.up.weight; more calibration text may reach them."
    ]
    assert lines[-1] == "Wrote out[red] (12.3 s); secateur.json in it says what was done."


def test_the_sheet_has_a_row_a_weight_in_their_order(done):
    [sheet] = pruned_blocks_sheets(done)
    columns = {cells.head: cells for cells in sheet.cells}
    assert columns["weight"].values == [each.name for each in done.layers]
    assert columns["shape"].values == ["4x8", "16x8", "2x2"]
    assert columns["error"].texts == ["0.1250", "0.2500", "-"]
    assert columns["removed"].bars == [0.5, 0.75, 0.0]
    assert columns["experts without tokens"].values == ["", "", "3, 5"]
    assert [chart.values for chart in sheet.charts] == [[0.125, 0.25, None], [0.5, 0.75, 0.0]]
    [plain] = pruned_blocks_sheets(OneShot(done.layers[:2], {}, 1.0))
    assert "experts without tokens" not in {cells.head for cells in plain.cells}
