"""Verification: what `sparsify` writes holds, and every way to tamper with it is found."""

import json
import math
import re
import shutil
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from secateur import patterns, sparsify
from secateur.allocation import uniform
from secateur.checkpoints import RECORD, CheckpointError, open_checkpoint, verify_checkpoint
from secateur.checkpoints import verify as verification
from secateur.support import percent

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FIRST = "model-00001-of-00002.safetensors"


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    made = {
        "h.0.attn.c_attn.weight": torch.randn(16, 48),  # of GPT-2: (inputs, outputs)
        "h.0.mlp.up.weight": torch.randn(24, 16),
        "h.0.mlp.experts.gate_up_proj": torch.randn(3, 8, 16),
        "wte.weight": torch.randn(40, 16),
        "ln.bias": torch.randn(16),
    }
    made["h.0.mlp.up.weight"][3, 5] = -0.0
    made["h.0.mlp.up.weight"][4] = 0.0
    return {name: tensor.to(dtype) for name, tensor in made.items()} | {"position": torch.arange(40)}


@pytest.fixture
def dense(tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    write(folder, tensors())
    (folder / "config.json").write_text('{"model_type": "gpt2", "hidden_size": 16}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocabulary.txt").write_text("a b c")
    return folder


def write(folder, values):
    shards = {FIRST: [*values][::2], "model-00002-of-00002.safetensors": [*values][1::2]}
    for shard, names in shards.items():
        save_file({name: values[name] for name in names}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pruned(dense, word="2:4", sparsity=None, **options):
    out = dense.parent / "out"
    sparsify(dense, sparsity, out=out, pattern=patterns.parse(word), **options)
    return out


def edit(folder, name, change):
    """Change a tensor in place, in its file."""
    entry = open_checkpoint(folder).entries[name]
    values = load_file(entry.path)
    change(values[name])
    save_file(values, entry.path, metadata={"format": "pt"})


def edit_record(folder, change):
    record = json.loads((folder / RECORD).read_text())
    change(record)
    (folder / RECORD).write_text(json.dumps(record))


def as_claimed(folder, **also):
    """Make the record say what is there, so that only other claims are wrong."""
    checkpoint = open_checkpoint(folder)

    def recount(record):
        zeros = {name: int((checkpoint[name] == 0).sum()) for name in checkpoint}
        sizes = {name: checkpoint.entries[name].numel for name in checkpoint}
        record["pruned"] = {name: zeros[name] / sizes[name] for name in record["pruned"]}
        for group, names in (("targets", record["pruned"]), ("model", zeros)):
            record["sparsity"][group] = sum(zeros[name] for name in names) / sum(sizes[name] for name in names)
        record.update(also)

    edit_record(folder, recount)


# ---- what holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["unstructured", "rows", "2:4", "1:8", "4x4", "3x5", "16x1", "columns:3", "channels", "channels:1"]
)
@pytest.mark.parametrize("allocate", [None, uniform])
def test_what_sparsify_writes_holds(dense, word, allocate, monkeypatch):
    monkeypatch.setattr(verification, "PIECE", 64)
    sparsity = None if ":" in word and word[0].isdigit() else 0.4
    out = pruned(dense, word, sparsity, **({} if allocate is None else {"allocate": allocate}))
    found = verify_checkpoint(out, dense)
    assert found.problems == ()
    assert found.unchecked == ()
    assert found.ok
    assert found.files == 3
    of = {tensor.name: tensor for tensor in found.tensors}
    assert of.keys() == tensors().keys()
    for name in ("h.0.attn.c_attn.weight", "h.0.mlp.up.weight", "h.0.mlp.experts.gate_up_proj"):
        assert of[name].claimed == of[name].zeros == int((open_checkpoint(out)[name] == 0).sum())
        assert of[name].pattern is True
        assert of[name].unchanged is True
    assert (of["wte.weight"].claimed, of["wte.weight"].pattern, of["wte.weight"].unchanged) == (None, None, True)
    without = verify_checkpoint(out)
    assert without.ok
    assert without.unchecked == ("no source was given: whether all else is unchanged",)
    assert {tensor.unchanged for tensor in without.tensors} == {None}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dense, dtype):
    write(dense, tensors(dtype))
    assert verify_checkpoint(pruned(dense, "unstructured", 0.5), dense).problems == ()


def test_the_result_as_json(dense):
    found = verify_checkpoint(pruned(dense), dense)
    read = json.loads(json.dumps(found.json()))
    assert read["ok"] is True
    assert read["target_sparsity"] == pytest.approx(found.target_sparsity)
    assert read["pattern"] == "2:4"
    assert [tensor["name"] for tensor in read["tensors"]] == [*open_checkpoint(dense)]


def test_the_result_prints_as_a_table(dense):
    found = verify_checkpoint(pruned(dense), dense)
    total = len(found.tensors)
    count = sum(tensor.claimed is not None for tensor in found.tensors)
    assert str(found).splitlines()[:3] == [
        "            Tensors  Zeros",
        f"pruned      {count:7}  {percent(found.target_sparsity)}",
        f"left alone  {total - count:7}",
    ]
    assert "what secateur.json claims holds, pattern 2:4, " in str(found)
    alone = verify_checkpoint(found.path)
    assert str(alone).startswith("unchecked: no source was given")
    keys = [[*each.json()["tensors"][0]] for each in (found, alone)]
    assert [key for key in keys[0] if key not in keys[1]] == ["unchanged"]  # no empty columns


def test_a_pruned_checkpoint_pruned_again(dense):
    out = pruned(dense)
    again = out.parent / "again"
    sparsify(out, 0.75, out=again, include=["*up*"])
    found = verify_checkpoint(again, out)
    assert found.problems == ()


def test_weights_that_a_solver_changed_are_no_problem(dense):
    out = pruned(dense)
    edit(out, "h.0.mlp.up.weight", lambda weight: weight.mul_(1.5))
    as_claimed(out, method="oneshot")
    assert verify_checkpoint(out, dense).problems == ()
    as_claimed(out, kept_weights="unchanged")
    assert "kept values are not the source's" in verify_checkpoint(out, dense).problems[0]
    as_claimed(out, kept_weights="updated", method="sparsify")
    assert verify_checkpoint(out, dense).problems == ()
    edit(out, "wte.weight", lambda weight: weight.mul_(1.5))
    assert verify_checkpoint(out, dense).problems == ("wte.weight: its bytes are not the source's.",)


# ---- what does not --------------------------------------------------------------------------------------------------


UP = "h.0.mlp.up.weight"


def edited(name, change):
    return lambda out: edit(out, name, change)


def told(field, **values):
    """The record says something else, or something more."""
    return lambda out: edit_record(out, lambda record: record[field].update(values))


def held(change):
    """The files hold other tensors."""
    return lambda out: write(out, change(load(out)))


_fill = edited(UP, lambda weight: weight[0].fill_(1.0))
_swap = edited(UP, lambda weight: weight[0].copy_(torch.tensor([0.0] * 8 + [1.0] * 8)))  # as many zeros, elsewhere


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (_fill, rf"{UP}: \d+ of 384 values are zero; secateur.json claims \d+"),
        (_fill, f"{UP}: 4 of 96 groups keeps more than 2 of 4"),
        (_swap, f"{UP}: 2 of 96 groups keeps more than 2 of 4"),
        (_swap, f"{UP}: 8 kept values are not the source's"),
        (edited("h.0.attn.c_attn.weight", lambda each: each[:4, 7].fill_(2.0)), "c_attn.weight: 1 of 192 groups keeps"),
        (
            edited("h.0.mlp.experts.gate_up_proj", lambda each: each[2, 1, 8:12].fill_(2.0)),
            "proj: 1 of 96 groups keeps",
        ),
        (edited(UP, lambda weight: weight.mul_(1 + 1e-6)), rf"{UP}: \d+ kept values are not the source's"),
        (edited(UP, lambda each: each.copy_(each.where(each != 0, -0.0))), rf"{UP}: \d+ kept values are not the"),
        (edited("ln.bias", lambda bias: bias[3].fill_(9.0)), "ln.bias: its bytes are not the source's"),
        (edited("position", lambda each: each[3].fill_(9)), "position: its bytes are not"),
        (
            lambda out: edit_record(out, lambda record: record["pruned"].pop(UP)),
            f"{UP}: in the checkpoint, but not in secateur.json",
        ),
        (told("pruned", x=0.5), "x: .* calls it pruned; it is"),
        (told("left_alone", why=["x"]), "x: secateur.json calls it left alone; it is not in the checkpoint"),
        (told("left_alone", why=[UP]), f"{UP}: secateur.json calls it both pruned and left alone"),
        (told("removed", x=3), "x: secateur.json says how much of it is removed, but not that it is pruned"),
        (told("removed", **{UP: 383}), rf"{UP}: secateur.json says that 383 are removed; only \d+ are zero"),
        (told("removed", **{UP: 100}), rf"{UP}: \d+ values differ from the source's; only 100 are removed"),
        (told("sparsity", model=0.9), "claims a sparsity of 0.9 of the model; it is 0."),
        (told("sparsity", targets=0.9), "claims a sparsity of 0.9 of the targets; it is 0.5"),
        (lambda out: (out / "config.json").write_text('{"model_type": "gpt2"}'), "config.json: its bytes are not"),
        (lambda out: (out / "tokenizer/vocabulary.txt").unlink(), "vocabulary.txt: in the source, but not here"),
        (lambda out: (out / "new.txt").write_text("x"), "new.txt: not in the source"),
        (lambda out: save_file(load_file(out / FIRST), out / FIRST, {"format": "tf"}), "its __metadata__ is not the"),
        (held(lambda its: its | {"more": torch.ones(1)}), "more: not in the source"),
        (held(lambda its: without(its, "ln.bias")), "ln.bias: in the source, but not here"),
        (held(lambda its: without(its, "ln.bias")), "ln.bias: secateur.json calls it left alone; it is not"),
        (held(lambda its: its | {"ln.bias": torch.ones(15)}), r"ln.bias: F32 of shape \(15,\); of the source stay F32"),
        (
            held(lambda its: dict(reversed(its.items()))),
            "ln.bias: in model-00002-of-00002.safetensors, in the source in",
        ),
    ],
)
def test_tampering_is_found(dense, tamper, problem):
    out = pruned(dense)
    tamper(out)
    found = verify_checkpoint(out, dense)
    assert not found.ok
    assert any(re.search(problem, each) for each in found.problems), found.problems


