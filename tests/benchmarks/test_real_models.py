"""The benchmark of real models at once, on a tiny Llama and a tiny BERT: its rivals are what their papers say.

Law: a rival takes as many units as it is told and nothing else; where nothing leaves, or what leaves is a copy, what
the papers promise holds to rounding.
"""

import copy
import json
from pathlib import Path

import pytest
import torch

from benchmarks.shrinking import branches, graphs, packages, real, rivals, run
from benchmarks.shrinking.real import DENSE, HALF, UNITS, Case
from benchmarks.shrinking.rivals import Keep, all_groups
from benchmarks.shrinking.sizes import count_of, multiply_adds
from benchmarks.shrinking.tuned import tuned
from benchmarks.support import corpora
from benchmarks.support.language_models import SmolLM2

METHODS = {"magnitude": rivals.magnitude, "wanda": rivals.wanda, "flap": rivals.flap, "fasp": rivals.fasp}


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config).eval()


@pytest.fixture
def batches():
    return [{"input_ids": torch.randint(64, (2, 16))} for _ in range(3)]


def logits(model, batches):
    with torch.no_grad():
        return torch.cat([model(**batch)[0] for batch in batches])


@pytest.mark.parametrize("method", METHODS)
def test_as_many_units_leave_as_told(method, llama, batches):
    before = count_of(llama)
    unit = sum(group.weights for group in all_groups(llama) if group.kind == "units")
    METHODS[method](llama, batches, Keep(units=30, heads=3))
    assert [group.count for group in all_groups(llama)] == [3, 30, 3, 30]
    biases = 2 * (2 * 30 + 24) if method == "flap" else 0
    assert count_of(llama) == before - 10 * unit + biases
    assert logits(llama, batches).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_heads_leave_with_their_queries(method, bert, batches):
    real_tokens = torch.ones(2, 16, dtype=torch.long)
    real_tokens[1, 10:] = 0
    padded = [{**batch, "attention_mask": real_tokens} for batch in batches]
    METHODS[method](bert, padded, Keep(units=20, heads=3))
    attention = bert.encoder.layer[0].attention
    assert attention.self.query.weight.shape == attention.self.value.weight.shape == (12, 24)
    assert attention.output.dense.weight.shape == (24, 12)
    assert logits(bert, padded).isfinite().all()


@pytest.mark.parametrize("method", [*METHODS, "flap_adaptive"])
def test_where_nothing_leaves_nothing_changes(method, llama, batches):
    before = logits(llama, batches)
    getattr(rivals, method)(llama, batches, Keep(units=40, heads=3))
    assert torch.equal(logits(llama, batches), before)


@pytest.mark.parametrize("method", METHODS)
def test_what_leaves_is_what_does_nothing(method, llama, batches):
    """Units whose column is zero, and rows nearly so, are the ones that go, wherever they are."""
    for block in llama.model.layers:
        for each in (block.mlp.gate_proj, block.mlp.up_proj):
            each.weight.data[7:17] *= 1e-3
        block.mlp.down_proj.weight.data[:, 7:17] = 0
    before = logits(llama, batches)
    METHODS[method](llama, batches, Keep(units=30, heads=3))
    within = 0.05 if method == "fasp" else 1e-4  # its damping draws what stays towards zero
    assert (logits(llama, batches) - before).norm() <= within * before.norm()


def test_least_squares_make_up_for_a_copy(llama, batches):
    """FASP: what leaves is a unit whose rows another has, too, and the other takes over."""
    for block in llama.model.layers:
        block.mlp.down_proj.weight.data[:, 20:] *= 0.1  # these are the least
        for each in (block.mlp.gate_proj, block.mlp.up_proj):
            each.weight.data[20:] = each.weight.data[:20]
    dense, batches = logits(llama, batches), [*batches, *batches]
    fasp, wanda = copy.deepcopy(llama), llama
    rivals.fasp(fasp, batches, Keep(units=38, heads=3), damping=1e-9)
    rivals.wanda(wanda, batches, Keep(units=38, heads=3))
    errors = [(logits(each, batches[:3]) - dense).norm() / dense.norm() for each in (fasp, wanda)]
    assert errors[0] < 1e-4 < 1e-3 < errors[1]


def test_the_bias_makes_up_for_the_mean(llama, batches):
    """FLAP: the mean of what the last block adds to the stream is what it was, on the calibration."""

    def mean_added(model):
        found = []
        handle = model.model.layers[0].mlp.register_forward_hook(lambda _, given, out: found.append(out))
        logits(model, batches)
        handle.remove()
        return torch.cat(found).mean((0, 1))

    before = mean_added(llama)
    rivals.flap(llama, batches, Keep(units=25, heads=3))
    torch.testing.assert_close(mean_added(llama), before, rtol=1e-4, atol=1e-5)
    assert llama.config.mlp_bias


