"""The checked arguments of `recover`. The verb `recover`: trains a pruned model to match the model it came from."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.models import (
    InMemory,
    check_finite,
    find_blocks,
    prepared,
    reached_by_name,
    refuse_empty,
    with_batch_in_errors,
)
from secateur.recovery.descent import (
    Descent,
    Moving,
    count_zeros,
    movers_for,
    moving,
    removed_of,
    touchable,
)
from secateur.recovery.local import Epochs, LocalPart, recover_locally
from secateur.recovery.losses import OutputLoss, parse
from secateur.recovery.outputs import (
    LOCAL_BATCHES,
    NO_BATCHES,
    OnStep,
    Sampled,
    Steps,
    check_text,
    narrower_routers,
    sampled,
    spread_over,
)
from secateur.recovery.result import Recovered, memory_of
from secateur.support import (
    Forward,
    all_gather,
    device_of,
    directories,
    everywhere,
    for_directories,
    globs_of,
    is_fully_sharded,
    is_sharded,
    local,
    mapped,
    matched,
    moved,
    rank_and_world,
    refuse,
    refuse_unloaded,
    repeatable,
    unchanged,
    unwrapped,
    widened,
    without_autocast,
)
from secateur.targets import kinds_within

OnPart = Callable[[LocalPart], None]

# ---- The checked arguments of `recover`.
#
# Law: what the bytes of a result depend on can be said as JSON.


@dataclass(frozen=True)
class Request:
    """The checked arguments of `recover`; see there."""

    steps: int
    local: int
    loss: str | OutputLoss | None
    adapters: int | None
    rate: float
    seed: int
    share: float = 1.0
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    autocast: torch.dtype | str | None = None
    masks: Any = field(default=None, compare=False)
    forward: Forward | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        parse(self.loss)
        if self.autocast not in (None, torch.bfloat16, "bfloat16"):
            raise ValueError(
                f"autocast is bfloat16, or left out; got {self.autocast!r}. In float16 gradients vanish unless losses "
                "are scaled, which is not done here."
            )
        for name, least in (("steps", 0), ("local", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is a whole number, {least} or more; got {value!r}.")
        if not self.steps and not self.local:
            raise ValueError("steps=0 and local=0: nothing is asked for.")
        if self.adapters is not None and (type(self.adapters) is not int or self.adapters < 1):
            raise ValueError(f"adapters is the rank of the updates, 1 or more; got {self.adapters!r}.")
        if not (_is_number(self.rate) and 0 < self.rate < math.inf):
            raise ValueError(f"rate is a number above 0; got {self.rate!r}.")
        if not (_is_number(self.share) and 0 <= self.share <= 1):
            raise ValueError(
                f"share must be from 0 to 1, the teacher's part of the loss by the outputs; got {self.share!r}."
            )
        if not self.steps and self.adapters is not None:
            raise ValueError("adapters= move weights by the outputs; steps=0 leaves that out.")
        if not self.steps and self.share != 1:
            raise ValueError("share= is of the loss by the outputs; steps=0 leaves that out.")
        if type(self.seed) is not int:
            raise ValueError(f"seed is a whole number; got {self.seed!r}.")

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype in which matrices are multiplied by the outputs; None: their own."""
        return None if self.autocast is None else torch.bfloat16


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_vocabularies(model: nn.Module, teacher: nn.Module, forward: Forward | None) -> None:
    """`ValueError` where tokens have left one of them: those that stay have other numbers than in the other, and both
    are run on the same. A custom ``forward`` may translate them."""
    sizes = []
    for each in (model, teacher):
        find: Any = getattr(each, "get_input_embeddings", None)
        try:
            sizes.append(int(find().weight.shape[0]))
        except (AttributeError, NotImplementedError, TypeError):  # of transformers' models, and of few others
            return
    if forward is None and sizes[0] != sizes[1]:
        what = (
            "Recover first and take tokens away then, or take them from the teacher, too."
            if sizes[0] < sizes[1]
            else "Are the two the wrong way round?"
        )
        raise ValueError(
            f"the model knows {sizes[0]:,} tokens and the teacher {sizes[1]:,}: one number is not the same token in "
            f"both. {what}"
        )


