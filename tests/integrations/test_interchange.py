"""A uniformly shrunken Llama is a Llama: what others write and read of one, they write and read of it.

Law: behind each way out and back the logits are those of the shrunken model.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from secateur import shrink

TOKENS = torch.tensor([[7, 6, 5, 4, 1, 9], [1, 2, 3, 5, 4, 8]])


@pytest.fixture(scope="module")
def small() -> LlamaForCausalLM:
    """Half of the parameters gone by data: heads, groups of queries, hidden units."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)).eval()
    batches = [{"input_ids": torch.randint(64, (4, 16)), "use_cache": False} for _ in range(2)]
    before = model.config.to_dict()
    shrink(model, batches[0], 0.5, batches=batches, uniform=True)
    after = model.config.to_dict()
    assert after["intermediate_size"] < before["intermediate_size"]
    assert after["num_attention_heads"] < before["num_attention_heads"]
    return model


@pytest.fixture(scope="module")
def logits(small: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return small(TOKENS, use_cache=False).logits


def agrees(found: torch.Tensor, logits: torch.Tensor) -> None:
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def test_transformers_saves_and_loads_it(small: LlamaForCausalLM, logits: torch.Tensor, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    again, missing = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(missing.values())
    assert type(again) is LlamaForCausalLM
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS, use_cache=False).logits, logits)
    # one that generates has a cache of the smaller heads
    said = again.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(said, small.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0))


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_torch_exports_it(small: LlamaForCausalLM, logits: torch.Tensor, tmp_path: Path) -> None:
    given = {"input_ids": TOKENS, "use_cache": False, "return_dict": False}
    torch.export.save(torch.export.export(small, (), given), tmp_path / "small.pt2")
    agrees(torch.export.load(tmp_path / "small.pt2").module()(**given)[0], logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_onnx_runtime_runs_it(small: LlamaForCausalLM, logits: torch.Tensor, tmp_path: Path) -> None:
    import onnxruntime

    given = {"input_ids": TOKENS, "use_cache": False, "return_dict": False}
    torch.onnx.export(small, (), kwargs=given, dynamo=True, verbose=False).save(tmp_path / "small.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {node.name: TOKENS.numpy() for node in session.get_inputs()})
    agrees(torch.from_numpy(found), logits)


def write_gguf(model: LlamaForCausalLM, path: Path) -> dict[str, tuple[int, ...]]:
    """The model as llama.cpp's converter writes it, in float32; ``{name in the file: shape}``."""
    import gguf

    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    written = {}
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # the halves that are rotated together lie side by side there
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        place = names.get_name(name, try_suffixes=(".weight",))
        assert place is not None, name
        writer.add_tensor(place, tensor.contiguous().numpy())
        written[place] = tuple(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.filterwarnings("ignore")
def test_gguf_carries_it(small: LlamaForCausalLM, logits: torch.Tensor, tmp_path: Path) -> None:
    import gguf

    written = write_gguf(small, tmp_path / "small.gguf")
    assert {"token_embd.weight", "blk.1.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"} <= set(written)
    read = gguf.GGUFReader(tmp_path / "small.gguf")
    assert {each.name: tuple(each.shape[::-1].tolist()) for each in read.tensors} == written
    assert {each.tensor_type for each in read.tensors} == {gguf.GGMLQuantizationType.F32}

    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32).eval()
    assert again.config.intermediate_size == small.config.intermediate_size
    assert again.config.num_attention_heads == small.config.num_attention_heads
    with torch.no_grad():
        agrees(again(TOKENS, use_cache=False).logits, logits)
