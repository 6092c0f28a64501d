"""Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back.

Law: `load_compressed` gives the bits that `save_compressed` was given, `expand_checkpoint` the files that it was given,
byte for byte; one tensor is in memory at a time; a file is there whole or not at all. docs/format.md has the format.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from secateur.checkpoints import (
    Checkpoint,
    CheckpointError,
    TensorEntry,
    copy_tree,
    dtype_word,
    new_directory,
    open_checkpoint,
    parse_header,
    parse_json,
    read_header,
)
from secateur.pipeline import attached_masks, check_mask
from secateur.storage.compressed_files import (
    Read,
    StoredTensor,
    Written,
    header_of,
    read_whole,
    stored_tensors,
    write_compressed,
)
from secateur.storage.compressed_tensors_layout import BitmaskTensor, bitmask_tensors, without_sparsity
from secateur.storage.encodings import Array, Bools
from secateur.support import is_sharded, laid_out, printable, track, whole, whole_file

__all__ = [
    "CompressedCheckpoint",
    "Compression",
    "expand_checkpoint",
    "load_compressed",
    "save_compressed",
]

Model = TypeVar("Model", bound=nn.Module)

WEIGHTS, COMPRESSED, INDEX = ".safetensors", ".compressed.safetensors", ".index.json"
INDEX_KEY = "secateur"  # of a compressed directory's index, whose value is the text of the index that it replaced


@dataclass(frozen=True)
class Compression:
    """What `save_compressed` wrote, or `expand_checkpoint` read: each tensor's encoding and bytes, all files' bytes."""

    out: Path
    tensors: tuple[Written, ...]
    dense: int
    stored: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes of the compressed files over those of dense ones, headers included."""
        return self.stored / self.dense


# --------------------------------------------------------------------------------------------------------- saving