def names_to_train(
    model: nn.Module,
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    *,
    asking: bool = True,
) -> list[str]:
    """The parameters that move: those of these names, whether they ask for a gradient or not; without ``include`` those
    of floating numbers that ask, but for embeddings that nothing else uses, if that leaves any.

    An embedding learns little from little text, most of its rows nothing; it is half of a small encoder's parameters,
    and of the optimizer's work at each step.

    Args:
        model, include, exclude: as for `recover`.
        asking: whether it matters which ask for a gradient; of a model that was only built, it does not.

    Raises:
        ValueError: a glob matches nothing, or nothing is left.

    >>> names_to_train(nn.Linear(2, 2), None, "bias")
    ['weight']
    >>> names_to_train(nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2)), None, None)
    ['1.weight', '1.bias']
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    included, excluded = matched(include, every), matched(exclude, every) or set()
    first = {id(each): name for name, each in model.named_parameters()}
    chosen = {
        first[id(each)]
        for name, each in every.items()
        if each.is_floating_point() and (each.requires_grad or not asking if included is None else name in included)
    }
    if included is None:
        chosen = chosen - {first[each] for each in _only_looked_up(model)} or chosen
    chosen -= {first[id(every[name])] for name in excluded}
    if not chosen:
        why = "include= and exclude= leave none" if include or exclude else "none of them requires a gradient"
        raise ValueError(f"no parameter of {type(model).__name__} is to be trained: {why}.")
    return [name for name, _ in model.named_parameters() if name in chosen]


def _only_looked_up(model: nn.Module) -> set[int]:
    """The ids of parameters that are embeddings' and nothing else's, such as a head's that is tied to one."""
    lookups = (nn.Embedding, nn.EmbeddingBag)
    holders: dict[int, list[bool]] = {}
    for module in model.modules():
        for each in module.parameters(recurse=False):
            holders.setdefault(id(each), []).append(isinstance(module, lookups))
    return {key for key, found in holders.items() if all(found)}


def rate_for(steps: int) -> float:
    """The highest learning rate of so many steps of `recover`: few steps at a high one take more than they give.

    >>> rate_for(60), rate_for(160), rate_for(1000)
    (0.0001, 0.0002, 0.0005)
    """
    return min(5e-4, 1e-4 * max(1.0, steps / 80))


# ---- The verb `recover`: trains a pruned model to match the model it came from.
#
# Law: a call that fails changes nothing; one that ends has changed the parameters alone, and no zero of them.


