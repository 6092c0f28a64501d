"""What the report says in words: every figure of it is one that was measured."""

import re
from dataclasses import replace

import jinja2
import pytest
from torch import nn

from secateur.demo import load_digits
from secateur.demo import result as telling
from secateur.demo.trials import METHODS, Packed, Plan, Trial, choose_methods
from secateur.inference import PackedLayer, Packing
from secateur.report import Results, Run, summarize


def test_every_figure_of_the_story_is_measured(results: Results) -> None:
    figures = {f"{run.latency_ms:.2f}" for run in results.runs if run.latency_ms}
    batches = {f"{run.batch_ms:.2f}" for run in results.shrunken if run.batch_ms}
    told = re.findall(r"(\d+\.\d\d)\sms", " ".join(results.text))
    assert len(told) == 5
    assert set(told[:2]) <= figures
    assert set(told[2:]) <= batches


def run_of(method: str, sparsity: float, after: float, seed: int = 0) -> Run:
    return Run(method, sparsity, after - 1, after, seed, 158_000, 144_000, 1.25, sparsity, 1000 - int(1000 * sparsity))


def test_the_story_names_the_best_row_and_the_barest() -> None:
    runs = [run_of("dense", 0.0, 99.0), run_of("LAMP", 0.9, 98.0), run_of("random", 0.9, 60.0)]
    first, second = telling.story(runs, 0.9)
    assert first == (
        "Dense, the network reads 98.0\xa0% of the test images right. With 90\xa0% of its weights removed it still "
        "reads 98.0\xa0% right (the best row: LAMP); with as many removed at random, 60.0\xa0%."
    )
    assert second.endswith("What shrinks is the zipped file, from 144\xa0kB to 144\xa0kB.")
    barer = [*runs, run_of("LAMP", 0.98, 90.0), run_of("random", 0.98, 20.0)]
    assert telling.story(barer, 0.9)[0].endswith("60.0\xa0%. With 98\xa0% removed the best row is LAMP, at 90.0\xa0%.")


def test_notes_are_of_the_methods_that_ran() -> None:
    data = load_digits()
    few = telling.notes(Plan(choose_methods(["lamp"]), (4, 5), (0.9,), 3, 1), data, 7.0, checked=False)
    every = telling.notes(Plan(tuple(METHODS.values()), (4,), (0.9,), 3, 1), data, 7.0, checked=True)
    assert set(few) - {few[1], few[-1]} <= {*every, *few}
    assert any(note.startswith("LAMP scores") for note in few)
    assert not any("ERK gives" in note or note.startswith("The sanity") for note in few)
    assert "3 epochs for each of 2 seeds" in few[1]
    assert "Every method prunes" in few[1]
    assert all(note == " ".join(note.split()) and note.endswith((".", ")")) for note in every)
    assert not any(sign in note for note in every for sign in "{}#\n")


def test_each_check_says_what_it_tells() -> None:
    told = telling.checks_in_words("2:4", 10)
    assert list(told) == ["2:4 as it is", "mask shuffled", "random mask, same layers", "weights re-initialized"]
    assert told["2:4 as it is"] == "Its own mask on the trained weights, fine-tuned for 10 epochs like all below."


def test_a_figure_that_is_missing_is_no_gap_in_a_sentence() -> None:
    with pytest.raises(jinja2.UndefinedError, match="epochs"):
        telling._paragraphs("checks", label="LAMP")


def test_what_is_packed_is_told_as_it_was_measured() -> None:
    """How many layers, how fast the 3×3 convolutions were, and why others stayed; of one image and of a batch."""

    def layer(kind: str, speed: float | None, why: str = "", size: int = 3) -> PackedLayer:
        times = (None, None) if speed is None else (speed, 1.0)
        return PackedLayer("name", kind, (8, 8, size, size), 0.8, why, times[0], *times)

    slow = Packing((layer("dense", 0.5, "dense is faster"), layer("dense", 0.75, "dense is faster")))
    fast = Packing((layer("BlockConv2d", 1.25), layer("BlockConv2d", 1.5), layer("dense", None, "no zeros", size=1)))
    runs = [run_of("dense", 0.0, 99.0), run_of("columns:16, packed", 0.8, 98.0)]
    runs = [replace(run, batch_ms=2.0, memory=1000, compressed=500) for run in runs]
    trial = Trial("columns:16", 0.8, 0, nn.Identity(), {}, 1, 0)
    told = telling.smaller_in_words(summarize(runs), Packed(trial, trial.model, trial.model, (slow, fast)))[1]
    one, many = (
        "For one image it replaced 0 of 2 layers: a 3×3 convolution that skips its zeros is 0.5 to 0.8 times as fast "
        "as the fastest dense one. What stays: dense is faster (2). ",
        "For 128 images it replaced 2 of 3 layers: a 3×3 convolution that skips its zeros is 1.2 to 1.5 times as fast "
        "as the fastest dense one. What stays: no zeros (1). ",
    )
    assert one + many + "128 images then take 2.00\xa0ms" in told
    none = Packing((layer("dense", None, "there are no kernels here"),))
    told = telling.smaller_in_words(summarize(runs), Packed(trial, trial.model, trial.model, (none, none)))[1]
    assert "it replaced 0 of 1 layers. What stays: there are no kernels here (1)." in told
