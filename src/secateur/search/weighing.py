"""What each class of groups is worth in the whole model: its curve measured alone, then weighed by what choices lost.

Law: a curve begins at 0 and never falls; weights are above 0, and say what was measured where it says enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from secateur.search.evolution import Choice

__all__ = ["looked_at", "measured_curve", "weighed", "weights_of"]

_LEAST = 0.1  # of the weight that a class began with
_FAR = 3.0  # times the least loss: what loses more counts as if it lost so much, and for less
_FAR_TRUST = 0.1
_CALM = 0.5  # of the deviation of a draw


def looked_at(size: int) -> tuple[int, ...]:
    """The levels of a class that are measured alone: a third and two thirds of the way.

    >>> looked_at(2), looked_at(4), looked_at(19)
    ((1,), (1, 2), (6, 12))
    """
    last = size - 1
    return tuple(sorted({max(1, last // 3), max(1, 2 * last // 3)})) if last else ()


def measured_curve(predicted: Sequence[float], measured: Mapping[int, float], ratio: float = 1.0) -> list[float]:
    """The predicted losses of a class, as many times as large as what was measured at some levels; between these the
    logarithm of how many times goes straight.

    Args:
        predicted: of each level; 0 is dense.
        measured: ``{level: what the model loses}``; what is not finite counts as not measured.
        ratio: how many times where nothing was measured.

    >>> [round(each, 3) for each in measured_curve([0, 1, 2, 4], {1: 2.0, 3: 32.0})]
    [0.0, 2.0, 8.0, 32.0]
    """
    tiny = 1e-12 * max(predicted, default=0.0)
    known = {at: lost for at, lost in measured.items() if 0 < lost < math.inf and predicted[at] > tiny}
    if not known:
        return [float(each) * ratio for each in predicted]
    places = sorted(known)
    logs = np.interp(range(len(predicted)), places, [math.log(known[at] / predicted[at]) for at in places])
    found = np.asarray(predicted, dtype=np.float64) * np.exp(logs)
    return [float(each) for each in np.maximum.accumulate(found)]


def weighed(curves: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """Each class' losses times its weight."""
    return [[each * weight for each in its] for its, weight in zip(curves, weights, strict=True)]


def weights_of(
    curves: Sequence[Sequence[float]],
    lost: Mapping[Choice, float],
    *,
    spread: float,
    noise: float,
    draw: np.random.Generator | None = None,
) -> list[float]:
    """What the curve of each class counts, so that their sums are what choices lost.

    SPDY (Frantar & Alistarh 2022, arXiv:2201.13096) tries weights by chance; here they are a posterior: normal around
    one weight for all, which fits best, with errors relative to the losses. Far fewer choices than classes suffice to
    say something.

    Args:
        curves: of each class.
        lost: ``{choice: what the model lost}``; what is not above 0 does not count, and what is
            much more than the least counts less.
        spread: how far a weight is from that of all, as a share of it.
        noise: of a loss, as a share of it.
        draw: for a draw from the posterior instead of its mean.

    >>> found = weights_of([[0, 1], [0, 1]], {(1, 0): 4.0, (0, 1): 2.0}, spread=1.0, noise=0.01)
    >>> [round(each, 1) for each in found]
    [4.0, 2.0]
    """
    some = {choice: loss for choice, loss in lost.items() if any(choice) and 0 < loss < math.inf}
    most = _FAR * min(some.values(), default=0.0)
    rows: list[npt.NDArray[np.float64]] = []
    trust: list[float] = []
    for choice, loss in some.items():
        sums = np.array([curve[at] for curve, at in zip(curves, choice, strict=True)], dtype=np.float64)
        if np.isfinite(sums).all() and sums.any():
            rows.append(sums / min(loss, most))
            trust.append(1.0 if loss <= most else _FAR_TRUST)
    if not rows:
        return [1.0] * len(curves)
    matrix, certain = np.stack(rows), np.array(trust)
    totals = matrix.sum(1)
    scale = float((certain * totals).sum() / (certain * totals**2).sum())
    matrix *= scale
    weighted = matrix.T * certain / noise**2
    precision = weighted @ matrix + np.eye(len(curves)) / spread**2
    mean = np.linalg.solve(precision, weighted @ (1 - matrix.sum(1)))
    if draw is not None:
        mean += _CALM * np.linalg.solve(np.linalg.cholesky(precision).T, draw.standard_normal(len(curves)))
    return [scale * max(_LEAST, 1 + float(each)) for each in mean]
