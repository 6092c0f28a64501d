"""Differentiable losses between a model's outputs and its teacher's.

Law: equal outputs lose nothing, and padding does not count. Where rows are shared out among processes, each finds its
part of the loss: these add up to what one process finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from secateur.models import answers_of, are_logits
from secateur.support import all_gather, summed, tensors_in, unknown

OutputLoss = Callable[[Any, Any, Any], Tensor]
NO_TEXT = (
    "share= below 1 asks for the text's own loss: that is of a causal language model, for batches of two tokens or "
    "more, or of batches with labels; leave it out."
)
AT_ONCE = 1 << 19  # numbers of the logits that a loss looks at: they and what lies between stay in a core's cache
AT_ONCE_ELSEWHERE = 1 << 25  # on a GPU: few launches, and little memory beside the logits
PADDED = -100  # a row of logits that is to name no token
UNIT = 1e-3  # how far the norm of a row may be from 1 to be a unit vector's, or what its dtype rounds away


def kl(outputs: Tensor, wanted: Tensor, kept: Tensor | None = None, *, shared: bool = False) -> Tensor:
    """``mean over rows of Σ p (log p - log q)``, p the teacher's distribution, q the student's: forward KL.

    What Minitron trains pruned language models by, on logits alone (Muralidharan et al. 2024, arXiv:2407.14679).

    Args:
        outputs: logits of the student, (rows, classes).
        wanted: of the teacher, of the same shape.
        kept: (rows,), True where a row counts; None: all. Where none does, the loss is 0.
        shared: the rows are some of a batch's, and so is the loss; likewise below.

    >>> kl(torch.zeros(1, 2), torch.zeros(1, 2))
    tensor(0.)
    """
    count = _of_all(len(outputs) if kept is None else kept.sum(), outputs, shared)
    return _summed(outputs, _from_teacher, wanted, kept) / count


def cosine(outputs: Tensor, wanted: Tensor, *, shared: bool = False) -> Tensor:
    """``mean over rows of 1 - cos(student, teacher)``, for embeddings and hidden states, (rows, features).

    >>> cosine(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.)
    """
    lost = 1 - nn.functional.cosine_similarity(outputs.float(), wanted.float(), dim=-1)
    return lost.sum() / _of_all(lost.numel(), outputs, shared)  # all of a batch may be padding


def mse(outputs: Tensor, wanted: Tensor, *, shared: bool = False) -> Tensor:
    """``‖student - teacher‖² / ‖teacher - its mean‖²``: the share of the variance that is lost, (rows, features).

    >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [4.0]])).item()
    0.2222222238779068
    """
    wide, aim = outputs.float(), wanted.float()
    mean = summed(aim.sum(0)) / _of_all(len(aim), aim, shared) if shared else aim.mean(0)
    varied, whole = (aim - mean).square().sum(), aim.square().sum()
    if shared:
        varied, whole = summed(varied), summed(whole)
    spread = torch.where(varied > 0, varied, whole)
    return (wide - aim).square().sum() / torch.where(spread > 0, spread, 1.0)


WORDS: Mapping[str, Callable[..., Tensor]] = {"kl": kl, "cosine": cosine, "mse": mse}
OF_PLACES = "detector"
BOXES = 5.0  # to one of scores
LEAST = 0.01  # of the mean square: boxes of the one thing that is seen are nearly alike


def detector(outputs: Any, wanted: Any, *, counts: bool | None = None) -> Tensor:
    """What a detector that predicts at each place loses before boxes are made of it, as a YOLO of Ultralytics does.

    Of each head ``Σ KL(s', s) / Σ u`` over places, s' and s the sigmoids of the teacher's and of the student's scores
    and u the teacher's highest of a place, in sum at least 1; and five times the share of the variance that boxes lose,
    weighted by u, and as much of what masks, key points and angles are made of; of a hundredth of their mean square at
    least. So places count as much as the teacher is sure of them, and boxes beside scores as by DETR (Carion
    et al. 2020, arXiv:2005.12872). Heads are added.

    Args:
        outputs, wanted: of the student and of the teacher, with heads that `heads_of` finds.
        counts: as in `text_loss`.

    Raises:
        ValueError: there is no such head, or the two have others.

    >>> head = {"scores": torch.zeros(1, 2, 2), "boxes": torch.tensor([[[1.0, 3.0]]])}
    >>> detector(head, head), detector({**head, "boxes": torch.tensor([[[1.0, 2.0]]])}, head)
    (tensor(0.), tensor(2.5000))
    """
    both = heads_of(outputs), heads_of(wanted)
    shapes = [[{name: tuple(each.shape) for name, each in head.items()} for head in heads] for heads in both]
    if not both[1] or shapes[0] != shapes[1]:
        said = [" and ".join(map(str, its)) or "no such head" for its in shapes]
        raise ValueError(
            f'loss="detector" compares scores and boxes of places; the model returns {said[0]} and the teacher '
            f"{said[1]}; pass loss=(outputs, wanted, batch) -> scalar."
        )
    whole = (lambda found: summed(found)) if counts is not None else (lambda found: found)
    parts = []
    for ours, theirs in zip(*both, strict=True):
        own, aim = ({name: _wide(each) for name, each in head.items()} for head in (ours, theirs))
        aim = {name: each.to(own[name].device) for name, each in aim.items()}
        if counts is False:
            own, aim = ({name: each[:0] for name, each in head.items()} for head in (own, aim))
        sigmoid = aim["scores"].sigmoid()
        sure = sigmoid.amax(1, keepdim=True)
        entropies = (
            nn.functional.binary_cross_entropy_with_logits(each["scores"], sigmoid, reduction="sum")
            for each in (own, aim)
        )
        parts.append((next(entropies) - next(entropies)) / whole(sure.sum()).clamp(min=1))
        for name in sorted(aim.keys() - {"scores"}):  # in one order, in which processes wait for each other
            weight = sure if aim[name].dim() == 3 else torch.ones_like(aim[name][:, :1])
            axes = [0, *range(2, weight.dim())]
            total = whole(weight.sum())
            mean = whole((weight * aim[name]).sum(axes, keepdim=True)) / _above_0(total)
            lost, varied, squares = (
                (weight * each.square()).sum() for each in (own[name] - aim[name], aim[name] - mean, aim[name])
            )
            spread = torch.maximum(whole(varied), LEAST * whole(squares)) / _above_0(total)
            parts.append(BOXES * lost / total.clamp(min=1) / _above_0(spread))
    return torch.stack(parts).sum()


def _above_0(total: Tensor) -> Tensor:
    return total.clamp(min=torch.finfo(total.dtype).tiny)


def heads_of(outputs: Any) -> list[dict[str, Tensor]]:
    """The heads of a detector in its outputs, as they are nested: (rows, classes, places) of ``scores``, what else has
    as many places, and pictures, (rows, channels, height, width). Where nothing is named, as by an RT-DETR of
    Ultralytics: boxes of sides between 0 and 1, (..., places, 4), and after them scores, (..., places, classes).

    >>> raw = {"scores": torch.ones(1, 2, 3), "boxes": torch.ones(1, 4, 3), "feats": [torch.ones(1, 8, 3, 1)]}
    >>> [list(each) for each in heads_of((torch.ones(1, 6, 3), raw))]
    [['scores', 'boxes']]
    """
    if not isinstance(outputs, Mapping):
        inner = outputs if isinstance(outputs, list | tuple) else ()
        unnamed = [
            {"scores": scores.flatten(0, -3).mT, "boxes": boxes.flatten(0, -3).mT}
            for boxes, scores in itertools.pairwise(inner)
            if _are_boxes(boxes) and isinstance(scores, Tensor) and scores.shape[:-1] == boxes.shape[:-1]
        ]
        return unnamed + [head for each in inner for head in heads_of(each)]
    floating = {name: each for name, each in outputs.items() if isinstance(each, Tensor) and each.is_floating_point()}
    places = {name: each.shape[-1] for name, each in floating.items() if each.dim() == 3}
    if "scores" not in places or places["scores"] != places.get("boxes"):
        return [head for each in outputs.values() for head in heads_of(each)]
    return [{name: each for name, each in floating.items() if each.dim() == 4 or places.get(name) == places["scores"]}]


def _are_boxes(given: Any) -> bool:
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() < 3 or given.shape[-1] != 4:
        return False
    return not bool(((given < 0) | (given > 1)).any())


def parse(loss: str | OutputLoss | None) -> str | OutputLoss | None:
    """A word of `WORDS`, "detector" or a function, as it was given; None: chosen by what the outputs are.

    Raises:
        ValueError: another word.
        TypeError: neither a word nor a function.
    """
    if loss is None or callable(loss):
        return loss
    words = (*WORDS, OF_PLACES)
    if not isinstance(loss, str):
        raise TypeError(f"loss= is one of {', '.join(words)}, or (outputs, wanted, batch) -> scalar; got {loss!r}.")
    if loss not in words:
        raise unknown(loss, words, "loss")
    return loss


def chosen_for(outputs: Any) -> str:
    """The word for what a model returns: "kl" for logits, "cosine" for embeddings, "mse" for numbers, "detector" for
    scores and boxes of places (`heads_of`).

    Logits are what is called so, and plain tensors of several columns whose rows are no unit vectors; embeddings are
    ``last_hidden_state``, ``sentence_embedding``, and plain tensors of unit vectors. Numbers are single columns, what
    has height and width, what lies between 0 and 1, as probabilities do, and all that is called a prediction, with the
    logits beside it, such as boxes of a detector.

    >>> chosen_for(torch.randn(4, 10)), chosen_for(torch.ones(4, 1)), chosen_for({"last_hidden_state": torch.ones(2)})
    ('kl', 'mse', 'cosine')
    """
    if heads_of(outputs):
        return OF_PLACES
    found, kind = _found(outputs)
    if kind == "hidden":
        return "cosine"
    if not all(name.endswith(kind) and are_logits(each) for name, each in found.items()):
        return "mse"
    if kind == "logits":
        return "kl"
    (plain,) = found.values()
    norms = torch.linalg.vector_norm(plain.detach().float(), dim=-1)
    near = max(UNIT, torch.finfo(plain.dtype).eps)
    if bool(((norms - 1).abs() < near).all()):
        return "cosine"
    return "mse" if bool(((plain >= 0) & (plain <= 1)).all()) else "kl"


def features_of(outputs: Any) -> Tensor:
    """The first tensor of a model's outputs that a loss compares: logits, or what else it answers, else hidden states,
    else a detector's scores with a row for each place, else the first floating one.

    Raises:
        TypeError: there is none.
    """
    for head in heads_of(outputs):
        return head["scores"].transpose(1, 2)
    return next(iter(_found(outputs)[0].values()))


def _found(outputs: Any) -> tuple[dict[str, Tensor], str]:
    if found := answers_of(outputs):
        return dict(sorted(found.items(), key=lambda each: each[0] != "logits")), "logits"
    for name in ("sentence_embedding", "last_hidden_state"):
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return {name: value}, "hidden"
    for value in tensors_in(dict(outputs) if isinstance(outputs, Mapping) else outputs):
        if value.is_floating_point() and value.dim():
            return {"": value}, ""
    raise TypeError(
        f"the outputs ({type(outputs).__name__}) hold no tensor of floating numbers to compare; pass "
        "loss=(outputs, wanted, batch) -> scalar, or forward=(model, batch) -> outputs."
    )


def rows_of(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """(rows, features), without what the mask, (batch, sequence), calls padding, where the tensor has both dimensions.

    >>> rows_of(torch.ones(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])).shape
    torch.Size([3, 4])
    """
    kept, rows = kept_rows(tensor, mask), _all_rows(tensor)
    return rows if kept is None else rows[kept]


def kept_rows(tensor: Tensor, mask: Tensor | None) -> Tensor | None:
    """(rows,), False where the mask, (batch, sequence), calls a row of a tensor padding; None where it does of none.

    >>> kept_rows(torch.ones(1, 3, 4), torch.tensor([[True, True, False]]))
    tensor([ True,  True, False])
    """
    if mask is None or tensor.dim() < 3 or tensor.shape[:2] != mask.shape or bool(mask.all()):
        return None
    inner = tensor.shape[2:-1].numel()
    return mask.to(tensor.device).bool().reshape(-1, 1).expand(-1, inner).reshape(-1)


def count_rows(tensor: Tensor, mask: Tensor | None) -> int:
    """How many rows `rows_of` gives.

    >>> count_rows(torch.ones(2, 3, 4), None), count_rows(torch.ones(1, 3, 4), torch.tensor([[True, True, False]]))
    (6, 2)
    """
    kept = kept_rows(tensor, mask)
    return len(_all_rows(tensor)) if kept is None else int(kept.sum())


def _all_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def text_loss(outputs: Any, batch: Any, mask: Tensor | None, *, writes: bool, counts: bool | None = None) -> Tensor:
    """What the batch itself says, a scalar: the model's own loss where the batch has labels, else the cross-entropy of
    each next token.

    Args:
        outputs: of the student.
        batch: with ``labels``, or with ``input_ids``, (batch, sequence).
        mask: (batch, sequence), True where a token is no padding: pairs of two such tokens count.
        writes: whether the model's logits are of the next token.
        counts: None of a whole batch. Of the rows that each process has of one, True: its part of the loss; False where
            they are another's, and are only run.

    Raises:
        ValueError: the batch says nothing: no labels, and no text of a model that writes; or its labels are shared out
            among processes.

    >>> logits = torch.zeros(1, 3, 4)
    >>> round(float(text_loss({"logits": logits}, {"input_ids": torch.tensor([[1, 2, 3]])}, None, writes=True)), 3)
    1.386
    """
    given = batch if isinstance(batch, Mapping) else {}
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if "labels" in given and isinstance(own, Tensor) and own.numel() == 1:
        if counts is not None:
            raise ValueError(
                "share= below 1 with labels is the model's own mean over a batch, of which each of several processes "
                "has a part: leave labels out, or run one process."
            )
        return _wide(own.reshape(()))
    ids = batch if isinstance(batch, Tensor) and not batch.is_floating_point() else given.get("input_ids")
    logits = features_of(outputs)
    if not writes or not isinstance(ids, Tensor) or logits.shape[:2] != ids.shape or ids.shape[1] < 2:
        raise ValueError(NO_TEXT)
    aims = nn.functional.pad(ids[:, 1:].to(logits.device, torch.int64), (0, 1), value=PADDED)
    if mask is not None and mask.shape == ids.shape:
        kept = mask.to(logits.device).bool()
        aims[:, :-1].masked_fill_(~(kept[:, 1:] & kept[:, :-1]), PADDED)
    rows, aims = logits.reshape(-1, logits.shape[-1]), aims.reshape(-1)
    kept = aims.ne(PADDED) & (counts is not False)
    return _summed(rows, _from_text, aims, kept) / _of_all(kept.sum(), rows, counts is not None)


def _of_all(count: int | Tensor, like: Tensor, shared: bool) -> int | Tensor:
    """How many rows there are, of all processes that share them, at least 1."""
    if shared:
        count = summed(torch.as_tensor(count, device=like.device))
    return max(1, count) if isinstance(count, int) else count.clamp(min=1)


def _from_teacher(q: Tensor, wanted: Tensor, room: Sequence[Tensor]) -> Tensor:
    """``Σ p (log p - log q)`` of each row; ``q``, given as its logarithm, becomes the slope, ``q - p``."""
    p = torch.log_softmax(room[0].copy_(wanted), -1, out=room[1])
    shares = torch.exp(p, out=room[0])
    lost = p.sub_(q).mul_(shares).sum(-1)
    q.exp_().sub_(shares)
    return lost


def _from_text(q: Tensor, aims: Tensor, _room: Sequence[Tensor]) -> Tensor:
    """``-log q`` of the token that each row is to name; ``q``, given as its logarithm, becomes the slope."""
    places = aims.clamp(min=0)[:, None]
    lost = -q.gather(1, places)[:, 0]
    q.exp_().scatter_add_(1, places, q.new_full(places.shape, -1.0))
    return lost


class _Summed(torch.autograd.Function):
    """A loss that is a sum over rows, a few of them at a time: what is as large as the logits is read once, and of all
    that lies between only the slopes are kept, in the logits' own dtype: of float16 wider, since they are multiplied by
    a scale before they are rounded to it. Rows that do not count may hold anything."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, lost_of: Callable[..., Tensor], other: Tensor, kept: Tensor | None
    ) -> Tensor:
        device = outputs.device.type
        room = AT_ONCE if device == "cpu" else AT_ONCE_ELSEWHERE
        count = min(len(outputs), max(1, room // max(1, outputs.shape[-1])))
        rooms = [outputs.new_empty((count, outputs.shape[-1]), dtype=torch.float32) for _ in range(3)]
        exact = torch.float32 if device == "mps" else torch.float64  # which has no wider one
        total = outputs.new_zeros((), dtype=exact)
        wide = torch.float32 if outputs.dtype == torch.float16 else outputs.dtype
        slopes = torch.empty_like(outputs, dtype=wide) if ctx.needs_input_grad[0] else None
        for at in range(0, len(outputs), max(1, count)):
            part = outputs[at : at + count]
            q, *others = (each[: len(part)] for each in rooms)
            torch.log_softmax(others[0].copy_(part), -1, out=q)
            lost = lost_of(q, other[at : at + count], others)
            if kept is not None:
                left_out = ~kept[at : at + count]
                lost = lost.masked_fill(left_out, 0.0)
                q.masked_fill_(left_out[:, None], 0.0)
            total += lost.sum(dtype=exact)
            if slopes is not None:
                slopes[at : at + count] = q
        ctx.dtype = outputs.dtype
        if slopes is not None:
            ctx.save_for_backward(slopes)  # which lets go of them as soon as they were used
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * given.to(slopes)).to(ctx.dtype), None, None, None


def _summed(outputs: Tensor, lost_of: Callable[..., Tensor], other: Tensor, kept: Tensor | None) -> Tensor:
    found: Tensor = _Summed.apply(outputs, lost_of, other, kept)  # type: ignore[no-untyped-call]
    return found


def loss_between(
    outputs: Any, wanted: Any, batch: Any, loss: str | OutputLoss, mask: Tensor | None, *, counts: bool | None = None
) -> Tensor:
    """The differentiable loss between a model's and its teacher's outputs on one batch, a scalar tensor.

    Args:
        outputs, wanted: of the student and of the teacher.
        batch: passed to a custom loss.
        loss: a word of `WORDS`, "detector", or ``(outputs, wanted, batch) -> scalar``.
        mask: (batch, sequence), True where a token is no padding.
        counts: as in `text_loss`.

    Raises:
        ValueError: student and teacher return tensors of two shapes; or a custom loss is to be taken of a part of
            a batch.
        TypeError: a custom loss returns no number.
    """
    if callable(loss):
        if counts is not None:
            raise ValueError(
                "a loss= of your own is taken of a whole batch, and each of several processes has a part of one: run "
                "one process, or take kl, cosine, mse or detector."
            )
        found = loss(outputs, wanted, batch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(f"loss= is to return one number, a tensor that depends on the outputs; got {what}.")
        return _wide(found.reshape(()))
    if loss == OF_PLACES:
        return detector(outputs, wanted, counts=counts)
    both = [_found(each)[0] for each in (outputs, wanted)]
    shapes = [{name: tuple(each.shape) for name, each in its.items()} for its in both]
    if shapes[0] != shapes[1]:
        said = [" and ".join(f"{name or 'shape'} {shape}" for name, shape in its.items()) for its in shapes]
        raise ValueError(
            f"the model returns {said[0]} and the teacher {said[1]}: no two numbers to "
            "compare; pass loss=(outputs, wanted, batch) -> scalar."
        )
    parts = [_between(each, both[1][name].to(each.device), loss, mask, counts) for name, each in both[0].items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _between(ours: Tensor, theirs: Tensor, loss: str, mask: Tensor | None, counts: bool | None) -> Tensor:
    if counts is False:
        ours, theirs, mask = ours[:0], theirs[:0], None
    if loss == "kl":  # whose rows are long: none is copied
        return kl(_all_rows(ours), _all_rows(theirs), kept_rows(ours, mask), shared=counts is not None)
    return WORDS[loss](rows_of(ours, mask), rows_of(theirs, mask), shared=counts is not None)


def score_loss(
    ours: Mapping[Hashable, Tensor], theirs: Mapping[Hashable, Tensor], like: Tensor, *, counts: bool | None = None
) -> Tensor | None:
    """The mean over selections of the share of the variance that is lost (`mse`) of the scores that are selected from,
    over all places: also those that the teacher does not select. None where there is no selection.

    Args:
        ours, theirs: the scores of each selection, of the student and of the teacher.
        like: another loss, beside which this one is to lie.
        counts: as in `text_loss`.

    >>> score_loss({"queries": torch.tensor([[1.0, 4.0]])}, {"queries": torch.tensor([[0.0, 4.0]])}, torch.zeros(()))
    tensor(0.1250)
    """
    both = [_seen(ours[key], each) for key, each in theirs.items() if key in ours and each.numel()]
    if counts is not None:  # a model may select picture by picture: the processes wait for each other all the same
        both = both if counts else [(mine[:0], its[:0]) for mine, its in both]
        nothing = like.detach().new_empty(0, 1)
        both += [(nothing, nothing)] * (max(all_gather(len(both))) - len(both))
    parts = [mse(*each, shared=counts is not None).to(like.device) for each in both]
    return torch.stack(parts).mean() if parts else None


def _seen(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Both as a column, without places that a mask hides. These are infinite, or so low that their squares are; or the
    teacher's lowest number, as -1e4, and the student has it, too."""
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    hidden = ours.square().isinf() | theirs.square().isinf()
    lowest = theirs.masked_fill(hidden, torch.inf).min()
    kept = ~(hidden | (theirs.eq(lowest) & ours.eq(lowest)))
    return ours[kept][:, None], theirs[kept][:, None]


def _wide(loss: Tensor) -> Tensor:
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
