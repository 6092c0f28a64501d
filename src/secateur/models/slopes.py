"""The sensitivity of a model's outputs to errors in each product's outputs (diagonal Fisher information), from one
backward pass a batch.

Law: the model is left as it is; padding does not count; what no slope reaches is not in what is given. Block by block
it is the same to rounding, with the weights of one block in memory.

For outputs f of a model and a change e of a product's outputs, ``KL(f, f + J e) ≈ ½ eᵀ F e``, F being the Fisher
information ``E[Jᵀ v vᵀ J]``, v drawn from the model's own distribution: for logits ``onehot(y) - softmax`` with y
drawn, for other outputs a normal distribution of their variance. Of F only the diagonal is taken, averaged over tokens,
as for weights in Fisher pruning (Theis et al. 2018, arXiv:1801.05787).

The diagonal takes errors of positions for independent. Where outputs are of all positions together, as a classifier's
of pictures, they add up, the more the later a layer is, so that the diagonal has all of the last layers leave.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.evidence import CONVOLUTIONS
from secateur.models.blocks import find_blocks, full_name
from secateur.models.distance import logits_of, real_tensors, token_rows
from secateur.models.observation import prepared
from secateur.models.pairs import PairedStats, ProductCall
from secateur.models.products import Tokens, WeightView
from secateur.models.replay import Outputs, Weights
from secateur.support import (
    Forward,
    device_of,
    mapped,
    moved,
    refuse_inference,
    run_batch,
    running_as,
    seeded,
    track,
    unchanged,
    unwrapped,
)

Key = TypeVar("Key")
LARGE = 1 << 24  # parameters in blocks: of fewer the graph of a batch is small


class _Slopes(PairedStats):
    """Adds up the squared gradients that reach the outputs of products."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, frozenset(), unfolds=True)
        self.squares: dict[WeightView, Tensor] = {}
        self.rows: dict[WeightView, int] = {}
        self.positions = False  # whether a product was of several for an example

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.just_met = []
        output = super(PairedStats, self).__torch_function__(func, types, args, kwargs)
        is_convolution = func in CONVOLUTIONS and len(self.just_met) == 1  # of groups each has channels of its own
        meeting = self.just_met[0] if is_convolution else self.product_of(func, args, kwargs or {})
        value = output[0] if isinstance(output, tuple) and output else output  # the shape of a number is ()
        if meeting is None or not isinstance(value, Tensor):
            return output
        at = -1 if not is_convolution else value.dim() - len(args[1].shape[2:]) - 1  # where its outputs lie
        # a model may keep a part of itself from gradients
        if value.shape[at] == meeting.piece.shape[0] and torch.is_grad_enabled():
            self.positions = self.positions or value.numel() > value.shape[0] * value.shape[at] > 0
            if not value.requires_grad:
                # no parameter asks for a gradient: the graph begins here, before what may be changed in place
                value = value.requires_grad_().clone()
                output = (value, *output[1:]) if isinstance(output, tuple) else value
            see = functools.partial(self._see, meeting.piece, at)
            value.register_hook(see)  # type: ignore[no-untyped-call]
        return output

    def _add(self, piece: WeightView, *_: Any) -> None:
        self.just_met.append(ProductCall(piece, 0))

    def _see(self, piece: WeightView, at: int, grad: Tensor) -> None:
        grad = grad.detach().movedim(at, -1)
        rows = grad.reshape(-1, grad.shape[-1])
        if self.tokens.own is not None and self.tokens.own.numel() == len(rows):
            rows = rows[self.tokens.own.reshape(-1).to(rows.device)]
        square = rows.double().square().sum(0)
        self.squares[piece] = square if piece not in self.squares else self.squares[piece] + square
        self.rows[piece] = self.rows.get(piece, 0) + len(rows)