def load(folder):
    return {
        name: values[name]
        for file in sorted(folder.glob("*.safetensors"))
        for values in [load_file(file)]
        for name in values
    }


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("word", "change", "problem"),
    [
        (
            "4x4",
            lambda weight: weight[weight == 0].sum() + weight[0].fill_(1.0).sum(),
            "whole blocks of zeros have only",
        ),
        ("channels", lambda weight: weight[:, 0].fill_(1.0), "whole channels of zeros have only"),
        ("rows", lambda weight: weight[0].fill_(1.0), "1 of 24 rows have fewer than 8 zeros"),
    ],
)
def test_zeros_elsewhere_than_a_pattern_wants_them(dense, word, change, problem):
    out = pruned(dense, word, 0.5, allocate=uniform)
    edit(out, "h.0.mlp.up.weight", change)
    as_claimed(out)
    assert any(f"h.0.mlp.up.weight: {problem}" in each or problem in each for each in verify_checkpoint(out).problems)


def test_what_cannot_be_checked_is_said(dense):
    out = pruned(dense, "4x4", 0.5)
    edit_record(out, lambda record: (record.pop("removed"), record.pop("left_alone")))
    found = verify_checkpoint(out, dense)
    assert found.ok
    assert found.unchecked == (
        "secateur.json does not say what was left alone: whether it names all tensors",
        "secateur.json does not say how many entries of some tensors are removed: their pattern",
    )
    edit_record(out, lambda record: record.update(pattern="Diagonals(width=3)"))
    assert "the pattern Diagonals(width=3), which is not one of the library's" in verify_checkpoint(out).unchecked


