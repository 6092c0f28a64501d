"""Packed models come back from their files, and a file that does not fit changes nothing."""

import pytest
import torch
from torch import nn

from secateur import Unstructured, sparsify
from secateur.inference import BlockConv2d, SparseLinear, load_packed, pack, save_packed
from secateur.native import available
from secateur.patterns import GroupedColumns
from support.packed import rewritten, weight_of


def packed_file(clock, folder):
    clock(2.0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 40), nn.BatchNorm1d(40)).eval()
    sparsify(model, 0.8, pattern=GroupedColumns(16))
    pack(model, torch.randn(4, 48), kernels_too=False)
    told = save_packed(model, folder / "packed.safetensors")
    assert told.nbytes == (folder / "packed.safetensors").stat().st_size
    return model, folder / "packed.safetensors"


def dense_model():
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 40), nn.BatchNorm1d(40)).eval()


def test_saved_and_loaded(clock, tmp_path):
    model, path = packed_file(clock, tmp_path)
    other = dense_model()
    told = load_packed(other, path)
    assert (told.path, told.layers) == (path, {"0": "GroupedLinear", "1": "GroupedLinear"})
    assert told == save_packed(other, path)
    assert str(told).startswith("Layer  Form\n0      GroupedLinear\n1      GroupedLinear\n\n2 packed layers in ")
    x = torch.randn(4, 48)
    assert torch.equal(other(x), model(x))
    assert [type(m) for m in other] == [type(m) for m in model]


def drop(tensors):
    del tensors["0.indices"]


def lead_out(tensors):
    tensors["0.indices"][0, 0] = 48


def other_shape(tensors):
    tensors["2.weight"] = torch.ones(41)