def slopes(
    model: nn.Module,
    batches: Iterable[Any],
    names: Iterable[str],
    *,
    forward: Forward | None = None,
    unless_pooled: bool = False,
) -> dict[WeightView, Tensor]:
    """``{piece: (outputs,)}``: the mean squared slope of the model's outputs along each output of a matrix, float64.

    Args:
        model: any module; it is run in evaluation mode.
        batches: what a DataLoader yields; one backward pass each.
        names: of the parameters, whose products with inputs are watched; of buffers there is nothing to say.
        unless_pooled: nothing is given where the outputs are of all positions together.

    Where blocks are large it is done by `slopes_by_block`, which knows of no products outside of them: a graph of the
    whole model would take more memory than its weights do.

    >>> model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    >>> _ = model[1].weight.data[:, 0].zero_()
    >>> found = slopes(model, [torch.randn(8, 4)], ["0.weight"])
    >>> [piece.name for piece in found], [bool(each) for each in next(iter(found.values())) > 0]
    (['0.weight'], [False, True, True])
    """
    inner = unwrapped(model)
    refuse_inference(inner)
    if blocks := _large_blocks(inner):
        with unchanged(inner), prepared(inner):
            inner.requires_grad_(False)
            return slopes_by_block(
                inner,
                blocks,
                batches,
                names,
                forward=forward,
                device=device_of(inner),
                unless_pooled=unless_pooled,
            )
    with unchanged(inner), prepared(inner), torch.inference_mode(False), torch.enable_grad(), seeded():
        own = dict(inner.named_parameters(remove_duplicate=False))
        watched = _Slopes({name: own[name] for name in names if name in own})
        inner.requires_grad_(False)
        for batch in track(list(batches), "measuring slopes"):
            batch = moved(batch, device_of(inner))
            tokens = Tokens.of(batch)
            with watched.watching(tokens):
                outputs = run_batch(inner, batch, forward)
            if unless_pooled and watched.positions and _pooled(outputs):
                return {}
            _backwards(outputs, tokens.own)
    return {piece: square / watched.rows[piece] for piece, square in watched.squares.items()}


def _large_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model, if it has such and they are large; else none."""
    try:
        blocks = find_blocks(model)
    except ValueError:
        return {}
    inside = {id(each): each.numel() for block in blocks.values() for each in block.parameters()}
    return blocks if sum(inside.values()) >= LARGE else {}


def slopes_by_block(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    batches: Iterable[Any],
    names: Iterable[str],
    *,
    weights: Weights | None = None,
    outputs: Outputs | None = None,
    forward: Forward | None = None,
    device: torch.device | None = None,
    unless_pooled: bool = False,
) -> dict[WeightView, Tensor]:
    """`slopes` of the products in blocks whose weights are read when a block is run: once forwards, and once more
    backwards, where it is run again with what it was given.

    Args:
        model: in evaluation mode; parameters outside of the blocks are there when their modules run.
        blocks: ``{name: module}``.
        batches, names, forward, unless_pooled: as for `slopes`.
        weights: what reads those of a block.
        outputs: where what blocks were given is kept until they are run again.
        device: where the model computes.
    """
    found: dict[WeightView, Tensor] = {}
    rows: dict[WeightView, int] = {}
    wanted = frozenset(names)
    tokens = Tokens()
    positions = pooled = False
    weights, outputs = weights or Weights(), outputs or Outputs()

    def add(name: str, run: Callable[[], None]) -> None:
        """Runs a block backwards, watched."""
        own = {local: each for local, each in blocks[name].named_parameters() if full_name(name, local) in wanted}
        watched = _Slopes(own)
        nonlocal positions
        with watched.watching(tokens):
            run()
        positions = positions or watched.positions
        for piece, square in watched.squares.items():
            full = piece.named(full_name(name, piece.name))
            found[full] = square if full not in found else found[full] + square
            rows[full] = rows.get(full, 0) + watched.rows[piece]

    again = {block: RunAgain(name, block.forward, weights, add, outputs) for name, block in blocks.items()}
    try:
        with running_as(again), torch.inference_mode(False), torch.enable_grad(), seeded():
            for batch in track(list(batches), "measuring slopes"):
                batch = moved(batch, device)
                tokens = Tokens.of(batch)
                given = run_batch(model, batch, forward)
                pooled = pooled or _pooled(given)
                _backwards(given, tokens.own)
                outputs.clear()
                if unless_pooled and pooled and positions:
                    found.clear()
                    break
    finally:
        outputs.clear()
    return {piece: square / rows[piece] for piece, square in found.items()}


class RunAgain:
    """A block's forward with gradient checkpointing: it keeps its inputs, no graph, and runs again in the backward
    pass.

    Args:
        name: of the block.
        forward: its own.
        weights: what reads those of a block.
        add: called with the name and what runs the block backwards.
        outputs: where what it was given is kept.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        weights: Weights,
        add: Callable[[str, Callable[[], None]], None],
        outputs: Outputs | None = None,
    ) -> None:
        self.name, self.forward, self.weights, self.add = name, forward, weights, add
        self.outputs = Outputs() if outputs is None else outputs
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        returned: list[Any] = []
        # the graph begins here, where it has not begun before
        start = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
        given = args, kwargs
        flat = _Segment.apply(self, self.calls, given, returned, start, *_flat(given))  # type: ignore[no-untyped-call]
        return _filled(returned[0], flat)

    def run(self, given: Any, tensors: Iterable[Tensor]) -> Any:
        args, kwargs = _filled(given, tensors)
        return self.forward(*args, **kwargs)


