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
    manual = torch.randint(3, 64, (2, 8))
    subject = search.Language(SimpleNamespace(model=dense, held_out=[held_out, manual]), 4, judged=2)
    same, other = subject.measure(copy.deepcopy(dense)), subject.measure(make("llama", seed=1))
    for kind, text in (("", held_out[:2]), (" of the manual", manual[:1])):
        assert same[f"gap{kind}"] == 0
        assert same[f"perplexity{kind}"] == pytest.approx(dense(input_ids=text, labels=text).loss.exp().item())
        assert other[f"gap{kind}"] > 0


def test_pitches_are_judged_on_tones_that_nobody_saw(monkeypatch, tmp_path):
    dense = nn.Sequential(nn.Linear(1024, 360), nn.Sigmoid()).eval()
    monkeypatch.setattr(search.crepe, "load", lambda *_: dense)
    subject = search.Pitches(tmp_path, 64)
    seen = torch.cat([batch for seed in range(3) for batch in subject.batches(seed)])
    assert not (torch.cdist(seen, subject.tones) < 1e-3).any()
    assert subject.measure(copy.deepcopy(dense))["gap"] == 0
    other = copy.deepcopy(dense).requires_grad_(False)
    other[0].weight.zero_()
    other[0].bias.fill_(-100.0)  # of which every output is zero
    assert subject.measure(other)["gap"] == pytest.approx(1)


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


def test_each_kind_of_text_has_rows_and_a_verdict_of_its_own():
    rows = [
        {"subject": "llama", "setting": "60%", "seed": 0, "method": method, "gap": gap, "gap of the manual": manual}
        for method, gap, manual in (("uniform", 0.5, 0.5), ("owl", 0.4, 0.25), ("fit", 0.2, 0.25))
    ]
    told = search.table(rows)
    assert "| owl of the manual | 0.25 | 0.25 |" in told
    assert "fit / the best fixed: 0.50. At most 0.8 in each seed: met." in told
    assert "fit / the best fixed of the manual: 1.00. At most 0.8 in each seed: missed." in told
