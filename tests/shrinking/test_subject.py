"""Laws of subjects: a proof is only asked where there is something to prove on, and nothing objects to nothing."""

import pytest
import torch
from torch import nn

from secateur.coupling import Scope, find_coupling
from secateur.shrinking import request as subjects
from secateur.shrinking.request import pruning_target


class Said:
    """Says of some counts that they are possible, and objects to what it is told to."""

    def __init__(self, wrong):
        self.wrong, self.asked = wrong, []

    def unsaid(self, model, _coupling, groups, kept, inputs):
        self.asked.append((model, inputs))
        return [group for group in groups if group.name == self.wrong]

    def is_possible(self, counts):
        return not counts


def made(**given):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)
    coupling = find_coupling(model, x)
    return (
        model,
        x,
        pruning_target(model, Scope.of(coupling), [x], **given),
        {each.name: half(each.size) for each in coupling.groups},
    )


def half(size):
    return (torch.arange(size) % 2 == 0).numpy()


def test_weights_are_those_of_the_module_in_one_block():
    model, _, subject, _ = made()
    assert subject.weights.keys() == dict(model.named_parameters()).keys()
    (block,) = subject.blocks("0.weight")
    assert torch.equal(block, model[0].weight)
    assert not block.requires_grad


def test_without_a_proof_and_without_a_configuration_there_are_no_objections(monkeypatch):
    monkeypatch.setattr(subjects, "wrong_groups", lambda *_: pytest.fail("asked"))
    _, _, subject, kept = made()
    assert subject.objections(subject.coupling.groups, kept) == ([], "")
    assert subject.is_possible({})
    assert subject.is_possible({object(): 1})


def test_the_proof_comes_first(monkeypatch):
    said = Said("0.weight")
    model, *_ = made()
    _, _, subject, kept = made(configured=said, proved_on=model)
    groups = [*subject.coupling.groups]
    assert subject.objections(groups, kept) == (groups, "a model built from the configuration is not the smaller one")
    assert [each[0] for each in said.asked] == [model]
    monkeypatch.setattr(subjects, "wrong_groups", lambda *arguments: list(arguments[2]))
    assert subject.objections(groups, kept) == (groups, "the smaller model computed something else")
    assert len(said.asked) == 1
    assert subject.is_possible({})
    assert not subject.is_possible({groups[0].name: 1})


def test_what_is_said_is_asked_without_a_proof_as_well():
    said = Said("nothing")
    _, _, subject, kept = made(configured=said)
    assert subject.objections(subject.coupling.groups, kept)[0] == []
    assert [each[0] for each in said.asked] == [None]
