"""What saving, loading and expanding share: names of files, headers, indexes, and the bytes of tensors. Compressed
checkpoints read: tensors on access, or into a model.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from secateur.checkpoints import Checkpoint, CheckpointError, TensorEntry, open_checkpoint
from secateur.pipeline import attached_masks
from secateur.storage.compressed_files import Read, StoredTensor, stored_tensors
from secateur.storage.encodings import Array
from secateur.support import LazyTensors, laid_out, printable, private, track, whole
from secateur.targets import identity_of

Model = TypeVar("Model", bound=nn.Module)

# ---- What saving, loading and expanding share: names of files, headers, indexes, and the bytes of tensors.
#
# Law: what is written as a name, a header or an index is what safetensors and transformers write and read.

WEIGHTS, COMPRESSED, INDEX = ".safetensors", ".compressed.safetensors", ".index.json"
INDEX_KEY = "secateur"  # of a compressed directory's index, whose value is the text of the index that it replaced


def bytes_of(tensor: Tensor) -> Array:
    tensor = whole(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    raw: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def check_outside(source: Path, out: Path) -> None:
    here = out.parent.resolve() / out.name
    if here.is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: is, or lies inside, the input {source}; choose a directory outside.")


def renamed(path: Path, old: str, new: str) -> Path:
    """``path`` with the ending ``old`` of its name, before a possible ``.index.json``, changed to ``new``."""
    ending = INDEX if path.name.endswith(INDEX) else ""
    stem = path.name.removesuffix(ending)
    return path.with_name(stem.removesuffix(old) + new + ending) if stem.endswith(old) else path


def header_of_file(path: Path) -> bytes:
    with open(path, "rb") as file:  # checked when the checkpoint was opened
        return file.read(int.from_bytes(file.read(8), "little"))


def index_of(weight_map: Mapping[str, str], metadata: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """An index's text, as transformers writes it."""
    index = {"metadata": dict(metadata), "weight_map": dict(weight_map), **more}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def reader(checkpoint: Checkpoint) -> Read:
    return functools.partial(_read, checkpoint)  # not a function within: that could not be pickled


def _read(checkpoint: Checkpoint, entry: TensorEntry, start: int, out: Array) -> None:
    checkpoint.read_into(entry.name, start, out.data)


def open_either(path: Path) -> Checkpoint:
    """As `open_checkpoint`, but of several checkpoints in a directory the one that was compressed."""
    for name in (f"model{COMPRESSED}", f"model{COMPRESSED}{INDEX}"):
        if path.is_dir() and (path / name).is_file():
            return open_checkpoint(path / name)
    return open_checkpoint(path)


# ---- Compressed checkpoints read: tensors on access, or into a model.
#
# Law: everything is read before a model is touched, and every bit of what was saved comes back.


class CompressedCheckpoint(LazyTensors):
    """The tensors of a compressed checkpoint by name, each read and expanded on every access and held by nobody.

    ``entries`` tells dtype and shape without reading a tensor, ``encodings`` how each is stored, ``masks`` is a lazy
    mapping of the masks that were given when it was written. One that is not compressed (``is_compressed`` says it) can
    be read all the same.

    >>> import tempfile
    >>> from secateur import sparsify
    >>> from secateur.checkpoints import open_checkpoint
    >>> from secateur.storage import save_compressed
    >>> model = nn.Linear(64, 64)
    >>> masks = sparsify(model, 0.9)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = save_compressed(model, Path(folder, "small.safetensors"))
    ...     found = CompressedCheckpoint(open_checkpoint(done.out))
    ...     found.encodings["weight"], torch.equal(found["weight"], model.weight)
    ('csr8', True)
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.headers: dict[Path, bytes | None] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.read = reader(checkpoint)
        for file in checkpoint.files:
            own = {name: entry for name, entry in checkpoint.entries.items() if entry.path == file}
            found, self.headers[file] = stored_tensors(file, own, checkpoint.metadata[file])
            if twice := found.keys() & self.tensors.keys():
                raise CheckpointError(f"{file}: damaged: {printable(min(twice))} is in another file, too.")
            self.tensors |= found
        self.is_compressed = any(header is not None for header in self.headers.values())

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

    @property
    def known(self) -> Mapping[str, StoredTensor]:
        return self.tensors

    def __repr__(self) -> str:
        dense = sum(entry.nbytes for entry in self.entries.values())
        sizes = f"{self.checkpoint.nbytes} of {dense} bytes"
        return f"CompressedCheckpoint({str(self.checkpoint.root)!r}: {len(self)} tensors, {sizes})"


class _Masks(LazyTensors):
    def __init__(self, checkpoint: CompressedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._stored = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.explicit}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._stored[name]
        mask = tensor.mask(self._checkpoint.read)
        if mask is None:
            raise KeyError(name)
        return torch.from_numpy(mask).reshape(tensor.entry.shape)

    @property
    def known(self) -> Collection[str]:
        return self._stored


@overload
def load_compressed(path: str | os.PathLike[str], model: None = None) -> CompressedCheckpoint: ...


@overload
def load_compressed(path: str | os.PathLike[str], model: Model) -> Model: ...


def load_compressed(path: str | os.PathLike[str], model: nn.Module | None = None) -> CompressedCheckpoint | nn.Module:
    """The tensors that `save_compressed` wrote to a file or directory, read on access; or the model that got them.

    Reads dense safetensors, too. Headers and sizes are checked at once, a tensor's content when it is read.

    With a model, names and shapes have to be the model's, each tensor once or more under any of its names, and dtypes
    become the model's. A weight with an attached mask gets both; tensors on the meta device become real. All is read
    before the model is touched, which takes the memory of a second copy.

    Raises:
        CheckpointError: a file that is damaged, or that promises more than its size can justify.
        ValueError: the model does not fit; nothing is changed. ImportError: zstd without the package zstandard.

    >>> import tempfile
    >>> from secateur.storage import save_compressed
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> done = save_compressed({"weight": torch.eye(100), "bias": -torch.zeros(100)}, file)
    >>> loaded = load_compressed(file)
    >>> loaded.encodings["weight"], loaded["weight"].sum().item(), loaded["bias"][0].item()
    ('csr8', 100.0, -0.0)
    >>> load_compressed(file, nn.Linear(100, 100)).bias[0].item()
    -0.0
    """
    checkpoint = CompressedCheckpoint(open_either(Path(path)))
    if model is None:
        return checkpoint
    _load_into(model, checkpoint, Path(path))
    return model


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
        groups.setdefault(identity_of(tensor), []).append(name)
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
    return first.dtype == second.dtype and np.array_equal(bytes_of(first), bytes_of(second))


def _replace(model: nn.Module, names: list[str], old: Tensor, new: Tensor) -> None:
    """A tensor on the meta device, under all its names, by a real one."""
    new = new.to(old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for name in names:
        module_name, _, key = name.rpartition(".")
        module = model.get_submodule(module_name)
        (private.parameters_of(module) if isinstance(new, nn.Parameter) else private.buffers_of(module))[key] = new  # type: ignore[assignment]
