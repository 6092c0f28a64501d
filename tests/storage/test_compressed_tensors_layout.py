"""The sparse layouts of compressed-tensors are read and expanded, and damaged ones refused."""

import base64
import json
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.storage import expand_checkpoint, load_compressed, save_compressed
from secateur.storage.layout import without_sparsity
from support.stored import same

BITMASK_FILE = zlib.decompress(base64.b85decode(
    "c$|%qO=`n15QP<W*HeU955<ucA!k$5MW6@hDj1>0GA+fmu>_?ALynfC^eB}R;U=~7GuYM`&HMBoswvsm29zp|)46t9DOhZvsG3qcSU~NdMJUz"
    "}P4%U!qOiu<ZXkExwekDUf&+qm)7{@H&JgyHesUEd<Jkcbrp}4kP|P^;s8fG>Ket&JLU@E+_K+(kW+Qrua}grEzUz~-mod8>e=bnSAYNBx-56"
    "_4ejdSx2q97O-v2n{X*m;@Q%H{TFNG_${Wu1^$m1M1au-ry!g?Fm5F-u}hDn^Y?Q}{)(SPe*SntVc(Z1V0`cLW~|L(eecj&k2Pf90*Oep;YFV"
    ")R)"
))  # fmt: skip


GROUPED_FILE = zlib.decompress(base64.b85decode(
    "c$|B|00GrX@$tE-C5b7CC5iFzN><fMY57IDi6u%_N(CiKwK__r1$xC9i3O=3sg#mR5JSn+%tT2?2`U_Iq+=MXqXae}KP{~|wWJs*XrN<g77Njyo"
    "S$1zlv-Sznu2VGo1qzs877!!7@FxA8$k_8$}GuEEY3zYA=HA9BaDr7j7?%|YZVj}n4tdUfYJ;$3=RxV3@!|=3~mhW3?7*_0OI*g9s"
))  # fmt: skip


DENSE = {
    "fc.weight": torch.tensor([[0, 1.5, 0, 0, 0, 0, 0, 0, -2, 0], [0] * 10, [3] + [0] * 8 + [4]]),
    "fc.bias": torch.tensor([1.0, 2, 3]),
    "norm.weight": torch.tensor([0, 7], dtype=torch.bfloat16),
}


@pytest.fixture
def foreign(tmp_path):
    """A directory as save_pretrained left it, and its tensors by name."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(BITMASK_FILE)
    sparsity = {"format": "sparse-bitmask", "global_sparsity": 0.8, "ignore": []}
    config = {
        "model_type": "x",
        "quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": sparsity},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_bitmasks_of_compressed_tensors_are_read_and_expanded(tmp_path, foreign):
    loaded = load_compressed(foreign)
    assert loaded.layout == "compressed-tensors"
    assert set(loaded) == set(DENSE)
    assert all(same(loaded[name], tensor) for name, tensor in DENSE.items())
    assert not loaded.masks
    done = expand_checkpoint(foreign, tmp_path / "dense")
    dense = load_file(tmp_path / "dense/model.safetensors")
    assert all(same(dense[name], tensor) for name, tensor in DENSE.items())
    assert json.loads((tmp_path / "dense/config.json").read_text()) == {"model_type": "x"}
    assert done.dense == (tmp_path / "dense/model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match="compressed already"):
        save_compressed(foreign, tmp_path / "other")


def test_two_of_four_of_compressed_tensors_is_read(tmp_path):
    (tmp_path / "file.safetensors").write_bytes(GROUPED_FILE)
    weight = load_compressed(tmp_path / "file.safetensors")["up.weight"]
    assert same(weight, torch.tensor([[1, 0, 0, 2, 0, 3, 4, 0], [0, 0, 5, 6, 7, 8, 0, 0]], dtype=torch.float16))


def test_parts_in_two_shards_and_three_dimensions(tmp_path):
    weight = torch.zeros(2, 3, 5)
    weight[0, 1, 2], weight[1, 2, 4], weight[1, 0, 0] = 1, 2, 3
    shards = {
        "a.safetensors": {
            "conv.weight.compressed": torch.tensor([1.0, 3, 2]),
            "conv.weight.shape": torch.tensor([2, 3, 5]),
        },
        "b.safetensors": {
            "conv.weight.bitmask": torch.tensor([[[0], [4], [0]], [[1], [0], [16]]], dtype=torch.uint8),
            "conv.weight.row_offsets": torch.tensor([[0, 0, 0], [0, 1, 0]]),
            "bias": torch.ones(2),
        },
    }
    (tmp_path / "in").mkdir()
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / "in" / name)
    index = {"weight_map": {part: name for name, tensors in shards.items() for part in tensors}}
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    expand_checkpoint(tmp_path / "in", tmp_path / "out")
    dense = open_checkpoint(tmp_path / "out")
    assert set(dense) == {"conv.weight", "bias"}
    assert same(dense["conv.weight"], weight)


def test_a_quantization_stays_in_the_config():
    config = {"quantization_config": {"config_groups": {"g": 1}, "sparsity_config": {"format": "sparse-24-bitmask"}}}
    assert without_sparsity(config) == {"quantization_config": {"config_groups": {"g": 1}}}
    assert without_sparsity({"sparsity_config": {"format": "sparse-bitmask"}}) == {}
    assert without_sparsity({"quantization_config": {"sparsity_config": {"format": "dense"}}}) is None


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"fc.shape": torch.tensor([4, 10])}, "parts of fc.weight do not fit each other"),
        ({"fc.shape": torch.tensor([3, -10])}, "do not fit each other"),
        ({"fc.shape": torch.tensor([3.0, 10.0])}, "do not fit each other"),
        ({"fc.shape": torch.tensor([2**40, 2**40])}, "do not fit each other"),
        ({"fc.row_offsets": torch.tensor([0, 2])}, "do not fit each other"),
        ({"fc.compressed": torch.ones(200)}, "do not fit each other"),
        ({"fc.row_offsets": torch.tensor([0, 2, 3])}, "row_offsets are not those of its bitmask"),
        ({"fc.compressed": torch.ones(3)}, "places are those of more than 3 entries"),
        ({"fc.bitmask": torch.tensor([[2, 1], [0, 4], [1, 2]], dtype=torch.uint8)}, "bits after the end of a row"),
        ({"fc.weight": torch.ones(3, 10)}, "fc.weight is there twice"),
    ],
)
def test_damaged_bitmasks_of_compressed_tensors(tmp_path, foreign, changed, match):
    tensors = load_file(foreign / "model.safetensors")
    save_file({**tensors, **changed}, foreign / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        dict(load_compressed(foreign))
