"""What a model weighs and takes before and after: measured in turns, and on the page of what a verb returned."""

import copy

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.report import Timed, before_and_after
from support.reports import Page


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 4))
    model = copy.deepcopy(dense)
    done = shrink(model, torch.randn(2, 8), 0.5)
    return dense, model, done, before_and_after(dense, model, torch.randn(2, 8), call="2 rows")


def test_both_are_run_in_turns(pair):
    dense, model, _, timed = pair
    assert len(timed.before) == len(timed.after) >= 9
    assert min(*timed.before, *timed.after) > 0
    assert timed.nbytes == tuple(4 * sum(p.numel() for p in each.parameters()) for each in (dense, model))
    assert dense.training  # the modes are put back
    assert model.training
    assert timed.threads == torch.get_num_threads()


def test_what_is_said_is_the_median_of_the_rounds():
    timed = Timed("2 rows", (4_000_000, 1_000_000), [0.002, 0.004, 0.004], [0.001, 0.001, 0.002], 2)
    assert timed.times_faster == 2
    assert timed.line() == (
        "Measured: 2 rows took 4 ms and takes 1 ms (medians of 3 rounds, in turns, 2 threads). It was faster in 3 of "
        "them: 2.00 times in the middle one, 2.00 to 4.00 in all."
    )
    what, before, _, left = zip(*timed.table().texts(), strict=True)
    assert what == ("bytes in memory", *(f"2 rows: ms, {it}" for it in ("median", "fastest round", "slowest round")))
    assert before == ("4 MB", "4", "2", "4")
    assert [row["after"] for row in timed.table().json()] == [1_000_000, 1.0, 1.0, 2.0]
    assert left == ("25.0%", "25.0%", "50.0%", "50.0%")


def test_a_model_without_tensors_has_nothing_left_of_them():
    timed = Timed("it", (0, 0), [1.0], [1.0], 1)
    assert timed.table().rows[0][3] is None


def test_a_tensor_of_two_names_counts_once():
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert before_and_after(tied, tied, torch.randn(1, 4)).nbytes == (64, 64)


def test_it_stands_on_the_page_of_a_result(pair, tmp_path):
    _, _, done, timed = pair
    text = Page(done.report(tmp_path / "page.html", timed=timed).read_text(encoding="utf-8")).text
    shown = " ".join(text.replace("\u200b", "").split())
    assert timed.line() in shown
    assert "Before and after, measured" in shown
    assert shown.index("Before and after, measured") < shown.index("Group by group")


def test_modes_are_put_back_where_a_model_fails(pair):
    dense, model, *_ = pair
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        before_and_after(dense, model, torch.randn(2, 5))
    assert dense.training
    assert model.training
