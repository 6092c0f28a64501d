"""Globs over names: what they match, and the one form in which it is told that one matches nothing."""

import pytest

from secateur.support import matched, no_match

NAMES = [f"layers.{at}.mlp.{part}.weight" for at in range(12) for part in ("up", "down")] + ["head.bias"]


def test_a_glob_that_matches_nothing_names_what_is_closest_one_of_each_kind():
    with pytest.raises(ValueError, match=r"no tensor matches '\*\.pu\.weight'; the closest names are layers\.\d+\.mlp"):
        matched(["*.bias", "*.pu.weight"], NAMES, "tensor")
    assert str(no_match("x", [], "layer")) == "no layer matches 'x'; the closest names are none."
    assert "\x1b" not in str(no_match("x", ["a\x1b[2Jb"]))