@without_autocast()
def recover(
    model: nn.Module | Path | str,
    teacher: nn.Module | Path | str,
    batches: Iterable[Any] | Sampled | None = None,
    *,
    steps: int = 500,
    local: int = 2,
    loss: str | OutputLoss | None = None,
    adapters: int | None = None,
    rate: float = 1e-4,
    share: float = 1.0,
    masks: Any = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    seed: int = 0,
    autocast: torch.dtype | str | None = None,
    on_step: OnStep | None = None,
    out: Path | str | None = None,
    activations: Path | str | None = None,
    teacher_on_disk: bool = False,
    device: torch.device | str | None = None,
    on_part: OnPart | None = None,
) -> Recovered:
    """Trains a pruned model towards its teacher, the model it came from; its zeros stay, to the last one.

    First block by block against the teacher's activations (``local``), as Roux et al. 2025 (arXiv:2510.14444) found to
    cost a tenth of training the whole; then the whole model by the teacher's outputs (``steps``), as Minitron does
    (Muralidharan et al. 2024, arXiv:2407.14679). Steps that end worse than they began, on some of the same batches, are
    not kept, and a warning says so. No labels are read. Both models run in evaluation mode: dropout is
    off, and batch normalizations keep their statistics.

    Of a directory another one is written, of which ``secateur.json`` says how many zeros each tensor has, so that
    `verify_checkpoint` counts them. With ``steps=0`` a block of each model is in memory; else both models are. A run
    that was killed goes on where it was when it is started again.

    Args:
        model: what any verb left: with masks, narrower, with fewer blocks or experts. A module is changed in place; or
            a Hugging Face directory of safetensors, of a model of repeated blocks.
        teacher: the model it came from, which is only run, or its directory. Where both stack the same blocks, of one
            width outside of them, the local part is done; else it is left out, and the result says so.
        batches: what a DataLoader yields; of a list each round comes in an order that ``seed`` gives. Or `Sampled`:
            text that the teacher writes, a causal language model of transformers. None: ``Sampled()``. Of a directory
            token batches, such as `read_calibration` gives.
        steps: by the outputs, each over one batch. 0: none.
        local: epochs in which each half of a block (attention, and the rest) sees 128 batches, spread over all of a
            list. 0: none.
        loss: ``"kl"``, forward, of logits; ``"cosine"`` of embeddings; ``"mse"``; ``"detector"`` of scores and boxes of
            places, as a YOLO of Ultralytics returns them; or ``(outputs, wanted, batch) -> scalar``. None: chosen by
            what the teacher returns. Where the teacher selects rows by top-k, as a DETR its queries, the model is given
            these. Outputs then say nothing of what it would select by itself, so ``"mse"`` of the scores at all places
            is added, to a function as well.
        adapters: a rank: by the outputs, each weight that pruning may touch moves by ``mask ∘ (B A)`` alone, and
            nothing else does; the optimizer then remembers that of the factors only.
        rate: the highest learning rate of AdamW by the outputs (of a block it is 2e-4); a tenth of the steps leads up
            to it, and half a cosine down.
        share: how much of the loss by the outputs is the teacher's. The rest is the text's own, the cross-entropy of
            the next token (or what a model returns for batches with ``labels``): what the text is like is learned, too.
            0: of the text alone, and the teacher is not run.
        masks: ``{name: mask}``, or a `Pruner`. Beside them all zeros of weights that pruning may touch stay, and what
            attached masks hide.
        include, exclude: globs over names of parameters: train these, and not those. Default: all that ask for a
            gradient, but embeddings that no head is tied to; ``include="*"`` trains them, too.
        forward: ``(model, batch) -> outputs``, of both models.
        seed: of the batches' order and the adapters' start; the generators of the process are left as they are.
        autocast: ``torch.bfloat16``: by the outputs, both models multiply matrices in it (mixed precision, Micikevicius
            et al. 2017, arXiv:1710.03740, which needs no scaled loss in bfloat16, Kalamkar et al. 2019,
            arXiv:1905.12322): faster where the processor can. Weights, losses, AdamW and the local part stay in
            float32. An autocast around the call does not count.
        on_step: called with the number of each step by the outputs, from 1, and its loss; the model is as the step left
            it, and may be run.
        out: for a directory, the one to write, which must not exist. What follows is for directories, too.
        activations: a folder for what blocks pass on; None: memory.
        teacher_on_disk: by the outputs, too, one block of the teacher is in memory, and all of them are read at each
            step. The bytes of the result are the same.
        device: where the models compute; None: the processor.
        on_part: called with each part of a block when it is done.

    In several processes of `torch.distributed`, such as torchrun starts, all are given the same batches, of which each
    takes its rows: steps and batches mean what they mean in one process, and so does the result, but for rounding.
    Models may lie whole in each, or be sharded by FSDP2's ``fully_shard``, in float32; then each holds its share of
    weights, copies and optimizer. Of directories that is done here; all see one disk, and the first writes. That is for
    the part by the outputs: ``local=0``, and ``batches``.

    Half precision is trained as float32, and rounded once at the end. Beside the two models it takes a copy of the
    trained parameters, their gradients, and twice their memory for AdamW.

    Returns:
        What it did, which prints as a table.

    Raises:
        ValueError: an argument out of range, a parameter on the meta device, a loss or gradient that is not finite,
            outputs of two shapes, or no batches; in several processes ``local``, `Sampled`, a custom loss, or
            models or batches that differ among them. TypeError: batches that can't be run. CheckpointError: a damaged
            or missing directory, a place that is taken, a full disk, or an earlier run of another request.

    >>> import copy
    >>> teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> model = copy.deepcopy(teacher)
    >>> with torch.no_grad():
    ...     _ = model[0].weight.mul_(model[0].weight.abs() > 0.15)
    >>> done = recover(model, teacher, [torch.randn(32, 8) for _ in range(8)], steps=60, rate=1e-2, loss="mse")
    >>> done.last < done.first, [before == after for before, after in done.zeros.values()]
    (True, [True])
    """
    request = Request(
        steps,
        local,
        loss,
        adapters,
        rate,
        seed,
        share,
        globs_of(include),
        globs_of(exclude),
        "bfloat16" if autocast == torch.bfloat16 else autocast,
        masks,
        forward,
    )
    if isinstance(model, Path | str) and isinstance(teacher, Path | str):
        from secateur.recovery.directory import recover_directory

        refuse("is for modules: zeros of a directory stay where they are.", masks=masks)
        done = recover_directory(
            *directories(model, out),
            Path(teacher),
            batches,
            request,
            activations=activations,
            teacher_on_disk=teacher_on_disk,
            device=device,
            on_part=on_part,
            on_step=on_step,
        )
        return done.over_texts(model, batches, forward=forward, activations=activations, device=device)
    if not isinstance(model, nn.Module) or not isinstance(teacher, nn.Module):
        raise TypeError("recover takes two modules, or two directories, the model and its teacher.")
    for_directories(
        out=out, activations=activations, teacher_on_disk=teacher_on_disk or None, device=device, on_part=on_part
    )
    model, teacher = unwrapped(model), unwrapped(teacher)
    reach = reached_by_name(model, batches, forward=forward)
    return replace(_recovered(model, teacher, batches, request, on_step), reach=reach)


