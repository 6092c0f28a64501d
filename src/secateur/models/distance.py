"""How far a model's outputs are from those of the dense one, on batches that are held; what descends on that.

Law: the dense model is run once, and 0 is its own distance; more is worse; padding does not count; the model is run and
left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from secateur.models.batches import check_finite, naming_batch
from secateur.models.observation import prepared
from secateur.models.products import AllMetError, Tokens
from secateur.models.replay import same_rows
from secateur.support import (
    Between,
    Forward,
    device_of,
    moved,
    private,
    run_batch,
    running_as,
    seeded,
    share_of,
    tensors_in,
    unchanged,
    unwrapped,
)

_ANSWER = re.compile(r"(?!(enc|encoder|intermediate|aux|auxiliary|router|gate)_)((.*_)?logits|pred(ict.*|_.*))")
OUTPUTS = "outputs"  # all of them, by `divergence`
_Within = Callable[[Any], contextlib.AbstractContextManager[Any]]
ROWS = 1024  # tokens, or examples of a classifier, that outputs are compared on: ranks move little with more
NUMBERS = 1 << 28  # of the dense logits that are held where something descends on them: a gigabyte
ROOM = 1 << 31  # bytes that a backward pass may hold: else it computes each block again


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """A context for running batches; the model's mode, buffers and gradients are restored at its end."""
    with unchanged(model), prepared(model), torch.no_grad(), seeded():
        yield


