"""The ways of the benchmark: each sees as many batches, and keeps the zeros."""

import copy

import pytest
import torch

from benchmarks.recovery import ways
from secateur import sparsify
from support.families import make


@pytest.mark.parametrize("way", ways.WAYS)
def test_every_way_passes_over_as_many_batches(way, monkeypatch):
    asked, teachers = {}, []

    def recover(model, teacher, batches, **options):
        asked.update(options, batches=len(batches))
        teachers.append((model, teacher, options["share"]) if way == "corrected" else None)

    monkeypatch.setattr(ways, "recover", recover)
    batches = [{"input_ids": torch.zeros(1, 2)}] * 8
    for steps in (4, 8, 16, 64):
        ways.trained(torch.nn.Identity(), torch.nn.Identity(), batches, way, steps)
        few = min(asked.get("local_batches", 0), asked["batches"])
        assert asked["steps"] + asked["local"] * few == steps
        assert asked.get("share", 1.0) == {"plain": 0.0, "dense": 0.0, "mixed": 0.5, "corrected": 0.5}.get(way, 1.0)
        assert bool(asked["steps"]) == (way != "local")
        assert bool(asked["local"]) == (way in ("local", "both"))
    if way == "corrected":
        (teacher, _, share), (_, its, _) = teachers[-2:]
        assert (its is teacher, share) == (True, 0.0), "the teacher is fine-tuned, and then teaches"


def test_plain_fine_tuning_asks_no_teacher():
    model = make("llama")
    sparsify(model, 0.5)
    before = copy.deepcopy(model)
    teacher = make("llama")
    teacher.forward = None
    done = ways.trained(model, teacher, [{"input_ids": torch.randint(3, 64, (2, 8))}], "plain", 3)
    assert all(was == now for was, now in done.zeros.values())
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what is deprecated
def test_a_plain_merge_loses_zeros_and_the_other_does_not(capsys):
    pytest.importorskip("peft")
    rows = ways.adapters()
    assert all(each["kept"] == each["sparsity"] > each["plain"] for each in rows)
