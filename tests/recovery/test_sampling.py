"""Text that the teacher writes: one seed, one text; a run that was stopped trains on the same."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from secateur.checkpoints import CheckpointError
from secateur.recovery import Sampled, recover
from secateur.recovery import directory as recovery
from secateur.recovery import outputs as sampling
from secateur.recovery.outputs import sampled
from support.families import make
from support.forks import forked, interrupted
from support.stacks import contents

FEW = Sampled(samples=5, length=7, size=2)
FAST = {"rate": 1e-3, "steps": 3}


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch):
    monkeypatch.setattr(sampling, "TOGETHER", 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba", "mixtral"])
def test_one_seed_is_one_text_and_generators_stay(family):
    teacher = make(family)
    teacher.generation_config.eos_token_id = list(range(3, 60))  # an end of a text does not end a sequence
    teacher.generation_config.temperature = 0.01
    own, state = teacher.generation_config, torch.get_rng_state()
    rows = sampled(teacher, FEW, 3)
    assert rows.shape == (5, 7)
    assert rows.dtype == torch.int64
    assert teacher.generation_config is own
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert torch.equal(rows, sampled(teacher, FEW, 3))
    assert torch.equal(rows, sampled(teacher, FEW, 3, rows[:2]))
    assert not torch.equal(rows, sampled(teacher, FEW, 4))
    assert not torch.equal(rows[:2], rows[2:4])
    assert [len(each["input_ids"]) for each in FEW.batches(rows)] == [2, 2, 1]


def test_it_is_drawn_as_often_as_the_teacher_finds_it_likely(monkeypatch):
    monkeypatch.setattr(sampling, "TOGETHER", 1000)
    teacher = make("llama")
    rows = sampled(teacher, Sampled(samples=3000, length=2), 0)
    assert set(rows[:, 0].tolist()) == {1}
    with torch.no_grad():
        wanted = teacher(torch.tensor([[1]])).logits[0, -1].softmax(-1)
    found = torch.bincount(rows[:, 1], minlength=64) / len(rows)
    assert float((found - wanted).abs().sum()) < 0.2


def test_where_no_token_begins_a_text_each_begins_with_one_of_all():
    teacher = make("llama", bos_token_id=None, eos_token_id=None)
    rows = sampled(teacher, Sampled(samples=12, length=2), 0)
    assert len(set(rows[:, 0].tolist())) > 5


def test_in_memory_it_stands_in_the_place_of_batches(pair):
    model, teacher, _ = pair
    done = recover(model, teacher, FEW, **FAST)
    assert done.steps == 3
    assert done.parts
    assert all(was == now for was, now in done.zeros.values())


def test_a_run_that_was_killed_trains_on_the_same_text(directories, monkeypatch):
    sparse, dense = (directories / name for name in ("sparse", "dense"))
    whole = recover(sparse, dense, FEW, out=directories / "out", **FAST)
    assert whole.rows == 5 * 7
    record = json.loads((directories / "out" / "secateur.json").read_text())
    assert len(record["data"]["sha256"]) == 64
    calls = []

    def run():
        real = sampling._drawn

        def draw(*arguments):
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(arguments)
            return real(*arguments)

        sampling._drawn = draw
        recover(sparse, dense, FEW, out=directories / "again", **FAST)

    assert forked(run) == signal.SIGKILL
    place = directories / "again.unfinished"
    assert (place / "sampled.safetensors").exists()
    drawn = []
    real = sampling._drawn
    monkeypatch.setattr(sampling, "_drawn", lambda *each: drawn.append(each) or real(*each))
    recover(sparse, dense, FEW, out=directories / "again", **FAST)
    assert len(drawn) == 1
    assert contents(directories / "again") == contents(directories / "out")
    assert not place.exists()


def test_a_text_that_is_damaged_or_of_another_request_is_told(directories):
    sparse, dense, out = (directories / name for name in ("sparse", "dense", "out"))
    with interrupted(recovery, "_local"):
        recover(sparse, dense, FEW, out=out, **FAST)
    kept = directories / "out.unfinished" / "sampled.safetensors"
    good = kept.read_bytes()
    with pytest.raises(CheckpointError, match=r"was begun with data.sampled.samples 5, not 6"):
        recover(sparse, dense, Sampled(samples=6, length=7, size=2), out=out, **FAST)
    for bad in (b"", good[:-8] + b"12345678", good[:40]):
        kept.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"the text of a run that was stopped, and damaged .* to start over"):
            recover(sparse, dense, FEW, out=out, **FAST)
    said = {"seed": 0, "samples": 5, "length": 7, "size": 2}
    for rows in (torch.full((5, 7), 64), torch.zeros(5, 6).long(), torch.zeros(6, 7).long(), torch.zeros(5, 7)):
        sampling.save_text(kept, rows, said)
        with pytest.raises(CheckpointError, match="damaged"):
            recover(sparse, dense, FEW, out=out, **FAST)
    save_file({"nothing": torch.zeros(1)}, kept)
    with pytest.raises(CheckpointError, match="damaged"):
        recover(sparse, dense, FEW, out=out, **FAST)
    kept.write_bytes(good)
    recover(sparse, dense, FEW, out=out, **FAST)


def test_what_writes_no_text_is_refused(tmp_path, pair):
    said = "no text is given, and a {} writes none of its own"
    for family in ("bert", "t5"):
        teacher = make(family)
        with pytest.raises(ValueError, match=said.format(type(teacher).__name__)):
            recover(make(family, seed=1), teacher)
        teacher.save_pretrained(tmp_path / family)
        with pytest.raises(ValueError, match=said.format(type(teacher).__name__)):
            recover(tmp_path / family, tmp_path / family, out=tmp_path / "out")
    with pytest.raises(ValueError, match="a Linear writes none of its own"):
        recover(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="length=65, but a LlamaForCausalLM takes 64 tokens at most"):
        recover(*pair[:2], Sampled(length=65))
    for name, value in {"samples": 0, "length": 1, "size": 2.0}.items():
        with pytest.raises(ValueError, match=f"{name} is a whole number"):
            Sampled(**{name: value})
