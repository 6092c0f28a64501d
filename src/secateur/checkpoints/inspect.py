"""Which axes of a stored tensor are a layer's outputs and inputs. What is in a checkpoint: sizes, zeros, and the
tightest sparsity patterns that hold.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from secateur.checkpoints.reading import Checkpoint, TensorEntry, open_checkpoint
from secateur.checkpoints.results import inspected
from secateur.report import Reported
from secateur.support import Part, track
from secateur.targets import is_expert

# ---- Which axes of a stored tensor are a layer's outputs and inputs.
#
# Law: `from_rows(to_rows(tensor))` is the tensor. Every pattern is defined on (outputs, inputs, ...), the layout of
# `nn.Linear` and of the convolutions; a checkpoint that stores something else is turned here, and nowhere else.

# transformers' Conv1D computes x @ W: these models store (inputs, outputs).
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_NAMES = re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$")
# Fused experts computed as torch.bmm(x, W): (experts, inputs, outputs).
_BMM_MODELS = frozenset({"llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text"})
_EXPERTS_DOWN = re.compile(r"down|output|w2")


@dataclass(frozen=True)
class Layout:
    """How a stored tensor becomes (outputs, inputs, ...) and back.

    ``inputs_first``: stored (inputs, outputs) instead of (outputs, inputs). ``experts``: the first axis counts experts,
    each with a matrix of its own; all their outputs become one axis.

    >>> import torch
    >>> stored = torch.arange(6).reshape(2, 3)  # GPT-2: 2 inputs, 3 outputs
    >>> layout = Layout((2, 3), inputs_first=True)
    >>> layout.to_rows(stored).shape
    torch.Size([3, 2])
    >>> torch.equal(layout.from_rows(layout.to_rows(stored)), stored)
    True
    """

    shape: tuple[int, ...]
    inputs_first: bool = False
    experts: bool = False

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """(outputs, inputs, ...): the shape of ``to_rows(tensor)``."""
        if self.experts:
            count, first, second = self.shape
            return (count * second, first) if self.inputs_first else (count * first, second)
        return self.shape[::-1] if self.inputs_first else self.shape

    def to_rows(self, tensor: Tensor) -> Tensor:
        """The stored tensor as (outputs, inputs, ...); a view where that is possible."""
        if self.inputs_first:
            tensor = tensor.transpose(-2, -1)
        return tensor.flatten(0, 1) if self.experts else tensor

    def from_rows(self, tensor: Tensor) -> Tensor:
        """The inverse of `to_rows`: back to the stored shape."""
        if self.experts:
            tensor = tensor.reshape(self.shape[0], -1, tensor.shape[-1])
        return tensor.transpose(-2, -1) if self.inputs_first else tensor


def layout_of(name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> Layout:
    """The layout of the tensor ``name`` in a checkpoint with this ``config.json``; ``{}`` where there is none.

    (outputs, inputs, ...) but for two cases. In GPT-2 and its kin, known by ``model_type``, the weights of ``c_attn``,
    ``c_proj`` and ``c_fc`` are (inputs, outputs). A 3-D tensor of fused ``experts`` is one matrix for each expert; the
    config's ``hidden_size`` tells which axis is which, and the ``model_type`` where it cannot.

    >>> layout_of("h.0.attn.c_attn.weight", (768, 2304), {"model_type": "gpt2"}).rows_shape
    (2304, 768)
    >>> layout_of("h.0.attn.c_attn.weight", (6144, 2048), {"model_type": "gpt_bigcode"}).rows_shape
    (6144, 2048)
    """
    model = str(config.get("model_type"))
    if len(shape) == 2 and model in _CONV1D_MODELS and _CONV1D_NAMES.search(name):
        return Layout(shape, inputs_first=True)
    if len(shape) == 3 and 0 not in shape and is_expert(name):
        return Layout(shape, inputs_first=_experts_are_inputs_first(name, shape, config), experts=True)
    return Layout(shape)


def _experts_are_inputs_first(name: str, shape: tuple[int, ...], config: Mapping[str, object]) -> bool:
    text = config.get("text_config")
    hidden = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, Mapping) else None)
    _, first, second = shape
    if hidden in (first, second) and first != second:
        hidden_is_output = _EXPERTS_DOWN.search(name.rsplit("experts", 1)[1]) is not None
        return (hidden == second) if hidden_is_output else (hidden == first)
    return str(config.get("model_type")) in _BMM_MODELS


# ---- What is in a checkpoint: sizes, zeros, and the tightest sparsity patterns that hold.
#
# Law: a reported pattern really holds, in every group and every block of the tensor; tensors are read in pieces, so
# that memory stays at a few of them whatever the checkpoint's size.

PIECE = 32 << 20  # bytes read at once
GROUPS = (4, 8, 16)  # the m of n:m


@dataclass(frozen=True)
class TensorInspection:
    """One tensor: ``zeros`` is None where the dtype is opaque; ``n_m``, ``block`` and ``channels`` where nothing holds.

    ``shape`` is as stored; ``inputs_first`` says that its last two axes are (inputs, outputs).

    - ``n_m``: ``(n, m)``, at most n of every m consecutive inputs are not zero.
    - ``block``: ``(height, width)``, the tile over (outputs, inputs) that is wholly zero or free of zeros everywhere.
    - ``channels``: ``("out" | "in", removed, total)``, the zeros are whole output or input channels.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    zeros: int | None
    n_m: tuple[int, int] | None = None
    block: tuple[int, int] | None = None
    channels: tuple[str, int, int] | None = None
    inputs_first: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float | None:
        """The fraction of exact zeros; None for an opaque or an empty tensor."""
        return None if self.zeros is None or not self.numel else self.zeros / self.numel

    @property
    def pattern(self) -> str:
        """What holds, in words; empty where nothing does.

        >>> TensorInspection("w", "f", (4, 8), "F32", 128, zeros=16, n_m=(2, 4)).pattern
        '2:4'
        """
        words = []
        if self.numel and self.zeros == self.numel:
            words.append("all zero")
        if self.n_m:
            words.append("{}:{}".format(*self.n_m))
        if self.channels:
            words.append("{1} of {2} {0} channels".format(*self.channels))
        if self.block:
            words.append("{}x{} blocks".format(*self.block))
        return ", ".join(words)


