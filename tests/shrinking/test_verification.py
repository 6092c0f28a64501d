"""What a shrunken directory claims is seen again on its bytes: any change of them, or of what it claims, is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from secateur import sparsify
from secateur.checkpoints import CheckpointError, verify_checkpoint
from secateur.models import oneshot
from secateur.search import fit
from secateur.shrinking import shrink
from support.commands import run
from support.damaged import changed, tensor
from support.families import batches, make

UP = "model.layers.0.mlp.up_proj.weight"  # before anything leaves, so that it is not repaired
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make("llama").save_pretrained(folder / "dense")
    (folder / "dense/tokenizer.json").write_text("{}")
    (folder / "dense/pytorch_model.bin").write_bytes(b"stale")
    shrink(folder / "dense", sparsity=0.3, out=folder / "small", batches=batches("llama"), verify=False)
    shrink(folder / "dense", sparsity=0.3, out=folder / "plain", verify=False)
    return folder


def test_biases_that_moved_are_named_and_not_compared(tmp_path):
    make("bert").save_pretrained(tmp_path / "dense")
    shrink(tmp_path / "dense", sparsity=0.2, out=tmp_path / "small", batches=batches("bert"), verify=False)
    found = verify_checkpoint(tmp_path / "small", tmp_path / "dense")
    assert found.ok, found.problems
    biases = json.loads((tmp_path / "small/secateur.json").read_text())["calibration"]["biases"]
    dense, small = load_file(tmp_path / "dense/model.safetensors"), load_file(tmp_path / "small/model.safetensors")
    moved = {name for name in dense if dense[name].dim() == 1 and not torch.equal(dense[name], small[name])}
    assert {name for name in moved if dense[name].shape == small[name].shape} <= {*biases}
    assert biases
    assert {tensor.name for tensor in found.tensors if tensor.unchanged is None} >= {*biases}


def test_what_shrink_wrote_holds(made):
    found = verify_checkpoint(made / "small", made / "dense")
    assert found.ok, found.problems
    assert found.files == len(list((made / "small").iterdir())) - 4  # config, plan, record, weights
    changed = {tensor.name: tensor.unchanged for tensor in found.tensors}
    repaired = {name for name, each in changed.items() if each is None}
    assert (
        {DOWN, DOWN.replace("1", "0")}
        <= repaired
        == {*json.loads((made / "small/secateur.json").read_text())["calibration"]["errors"]}
    )
    assert found.unchecked == (f"{len(repaired)} tensors have new values: whether these are the best",)
    assert {each for name, each in changed.items() if name not in repaired} == {True}
    assert not verify_checkpoint(made / "plain", made / "dense").unchecked
    alone = verify_checkpoint(made / "small")
    assert alone.ok
    assert alone.unchecked[1].startswith("no source was given: whether all else is unchanged")


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("name", [DOWN, UP, "lm_head.weight"])
def test_any_other_byte_is_named_repaired_or_not_with_the_source_or_without(made, tmp_path, name, source):
    folder = shutil.copytree(made / "small", tmp_path / "small")
    tensor(name, lambda each: each * (1 + 2**-20))(folder)
    found = verify_checkpoint(folder, made / "dense" if source else None)
    (problem,) = found.problems
    compared = source and name != DOWN
    assert problem.startswith(f"{name}: ")
    assert ("its bytes are not what stays" if compared else "not those that were written") in problem


def without(*fields, file="secateur.json"):
    def change(folder):
        record = json.loads((folder / file).read_text())
        rest = {key: value for key, value in record.items() if key not in fields}
        (folder / file).write_text(json.dumps(rest))

    return change


def test_a_record_without_digests_says_so(made, tmp_path):
    """As earlier versions wrote them; what is repaired has to hold numbers all the same."""
    folder = shutil.copytree(made / "small", tmp_path / "small")
    without("sha256")(folder)
    tensor(DOWN, lambda each: each * 2)(folder)
    found = verify_checkpoint(folder, made / "dense")
    assert found.ok
    assert verify_checkpoint(folder).unchecked[1].startswith("no source was given: what the tensors hold")
    tensor(DOWN, lambda each: each * torch.nan)(folder)
    assert verify_checkpoint(folder, made / "dense").problems == (
        f"{DOWN}: has new values, and holds NaN or infinity.",
    )


def planned(folder):
    plan = json.loads((folder / "plan.json").read_text())
    kept = plan["plans"][0]["tensors"][UP]["kept"]["0"]
    left = sorted({*range(24)} - {*kept})
    plan["plans"][0]["tensors"][UP]["kept"]["0"] = sorted([*kept[1:], left[0]])
    del plan["fingerprint"]
    (folder / "plan.json").write_text(json.dumps(plan))


def configured(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (tensor(UP, lambda each: each + 1), f"{UP}: its bytes are not what stays"),
        (
            tensor("lm_head.weight", lambda each: each.flip(0)),
            "lm_head.weight: its bytes are not what stays",
        ),
        (tensor(DOWN, lambda each: each[:, 1:]), f"{DOWN}: F32 of shape"),
        (tensor(DOWN, lambda each: each[:, 1:]), "the files hold "),
        (tensor(DOWN, lambda each: each.to(torch.float16)), f"{DOWN}: F16 of shape"),
        (tensor("more", lambda _: torch.zeros(1)), "more: not in the source"),
        (changed("secateur.json", parameters={"from": 1, "to": 1}), "claims 1"),
        (changed("secateur.json", sha256={"fc": "0"}), "fc: was written, secateur.json says; it is not here"),
        (changed("secateur.json", sha256={"fc": "0"}), f"{UP}: secateur.json does not say that it was written"),
        (changed("secateur.json", calibration={"repair": True, "errors": {"fc": 0.0}}), "fc: was written"),
        (
            changed("secateur.json", calibration={"repair": False, "errors": {}}),
            f"{DOWN}: its bytes are not what stays",
        ),
        (configured, "config.json: intermediate_size is 24, not"),
        (configured, "as config.json says it"),
        (planned, f"{UP}: its bytes are not what stays"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ }"), "tokenizer.json: its bytes are not"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: in the source, but not here"),
        (lambda folder: (folder / "more.txt").write_text(""), "more.txt: not in the source"),
    ],
)
def test_what_does_not_hold_is_named(made, tmp_path, change, problem):
    shutil.copytree(made / "small", tmp_path / "small")
    change(tmp_path / "small")
    found = verify_checkpoint(tmp_path / "small", made / "dense")
    assert any(problem in each for each in found.problems), found.problems


# each is valid: a model is made of it, and computes something else
OTHER_FIELDS = [
    {"rms_norm_eps": 1.0}, {"hidden_act": "gelu"}, {"rope_parameters.rope_theta": 5e5}, {"dtype": "x"}, {"new": 1},
]  # fmt: skip


@pytest.mark.parametrize("fields", OTHER_FIELDS, ids=str)
@pytest.mark.parametrize("of", ["plain", "twice", "fitted"])
@pytest.mark.long
def test_a_field_of_the_configuration_that_is_not_recorded_is_the_sources(made, request, tmp_path, of, fields):
    written = made / "plain" if of == "plain" else request.getfixturevalue(of)
    folder = shutil.copytree(written, tmp_path / "out")
    assert verify_checkpoint(folder, made / "dense").ok
    ((place, value),) = fields.items()
    around, _, last = place.rpartition(".")
    inner = json.loads((folder / "config.json").read_text()).get(around, {})
    changed("config.json", **({around: inner | {last: value}} if around else fields))(folder)
    found = verify_checkpoint(folder, made / "dense")
    assert any(f"config.json: {place} is " in each for each in found.problems), found.problems


def test_a_configuration_that_builds_no_model_does_not_hold(made, tmp_path):
    folder = shutil.copytree(made / "plain", tmp_path / "out")
    changed("config.json", hidden_act="none")(folder)
    (problem,) = verify_checkpoint(folder).problems
    assert "config.json: no model can be made of it" in problem
    changed("config.json", hidden_act="silu", architectures=["Own"])(folder)
    found = verify_checkpoint(folder)
    assert found.ok
    assert found.unchecked[0].startswith("no model can be built of config.json here")


def test_a_plan_that_is_none_is_refused(made, tmp_path):
    shutil.copytree(made / "small", tmp_path / "small")
    (tmp_path / "small/plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not the one plan of a shrunken directory"):
        verify_checkpoint(tmp_path / "small")


# ---- zeros in what was shrunk ---------------------------------------------------------------------------------------

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def twice(made):
    """What `fit` does with both verbs: pruned with data what was shrunk with data."""
    given = batches("llama")
    oneshot(made / "small", given, 0.5, out=made / "sparse", include="*mlp.down_proj.weight")
    return made / "sparse"


@pytest.fixture(scope="module")
def fitted(made):
    options = {"budget": {"params": 0.75}, "shares": (0.25, 0.5), "over": ("shrink", "oneshot"), "finals": 1}
    fit(made / "dense", batches("llama", padding=False), out=made / "fitted", **options)
    return made / "fitted"


def test_what_was_shrunk_and_then_pruned_is_verified_by_either_source(made, twice, tmp_path):
    found = verify_checkpoint(twice, made / "dense")
    assert found.ok, found.problems
    assert found.target_sparsity == verify_checkpoint(twice).target_sparsity == 0.5
    each = {tensor.name: tensor for tensor in found.tensors}
    assert each[UP].unchanged
    assert each[EMBEDDING].unchanged
    assert (each[DOWN].unchanged, each[DOWN].claimed) == (None, each[DOWN].zeros)
    assert found.files == len(list(twice.iterdir())) - 4  # config, plan, record, weights
    (unchecked,) = found.unchecked
    assert unchecked.endswith("tensors have new values: whether these are the best")
    for source in ((), ("--source", made / "dense"), ("--source", made / "small")):
        ended = run("verify", twice, *source)
        assert ended.exit_code == 0, ended.output
        assert "sparse: what secateur.json claims holds, pattern unstructured" in ended.stdout


def test_a_mask_of_what_was_shrunk_is_verified_too(made, tmp_path):
    sparsify(made / "plain", 0.5, out=tmp_path / "sparse")
    assert verify_checkpoint(tmp_path / "sparse", made / "dense").ok


def test_neither_source_is_one_line(made, twice):
    ended = run("verify", twice, "--source", made / "plain")
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    assert "was shrunk, and then pruned, and" in ended.stderr
    assert "is neither what was shrunk nor what was pruned" in ended.stderr


def of_the_first(**fields):
    def change(folder):
        record = json.loads((folder / "secateur.json").read_text())
        record["previous"] |= fields
        (folder / "secateur.json").write_text(json.dumps(record))

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (tensor(EMBEDDING, lambda each: each.flip(0)), f"{EMBEDDING}: its bytes are not what stays"),
        (tensor("model.layers.1.self_attn.o_proj.weight", lambda each: each * 2), "its bytes are not those that were"),
        (tensor(DOWN, lambda each: each * 0), f"{DOWN}: 80 of 80 values are zero"),
        (tensor("more", lambda _: torch.zeros(1)), "more: in the checkpoint, but not in secateur.json"),
        (of_the_first(parameters={"from": 1, "to": 1}), "claims 1"),
        (of_the_first(sha256={"fc": "0"}), "fc: was written, secateur.json says; it is not here"),
        (
            of_the_first(calibration={"repair": False, "errors": {}}),
            "o_proj.weight: its bytes are not what stays",
        ),
        (planned, f"{UP}: its bytes are not what stays"),
    ],
)
def test_what_does_not_hold_of_either_record_is_named(made, twice, tmp_path, change, problem):
    shutil.copytree(twice, tmp_path / "sparse")
    change(tmp_path / "sparse")
    found = verify_checkpoint(tmp_path / "sparse", made / "dense")
    assert any(problem in each for each in found.problems), found.problems
