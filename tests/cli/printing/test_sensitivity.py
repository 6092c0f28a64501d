"""Sheets of what each part costs: a row a group, whatever the numbers, and names that are text."""

import json
from types import SimpleNamespace

from secateur.cli.printing import json_of
from secateur.search import Level, sensitivity_sheets
from support.reports import HOSTILE


class Levels(dict):
    """What sheets ask of levels."""

    def __init__(self, levels, kind):
        super().__init__(levels)
        self.kind, self.left_alone = kind, {"stream": "scattered"}


def found():
    one = (Level(0.0, 8, 8, 0.0, 0.0), Level(0.1, 7, 8, 0.001, 0.01), Level(0.5, 4, 8, 0.2, None))
    two = (Level(0.0, 64, 64, 0.0, None), Level(0.5, 32, 64, 0.25, None))
    levels = Levels({HOSTILE: one, f"{HOSTILE}:layer": two}, {HOSTILE: "width", f"{HOSTILE}:layer": "layer"})
    scores = {HOSTILE: (0.0, 0.01, 0.3), f"{HOSTILE}:layer": (0.0, float("inf"))}
    return SimpleNamespace(levels=levels, scores=scores, shares=[0.1, 0.5], score="kl", dense=0.0, rows=10, passes=2.0)


def test_a_row_a_group_and_one_chart():
    (sheet,) = sensitivity_sheets(found())
    heads = [each.head for each in sheet.cells]
    assert heads == ["group", "kind", "units", "error at 10%", "error at 50%", "kl at 10%", "kl at 50%"]
    assert sheet.cells[0].values == [HOSTILE, HOSTILE]
    assert sheet.cells[3].values == [0.001, None]
    assert sheet.cells[6].values == [0.3, None]  # an infinite score is none
    assert sheet.cells[6].bars == [1.0, None]
    (chart,) = sheet.charts
    assert chart.values == [0.3, None]
    assert chart.names == [f"{HOSTILE} (width)", f"{HOSTILE} (layer)"]


def test_it_is_json():
    said = json.loads(json_of(found()))
    assert [each["kind"] for each in said["groups"]] == ["width", "layer"]
    assert said["groups"][1]["levels"][1]["score"] is None
    assert said["left_alone"] == {"stream": "scattered"}
