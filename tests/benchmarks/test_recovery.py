"""The ways of the benchmark: each sees as many batches, and keeps the zeros."""

import copy

import pytest
import torch

from benchmarks.recovery import ways
from secateur import sparsify
from support.families import make
from support.tokenizers_of_words import WORDS, write_tokenizer


@pytest.mark.parametrize("way", ways.WAYS)
def test_every_way_passes_over_as_many_batches(way, monkeypatch):
    asked, teachers = [], []

    def recover(model, teacher, batches, **options):
        asked.append({**options, "batches": len(batches)})
        teachers.append((model, teacher, options["share"]) if way == "corrected" else None)

    monkeypatch.setattr(ways, "recover", recover)
    batches = [{"input_ids": torch.zeros(1, 2)}] * 8
    for steps in (4, 8, 16, 64):
        asked.clear()
        ways.trained(torch.nn.Identity(), torch.nn.Identity(), batches, way, steps)
        its = asked[way == "corrected" :]
        assert sum(each["steps"] + each["local"] * each["batches"] for each in its) == steps
        share = {"plain": 0.0, "dense": 0.0, "mixed": 0.5, "corrected": 0.5}.get(way, 1.0)
        assert all(each.get("share", 1.0) == share for each in its)
        assert any(each["steps"] for each in its) == (way != "local")
        assert any(each["local"] for each in its) == (way in ("local", "both"))
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


@pytest.mark.parametrize("sampled", [False, True])
def test_a_run_is_judged_on_the_way(tmp_path, sampled, capsys):
    model, text = make("llama"), tmp_path / "text.txt"
    model.save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    sparsify(model, 0.5)
    model.save_pretrained(tmp_path / "sparse")
    text.write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(200)))
    runs = ways.Runs(["outputs", "corrected"], [0], [64, 32], 8, 2, 1e-3, 2, "bfloat16", sampled)
    rows = ways.smollm2((tmp_path / "sparse", tmp_path / "dense"), (text, text, text), runs)
    assert [(each["way"], each["tokens"]) for each in rows] == [
        ("outputs", 32), ("outputs", 64), ("corrected", 32), ("corrected", 64)
    ]  # fmt: skip
    assert all(len(each["after"]) == len(each["back"]) == 2 for each in rows)
    assert rows[0]["after"] != rows[1]["after"]
    assert rows[0]["seconds"] < rows[1]["seconds"]
    assert ("the teacher wrote 64 tokens" in capsys.readouterr().out) == sampled
    if not sampled:
        rows = ways.speeds((tmp_path / "sparse", tmp_path / "dense"), text, 8, 2, 1, backend="eager")
        assert [len(each["seconds"]) for each in rows] == [2, 2, 2, 2]
        assert [each["way"] for each in rows] == [
            "float32", "bfloat16", "bfloat16, eager attention", "bfloat16, eager attention, compiled"
        ]  # fmt: skip
