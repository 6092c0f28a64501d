"""What the report says in words: every figure of it is one that was measured."""

import re

import jinja2
import pytest

from secateur.demo import load_digits
from secateur.demo import running as telling
from secateur.demo.trials import METHODS, Plan, choose_methods
from secateur.inference import PackedLayer, Packing
from secateur.report import Results, Run


def test_every_figure_of_the_story_is_measured(results: Results) -> None:
    figures = {f"{run.latency_ms:.2f}" for run in results.runs if run.latency_ms}
    told = re.findall(r"(\d+\.\d\d)\sms", " ".join(results.text))
    assert len(told) == 4
    assert set(told) <= figures


def layer(kind: str, ms: float, why: str = "") -> PackedLayer:
    return PackedLayer("stem", kind, (8, 8, 3, 3), 0.9, why, 3.0, 3.0, ms)


STAYS = layer("dense", 4.0, "dense is faster")
PACKINGS = Packing((STAYS,)), Packing((layer("SparseConv2d", 2.0), STAYS, layer("SparseConv2d", 1.5)))


def run_of(method: str, sparsity: float, after: float, seed: int = 0) -> Run:
    return Run(method, sparsity, after - 1, after, seed, 158_000, 144_000, 1.25, sparsity, 1000 - int(1000 * sparsity))


def test_the_story_names_the_best_row_and_the_barest() -> None:
    runs = [run_of("dense", 0.0, 99.0), run_of("LAMP", 0.9, 98.0), run_of("random", 0.9, 60.0)]
    first, second, third = telling.story(runs, 0.9, PACKINGS)
    assert first == (
        "Dense, the network reads 98.0\xa0% of the test images right. With 90\xa0% of its weights removed it still "
        "reads 98.0\xa0% right (the best row: LAMP); with as many removed at random, 60.0\xa0%."
    )
    assert second.endswith("What shrinks is the zipped file, from 144\xa0kB to 144\xa0kB.")
    assert third == (
        "Zeros are skipped by pack, where it measures that to be faster. For one image 0 of 1 layers skip theirs; the "
        "others stay dense: dense is faster (1). For 128 images 2 of 3 layers skip theirs, 1.5 to 2.0 times as fast as "
        "the fastest dense form; the others stay dense: dense is faster (1)."
    )
    barer = [*runs, run_of("LAMP", 0.98, 90.0), run_of("random", 0.98, 20.0)]
    assert telling.story(barer, 0.9, PACKINGS)[0].endswith(
        "60.0\xa0%. With 98\xa0% removed the best row is LAMP, at 90.0\xa0%."
    )


def test_notes_are_of_the_methods_that_ran() -> None:
    data = load_digits()
    few = telling.notes(Plan(choose_methods(["lamp"]), (4, 5), (0.9,), 3, 1), data, 7.0)
    every = telling.notes(Plan(tuple(METHODS.values()), (4,), (0.9,), 3, 1), data, 7.0)
    assert set(few) - {few[1], few[-1]} <= {*every, *few}
    assert any(note.startswith("LAMP scores") for note in few)
    assert not any("ERK gives" in note for note in few)
    assert "3 epochs for each of 2 seeds" in few[1]
    assert "Every method prunes" in few[1]
    assert all(note == " ".join(note.split()) and note.endswith((".", ")")) for note in every)
    assert not any(sign in note for note in every for sign in "{}#\n")


def test_a_figure_that_is_missing_is_no_gap_in_a_sentence() -> None:
    with pytest.raises(jinja2.UndefinedError, match="train_images"):
        telling._paragraphs("notes", plan="LAMP")