@contextlib.contextmanager
def computing_with(model: nn.Module, new: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model computes with these values of parameters, which gradients reach.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with computing_with(model, {"weight": torch.ones(1, 2)}):
    ...     model(torch.ones(1, 2)).item()
    2.0
    """
    own = dict(model.named_parameters())
    values: dict[int, Any] = {id(own[name]): value for name, value in new.items()}
    tables = [private.parameters_of(module) for module in model.modules()]
    held = [(table, key, each) for table in tables for key, each in table.items() if id(each) in values]
    try:
        for table, key, parameter in held:
            table[key] = values[id(parameter)]
        yield
    finally:
        for table, key, parameter in held:
            table[key] = parameter


class NoSlopeError(ValueError):
    """Nothing can descend on the outputs of a model."""


class Held(NamedTuple):
    """A batch, what is compared of the dense model's outputs, which of their tokens are no padding, and the rows that
    it selects: of another selection no row of the outputs has its like."""

    batch: Any
    outputs: Any
    mask: Tensor | None
    rows: dict[Hashable, Tensor]


class DenseOutputs:
    """The outputs of the dense model, and how far those of the model as it is now are from them.

    Args:
        model: the dense one, which is run once.
        batches: what a DataLoader yields; of which the first are held, as many as make so many ``rows`` of outputs. The
            last is cut where it can be.
        forward: how a batch is run.
        word: how outputs are compared, see `distances`; by default what fits them. Or `OUTPUTS`.
        rows: tokens, or examples; None: all.
        numbers: of logits over many classes only so many numbers are held, of tokens spread evenly over each batch.
        called: what a batch is called.

    Attributes:
        held: the batches.
        rows: of outputs, if they were counted.
        share: of the batches' entries.

    Raises:
        ValueError: the dense model's outputs are not finite, or of `OUTPUTS` a weight of it.

    >>> model = nn.Linear(2, 2)
    >>> dense = DenseOutputs(model, [torch.randn(8, 2)], word="change")
    >>> before, _ = dense(), model.weight.data.mul_(2)
    >>> before, dense() > 0
    (0.0, True)
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        *,
        word: str = "",
        rows: int | None = None,
        numbers: int | None = None,
        called: str = "batch",
    ) -> None:
        self.model, self.forward, self.word = unwrapped(model), forward, word
        self._numbers = None if numbers is None else numbers // max(1, len(batches))
        self.held: list[Held] = []
        self.rows, entries = 0, 0.0
        with running(self.model):
            for number, batch in enumerate(batches):
                with naming_batch(batches, batch, forward):
                    batch = moved(batch, device_of(self.model))
                    (outputs, selected), is_cut = self._recorded(batch), False
                if rows is not None and (count := self._count(outputs, batch)) > rows - self.rows:
                    less = share_of(batch, (rows - self.rows) / count)
                    is_cut = less is not batch
                    if is_cut:
                        batch, (outputs, selected) = less, self._recorded(less)
                held = Held(batch, *self._compared(outputs, batch), selected)
                if not all(bool(each.isfinite().all()) for each in real_tensors(held.outputs)):
                    check_finite(self.model)  # else the model itself overflows
                    if self.word != OUTPUTS:
                        raise ValueError(f"the dense model's outputs for {called} {number} hold NaN or infinity.")
                self.held.append(held)
                entries += _entries(batch)
                if rows is not None:
                    self.rows += self._count(outputs, batch)
                    if is_cut or self.rows >= rows:
                        break
        self.share = entries / (sum(map(_entries, batches)) or 1.0)

    def __call__(self, some: Sequence[int] | None = None) -> float:
        """The distance of the model as it is now, on the held batches of these numbers, or on all."""
        return self.now(some)

    def now(
        self,
        some: Sequence[int] | None = None,
        within: _Within = contextlib.nullcontext,
    ) -> float:
        """The distance of the outputs; each batch is run ``within`` a context of it."""
        return mean_of(distance(self.word, *each) for each in self._pairs(some, within))

    def unexplained(self, within: _Within = contextlib.nullcontext) -> float:
        """The share of the dense outputs that the present ones do not explain; see `unexplained`."""
        found = unexplained(self._pairs(within=within))
        return found if math.isfinite(found) else math.inf

    def rows_lost(self, at: int) -> Tensor:
        """What each row of the present outputs loses for the batch of this number, with gradients; in `running`."""
        batch, dense, mask, rows = self.held[at]
        return distances(self.word, dense, self._compared(self._run(batch, rows), batch, dense)[0], mask)

    def to_descend(self, at: int, what: str) -> Tensor:
        """The mean of `rows_lost`, along which what is learnt, such as a gate, descends.

        Raises:
            NoSlopeError: no gradient of it reaches anything, or it is not finite.
        """
        loss = self.rows_lost(at).mean()
        if not loss.requires_grad:
            raise self.unfit(f"has no gradient along any {what}")
        if not bool(loss.isfinite()):
            raise self.unfit("is not finite")
        return loss

    def unfit(self, why: str) -> NoSlopeError:
        """The error where nothing can descend."""
        return NoSlopeError(
            f"how far the outputs of {type(self.model).__name__} are from the dense ones {why}: leave out "
            'choose="gates", or run the batches by a forward= that returns what the model computes with.'
        )

    def in_order(self, steps: int, draw: torch.Generator, *, without: Collection[int] = ()) -> list[int]:
        """The numbers of the batches of so many steps, without some: each once in turn, in orders that are drawn."""
        some = [at for at in range(len(self.held)) if at not in without]
        turns = [torch.randperm(len(some), generator=draw, device="cpu") for _ in range(-(-steps // len(some)))]
        return [some[at] for at in torch.cat(turns)[:steps].tolist()]

    def to_compute_again(self, blocks: Sequence[nn.Module], run: Callable[[], object]) -> Sequence[nn.Module]:
        """The blocks, if a backward pass through all of them would hold more than `ROOM`: see `recomputed`."""
        selects = any(each.rows for each in self.held)  # which rows, a block may not be asked twice
        return blocks if blocks and not selects and held_by(blocks, run) > ROOM else ()

    def of(self, model: nn.Module) -> float:
        """The distance of another model."""
        with self.instead(model):
            return self()

    def by_row(self, model: nn.Module) -> list[Tensor]:
        """Of each batch what each row of another model's outputs loses."""
        with self.instead(model):
            return [distances(self.word, *each).cpu() for each in self._pairs()]

    @contextlib.contextmanager
    def instead(self, model: nn.Module) -> Iterator[Self]:
        """A context in which another model is measured."""
        mine, self.model = self.model, unwrapped(model)
        try:
            yield self
        finally:
            self.model = mine

    def _pairs(
        self,
        some: Sequence[int] | None = None,
        within: _Within = contextlib.nullcontext,
    ) -> Iterator[tuple[Any, Any, Tensor | None]]:
        """Of each batch the dense outputs, the present ones, and their mask."""
        with running(self.model):
            for batch, dense, mask, rows in self.held if some is None else [self.held[at] for at in some]:
                with within(batch):
                    outputs = self._run(batch, rows)
                yield dense, self._compared(outputs, batch, dense)[0], mask

    def _recorded(self, batch: Any) -> tuple[Any, dict[Hashable, Tensor]]:
        """The outputs, and which rows the model selects."""
        rows: dict[Hashable, Tensor] = {}
        with same_rows(self.model, rows, records=True):
            return run_batch(self.model, batch, self.forward), rows

    def _run(self, batch: Any, rows: dict[Hashable, Tensor]) -> Any:
        """The outputs, of these rows where the model selects some."""
        with same_rows(self.model, rows, records=False) if rows else contextlib.nullcontext():
            return run_batch(self.model, batch, self.forward)

    def _count(self, outputs: Any, batch: Any) -> int:
        """Tokens of the outputs, or examples; padding counts where the search has it count."""
        if self.word == OUTPUTS:
            return divergence(outputs, outputs, Tokens.of(batch).own)[1]
        every = real_tensors(outputs)
        return max((each[..., 0].numel() if each.dim() > 1 else each.numel() for each in every), default=0)

    def _compared(self, outputs: Any, batch: Any, dense: Any = None) -> tuple[Any, Tensor | None]:
        """What of the outputs is compared, and which tokens are no padding: of logits those rows alone, or fewer; as
        many as are known of the dense ones."""
        mask = Tokens.of(batch).own
        self.word = self.word or word_for(outputs)
        found = compared(outputs, self.word)
        if self.word != "kl":
            return found, mask
        rows = token_rows(found, mask)
        most = len(rows)
        if self._numbers is not None:
            most = max(1, self._numbers // rows.shape[-1]) if dense is None else len(dense)
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device, dtype=torch.float32).round().long()]
        return rows.clone(), None  # and the others are let go of


def mean_of(found: Iterable[tuple[float, int]]) -> float:
    """The mean over rows of ``(sum over rows, number of rows)``; infinite where there is none, or it is no number.

    >>> mean_of([(3.0, 2), (1.0, 2)]), mean_of([(math.nan, 1)]), mean_of([])
    (1.0, inf, inf)
    """
    total, rows = 0.0, 0
    for more, count in found:
        total, rows = total + more, rows + count
    return max(0.0, total / rows) if rows and math.isfinite(total) else math.inf


# ---- what descends on it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Descended:
    """What came of something that learnt on how far the outputs are from the dense ones, while the weights stayed.

    Attributes:
        steps: how often it moved, each time by one batch.
        before, after: how far the outputs on the batches are from the dense ones without what would leave as it began,
            and without what it chose; before any repair.
        losses: of each step, on its batch.
    """

    steps: Annotated[int, Between(0)]
    before: Annotated[float, Between(0)]
    after: Annotated[float, Between(0)]
    losses: tuple[Annotated[float, Between(0)], ...] = field(default=(), repr=False)


@contextlib.contextmanager
def recomputed(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which a backward pass holds of these what they are given alone, and computes them once more
    (arXiv:1604.06174); it has to end within.

    >>> block, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2, requires_grad=True)
    >>> with recomputed([block]):
    ...     block(x).sum().backward()
    >>> torch.equal(x.grad, torch.autograd.grad(block(x).sum(), x)[0])
    True
    """
    with running_as({block: functools.partial(checkpoint, block.forward, use_reentrant=False) for block in blocks}):
        yield


def held_by(blocks: Sequence[nn.Module], run: Callable[[], object]) -> int:
    """The bytes that a backward pass holds of all blocks, by those of the first that runs, beside their weights.

    >>> block, x = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()), torch.ones(1, 2, requires_grad=True)
    >>> held_by([block], lambda: block(x))  # what goes into the product, and what comes out of the tanh
    16
    """
    weights = {
        each.untyped_storage().data_ptr()
        for block in blocks
        for module in block.modules()
        for each in private.parameters_of(module).values()
        if each is not None
    }
    held: dict[int, int] = {}

    def hold(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (at := tensor.untyped_storage().data_ptr()) not in weights:
            held[at] = tensor.untyped_storage().nbytes()
        return tensor

    def first(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda each: each):
            its = forward(*args, **kwargs)  # noqa: F841  # or it is let go of, and another lies where it lay
        raise AllMetError

    with (
        contextlib.suppress(AllMetError),
        running_as({each: functools.partial(first, each.forward) for each in blocks}),
    ):
        run()
    return sum(held.values()) * len(blocks)


# ---- the distance of two outputs ------------------------------------------------------------------------------------


def word_for(outputs: Any) -> Literal["kl", "cosine", "change"]:
    """How outputs are compared by default."""
    if answers_of(outputs):
        return "change" if logits_of(outputs) is None else "kl"
    return "cosine" if isinstance(getattr(outputs, "last_hidden_state", None), Tensor) else "change"


def compared(outputs: Any, word: str | None) -> Any:
    """What is compared of the outputs."""
    if word == OUTPUTS:
        return outputs
    named = {"kl": "logits", "cosine": "last_hidden_state"}.get(word or "")
    found = getattr(outputs, named, None) if named else None
    if isinstance(found, Tensor):
        return found
    if word in ("kl", "cosine"):
        return next(real_tensors(outputs))
    return list(real_tensors(outputs))


def real_tensors(outputs: Any) -> Iterator[Tensor]:
    """What a model answers; of one that does not say, all tensors that hold numbers and no ids."""
    answers = answers_of(outputs).values()
    return iter(answers) if answers else (each for each in tensors_in(as_mapping(outputs)) if each.is_floating_point())


def distance(word: str, dense: Any, found: Any, mask: Tensor | None) -> tuple[float, int]:
    """``(sum over rows, number of rows)`` of what `compared` gives of two outputs, by a word."""
    if word not in ("kl", "cosine"):
        return divergence(dense, found, mask)
    rows = distances(word, dense, found, mask)
    return float(rows.sum()), len(rows)


def distances(word: str, dense: Any, found: Any, mask: Tensor | None) -> Tensor:
    """What each row loses: by "kl" the Kullback-Leibler divergence of logits, by "cosine" 1 less the cosine of
    embeddings, of tokens their mean, by "change" half of the squared change over the variance."""
    by = _by_kl if word == "kl" else _by_cosine if word == "cosine" else _by_change
    return by(dense, found, mask)


def _by_kl(dense: Tensor, found: Tensor, mask: Tensor | None) -> Tensor:
    p, q = (token_rows(each, mask).float().log_softmax(-1) for each in (dense, found))
    lost: Tensor = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
    return lost


def _by_cosine(dense: Tensor, found: Tensor, mask: Tensor | None) -> Tensor:
    one, other = _pooled(dense, mask).double(), _pooled(found, mask).double()
    norms = (one.norm(dim=-1) * other.norm(dim=-1)).clamp_min(1e-30)
    lost: Tensor = 1 - (one * other).sum(-1) / norms
    return lost


def _by_change(dense: Any, found: Any, mask: Tensor | None) -> Tensor:
    """Of each row its share; of outputs that have no rows in common the mean."""
    total, count = _changed(dense, found, mask)
    pairs = list(_rows_of_both(dense, found, mask))
    if any(len(before) != count for before, _ in pairs):
        return (total / count).expand(count)
    rows = torch.zeros(count, dtype=torch.float64, device="cpu")
    for before, after in pairs:
        varied = float((before - before.mean(0)).square().sum()) or float(before.square().sum()) or 1.0
        rows = rows + (count * (after - before).square().sum(-1) / varied / 2).cpu()
    return rows


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of an example's tokens, padding left out."""
    if states.dim() < 3:
        return states.reshape(-1, states.shape[-1])
    if mask is None or mask.shape != states.shape[:2]:
        return states.flatten(1, -2).mean(1)
    weights = mask.to(states).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def divergence(before: Any, after: Any, mask: Tensor | None = None) -> tuple[float, int]:
    """``(sum over rows, number of rows)`` of the divergence between two outputs; rows are tokens or examples.

    Of logits it is the Kullback-Leibler divergence, of other outputs half of the squared change over the variance.
    ``½ eᵀ F e`` of the slopes is its second-order approximation.

    Args:
        before: the outputs of a model, whatever it returns.
        after: of the same structure.
        mask: (batch, sequence), True where a token is no padding.

    >>> divergence(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [4.0]]))
    (0.5, 2)
    """
    one, other = logits_of(before), logits_of(after)
    if one is not None and other is not None:
        p, q = (token_rows(each, mask).float().log_softmax(-1) for each in (one, other))
        return max(0.0, float((p.exp() * (p - q)).sum(dtype=torch.float64))), len(p)
    changed, count = _changed(before, after, mask)
    return float(changed), count


def _changed(before: Any, after: Any, mask: Tensor | None) -> tuple[Tensor, int]:
    """The same of outputs that are no logits, with gradients."""
    total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
    for rows, there in _rows_of_both(before, after, mask):
        varied = float((rows - rows.mean(0)).square().sum()) or float(rows.square().sum()) or 1.0
        total = total + (len(rows) * (there - rows).square().sum() / varied / 2).cpu()
        count = max(count, len(rows))
    return total, count


def _rows_of_both(before: Any, after: Any, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each output that holds numbers, float64."""
    for old, new in zip(real_tensors(before), real_tensors(after), strict=True):
        if old.shape != new.shape:
            raise ValueError(
                f"an output is of shape {tuple(new.shape)} and was of shape {tuple(old.shape)} in the dense model, "
                "as of a detector that finds more boxes or fewer: they can't be compared. Where there is score=, "
                "give a function that says how good the model is."
            )
        yield token_rows(old, mask).double(), token_rows(new, mask).double()


def unexplained(pairs: Iterable[tuple[Any, Any, Tensor | None]]) -> float:
    """Half the share of the outputs' variance that a scale and a shift of each changed output does not explain.

    Layers behind could undo a scale and a shift. Half, so that it compares with `divergence`. Infinite for three rows
    or fewer, and where an output has another shape.

    Args:
        pairs: ``(before, after, mask)`` of each batch, as for `divergence`.

    >>> before = torch.tensor([[1.0], [3.0], [2.0], [5.0]])
    >>> unexplained([(before, 2 * before + 1, None)])
    0.0
    """
    sums: list[Tensor] = []  # (6, features): of each output's rows, one, x, y, x·x, x·y, y·y
    for before, after, mask in pairs:
        try:
            both = list(_rows_of_both(before, after, mask))
        except ValueError:
            return math.inf
        found = [
            torch.stack([each.sum(0) for each in (torch.ones_like(x), x, y, x * x, x * y, y * y)]) for y, x in both
        ]
        sums = [more + old for more, old in zip(found, sums, strict=True)] if sums else found
    residuals, varied = 0.0, 0.0
    for count, x, y, squares, products, wanted in sums:
        if float(count.max()) <= 3:
            return math.inf
        own, shared, all_ = squares - x * x / count, products - x * y / count, (wanted - y * y / count).clamp_min(0)
        rounding = 1e-12 * squares
        explained = torch.where(own > rounding, shared.square() / own.clamp_min(1e-300), 0.0)
        left = (all_ - explained).clamp_min(0)
        residuals += float(torch.where(left > 1e-12 * wanted, left, 0.0).sum())
        varied += float(all_.sum())
    return residuals / varied / 2 if varied else 0.0


def answers_of(outputs: Any) -> dict[str, Tensor]:
    """What a model of transformers answers, beside its states: all logits, and what it calls predictions; but for those
    of an encoder, of layers within and of routers.

    >>> list(answers_of({"start_logits": torch.ones(1, 3), "end_logits": torch.ones(1, 3), "attentions": ()}))
    ['start_logits', 'end_logits']
    >>> list(answers_of({"logits": torch.ones(1, 3), "enc_outputs_coord_logits": torch.ones(1, 4)}))
    ['logits']
    """
    named = as_mapping(outputs)
    if not isinstance(named, Mapping):
        named = {"logits": getattr(outputs, "logits", None), **getattr(outputs, "__dict__", {})}
    found = {name: each for name, each in named.items() if isinstance(name, str) and _ANSWER.fullmatch(name)}
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, Tensor) and each.is_floating_point() and each.dim()
    }


def logits_of(outputs: Any) -> Tensor | None:
    """The logits, where they are all that the model answers, and classes are their last axis: of pictures they are
    another one."""
    answers = answers_of(outputs)
    found = answers.get("logits")
    return found if found is not None and len(answers) == 1 and are_logits(found) else None


def are_logits(tensor: Tensor) -> bool:
    """Whether it may be of several classes, the last axis: what has height and width is not.

    >>> are_logits(torch.ones(2, 5)), are_logits(torch.ones(2, 1)), are_logits(torch.ones(2, 5, 8, 8))
    (True, False, False)
    """
    return 1 < tensor.dim() < 4 and tensor.shape[-1] > 1


def token_rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens, features), without padding where the tensor has it."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    if mask is None or tensor.shape[:-1] != mask.shape:
        return rows
    return rows[mask.reshape(-1).to(rows.device)]


def as_mapping(outputs: Any) -> Any:
    return dict(outputs) if isinstance(outputs, Mapping) else outputs


def _entries(batch: Any) -> float:
    return float(max((each.numel() for each in tensors_in(batch)), default=0))
