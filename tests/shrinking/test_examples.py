"""Laws of examples: nothing is asked for beside the results, and a batch says what a model is called with."""

import copy

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.models import example_for, example_of, shorter
from secateur.shrinking import costs
from support.mixtures import SMALL, batches


def mixture(**config):
    import transformers

    torch.manual_seed(0)
    made = transformers.MixtralConfig(intermediate_size=48, num_local_experts=4, **SMALL, **config)
    return transformers.MixtralForCausalLM(made)


def test_neither_a_cache_nor_scores_of_routers_are_asked_for():
    model = mixture()
    nothing = {"use_cache": False, "output_router_logits": False}
    assert example_for(model).items() >= nothing.items()
    assert example_of(model, batches()[0]).items() >= nothing.items()
    assert example_of(model, {"input_ids": torch.ones(1, 2), "use_cache": True})["use_cache"] is False
    found = model(**example_for(model))
    assert [name for name, each in found.items() if each is not None] == ["logits"]


def test_a_batch_says_what_a_model_is_called_with():
    """As `run_batch` calls it, with the first rows of each of its tensors."""
    rows = torch.randn(5, 3)
    linear = nn.Linear(3, 2)
    assert torch.equal(example_of(linear, rows), rows[:2])
    assert torch.equal(example_of(linear, (rows, torch.zeros(5))), rows[:2])
    assert example_of(linear, rows, None) is rows
    given = {"x": rows, "y": torch.ones(4)}  # not of as many rows
    assert example_of(linear, given)["x"] is rows
    assert example_of(mixture(), torch.ones(3, 4))["input_ids"].shape == (2, 4)


def test_shrink_takes_its_example_from_the_batches():
    """Also of a model that returns its routers' scores, which would keep the number of experts."""
    first = mixture(output_router_logits=True)
    second = copy.deepcopy(first)
    given = {**shorter(batches()[0]), "use_cache": False, "output_router_logits": False}
    how = {"batches": batches(), "leave": "experts:25%", "uniform": True, "repair": False, "verify": False}
    mine, its = shrink(first, **how), shrink(second, given, **how)
    assert (mine.experts, mine.multiply_adds) == (its.experts, its.multiply_adds)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert first.config.num_local_experts == 3
    words = batches()[0]["input_ids"]
    assert first(words, labels=words).aux_loss.isfinite()


def test_what_is_timed_is_a_whole_batch(monkeypatch):
    def ratio(smaller, dense, _):  # of sizes: a test measures no time
        return sum(each.numel() for each in smaller.parameters()) / sum(each.numel() for each in dense.parameters())

    monkeypatch.setattr(costs, "ratio_of_times", ratio)
    linear, rows = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(5, 3)
    timed = shrink(copy.deepcopy(linear), None, 0.5, batches=[rows], target="latency", verify=False)
    assert timed.multiply_adds[0] == 5 * (3 * 16 + 16 * 2)
    assert shrink(linear, None, 0.5, batches=[rows], verify=False).multiply_adds[0] == 2 * (3 * 16 + 16 * 2)


@pytest.mark.parametrize("how", [{}, {"batches": [torch.ones(2, 3)], "forward": lambda model, batch: model(batch)}])
def test_what_says_no_example_is_refused(how):
    with pytest.raises(ValueError, match=r"^give example_inputs, what the model is called with; or batches= without"):
        shrink(nn.Linear(3, 2), sparsity=0.5, **how)
