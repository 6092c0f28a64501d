"""Tensors read on access: nothing but access reads one."""

import pytest
import torch

from secateur.support import LazyTensors


def test_the_names_have_to_be_said():
    class Nameless(LazyTensors):
        def __getitem__(self, name):
            return torch.ones(1)

    with pytest.raises(TypeError, match="abstract"):
        Nameless()
