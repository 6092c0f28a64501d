"""The papers' protocols: their perplexity, by hand, and a small Llama through both from beginning to end."""

import json
import math

import pytest
import torch
from torch.nn import functional

from benchmarks.papers import run
from support.vocabularies import TEXT, model_of, wrapped


def test_perplexity_is_of_whole_windows_and_all_tokens_but_their_first():
    model = model_of("tied", 300).eval()
    ids = torch.randint(0, 300, (25,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(input_ids=part[None]).logits[0, :-1], part[1:])
            for part in (ids[:10], ids[10:20])
        ]
    assert run.perplexity(model, ids, 10) == pytest.approx(math.exp(sum(map(float, losses)) / 2))
    with pytest.raises(ValueError, match="25 tokens, less than a window of 26"):
        run.perplexity(model, ids, 26)


def test_lines_are_joined_as_datasets_has_them(tmp_path):
    (tmp_path / "wiki.test.raw").write_bytes(b" \n = A = \n \n one\n")
    assert run.text_of(tmp_path / "wiki.test.raw") == "\n\n = A = \n\n\n\n\n one\n"


def test_what_was_published_stands_beside_its_own_row():
    found = {case.name: case.published for case in run.zeros("llama2-7b")}
    assert (found["dense"], found["2:4, sparsegpt"], found["2:4, admm"]) == ("5.12", "10.17", "")
    assert found["unstructured, wanda"] == "6.42"
    assert {case.published for case in (*run.zeros(None), *run.units([0.2]))} == {""}
    dense, whole, unrepaired = run.units([0.3], "llama2-7b")
    assert (dense.published, whole.published, unrepaired.published) == ("5.47", "SliceGPT 8.12", "")


@pytest.mark.parametrize(("what", "only", "rows"), [("zeros", "2:4, wanda", 1), ("units", "−20%", 2)])
def test_a_small_llama_goes_through(tmp_path, capfd, what, only, rows):
    tokenizer = wrapped("byte level")
    model = model_of("tied", len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT * 20, "utf-8")
    paths = {"--model": "dense", "--data": "text.txt", "--test": "text.txt", "--scratch": "out"}
    given = [text for name, path in paths.items() for text in (name, str(tmp_path / path))]
    more = ["--samples", "8", "--length", "16", "--levels", "0.2", "--only", only, "--device", "cpu"]
    run.main([what, *given, *more])
    first = (tmp_path / f"out/{what}.jsonl").read_text("utf-8")
    found = [json.loads(line) for line in first.splitlines()]
    assert len(found) == rows
    assert all(math.isfinite(each["perplexity"]) for each in found)
    more += ["--published", "llama2-7b"]
    run.main([what, *given, *more])  # what has a row is not done again
    assert (tmp_path / f"out/{what}.jsonl").read_text("utf-8") == first
    out = capfd.readouterr().out
    assert found[0]["name"] in out
    assert ("11.02" if what == "zeros" else "SliceGPT 6.64") in out
