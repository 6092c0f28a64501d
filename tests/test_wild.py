"""The checker of `wild`, on a model of our own: what is right is found right, and what is broken is found wrong."""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from secateur import shrink
from wild import checker, models, one, run

ROOT = Path(__file__).resolve().parent.parent


class Normalized(nn.Module):
    """A residual stream, behind which are a layer norm, a group norm and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.inner, self.groups, self.back = nn.Conv2d(16, 24, 1), nn.GroupNorm(2, 24), nn.Conv2d(24, 16, 1)
        self.last, self.drop, self.head = nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        x = x + self.back(self.groups(self.inner(x)).relu())
        return self.head(self.drop(self.last(x.mean((2, 3)))))


@pytest.fixture
def original() -> nn.Module:
    torch.manual_seed(0)
    return checker.disturbed(Normalized()).eval()


@pytest.fixture
def example() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def shrunken(model: nn.Module, example: torch.Tensor):
    return shrink(copy.deepcopy(model), example.double(), 0.4, round_to=2)


def test_what_is_right_is_found_right(original: nn.Module, example: torch.Tensor) -> None:
    done = shrunken(original, example)
    assert any(name == "last.weight" for plan in done.plans for name in plan.tensors)
    assert checker.judge(original, done, example).status == "right"


def test_another_number_in_a_weight_is_found(original: nn.Module, example: torch.Tensor) -> None:
    done = shrunken(original, example)
    with torch.no_grad():
        done.model.back.weight[0, 0] += 1e-3
    assert checker.judge(original, done, example).status == "wrong"


def test_slices_of_a_consumer_that_are_not_those_of_its_producer_are_found(
    original: nn.Module, example: torch.Tensor
) -> None:
    """The plan and the tensors agree with each other, and not with what the producer keeps."""
    done = shrunken(original, example)
    (plan,) = done.plans
    kept = plan.tensors["head.weight"][1][1]
    other = min({*range(16)} - {*kept.tolist()})
    kept[0] = other
    kept.sort()
    with torch.no_grad():
        done.model.head.weight.copy_(original.head.weight[:, torch.from_numpy(kept)])
    assert checker.judge(original, done, example).status == "wrong"


def test_what_shows_nothing_is_not_called_right(original: nn.Module, example: torch.Tensor) -> None:
    with torch.no_grad():
        original.head.weight.zero_()
    assert checker.judge(original, shrunken(original, example), example).status == "unjudged"


def test_layouts_are_tried_and_one_that_is_lost_is_found(
    original: nn.Module, example: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one._in_channels_last(original, example.double()) == "right"
    for half in (torch.bfloat16, torch.float16):
        assert one._in_half(original, example.double(), half) == "right"

    def elsewhere(model: nn.Module, *asked):
        done = shrink(model, *asked)
        done.model.to(memory_format=torch.contiguous_format).bfloat16()
        return done

    monkeypatch.setattr(one, "shrink", elsewhere)
    assert one._in_channels_last(original, example.double()).startswith("wrong: stem.weight is no longer")
    monkeypatch.setattr(one, "shrink", lambda *asked: replace(shrink(*asked), model=original))
    assert one._in_half(original, example.double(), torch.bfloat16) == "wrong: a parameter has another dtype"


def test_what_is_coupled_without_values_is_held_to_what_is_with_them(
    original: nn.Module, example: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one._on_meta(original, example.double()) == "right"
    found = one.find_coupling(original, example.double()).groups

    def of_some(kept):
        return lambda model, _: SimpleNamespace(groups=found[: kept[model.head.weight.is_meta]])

    monkeypatch.setattr(one, "find_coupling", of_some({False: len(found), True: 1}))
    assert one._on_meta(original, example.double()) == f"less: 1 of {len(found)} groups"
    monkeypatch.setattr(one, "find_coupling", of_some({False: 0, True: 1}))
    assert one._on_meta(original, example.double()).startswith("wrong: without values stem.weight")


def test_a_row_says_what_is_bad() -> None:
    assert run.is_bad({"status": "wrong"})
    assert run.is_bad({"status": "right", "oneshot": "crash: KeyError"})
    assert not run.is_bad({"status": "refused", "sparsify": "right"})


def test_parts_write_into_one_file_and_what_takes_too_long_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [models.Wild("own", name, Normalized, lambda: torch.zeros(1)) for name in "ab"]
    said = {"status": "right"}
    monkeypatch.setattr(run, "models_of", lambda _: listed)
    monkeypatch.setattr(run, "_run", lambda wild, *_: {"registry": "own", "name": wild.name, **said})

    def part(number: int) -> int:
        words = ["run", "own", "--json", str(tmp_path / "rows.json"), "--part", f"{number}/2"]
        monkeypatch.setattr("sys.argv", words)
        return run.main()

    def found() -> list[str]:
        return [row["status"] for row in json.loads((tmp_path / "rows.json").read_text())]

    assert part(1) == 0
    assert found() == ["right"]
    assert part(0) == 0
    assert found() == ["right", "right"]
    said["oneshot"] = "timeout: after 9 s"
    assert part(0) == 1


def test_the_page_of_models_is_what_the_rows_say() -> None:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text() == maker.page(), "the rows changed; write the page again: python docs/make_models.py"
