"""``secateur fit``: from a directory, a text and a budget to a directory that loads; or one line for what is wrong."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from secateur.checkpoints import locked
from secateur.cli import calibrated
from support.commands import fails, run
from support.stacks import contents


def call(folder, *words, out="out", data="text.txt"):
    return run(
        "fit", folder / "dense", "--data", folder / data, "--out", folder / out, "--samples", 4,
        "--sequence-length", 16, "--finals", 2, *words,
    )  # fmt: skip


def loaded(folder, out="out"):
    return AutoModelForCausalLM.from_pretrained(folder / out)


@pytest.mark.long
def test_a_smaller_directory_that_loads_and_a_page(folder):
    ended = call(folder, "--budget", "params=0.8", "--report", folder / "page.html")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Asked: params 80.0%.\n")
    assert re.search(r"^chosen +[\d.e-]+$", ended.stdout, re.MULTILINE)
    smaller, dense = loaded(folder), loaded(folder, "dense")
    assert smaller.num_parameters() <= 0.8 * dense.num_parameters()
    assert f"{smaller.num_parameters():,}" in ended.stdout
    assert smaller(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()
    page = (folder / "page.html").read_text()
    assert "What was chosen" in page
    assert "Before and after, measured" in page
    assert "The loss against the budget" in page
    assert run("verify", folder / "out", "--source", folder / "dense").exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "out", "page.html", "text.txt"]


@pytest.mark.long
def test_zeros_of_both_verbs(folder):
    ended = call(
        folder, "--budget", "params=0.7", "--over", "shrink", "--over", "oneshot", "--share", 0.25, "--share", 0.5
    )
    assert ended.exit_code == 0, ended.output
    tensors = load_file(folder / "out" / "model.safetensors")
    dense = sum(each.numel() for each in load_file(folder / "dense" / "model.safetensors").values())
    assert sum(int(each.count_nonzero()) for each in tensors.values()) <= 0.7 * dense
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "out", "text.txt"]
    assert loaded(folder)(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()
    for source in ((), ("--source", folder / "dense")):
        ended = run("verify", folder / "out", *source)
        assert ended.exit_code == 0, ended.output


@pytest.mark.long
def test_entries_alone(folder):
    ended = call(folder, "--budget", "params=0.7", "--over", "oneshot", "--store", folder / "levels", "--share", 0.5)
    assert ended.exit_code == 0, ended.output
    assert loaded(folder).num_parameters() == loaded(folder, "dense").num_parameters()
    assert (folder / "levels" / "chosen.json").exists()


@pytest.mark.long
def test_a_share_is_kept_in_place_of_a_budget(folder):
    ended = call(folder, "--keep", 0.9, "--score", "kl", "--target", "macs")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Asked: 90.0% of the score, at as few macs as it gets.\n")
    assert float(re.search(r"So ([\d.]+)% of the dense model is kept", ended.stdout)[1]) >= 90
    assert loaded(folder).num_parameters() < loaded(folder, "dense").num_parameters()
    assert "--keep 0.9 --target macs" in (folder / "out" / "secateur.json").read_text()


@pytest.mark.long
def test_what_sensitivity_wrote_is_what_fit_begins_with(folder):
    """And stays, whatever it is called."""
    text = ("--data", folder / "text.txt", "--samples", 4, "--sequence-length", 16)
    levels = folder / "out.levels"
    assert run("sensitivity", folder / "dense", *text, "--store", levels).exit_code == 0
    before = contents(levels)
    ended = call(folder, "--budget", "params=0.8", "--levels", levels)
    assert ended.exit_code == 0, ended.output
    assert contents(levels) == before
    assert loaded(folder).num_parameters() <= 0.8 * loaded(folder, "dense").num_parameters()
    fails(call(folder, "--budget", "params=0.8", "--levels", folder / "none", out="two"), "none")


@pytest.mark.long
def test_another_process_at_work_is_one_line(folder):
    (folder / "out.unfinished").mkdir()
    with locked(folder / "out.unfinished"):
        fails(call(folder, "--budget", "params=0.8"), "out.unfinished: another process is at work here; wait for it.")
    assert call(folder, "--budget", "params=0.8", "--include", "*mlp*").exit_code == 0


def test_under_torchrun_all_processes_take_part(folder, monkeypatch):
    """Of one whose others never come the error is torch's; that of two is in tests/search."""
    monkeypatch.setattr(calibrated, "join_processes", fail_to_join)
    fails(call(folder, "--budget", "params=0.8"), "nobody else came")


def fail_to_join(device):
    assert device is None
    raise ValueError("nobody else came")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --budget latency=0.6, what may be spent, or --keep 0.99, what has to stay: one of the two"),
        (("--budget", "params=0.5", "--keep", "0.9"), "give --budget latency=0.6, what may be spent, or --keep 0.99"),
        (("--keep", "code=0.9"), "keep= names the text 'code'; those of the batches are none: give several texts by"),
        (("--keep", "most"), "--keep is NAME=NUMBER, such as"),
        (("--keep", "2"), "keep is the share of the dense model's score that has to stay"),
        (("--keep", "0.9", "--target", "joules"), "no cost is called 'joules'"),
        (("--budget", "params"), "--budget is NAME=NUMBER, such as latency=0.6, not 'params'"),
        (("--budget", "joules=0.5"), "no cost is called 'joules'"),
        (("--budget", "params=0"), "params: a limit is a share in "),
        (("--budget", "params=0.5", "--budget", "params=0.6"), "--budget names params twice"),
        (("--budget", "latency=0.5", "--over", "oneshot"), "zeros make nothing faster by themselves"),
        (("--budget", "params=0.5", "--over", "both"), "over says which kinds of levels"),
        (("--budget", "params=0.5", "--share", "2"), "shares must be fractions"),
        (("--budget", "params=0.5", "--score", "f1"), "score must be one of 'kl', 'cosine', 'change'"),
        (("--budget", "params=0.5", "--include", "nothing*"), "no tensor or group matches"),
        (("--budget", "params=0.5", "--solver", "nothing"), "nothing"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, words, message):
    fails(call(folder, *words), message)
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "text.txt"]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("params=0.001", "the params cannot come to"),
        ("params=1.0", "costs no more than the budget as it is; nothing was written"),
    ],
)
@pytest.mark.long
def test_levels_stay_where_a_budget_was_wrong(folder, budget, message):
    ended = call(folder, "--budget", budget)
    fails(ended, message)
    assert (
        f"What was measured is kept in {folder / 'out.unfinished'}, for the same command with another b" in ended.stderr
    )
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "out.unfinished", "text.txt"]


def test_no_model_no_text_and_something_in_the_way(folder):
    fails(call(folder, "--budget", "params=0.5", data="missing.txt"), "missing.txt")
    (folder / "out").mkdir()
    fails(call(folder, "--budget", "params=0.5"), "already exists; nothing is overwritten")
    fails(call(folder, "--budget", "params=0.5", out="nowhere/out"), "no such directory; create it first")