def _recovered(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any] | Sampled | None,
    request: Request,
    on_step: OnStep | None,
) -> Recovered:
    started = time.monotonic()
    asked = Sampled() if batches is None else batches
    check_shared(request, asked)
    batches = [] if isinstance(asked, Sampled) else repeatable(asked)
    for each in (model, teacher):
        everywhere(functools.partial(_check_values, each))
        check_alike(each)
    check_vocabularies(model, teacher, request.forward)
    check_text(model, batches, request.share if request.steps else 1.0)
    trained = names_to_train(model, request.include, request.exclude)
    removed = removed_of(model, request.masks)
    _check_apart(model, teacher, trained)
    weights = {name: each for name, each in model.named_parameters() if name in removed}
    before = count_zeros(weights, removed)
    if isinstance(asked, Sampled):
        asked = asked.of(teacher)
        batches = asked.batches(sampled(teacher, asked, request.seed))
    parts: list[LocalPart] = []
    left_out: list[str] = []
    steps: Steps | None = None
    with trained_beside(model, teacher, trained, removed) as held:
        if request.local:
            parts += recovered_locally(model, teacher, batches, request, trained, removed, left_out)
        if request.steps:
            own = {name: each.detach().clone() for name, each in held.parameters.items()} if parts else held.own
            steps = steps_of(model, teacher, held, request)
            if not steps.train(batches, request.seed, on_step).is_kept:
                with torch.no_grad():
                    for name, parameter in held.parameters.items():
                        local(parameter).copy_(own[name])
        held.finish()  # all is computed: from here on things change
    zeros = {name: (before[name], count) for name, count in count_zeros(weights, removed).items()}
    return result_of(steps, parts, zeros, left_out, device_of(model), started)


def result_of(
    steps: Steps | None,
    parts: Iterable[LocalPart],
    zeros: Mapping[str, tuple[int, int]],
    left_out: Iterable[str],
    device: torch.device | None,
    started: float,
    out: Path | None = None,
) -> Recovered:
    """The result of both parts, of which the one by the outputs may not have been asked for."""
    return Recovered(
        losses=() if steps is None else tuple(steps.losses),
        loss=None if steps is None else steps.word,
        parts=tuple(parts),
        zeros=zeros,
        rows=0 if steps is None else steps.rows,
        seconds=time.monotonic() - started,
        memory=memory_of(device),
        left_out=tuple(left_out),
        out=out,
        judged=None if steps is None else steps.verdict,
    )


def check_shared(request: Request, batches: Any) -> None:
    """`ValueError` where there are several processes, and what is asked for is done by one."""
    world = rank_and_world()[1]
    if world == 1:
        return
    if request.local:
        raise ValueError(
            f"{world} processes train by the outputs alone: pass local=0; what local= does runs in one process, "
            "before, with steps=0."
        )
    if isinstance(batches, Sampled):
        raise ValueError(
            f"{world} processes share out batches, and none are given: pass batches=, of a directory --data FILE."
        )


