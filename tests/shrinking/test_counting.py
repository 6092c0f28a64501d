"""Laws of counting: what is asked is what leaves, to half of the smallest step."""

import itertools
import re
from dataclasses import replace

import pytest

from secateur.coupling import find_coupling
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import cost_of
from secateur.shrinking.counting import counted
from secateur.shrinking.request import Request
from secateur.shrinking.subject import subject_of
from secateur.shrinking.ties import Tied, by_tie
from support.published import PUBLISHED

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
LAWS = [  # uniform (None: as in the one before), target, round_to, shares
    (False, "params", None, SHARES),
    (None, "params", 1, (0.1, 0.3)),
    (None, "macs", None, (0.1, 0.5)),
    (True, "params", None, SHARES),
    (None, "macs", 1, (0.1, 0.3)),
]

# what is tested here; `benchmarks/shrinking/run.py nearest` has them all
SOME = [
    "SmolLM2 135M", "Llama 3 8B", "Qwen2.5 0.5B", "Gemma 2 2B", "Phi-3 mini", "GPT-2", "BERT base", "ViT-B/16",
    "Whisper tiny",
]  # fmt: skip


def smallest_step(groups, counts, round_to, cost, is_possible):
    """What the smallest step from there changes: one choice of one tie up or down, if there is such a model."""
    here, found = cost(counts), []
    for each in by_tie(groups):
        tied = Tied(each, round_to, {})
        parts, choices = round(tied.mean(counts)), tied.choices().tolist()
        fewer = max((choice for choice in choices if choice < parts), default=None)
        more = min((choice for choice in choices if choice > parts), default=None)
        for choice in (fewer, more):
            beside = {} if choice is None else counts | tied.counts(choice)
            if beside and is_possible(beside) and cost(beside) != here:
                found.append(abs(cost(beside) - here))
    return min(found, default=0.0)


def is_nearest_by_two(groups, counts, round_to, cost, goal, is_possible):
    """Whether no counts of two ties lead nearer: where one step is coarse and another tie too small to make up."""
    tied = [Tied(each, round_to, {}) for each in by_tie(groups)]
    off = abs(cost(counts) - goal)
    for one, other in itertools.combinations(tied, 2):
        for many, few in itertools.product(one.choices().tolist(), other.choices().tolist()):
            beside = counts | one.counts(many) | other.counts(few)
            if abs(cost(beside) - goal) < off * (1 - 1e-9) and is_possible(beside):
                return False
    return True


@pytest.mark.parametrize("name", SOME)
def test_what_is_asked_is_what_leaves_published_models(name):
    make, inputs = PUBLISHED[name]
    model = make()
    coupling = find_coupling(model, inputs)
    for uniform, target, round_to, shares in LAWS:
        if uniform is not None:
            configured = Configured(model, coupling) if uniform else None
            subject, groups = subject_of(model, coupling, [inputs], configured=configured), coupling.groups
        cost = cost_of(model, coupling, inputs, target)
        whole = cost({})
        for share in shares:
            asked = Request(sparsity=share, target=target, round_to=round_to)
            try:
                counts = counted(subject, groups, asked).counts
            except ValueError as error:
                most = float(re.search(r"at most ([0-9.]+)% of the", str(error))[1]) / 100
                counts = counted(subject, groups, replace(asked, sparsity=most)).counts
                assert share > 1 - cost(counts) / whole == pytest.approx(most, abs=1e-4)
                continue
            off = abs(1 - cost(counts) / whole - share)
            step = smallest_step(groups, counts, round_to, cost, subject.is_possible) / whole
            assert step < 0.1, "no coarse steps here"
            assert off <= step / 2 + 1e-9 or is_nearest_by_two(
                groups, counts, round_to, cost, (1 - share) * whole, subject.is_possible
            ), (uniform, target, round_to, share)