def save_compressed(
    source: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    masks: Mapping[str, Tensor] | None = None,
    zstd: bool = False,
) -> Compression:
    """Write each tensor in the smallest of dense, bitmask, n:m and CSR; `load_compressed` gives every bit back.

    A module or mapping becomes one safetensors file, as does a ``.safetensors`` file; an existing one is replaced. A
    directory (Hugging Face's, or any with ``*.safetensors``) becomes a new one with the same shards, named
    ``*.compressed.safetensors`` so that no library takes them for dense ones, and copies of all other files.

    Of a module: parameters and persistent buffers, tied ones once. A parameter with an attached mask (``weight_orig``,
    ``weight_mask``) is stored as the weight that the forward pass sees, with its mask; give ``model.state_dict()`` to
    keep what the mask hides. Beside the model and masks that are there, at most one tensor is in memory, of a directory
    with its mask, and some 30 MB; a mapping is taken whole.

    Args:
        masks: ``{name: bool mask}`` to keep beside the weights: a kept weight that happens to be zero stays kept. What
            a mask removes must be zero; -0.0 will do and comes back. Without one the zeros say what is stored.
        zstd: compress what was encoded, too: a sixth smaller for float32 at 50 %, nearly half for bfloat16 at 90 %, and
            slower to load (benchmarks/storage/run.py). Needs the package zstandard.

    Raises:
        CheckpointError: a damaged checkpoint, one that is compressed already, or a place that cannot be.
        KeyError: a mask's name is no tensor. ValueError: a mask's shape differs, or it removes what is not zero.
        TypeError: a tensor that is no plain, dense one, a mask that is not bool, state that is no tensor.
        ImportError: ``zstd`` without zstandard. OSError: a full disk. Nothing is left under ``path``.

    >>> import tempfile
    >>> layer = nn.Linear(100, 100, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.weight.mul_(torch.arange(10_000).reshape(100, 100) % 10 == 0)
    >>> file = Path(tempfile.mkdtemp()) / "layer.safetensors"
    >>> save_compressed(layer, file).tensors[0].encoding
    'csr8'
    >>> torch.equal(load_compressed(file)["weight"], layer.weight)
    True
    """
    started, path = time.monotonic(), Path(path)
    given = {} if masks is None else masks
    if isinstance(source, nn.Module | Mapping):
        tensors, attached, tied = _tensors_of(source)
        _check_masks(given, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        header = _header_for(tensors)

        def read(entry: TensorEntry) -> Array:
            tensor = whole(tensors[entry.name].detach())
            if entry.name in attached:
                tensor = torch.where(attached[entry.name], tensor, tensor.new_zeros(()))
            return _bytes_of(tensor)

        work = _Work(
            header,
            list(parse_header(header, path)[0].values()),
            read,
            ChainMap(cast(MutableMapping[str, Tensor], given), cast(MutableMapping[str, Tensor], attached)),
            tied,
        )
        return _compress_file(work, path, zstd, started)
    checkpoint = _open(Path(source))
    if CompressedCheckpoint(checkpoint).layout is not None:
        raise CheckpointError(f"{source}: compressed already; expand it first.")
    _check_masks(given, {name: entry.shape for name, entry in checkpoint.entries.items()})
    if Path(source).is_dir():
        return _compress_directory(checkpoint, path, given, zstd, started)
    if checkpoint.index is not None:
        raise CheckpointError(f"{source}: an index; give its directory.")
    header = _header_of_file(checkpoint.files[0])
    return _compress_file(
        _Work(header, list(checkpoint.entries.values()), _bytes_reader(checkpoint), given, {}), path, zstd, started
    )


@dataclass(frozen=True)
class _Work:
    """One file to compress: the header that it has, or would have, and where its tensors come from."""

    header: bytes
    entries: list[TensorEntry]
    read: Callable[[TensorEntry], Array]
    masks: Mapping[str, Tensor]
    tied: Mapping[str, str]

    @property
    def dense(self) -> int:
        """Bytes of the file."""
        return 8 + len(self.header) + sum(entry.nbytes for entry in self.entries)

    def write(self, file: BinaryIO, folder: Path, zstd: bool, entries: Iterable[TensorEntry]) -> list[Written]:
        """Compresses into ``file``; ``entries`` are those of the work, behind a progress bar."""
        stream = ((entry, self.read(entry), self._mask(entry)) for entry in entries)
        return write_compressed(file, self.header, stream, zstd=zstd, folder=folder, tied=self.tied)

    def _mask(self, entry: TensorEntry) -> Bools | None:
        if entry.name not in self.masks:
            return None
        mask: Bools = whole(self.masks[entry.name]).detach().cpu().reshape(-1).numpy()
        return mask


def _compress_file(work: _Work, path: Path, zstd: bool, started: float) -> Compression:
    if path.is_dir():
        raise CheckpointError(f"{path}: a directory; name the file to write.")
    with whole_file(path) as file:
        written = work.write(file, path.resolve().parent, zstd, track(work.entries, "compressing"))
    return Compression(path, tuple(written), work.dense, path.stat().st_size, time.monotonic() - started)


def _compress_directory(
    checkpoint: Checkpoint, out: Path, masks: Mapping[str, Tensor], zstd: bool, started: float
) -> Compression:
    root = checkpoint.root
    _check_outside(root, out)
    files = {file: _renamed(file.relative_to(root), WEIGHTS, COMPRESSED) for file in checkpoint.files}
    index = checkpoint.index
    targets = [*files.values(), *([] if index is None else [_renamed(Path(index.name), WEIGHTS, COMPRESSED)])]
    for target in targets:
        if (root / target).exists():
            raise CheckpointError(f"{root / target}: is in the way of the compressed {target}; remove or rename it.")
    written: list[Written] = []
    dense = stored = 0
    with new_directory(out) as temporary:
        skipped = {file.relative_to(root) for file in [*checkpoint.files, *([] if index is None else [index])]}
        collections.deque(track(copy_tree(root, temporary, skipped), "copying"), maxlen=0)
        parts: dict[str, str] = {}
        with contextlib.closing(track(list(checkpoint.entries.values()), "compressing")) as entries:
            for file, target in files.items():
                own = [entry for entry in checkpoint.entries.values() if entry.path == file]
                work = _Work(_header_of_file(file), own, _bytes_reader(checkpoint), masks, {})
                with open(temporary / target, "xb") as opened:
                    written += work.write(opened, temporary, zstd, itertools.islice(entries, len(own)))
                parts |= dict.fromkeys(read_header(temporary / target)[0], str(target.as_posix()))
                dense += work.dense
                stored += (temporary / target).stat().st_size
        if index is not None:
            text = index.read_bytes()
            metadata = parse_json(text, index).get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            total = sum(tensor.stored for tensor in written)
            made = _index_of(parts, {**metadata, "total_size": total}, {INDEX_KEY: text.decode()})
            (temporary / targets[-1]).write_bytes(made.encode())
    return Compression(out, tuple(written), dense, stored, time.monotonic() - started)


def _tensors_of(
    source: nn.Module | Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], _Attached, dict[str, str]]:
    """What is stored under which name, the attached masks, and the names of the same tensors once more.

    An attached mask's tensor is under the name of the weight that it makes; what the mask hides is still in it.
    """
    module = isinstance(source, nn.Module)
    state = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else dict(source)
    for name, tensor in state.items():
        _check_plain(name, tensor)
    attached = _Attached()
    if isinstance(source, nn.Module):
        for original, mask in attached_masks(source, list(state)).items():
            name = original.removesuffix("_orig")
            attached.stored[name] = mask
            state = {name if key == original else key: tensor for key, tensor in state.items() if key != f"{name}_mask"}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        same = first.setdefault((_identity(tensor), module and name in attached), name)
        if same == name:
            tensors[name] = tensor
        else:
            tied[name] = same
    attached.stored = {name: mask for name, mask in attached.stored.items() if name in tensors}
    return tensors, attached, tied


