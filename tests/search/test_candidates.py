"""Fixed allocations as choices of levels: each fits, and says what the allocation says."""

import pytest

from secateur.search import make_levels
from secateur.search.space import Space, candidates, classes_of
from support.fitting import blocks, inputs
from support.unchanged import is_unchanged, state_of


def space_of(model, over, shares=(0.2, 0.4, 0.6, 0.8)):
    levels = make_levels(model, inputs(), shares=shares, verify=False, over=over)
    counted = [name for name in levels if levels.kind[name] in ("width", "heads", "layer")]
    return Space(levels, classes_of(levels, [[name] for name in counted]))


@pytest.mark.parametrize("over", [("shrink",), ("oneshot",), ("shrink", "oneshot")])
def test_each_fits_and_the_model_stays(over):
    model = blocks(3)
    space, before = space_of(model, over), state_of(model)
    limits = {"params": 0.6 * space.cost(space.dense, "params")}
    found = candidates(model, space, limits)
    entries = {"erk", "progression"} if "oneshot" in over else set()
    assert set(found) == {"uniform"} | entries | ({"shrink"} if "shrink" in over else set())
    assert all(space.fits(choice, limits) for choice in found.values())
    assert is_unchanged(model, before)


def test_uniform_is_the_same_share_of_each_to_a_level():
    model = blocks(3)
    space = space_of(model, ("oneshot",))
    found = candidates(model, space, {"params": 0.62 * space.cost(space.dense, "params")})
    assert max(found["uniform"]) - min(found["uniform"]) <= 1


def test_progression_removes_more_of_later_blocks():
    model = blocks(3)
    space = space_of(model, ("oneshot",), shares=tuple(at / 50 for at in range(1, 48)))
    found = candidates(model, space, {"params": 0.6 * space.cost(space.dense, "params")})["progression"]
    assert found[0] < found[-1]
