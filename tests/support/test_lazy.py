"""Tensors read on access: nothing but access reads one."""

import pytest
import torch

from secateur.support import LazyTensors


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


def test_the_names_have_to_be_said():
    class Nameless(LazyTensors):
        def __getitem__(self, name):
            return torch.ones(1)

    with pytest.raises(TypeError, match="abstract"):
        Nameless()