class _Attached(Mapping[str, Tensor]):
    """Masks of any dtype as bool ones, each made on access."""

    def __init__(self) -> None:
        self.stored: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        mask = whole(self.stored[name]).detach()
        return mask if mask.dtype == torch.bool else mask.ne(0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:  # Mapping's own would make the mask
        return name in self.stored


def _check_plain(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}, and only tensors can be stored without pickling.")
    if is_lazy(tensor):
        raise ValueError(f"{name} is not initialized yet; run the model once.")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values to store.")
    if tensor.layout != torch.strided or tensor.is_quantized or dtype_word(tensor.dtype) is None:
        raise TypeError(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}; safetensors holds dense, plain ones.")


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same memory, seen in the same way."""
    if tensor.is_meta or not tensor.numel() or is_sharded(tensor):
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _header_for(tensors: Mapping[str, Tensor]) -> bytes:
    """The header with which safetensors would save them: the widest first, so that each is aligned, then by name."""
    fields: dict[str, dict[str, Any]] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        stop = at + tensor.numel() * tensor.element_size()
        fields[name] = {"dtype": dtype_word(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    return header_of(fields, {"format": "pt"})


def _bytes_of(tensor: Tensor) -> Array:
    tensor = whole(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    raw: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def _check_masks(masks: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in masks:
        if name not in shapes:
            raise KeyError(f"there is no tensor {name}, but a mask of it.")
        if not isinstance(masks, Checkpoint):
            check_mask(name, masks[name], shapes[name], also_numbers=False)
            continue
        entry = masks.entries[name]  # read from disk, one at a time, when its weight is
        if entry.torch_dtype != torch.bool:
            raise TypeError(f"{name}: a mask is a bool tensor, not {entry.torch_dtype}.")
        if entry.shape != shapes[name]:
            raise ValueError(f"{name}: a mask of shape {entry.shape} for a weight of shape {shapes[name]}.")


def _check_outside(source: Path, out: Path) -> None:
    here = out.parent.resolve() / out.name
    if here.is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: is, or lies inside, the input {source}; choose a directory outside.")


def _renamed(path: Path, old: str, new: str) -> Path:
    """``path`` with the ending ``old`` of its name, before a possible ``.index.json``, changed to ``new``."""
    ending = INDEX if path.name.endswith(INDEX) else ""
    stem = path.name.removesuffix(ending)
    return path.with_name(stem.removesuffix(old) + new + ending) if stem.endswith(old) else path


def _header_of_file(path: Path) -> bytes:
    with open(path, "rb") as file:  # checked when the checkpoint was opened
        return file.read(int.from_bytes(file.read(8), "little"))


def _index_of(weight_map: Mapping[str, str], metadata: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """An index's text, as transformers writes it."""
    index = {"metadata": dict(metadata), "weight_map": dict(weight_map), **more}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _bytes_reader(checkpoint: Checkpoint) -> Callable[[TensorEntry], Array]:
    return functools.partial(read_whole, _reader(checkpoint))


def _reader(checkpoint: Checkpoint) -> Read:
    def read(entry: TensorEntry, start: int, out: Array) -> None:
        checkpoint.read_into(entry.name, start, out.data)

    return read


# -------------------------------------------------------------------------------------------------------- loading


class CompressedCheckpoint(Mapping[str, Tensor]):
    """The tensors of a compressed checkpoint by name, each read and expanded on every access and held by nobody.

    ``entries`` tells dtype and shape without reading a tensor, ``encodings`` how each is stored, ``masks`` is a lazy
    mapping of the masks that were given when it was written. ``layout`` is ``"secateur"``, ``"compressed-tensors"``, or
    None for a checkpoint that is not compressed, which can be read all the same.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.headers: dict[Path, bytes | None] = {}
        self.tensors: dict[str, StoredTensor | BitmaskTensor] = {}
        self.read = _reader(checkpoint)
        for file in checkpoint.files:
            own = {name: entry for name, entry in checkpoint.entries.items() if entry.path == file}
            found, self.headers[file] = stored_tensors(file, own, checkpoint.metadata[file])
            if twice := found.keys() & self.tensors.keys():
                raise CheckpointError(f"{file}: damaged: {printable(min(twice))} is in another file, too.")
            self.tensors |= found
        self.layout = "secateur" if any(header is not None for header in self.headers.values()) else None
        if self.layout is None and (foreign := bitmask_tensors(checkpoint.entries, self.read)) is not None:
            self.layout, self.tensors = "compressed-tensors", foreign

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Each tensor's dtype and shape."""
        return {name: tensor.entry for name, tensor in self.tensors.items()}

    @property
    def encodings(self) -> dict[str, str]:
        """The name of each tensor's encoding."""
        return {name: tensor.word for name, tensor in self.tensors.items()}

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """The masks that were given to `save_compressed`, read on access."""
        return _Masks(self)

    @property
    def tied(self) -> dict[str, str]:
        """The names of tensors that are stored under another name."""
        return {name: tensor.entry.name for name, tensor in self.tensors.items() if tensor.entry.name != name}

    def raw(self, name: str) -> Array:
        """A tensor's bytes, flat uint8; for dtypes that torch does not have, too."""
        return self.tensors[name].bits(self.read).view(np.uint8)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.tensors[name].entry
        if entry.torch_dtype is None:
            raise CheckpointError(f"{printable(name)} in {entry.path} is {entry.dtype}, which this torch cannot read.")
        raw = self.raw(name)
        if entry.dtype == "BOOL" and raw.max(initial=0) > 1:
            raise CheckpointError(f"{entry.path}: damaged: {printable(name)} holds bools that are neither 0 nor 1.")
        return torch.from_numpy(raw).view(entry.torch_dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.tensors

    def __eq__(self, other: object) -> bool:  # Mapping's own would read everything
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        dense = sum(entry.nbytes for entry in self.entries.values())
        sizes = f"{self.checkpoint.nbytes} of {dense} bytes"
        return f"CompressedCheckpoint({str(self.checkpoint.root)!r}: {len(self)} tensors, {sizes})"


class _Masks(Mapping[str, Tensor]):
    def __init__(self, checkpoint: CompressedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._names = [
            name for name, tensor in checkpoint.tensors.items() if isinstance(tensor, StoredTensor) and tensor.explicit
        ]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensors[name]
        mask = tensor.mask(self._checkpoint.read)
        if mask is None:
            raise KeyError(name)
        return torch.from_numpy(mask).reshape(tensor.entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@overload
def load_compressed(path: str | os.PathLike[str], model: None = None) -> CompressedCheckpoint: ...
@overload
def load_compressed(path: str | os.PathLike[str], model: Model) -> Model: ...
def load_compressed(path: str | os.PathLike[str], model: nn.Module | None = None) -> CompressedCheckpoint | nn.Module:
    """The tensors that `save_compressed` wrote to a file or directory, read on access; or the model that got them.

    Reads the last sparse layouts of compressed-tensors (0.14), and dense safetensors, too. Headers and sizes are
    checked at once, a tensor's content when it is read.

    With a model, names and shapes have to be the model's, each tensor once or more under any of its names, and dtypes
    become the model's. A weight with an attached mask gets both; tensors on the meta device become real. All is read
    before the model is touched, which takes the memory of a second copy.

    Raises:
        CheckpointError: a file that is damaged, or that promises more than its size can justify.
        ValueError: the model does not fit; nothing is changed. ImportError: zstd without the package zstandard.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> done = save_compressed({"weight": torch.eye(100), "bias": -torch.zeros(100)}, file)
    >>> loaded = load_compressed(file)
    >>> loaded.encodings["weight"], loaded["weight"].sum().item(), loaded["bias"][0].item()
    ('csr8', 100.0, -0.0)
    >>> load_compressed(file, nn.Linear(100, 100)).bias[0].item()
    -0.0
    """
    checkpoint = CompressedCheckpoint(_open(Path(path)))
    if model is None:
        return checkpoint
    _load_into(model, checkpoint, Path(path))
    return model


def _open(path: Path) -> Checkpoint:
    """As `open_checkpoint`, but of several checkpoints in a directory the one that was compressed."""
    for name in (f"model{COMPRESSED}", f"model{COMPRESSED}{INDEX}"):
        if path.is_dir() and (path / name).is_file():
            return open_checkpoint(path / name)
    return open_checkpoint(path)


def _load_into(model: nn.Module, checkpoint: CompressedCheckpoint, path: Path) -> None:
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    attached = {
        name: original.removesuffix("_orig")
        for original in attached_masks(model, list(state))
        if original not in checkpoint
        for name in (original, f"{original.removesuffix('_orig')}_mask")
    }
    sources = {name: attached.get(name, name) for name in state}
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(_identity(tensor), []).append(name)
    given = {key: [name for name in names if sources[name] in checkpoint] for key, names in groups.items()}
    for names, words in (
        ([groups[key][0] for key in groups if not given[key]], "lacks"),
        (sorted(checkpoint.tensors.keys() - set(sources.values())), "holds what the model does not have:"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} does not fit the model: it {words} {', '.join(names[:3])}{more}.")
    for name, source in sources.items():
        if source in checkpoint and checkpoint.entries[source].shape != tuple(state[name].shape):
            shapes = f"{checkpoint.entries[source].shape}, in the model {tuple(state[name].shape)}"
            raise ValueError(f"{path} does not fit the model: {source} has shape {shapes}.")
    masks = checkpoint.masks
    values: dict[Any, Tensor] = {}
    for key, names in track(given.items(), "loading", total=len(given)):
        for name in names:
            source, is_mask = sources[name], name in attached and name.endswith("_mask")
            if is_mask and source not in masks:
                raise ValueError(f"{path} has no mask for {source}, which the model masks: detach(model) first.")
            if key in values and checkpoint.tensors[source] is checkpoint.tensors[sources[names[0]]]:
                continue
            value = masks[source] if is_mask else checkpoint[source]
            if key in values and not _same_bits(value, values[key]):
                raise ValueError(f"the model ties {names[0]} and {name}, but in {path} they differ.")
            values.setdefault(key, value)
    with torch.no_grad():
        for key, names in groups.items():
            target = state[names[0]]
            if target.is_meta:
                _replace(model, names, target, values[key])
            else:
                target.copy_(laid_out(values[key].to(target.dtype), target))


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and np.array_equal(_bytes_of(first), _bytes_of(second))


def _replace(model: nn.Module, names: list[str], old: Tensor, new: Tensor) -> None:
    """A tensor on the meta device, under all its names, by a real one."""
    new = new.to(old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for name in names:
        module_name, _, key = name.rpartition(".")
        module = model.get_submodule(module_name)
        (module._parameters if isinstance(new, nn.Parameter) else module._buffers)[key] = new  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------------ expanding


def expand_checkpoint(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Compression:
    """Undo `save_compressed`: the file, or the directory, that it was given, byte for byte.

    A checkpoint in a sparse layout of compressed-tensors 0.14 becomes dense, too; the sparsity leaves its
    ``config.json``, and a quantization of the values stays.

    Raises:
        CheckpointError: a damaged checkpoint, one that is not compressed, or a place that cannot be.
        OSError: a full disk. Nothing is left under ``path``.

    >>> import tempfile
    >>> from safetensors.torch import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "dense").mkdir()
    >>> save_file({"fc.weight": torch.eye(100)}, folder / "dense/model.safetensors")
    >>> done = save_compressed(folder / "dense", folder / "small")
    >>> done = expand_checkpoint(folder / "small", folder / "again")
    >>> (folder / "again/model.safetensors").read_bytes() == (folder / "dense/model.safetensors").read_bytes()
    True
    """
    started, source, path = time.monotonic(), Path(source), Path(path)
    checkpoint = CompressedCheckpoint(_open(source))
    if checkpoint.layout is None:
        raise CheckpointError(f"{source}: is not compressed; there is nothing to expand.")
    files = _expanded_files(checkpoint)
    dense = sum(8 + len(header) + sum(tensor.entry.nbytes for tensor in tensors) for header, tensors in files.values())
    stored = sum(file.stat().st_size for file in files)
    if source.is_dir():
        _expand_directory(checkpoint, files, path)
    elif len(files) != 1:
        raise CheckpointError(f"{source}: an index; give its directory.")
    elif path.is_dir():
        raise CheckpointError(f"{path}: a directory; name the file to write.")
    else:
        with whole_file(path) as file:
            _expand_file(file, checkpoint, files[source][0], track(files[source][1], "expanding"))
    written = [
        Written(tensor.entry.name, tensor.word, tensor.entry.nbytes, tensor.nbytes)
        for _, tensors in files.values()
        for tensor in tensors
    ]
    return Compression(path, tuple(written), dense, stored, time.monotonic() - started)


_Files = dict[Path, tuple[bytes, list[StoredTensor | BitmaskTensor]]]


def _expanded_files(checkpoint: CompressedCheckpoint) -> _Files:
    """For each file its header once it is expanded, and its tensors in the order of their bytes."""
    files: _Files = {}
    for file in checkpoint.checkpoint.files:
        tensors = [
            each for name, each in checkpoint.tensors.items() if each.entry.path == file and each.entry.name == name
        ]
        header = checkpoint.headers[file]
        if header is None and checkpoint.layout == "secateur":
            header = _header_of_file(file)
        elif header is None:
            fields: dict[str, dict[str, Any]] = {}
            at = 0
            for each in tensors:
                offsets = [at, at + each.entry.nbytes]
                fields[each.entry.name] = {
                    "dtype": each.entry.dtype, "shape": list(each.entry.shape), "data_offsets": offsets
                }  # fmt: skip
                at = offsets[1]
            header = header_of(fields, checkpoint.checkpoint.metadata[file])
        files[file] = header, tensors
    return files


def _expand_file(
    file: BinaryIO,
    checkpoint: CompressedCheckpoint,
    header: bytes,
    tensors: Iterable[StoredTensor | BitmaskTensor],
) -> None:
    file.write(len(header).to_bytes(8, "little") + header)
    for tensor in tensors:
        file.writelines(piece.data for piece in tensor.pieces(checkpoint.read))


def _expand_directory(checkpoint: CompressedCheckpoint, files: _Files, out: Path) -> None:
    root, index = checkpoint.checkpoint.root, checkpoint.checkpoint.index
    _check_outside(root, out)
    config = without_sparsity(checkpoint.checkpoint.config) if checkpoint.layout == "compressed-tensors" else None
    skipped = {file.relative_to(root) for file in files}
    names = {file: _renamed(file.relative_to(root), COMPRESSED, WEIGHTS) for file in files}
    if index is not None:
        skipped.add(Path(index.name))
    if config is not None:
        skipped.add(Path("config.json"))
    with new_directory(out) as temporary:
        collections.deque(track(copy_tree(root, temporary, skipped), "copying"), maxlen=0)
        work = [tensor for _, tensors in files.values() for tensor in tensors]
        with contextlib.closing(track(work, "expanding")) as each:
            for file, (header, tensors) in files.items():
                with open(temporary / names[file], "xb") as opened:
                    _expand_file(opened, checkpoint, header, itertools.islice(each, len(tensors)))
        if index is not None:
            weight_map = {tensor.entry.name: names[tensor.entry.path].as_posix() for tensor in work}
            text = _expanded_index(index, weight_map, sum(tensor.entry.nbytes for tensor in work))
            with open(
                temporary / _renamed(Path(index.name), COMPRESSED, WEIGHTS), "x", encoding="utf-8"
            ) as opened_text:
                opened_text.write(text)
        if config is not None:
            (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _expanded_index(index: Path, weight_map: dict[str, str], total: int) -> str:
    parsed = parse_json(index.read_bytes(), index)
    text = parsed.get(INDEX_KEY)
    if isinstance(text, str):
        if parse_json(text.encode(), index).get("weight_map") != weight_map:
            raise CheckpointError(f"{index}: damaged: the index that it keeps is not one of these files.")
        return text
    metadata = parsed.get("metadata")
    return _index_of(weight_map, {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}, {})
