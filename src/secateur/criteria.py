"""How important a weight is: one function a paper, from a weight (and evidence) to scores of its shape; higher = keep.

Law: a criterion reads and never writes, and what it needs beside the weight it names as a keyword without a default.
It says over what its scores compare. Products are taken in float32 or wider, so that halves do not overflow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from secateur.support import function_of

__all__ = [
    "Scope",
    "compares",
    "elementwise",
    "grasp",
    "lamp",
    "ln_norm",
    "magnitude",
    "movement",
    "parse",
    "random",
    "ria",
    "scope_of",
    "snip",
    "soft_movement",
    "synflow",
    "taylor",
    "wanda",
]

Scope = Literal["row", "layer", "model"]

_Criterion = TypeVar("_Criterion", bound=Callable[..., Tensor])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def elementwise(criterion: _Criterion) -> _Criterion:
    """Say that each score depends on its own weight alone, so that it may be computed piece by piece.

    A global threshold then takes no memory of the model's size. A criterion that names evidence is always given whole
    tensors, marked or not, since evidence need not have the weight's shape. Where the attribute ``on_arrays`` is set
    too, the function is handed numpy arrays of float32 or float64 as well, which is faster on a CPU.

    >>> @elementwise
    ... def squared(weight):
    ...     return weight.float() ** 2
    >>> squared.elementwise
    True
    """
    marked: Any = criterion
    marked.elementwise = True
    return criterion


def compares(over: Scope) -> Callable[[_Function], _Function]:
    """Say over what a criterion's scores compare: the weights of one output, of one layer, or of the whole model.

    The narrowest competition that a paper needs is the default of `secateur.sparsify`, `secateur.make_masks` and
    `secateur.Pruner`: "row" means the pattern `Rows` with the allocation `uniform`, "layer" `uniform` alone, and
    "model", which is what holds for a function that does not say it, the allocation `everywhere`.

    >>> @compares("layer")
    ... def relative(weight):
    ...     return weight.abs() / weight.abs().mean()
    >>> relative.compares
    'layer'
    """
    if over not in get_args(Scope):
        raise ValueError(f"scores compare over {', '.join(map(repr, get_args(Scope)))}; got {over!r}.")

    def mark(function: _Function) -> _Function:
        marked: Any = function
        marked.compares = over
        return function

    return mark


def scope_of(function: Callable[..., Any], otherwise: Scope = "model") -> Scope:
    """What `compares` said of a function, also through `functools.partial`; ``otherwise`` where it said nothing.

    >>> scope_of(functools.partial(ria, power=0.3)), scope_of(torch.abs)
    ('layer', 'model')
    """
    while isinstance(function, functools.partial) and not hasattr(function, "compares"):
        function = function.func
    said: Scope = getattr(function, "compares", otherwise)
    return said


def parse(word: str | Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The criterion that a word means, the name of one in this module; a function is returned as it is.

    Raises:
        ValueError: no criterion is called so. TypeError: it is neither a word nor a function.

    >>> parse("wanda") is wanda
    True
    """
    return function_of(word, _words(), "criterion")


# ---- the weight alone ----------------------------------------------------------------------------------------------


@compares("model")
@elementwise
def magnitude(weight: Tensor) -> Tensor:
    """``|w|``: magnitude pruning (Han et al. 2015, arXiv:1506.02626).

    One threshold over the model, which Frankle & Carbin (2018, arXiv:1803.03635) take for deep networks, is at least as
    good as the paper's own for each layer (benchmarks/RESULTS.md).

    Published with: a threshold for each layer, in rounds of pruning and training.

    Args:
        weight: any shape, any real dtype.

    >>> magnitude(torch.tensor([0.5, -2.0]))
    tensor([0.5000, 2.0000])
    """
    return abs(weight)


magnitude.on_arrays = True  # type: ignore[attr-defined]


@compares("layer")
@elementwise
def ln_norm(weight: Tensor, *, n: float = 2.0) -> Tensor:
    """``|w|ⁿ``: Ln norms of channels and blocks (Li et al. 2016, arXiv:1608.08710, for n = 1).

    Pooled over a channel or block by its mean, it ranks the units of a tensor by their Ln norm. In float32 or wider:
    squares of halves overflow at 256. The paper compares the filters of one layer with each other.

    Published with: `Channels`, a number of channels for each layer.

    Args:
        n: positive and finite. For the maximum norm use `magnitude` with a pattern whose ``reduce`` takes the maximum.

    >>> ln_norm(torch.tensor([3.0, -4.0]))
    tensor([ 9., 16.])
    """
    if not 0 < n < float("inf"):
        raise ValueError(f"the order of the norm must be positive and finite, not {n}.")
    sizes = _wide(weight).abs()
    return sizes if n == 1 else sizes**n


