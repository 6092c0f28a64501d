"""Laws of tables: what is printed is what the result holds, and one line is one row."""

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.shrinking.result import unreached_lines
from secateur.support import Table


def stack(count=3):
    blocks = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU()) for _ in range(count))
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks), head=nn.Linear(4, 2)))


def test_what_is_printed_is_what_the_result_holds():
    model = stack()
    before = sum(each.numel() for each in model.parameters())
    done = shrink(model, torch.zeros(1, 4), 0.4)
    after = sum(each.numel() for each in model.parameters())
    assert done.parameters == (before, after)
    assert done.nbytes == (4 * before, 4 * after)
    assert done.got == pytest.approx(1 - after / before)
    assert done.asked.sparsity == 0.4
    assert done.got in done.beside
    assert done.beside[0] <= 0.4 <= done.beside[1]
    text = str(done)
    assert re.search(rf"^parameters +{before} +{after} +{after / before:.1%}$", text, re.MULTILINE)
    assert f"\nAsked: 40.0% of the params. Gone: {done.got:.1%}." in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_without_a_sparsity_it_says_what_was_zero():
    model = stack(1)
    assert "what is zero leaves: 0% of the params" in str(shrink(model, torch.zeros(1, 4)))


def test_layers_that_are_alike_share_a_row_unless_all_are_asked_for():
    done = shrink(stack(), torch.zeros(1, 4), 0.4, target="units")
    few, every = (
        next(part for part in parts if isinstance(part, Table)).texts() for parts in (done.summary(), done.content())
    )
    assert "blocks.*.0.weight (x3)" in [row[0] for row in few]
    assert len(every) == len(done.scope.groups)
    assert {row[0] for row in every} == {group.name for group in done.scope.groups}


def test_a_name_that_holds_control_characters_is_fit_to_be_printed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a\x1b[2J", nn.Linear(4, 8))
            self.down = nn.Linear(8, 2)

        def forward(self, x):
            return self.down(getattr(self, "a\x1b[2J")(x))

    text = str(shrink(Odd(), torch.zeros(1, 4), 0.4))
    assert "\x1b" not in text
    assert "a\\x1b[2J.weight" in text


def test_of_many_that_no_token_reached_the_first_are_named():
    unreached = {f"layers.{at}.router": tuple(range(9)) for at in range(8)}
    (said, named) = unreached_lines(unreached, dict.fromkeys(unreached, (10, 5)), first=True)
    assert said == "No token of the batches reached 72 of the 80 experts; these leave first, as asked."
    assert named.startswith("They are: layers.0.router 0, 1, 2, 3, 4, 5 and 3 more; layers.1.router 0, ")
    assert named.endswith("layers.5.router 0, 1, 2, 3, 4, 5 and 3 more; and of 2 more mixtures.")
