"""The k largest of each row of a table.

Law: exactly k are kept, and among equal scores the first.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from secateur.selection import sizes
from secateur.selection.overall import keep_largest_overall
from secateur.selection.sizes import in_threads
from secateur.selection.sources import comparable, empty_mask, nan_error, refuse_nan

if TYPE_CHECKING:
    import numpy.typing as npt


def keep_largest(table: Tensor, kept: int | Tensor) -> Tensor:
    """In each row of a table, True for the ``kept`` largest entries.

    Args:
        table: scores of shape (groups, units), any real dtype, any strides; also a DTensor if it has one row.
        kept: how many stay in each row: one integer, or an integer tensor of shape (groups,).

    Returns:
        bool tensor of the table's shape. Among equal scores the first are kept.

    Raises:
        ValueError: a score is NaN, or a count does not lie in 0 … units.
        TypeError: a count is no integer.

    >>> keep_largest(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
    tensor([[False,  True,  True, False]])
    """
    if table.dim() != 2:
        raise ValueError(f"a table of scores has shape (groups, units), not {tuple(table.shape)}.")
    groups, units = table.shape
    if isinstance(kept, Tensor):
        if kept.dtype.is_floating_point or kept.shape != (groups,):
            raise ValueError(f"counts for {groups} groups must be integers of shape ({groups},), not {kept!r}.")
        if groups > 0 and bool(kept.eq(kept[0]).all()):
            kept = int(kept[0])
    lowest, highest = (int(kept.min()), int(kept.max())) if isinstance(kept, Tensor) and groups else (0, 0)
    if not isinstance(kept, Tensor):
        try:
            lowest = highest = kept = operator.index(kept)
        except TypeError:
            raise TypeError(
                f"a count is an integer, or an integer tensor of shape ({groups},), not {kept!r}."
            ) from None
    if not 0 <= lowest <= highest <= units:
        raise ValueError(f"can't keep {lowest if lowest < 0 else highest} of {units} units.")
    if groups == 1 and isinstance(kept, int):
        return keep_largest_overall({"": table}, kept)[""]
    if isinstance(kept, int) and 0 < units <= 8:
        return _keep_by_rank(table, kept)
    rows = max(1, (1 << 22) // max(units, 1))
    counts = kept if isinstance(kept, Tensor) else torch.full((groups,), kept, dtype=torch.int64, device="cpu")
    mask = empty_mask(groups * units, table.device).view(groups, units)
    for start in range(0, groups, rows):
        part = slice(start, start + rows)
        mask[part] = _keep_in_rows(comparable(table[part].detach()), counts[part].to(table.device))
    return mask


def _keep_by_rank(table: Tensor, kept: int) -> Tensor:
    """Few units a row (n:m): an entry's rank is the number of entries that beat it; m(m-1)/2 comparisons of columns."""
    groups, units = table.shape
    mask = empty_mask(groups * units, table.device).view(groups, units)
    on_host = table.device.type == "cpu"
    # on a host long pieces, for threads meet at Python's lock at each of the many short operations
    step = max(1, (8 * sizes.PIECE if on_host else sizes.DEVICE_SEGMENT) // max(units, 1))
    segment = 8 * step

    def work(start: int) -> None:
        with torch.no_grad():
            for first in range(start, min(start + segment, groups), step):
                rows = comparable(table[first : first + step].detach())
                if on_host:
                    _first_of_ranks(rows.numpy(), kept, mask[first : first + step].numpy())
                else:
                    refuse_nan("", rows)
                    mask[first : first + step] = _first_of_ranks_on_device(rows, kept)

    threads = torch.get_num_threads() if on_host and groups > segment else 1
    for _ in in_threads(work, range(0, groups, segment), threads):
        pass
    return mask


def _first_of_ranks(rows: npt.NDArray[Any], kept: int, mask: npt.NDArray[np.bool_]) -> None:
    """Write which entries of (groups, units) have fewer than ``kept`` entries before them; earlier wins a tie."""
    groups, units = rows.shape
    columns = np.empty((units, groups), dtype=rows.dtype)
    np.copyto(columns, rows.T)  # from here on every operation is contiguous
    if columns.size and np.isnan(columns.max()):
        raise nan_error("")
    beaten = np.empty((units, groups), dtype=np.uint8)
    beaten[:] = np.arange(units - 1, -1, -1, dtype=np.uint8)[:, None]  # as if beaten by all that follow
    wins = np.empty(groups, dtype=np.bool_)
    for first in range(units):
        for second in range(first + 1, units):
            np.greater_equal(columns[first], columns[second], out=wins)
            beaten[first] -= wins.view(np.uint8)
            beaten[second] += wins.view(np.uint8)
    np.stack(list(beaten < kept), axis=-1, out=mask)


def _first_of_ranks_on_device(rows: Tensor, kept: int) -> Tensor:
    columns = rows.t().contiguous()
    units = columns.shape[0]
    beaten = torch.zeros(columns.shape, dtype=torch.uint8, device=columns.device)
    for first in range(units):
        for second in range(first + 1, units):
            wins = columns[first] >= columns[second]
            beaten[second] += wins
            beaten[first] += ~wins
    return (beaten < kept).t()


def _keep_in_rows(table: Tensor, kept: Tensor) -> Tensor:
    """Many units a row: each row's k-th score, then ties by position."""
    refuse_nan("", table)
    units = table.shape[1]
    lowest, highest = int(kept.min()), int(kept.max())
    if highest == 0:
        return torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    if lowest == highest:
        threshold = torch.kthvalue(table, units - lowest + 1, dim=1, keepdim=True).values
    else:
        ordered = table.sort(dim=1, descending=True).values
        threshold = ordered.gather(1, (kept - 1).clamp(min=0).unsqueeze(1))
    mask = table > threshold
    ties = table == threshold
    missing = kept.unsqueeze(1) - mask.sum(1, keepdim=True)
    if not bool((ties.sum(1, keepdim=True) == missing).all()):
        ties &= ties.cumsum(1, dtype=torch.int32) <= missing
    return mask | ties