# ---- hostile files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"pruned": 3}', "pruned must be an object, not 3"),
        ('{"pruned": {"a": NaN}}', r"pruned\.a must be a number of at least 0 and at most 1, not NaN"),
        ('{"pruned": {"a": true}}', r"pruned\.a must be a number of at least 0 and at most 1, not true"),
        ('{"pruned": {"a": 1e999}}', r"pruned\.a must be a number of at least 0 and at most 1, not Infinity"),
        ('{"pruned": {}, "removed": {"a": -1}}', r"removed\.a must be a whole number of at least 0, not -1"),
        ('{"pruned": {}, "removed": [1]}', "removed must be an object, not a list"),
        ('{"pruned": {}, "left_alone": [1]}', "left_alone must be an object, not a list"),
        ('{"pruned": {}, "left_alone": {"why": [1]}}', r"left_alone\.why\[0\] must be a string, not 1"),
        ('{"pruned": {}, "sparsity": 3}', "sparsity must be an object, not 3"),
        ('{"pruned": {}, "sparsity": {"model": 3}}', r"sparsity\.model must be a number .* at most 1, not 3"),
        ('{"pruned": {}, "pattern": 3}', "pattern must be a string, not 3"),
        ('{"pruned": {}, "kept_weights": []}', "kept_weights must be a string, not a list"),
        ('{"pruned": {}, "kept_weights": "all"}', 'kept_weights must be "unchanged" or "updated"'),
        ('{"pruned": {}, "method": 3}', "method must be a string, not 3"),
    ],
)
def test_a_record_that_cannot_be_read(dense, text, message):
    out = pruned(dense)
    (out / RECORD).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_checkpoint(out)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{out / RECORD}: damaged: ")


