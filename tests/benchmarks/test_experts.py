"""The benchmark of mixtures: its oracle tells right from wrong, and its rows say what they are to say."""

import pytest
import torch

from benchmarks.experts import coverage
from benchmarks.support.models import zoo

NAME = "mixture_granite"


def test_a_mixture_is_right():
    assert coverage.judged_experts(NAME) == {"experts": "right", "why": ""}
    assert coverage.widths_of(NAME) == {"leave": "model attention inner experts"}


def test_what_stays_says_why():
    row = coverage.judged_experts("mixture_doge")
    assert row["experts"] == "refused"
    assert "router_gate.weight dimension 0" in row["why"]


@pytest.mark.parametrize("wrong", ["router", "experts"])
def test_another_expert_that_leaves_is_told(monkeypatch, wrong):
    """Its tensors lose another row than the plan says."""
    shrink = coverage.shrink

    def shrunk(model, *given, **options):
        (plan,) = (done := shrink(model, *given, **options)).plans
        for name, (_, cuts) in plan.tensors.items():
            if ("experts" not in name) == (wrong == "router"):
                dense = dict(zoo.ZOO[NAME]()[0].named_parameters())[name]
                cuts[0][:] = torch.arange(len(cuts[0])).numpy() + (0 if cuts[0][0] else 1)
                model.get_parameter(name).data = dense.data[torch.from_numpy(cuts[0])]
        return done

    monkeypatch.setattr(coverage, "shrink", shrunk)
    row = coverage.judged_experts(NAME)
    assert row["experts"] == "WRONG"
    assert row["why"].startswith("differs by")
