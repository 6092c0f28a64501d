"""``--report`` in every command: the page says what stdout says, and what can't be written is told before the work."""

import re
import shlex

import pytest
from safetensors.torch import load_file, save_file

from support.commands import fails, run
from support.reports import Page

LONG = {
    "inspect", "prune", "shrink", "oneshot", "verify", "compress", "expand", "pack", "bench", "vocabulary",
    "sensitivity", "fit", "recover", "deploy",
}  # fmt: skip


def text_of(path):
    return " ".join(Page(path.read_text(encoding="utf-8")).text.split())


def words_of(stdout):
    """What is on stdout but for seconds, which are another command's."""
    return [word for word in re.sub(r"[\d.,]+ s\b", "", stdout).split() if len(word) > 3 and word != "secateur.json"]


@pytest.fixture
def pruned(model, tmp_path):
    assert run("prune", model, "--out", tmp_path / "sparse", "-s", "0.5").exit_code == 0
    return tmp_path / "sparse"


def test_the_page_says_what_stdout_says_and_more(model, pruned, tmp_path):
    out, page = tmp_path / "out", tmp_path / "a page.html"
    assert run("compress", pruned, "--out", tmp_path / "small").exit_code == 0
    for command in (
        ("inspect", pruned),
        ("prune", model, "--out", out, "-s", "0.75", "--criterion", "lamp"),
        ("verify", pruned, "--source", model),
        ("compress", pruned, "--out", tmp_path / "small2", "--zstd"),
        ("expand", tmp_path / "small", "--out", tmp_path / "again"),
    ):
        result = run(*command, "--report", page)
        assert result.exit_code == 0, (command, result.output)
        assert result.stderr == f"The report is in {page}.\n"
        text = text_of(page)
        said = result.stdout if command[0] != "inspect" else result.stdout.partition("\n\n")[2]
        assert [word for word in words_of(said) if word not in text] == [], command
        assert shlex.join(["secateur", *map(str, command[:2])]) in text
        assert f"--report '{page}'" in text
        assert "model.layers.10.mlp.up_proj.weight" in text  # every tensor, not only those that are printed
        page.unlink()


def test_json_stays_json(pruned, tmp_path):
    import json

    for command in ("inspect", "verify"):
        result = run(command, pruned, "--json", "--report", tmp_path / "page.html")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == json.loads(run(command, pruned, "--json").stdout)
        assert "Tensor by tensor" in text_of(tmp_path / "page.html")


def test_what_does_not_hold_is_on_the_page_too(pruned, tmp_path):
    tensors = load_file(pruned / "model.safetensors")
    name = next(name for name in tensors if "mlp" in name)
    tensors[name].fill_(1.0)
    save_file(tensors, pruned / "model.safetensors", metadata={"format": "pt"})
    result = run("verify", pruned, "--report", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "does not hold" in text_of(tmp_path / "page.html")


@pytest.mark.long
def test_it_is_refused_before_the_work_starts(model, tmp_path):
    out = tmp_path / "out"
    for page, message in (
        (tmp_path / "missing" / "page.html", "there is no folder"),
        (tmp_path / "page.txt", "a report is one HTML page; name it so"),
        (model / "config.json", "a report is one HTML page"),
        (out / "page.html", "there is no folder"),  # in what the command itself is to write
    ):
        fails(run("prune", model, "--out", out, "-s", "0.5", "--report", page), message)
        assert not out.exists()
    assert (model / "config.json").read_text() == "{}"


@pytest.mark.parametrize("command", sorted(LONG))
def test_every_command_refuses_it_first(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = {"oneshot": ("--data", "d.txt", "--out", "o"), "shrink": ("-s", "0.5", "--dry-run")}
    needed |= dict.fromkeys(("prune", "compress", "expand"), ("--out", "o"))
    needed |= {"sensitivity": ("--data", "d.txt"), "fit": ("--budget", "params=0.8", "--data", "d.txt", "--out", "o")}
    needed["deploy"] = ("--budget", "latency=0.8", "--data", "d.txt", "--out", "o")
    needed["recover"] = ("--teacher", "t", "--data", "d.txt", "--out", "o")
    result = run(command, "nothing", *needed.get(command, ()), "--report", "page.txt")
    fails(result, "page.txt: a report is one HTML page")  # before it is seen that there is nothing to read


def test_work_that_fails_writes_no_page(model, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    fails(run("prune", model, "--out", tmp_path / "out", "-s", "2", "--report", page), "sparsity")
    assert page.read_text() == "old"


def test_shrink_has_a_page(zoo, tmp_path):
    page = tmp_path / "page.html"
    command = ("shrink", f"{zoo}:build", "--example", f"{zoo}:tokens", "-s", "0.5", "--dry-run")
    result = run(*command, "--criterion", "lamp", "--report", page)
    assert result.exit_code == 0, result.output
    text = text_of(page)
    lines = result.stdout[result.stdout.index("Asked: ") :]  # the tables have groups of layers together
    assert [word for word in words_of(lines) if word not in text] == []
    for said in ("criterion lamp", "Group by group", "What stays whole", "Nothing was written ("):
        assert said in text, said
    assert re.search(r"Measured: the example took [\d.]+ ms and takes [\d.]+ ms \(medians of \d+ rounds", text)
    assert "Before and after, measured" in text
    assert "Measured:" not in result.stdout  # time that only a page is worth
