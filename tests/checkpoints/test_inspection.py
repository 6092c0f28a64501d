"""What `inspect_checkpoint` says against a slow, plain reading of the definitions."""

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from secateur import patterns
from secateur.checkpoints import inspect as inspection
from secateur.checkpoints import inspect_checkpoint
from secateur.checkpoints.inspect import Layout, layout_of
from secateur.pipeline import make_masks
from support.stored import storable


def inspect(tmp_path, tensor, name="fc.weight", config=None):
    save_file({name: tensor}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    (found,) = inspect_checkpoint(tmp_path).tensors
    return found


def pruned(shape, sparsity, word):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    pattern = patterns.parse(word)
    asked = None if pattern.density is not None else sparsity
    return weight * make_masks({"w": weight}, asked, pattern=pattern)["w"]


# ---- the patterns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["2:4", "1:4", "3:4", "4:8", "2:8", "1:8", "8:16", "6:16", "1:16"])
@pytest.mark.parametrize("shape", [(64, 64), (100, 32), (16, 32, 3, 3)])
def test_n_m_is_found(tmp_path, word, shape):
    n, m = map(int, word.split(":"))
    found = inspect(tmp_path, pruned(shape, None, word))
    assert found.n_m == (n, m)
    assert found.sparsity == pytest.approx(1 - n / m)
    assert found.block is None
    assert found.pattern == word


@pytest.mark.parametrize("word", ["16x1", "1x16", "4x4", "8x8", "32x32", "3x5", "2x1"])
def test_blocks_are_found(tmp_path, word):
    height, width = map(int, word.split("x"))
    found = inspect(tmp_path, pruned((96, 160), 0.7, word))
    assert found.block == (height, width)
    assert found.pattern.endswith(f"{word} blocks")


@pytest.mark.parametrize(
    ("word", "channels", "words"),
    [("channels", ("out", 12, 24), "12 of 24 out channels"), ("channels:1", ("in", 8, 16), "8 of 16 in channels")],
)
@pytest.mark.parametrize("shape", [(24, 16), (24, 16, 3, 3)])
def test_channels_are_found(tmp_path, word, channels, words, shape):
    found = inspect(tmp_path, pruned(shape, 0.5, word))
    assert found.channels == channels
    assert found.block is None
    assert words in found.pattern


@pytest.mark.parametrize("shape", [(64, 64), (64, 16, 3, 3), (10,), (), (0, 4)])
def test_a_dense_tensor_reports_nothing(tmp_path, shape):
    found = inspect(tmp_path, torch.ones(shape))
    assert found.zeros == 0
    assert (found.n_m, found.block, found.channels, found.pattern) == (None, None, None, "")


def test_all_zero(tmp_path):
    assert inspect(tmp_path, torch.zeros(8, 8)).pattern == "all zero"
    assert inspect(tmp_path, torch.zeros(8), name="bias").pattern == "all zero"


def test_gpt2_is_read_along_its_inputs(tmp_path):
    stored = pruned((48, 32), None, "2:4").T.contiguous()
    name = "h.0.mlp.c_fc.weight"
    assert inspect(tmp_path, stored, name).n_m is None
    found = inspect(tmp_path, stored, name, config={"model_type": "gpt2"})
    assert (found.n_m, found.inputs_first) == ((2, 4), True)
    blocks = inspect(tmp_path, pruned((48, 32), 0.5, "16x1").T.contiguous(), name)
    assert blocks.block == (16, 1)
    assert inspect(tmp_path, pruned((48, 32), 0.5, "channels").T.contiguous(), name).channels == ("out", 24, 48)


def test_experts_are_matrices(tmp_path):
    stored = pruned((4 * 24, 16), None, "2:4").reshape(4, 24, 16).transpose(1, 2).contiguous()
    found = inspect(tmp_path, stored, "mlp.experts.gate_up_proj", config={"hidden_size": 16})
    assert (found.n_m, found.inputs_first) == ((2, 4), True)


def plain_n_m(zero):
    most = {}
    for m in (4, 8, 16):
        if zero.shape[1] % m == 0:
            most[m] = max(int((~group).sum()) for row in zero for group in row.split(m))
    found = None
    for m, n in most.items():
        fills = float((~zero).double().mean()) >= 0.75 * n / m
        if n < m and (fills or (n, m) in ((1, 4), (2, 4))) and (found is None or n <= found[0]):
            found = (n, m)
    return found


def plain_block(zero):
    rows, columns = zero.shape
    holding = [
        (h, w)
        for h in range(1, rows + 1)
        for w in range(1, columns + 1)
        if all(tile.all() or not tile.any() for band in zero.split(h) for tile in band.split(w, dim=1))
    ]
    return max(holding, key=math.prod)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    tile=st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (4, 4), (2, 8)]),
    rows=st.integers(2, 20),
    columns=st.sampled_from([2, 4, 7, 8, 16]),
    share=st.floats(0, 1),
)
def test_it_agrees_with_the_plain_definition(tmp_path, monkeypatch, seed, tile, rows, columns, share):
    monkeypatch.setattr(inspection, "PIECE", 16 * columns * 4)  # several pieces
    draw = (
        torch.rand(-(-rows // tile[0]), -(-columns // tile[1]), generator=torch.Generator().manual_seed(seed)) < share
    )
    zero = draw.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :columns]
    found = inspect(tmp_path, (~zero).float())
    assert found.zeros == int(zero.sum())
    if found.zeros in (0, zero.numel()):
        assert (found.n_m, found.block, found.channels) == (None, None, None)
        return
    assert found.n_m == plain_n_m(zero)
    if found.channels is None:
        height, width = found.block or (1, 1)
        assert height * width == math.prod(plain_block(zero))
        assert all(part.all() or not part.any() for band in zero.split(height) for part in band.split(width, dim=1))
    else:
        lines = zero if found.channels[0] == "out" else zero.T
        assert all(line.all() or not line.any() for line in lines)
        assert found.channels[1:] == (int(lines.all(1).sum()), len(lines))


# ---- dtypes and totals -------------------------------------------------------------------------------------------


def test_zeros_of_every_dtype(tmp_path):
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {str(dtype): torch.tensor([0.0, -0.0, 1.0, 2.0]).to(dtype) for dtype in floats}
    whole = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    tensors |= {str(dtype): torch.tensor([0, 1, 2, 0]).to(dtype) for dtype in (*whole, torch.bool, torch.complex64)}
    tensors["tiny"] = torch.tensor([5e-324, 0.0, 0.0, 1.0], dtype=torch.float64)  # a denormal is no zero
    tensors["fnuz"] = torch.tensor([0x80, 0, 0, 1], dtype=torch.uint8).view(torch.float8_e4m3fnuz)  # 0x80 is NaN
    tensors["nan"] = torch.tensor([float("nan"), float("inf"), 0.0, 0.0])
    tensors = {name: tensor for name, tensor in tensors.items() if storable(tensor.dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert {tensor.name: tensor.zeros for tensor in inspect_checkpoint(tmp_path).tensors} == dict.fromkeys(tensors, 2)


def test_opaque_dtypes_are_counted_and_not_read(tmp_path):
    header = {
        "a": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
        "b": {"dtype": "F9_NEW", "shape": [3], "data_offsets": [8, 11]},
        "c": {"dtype": "F32", "shape": [2], "data_offsets": [11, 19]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(19))
    found = inspect_checkpoint(tmp_path)
    assert [(tensor.zeros, tensor.sparsity) for tensor in found.tensors] == [(None, None), (None, None), (2, 1.0)]
    total = found.total()
    assert (total.parameters, total.nbytes, total.zeros, total.sparsity) == (21, 19, 2, 1.0)
    assert found.by_dtype["F4"].sparsity is None
    said = found.json()
    assert [tensor["sparsity"] for tensor in said["tensors"]] == [None, None, 1.0]


@pytest.mark.long
def test_a_4_gb_file_takes_little_memory(tmp_path):
    """8 tensors of 512 MB in a file of holes: the peak stays far below even one tensor."""
    size = 16384 * 8192 * 4
    header = {
        f"layers.{n}.weight": {"dtype": "F32", "shape": [16384, 8192], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(8)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 8 * size)
    script = """
        import sys
        from secateur.checkpoints.inspect import inspect_tensor
        from secateur.checkpoints import open_checkpoint

        def peak():  # of this program; ru_maxrss begins at the parent's
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

        before = peak()
        checkpoint = open_checkpoint(sys.argv[1])
        found = inspect_tensor(checkpoint, "layers.7.weight")
        assert found.zeros == found.numel
        print(len(checkpoint), peak() - before)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), path], capture_output=True, text=True, check=True
    ).stdout
    tensors, grown = map(int, output.split())
    assert tensors == 8
    assert 30_000_000 < grown < 200_000_000


# The layout's two directions, and which tensors are turned.


GPT2 = {"model_type": "gpt2"}


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_from_rows_is_the_inverse_of_to_rows(inputs_first, experts):
    shape = (3, 4, 5) if experts else (4, 5)
    stored = torch.arange(60).reshape(3, 4, 5) if experts else torch.arange(20).reshape(4, 5)
    layout = Layout(shape, inputs_first=inputs_first, experts=experts)
    rows = layout.to_rows(stored)
    assert tuple(rows.shape) == layout.rows_shape
    assert torch.equal(layout.from_rows(rows), stored)


@pytest.mark.parametrize(
    "name", ["h.0.attn.c_attn.weight", "transformer.h.11.mlp.c_fc.weight", "h.3.mlp.c_proj.weight"]
)
def test_gpt2_stores_inputs_first(name):
    assert layout_of(name, (6, 8), GPT2).inputs_first
    assert not layout_of(name, (6, 8), {"model_type": "gpt_bigcode"}).inputs_first  # StarCoder has Linear
    assert not layout_of(name, (6, 8), {}).inputs_first


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.c_attn.bias", "lm_head.weight", "h.0.mlp.xc_fc.weight"])
def test_other_tensors_of_gpt2_are_as_everywhere(name):
    assert not layout_of(name, (6, 8), GPT2).inputs_first


@pytest.mark.parametrize(
    ("name", "shape", "config", "inputs_first"),
    [
        ("mlp.experts.gate_up_proj", (2, 8, 24), {"hidden_size": 8}, True),  # Llama 4
        ("mlp.experts.gate_up_proj", (2, 24, 8), {"hidden_size": 8}, False),  # Mixtral since transformers 5
        ("mlp.experts.down_proj", (2, 12, 8), {"hidden_size": 8}, True),
        ("mlp.experts.down_proj", (2, 8, 12), {"text_config": {"hidden_size": 8}}, False),
        ("mlp.experts.down_proj", (2, 8, 8), {"hidden_size": 8, "model_type": "gpt_oss"}, True),
        ("mlp.experts.down_proj", (2, 8, 8), {"hidden_size": 8}, False),
    ],
)
def test_experts_are_told_apart_by_the_hidden_size(name, shape, config, inputs_first):
    layout = layout_of(name, shape, config)
    assert layout.experts
    assert layout.inputs_first is inputs_first


def test_a_config_may_hold_anything():
    for value in ([], {}, None, 3, True):
        config = {"model_type": value, "hidden_size": value, "text_config": value}
        assert not layout_of("h.0.mlp.c_fc.weight", (6, 8), config).inputs_first
        assert layout_of("experts.w", (2, 6, 8), config).experts
