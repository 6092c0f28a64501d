"""The benchmark of the search: equal budgets, gaps by hand, and a verdict that follows from figures."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.search import deployed
from benchmarks.search import run as search
from secateur.search import fit
from support.families import make
from support.fitting import blocks, inputs


class Tiny:
    score = "change"

    def __init__(self, _seed):
        self.model = blocks(3)

    def batches(self, _seed):
        return inputs(4)

    def measure(self, model):
        return {"gap": 1.0}


@pytest.mark.parametrize("setting", ["60%", "-20%"])
def test_every_method_spends_no_more_than_the_budget(setting, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "fit", lambda *args, **named: fit(*args, **{**named, "round_to": 1, "finals": 2}))
    rows = search.compare("tiny", Tiny, [setting], 1, tmp_path / "rows.jsonl", search.How(passes=4))
    whole = sum(each.numel() for each in Tiny(0).model.parameters())
    mine = next(each for each in rows if each["method"] == "fit")
    others = [each["left"] for each in rows if each["method"] != "fit"]
    assert mine["left"] <= max(others)
    assert all(0 < each["left"] < whole for each in rows)
    again = search.compare("tiny", lambda _: pytest.fail("it is there"), [setting], 1, tmp_path / "rows.jsonl")
    assert again == rows
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0]) == rows[0]


def test_a_language_model_is_judged_on_text_of_its_own_by_the_dense_one():
    dense = make("llama")
    held_out = torch.randint(3, 64, (3, 8))
    subject = search.Language(SimpleNamespace(model=dense, held_out=[held_out, held_out[:1]]), 4, judged=2)
    assert torch.equal(subject.held_out, held_out[:2])
    same = subject.measure(copy.deepcopy(dense))
    assert same["gap"] == 0
    assert same["perplexity"] == pytest.approx(dense(input_ids=held_out[:2], labels=held_out[:2]).loss.exp().item())
    assert subject.measure(make("llama", seed=1))["gap"] > 0


def test_the_digits_are_judged_on_images_that_nobody_saw():
    made = object.__new__(search.Digits)
    made.data = search.demo.load_digits()
    made.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made.dense = made._outputs(made.model)
    assert made.measure(made.model)["gap"] == 0
    seen = torch.cat(made.batches(0))
    assert len(seen) == len(made.data.train_images)


def test_what_is_delivered_stands_beside_the_dense_model_in_int8(tmp_path, capsys):
    dense, batches = blocks(3), inputs(4)

    def norm(model):
        with torch.no_grad():
            return float(model(batches[0]).norm())

    subject = deployed.Subject(dense, batches, batches[0], ["gap"], lambda model: [norm(model)])
    deployed.bench(subject, [1e3], SimpleNamespace(finals=1, steps=0, store=None, runtime="onnxruntime:int4"), tmp_path)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    gaps = {row[0].removeprefix("| "): float(row[-1].rstrip(" |")) for row in rows[2:]}
    delivered = gaps["asked 1000: dense, float32"]
    assert delivered == gaps["dense, float32"] == pytest.approx(norm(dense), rel=1e-3)
    assert gaps["dense, int8"] == pytest.approx(delivered, rel=0.1)
    assert gaps["dense, int4"] == pytest.approx(delivered, rel=0.3)
    assert gaps["dense, plain int8"] == gaps["dense, int8"]  # it has no table
    assert len({*gaps.values()}) == 3
