"""``secateur deploy``: from a directory, a text and a budget to what a runtime loads; or one line for what is wrong."""

import importlib
import json

import numpy as np
import onnxruntime
import pytest
import torch

from secateur.runtimes import OnnxRuntime
from support.commands import fails, run
from support.families import make
from support.stacks import contents


def call(folder, *words, out="out"):
    return run(
        "deploy", folder / "dense", "--data", folder / "text.txt", "--out", folder / out, "--samples", 4,
        "--sequence-length", 16, "--finals", 1, "--share", 0.5, *words,
    )  # fmt: skip


@pytest.mark.long
def test_a_folder_that_the_runtime_loads_and_a_page(folder):
    before, threads = contents(folder / "dense"), torch.get_num_threads()
    ended = call(folder, "--budget", "latency=1000", "--threads", 2, "--report", folder / "page.html")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("Delivered: the dense model, float32: it meets the budget, and nothing had to be")
    assert OnnxRuntime().load(folder / "out").inputs == ("input_ids", "attention_mask")
    record = json.loads((folder / "out" / "secateur.json").read_text())
    assert record["arguments"]["command"].startswith("secateur deploy ")
    assert (record["threads"], torch.get_num_threads()) == (2, threads)
    page = (folder / "page.html").read_text()
    for said in ("What was measured", "The share left against milliseconds", "delivered: dense, float32"):
        assert said in page, said
    assert "Time was not measured" not in page
    assert contents(folder / "dense") == before
    assert {"tokenizer.json", "model.onnx"} <= {path.name for path in (folder / "out").iterdir()}
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "out", "page.html", "text.txt"]


@pytest.mark.long
def test_what_is_pruned_and_trained_is_within_the_budget(folder):
    """Below what dense int8 takes of a BERT, and its page may lie in the folder that is written."""
    make("bert", num_hidden_layers=1, intermediate_size=2048).save_pretrained(folder / "dense")
    before = contents(folder / "dense")
    ended = call(folder, "--budget", "bytes=0.48", "--steps", 2, "--report", folder / "out" / "page.html")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[-1].startswith("In ")
    record = json.loads((folder / "out" / "secateur.json").read_text())
    graph, its = folder / "out" / "model.onnx", record["delivered"]
    assert graph.stat().st_size == its["bytes"] <= record["budget"]["bytes"]
    assert (its["form"], 0.2 < its["left"] < 0.9) == ("int8", True)
    assert its["bytes"] < min(each["bytes"] for each in record["candidates"] if each["made"] == "dense")
    assert "--steps 2" in record["arguments"]["command"]
    session = onnxruntime.InferenceSession(graph)
    with np.load(folder / "out" / "check.npz") as known:
        (found,) = session.run(None, {each.name: known[f"inputs/{each.name}"] for each in session.get_inputs()})
        np.testing.assert_allclose(found.reshape(-1)[:1000], known["outputs/logits"], rtol=1e-4, atol=1e-4)
    assert "pruned to " in (folder / "out" / "page.html").read_text()
    assert contents(folder / "dense") == before


@pytest.mark.long
def test_what_a_function_makes_and_batches_of_a_module(zoo, tmp_path):
    ended = run("deploy", f"{zoo}:build", "--data", f"{zoo}:batches", "--samples", 8, "--budget", "latency=1000",
                "--out", "out", "--report", "page.html")  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert "losses on 1 of 4 batches" in ended.stdout
    served, module = OnnxRuntime().load(tmp_path / "out"), importlib.import_module(zoo)
    (found,) = served.run({served.inputs[0]: module.tokens.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module.build()(module.tokens), atol=1e-4, rtol=1e-4)
    assert f"deploy {zoo}:build" in (tmp_path / "page.html").read_text()


@pytest.mark.long
def test_json_has_every_candidate(folder):
    ended = call(folder, "--budget", "latency=1000", "--json")
    found = json.loads(ended.stdout)
    assert [each["name"] for each in found["candidates"]] == ["dense, float32", "dense, int8"]
    assert found["candidates"][0]["note"] == "delivered"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "params=0.5"), "the budget of deploy is a latency"),
        (("--budget", "latency"), "--budget is NAME=NUMBER, such as latency=0.6, not 'latency'"),
        (("--budget", "latency=0.5", "--runtime", "torch"), "deploy writes what a runtime loads"),
        (("--budget", "latency=0.5", "--score", "f1"), "score must be one of 'kl', 'cosine', 'change'"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, words, message):
    fails(call(folder, *words), message)
    assert sorted(path.name for path in folder.iterdir()) == ["dense", "text.txt"]


def test_something_in_the_way(folder):
    (folder / "out").mkdir()
    fails(call(folder, "--budget", "latency=0.5"), "already exists; nothing is overwritten")
