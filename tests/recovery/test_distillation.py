"""A teacher beside a training loop of one's own."""

import copy

import pytest
import torch
from torch import nn

from secateur import sparsify
from secateur.recovery import Distillation
from support.families import make


def test_a_loop_of_ones_own_learns_from_the_teacher_and_keeps_zeros():
    teacher = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    teacher[1].training = False
    model = copy.deepcopy(teacher).eval()
    masks = sparsify(model, 0.5)
    model.train()
    teacher.train()
    distillation = Distillation(teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner = Distillation.keeping_zeros(model, optimizer)
    losses = []
    with distillation.watching(model):
        for _ in range(40):
            model(torch.randn(16, 4))
            loss = distillation.mixed(None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert distillation.loss == "kl"
    assert teacher[1].training, "in the mode that it was in"
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(bool(model.get_parameter(name)[~mask].eq(0).all()) for name, mask in masks.items())
    assert pruner.masks.keys() >= masks.keys()
    model(torch.randn(2, 4))
    assert distillation.last is None, "outside of the with block nothing is watched"
    assert Distillation.keeping_zeros(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())) is None


def test_labels_are_not_the_teachers_and_shares_add_up():
    teacher, model = make("llama"), make("llama")
    distillation = Distillation(teacher, share=0.25)
    tokens = torch.randint(3, 64, (2, 8))
    outputs = model(input_ids=tokens, labels=tokens)
    found = distillation.loss_of(outputs, (), {"input_ids": tokens, "labels": tokens, "num_items_in_batch": 3})
    assert torch.allclose(distillation.mixed(outputs.loss), 0.25 * found + 0.75 * outputs.loss)
    with pytest.raises(ValueError, match="the model that was to be watched has not been run"):
        distillation.mixed(None)
    for share in (0, 1.5):
        with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
            Distillation(teacher, share=share)
    with pytest.raises(ValueError, match="no loss is called 'x'"):
        Distillation(teacher, "x")
