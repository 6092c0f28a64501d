"""DSnoT by hand, and what it is for."""

import pytest
import torch

from secateur import NM, Block, Channels, Rows
from secateur.solvers import dsnot
from support.solving import evidence_of, layer


def test_dsnot_by_hand():
    """e = 3 of w·E[x] = (3, -1, 4, 1); what is lost comes back, and of the negative the smallest Wanda score goes."""
    weight = torch.tensor([[3.0, -1.0, 4.0, 1.0]])
    evidence = {
        "input_norm": torch.tensor([[0.1, 1.0, 1.0, 0.2]]),
        "input_mean": torch.ones(1, 4),
        "input_var": torch.ones(1, 4),
    }
    new, mask = dsnot(weight, 0.5, Rows(), **evidence)  # Wanda keeps the second and the third
    assert mask.tolist() == [[True, False, True, False]]
    assert new.tolist() == [[3, 0, 4, 0]]
    assert dsnot(weight, 0.5, Rows(), **evidence, cycles=0)[1].tolist() == [[False, True, True, False]]
    assert dsnot(weight, 0.5, Rows(), **evidence, threshold=4.0)[1].tolist() == [[False, True, True, False]]


def test_dsnot_weighs_by_the_variance():
    weight = torch.tensor([[2.0, 1.0, -9.0, -9.5]])
    evidence = {
        "input_norm": torch.ones(1, 4),
        "input_mean": torch.tensor([[1.0, 1.0, 0.1, 0.1]]),
        "input_var": torch.tensor([[10.0, 1.0, 1.0, 1.0]]),
    }
    assert dsnot(weight, 0.5, Rows(), **evidence, cycles=1)[1].tolist() == [[False, True, False, True]]
    assert dsnot(weight, 0.5, Rows(), **evidence, cycles=1, power=0.0)[1].tolist() == [[True, False, False, True]]


def test_dsnot_brings_the_mean_output_nearer():
    weight, gram = layer(16, 60)
    evidence = {word: value for word, value in evidence_of(gram).items() if word != "gram"}
    lost = []
    for cycles in (0, 50):
        _, mask = dsnot(weight, 0.5, Rows(), **evidence, cycles=cycles)
        lost.append(((weight * evidence["input_mean"]) * ~mask).sum(1).abs().mean())
    assert lost[1] < lost[0]


def test_dsnot_errors():
    weight = torch.ones(2, 4)
    good = dict.fromkeys(("input_norm", "input_mean", "input_var"), torch.ones(1, 4))
    for pattern in (Channels(), Block(2, 2), NM(1, 2, axis=0)):
        with pytest.raises(ValueError, match=r"use Rows\(\), Unstructured\(\) or n:m, not "):
            dsnot(weight, 0.5, pattern, **good)
    with pytest.raises(ValueError, match=r"input_mean has shape \(1, 3\); a weight of shape \(2, 4\) needs \(1, 4\)"):
        dsnot(weight, 0.5, Rows(), **good | {"input_mean": torch.ones(1, 3)})
