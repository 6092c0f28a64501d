"""Small things that packages share: globs, machines, lazy tensors, owners."""

from pathlib import Path

import pytest
import torch
from torch import nn

from secateur.support import (
    LazyTensors,
    matched,
    matches,
    no_match,
    other_owners,
    processor,
    replicating_group,
    sharded_parameter,
)

NAMES = [f"layers.{at}.mlp.{part}.weight" for at in range(12) for part in ("up", "down")] + ["head.bias"]


def test_a_glob_that_matches_nothing_names_what_is_closest_one_of_each_kind():
    with pytest.raises(ValueError, match=r"no tensor matches '\*\.pu\.weight'; the closest names are layers\.\d+\.mlp"):
        matched(["*.bias", "*.pu.weight"], NAMES, "tensor")
    assert str(no_match("x", [], "layer")) == "no layer matches 'x'; the closest names are none."
    assert "\x1b" not in str(no_match("x", ["a\x1b[2Jb"]))


def test_the_names_have_to_be_said():
    class Nameless(LazyTensors):
        def __getitem__(self, name):
            return torch.ones(1)

    with pytest.raises(TypeError, match="abstract"):
        Nameless()


def test_it_is_what_the_system_says(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_named: "cores : 4\nmodel name\t: A processor \nx: y\n")
    assert processor() == "A processor"


def test_every_other_place_is_found_under_its_name():
    class Odd(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.mine, self.again = weight, weight

    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = layer.weight
    odd = Odd(layer.weight)
    found = {(id(module), name) for module, name in other_owners(layer, "weight")}
    assert found == {(id(other), "weight"), (id(odd), "mine"), (id(odd), "again")}
    assert (odd, "again") in other_owners(odd, "mine")


def test_what_is_matched():
    assert matched(None, NAMES) is None
    assert matched("*.bias", NAMES) == matched(["head.*"], NAMES) == {"head.bias"}
    assert matched([], NAMES) == set()
    assert len(matched(["layers.1.*", "layers.?.mlp.up.weight"], NAMES)) == 11
    assert matches("head.bias", ["nothing", "head.*"])
    assert not matches("head.bias", ["HEAD.*"])


class Read(LazyTensors):
    def __init__(self, names):
        self.names = names
        self.read = []

    @property
    def known(self):
        return self.names

    def __getitem__(self, name):
        self.read.append(name)
        return torch.ones(self.names[name])


def test_only_access_reads():
    lazy = Read({"a": 2, "b": 3})
    assert list(lazy) == list(lazy.keys()) == ["a", "b"]
    assert len(lazy) == 2
    assert "a" in lazy
    assert "c" not in lazy
    assert lazy == lazy
    assert lazy != Read({"a": 2, "b": 3})
    assert lazy in {lazy: 1}
    assert not lazy.read
    assert {name: len(tensor) for name, tensor in lazy.items()} == {"a": 2, "b": 3}
    assert lazy.read == ["a", "b"]


def test_a_parameter_that_nobody_shares_has_no_other_owner():
    layer = nn.Linear(2, 2)
    assert other_owners(layer, "weight") == []
    assert other_owners(layer, "none") == []
    assert replicating_group(layer, "weight") is sharded_parameter(layer, "weight") is None


def test_where_the_system_does_not_say_it_is_unknown(monkeypatch):
    def missing(*_args, **_named):
        raise OSError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert processor() == "unknown"