def check_alike(model: nn.Module) -> None:
    """`ValueError` where several processes hold other weights, or hold them in parts that are no even share."""
    world = rank_and_world()[1]
    if world == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, each in tensors.items():
        mesh = getattr(each, "device_mesh", None)
        if mesh is not None and not (mesh.ndim == 1 and mesh.size() == world and is_fully_sharded(model)):
            raise ValueError(
                f"{name} is sharded otherwise than by fully_shard over all {world} processes, among which batches are "
                "shared out: shard the model so, or leave it whole."
            )
    whole = {name: each for name, each in tensors.items() if not is_sharded(each)}
    sums = {
        name: int(each.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
        for name, each in whole.items()
    }
    for other in all_gather(sums):
        if other != sums:
            name = next((name for name in sums if other.get(name) != sums[name]), "one of them")
            raise ValueError(
                f"the processes hold other weights of one {type(model).__name__} ({name}): load it alike in all, or "
                "broadcast it first."
            )


def _check_values(model: nn.Module) -> None:
    refuse_unloaded(model)
    check_finite(model)


def _check_apart(model: nn.Module, teacher: nn.Module, trained: Iterable[str]) -> None:
    theirs = {id(each): name for name, each in teacher.named_parameters()}
    for name in trained:
        if (other := theirs.get(id(model.get_parameter(name)))) is not None:
            raise ValueError(
                f"{name} is the teacher's own {other}: training would move both; pass a copy as the teacher."
            )


def recovered_locally(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    request: Request,
    trained: Sequence[str],
    removed: Mapping[str, Tensor],
    left_out: list[str],
) -> list[LocalPart]:
    """The local part of a model in memory, whose parameters are copies already; why not, where it is left out."""
    held = spread_over(batches, LOCAL_BATCHES)
    wide = [mapped(batch, widened) for batch in held]  # the model is float32 by now; the teacher is what it is
    if not held:
        raise ValueError(NO_BATCHES)
    for batch in held:
        refuse_empty(batches if isinstance(batches, Sequence) else (), batch)
    runs = [with_batch_in_errors(own, request.forward) for own in (wide, held)]
    for each, own, run in ((model, wide, runs[0]), (teacher, held, runs[1])):  # an error of a model's own ends it
        with torch.no_grad():
            run(each, moved(own[0], device_of(each)))
    found: list[LocalPart] = []
    try:
        student, theirs = (
            InMemory(each, own, forward=run, blocks=find_blocks(each))
            for each, own, run in zip((model, teacher), (wide, held), runs, strict=True)
        )
        if again := student.repeated() or theirs.repeated():
            raise ValueError(f"{again} runs more than once in a forward pass")
    except ValueError as error:
        left_out.append(f"the local part, since {str(error).rstrip('.')}")
        return []
    why = recover_locally(
        student,
        theirs,
        Epochs(request.local, request.seed),
        trained=trained,
        masks_of=lambda block: {
            name.removeprefix(f"{block}."): mask for name, mask in removed.items() if name.startswith(f"{block}.")
        },
        commit=lambda block, new, _: student.put(block, new),
        on_part=found.append,
    )
    left_out += [why] if why else []
    return found


@contextlib.contextmanager
def trained_beside(
    model: nn.Module, teacher: nn.Module, trained: Collection[str], removed: Mapping[str, Tensor]
) -> Iterator[Moving]:
    """A context in which both models may be run, and the trained parameters of the one are copies."""
    with unchanged(model), unchanged(teacher), prepared(model), prepared(teacher):
        teacher.requires_grad_(False)
        model.requires_grad_(False)
        with moving(model, trained, removed) as held:
            yield held


def steps_of(model: nn.Module, teacher: nn.Module, held: Moving, request: Request) -> Steps:
    """The steps by the outputs of a model whose trained parameters are copies."""
    parameters = held.parameters
    routers = [name for name, reason in kinds_within(model).items() if reason == "routers" and name in parameters]
    first = narrower_routers(model, teacher, routers)
    chosen = dict(parameters)
    adapted: set[str] = set()
    if request.adapters is not None:
        adapted = set(parameters) & {name for name, each in touchable(model).items() if each.dim() >= 2}
        if any(is_sharded(parameters[name]) for name in adapted):
            raise ValueError("adapters= move whole weights, and these are sharded: leave them out, or shard nothing.")
        if not adapted:
            raise ValueError(f"adapters= finds no weight of {type(model).__name__} among those that are trained.")
        chosen = {name: each for name, each in parameters.items() if name in adapted or name in first}
    generator = torch.Generator().manual_seed(request.seed % (1 << 63))
    movers = movers_for(model, chosen, held.masks, rank=request.adapters, adapted=adapted, generator=generator)
    for each in chosen.values():
        each.requires_grad_(True)
    return Steps(
        model,
        teacher,
        Descent(movers, request.steps, rate=request.rate),
        request.loss,
        forward=request.forward,
        first=[parameters[name] for name in first],
        share=request.share,
        narrow=request.narrow,
    )
