"""The forms of packed layers by their names, as files and pickles say them. Packed models on disk: a safetensors file
that says which layer has which form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from secateur.inference.blocks import (
    Absorbed,
    FusedBlock,
    FusedSequential,
    chains,
    fused_block,
    may_be_absorbed,
    sequences,
    twin_of,
)
from secateur.inference.convolution import (
    BlockConv1d,
    BlockConv2d,
    ChannelsLastMaxPool2d,
    FoldedConv2d,
    SparseConv1d,
    SparseConv2d,
    lay_out,
    may_be_turned,
    may_fold,
)
from secateur.inference.linear import (
    BlockLinear,
    GroupedLinear,
    Pointwise,
    SemiStructuredLinear,
    SparseLinear,
    WindowLinear,
)
from secateur.inference.packing import freeze_like, is_conv1d, put
from secateur.support import (
    Column,
    Fields,
    Part,
    Shown,
    Table,
    bytes_text,
    device_of,
    printable,
    private,
    records,
    unwrapped,
    write_whole,
)

# ---- The forms of packed layers by their names, as files and pickles say them.
#
# Law: a pickle names ``secateur.inference``, wherever a layer is defined.

KINDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        GroupedLinear,
        SparseLinear,
        BlockLinear,
        WindowLinear,
        SemiStructuredLinear,
        SparseConv1d,
        SparseConv2d,
        BlockConv1d,
        BlockConv2d,
    )
}

for _layer in (*KINDS.values(), Pointwise, Absorbed, FusedBlock, FoldedConv2d, ChannelsLastMaxPool2d):
    _layer.__module__ = "secateur.inference"


# ---- Packed models on disk: a safetensors file that says which layer has which form.
#
# Law: everything of a file is checked before the model changes.


@dataclass(frozen=True)
class PackedFile(Shown):
    """The result of `save_packed` or `load_packed`; prints as a table: ``layers`` are the packed layers' forms.

    ``nbytes`` are those of the whole file.
    """

    path: Path
    layers: Mapping[str, str]
    nbytes: int

    def content(self) -> Iterable[Part]:
        said = f"{len(self.layers)} packed layers in {printable(str(self.path))}, {bytes_text(self.nbytes)}."
        return Table.of("layers", self.layers.items(), Column("Layer"), Column("Form")), "", said


def save_packed(model: nn.Module, path: str | os.PathLike[str]) -> PackedFile:
    """Write a packed model as one safetensors file: its tensors, and in the header which layers have which form.

    Raises:
        ValueError: no layer of the model is packed.
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from secateur import pack, sparsify
    >>> from secateur.patterns import GroupedColumns
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> masks = sparsify(model, 0.75, pattern=GroupedColumns(16))
    >>> packing = pack(model, torch.randn(1, 64), at_least=1e-9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_packed(model, Path(folder, "packed.safetensors"))
    ...     read = load_packed(nn.Sequential(nn.Linear(64, 64)), saved.path)
    >>> [*saved.layers] == [*read.layers] == ["0"]
    True
    """
    from safetensors.torch import save as to_bytes

    model = unwrapped(model)
    forms = {name: _form(module) for name, module in _packed_modules(model)}
    if not forms:
        raise ValueError(f"no layer of {type(model).__name__} is packed; save its state_dict instead.")
    tensors: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        if known != name and tensor.numel():
            same[name] = known
        else:
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    absorbed = [name for name, module in model.named_modules() if isinstance(module, Absorbed)]
    blocks = {name: each for name, each in model.named_modules() if isinstance(each, FusedBlock) and not each.is_chain}
    for name, block in blocks.items():
        for inner in block.rectified:  # by the block, which makes it again when it is read
            forms[f"{name}.{inner}"]["rectified"] = 0
    modules = dict(model.named_modules())
    header = {
        "kind": "packed",
        "version": 1,
        "layers": forms,
        "same": same,
        "absorbed": absorbed,
        "blocks": [*blocks],
        "sequences": [name for name, module in modules.items() if isinstance(module, FusedSequential)],
        "folded": {name: int(m.channels_last) for name, m in modules.items() if isinstance(m, FoldedConv2d)},
        "poolings": {name: int(m.rectified) for name, m in modules.items() if isinstance(m, ChannelsLastMaxPool2d)},
    }
    content = to_bytes(tensors, metadata={"secateur": json.dumps(header)})
    return PackedFile(write_whole(path, content), {name: form["kind"] for name, form in forms.items()}, len(content))


def load_packed(model: nn.Module, path: str | os.PathLike[str]) -> PackedFile:
    """Give a dense model of the same architecture the layers and tensors that `save_packed` wrote, in place.

    Everything is checked before the model changes: a file whose indices lead out of a layer's inputs is refused.

    Raises:
        ValueError: it is no such file, or of another model.
        OSError: it is not there.

    >>> model = nn.Linear(4, 4)
    >>> load_packed(model, "nowhere.safetensors")
    Traceback (most recent call last):
    ...
    FileNotFoundError: nowhere.safetensors is not a file.
    """
    from safetensors import SafetensorError, safe_open

    model = unwrapped(model, resized=True)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("secateur", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file of a packed model: {error}") from None
    header = Fields(records.parse_json(about.encode(), Path(path)), Path(path))
    if header.values.get("kind") != "packed":
        raise ValueError(f"{path} holds no packed model; load_state_dict reads plain weights.")
    if (version := header.take("version", int)) != 1:
        raise ValueError(f"{path} is of version {version}; this secateur reads version 1.")
    for name, other in header.each_named("same", str).items():
        if other not in tensors:
            raise header.inner("same").wrong(name, "is the same as a tensor that is not there")
        tensors[name] = tensors[other]
    forms = list(header.inners_named("layers"))
    try:
        replacements = {name: _module_of(name, form, tensors) for name, form in forms}
        for name, replacement in replacements.items():
            _check_fits(name, model.get_submodule(name), replacement)
            freeze_like(model.get_submodule(name), replacement)
        for name in _listed(header, "absorbed"):
            if not may_be_absorbed(model.get_submodule(name)):
                raise header.wrong("absorbed", f"names {name}, a {type(model.get_submodule(name)).__name__} here")
            replacements[name] = Absorbed()
        for name, is_turned in _named(header, "folded").items():
            replacements[name] = _folded(name, model.get_submodule(name), bool(is_turned), tensors, header)
        for name, is_rectified in _named(header, "poolings").items():
            if not may_be_turned(pooling := model.get_submodule(name)):
                raise header.wrong("poolings", f"names {name}, a {type(pooling).__name__} here")
            replacements[name] = ChannelsLastMaxPool2d(cast("nn.MaxPool2d", pooling), bool(is_rectified))
        blocks = {name: _block(model, name, replacements, header) for name in _listed(header, "blocks")}
        lines = _listed(header, "sequences")
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from None
    gone = {id(model.get_submodule(name)) for name in replacements}
    inside = tuple(f"{name}." for name, each in model.named_modules(remove_duplicate=False) if id(each) in gone)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(inside)}
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    if rest.keys() != own.keys():
        odd = sorted(rest.keys() ^ own.keys())
        raise ValueError(f"{path} does not fit {type(model).__name__}: {', '.join(odd[:5])} only on one side.")
    for name, tensor in own.items():
        if rest[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(rest[name].shape)}, in {type(model).__name__} {tuple(tensor.shape)}."
            )
    device = device_of(model)
    for name, replacement in replacements.items():
        replacement.train(model.get_submodule(name).training)
        put(model, name, replacement if device is None else replacement.to(device))
    for name, block in blocks.items():
        put(model, name, block)
    for name, chain in chains(model).items() if blocks else ():
        put(model, name, chain)
    sequences(model, lines)
    lay_out(model)
    model.load_state_dict(rest, strict=False)
    kinds = {name: form.take("kind", str) for name, form in forms}
    return PackedFile(Path(path), kinds, Path(path).stat().st_size)


def _listed(header: Fields, key: str) -> list[str]:
    """Names that files of before do not have."""
    return header.each(key, str) if key in header.values else []


def _named(header: Fields, key: str) -> Mapping[str, int]:
    """The same with a number for each."""
    return header.each_named(key, int) if key in header.values else {}


def _folded(
    name: str, dense: nn.Module, is_turned: bool, tensors: Mapping[str, Tensor], header: Fields
) -> FoldedConv2d:
    """The convolution that has taken in its batch normalization, in place of a dense one."""
    if not may_fold(dense):
        raise header.wrong("folded", f"names {name}, a {type(dense).__name__} here")
    made = FoldedConv2d.from_module(dense, channels_last=is_turned)
    made.load_state_dict({key: tensors[f"{name}.{key}"] for key in ("weight", "bias")})
    return made


def _block(model: nn.Module, name: str, replacements: Mapping[str, nn.Module], header: Fields) -> nn.Module:
    """The fused block in place of a dense one, with its packed layers."""
    inside = f"{name}."
    inner = {other.removeprefix(inside): each for other, each in replacements.items() if other.startswith(inside)}
    made = fused_block(twin_of(model.get_submodule(name), inner)) if name else None
    if made is None:
        raise header.wrong("blocks", f"names {name!r}, in which nothing can be fused here")
    return made


def _packed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = ""
    for name, module in model.named_modules():
        if isinstance(module, Pointwise):
            inside = f"{name}."
            yield name, module
        elif type(module).__name__ in KINDS and not (inside and name.startswith(inside)):
            yield name, module


def _form(module: nn.Module) -> dict[str, Any]:
    linear: Any = module.linear if isinstance(module, Pointwise) else module
    form = {"kind": type(linear).__name__, **linear._layout()}
    return {**form, "stride": list(module.stride)} if isinstance(module, Pointwise) else form


def _module_of(name: str, form: Fields, tensors: Mapping[str, Tensor]) -> nn.Module:
    kind, stride = form.take("kind", str), form.each("stride", int, least=1) if "stride" in form.values else None
    layout = {key: form.take(key, int, least=0) for key in form.values if key not in ("kind", "stride")}
    if kind not in KINDS:
        raise form.wrong("kind", f"is {kind!r}, which this secateur does not know")
    prefix = f"{name}.linear." if stride is not None else f"{name}."
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    linear: nn.Module = KINDS[kind]._from_tensors(own, layout)
    return linear if stride is None else Pointwise(linear, tuple(stride))


def _check_fits(name: str, dense: nn.Module, packed: nn.Module) -> None:
    if isinstance(packed, SparseConv2d):
        if not private.is_convolution(dense) or dense.weight.dim() != packed.weight.dim():
            raise ValueError(f"{name} is a convolution in the file, and a {type(dense).__name__} here.")
        here, there = packed.described(dense), packed.described()
        if here != there:
            raise ValueError(f"{name} is {there} in the file, and {here} here.")
        return
    shape = tuple(cast("Tensor", dense.weight).shape)
    linear: Any = packed.linear if isinstance(packed, Pointwise) else packed
    expected = (linear.out_features, linear.in_features)
    if (shape[::-1] if is_conv1d(dense) else shape[:2]) != expected:
        raise ValueError(f"{name} is {expected[0]}×{expected[1]} in the file, but has a weight of shape {shape} here.")
