"""What oneshot says: sums as the result holds them, every reason, every warning, every expert without tokens."""

from pathlib import Path

from secateur.models import OneShot
from secateur.models.jobs import Layer
from support.told import lines_of, tables_of


def layer(number, shape, sparsity, error, **more):
    return Layer(
        f"blocks.{number}.up.weight", f"blocks.{number}", shape, sparsity, error, more.pop("tokens", 64), 0.25, **more
    )


DONE = OneShot(
    (
        layer(0, (4, 8), 0.5, 0.125),
        layer(1, (16, 8), 0.75, 0.25, warnings=("damped \x1b[2J twice",)),
        layer(2, (2, 2), 0.0, None, tokens=0, without_tokens=(3, 5)),
    ),
    {"routers": ("a.gate", "b.gate"), "outside the blocks": ("head.weight",)},
    12.34,
    Path("out[red]"),
)


def test_every_reason_warning_and_idle_expert_is_said():
    lines = lines_of(DONE.content())
    assert "Left alone, routers: 2, such as a.gate." in lines
    assert "Left alone, outside the blocks: 1, such as head.weight." in lines
    assert r"Warning: blocks.1.up.weight: damped \x1b[2J twice" in lines
    assert [line for line in lines if "no token was sent to" in line] == [
        "1 weights have experts that no token was sent to, and were pruned by magnitude there, such as "
        "blocks.2.up.weight; more calibration text may reach them."
    ]
    assert any(line.startswith("Pruned 3 weights, 68.3% of their entries;") for line in lines)
    assert lines[-1] == "Wrote out[red] (12.3 s); secateur.json in it says what was done."


def test_a_row_a_weight_in_their_order():
    table = tables_of(DONE.content())["layers"]
    assert [row[:5] for row in table.texts()] == [
        ["blocks.0.up.weight", "4×8", "50.0%", "0.1250", "64"],
        ["blocks.1.up.weight", "16×8", "75.0%", "0.2500", "64"],
        ["blocks.2.up.weight", "2×2", "0%", "no tokens", "0"],
    ]
    assert [row["experts_without_tokens"] for row in table.json()] == [[], [], [3, 5]]
    assert [chart.values for chart in table.charts] == [[0.125, 0.25, None], [0.5, 0.75, 0.0]]
    plain = tables_of(OneShot(DONE.layers[:2], {}, 1.0).content())["layers"]
    assert "experts_without_tokens" not in plain.json()[0]