@dataclass(frozen=True)
class Total:
    """Sums over some tensors; ``zeros`` and ``counted`` leave out opaque ones."""

    tensors: int
    parameters: int
    nbytes: int
    zeros: int
    counted: int

    @property
    def sparsity(self) -> float | None:
        return self.zeros / self.counted if self.counted else None


@dataclass(frozen=True)
class Inspection(Reported):
    """A checkpoint's tensors in natural order (layer 2 before layer 10) and its files; as a string, a table."""

    path: Path
    files: tuple[str, ...]
    tensors: tuple[TensorInspection, ...]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def content(self) -> Iterator[Part]:
        """A row for each tensor, and the totals."""
        return inspected(self)

    def summary(self) -> Iterator[Part]:
        """A row for tensors that differ in numbers alone, and the totals."""
        return inspected(self, group=True)

    def total(self, dtype: str | None = None) -> Total:
        """The sums over all tensors, or over those of one dtype."""
        chosen = [tensor for tensor in self.tensors if dtype in (None, tensor.dtype)]
        counted = [tensor for tensor in chosen if tensor.zeros is not None]
        return Total(
            tensors=len(chosen),
            parameters=sum(tensor.numel for tensor in chosen),
            nbytes=sum(tensor.nbytes for tensor in chosen),
            zeros=sum(tensor.zeros or 0 for tensor in counted),
            counted=sum(tensor.numel for tensor in counted),
        )

    @property
    def by_dtype(self) -> dict[str, Total]:
        """The sums for each dtype, largest first."""
        dtypes = {tensor.dtype for tensor in self.tensors}
        totals = ((dtype, self.total(dtype)) for dtype in sorted(dtypes))
        return dict(sorted(totals, key=lambda item: -item[1].nbytes))