def add(tensors):
    tensors["more"] = torch.ones(1)


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        (drop, None, "does not fit Sequential: 'indices'"),
        (lead_out, None, "an index leads out of the 48 inputs"),
        (other_shape, None, r"2.weight has shape \(41,\), in Sequential \(40,\)"),
        (add, None, "more only on one side"),
        (None, lambda header: header.update(version=2), "is of version 2"),
        (None, lambda header: header.update(kind="masks"), "holds no packed model"),
        (
            None,
            lambda header: header["layers"]["0"].update(kind="Magic"),
            r"layers\.0\.kind is 'Magic', which this secateur does not know",
        ),
        (None, lambda header: header["layers"].update({"0": 3}), r"damaged: layers\.0 must be an object, not 3"),
        (None, lambda header: header["layers"]["0"].update(in_features="9"), r"in_features must be a whole number"),
        (None, lambda header: header.pop("layers"), "damaged: layers is missing"),
        (None, lambda header: header["layers"].update({"9": {"kind": "GroupedLinear"}}), "does not fit Sequential"),
        (
            None,
            lambda header: header["layers"]["0"].update(in_features=99),
            "is 64×99 in the file, but has a weight of",
        ),
        (None, lambda header: header["same"].update({"a": "b"}), r"same\.a is the same as a tensor that is not"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(clock, tmp_path, tensors, header, message):
    _, path = packed_file(clock, tmp_path)
    rewritten(path, tensors, header)
    model = dense_model()
    before = list(model.modules()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_packed(model, path)
    assert all(a is b for a, b in zip(before[0], model.modules(), strict=True))
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in model.state_dict().items())


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load_packed(dense_model(), tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file of a packed model"):
        load_packed(dense_model(), tmp_path / "text")
    with pytest.raises(ValueError, match="no layer of Sequential is packed"):
        save_packed(dense_model(), tmp_path / "dense")


def test_hostile_kernels_are_refused(tmp_path):
    """A file whose 16-bit indices lead out of the inputs never reaches the C code."""
    model = nn.Sequential(SparseLinear.from_dense(weight_of(8, 9, Unstructured())))
    save_packed(model, tmp_path / "packed")
    rewritten(tmp_path / "packed", lambda tensors: tensors["0.indices"].copy_(tensors["0.indices"].new_tensor(9)))
    with pytest.raises(ValueError, match="an index is 9, but there are 9 inputs"):
        load_packed(nn.Sequential(nn.Linear(9, 8, bias=False)), tmp_path / "packed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["0.indices"].fill_(36), "an index is 36, but there are 36 inputs"),
        (lambda t: t.update({"0.values": t["0.values"][1:]}), "36 indices for values of shape"),
        (lambda t: t.update({"0.values": t["0.values"][:, :3].contiguous()}), "36 indices for values of shape"),
        (lambda t: t.update({"0.values": t["0.values"][:, 0].contiguous()}), "36 indices for values of shape"),
        (lambda t: t["0.pointers"][-1:].fill_(100), "the pointers do not rise from 0 to 36"),
    ],
)
def test_hostile_blocks_of_outputs_are_refused(tmp_path, change, message):
    save_packed(nn.Sequential(BlockConv2d.from_module(nn.Conv2d(4, 4, 3, bias=False))), tmp_path / "packed")
    rewritten(tmp_path / "packed", change)
    with pytest.raises(ValueError, match=message):
        load_packed(nn.Sequential(nn.Conv2d(4, 4, 3, bias=False)), tmp_path / "packed")


def convolution(**changes):
    given = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": 1, "bias": False, **changes}
    modules = [nn.Conv2d(**given), nn.BatchNorm2d(given["out_channels"]), nn.ReLU()]
    return nn.Sequential(*modules).eval()


def packed_convolution(clock, folder):
    clock(2.0)
    model = convolution()
    sparsify(model, 0.9)
    pack(model, torch.randn(1, 4, 8, 8))
    save_packed(model, folder / "packed.safetensors")
    return model, folder / "packed.safetensors"


@pytest.mark.skipif(not available(), reason="there are no compiled kernels here")
@pytest.mark.parametrize(
    ("tensors", "header", "other", "message"),
    [
        (
            None,
            None,
            {"stride": 2},
            r"0 is \{.*'stride': \[1, 1\].*\} in the file, and \{.*'stride': \[2, 2\].*\} here",
        ),
        (None, None, {"padding": 0}, r"'padding': \[1, 1, 1, 1\].* in the file"),
        (None, None, {"out_channels": 8}, r"'channels': \(4, 6\).* in the file"),
        (lambda t: t["0.indices"].fill_(36), None, {}, "an index is 36, but there are 36 inputs"),
        (lambda t: t["0.pointers"].fill_(0), None, {}, "the pointers do not rise from 0 to"),
        (None, lambda h: h["layers"]["0"].update(together=0), {}, "groups and together one"),
        (None, lambda h: h["layers"]["0"].update(stride_0=0), {}, "two numbers from 1 on"),
        (None, lambda h: h["layers"]["0"].update(groups=3), {}, "outputs are not 3 groups|inputs|pointers"),
        (None, lambda h: h["layers"]["0"].pop("kernel_1"), {}, "does not fit Sequential: 'kernel_1'"),
        (None, lambda h: h["layers"]["0"].update(more=1), {}, "a SparseConv2d has no more"),
        (None, lambda h: h["layers"]["0"].update(kind="SparseConv1d"), {}, "a kernel of 3 rows has two dimensions"),
        (None, lambda h: h["layers"]["0"].update(kind="BlockConv2d"), {}, "indices for values of shape"),
        (None, lambda h: h["absorbed"].append("0"), {}, "absorbed names 0, a Conv2d here"),
        (None, lambda h: h["blocks"].append("1"), {}, "blocks names '1', in which nothing can be fused here"),
        (None, lambda h: h["blocks"].append(""), {}, "blocks names '', in which nothing can be fused here"),
        (None, lambda h: h["absorbed"].append("9"), {}, "does not fit Sequential"),
        (None, lambda h: h.update(absorbed=[]), {}, r"does not fit Sequential: 1\.bias, .* only on one side"),
    ],
)
def test_a_file_of_convolutions_that_does_not_fit_changes_nothing(clock, tmp_path, tensors, header, other, message):
    _, path = packed_convolution(clock, tmp_path)
    rewritten(path, tensors, header)
    model = convolution(**other)
    before = list(model.modules()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_packed(model, path)
    assert all(a is b for a, b in zip(before[0], model.modules(), strict=True))
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in model.state_dict().items())