def test_adaptive_layers_differ_and_the_count_is_met(llama, batches):
    llama.model.layers[0].mlp.down_proj.weight.data[:, :20] *= 10
    before = count_of(llama)
    unit = all_groups(llama)[1].weights
    rivals.flap_adaptive(llama, batches, Keep(units=30, heads=3))
    counts = [group.count for group in all_groups(llama) if group.kind == "units"]
    assert counts[0] != counts[1]
    largest = max(group.weights for group in all_groups(llama))
    biases = sum(each.numel() for name, each in llama.named_parameters() if name.endswith("bias"))
    assert abs(before - count_of(llama) + biases - 20 * unit) <= largest
    assert logits(llama, batches).isfinite().all()


def test_slicing_nothing_turns_the_stream_and_changes_nothing(llama, batches):
    for norm in (module for module in llama.modules() if type(module).__name__ == "LlamaRMSNorm"):
        norm.weight.data.uniform_(0.5, 1.5)
    before = logits(llama, batches)
    whole = rivals.sliced_parameters(llama, 24)
    rivals.slicegpt(llama, batches, 24)
    assert count_of(llama) == whole
    torch.testing.assert_close(logits(llama, batches), before, rtol=1e-3, atol=1e-3)


def test_slicing_holds_as_many_parameters_as_said(llama, batches):
    said = rivals.sliced_parameters(llama, 15)
    rivals.slicegpt(llama, batches, 15)
    assert count_of(llama) == said
    assert logits(llama, batches).isfinite().all()