def inspect_checkpoint(path: Path | str) -> Inspection:
    """Inspects the checkpoint at ``path``: for every tensor its size, its zeros and the patterns that hold.

    ``path`` is a ``.safetensors`` file, a ``.safetensors.index.json`` or a Hugging Face directory. It is read once, in
    pieces of 32 MB. Raises `secateur.checkpoints.CheckpointError` for a damaged file.

    >>> import pathlib, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save_file({"fc.weight": torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 3.0]])}, file)
    >>> [(t.name, t.sparsity, t.pattern) for t in inspect_checkpoint(file).tensors]
    [('fc.weight', 0.625, '2:4')]
    """
    checkpoint = open_checkpoint(path)
    names = sorted(checkpoint, key=_natural)
    tensors = tuple(inspect_tensor(checkpoint, name) for name in track(names, "inspecting"))
    metadata = {_relative(file, checkpoint): dict(checkpoint.metadata[file]) for file in checkpoint.files}
    return Inspection(Path(path), tuple(metadata), tensors, metadata)


def inspect_tensor(checkpoint: Checkpoint, name: str) -> TensorInspection:
    """One tensor of a checkpoint, read in pieces.

    **n:m** runs along the inputs: dimension 1 of (outputs, inputs, ...), for m of 4, 8 and 16. 2:4 and 1:4, which
    hardware takes, are reported wherever they hold; any other where the non-zeros also fill three quarters of the
    places that it leaves, since 7:16 holds by accident in any small tensor with random zeros. The smallest m is taken,
    and a larger one only where it implies the smaller: a 2:4 tensor is 2:4, a 1:8 tensor is 1:8 and not 1:4.

    **Blocks**: the tile's height is the greatest common divisor of the rows at which zeros begin or end, its width the
    same of the columns (inputs and kernel positions of a convolution together), so it is the largest tile for which
    zero tiles account for every zero. Tiles at the right and lower edge may be cut off.

    **Channels**: the same with a whole row (out) or a whole input (in) for a tile.
    """
    entry = checkpoint.entries[name]
    layout = layout_of(name, entry.shape, checkpoint.config)
    known = {
        "name": name,
        "file": _relative(entry.path, checkpoint),
        "shape": entry.shape,
        "dtype": entry.dtype,
        "nbytes": entry.nbytes,
        "inputs_first": layout.inputs_first,
    }
    if entry.torch_dtype is None:
        return TensorInspection(**known, zeros=None)  # type: ignore[arg-type]
    if len(entry.shape) < 2 or entry.numel == 0:
        zeros = sum(int(torch.count_nonzero(zero)) for zero in zero_pieces(checkpoint, entry))
        return TensorInspection(**known, zeros=zeros)  # type: ignore[arg-type]
    finder = _Finder(entry.shape, experts=layout.experts, inputs_first=layout.inputs_first)
    for zero in _row_pieces(checkpoint, entry, finder.columns * finder.positions):
        finder.add(zero)
    n_m, block, channels = finder.result()
    return TensorInspection(**known, zeros=finder.zeros, n_m=n_m, block=block, channels=channels)  # type: ignore[arg-type]


