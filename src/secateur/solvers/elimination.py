"""The target weight of a layer whose inputs are no longer those of the dense model. Inputs of a layer that leave one
after the other, while those that stay take over what they gave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secateur.solvers.gram import checked, cholesky_in_place, is_finite, not_a_gram, once_for, over_scale, scale_of

# ---- The target weight of a layer whose inputs are no longer those of the dense model.
#
# Law: without a residual the target is the weight itself; the result is in float32 or wider, and no argument changes.


def aimed(weight: Tensor, residual_cross: Tensor, *, gram: Tensor, aim: float = 1.0, damping: float = 0.01) -> Tensor:
    """The target weight ``W + a Z (X'ᵀX' + λ)⁻¹`` for the pruned model's inputs X': by least squares its outputs are a
    of the way from ``X' Wᵀ`` to the wanted outputs T; Z is ``(T - X' Wᵀ)ᵀ X'``.

    A solver that is given this weight, and the Gram matrix of X', prunes towards those outputs: as GPTAQ does for
    quantization (arXiv:2504.02692), where T are the dense layer's outputs ``X Wᵀ``.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        residual_cross: Z, of the same shape.
        gram: ``X'ᵀX'``, (inputs, inputs). Weights that share it share its factorization.
        aim: a; 0 leaves the weight as it is.
        damping: λ as a fraction of the mean diagonal entry, in [0, 1]; at 0 the matrix must be positive definite.

    Raises:
        ValueError: a shape does not fit, an entry is NaN or infinite, or the matrix is no Gram matrix.

    >>> gram = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> aimed(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]), gram=gram, aim=0.5, damping=0.0)
    tensor([[1.5000, 1.0000]])
    """
    dense = checked(weight, gram)
    if residual_cross.shape != weight.shape:
        raise ValueError(
            f"residual_cross must have the weight's shape {tuple(weight.shape)}, not {tuple(residual_cross.shape)}."
        )
    if not aim or not dense.numel():
        return dense.clone()
    wide = torch.promote_types(dense.dtype, gram.dtype)
    lower = once_for(gram, ("damped", damping, wide), lambda: _damped_factor(gram, damping, wide))
    more = residual_cross.to(torch.promote_types(wide, residual_cross.dtype)) / scale_of(gram)
    moved: Tensor = torch.cholesky_solve(more.to(wide).T, lower).T
    target: Tensor = dense.add(moved.to(dense.dtype), alpha=aim)
    return target


def _damped_factor(gram: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """The Cholesky factor of the Gram matrix over its scale, damped; more where rounding leaves it none."""
    while damping <= 1:
        moved = over_scale(gram, dtype)
        moved.diagonal().add_(damping)
        lower, failed = cholesky_in_place(moved)
        if not bool(failed):
            return lower
        damping = max(damping * 10, 1e-4)
    raise not_a_gram(gram)


# ---- Inputs of a layer that leave one after the other, while those that stay take over what they gave.
#
# Law: at every moment the weight is the least-squares solution on the inputs that are left, so that what others can
# give costs nothing; nothing removed is nothing changed; what is passed in is never written to.

_FEW = 0.7  # of the columns: where no more than so many changed, only these are multiplied
_GAIN = 1e-6  # of what is lost: a swap that gains less is none
_LIGHT = 1e-5  # of each input's own squares: what a copy of an input costs of what the input does


class Elimination:
    """Removes columns of a weight (outputs, inputs), and moves the others so that ``‖X W'ᵀ - T‖²`` grows least.

    ``T = X Wᵀ + a (T' - X Wᵀ)`` lies between the layer's own outputs and T', the outputs that restore the dense model
    (see `aimed`). With ``H = XᵀX + λ`` a set of columns R costs
    ``tr(W_R (H⁻¹)_RR⁻¹ W_Rᵀ)``, and the others become ``W - W_R (H⁻¹)_RR⁻¹ (H⁻¹)_R``: the optimal brain surgeon
    (Hassibi & Stork 1993), for columns as units as in ZipLM (Kurtic et al. 2023, arXiv:2302.04089) and SlimGPT (Ling
    et al. 2024, arXiv:2412.18110). λ pulls each weight towards where it was, not towards 0.

    Args:
        weight: (outputs, inputs), any real floating dtype.
        gram: ``XᵀX``, (inputs, inputs).
        residual_cross: ``(T' - X Wᵀ)ᵀ X``, (outputs, inputs); None for no residual.
        aim: a, from 0 to 1.
        damping: λ of what is aimed at, and of `settled`, as a fraction of the mean diagonal entry, in (0, 1].
        counts: what the squares of each output count, (outputs,); by default 1.
        constant: the last input is the same number for every token, so that a bias gives what it gives: it never
            leaves, and the mean of a column costs nothing.

    Attributes:
        weight: (outputs, inputs), float64: the solution; 0 in the columns that left.

    Raises:
        ValueError: a shape does not fit, an entry is not finite, or the matrix is no Gram matrix.

    The third input is the sum of the others, so nothing is lost with it:

    >>> x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [2.0, 1.0, 3.0]])
    >>> layer = Elimination(torch.tensor([[1.0, 2.0, 3.0]]), x.T @ x, damping=1e-9)
    >>> layer.remove([2])
    >>> layer.weight.round(decimals=3), layer.loss < 1e-5
    (tensor([[4., 5., 0.]], dtype=torch.float64), True)
    """

    def __init__(
        self,
        weight: Tensor,
        gram: Tensor,
        *,
        residual_cross: Tensor | None = None,
        aim: float = 0.0,
        damping: float = 0.01,
        counts: Tensor | None = None,
        constant: bool = False,
    ) -> None:
        dense = checked(weight, gram)
        if residual_cross is not None:
            _check_residual_cross(weight, residual_cross)
        if counts is not None:
            _check_counts(weight, counts)
        if not 0 < damping <= 1:
            raise ValueError(f"damping is a fraction of the mean diagonal entry, in (0, 1]; got {damping}.")
        self.weight = dense.to(torch.float64, copy=True)
        wide = gram.detach().double().contiguous()
        if residual_cross is not None and aim:
            of_it = wide.detach()  # what is remembered for this tensor goes with it
            self.weight = aimed(self.weight, residual_cross.double(), gram=of_it, aim=aim, damping=damping)
            del of_it
        self._scale, self._damping = scale_of(wide), damping
        self._gram = wide / self._scale if wide.data_ptr() == gram.data_ptr() else wide.div_(self._scale)
        self._least = max(10 * torch.finfo(gram.dtype).eps, 1e-12)  # less than this is rounding
        self._light = (_LIGHT * self._gram.diagonal()).clamp_min(self._least)
        lower, failed = cholesky_in_place(_damped(self._gram, self._light))
        while bool(failed):
            self._light = 10 * self._light
            if float(self._light.mean()) > 1:
                raise not_a_gram(gram)
            lower, failed = cholesky_in_place(_damped(self._gram, self._light))
        self._held: Tensor | None = torch.cholesky_inverse(lower, out=lower)
        self._aim = self.weight.clone()
        self._counts = None if counts is None else counts.double().sqrt()[:, None]
        self._constant = constant
        self._gone: set[int] = set()
        self._lost = 0.0  # damping counted

    @property
    def gram(self) -> Tensor:
        """``XᵀX`` over the mean of its diagonal, ``scale``; float64."""
        return self._gram

    @property
    def scale(self) -> Tensor:
        """A scalar tensor."""
        return self._scale

    @property
    def _inverse(self) -> Tensor:
        if self._held is None:
            raise ValueError("no column leaves after `finish`; take a `copy` before.")
        return self._held

    def finish(self) -> None:
        """No column leaves any more; what only that needs, a matrix of (inputs, inputs), is let go."""
        self._held = None

    @property
    def loss(self) -> float:
        """What the outputs lost so far, ``‖·‖²``; what damping alone adds to it is not lost."""
        moved = self._counted(self._aim - self.weight).square().sum(0)
        return max(0.0, self._lost - float(self._scale * (self._light * moved).sum()))

    def lost(self, values: Tensor, counts: Tensor | None = None) -> float:
        """What the outputs lose with these values in the weight's place, ``‖·‖²``; by other counts if given.

        >>> Elimination(torch.ones(1, 2), torch.eye(2)).lost(torch.tensor([[1.0, 3.0]]))
        4.0
        """
        squares = self.squares(values)
        counts = counts if counts is not None or self._counts is None else self._counts[:, 0].square()
        return float((squares if counts is None else squares * counts.to(squares)).sum())

    def squares(self, values: Tensor) -> Tensor:
        """What each output loses with these values in the weight's place; (outputs,), float64.

        >>> Elimination(torch.ones(1, 2), torch.eye(2)).squares(torch.tensor([[1.0, 3.0]]))
        tensor([4.], dtype=torch.float64)
        """
        change = self._aim - values.to(self._aim)
        moved = change.any(0)
        gram = self._gram
        if int(moved.sum()) < _FEW * len(moved):  # such as those that left, where nothing else moved
            at = moved.nonzero()[:, 0]
            change, gram = change[:, at], gram[at][:, at]
        return self._scale * (change @ gram * change).sum(1).clamp_min(0)

    def copy(self) -> Elimination:
        """One of its own, from which other columns may leave."""
        found = copy.copy(self)
        found.weight, found._held, found._gone = self.weight.clone(), self._inverse.clone(), set(self._gone)
        return found

    def costs(self, units: Sequence[Sequence[int]]) -> Tensor:
        """What the outputs would lose with each of these sets of columns, as far as they are there; float64."""
        units = [self._there(unit) for unit in units]
        if len({len(unit) for unit in units}) > 1:
            return self._of_lengths(self.costs, units)
        at = torch.as_tensor(units, device=self.weight.device)  # (units, columns of each)
        if not at.numel():
            return self.weight.new_zeros(len(units))
        if at.shape[1] == 1:
            columns = at[:, 0]
            return (
                self._scale * self._counted(self.weight[:, columns]).square().sum(0) / self._inverse.diagonal()[columns]
            )
        corners = self._inverse[at[:, :, None], at[:, None, :]]
        parts = self._counted(self.weight).T[at]  # (units, columns, outputs)
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(corners), parts, upper=False)
        found: Tensor = self._scale * half.square().sum((1, 2))
        return found

    def alone(self, units: Sequence[Sequence[int]]) -> Tensor:
        """What the outputs would lose with each of these sets of columns if nothing else moved, but for the constant;
        float64."""
        units = [self._there(unit) for unit in units]
        if len({len(unit) for unit in units}) > 1:
            return self._of_lengths(self.alone, units)
        at = torch.as_tensor(units, device=self.weight.device)
        if not at.numel():
            return self.weight.new_zeros(len(units))
        corners = self._gram[at[:, :, None], at[:, None, :]]
        if self._constant:
            means = self._gram[at, -1]
            corners = corners - means[:, :, None] * means[:, None, :] / self._gram[-1, -1]
        parts = self._counted(self.weight).T[at]
        found: Tensor = self._scale * (corners @ parts * parts).sum((1, 2)).clamp_min(0)
        return found

    def _of_lengths(self, cost: Callable[[Sequence[Sequence[int]]], Tensor], units: Sequence[Sequence[int]]) -> Tensor:
        """Of units of several lengths: those that have columns here all at once where they are alike."""
        some = [at for at, unit in enumerate(units) if unit]
        found = self.weight.new_zeros(len(units))
        if len({len(units[at]) for at in some}) == 1:
            found[some] = cost([units[at] for at in some])
            return found
        return torch.cat([cost([unit]) for unit in units])

    def remove(self, columns: Sequence[int]) -> None:
        """These columns leave, all at once."""
        columns, inverse = self._there(columns), self._inverse
        self._gone.update(columns)
        if not columns:
            return
        at = torch.as_tensor(columns, device=self.weight.device)
        lower = torch.linalg.cholesky(inverse[at[:, None], at])
        gone = self.weight[:, at]
        self._lost += float(
            self._scale * torch.linalg.solve_triangular(lower, self._counted(gone).T, upper=False).square().sum()
        )
        rows = inverse[at]
        share = torch.cholesky_solve(rows, lower)
        self.weight.addmm_(gone, share, alpha=-1)
        inverse.addmm_(rows.T, share, alpha=-1)
        self.weight[:, at] = 0
        inverse[at] = 0
        inverse[:, at] = 0

    def gains(self, units: Sequence[Sequence[int]]) -> Tensor:
        """How much less the outputs would lose if each of these sets of columns that left were back; float64.

        With ``g = (T - X W'ᵀ)ᵀ X`` of the columns and ``S = H_RR - H_RK H_KK⁻¹ H_KR``, K those that stay, it is
        ``tr(g S⁻¹ gᵀ)``.

        >>> layer = Elimination(torch.tensor([[3.0, 1.0]]), torch.eye(2))
        >>> layer.remove([0])
        >>> layer.gains([[0], [1]]).round()
        tensor([9., 0.], dtype=torch.float64)
        """
        back = [self._away(unit) for unit in units]
        every = [column for unit in back for column in unit]
        found = self.weight.new_zeros(len(units))
        if not every:
            return found
        crossed, among, given = self._behind(every)
        counted, places = self._counted(crossed), {column: at for at, column in enumerate(every)}
        if all(len(unit) == 1 for unit in back):
            return self._scale * counted.square().sum(0) / (among[every].diagonal() - (among * given).sum(0))
        for number, unit in enumerate(back):
            at = [places[column] for column in unit]
            if at:
                lower = torch.linalg.cholesky(among[unit][:, at] - among[:, at].T @ given[:, at])
                found[number] = torch.linalg.solve_triangular(lower, counted[:, at].T, upper=False).square().sum()
        return self._scale * found

    def restore(self, columns: Sequence[int]) -> None:
        """These columns are back, all at once: what `remove` did to them is taken back, by an update of their rank."""
        columns = self._away(columns)
        if not columns:
            return
        inverse, at = self._inverse, torch.as_tensor(columns, device=self.weight.device)
        crossed, among, given = self._behind(columns)
        lower = torch.linalg.cholesky(among[at] - among.T @ given)
        self._lost -= float(
            self._scale * torch.linalg.solve_triangular(lower, self._counted(crossed).T, upper=False).square().sum()
        )
        own = torch.cholesky_inverse(lower)
        here = crossed @ own  # the new columns
        share = given @ own
        self.weight.addmm_(here, given.T, alpha=-1)
        inverse.addmm_(share, given.T)
        inverse[at] = -share.T
        inverse[:, at] = -share
        inverse[at[:, None], at] = own
        self.weight[:, at] = here
        self._gone.difference_update(columns)

    def _away(self, columns: Sequence[int]) -> list[int]:
        """Those that have left, each once."""
        return [column for column in dict.fromkeys(columns) if column in self._gone]

    def _behind(self, columns: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Of columns that left: (outputs, columns), what the others do not give them; (inputs, columns), their products
        with all inputs, and what the others give of these."""
        at = torch.as_tensor(columns, device=self.weight.device)
        among = self._gram[:, at].clone()
        among[at, torch.arange(len(at), device=at.device)] += self._light[at]
        return (self._aim - self.weight) @ among, among, self._inverse @ among

    def leave(self, columns: Sequence[int]) -> None:
        """These columns leave, for `settled` alone: what the others cost, and where they move, is not kept up."""
        self._gone.update(self._there(columns))
        self.finish()

    def settled(self, tokens: int) -> Tensor:
        """The weight, damped no more than what is lost asks for; (outputs, inputs), float64.

        Damping is worth what is noise to the columns that stay: the share of what left that they cannot give. That is
        found by least squares with next to no damping, over tokens less columns, and where it is less than the damping
        that was asked for, it is the damping. So what they can give all of, such as copies and linear combinations,
        they give to rounding; and where the tokens are no more than the columns, nothing is known of it.

        Args:
            tokens: how many were summed in the Gram matrix.
        """
        if not self._gone:
            return self.weight
        whole = range(self.weight.shape[1])
        stay, gone = (
            torch.as_tensor([at for at in whole if (at in self._gone) is left], device=self.weight.device)
            for left in (False, True)
        )
        among = self._gram[gone]
        gram, left = self._gram[stay][:, stay], self._aim[:, gone]
        crossed = left @ among[:, stay]
        damping = self._damping
        lower, failed = cholesky_in_place(_damped(gram, self._least))
        if tokens > len(stay) and not bool(failed):
            half = torch.linalg.solve_triangular(lower, self._counted(crossed).T, upper=False)
            gave = (self._counted(left) @ among[:, gone] * self._counted(left)).sum()
            residuals = (gave - half.square().sum()).clamp_min(0)
            share = float(residuals / gave) if float(gave) > 0 else 0.0
            damping = min(damping, max(share * tokens / (tokens - len(stay)), self._least))
        del lower
        lower, failed = cholesky_in_place(_damped(gram, damping))
        while bool(failed):
            damping *= 10  # to rounding the matrix is positive definite, as the whole one was
            lower, failed = cholesky_in_place(_damped(gram, damping))
        found = torch.zeros_like(self.weight)
        found[:, stay] = self._aim[:, stay] + torch.cholesky_solve(crossed.T, lower).T
        return found

    def _there(self, columns: Sequence[int]) -> list[int]:
        """Those that have not left, each once."""
        inputs = self.weight.shape[1]
        if wrong := [column for column in columns if not 0 <= column < inputs]:
            raise ValueError(f"a weight of {inputs} inputs has no column {wrong[0]}.")
        return [column for column in dict.fromkeys(columns) if column not in self._gone]

    def _counted(self, rows: Tensor) -> Tensor:
        return rows if self._counts is None else rows * self._counts


def eliminated(
    layers: Sequence[tuple[Elimination, Sequence[Sequence[int]]]], keep: int, chunk: int = 1, swaps: int = 0
) -> tuple[list[int], list[tuple[int, float]]]:
    """Removes units from all layers that share them, the cheapest first, ``chunk`` at a time, until ``keep`` are left.

    Args:
        layers: ``(layer, columns of each unit)``; unit n is the same of all layers.
        keep: how many units stay.
        chunk: how many leave before the costs of the others are computed again.
        swaps: then so many that left come back while as many others leave, half as many whenever that gains nothing:
            OSSCAR (Meng et al. 2024, arXiv:2403.12983). No more is lost than without.

    Returns:
        The units in the order in which they left, with swaps in that of their numbers, and ``(units left, loss so
        far)`` after each time, from before the first.

    >>> x = torch.randn(64, 3) * torch.tensor([3.0, 0.1, 1.0])
    >>> layer = Elimination(torch.ones(2, 3), x.T @ x)
    >>> eliminated([(layer, [[0], [1], [2]])], 1)[0]
    [1, 2]
    """
    if swaps:  # columns that left with something else, such as heads, are not of the units: they stay away
        layers = [(layer, [layer._there(unit) for unit in units]) for layer, units in layers]
    alive = list(range(len(layers[0][1])))

    def lost() -> float:
        return sum(layer.loss for layer, _ in layers)

    left: list[int] = []
    curve = [(len(alive), lost())]
    while len(alive) > keep:
        costs = sum(layer.costs([units[at] for at in alive]) for layer, units in layers)
        assert isinstance(costs, Tensor)
        first = costs.argsort(stable=True)[: min(chunk, len(alive) - keep)].tolist()
        leaving = sorted(alive[at] for at in first)
        for layer, units in layers:
            layer.remove([column for at in leaving for column in units[at]])
        left += [alive[at] for at in first]
        gone = set(leaving)
        alive = [at for at in alive if at not in gone]
        curve.append((len(alive), lost()))
    if swaps:
        left = _swapped(layers, left, swaps)
        curve.append((len(alive), lost()))
    return left, curve


def _swapped(
    layers: Sequence[tuple[Elimination, Sequence[Sequence[int]]]], left: Sequence[int], many: int
) -> list[int]:
    """Of units that left some come back while as many others leave, as long as all layers together lose less."""
    gone, lost = list(left), sum(layer.loss for layer, _ in layers)
    while many and gone and lost > 0:
        gains = sum(layer.gains([units[at] for at in gone]) for layer, units in layers)
        assert isinstance(gains, Tensor)
        back = [gone[at] for at in gains.argsort(descending=True, stable=True)[:many].tolist()]
        for layer, units in layers:
            layer.restore([column for at in back for column in units[at]])
        away = {*gone} - {*back}
        stay = [at for at in range(len(layers[0][1])) if at not in away]
        more, _ = eliminated([(layer, [units[at] for at in stay]) for layer, units in layers], len(stay) - len(back))
        leave = [stay[at] for at in more]
        now = sum(layer.loss for layer, _ in layers)
        if now < lost * (1 - _GAIN):
            gone, lost = sorted(away | {*leave}), now
            continue
        for layer, units in layers:
            layer.restore([column for at in leave for column in units[at]])
            layer.remove([column for at in back for column in units[at]])
        many //= 2
    return gone


def _check_residual_cross(weight: Tensor, residual_cross: Tensor) -> None:
    if residual_cross.shape != weight.shape:
        raise ValueError(
            f"residual_cross must have the weight's shape {tuple(weight.shape)}, not {tuple(residual_cross.shape)}."
        )
    if residual_cross.numel() and not is_finite(residual_cross):
        raise ValueError(f"residual_cross, of shape {tuple(residual_cross.shape)}, holds NaN or infinity.")


def _check_counts(weight: Tensor, counts: Tensor) -> None:
    if counts.shape != weight.shape[:1]:
        raise ValueError(
            f"counts of shape {tuple(counts.shape)} for {weight.shape[0]} outputs; one is needed for each."
        )
    if counts.numel() and not (is_finite(counts) and bool((counts >= 0).all())):
        raise ValueError("counts say how much the squares of each output count: finite, and none below 0.")


def _damped(gram: Tensor, damping: float | Tensor) -> Tensor:
    found = gram.clone()
    found.diagonal().add_(damping)
    return found
