"""The layout in which 16 rows of a sparse matrix walk through its columns together, looking at 32 of them at a time.

Law: `from_windows` of `to_windows` is the matrix, bit for bit, and what `check` lets pass reads nothing outside.

Rows are sorted by how many weights they keep and cut into *slices* of 16 (the *lanes*). In a *step* the 16 lanes look
at the same 32 consecutive columns, and each takes the next weight that it keeps if it lies there, or nothing. The next
step looks from the leftmost weight on that no lane has taken yet. So a weight needs 5 bits to say its column, a vector
unit finds 16 inputs in registers, and lanes that are ahead wait: random weights at 50, 80 and 90 % sparsity take 1.05,
1.2 and 1.4 places each.

Six steps are a *group*, the last of a slice filled up with empty ones:

- ``words`` int32 (groups, 16): for each lane six numbers of 5 bits, the first step's lowest;
- ``moves`` uint8 (groups, 6): by how many columns each step begins after the one before it;
- ``values`` float32 or int8 (groups, 6, 16), or bfloat16 (groups, 3, 16, 2), where two steps lie side by side; 0 is
  nothing. Where inputs are rounded, int8 (groups, 96): four of each lane, then two of each;
- ``pointers`` int32 (slices + 1): where each slice's groups begin;
- ``order`` int32 (slices · 16): the row of each lane, or -1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

LANES = 16
WINDOW = 32  # columns that a step looks at
STEPS = 6  # numbers of 5 bits in a word of 32
_FOUR = 4  # steps whose inputs are multiplied at once where they are rounded
_FARTHEST = 255  # columns that a step can go on


def to_windows(weight: Tensor, *, in_fours: bool = False) -> dict[str, Tensor]:
    """The layout's tensors of a weight (rows, columns) with zeros; values are float32 if not bfloat16 or int8.

    ``in_fours``: as they are where inputs are rounded; of a weight in int8.

    >>> windows = to_windows(torch.eye(3))
    >>> {name: tuple(tensor.shape) for name, tensor in windows.items()}
    {'words': (1, 16), 'moves': (1, 6), 'values': (1, 6, 16), 'pointers': (2,), 'order': (16,)}
    >>> torch.equal(from_windows(**windows, rows=3, columns=3), torch.eye(3))
    True
    """
    rows = weight.shape[0]
    weight = weight.detach()
    kept = weight.ne(0).cpu()
    counts = kept.sum(1)
    order = counts.sort(stable=True).indices
    order = functional.pad(order, (-rows % LANES, 0), value=-1)  # in the first slice, beside the shortest rows
    places, moves, taken = _walk(kept.numpy()[order.numpy()] & (order >= 0).numpy()[:, None])
    steps, slices, _ = places.shape
    longest = steps // STEPS
    last = (taken.any(2) * np.arange(1, steps + 1)[:, None]).max(0, initial=0)  # a step may take nothing to come closer
    groups = -(-last // STEPS)  # of each slice
    used = np.arange(longest) < groups[:, None]  # (slices, groups of the longest)
    shifts = 5 * np.arange(STEPS, dtype=np.uint32)[:, None, None]
    shifted = places.astype(np.uint32).reshape(longest, STEPS, slices, LANES) << shifts
    words = np.bitwise_or.reduce(shifted, axis=1).transpose(1, 0, 2)[used]
    values = torch.zeros(slices, LANES, steps, dtype=weight.dtype, device="cpu")
    sources = weight.cpu()[order]  # a row of -1 is another row, but nothing of it is taken
    lanes = torch.from_numpy(np.ascontiguousarray(taken.transpose(1, 2, 0)))
    values[lanes] = sources[kept[order] & (order >= 0)[:, None]]
    values = values.reshape(slices, LANES, longest, STEPS).permute(0, 2, 3, 1)[torch.from_numpy(used)]
    if in_fours:
        fours, twos = values[:, :_FOUR].transpose(1, 2), values[:, _FOUR:].transpose(1, 2)
        values = torch.cat([fours.flatten(1), twos.flatten(1)], 1)
    made = {
        "words": torch.from_numpy(words.view(np.int32)),
        "moves": torch.from_numpy(moves.reshape(longest, STEPS, slices).transpose(2, 0, 1)[used]),
        "values": laid_out(values if values.dtype in (torch.bfloat16, torch.int8) else values.float()),
        "pointers": torch.from_numpy(np.concatenate([[0], groups.cumsum()]).astype(np.int32)),
        "order": order.to(torch.int32),
    }
    return {name: tensor.to(weight.device) for name, tensor in made.items()}


def laid_out(values: Tensor) -> Tensor:
    """Values in the shape that belongs to their dtype, after a change of it.

    >>> laid_out(torch.zeros(5, 6, 16, dtype=torch.bfloat16)).shape
    torch.Size([5, 3, 16, 2])
    """
    if values.dtype == torch.bfloat16 and values.dim() == 3:
        values = values.reshape(-1, STEPS // 2, 2, LANES).transpose(2, 3)
    elif values.dtype != torch.bfloat16 and values.dim() == 4:
        values = values.transpose(2, 3).reshape(-1, STEPS, LANES)
    return values.contiguous()


def _walk(kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places (steps, slices, 16) in 0…31, moves (steps, slices) and who took something (steps, slices, 16).

    All slices walk at once; the number of steps is that of the longest, up to the next multiple of six.
    """
    lanes, columns = kept.shape
    slices = lanes // LANES
    counts = kept.sum(1)
    end = columns + WINDOW  # the column of a lane that has taken all
    upcoming = np.full((lanes, int(counts.max(initial=0)) + 1), end, dtype=np.int32)
    row, column = kept.nonzero()
    first = counts.cumsum() - counts
    upcoming[row, np.arange(len(row)) - first[row]] = column
    at = np.arange(lanes) * upcoming.shape[1]
    base = np.zeros(slices, dtype=np.int32)
    farthest = max(columns - WINDOW, 0)
    places: list[np.ndarray] = []
    moves: list[np.ndarray] = []
    taken: list[np.ndarray] = []
    while True:
        following = upcoming.reshape(-1)[at].reshape(slices, LANES)
        leftmost = following.min(1)
        if not (leftmost < end).any():
            break
        new_base = np.where(leftmost < end, np.minimum(np.minimum(leftmost, farthest), base + _FARTHEST), base)
        place = following - new_base[:, None]
        takes = place < WINDOW
        places.append(np.where(takes, place, 0).astype(np.uint8))
        moves.append((new_base - base).astype(np.uint8))
        taken.append(takes)
        at += takes.reshape(-1)
        base = new_base
    empty = -len(places) % STEPS
    shape = (len(places) + empty, slices)
    filled = np.zeros((*shape, LANES), np.uint8), np.zeros(shape, np.uint8), np.zeros((*shape, LANES), bool)
    for step, found in enumerate(zip(places, moves, taken, strict=True)):
        for array, part in zip(filled, found, strict=True):
            array[step] = part
    return filled