class _Segment(torch.autograd.Function):
    """One call of a block."""

    @staticmethod
    def forward(
        ctx: Any, block: RunAgain, call: int, given: Any, returned: list[Any], start: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.block, ctx.call, ctx.given = block, call, mapped(given, lambda _: start.detach())
        block.outputs.save(block.name, call, [each.detach() for each in tensors])
        with _loaded(block):
            output = block.run(given, [each.detach().clone() for each in tensors])
        returned.append(output)
        flat = tuple(each.detach() for each in _flat(output))
        ctx.mark_non_differentiable(*(each for each in flat if not each.is_floating_point()))
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        block: RunAgain = ctx.block
        kept = moved(block.outputs.load(block.name, ctx.call), gradients[0].device)
        given = [each.detach().requires_grad_(each.is_floating_point()) for each in kept]

        def run() -> None:
            with torch.enable_grad():
                flat = _flat(block.run(ctx.given, [each.clone() for each in given]))
            ends = [(each, grad) for each, grad in zip(flat, gradients, strict=True) if each.requires_grad]
            if ends:
                torch.autograd.backward(*(list(each) for each in zip(*ends, strict=True)))  # type: ignore[arg-type]

        with _loaded(block):
            block.add(block.name, run)
        block.outputs.drop(block.name, ctx.call)
        return (None, None, None, None, None, *(each.grad for each in given))


@contextlib.contextmanager
def _loaded(block: RunAgain) -> Iterator[None]:
    block.weights.load(block.name, finished=False)
    try:
        yield
    finally:
        block.weights.unload(block.name)


def _flat(value: Any) -> list[Tensor]:
    """Its tensors, as `mapped` comes to them."""
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, see)
    return found


def _filled(value: Any, tensors: Iterable[Tensor]) -> Any:
    """The same with other tensors in their places."""
    left = iter(tensors)
    return mapped(value, lambda _: next(left))


def watched(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor that `added_to` can be asked about, and what the model goes on with: it may write to that."""
    known = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    return known, known.clone()


def added_to(end: Tensor, seen: Iterable[tuple[Key, Tensor]]) -> list[Key]:
    """The keys of those tensors of a run that are added to its end as they are, the last first: the gradient of the end
    comes to these unchanged.

    Args:
        end: what the run gives, with gradients.
        seen: of `watched`.

    >>> x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    >>> added_to(x.relu() + y, [("x", x), ("y", y)])
    ['y']
    """
    asked = [each for each in seen if each[1].numel() == end.numel() and each[1].shape[-1:] == end.shape[-1:]]
    if not asked or not end.requires_grad:
        return []
    drawn = torch.randn(end.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(
        end
    )
    found = torch.autograd.grad(end, [tensor for _, tensor in asked], drawn, allow_unused=True)
    return [
        key
        for (key, _), gradient in reversed([*zip(asked, found, strict=True)])
        if gradient is not None
        and bool((gradient.reshape(drawn.shape) - drawn).abs().max() <= 1e-4 * drawn.abs().max())
    ]


def _pooled(outputs: Any) -> bool:
    """Whether there is no more than a vector for each example."""
    logits = logits_of(outputs)
    found = [logits] if logits is not None else [each for each in real_tensors(outputs) if each.requires_grad]
    return bool(found) and all(each.dim() < 3 for each in found)


def _backwards(outputs: Any, mask: Tensor | None) -> None:
    """One backward pass, in which the gradient that comes to the outputs is v where there is no padding; none where no
    output has one."""
    logits = logits_of(outputs)
    if logits is not None and logits.requires_grad:
        flat = token_rows(logits, mask).float()
        with torch.no_grad():  # the gradient of the cross entropy, in the memory of the probabilities: these are large
            gradient = flat.softmax(-1)
            # by numbers of the CPU, so that it is the same on each device
            at = torch.rand(len(gradient), 1, dtype=torch.float32, device="cpu").to(gradient.device)
            reached = gradient.cumsum(-1)
            drawn = torch.searchsorted(reached, at * reached[:, -1:], right=True).clamp_max_(gradient.shape[-1] - 1)
            del reached
            gradient.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=gradient.dtype))
        flat.backward(gradient)  # type: ignore[no-untyped-call]
        return
    found = [each for each in real_tensors(outputs) if each.requires_grad]
    if not found:
        return
    # of one row there is no variance to divide by, as of the pooled state of one text: others say enough
    several = [each for each in found if each[..., :1].numel() > 1]
    parts = []
    for each in several or found:
        rows = token_rows(each, mask).float()
        spread = rows.detach().var(0, correction=0).clamp_min(1e-12).sqrt() * rows.shape[-1] ** 0.5
        parts.append((rows / spread * torch.randn(rows.shape, dtype=torch.float32, device="cpu").to(rows.device)).sum())
    torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