class _Finder:
    """Sees the zeros of a matrix row by row (top to bottom, in pieces) and tells what patterns hold."""

    def __init__(self, shape: tuple[int, ...], *, experts: bool, inputs_first: bool) -> None:
        if experts:
            self.rows, self.columns, self.positions = shape[0] * shape[1], shape[2], 1
        else:
            self.rows, self.columns, self.positions = shape[0], shape[1], math.prod(shape[2:])
        self.inputs_first = inputs_first
        self.zeros = 0
        inputs = shape[-2] if inputs_first else self.columns
        self.most = {m: 0 for m in GROUPS if inputs % m == 0}  # {m: most non-zeros in any group}
        self.height = 0  # gcd of the rows at which anything changes; 0: nothing does, all rows are alike
        self.width = 0
        self.seen = 0
        self.last: Tensor | None = None  # the zeros of the last row, None where it has none

    def add(self, zero: Tensor) -> None:
        """``zero`` (rows, columns * positions): the next rows; a multiple of 16 of them unless they are the last."""
        count = int(torch.count_nonzero(zero))
        self.zeros += count
        self._count_groups(zero, any_zero=count > 0)
        if count or self.last is not None:
            self._find_runs(zero)
        self.last = zero[-1].clone() if zero[-1].any() else None
        self.seen += len(zero)

    def _count_groups(self, zero: Tensor, any_zero: bool) -> None:
        if all(most == m for m, most in self.most.items()):
            return
        if not any_zero:
            self.most = {m: m for m in self.most}
            return
        kept = (~zero).view(torch.uint8).reshape(len(zero), self.columns, self.positions)
        m = 1
        while m < max(self.most):
            first, second = (kept[::2], kept[1::2]) if self.inputs_first else (kept[:, ::2], kept[:, 1::2])
            kept, m = first + second, 2 * m
            if m in self.most:
                self.most[m] = max(self.most[m], int(kept.max()))

    def _find_runs(self, zero: Tensor) -> None:
        if self.height != 1:
            last = torch.zeros_like(zero[0]) if self.last is None else self.last
            changes = torch.nonzero((zero[1:] != zero[:-1]).any(1)).flatten() + self.seen + 1
            self.height = _gcd(self.height, changes)
            if self.seen and not torch.equal(zero[0], last):
                self.height = math.gcd(self.height, self.seen)
        if self.width != 1:
            changes = torch.nonzero((zero[:, 1:] != zero[:, :-1]).any(0)).flatten() + 1
            self.width = _gcd(self.width, changes)

    def result(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None, tuple[str, int, int] | None]:
        """(n:m, block, channels), each None where nothing holds."""
        if self.zeros in (0, self.rows * self.columns * self.positions):
            return None, None, None
        n_m = self._tightest()
        stored_out, stored_in = ("in", "out") if self.inputs_first else ("out", "in")
        width = self.columns * self.positions
        if self.rows == 1 or width == 1:  # a vector in two dimensions: its channels are its entries
            return n_m, None, None
        if self.width == 0:  # every row is wholly zero or free of zeros
            return n_m, None, (stored_out, self.zeros // width, self.rows)
        if self.height == 0 and self.width % self.positions == 0:
            return n_m, None, (stored_in, self.zeros // (self.rows * self.positions), self.columns)
        block = (self.height or self.rows, self.width)
        if block == (1, 1):
            return n_m, None, None
        return n_m, block[::-1] if self.inputs_first else block, None

    def _tightest(self) -> tuple[int, int] | None:
        found: tuple[int, int] | None = None
        density = 1 - self.zeros / (self.rows * self.columns * self.positions)
        for m, n in self.most.items():
            explains = density >= 0.75 * n / m or (m == 4 and n <= 2)
            if n < m and explains and (found is None or n <= found[0]):
                found = (n, m)
        return found


def _gcd(start: int, positions: Tensor) -> int:
    return math.gcd(start, int(np.gcd.reduce(positions.numpy()))) if positions.numel() else start


def zero_pieces(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[Tensor]:
    """Where a tensor of a readable dtype is +0 or -0: flat bool tensors, in memory order, a piece of the file each."""
    for start in range(0, entry.nbytes, PIECE):
        yield _zeros(checkpoint.raw(entry.name, start, min(start + PIECE, entry.nbytes)), entry)


def _row_pieces(checkpoint: Checkpoint, entry: TensorEntry, columns: int) -> Iterator[Tensor]:
    row = entry.nbytes * columns // entry.numel  # bytes
    step = max(16, PIECE // row // 16 * 16) * row
    for start in range(0, entry.nbytes, step):
        raw = checkpoint.raw(entry.name, start, min(start + step, entry.nbytes))
        yield _zeros(raw, entry).view(-1, columns)


def _zeros(raw: Tensor, entry: TensorEntry) -> Tensor:
    """True where the value is +0 or -0; ``raw`` are the bytes."""
    dtype = entry.torch_dtype
    assert dtype is not None
    if entry.dtype in ("F8_E4M3", "F8_E5M2"):
        return raw.bitwise_and_(0x7F) == 0
    if entry.dtype in ("BOOL", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):  # 0x80 is NaN in FNUZ
        return raw == 0
    unsigned = {"U16": torch.int16, "U32": torch.int32, "U64": torch.int64}
    return raw.view(unsigned.get(entry.dtype, dtype)) == 0


def _relative(file: Path, checkpoint: Checkpoint) -> str:
    return file.relative_to(checkpoint.root).as_posix()


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = (part for part in re.split("([0-9]+)", name) if part)
    return [(0, int(part), "") if part[0] in "0123456789" and len(part) < 19 else (1, 0, part) for part in parts]