def from_windows(
    words: Tensor, moves: Tensor, values: Tensor, pointers: Tensor, order: Tensor, *, rows: int, columns: int
) -> Tensor:
    """The weight (rows, columns) of the layout's tensors, in the dtype of their values."""
    groups = words.shape[0]
    lengths = pointers.diff().long()
    slices = torch.arange(lengths.shape[0], device=words.device).repeat_interleave(lengths)  # of each group
    columns_before = functional.pad(moves.long().reshape(-1).cumsum(0), (1, 0))
    base = columns_before[1:].view(groups, STEPS) - columns_before[pointers[:-1].long() * STEPS][slices][:, None]
    shifts = 5 * torch.arange(STEPS, device=words.device)
    places = (words[:, None, :] >> shifts[:, None]) & (WINDOW - 1)
    if values.dim() == 4:
        values = values.transpose(2, 3).reshape(groups, STEPS, LANES)  # of step and lane
    if values.dim() == 2:
        fours, twos = values[:, : _FOUR * LANES].view(groups, LANES, _FOUR), values[:, _FOUR * LANES :]
        values = torch.cat([fours, twos.view(groups, LANES, STEPS - _FOUR)], 2).transpose(1, 2)
    row = order.long().view(-1, LANES)[slices][:, None, :].expand(values.shape)
    taken = values.ne(0) & (row >= 0)
    weight = values.new_zeros(rows, max(columns, WINDOW))
    weight.index_put_((row[taken], (base[..., None] + places)[taken]), values[taken], accumulate=True)
    return weight[:, :columns].contiguous()


def check(
    words: Tensor, moves: Tensor, values: Tensor, pointers: Tensor, order: Tensor, *, rows: int, columns: int
) -> None:
    """Raises ValueError unless a product with ``columns`` inputs reads and writes only what is there, each row once."""
    slices, groups = -(-rows // LANES), words.shape[0] if words.dim() else 0
    of_values: tuple[int, ...] = (groups, STEPS, LANES)
    if values.dtype == torch.bfloat16:
        of_values = (groups, STEPS // 2, LANES, 2)
    elif values.dtype == torch.int8 and values.dim() == 2:
        of_values = (groups, STEPS * LANES)
    expected: list[tuple[str, Tensor, tuple[torch.dtype, ...], tuple[int, ...]]] = [
        ("words", words, (torch.int32,), (groups, LANES)),
        ("moves", moves, (torch.uint8,), (groups, STEPS)),
        ("values", values, (torch.float32, torch.bfloat16, torch.int8), of_values),
        ("pointers", pointers, (torch.int32,), (slices + 1,)),
        ("order", order, (torch.int32,), (slices * LANES,)),
    ]
    for name, tensor, dtypes, shape in expected:
        if tensor.dtype not in dtypes or tensor.shape != shape:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"{name} of {groups} groups and {rows} rows are {kinds} of shape {shape}, not {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}."
            )
    where = pointers.detach().cpu().numpy()
    if where[0] != 0 or where[-1] != groups or (where[1:] < where[:-1]).any():
        raise ValueError(f"the pointers do not rise from 0 to {groups}, the number of groups.")
    lanes = order.detach().cpu().numpy()
    named = lanes[lanes >= 0]
    if lanes.min(initial=0) < -1 or len(named) != rows or not np.array_equal(np.sort(named), np.arange(rows)):
        raise ValueError(f"the order does not name each of {rows} rows once, with -1 in the other lanes.")
    columns_before = np.concatenate([[0], moves.detach().cpu().numpy().sum(1, dtype=np.int64).cumsum()])
    farthest = int(np.diff(columns_before[where]).max(initial=0)) + WINDOW
    if groups and farthest > max(columns, WINDOW):
        raise ValueError(f"the moves lead to input {farthest}, but there are {columns}.")
