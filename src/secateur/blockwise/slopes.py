"""How far the outputs of a model move when those of a product move: squared slopes, from one backward pass a batch; and
how far they did, as a divergence.

Law: the model is left as it is; padding does not count; what no slope reaches is not in what is given.

For outputs f of a model and a change e of a product's outputs, ``KL(f, f + J e) ≈ ½ eᵀ F e``, F being the Fisher
information ``E[Jᵀ v vᵀ J]``, v drawn from the model's own distribution: for logits ``onehot(y) - softmax`` with y
drawn, for all else a normal one, so large as the outputs vary. Of F the diagonal is taken, in the mean over tokens,
as for weights in Fisher pruning (Theis et al. 2018, arXiv:1801.05787).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.blockwise.observation import prepared
from secateur.blockwise.pairs import Meeting, Pairs
from secateur.blockwise.products import Piece, Tokens
from secateur.evidence import CONVOLUTIONS
from secateur.support import Forward, device_of, moved, run_batch, seeded, tensors_in, track, unchanged, unwrapped

__all__ = ["divergence", "slopes"]


class _Slopes(Pairs):
    """Adds up the squared gradients that reach the outputs of products."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, frozenset(), unfolds=True)
        self.squares: dict[Piece, Tensor] = {}
        self.rows: dict[Piece, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.just_met = []
        output = super(Pairs, self).__torch_function__(func, types, args, kwargs)
        is_convolution = func in CONVOLUTIONS and len(self.just_met) == 1  # of groups each has channels of its own
        meeting = self.just_met[0] if is_convolution else self.product_of(func, args, kwargs or {})
        value = output[0] if isinstance(output, tuple) else output
        if meeting is None or not isinstance(value, Tensor):
            return output
        at = -1 if not is_convolution else value.dim() - len(args[1].shape[2:]) - 1  # where its outputs lie
        if value.shape[at] == meeting.piece.shape[0]:
            if not value.requires_grad:
                value.requires_grad_()  # no parameter asks for a gradient: the graph begins here
            see = functools.partial(self._see, meeting.piece, at)
            value.register_hook(see)  # type: ignore[no-untyped-call]
        return output

    def _add(self, piece: Piece, *_: Any) -> None:
        self.just_met.append(Meeting(piece, 0))

    def _see(self, piece: Piece, at: int, grad: Tensor) -> None:
        grad = grad.detach().movedim(at, -1)
        rows = grad.reshape(-1, grad.shape[-1])
        if self.tokens.own is not None and self.tokens.own.numel() == len(rows):
            rows = rows[self.tokens.own.reshape(-1).to(rows.device)]
        square = rows.double().square().sum(0)
        self.squares[piece] = square if piece not in self.squares else self.squares[piece] + square
        self.rows[piece] = self.rows.get(piece, 0) + len(rows)


def slopes(
    model: nn.Module, batches: Iterable[Any], names: Iterable[str], *, forward: Forward | None = None
) -> dict[Piece, Tensor]:
    """``{piece: (outputs,)}``: the mean squared slope of the model's outputs along each output of a matrix, float64.

    Args:
        model: any module; it is run in evaluation mode.
        batches: what a DataLoader yields; one backward pass each.
        names: of the parameters, whose products with inputs are watched.

    >>> model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    >>> _ = model[1].weight.data[:, 0].zero_()
    >>> found = slopes(model, [torch.randn(8, 4)], ["0.weight"])
    >>> [piece.name for piece in found], [bool(each) for each in next(iter(found.values())) > 0]
    (['0.weight'], [False, True, True])
    """
    inner = unwrapped(model)
    watched = _Slopes({name: inner.get_parameter(name) for name in names})
    with unchanged(inner), prepared(inner), torch.inference_mode(False), torch.enable_grad(), seeded():
        inner.requires_grad_(False)
        for batch in track(list(batches), "measuring slopes"):
            batch = moved(batch, device_of(inner))
            tokens = Tokens.of(batch)
            with watched.watching(tokens):
                outputs = run_batch(inner, batch, forward)
            score = _score(outputs, tokens.own)
            if score is not None:
                score.backward()  # type: ignore[no-untyped-call]
    return {piece: square / watched.rows[piece] for piece, square in watched.squares.items()}


def divergence(before: Any, after: Any, mask: Tensor | None = None) -> tuple[float, int]:
    """How far outputs moved, summed over rows (tokens, examples), and how many rows these are; what ``½ eᵀ F e`` of the
    slopes is near to: of logits the Kullback-Leibler divergence, of all else half of the squared change over the
    variance.

    Args:
        before: the outputs of a model, whatever it returns.
        after: of the same structure.
        mask: (batch, sequence), True where a token is no padding.

    >>> divergence(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [4.0]]))
    (0.5, 2)
    """
    one, other = _logits(before), _logits(after)
    if one is not None and other is not None:
        p, q = (_rows(each, mask).float().log_softmax(-1) for each in (one, other))
        return max(0.0, float((p.exp() * (p - q)).sum(dtype=torch.float64))), len(p)
    total, count = 0.0, 0
    for old, new in zip(tensors_in(_plain(before)), tensors_in(_plain(after)), strict=True):
        if old.is_floating_point():
            rows, change = _rows(old, mask).double(), (_rows(new, mask).double() - _rows(old, mask).double())
            varied = float((rows - rows.mean(0)).square().sum()) or float(rows.square().sum()) or 1.0
            total += len(rows) * float(change.square().sum()) / varied / 2
            count = max(count, len(rows))
    return total, count


def _logits(outputs: Any) -> Tensor | None:
    found = getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) and found.dim() > 1 and found.shape[-1] > 1 else None


def _score(outputs: Any, mask: Tensor | None) -> Tensor | None:
    """A sum over what is no padding whose gradient along the outputs is v; None where no output has one."""
    logits = _logits(outputs)
    if logits is not None and logits.requires_grad:
        flat = _rows(logits, mask).float()
        with torch.no_grad():
            drawn = torch.multinomial(flat.softmax(-1), 1)[:, 0]
        return nn.functional.cross_entropy(flat, drawn, reduction="sum")
    found = [each for each in tensors_in(_plain(outputs)) if each.is_floating_point() and each.requires_grad]
    if not found:
        return None
    parts = []
    for each in found:
        rows = _rows(each, mask).float()
        spread = rows.detach().var(0, correction=0).clamp_min(1e-12).sqrt() * rows.shape[-1] ** 0.5
        parts.append((rows / spread * torch.randn_like(rows)).sum())
    return torch.stack(parts).sum()


def _rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens, features), without padding where the tensor has it."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    if mask is None or tensor.shape[:-1] != mask.shape:
        return rows
    return rows[mask.reshape(-1).to(rows.device)]


def _plain(outputs: Any) -> Any:
    return dict(outputs) if isinstance(outputs, Mapping) else outputs
