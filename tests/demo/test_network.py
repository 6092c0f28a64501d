"""The network that reads the digits: small, residual, and of one shape whatever its widths."""

import torch

from secateur.demo import DigitsNet


def test_logits_have_a_class_each_whatever_the_widths() -> None:
    for widths in ((16, 32), (8, 8), (3, 5)):
        assert DigitsNet(*widths).eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_block_that_changes_nothing_has_a_shortcut_without_weights() -> None:
    blocks = DigitsNet().blocks
    assert [bool(list(block.shortcut.parameters())) for block in blocks] == [False, True, False]
