"""What is printed is what was measured."""

import numpy as np

from secateur.vocabulary import ShrunkVocabulary, Unseen

DONE = ShrunkVocabulary(
    np.array([0, 2]), "BPE", (4, 2), (100, 80), (400, 320), {}, {"a.weight": 0, "b": 0}, 10, (20, 25), 18,
    Unseen((10, 7), (100, 98), 5, 1), "proved on 3 of 3 texts", 1.0, 0.5, {"ro\x1bse": 2},
)  # fmt: skip


def test_what_is_printed():
    text = str(DONE)
    assert "50.0%" in text
    assert "80.0%" in text
    assert "2.000  2.500" in " ".join(text.replace("  ", " ").split(" ")).replace(" 2.500", "  2.500")
    assert "Of the text's 20 tokens, 90.0% stay." in text
    assert "70.0% of 10 passages are read as before, 98.0% of 100 tokens stay." in text
    assert "The other 2 become 5 smaller pieces; 1 become unknown." in text
    assert r"'ro\x1bse' 2" in text.replace("\\\\", "\\")
    assert text.endswith("Proved on 3 of 3 texts.")


def test_two_are_equal_if_the_same_tokens_stay():
    assert DONE == DONE
    assert DONE != "it"