def test_no_record_no_directory_and_a_damaged_shard(dense, tmp_path):
    with pytest.raises(CheckpointError, match=r"no secateur\.json here, so that nothing is claimed"):
        verify_checkpoint(dense)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        verify_checkpoint(tmp_path / "nowhere")
    out = pruned(dense)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        verify_checkpoint(out, tmp_path / "nowhere")
    whole = (out / FIRST).read_bytes()
    (out / FIRST).write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        verify_checkpoint(out)


names = st.sampled_from(["a.weight", "b", "scalar", "empty", "opaque", "\x1b[2J", "x" * 300])
shares = st.one_of(st.floats(0, 1), st.integers(0, 1))
records = st.fixed_dictionaries(
    {"pruned": st.dictionaries(names, shares)},
    optional={
        "method": st.sampled_from(["sparsify", "oneshot", ""]),
        "pattern": st.one_of(
            st.none(),
            st.sampled_from(
                [
                    *(
                        "rows", "2:4", "1:1", "0:1000000007", "4x4", "999999999x999999999", "channels:1",
                        "channels:-9", "",
                    ),
                    *("NM(n=2, m=4, axis=0)", "NM(n=1, m=2, axis=-1)", "NM(n=2, m=4, axis=7)", "NM(n=x)", "NM(1, 2)"),
                    *(
                        "Block(height=0, width=1, reduce=None)", "Block(height=3, width=2, reduce=None)", "Rows()",
                        "Rows((",
                    ),
                ]
            ),
            st.text(max_size=120),
        ),
        "removed": st.dictionaries(names, st.integers(0, 10**30)),
        "left_alone": st.dictionaries(st.text(max_size=3), st.lists(names)),
        "sparsity": st.dictionaries(st.sampled_from(["targets", "model", "x"]), st.one_of(st.none(), shares)),
    },
)  # fmt: skip


@given(records)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_record_makes_it_crash(tmp_path, record):
    folder = tmp_path / "odd"
    if not folder.exists():
        folder.mkdir()
        header = {
            "a.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
            "b": {"dtype": "I64", "shape": [3], "data_offsets": [96, 120]},
            "scalar": {"dtype": "BF16", "shape": [], "data_offsets": [120, 122]},
            "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [122, 122]},
            "opaque": {"dtype": "F4", "shape": [2, 2], "data_offsets": [122, 124]},
        }
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(124))
        shutil.copytree(folder, tmp_path / "source")
    (folder / RECORD).write_text(json.dumps(record))
    found = verify_checkpoint(folder, tmp_path / "source")
    assert all(problem.isprintable() for problem in found.problems)
    json.dumps(found.json())
    for name, share in record["pruned"].items():
        if name in ("a.weight", "b", "scalar") and round(
            share * math.prod(open_checkpoint(folder).entries[name].shape)
        ) != (math.prod(open_checkpoint(folder).entries[name].shape)):
            assert not found.ok