def test_a_stream_of_few_directions_is_sliced_without_loss(llama, batches):
    """An embedding of four dimensions, and blocks that write into no others."""
    basis = torch.linalg.qr(torch.randn(24, 4)).Q
    onto = basis @ basis.T
    llama.model.embed_tokens.weight.data @= onto
    for block in llama.model.layers:
        for each in (block.self_attn.o_proj, block.mlp.down_proj):
            each.weight.data = onto @ each.weight.data
    before = logits(llama, batches)
    rivals.slicegpt(llama, batches, 6)
    torch.testing.assert_close(logits(llama, batches), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", [UNITS, HALF])
def test_shrink_is_asked_for_the_same_half(level, bert, batches):
    goal = real.goal_of(bert, level)
    before = multiply_adds(bert, batches[0])
    real.RIVALS["shrink"].make(bert, batches, goal)
    if level == UNITS:
        assert {group.count for group in all_groups(bert) if group.kind == "units"} == {goal.keep.units}
        assert all(group.consumer.in_features == 24 for group in all_groups(bert) if group.kind == "heads")
    else:
        assert 0.4 * before < multiply_adds(bert, batches[0]) < 0.6 * before


@pytest.fixture
def directory(llama, tmp_path):
    """The Llama, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tiny")
    llama.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def short(monkeypatch):
    """Texts of a page, rows of 32 tokens."""
    pages = {"first": "He who reads calibrates. " * 30, "second": "She judges. " * 60, "manual": "Of all. " * 90}
    monkeypatch.setattr(corpora, "of_modules", lambda: (pages["first"], pages["second"]))
    monkeypatch.setattr(corpora, "language_reference", lambda: pages["manual"])
    monkeypatch.setattr(SmolLM2, "length", 32)
    return pages


LOADS = {"magnitude": True, "flap": True, "fasp": True, "flap-adaptive": False, "slicegpt": False}


@pytest.mark.parametrize(("rival", "loads"), LOADS.items())
def test_a_row_is_measured_on_what_from_pretrained_loads(rival, loads, directory, short):
    found = real.measure(Case("smollm2", rival, "0.2", 0, 4, 3), directory)
    assert found["loads"] is loads
    assert bool(found["why"]) is not loads
    assert found["perplexity"] > 1
    assert found["of the manual"] > 1


def test_shrink_makes_a_row(directory, short, tmp_path):
    dense = real.measure(Case("smollm2", DENSE, "0", 0, 2, 2), directory)
    found = real.measure(Case("smollm2", "shrink", "0.2", 0, 2, 2), directory, tmp_path / "kept")
    assert found["parameters"] < dense["parameters"]
    assert found["multiply-adds"] < dense["multiply-adds"]
    assert found["loads"]
    assert SmolLM2.load(tmp_path / "kept").num_parameters() == found["parameters"]


def test_each_is_tuned_on_the_same_tokens(directory, short, capsys):
    tuned(directory, [directory, directory], steps=2, rate=1e-3, judged=3, seed=0)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {directory.name}")]
    one, other = ([cell.strip() for cell in row.split("|")[2:-2]] for row in rows)  # but for the seconds
    assert one == other
    _, *perplexities = one
    assert perplexities[0] != perplexities[1]


def test_calibration_differs_with_the_seed_and_is_not_judged(directory, short):
    subject = SmolLM2(directory, judged=3)
    seeds = [torch.cat([batch["input_ids"] for batch in subject.batches(seed, 5)]) for seed in (0, 0, 1)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])
    assert [rows.shape for rows in subject.held_out] == [(3, 32), (1, 32)]


# ---- times, and the digits' networks --------------------------------------------------------------------------------


def test_depth_of_a_real_model(monkeypatch, capsys, tmp_path, llama):
    """What leaves is told to the rows, and what is in the file is not measured again."""

    class Tiny:
        columns = ("perplexity", "of the manual")

        def __init__(self):
            self.model = copy.deepcopy(llama)

        def batches(self, seed, samples):
            generator = torch.Generator().manual_seed(seed)
            return [{"input_ids": torch.randint(64, (1, 16), generator=generator)} for _ in range(min(samples, 4))]

        def measure(self, model):
            return float(count_of(model)), 0.5

    monkeypatch.setattr(branches, "_subject", lambda *_: Tiny())
    monkeypatch.setattr(branches, "COUNTS", {"smollm2": {"branches": (1, 2), "blocks": (1,)}})

    def here(key, _file, _topic, _child, told, **_):
        told = json.loads(told)
        folder, counts = Path(told["directory"]), told.get("counts")
        found = branches.measured(told) if "names" in told else branches.chosen(told["model"], folder, counts)
        return json.loads(json.dumps(found))

    monkeypatch.setattr(branches, "in_a_process", here)
    cache = tmp_path / "rows"
    branches.branches({"smollm2": tmp_path}, 8, cache)
    said = capsys.readouterr().out
    assert said.count("by the outputs, patched") == 3
    assert len(cache.read_text().splitlines()) == 2 + 9
    monkeypatch.setattr(branches, "in_a_process", None)
    branches.branches({"smollm2": tmp_path}, 8, cache)
    table = said[said.index("| leaves") : said.index("chosen in")]
    assert table in capsys.readouterr().out


# ---- packages -------------------------------------------------------------------------------------------------------


def test_a_loss_of_sentences_alone(bert, batches):
    """Sentences that are far from each other are found; the model is in evaluation mode again, and has gradients."""
    batch = {**batches[0], "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    loss = packages.contrast(bert, batch)
    loss.backward()
    assert loss > 0
    assert not bert.training
    assert bert.encoder.layer[0].attention.self.query.weight.grad.norm() > 0


@pytest.mark.parametrize("method", [packages.group_norm, packages.taylor])
def test_torch_pruning_takes_heads_and_units(method, bert, batches):
    pytest.importorskip("torch_pruning")
    padded = [{**batch, "attention_mask": torch.ones(2, 16, dtype=torch.long)} for batch in batches]
    method(bert, padded, Keep(units=20, heads=3))
    attention = bert.encoder.layer[0].attention
    assert attention.self.query.weight.shape == attention.self.value.weight.shape == (12, 24)
    assert bert.encoder.layer[1].intermediate.dense.weight.shape == (20, 24)
    assert logits(bert, padded).isfinite().all()


@pytest.fixture
def attention():
    """Into heads and back as torch exports it: a product, an addition, and a shape put together from the input's."""
    onnx = pytest.importorskip("onnx")
    node, weight, bias = onnx.helper.make_node, torch.randn(8, 8), torch.randn(8)
    nodes = [
        node("Identity", ["x"], ["stream"]),
        node("Shape", ["x"], ["whole"]),
        node("Slice", ["whole", "first", "third"], ["outer"]),
        node("Concat", ["outer", "two", "four"], ["into"], axis=0),
        node("Concat", ["outer", "eight"], ["back"], axis=0),
        node("MatMul", ["stream", "weight"], ["product"]),
        node("Add", ["product", "bias"], ["query"]),
        node("Reshape", ["query", "into"], ["heads"], allowzero=1),
        node("Reshape", ["heads", "back"], ["y"], allowzero=1),
    ]
    numbers = {"first": [0], "third": [2], "two": [2], "four": [4], "eight": [8]}
    held = {name: torch.tensor(value).numpy() for name, value in numbers.items()}
    held |= {"weight": weight.numpy(), "bias": bias.numpy()}
    info, kind = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = onnx.helper.make_graph(
        nodes, "attention", [info("x", kind, ["b", "n", 8])], [info("y", kind, ["b", "n", 8])], constants
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])


def test_onnxsim_is_given_the_same_network(attention):
    """With constant shapes and biases as rows it computes what it did, and holds no more than it needs."""
    from types import SimpleNamespace

    from onnx.reference import ReferenceEvaluator

    x = torch.randn(3, 5, 8).numpy()
    expected = ReferenceEvaluator(attention).run(None, {"x": x})[0]
    graphs.with_constant_shapes(attention, SimpleNamespace(hidden_size=8, num_attention_heads=2))
    graphs.with_biases_as_rows(attention)
    found = ReferenceEvaluator(attention).run(None, {"x": x})[0]
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))
    shapes = [node.input[1] for node in attention.graph.node if node.op_type == "Reshape"]
    assert set(shapes) <= {each.name for each in attention.graph.initializer}
    assert graphs.parameters(attention) == 8 * 8 + 8 + 2  # the row, a zero and a one


def test_onnxsim_that_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps onnxsim==0\.8\.1"):
        run.main(["onnxsim", "--minilm", str(tmp_path)])
