"""Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back. What saving
compressed says on a page: a row a tensor.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

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
    parse_header,
    parse_json,
    read_header,
)
from secateur.pipeline import attached_masks, check_mask
from secateur.report import Reported
from secateur.storage.compressed_files import Written, header_of, read_whole, write_compressed
from secateur.storage.encodings import Array, Bools
from secateur.storage.loading import (
    COMPRESSED,
    INDEX_KEY,
    WEIGHTS,
    CompressedCheckpoint,
    bytes_of,
    check_outside,
    header_of_file,
    index_of,
    open_either,
    reader,
    renamed,
)
from secateur.support import (
    Column,
    LazyTensors,
    Part,
    Table,
    bytes_text,
    naming,
    percent,
    printable,
    track,
    whole,
    whole_file,
)
from secateur.targets import identity_of

# ---- Compressed checkpoints: a pruned model's zeros leave its files, and every bit of what is kept comes back.
#
# Law: `load_compressed` gives the bits that `save_compressed` was given, `expand_checkpoint` the files that it was
# given, byte for byte; one tensor is in memory at a time; a file is there whole or not at all. docs/guides/format.md
# has the format.


@dataclass(frozen=True)
class Compression(Reported):
    """The result of `save_compressed` or `expand_checkpoint`; prints as a table: each tensor's encoding and
    bytes, all files' bytes.

    >>> import tempfile
    >>> from secateur import sparsify
    >>> model = torch.nn.Linear(64, 64)
    >>> masks = sparsify(model, 0.9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = save_compressed(model, Path(folder, "small.safetensors"))
    >>> done.stored < done.dense / 3
    True
    """

    out: Path
    tensors: tuple[Written, ...]
    dense: int
    stored: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes of the compressed files over those of dense ones, headers included."""
        return self.stored / self.dense

    def content(self) -> Iterator[Part]:
        """A row an encoding, a row a tensor, and the bytes of all files."""
        encodings, *said = self.summary()
        told = "Bytes stored, in dense ones, of each tensor; a line joins what differs in numbers alone."
        yield encodings
        yield Table.of(
            "tensors",
            self.tensors,
            Column.name("Tensor", lambda each: each.name),
            Column("Encoding", lambda each: each.encoding),
            *_BYTES,
            title="Tensor by tensor",
        ).drawn("ratio", "What is left of each", told, label="stored")
        yield from said

    def summary(self) -> Iterator[Part]:
        """A row an encoding, and the bytes of all files."""
        kinds: dict[str, list[Written]] = {}
        for each in self.tensors:
            kinds.setdefault(each.encoding, []).append(each)
        yield Table.of(
            "encodings",
            [
                _Sum(kind, len(its), sum(each.dense for each in its), sum(each.stored for each in its))
                for kind, its in sorted(kinds.items())
            ],
            Column("Encoding", lambda each: each.encoding),
            Column.count("Tensors", lambda each: each.tensors),
            *_BYTES,
        )
        yield ""
        sizes = f"{bytes_text(self.stored)} compressed, {bytes_text(self.dense)} dense ({percent(self.ratio)})"
        yield f"Wrote {printable(str(self.out), 1000)}: {sizes}, with headers ({self.seconds:.1f} s)."


class _Sum(NamedTuple):
    encoding: str
    tensors: int
    dense: int
    stored: int


_BYTES = (
    Column.bytes("Dense", lambda each: each.dense),
    Column.bytes("Stored", lambda each: each.stored),
    Column.portion("Ratio", lambda each: each.stored / each.dense if each.dense else None),
)


def save_compressed(
    source: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    masks: Mapping[str, Tensor] | None = None,
    zstd: bool = False,
) -> Compression:
    """Write each tensor in the smallest of dense, bitmask and CSR; `load_compressed` gives every bit back.

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
    >>> from secateur.storage import load_compressed
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
            return bytes_of(tensor)

        work = _Work(
            header,
            list(parse_header(header, path)[0].values()),
            read,
            ChainMap(cast(MutableMapping[str, Tensor], given), cast(MutableMapping[str, Tensor], attached)),
            tied,
        )
        return _compress_file(work, path, zstd, started)
    checkpoint = open_either(Path(source))
    if CompressedCheckpoint(checkpoint).is_compressed:
        raise CheckpointError(f"{source}: compressed already; expand it first.")
    _check_masks(given, {name: entry.shape for name, entry in checkpoint.entries.items()})
    if Path(source).is_dir():
        return _compress_directory(checkpoint, path, given, zstd, started)
    if checkpoint.index is not None:
        raise CheckpointError(f"{source}: an index; give its directory.")
    header = header_of_file(checkpoint.files[0])
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
    check_outside(root, out)
    files = {file: renamed(file.relative_to(root), WEIGHTS, COMPRESSED) for file in checkpoint.files}
    index = checkpoint.index
    targets = [*files.values(), *([] if index is None else [renamed(Path(index.name), WEIGHTS, COMPRESSED)])]
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
                work = _Work(header_of_file(file), own, _bytes_reader(checkpoint), masks, {})
                with naming(temporary / target), open(temporary / target, "xb") as opened:
                    written += work.write(opened, temporary, zstd, itertools.islice(entries, len(own)))
                parts |= dict.fromkeys(read_header(temporary / target)[0], str(target.as_posix()))
                dense += work.dense
                stored += (temporary / target).stat().st_size
        if index is not None:
            text = index.read_bytes()
            metadata = parse_json(text, index).get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            total = sum(tensor.stored for tensor in written)
            made = index_of(parts, {**metadata, "total_size": total}, {INDEX_KEY: text.decode()})
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
        same = first.setdefault((identity_of(tensor), module and name in attached), name)
        if same == name:
            tensors[name] = tensor
        else:
            tied[name] = same
    attached.stored = {name: mask for name, mask in attached.stored.items() if name in tensors}
    return tensors, attached, tied


class _Attached(LazyTensors):
    """Masks of any dtype as bool ones, each made on access."""

    def __init__(self) -> None:
        self.stored: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        mask = whole(self.stored[name]).detach()
        return mask if mask.dtype == torch.bool else mask.ne(0)

    @property
    def known(self) -> Mapping[str, Tensor]:
        return self.stored


def _check_plain(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}, and only tensors can be stored without pickling.")
    if is_lazy(tensor):
        raise ValueError(f"{name} is not initialized yet; run the model once.")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values to store.")
    if tensor.layout != torch.strided or tensor.is_quantized or dtype_word(tensor.dtype) is None:
        raise TypeError(f"{name} is a tensor of {tensor.dtype}, {tensor.layout}; safetensors holds dense, plain ones.")


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


def _bytes_reader(checkpoint: Checkpoint) -> Callable[[TensorEntry], Array]:
    return functools.partial(read_whole, reader(checkpoint))
