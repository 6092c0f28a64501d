"""Nineteen families of transformers' models, PyTorch's own encoder, adapters: one walk for all, by structure alone."""

import json

import pytest
import torch
from torch import nn

from secateur import Unstructured, criteria
from secateur.checkpoints import open_checkpoint
from secateur.models import oneshot
from secateur.models.blocks import find_blocks
from secateur.models.observation import prepared
from secateur.models.replay import Replay
from secateur.solvers import from_criterion, sparsegpt
from secateur.support import device_of, mapped, run_batch
from support.families import ENCODER_DECODERS, EVERY_FAMILY, Encoder, batches, make

EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
# pruned weights in each block; the block of a decoder with cross attention has more
WEIGHTS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), 7)
WEIGHTS |= dict.fromkeys(("phi3", "gpt2", "gpt_neox", "bloom", "falcon", "mamba"), 4)
WEIGHTS |= {"opt": 6, "bert": 6, "mixtral": 6, "qwen2_moe": 9, "qwen3_moe": 6}


def leaves(tree):
    found = []
    mapped(tree, lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_replaying_all_blocks_is_the_full_forward_pass(family):
    model, data = make(family), batches(family)
    blocks = find_blocks(model)
    with torch.no_grad(), prepared(model):
        expected = {}
        hooks = [
            block.register_forward_hook(lambda _, args, out, name=name: expected.setdefault(name, []).append(out))
            for name, block in blocks.items()
        ]
        outputs = [run_batch(model, batch) for batch in data]
        for hook in hooks:
            hook.remove()
        replay = Replay(model, blocks, data, device=device_of(model))
        order, held = [], set()
        with replay.installed():
            while len(order) < len(blocks):
                order.append(replay.find_next())
                replay.store(order[-1])
                held.add(len(replay.outputs.names()))
                for number in range(len(data)):
                    got, wanted = leaves(replay.outputs.load(order[-1], number)), leaves(expected[order[-1]][number])
                    assert len(got) == len(wanted)
                    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert order == list(expected), "the blocks in the order of the forward pass"
        assert held == ({1, 2} if family in ENCODER_DECODERS else {1}), "one block's outputs, and an encoder's last"
        assert torch.equal(run_batch(model, data[0])[0], outputs[0][0]), "the stand-ins are gone"


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_directory_becomes_what_the_model_in_memory_becomes(family, tmp_path):
    original, data = make(family, dtype=torch.bfloat16), batches(family)
    original.save_pretrained(tmp_path / "dense", max_shard_size="12KB")
    kind = type(original)
    dense = kind.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    model = kind.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    done = oneshot(model, data, 0.5, solver=sparsegpt)
    streamed = oneshot(tmp_path / "dense", data, 0.5, solver=sparsegpt, out=tmp_path / "sparse")
    assert [(layer.name, layer.error) for layer in done.layers] == [(x.name, x.error) for x in streamed.layers]
    found, loading = kind.from_pretrained(tmp_path / "sparse", dtype=torch.bfloat16, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    layers = {layer.name: layer for layer in done.layers}
    before = dense.state_dict()
    for (name, one), other in zip(model.state_dict().items(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
        if name in layers:
            assert one.eq(0).sum() == round(0.5 * one.numel()), name
            assert layers[name].error < 0.2
            assert layers[name].sparsity == 0.5
        else:
            assert torch.equal(one, before[name]), name
    if family in WEIGHTS:
        assert len(layers) == 2 * WEIGHTS[family]
    record = json.loads((tmp_path / "sparse/secateur.json").read_text())
    entries = open_checkpoint(tmp_path / "sparse").entries
    assert record["pruned"].keys() <= entries.keys()
    assert sum(entries[name].numel for name in record["pruned"]) == sum(before[name].numel() for name in layers)


def alone(batch, row):
    """One row of a batch without its padding."""
    cut = {}
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in batch:
            keep = batch[mask][row].bool()
            cut |= {ids: batch[ids][row : row + 1, keep], mask: batch[mask][row : row + 1, keep]}
    return cut


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_padding_does_not_count_and_batching_does_not_matter(family):
    data = batches(family, count=2)
    apart = [alone(batch, row) for batch in data for row in (0, 1)]
    grams, counts = [], []
    for each in (data, apart):
        seen = []

        def look(weight, sparsity, pattern, *, gram, seen=seen):
            seen.append(gram.clone())
            return weight, torch.ones_like(weight, dtype=torch.bool)

        done = oneshot(make(family), each, 0.5, solver=look)
        grams.append(seen)
        counts.append([layer.tokens for layer in done.layers])
    assert counts[0] == counts[1]
    for one, other in zip(*grams, strict=True):
        assert torch.equal(one, one.T)
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
    expected = {2 * (12 + 8)} | ({2 * (12 + 9)} if family in ENCODER_DECODERS else set())
    expected |= {2 * 2 * (12 + 8)} if family in EXPERTS else set()
    assert set(counts[0]) == expected


@pytest.mark.parametrize("family", EXPERTS[:1])
def test_an_expert_without_tokens_is_pruned_by_magnitude_and_named(family):
    model = make(family)
    with torch.no_grad():
        router = find_blocks(model)["model.layers.0"].mlp.gate.weight
        router.copy_(torch.randn(4, 16).abs() / 4)
        router[3] *= -1  # of positive inputs the last of the four
        dense = model.model.layers[0].mlp.experts.down_proj[3].clone()
    data = [{"input_ids": batch["input_ids"]} for batch in batches(family, padding=False)]
    seen = {}

    def positive(module, args):
        return (args[0].abs() + 0.1, *args[1:])

    hook = router_of(model).register_forward_pre_hook(positive)
    done = oneshot(model, data, 0.5, on_layer=lambda layer: seen.setdefault(layer.name, layer))
    hook.remove()
    layer = seen["model.layers.0.mlp.experts.down_proj"]
    assert layer.without_tokens == (3,)
    assert done.layers[4].name.endswith("gate_up_proj")
    kept = model.model.layers[0].mlp.experts.down_proj[3]
    expected, _ = from_criterion(criteria.magnitude)(dense, 0.5, Unstructured())
    assert torch.equal(kept, expected)


def router_of(model):
    return model.model.layers[0].mlp.gate


# ---- not from transformers ---------------------------------------------------------------------------------------


def test_pytorch_s_own_encoder_layers():
    torch.manual_seed(0)
    model = Encoder().eval()
    ids = torch.randint(0, 64, (2, 6))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    grams = []
    for data in (
        [{"ids": ids, "src_key_padding_mask": padding}],
        [{"ids": ids[:1, :4]}, {"ids": ids[1:]}],
    ):
        seen = []

        def look(weight, sparsity, pattern, *, gram, seen=seen):
            seen.append(gram.clone())
            return weight, torch.ones_like(weight, dtype=torch.bool)

        done = oneshot(model, data, 0.5, solver=look)
        assert [layer.name.removeprefix("encoder.layers.0.") for layer in done.layers[:4]] == [
            "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
        ]  # fmt: skip
        assert {layer.tokens for layer in done.layers} == {10}
        grams.append(seen)
    for one, other in zip(*grams, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert torch.backends.mha.get_fastpath_enabled()
    inputs = model.embed(ids)[padding.logical_not()]
    torch.testing.assert_close(grams[0][0], inputs.T @ inputs)


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
        self.other = nn.MultiheadAttention(8, 2)

    def forward(self, x, memory):
        x = x + self.attention(x, memory[..., :6], memory[..., 2:])[0]
        return x + self.other(x, memory, memory)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CrossAttention() for _ in range(2))

    def forward(self, batch):
        x = batch
        for layer in self.layers:
            x = layer(x, batch.flip(0))
        return x


def test_attention_with_keys_of_another_kind_has_three_inputs():
    torch.manual_seed(0)
    model = Decoder()
    model.layers[0].attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    model.layers[1].attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
    data = [torch.randn(5, 3, 8)]
    seen = {}

    def look(weight, sparsity, pattern, *, gram):
        seen[len(seen)] = (tuple(weight.shape), gram)
        return weight, torch.ones_like(weight, dtype=torch.bool)

    done = oneshot(model, data, 0.5, solver=look)
    names = [layer.name.removeprefix("layers.0.") for layer in done.layers if layer.block == "layers.0"]
    assert names == [
        "attention.q_proj_weight", "attention.k_proj_weight", "attention.v_proj_weight", "attention.out_proj.weight",
        "other.in_proj_weight", "other.out_proj.weight",
    ]  # fmt: skip
    x = data[0].reshape(-1, 8)
    memory = data[0].flip(0).reshape(-1, 8)
    assert seen[0][0] == (8, 8)
    torch.testing.assert_close(seen[0][1], x.T @ x)
    torch.testing.assert_close(seen[1][1], memory[:, :6].T @ memory[:, :6])
    torch.testing.assert_close(seen[2][1], memory[:, 2:].T @ memory[:, 2:])
    torch.testing.assert_close(seen[5][1], memory.T @ memory)  # the keys' third of in_proj_weight


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what is deprecated
def test_under_an_adapter_the_model_s_own_weights_are_pruned():
    import peft

    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    done = oneshot(model, batches("llama"), 0.5)
    assert len(done.layers) == 14
    assert all(".lora_" not in layer.name and layer.tokens == 60 for layer in done.layers)
    assert len(done.left_alone["adapters"]) == 8
    assert sum("base_layer" in layer.name for layer in done.layers) == 4


class Skips(nn.Module):
    """The first block's output comes back before the last one, and a value that the first computed goes to all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        first = self.blocks[0](x).tanh()
        x = self.blocks[2](self.blocks[1](first)).tanh()
        return self.blocks[3](x + first)


def test_an_output_that_is_needed_much_later_is_found_again():
    torch.manual_seed(0)
    model, data = Skips(), [torch.randn(9, 6) for _ in range(2)]
    grams = []

    def look(weight, sparsity, pattern, *, gram):
        grams.append(gram)
        return weight, torch.ones_like(weight, dtype=torch.bool)

    oneshot(model, data, 0.5, solver=look)
    inputs = []
    hook = model.blocks[3].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    for batch in data:
        model(batch)
    hook.remove()
    x = torch.cat(inputs)
    torch.testing.assert_close(grams[3], x.T @ x)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.groups[0](x)
        return self.head(x)


def test_a_block_that_runs_three_times_is_summed_over_all_of_its_runs():
    model, x, grams = Shared(), torch.randn(5, 4), {}

    def look(weight, sparsity, pattern, *, gram):
        grams[weight.shape] = gram.clone()
        return sparsegpt(weight, sparsity, pattern, gram=gram)

    first = model.groups[0]
    once = first(x).detach()
    seen = torch.cat([x, once, first(once).detach()])
    done = oneshot(model, [x], 0.5, solver=look)
    torch.testing.assert_close(grams[4, 4], seen.T @ seen)
    assert [(layer.name, layer.tokens) for layer in done.layers] == [("groups.0.0.weight", 15), ("head.weight", 5)]


def test_blocks_that_albert_shares_are_pruned_in_a_directory_as_in_memory(tmp_path):
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=40, embedding_size=8, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_hidden_layers=3, max_position_embeddings=16,
    )  # fmt: skip
    model, data = AlbertForMaskedLM(config).eval(), [{"input_ids": torch.randint(40, (2, 12))} for _ in range(2)]
    model.save_pretrained(tmp_path / "dense")
    theirs = oneshot(tmp_path / "dense", data, 0.5, out=tmp_path / "pruned")
    ours = oneshot(model, data, 0.5)
    assert [(layer.name, layer.tokens) for layer in theirs.layers] == [(each.name, each.tokens) for each in ours.layers]
    assert {layer.tokens for layer in ours.layers} == {3 * 48}
    loaded = AlbertForMaskedLM.from_pretrained(tmp_path / "pruned").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded[name], value, msg=name)
