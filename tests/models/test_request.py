"""What a walk is asked for, and the batches it goes through."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from secateur import Unstructured
from secateur.allocation import by_name
from secateur.checkpoints import request_of
from secateur.models import oneshot
from secateur.models.solving import OneShotRequest, digest, held_batches
from secateur.solvers import admm, with_refit
from support.stacks import data, stack


@pytest.mark.parametrize("form", ["pairs", "lists", "loader", "generator", "named"])
def test_batches_are_what_a_dataloader_yields(form):
    """Of ``(inputs, target)`` the inputs are run; whatever holds them, the weights become the same."""
    x = torch.cat(data())
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=6)
    forms = {
        "pairs": [(each, torch.zeros(6)) for each in data()],
        "lists": [[each, torch.zeros(6), "another target"] for each in data()],
        "loader": loader,
        "generator": (batch for batch in loader),
        "named": [{"x": each} for each in data()],
    }
    plain, model = stack(), stack()
    oneshot(plain, data(), 0.5)
    oneshot(model, forms[form], 0.5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_batches_are_held_once_and_must_be_some():
    every, share = held_batches(iter([1, 2, 3]))
    assert list(every) == list(share) == [1, 2, 3]
    with pytest.raises(ValueError, match="there are no batches"):
        held_batches([])
    masked = {"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4).long()}
    for nothing in ([torch.zeros(0, 8)], [(torch.zeros(0, 8), torch.zeros(0))] * 2, [masked]):
        with pytest.raises(ValueError, match="the batches hold no token and no sample, or all is padding"):
            held_batches(nothing)
    one_of_them = [torch.zeros(0, 8), torch.ones(1, 8)]
    assert held_batches(one_of_them) == (one_of_them, one_of_them)
    for single in (torch.ones(2, 5), {"x": torch.ones(2, 5)}, "text"):
        with pytest.raises(TypeError, match=r"an iterable of batches, not a .*; pass \[batch\]"):
            held_batches(single)


def test_a_run_that_goes_on_must_have_the_same_settings():
    def said(iterations, share):
        solver, allocate = with_refit(admm, iterations=iterations), by_name({"*.down_proj.weight": share})
        return request_of("oneshot", OneShotRequest(0.5, solver, Unstructured(), allocate, ("gram",)))

    assert said(3, 0.1) == said(3, 0.1)
    assert said(3, 0.1) != said(4, 0.1) != said(4, 0.2)
    assert said(3, 0.1)["solver"] == "with_refit(admm, iterations=3, tolerance=0.001)"
    assert said(3, 0.1)["allocate"] == "by_name(shares={'*.down_proj.weight': 0.1}, otherwise=None)"


def test_the_digest_tells_batches_apart():
    one = [{"a": torch.tensor([1, 2]), "b": torch.tensor([3])}]
    assert digest(one) == digest([{"b": torch.tensor([3]), "a": torch.tensor([1, 2])}])
    others = [
        [{"a": torch.tensor([1, 2]), "b": torch.tensor([4])}],
        [{"a": torch.tensor([1, 2]).int(), "b": torch.tensor([3])}],
        [{"a": torch.tensor([[1, 2]]), "b": torch.tensor([3])}],
        [{"a": torch.tensor([1, 2])}, {"b": torch.tensor([3])}],
        [(torch.tensor([1, 2]), torch.tensor([3]))],
    ]
    assert len({digest(each) for each in [one, *others]}) == 6