@compares("model")
def random(weight: Tensor) -> Tensor:
    """``u ~ U[0, 1)``: random pruning, the baseline that every other has to beat (Liu et al. 2022, arXiv:2202.02643).

    Drawn from torch's CPU generator: the same mask for the same seed on every device. All weights are alike to it, so
    that no competition is too wide.

    Published with: `erk`, whose layer densities make it a strong baseline.

    >>> random(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    return torch.rand(weight.shape, dtype=torch.float32, device="cpu").to(weight.device)


@compares("model")
def lamp(weight: Tensor) -> Tensor:
    """``w_u² / Σ w_v²`` over the v that are not smaller than u: LAMP (Lee et al. 2020, arXiv:2010.07611).

    With a global threshold these scores give each layer its own sparsity. Within a tensor they rank as magnitudes do
    (of equal ones the first counts as larger), and the largest weight scores 1, so that no layer is emptied while
    another keeps two weights. float64, since the sum runs over the whole tensor. An all-zero tensor scores 0.

    Published with: `everywhere`, in rounds of pruning and training.

    >>> lamp(torch.tensor([1.0, -2.0, 3.0]))
    tensor([0.0714, 0.3077, 1.0000], dtype=torch.float64)
    """
    sizes = weight.reshape(-1).abs()
    order = _descending(sizes)
    squared = sizes[order].double()
    squared = squared.div_(squared[:1].clamp(min=torch.finfo(torch.float64).tiny)).square_()  # no underflow
    ratio = squared.div_(squared.cumsum(0).clamp_(min=torch.finfo(torch.float64).tiny))
    return torch.empty_like(ratio).scatter_(0, order, ratio).reshape(weight.shape)


# ---- gradients -----------------------------------------------------------------------------------------------------


@compares("model")
def taylor(weight: Tensor, *, grad_sq: Tensor) -> Tensor:
    """``w² · E[g²]``: first-order Taylor importance (Molchanov et al. 2019, arXiv:1906.10771).

    The squared change of the loss when the weight becomes 0, to first order, averaged over minibatches. A unit's
    importance is the **sum** of its weights' in the paper; patterns pool by the mean, which ranks the same among units
    of one size. To compare channels of different layers as the paper does, pass
    ``Channels(reduce=lambda channels: channels.sum(1))``. The paper's other form, one gate for each channel, needs the
    gates' own gradients and is not this.

    Half of it is optimal brain damage with the Fisher diagonal (LeCun et al. 1989; Theis et al. 2018,
    arXiv:1801.05787): the rise of the loss at a minimum, to second order. The Fisher information is a mean over
    **examples**: with batches of more than one, ``grad_sq`` is the square of a mean gradient, which is smaller and
    noisier; collect with a batch size of 1 where the difference matters.

    Published with: `Channels`, `everywhere`, in many small rounds of pruning and training.

    Args:
        weight: any shape, any real dtype.
        grad_sq: the mean of squared gradients, of the weight's shape.

    >>> taylor(torch.tensor([1.0, -2.0]), grad_sq=torch.tensor([9.0, 1.0]))
    tensor([9., 4.])
    """
    return _wide(weight).square() * _evidence(weight, grad_sq=grad_sq)


@compares("model")
def snip(weight: Tensor, *, grad: Tensor) -> Tensor:
    """``|w · g|``: connection sensitivity, SNIP (Lee et al. 2018, arXiv:1810.02340).

    How much the loss changes as the weight's own gate closes. The paper divides by the sum over the whole network,
    which ranks the same; here there is no such division. For a network at its initialization, before any training; the
    scale of the initialization decides how layers compare, and at high sparsity whole layers may go. Where training has
    ended, the mean gradient is noise, and so are these scores: there take `taylor`.

    Published with: `everywhere`, once, on one batch.

    Args:
        weight: any shape, any real dtype.
        grad: the loss's gradient, of the weight's shape.

    >>> snip(torch.tensor([1.0, -2.0]), grad=torch.tensor([-3.0, 1.0]))
    tensor([3., 2.])
    """
    return (_wide(weight) * _evidence(weight, grad=grad)).abs_()


@compares("model")
def grasp(weight: Tensor, *, hessian_grad: Tensor) -> Tensor:
    """``w · Hg``: gradient signal preservation, GraSP (Wang et al. 2020, arXiv:2002.07376).

    Mind the sign. The paper scores the removal of a weight, ``-w · Hg``, and removes the **largest**: those whose
    removal lowers the norm of the gradient least, or raises it. Here higher = keep, so the sign is turned. Scores of
    both signs are right; do not take magnitudes. For a network at its initialization; the authors' code divides the
    logits by 200 before the loss, which changes H and g, not this formula. On a trained network it is worse than
    chance, whatever competes: what it removes first raises the gradient most, and that is what holds the network at its
    minimum.

    Published with: `everywhere`, once.

    Args:
        weight: any shape, any real dtype.
        hessian_grad: the Hessian times the gradient of the loss, of the weight's shape.

    >>> grasp(torch.tensor([1.0, -2.0]), hessian_grad=torch.tensor([-3.0, -1.0]))
    tensor([-3.,  2.])
    """
    return _wide(weight) * _evidence(weight, hessian_grad=hessian_grad)


@compares("model")
def synflow(weight: Tensor, *, flow: Tensor) -> Tensor:
    """``|w| · ∂R/∂|w|``: synaptic flow (Tanaka et al. 2020, arXiv:2006.05467).

    R is the sum of the outputs for an input of ones, with every weight replaced by its magnitude: no data, no labels.
    float64, since R is a product over layers and leaves float32 at some 40 of them. The scores of a layer add up to R
    in every layer, so one round may empty a narrow layer: the paper prunes in 100 rounds, along
    ``schedules.exponential(sparsity, end=100)``, and computes the flow again in each.

    Published with: `everywhere`, at initialization, 100 rounds.

    Args:
        weight: any shape, any real dtype.
        flow: ``∂R/∂|w|`` of the network with the earlier rounds' masks applied, of the weight's shape.

    >>> synflow(torch.tensor([1.0, -2.0]), flow=torch.tensor([3.0, 4.0]))
    tensor([3., 8.], dtype=torch.float64)
    """
    return weight.double().abs() * _evidence(weight, flow=flow)


@compares("model")
def movement(weight: Tensor, *, movement: Tensor) -> Tensor:
    """``S = -Σ w · ∂L/∂w`` over the steps of training: movement pruning (Sanh et al. 2020, arXiv:2005.07683).

    Positive where the weight moves away from 0, whatever its size: the weights that fine-tuning wants stay, those that
    it shrinks go. The gradient is that of the **masked** weight in the forward pass (``∂L/∂(w ⊙ m)``), also where the
    mask is 0, so that a removed weight can earn its place back; gradients of a dense network are not it. The paper
    learns S with an optimizer of its own, of which this sum is the plain SGD. It finds that comparing over the model
    does as well as within each matrix. A network that has nothing more to learn does not move: there it is noise.

    Published with: the best share of each matrix (`uniform`), while fine-tuning, along `schedules.cubic`.

    Args:
        weight: any shape.
        movement: S, of the weight's shape.

    >>> movement(torch.tensor([5.0, -0.1]), movement=torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """
    return _evidence(weight, movement=movement).clone()


@compares("model")
def soft_movement(weight: Tensor, *, movement: Tensor) -> Tensor:
    """``σ(S)``: soft movement pruning (Sanh et al. 2020, arXiv:2005.07683).

    The scores of `movement` between 0 and 1, for a threshold τ instead of a count: a weight stays where σ(S) > τ, and
    the sparsity follows. The authors' code takes τ = 0.1 and keeps at least 0.5 % of each matrix:
    ``make_masks(weights, 0.995, criterion=soft_movement, allocate=above(0.1), evidence=evidence)``.

    The paper's regularizer, ``λ · Σ σ(S)`` added to the loss, is what makes it sparse, and belongs to the training
    loop. float64, so that scores far from 0 stay apart (up to |S| of about 36).

    Published with: `secateur.allocation.above`, while fine-tuning.

    Args:
        weight: any shape.
        movement: S, of the weight's shape.

    >>> soft_movement(torch.tensor([5.0, -0.1]), movement=torch.tensor([0.0, -3.0]))
    tensor([0.5000, 0.0474], dtype=torch.float64)
    """
    return _evidence(weight, movement=movement).double().sigmoid()


# ---- activations ---------------------------------------------------------------------------------------------------


@compares("row")
def wanda(weight: Tensor, *, input_norm: Tensor) -> Tensor:
    """``|w_ij| · ‖x_j‖₂``: Wanda (Sun et al. 2023, arXiv:2306.11695).

    No gradient and no training: one forward pass over the data. It is meant for comparing the weights of one output
    with each other, which the paper finds better on language models than comparing within a layer. Between layers it
    says nothing: the norm is a sum over tokens, of which a convolution sees one for every position, and its scale is
    the layer's own, so that one threshold over the model may leave a layer a thousandth of its weights.

    How many leave a row is rounded to the nearest, where the authors' code rounds down: of rows of 9, such as those of
    a depthwise convolution, 4 leave at 50 % in both, and at 95 % all 9 here and 8 there.

    Published with: `Rows` and `uniform`, or ``NM(2, 4)`` and ``NM(4, 8)``.

    Args:
        weight: any shape, any real dtype.
        input_norm: the L2 norm of each input over all tokens, broadcastable to the weight: (1, in) for a Linear,
            (1, in, kh, kw) for a convolution, (in, 1) for a weight that is stored transposed.

    >>> wanda(torch.tensor([[1.0, -2.0]]), input_norm=torch.tensor([[10.0, 1.0]]))
    tensor([[10.,  2.]])
    """
    return _wide(weight).abs() * _evidence(weight, input_norm=input_norm)


@compares("layer")
def ria(weight: Tensor, *, input_norm: Tensor, power: float = 0.5) -> Tensor:
    """``(|w_ij| / Σ_j |w_ij| + |w_ij| / Σ_i |w_ij|) · ‖x_j‖₂^a``: relative importance and activations (Zhang et al.
    2024, ICLR).

    A weight counts by its share of its output's and of its input's weights, so that no channel is emptied. Symmetric
    in rows and columns, so that a weight which is stored transposed scores the same. A convolution is seen as
    (outputs, inputs · kernel). A row or column of zeros scores 0. Shares of rows and columns compare within a layer, as
    the authors' code does it; they are larger in small layers, and the input norms keep their layer's scale.

    Published with: `Unstructured` and `uniform`, or ``NM(2, 4)`` after a permutation of the inputs.

    Args:
        weight: one dimension or more, any real dtype.
        input_norm: as for `wanda`.
        power: the exponent a, finite and not negative; 0 leaves the relative importance alone.

    >>> ria(torch.tensor([[1.0, -3.0], [1.0, 1.0]]), input_norm=torch.tensor([[4.0, 1.0]]))
    tensor([[1.5000, 1.5000],
            [2.0000, 0.7500]])
    """
    if not 0 <= power < float("inf"):
        raise ValueError(f"the power of the input norms must be finite and not negative, not {power}.")
    sizes = _wide(weight).abs().contiguous()  # summed in one order, whatever the layout
    tiny = torch.finfo(sizes.dtype).tiny
    rows = sizes.sum(tuple(range(1, sizes.dim())), keepdim=True).clamp_(min=tiny)
    columns = sizes.sum(0, keepdim=True).clamp_(min=tiny)
    return (sizes / rows + sizes / columns) * _evidence(weight, input_norm=input_norm) ** power


# ---- helpers -------------------------------------------------------------------------------------------------------


def _words() -> dict[str, Callable[..., Tensor]]:
    return {name: globals()[name] for name in __all__ if hasattr(globals()[name], "compares")}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _evidence(weight: Tensor, **named: Tensor) -> Tensor:
    """The one piece of evidence, in float32 or wider; ``ValueError`` unless its shape is the weight's.

    Norms of the inputs may also be broadcast. Checked here, because torch would broadcast a wrong shape where it can.
    """
    ((word, evidence),) = named.items()
    pairs = zip(reversed(evidence.shape), reversed(weight.shape), strict=False)
    broadcasts = evidence.dim() <= weight.dim() and all(have in (1, want) for have, want in pairs)
    if evidence.shape != weight.shape and not (word == "input_norm" and broadcasts):
        how = "broadcast to" if word == "input_norm" else "have"
        raise ValueError(
            f"{word} has shape {tuple(evidence.shape)}; it must {how} the weight's, {tuple(weight.shape)}."
        )
    return _wide(evidence)


def _descending(sizes: Tensor) -> Tensor:
    """Positions from the largest to the smallest of non-negative numbers, of equal ones the first first.

    Up to float32 on a CPU the bits of a number and its position make one integer to sort, which numpy does with the
    processor's widest registers: 4 to 5 times faster than a stable sort with indices.
    """
    if sizes.device.type != "cpu" or sizes.dtype == torch.float64 or sizes.shape[0] >= 2**32:
        return torch.sort(sizes, descending=True, stable=True).indices
    bits = sizes.float().numpy().view(np.uint32).astype(np.uint64)
    keys = (bits ^ np.uint64(0xFFFFFFFF)) << np.uint64(32)  # non-negative floats are in the order of their bits
    keys |= np.arange(bits.size, dtype=np.uint64)
    keys.sort()
    return torch.from_numpy((keys & np.uint64(0xFFFFFFFF)).astype(np.int64))
