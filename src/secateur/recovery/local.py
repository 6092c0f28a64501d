"""The local part of recovery: halves of blocks, which blocks of the teacher a block follows, and their closed form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from secateur.models import Host, Replay, Tokens, added_to, block_of, full_name, watched, with_all_outputs
from secateur.recovery.descent import Descent, Moving, movers_for, moving, order_of
from secateur.recovery.losses import rows_of
from secateur.solvers import best_damping, refit, scale_of
from secateur.support import Between, mapped, running_as, tensors_in, track, widened
from secateur.targets import KINDS

# ---- Which blocks of its teacher each block of a model follows, where some have left.
#
# Law: matched by the weights and in the teacher's order, or not at all; a model of all its teacher's blocks follows
# each its own.
#
# A block follows the one whose weights it has, and those after it that have left: the one before a gap can give the
# next block what that was trained on.

SKETCHED = 4096  # entries of a tensor that are compared
CLEARER = 0.5  # of the distance to the block that is second nearest

Sketch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Follows:
    """Of one block: the teacher's that left before it and have none to follow them, and those that it follows; of the
    first of these come the ends of its halves, of the last its output."""

    skipped: tuple[str, ...]
    blocks: tuple[str, ...]


def sketch_of(block: nn.Module) -> Sketch:
    """The first entries of each parameter, with its shape: what is needed to know a block again."""
    found = {}
    for name, each in block.named_parameters():
        if each.is_floating_point() and not each.is_meta:
            shape = "x".join(map(str, each.shape))
            found[f"{name} {shape}"] = each.detach().reshape(-1)[:SKETCHED].float().cpu().clone()
    return found


def followed(
    ours: Sequence[str],
    theirs: Sequence[str],
    sketch: Callable[[str], Sketch],
    sketch_theirs: Callable[[str], Sketch],
) -> dict[str, Follows] | str:
    """For each of the model's blocks what it follows; or why that can't be told.

    Args:
        ours, theirs: the names of the blocks, in their order.
        sketch, sketch_theirs: give what a block is known by; asked only where the names differ.

    >>> known = {f"h.{at}": sketch_of(nn.Linear(9, 9)) for at in range(3)}
    >>> found = followed(["h.0", "h.1"], list(known), {"h.0": known["h.0"], "h.1": known["h.2"]}.get, known.get)
    >>> [each.blocks for each in found.values()]
    [('h.0', 'h.1'), ('h.2',)]
    """
    if list(ours) == list(theirs):
        return {name: Follows((), (name,)) for name in ours}
    counts = f"the model has {len(ours)} blocks and the teacher {len(theirs)}"
    stacks, others = _by_stack(ours), _by_stack(theirs)
    if len(ours) >= len(theirs) or stacks.keys() != others.keys():
        return f"{counts}, of other names"
    found: dict[str, Follows] = {}
    for stack, names in stacks.items():
        every = others[stack]
        known = [sketch_theirs(name) for name in every]
        at = -1
        places = []
        for name in names:
            nearest = _nearest(sketch(name), known)
            if nearest is None or nearest <= at:
                return f"{counts}, and the weights do not say which of these {name} was"
            places.append(at := nearest)
        for name, first, end in zip(names, places, [*places[1:], len(every)], strict=True):
            skipped = tuple(every[:first]) if name == names[0] else ()
            found[name] = Follows(skipped, tuple(every[first:end]))
    return found


def _by_stack(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _nearest(sketch: Sketch, known: Sequence[Sketch]) -> int | None:
    """Which of the known it is; None where another is about as near."""
    distances = [_distance(sketch, each) for each in known]
    first, second, *_ = [*sorted(distances), float("inf")]
    return distances.index(first) if first < CLEARER * second else None


def _distance(one: Sketch, other: Sketch) -> float:
    """The mean over what both have of ``‖a - b‖² / (‖a‖² + ‖b‖²)``: about 1 for what has nothing to do with each other;
    of matrices alone where there are any, since normalizations are much alike."""
    both = [name for name in one if name in other]
    both = [name for name in both if "x" in name.rpartition(" ")[2]] or both
    shares = []
    for name in both:
        a, b = one[name], other[name]
        size = float(a.square().sum() + b.square().sum())
        shares.append(float((a - b).square().sum()) / size if size > 0 else 0.0)
    return sum(shares) / len(shares) if shares else float("inf")


# The parts of a block that are trained one after the other: attention up to the residual sum behind it, then the
# rest.
#
# Law: no names of architectures. A part ends where a normalization is given a tensor of the block's own shape that
# matrices have a share in which the part before had none of; a block without such a place is one part. Every
# parameter of the block is in one part.

OUTPUT = ""  # where the last part of a block ends
_NORMALIZATIONS = next(kind for kind in KINDS if kind.reason == "normalizations")


@dataclass(frozen=True)
class Part:
    """Names of parameters in the block, and the normalization whose input is compared; "" is the block's output.

    ``sum`` is where the part's last matrix is added up, if that is not the end: before a normalization that ends the
    block.
    """

    end: str
    parameters: tuple[str, ...]
    sum: str = OUTPUT


class _ReachedError(BaseException):
    """Ends a run of a block; no `Exception`, so that no model's own code takes it for an error."""


def stream_in(value: Any) -> Tensor | None:
    """Of what a block is given or returns the residual stream: the first tensor of floating numbers and features.

    >>> stream_in((torch.ones(2, 3), None)).shape
    torch.Size([2, 3])
    """
    found = (each for each in tensors_in(value) if each.is_floating_point() and each.dim() >= 2)
    return next(found, None)


def normalizations_in(block: nn.Module) -> dict[str, nn.Module]:
    """Those modules of a block that normalize, by their classes or, where these are unknown, by their names."""
    return {
        name: module
        for name, module in block.named_modules()
        if (isinstance(module, _NORMALIZATIONS.modules) or _NORMALIZATIONS.named.search(f"{name}.weight"))
        and all(each.dim() < 2 for each in module.parameters())
    }


@contextlib.contextmanager
def seen_at(block: nn.Module, names: Collection[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, what these modules of the block are given is shown, of each the first time that it is run."""
    modules = dict(block.named_modules())
    met: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = stream_in((args, kwargs))
            if name not in met and given is not None:
                met.add(name)
                see(name, given)

        return look

    handles = [modules[name].register_forward_pre_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_to(block: nn.Module, end: str, run: Callable[[], Any]) -> Tensor:
    """The tensor at the end of a part; the block is run no further than that.

    Raises:
        ValueError: the block did not come to it.
    """
    found: list[Tensor] = []
    if end == OUTPUT:
        output = stream_in(run())
        if output is None:
            raise ValueError(f"a {type(block).__name__} returns no tensor of features.")
        return output

    def stop(_name: str, given: Tensor) -> None:
        found.append(given)
        raise _ReachedError

    with seen_at(block, [end], stop), contextlib.suppress(_ReachedError):
        run()
    if not found:
        raise ValueError(f"a {type(block).__name__} did not run its {end}, as it did before; pass batches of one kind.")
    return found[0]


def parts_of_block(
    block: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    run: Callable[[], Any],
    ends: Collection[str] | None = None,
) -> list[Part]:
    """The parts of a block, first to last, found by one run and the way of gradients back from each normalization.

    Args:
        block: any module.
        parameters: those of it that are trained, by their names in the block.
        run: runs the block once.
        ends: the normalizations at which a part may end; None: all.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
    ...         self.mix, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         x = x + self.mix(self.norm1(x))
    ...         return x + self.up(self.norm2(x))
    >>> block = Block()
    >>> [part.end for part in parts_of_block(block, dict(block.named_parameters()), lambda: block(torch.randn(2, 4)))]
    ['norm2', '']
    """
    named = {name: each for name, each in parameters.items() if each.is_floating_point()}
    flags = {name: each.requires_grad for name, each in named.items()}
    candidates = [name for name in normalizations_in(block) if ends is None or name in ends]
    seen: dict[str, Tensor] = {}
    try:
        for each in named.values():
            each.requires_grad_(True)
        with torch.enable_grad(), seen_at(block, candidates, seen.__setitem__):
            output = stream_in(run())
        reached = {name: _reached(given, named) for name, given in seen.items() if _comparable(given, output)}
    finally:
        for name, each in named.items():
            each.requires_grad_(flags[name])
    every = frozenset(name for name, each in named.items() if each.dim() >= 2)
    parts: list[tuple[str, frozenset[str]]] = []
    before: frozenset[str] = frozenset()
    for name, names in reached.items():
        matrices = names & every
        if not matrices < every:
            continue
        if matrices > before:
            parts.append((name, names))
        elif parts and matrices == before:
            parts[-1] = (name, names)  # the last one before the next matrix is at the residual stream
        before = before | matrices
    found, taken = [], frozenset[str]()
    for name, names in parts:
        found.append(Part(name, tuple(each for each in named if each in names - taken), name))
        taken |= names
    last = [name for name, names in reached.items() if names & every == every]
    return [*found, Part(OUTPUT, tuple(name for name in named if name not in taken), last[-1] if last else OUTPUT)]


def _comparable(given: Tensor, output: Tensor | None) -> bool:
    return output is not None and given.shape == output.shape and given.requires_grad


def _reached(given: Tensor, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The parameters that a tensor was computed with."""
    with torch.enable_grad():
        total = given.sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return frozenset(name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None)


# The closed form of a part of a block: least squares for the matrix whose outputs are added up to where the part
# ends.
#
# Law: what the mask removes stays zero, and nothing is written here.
#
# In a part with the output ``y = … + X Wᵀ + b`` the matrix is found by its gradient, which is that of y itself. The
# residual, ``R = teacher's y - y``, is then linear in a change of W and b: with token weights D, ``G = Xᵀ D X``, ``C
# = Rᵀ D X``, the best one is ``C G⁻¹``, and under a mask `secateur.solvers.refit`'s.

# of the mean diagonal, the first as SparseGPT's: which is best says data that was not summed, since of 2048 tokens the
# first made MiniLM at 50 % fit its batches and nothing else (cosine .735 to .636 on other text)
DAMPINGS = (0.01, 0.1, 1.0)


def adds_up(block: nn.Module, names: Collection[str], run: Callable[[], Tensor]) -> str | None:
    """The linear layer of a block, the last one if there are several, whose outputs are a summand of what ``run``
    gives; None where there is none.

    Args:
        block: any module.
        names: of parameters, of which the layer's weight is one.
        run: runs the block up to somewhere, with gradients.

    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> x = torch.randn(3, 4)
    >>> adds_up(layers, ["0.weight", "2.weight"], lambda: x + layers(x))
    '2'
    """
    layers = {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and (f"{name}.weight" if name else "weight") in names
    }
    outputs: dict[str, Tensor] = {}

    def watch(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(*args: Any, **kwargs: Any) -> Tensor:
            outputs[name], passed_on = watched(forward(*args, **kwargs))
            return passed_on

        return called

    with running_as({each: watch(name, each.forward) for name, each in layers.items()}), torch.enable_grad():
        end = run()
    return next(iter(added_to(end, outputs.items())), None)


class Gathered:
    """The sums over tokens for one linear layer.

    Args:
        layer: the layer.

    >>> layer = nn.Linear(3, 2)
    >>> x = torch.randn(500, 3)
    >>> wanted = x @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]).T + 1
    >>> gathered = Gathered(layer)
    >>> gathered.run(lambda: layer(x), wanted)
    >>> with torch.no_grad():
    ...     values = gathered.solved(torch.tensor([[True, True, False], [True, True, True]]), damping=1e-9)
    >>> torch.allclose(values["weight"], torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]), atol=0.01)
    True
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        size = layer.in_features + (layer.bias is not None)
        self.gram = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        self.residual_cross = torch.zeros(layer.out_features, size, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def run(self, run: Callable[[], Tensor], wanted: Tensor, mask: Tensor | None = None) -> None:
        """Adds one batch: what ``run`` gives is to become what is wanted."""
        inputs: list[Tensor] = []
        forward = self.layer.forward

        def called(given: Tensor) -> Tensor:
            inputs.append(given)
            return forward(given)

        with running_as({self.layer: called}):
            ours = run()
        x = inputs[-1].reshape(*wanted.shape[:-1], -1)  # a block may see all tokens as rows, as OPT's does
        x, ours, theirs = (rows_of(each, mask).float() for each in (x, ours, wanted.to(ours.device)))
        weights = theirs.square().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
        if self.layer.bias is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        x = x * weights
        self.gram += (x.T @ x).cpu()
        self.residual_cross += (((theirs - ours) * weights).T @ x).cpu()

    def solved(self, mask: Tensor | None, damping: float = DAMPINGS[0]) -> dict[str, Tensor]:
        """The layer's new weight and bias, float32, given the weight that it has now."""
        weight = self.layer.weight.detach().float().cpu()
        bias = self.layer.bias
        whole = weight if bias is None else torch.cat([weight, bias.detach().float().cpu()[:, None]], 1)
        damped = self.gram + damping * scale_of(self.gram) * torch.eye(
            len(self.gram), dtype=torch.float64, device="cpu"
        )
        aim = whole + torch.linalg.solve(damped, self.residual_cross.T).T.float()
        if mask is not None:
            kept = mask.cpu() if bias is None else torch.cat([mask.cpu(), mask.new_ones(len(mask), 1, device="cpu")], 1)
            aim = refit(aim, kept, gram=damped.float(), start=whole)
        found = {"weight": aim[:, : weight.shape[1]]}
        return found if bias is None else {**found, "bias": aim[:, -1]}


# ---- Training block by block: each part of a block is fitted to the teacher's activations, on the inputs that the
# recovered blocks before it give.
#
# Law: one block is trained at a time, and what is kept of the others is what they pass on; a part that did not come
# nearer is left as it was.
#
# After Roux et al. 2025, arXiv:2510.14444: parts that hold a nonlinearity do as well as whole blocks, and single
# matrices worse.

STACKS_DIFFER = "the teacher's blocks are others: {ours} here, {theirs} there"
WIDTHS_DIFFER = "what {name} passes on has shape {ours} here, and {theirs} in the teacher"


class NotComparableError(Exception):
    """The blocks of the two models are not those of one stream."""


@dataclass(frozen=True)
class LocalPart:
    """The result for one part of a block: its relative squared error to the teacher's activations, before and after."""

    block: str
    part: str
    before: Annotated[float, Between(0)]
    after: Annotated[float, Between(0)]


@dataclass(frozen=True)
class Epochs:
    """How each part is trained: how often on each batch, the seed, the highest rate."""

    count: int
    seed: int
    rate: float = 2e-4


class Commit(Protocol):
    """Writes a block's new values down, by their names in it, and puts them in place."""

    def __call__(self, block: str, new: Mapping[str, Tensor], said: Sequence[LocalPart], /) -> None: ...


@dataclass(frozen=True)
class _Met:
    """What one batch gives a block: arguments, which tokens are no padding, and what the teacher has at the ends."""

    args: Any
    kwargs: Any
    mask: Tensor | None
    wanted: Mapping[str, Tensor]


def of_one_block(model: nn.Module, blocks: Collection[str], trained: Collection[str]) -> set[str]:
    """Of the trained parameters those that one block holds, and nothing else: a tied one is not for a block to move."""
    holders: dict[int, set[str | None]] = {}
    names = dict(model.named_parameters(remove_duplicate=False))
    places = dict.fromkeys(blocks, model)
    for name, parameter in names.items():
        holders.setdefault(id(parameter), set()).add(block_of(name, places))
    return {name for name in trained if holders[id(names[name])] != {None} and len(holders[id(names[name])]) == 1}


def share_lost(tensor: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """``mean over tokens of ‖student - teacher‖² / ‖teacher‖²``: a token of large activations counts like others, as
    after the normalization that they go to.

    >>> share_lost(torch.tensor([[1.0, 0.0], [0.0, 8.0]]), torch.tensor([[1.0, 1.0], [0.0, 8.0]])).item()
    0.25
    """
    ours, theirs = (rows_of(each, mask).float() for each in (tensor, wanted.to(tensor.device)))
    sizes = theirs.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((ours - theirs).square().sum(-1) / sizes).mean()


def recover_blocks(
    student: Replay,
    teacher: Replay,
    way: Epochs,
    *,
    trained: Collection[str],
    masks_of: Callable[[str], Mapping[str, Tensor]],
    commit: Commit,
    follows: Mapping[str, Follows],
    already: Sequence[str] = (),
) -> Iterator[LocalPart]:
    """Trains block after block, in the order in which the model runs them; yields the `LocalPart` of each part.

    Args:
        student, teacher: the two models, installed, with the same batches.
        way: how a part is trained.
        trained: names of parameters that move, each of one block.
        masks_of: what is removed of a block that is loaded, by names in it.
        commit: what is done with a block's new values.
        follows: which of the teacher's blocks each block follows.
        already: blocks that are done, and only run.

    Raises:
        NotComparableError: the two models stack other blocks, or blocks of another width.
        ValueError: a loss is not finite.
    """
    for finished in track(already, "running finished blocks"):
        for theirs in (*follows[finished].skipped, *follows[finished].blocks):
            _passed_through(teacher, theirs)
        _passed_through(student, finished)
    for number in track(range(len(already), len(student.blocks)), "recovering blocks"):
        name = with_all_outputs(student, student.find_next)
        span = Follows((), ()) if name is None else follows[name]
        for skipped in span.skipped:
            _passed_through(teacher, skipped)
        if (found := with_all_outputs(teacher, teacher.find_next)) != next(iter(span.blocks), None):
            raise NotComparableError(STACKS_DIFFER.format(ours=name, theirs=found))
        if name is None:
            return
        student.weights.load(name, finished=False)
        block = student.blocks[name]
        own = {local: each for local, each in block.named_parameters() if full_name(name, local) in trained}
        masks = {local: mask for local, mask in masks_of(name).items() if local in own}
        with moving(block, own, masks) as held:
            said = _recovered(student, teacher, name, span.blocks, held, way, number)
            new = held.values()
        commit(name, new, said)
        yield from said
        _store(student, name)
        student.weights.unload(name)


def recover_locally(
    student: Host,
    teacher: Host,
    way: Epochs,
    *,
    trained: Collection[str],
    masks_of: Callable[[str], Mapping[str, Tensor]],
    commit: Commit,
    already: Sequence[str] = (),
    on_part: Callable[[LocalPart], None] = lambda _: None,
) -> str:
    """`recover_blocks` of two hosts; why some of it is left out, or nothing.

    Args:
        trained: names of parameters that move.
        on_part: called with each part when it is done.
    """
    follows = followed([*student.blocks], [*teacher.blocks], _sketching(student), _sketching(teacher))
    if isinstance(follows, str):
        return f"the local part, since {follows}"
    with student.replaying() as ours, teacher.replaying() as theirs:
        try:
            for part in recover_blocks(
                ours,
                theirs,
                way,
                trained=of_one_block(student.model, student.blocks, trained),
                masks_of=masks_of,
                commit=commit,
                follows=follows,
                already=already,
            ):
                on_part(part)
        except NotComparableError as error:
            return f"the local part, since {error}"
    return ""


def _sketching(host: Host) -> Callable[[str], Sketch]:
    """What gives a block's sketch, of the source's files: nothing is copied when it is asked."""

    def sketch(block: str) -> Sketch:
        host.weights.load(block, finished=False)
        try:
            return sketch_of(host.blocks[block])
        finally:
            host.weights.unload(block)

    return sketch


def _store(side: Replay, name: str) -> None:
    if _is_last(side):
        side.done.append(name)
    else:
        with_all_outputs(side, lambda: side.store(name))


def _is_last(replay: Replay) -> bool:
    return len(replay.done) + 1 == len(replay.blocks)


def _passed_through(side: Replay, name: str) -> None:
    side.weights.load(name, finished=True)
    _store(side, name)
    side.weights.unload(name)


def _recovered(
    student: Replay, teacher: Replay, name: str, span: Sequence[str], held: Moving, way: Epochs, number: int
) -> list[LocalPart]:
    block, forward = student.blocks[name], student.forwards[name]
    given = _given(student, name)
    args, kwargs, _ = given[0]
    theirs = dict(teacher.blocks[span[0]].named_modules())
    parts = [Part(OUTPUT, ())]
    if held.parameters:
        parts = parts_of_block(block, held.parameters, lambda: forward(*_copied(args), **_copied(kwargs)), theirs)
    wanted = _wanted_of_span(teacher, span, parts)
    with torch.no_grad():
        ours = run_to(block, OUTPUT, lambda: forward(*_copied(args), **_copied(kwargs)))
    parts = _comparable_parts(name, parts, ours, wanted[0])
    met = [_Met(*each, wants) for each, wants in zip(given, wanted, strict=True)]
    run = _Run(name, block, forward, met)
    return [
        run.descended(part, held, way, way.seed + 100 * number + at) for at, part in enumerate(parts) if part.parameters
    ]


def _given(side: Replay, name: str) -> list[tuple[Any, Any, Tensor | None]]:
    """Of each batch what the block is given, and which tokens count; what is alike in batches is kept once."""
    found: list[tuple[Any, Any, Tensor | None]] = []
    alike: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def kept(tensor: Tensor) -> Tensor:
        key = (tensor.shape, tensor.dtype)
        if key in alike and torch.equal(alike[key], tensor):
            return alike[key]
        own = tensor.detach().clone()
        alike.setdefault(key, own)
        return own

    def catch(reached: str, args: Any, kwargs: Any, _call: Callable[[], Any]) -> None:
        if reached == name:
            masks = Tokens.of(batch).for_block(side.blocks[name], args, kwargs, batch)
            found.append((mapped(args, kept), mapped(kwargs, kept), masks.own))

    for number, batch in enumerate(side.batches):
        side.run(number, batch, catch)
        if len(found) <= number:
            raise ValueError(
                f"batch {number} does not run {name}, which the first batch runs; pass batches of one kind."
            )
    return found


def _wanted_of_span(side: Replay, span: Sequence[str], parts: Sequence[Part]) -> list[dict[str, Tensor]]:
    """As `_wanted_of`, of several blocks of the teacher: the ends of halves of the first, the output of the last."""
    inner = [each for part in parts[:-1] for each in (part.end, part.sum)]
    output = [OUTPUT, parts[-1].sum]
    if len(span) == 1:
        return _wanted_of(side, span[0], dict.fromkeys([*inner, *output]))
    first = _wanted_of(side, span[0], dict.fromkeys(inner))
    for name in span[1:-1]:
        _passed_through(side, name)
    last = _wanted_of(side, span[-1], dict.fromkeys(output))
    return [{**one, **other} for one, other in zip(first, last, strict=True)]


def _wanted_of(replay: Replay, name: str, ends: Collection[str]) -> list[dict[str, Tensor]]:
    """What the teacher's block has at the ends of the parts, for each batch; the block is finished then."""
    replay.weights.load(name, finished=False)
    block, last = replay.blocks[name], _is_last(replay)
    wanted: list[dict[str, Tensor]] = [{} for _ in replay.batches]

    def run() -> None:
        for number, batch in enumerate(track(replay.batches, f"running the teacher's {name}")):
            found = wanted[number]

            def watch(_reached: str, _args: Any, _kwargs: Any, call: Callable[[], Any], found: Any = found) -> None:
                def keep(end: str, tensor: Tensor) -> None:
                    found[end] = tensor.detach().clone()

                with seen_at(block, [end for end in ends if end != OUTPUT], keep):
                    output = call()
                if (stream := stream_in(output)) is not None:
                    found[OUTPUT] = stream.detach().clone()
                if not last:
                    replay.keep(name, output)

            replay.run(number, batch, watch)
            if not last:
                replay.drop_unneeded(name, number, batch)
        replay.done.append(name)

    with_all_outputs(replay, run)
    replay.weights.unload(name)
    return wanted


def _comparable_parts(name: str, parts: Sequence[Part], ours: Tensor, wanted: Mapping[str, Tensor]) -> list[Part]:
    """Those whose ends the teacher has in the same shape; the others go with the next."""
    theirs = wanted.get(OUTPUT)
    if theirs is None or theirs.shape != ours.shape:
        shape = "no shape" if theirs is None else tuple(theirs.shape)
        raise NotComparableError(WIDTHS_DIFFER.format(name=name, ours=tuple(ours.shape), theirs=shape))
    found: list[Part] = []
    waiting: tuple[str, ...] = ()
    for part in parts:
        waiting += part.parameters
        if part.end in wanted and wanted[part.end].shape == ours.shape:
            there = part.sum in wanted and wanted[part.sum].shape == ours.shape
            found.append(Part(part.end, waiting, part.sum if there else part.end))
            waiting = ()
    return found


def _copied(value: Any) -> Any:
    """For one run of a block, which may write to it; as wide as its weights."""
    return mapped(value, lambda tensor: widened(tensor).clone())


@dataclass(frozen=True)
class _Run:
    """A block and what it is run on."""

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    met: Sequence[_Met]

    def lost(self, end: str, met: _Met) -> Tensor:
        tensor = run_to(self.block, end, lambda: self.forward(*_copied(met.args), **_copied(met.kwargs)))
        return share_lost(tensor, met.wanted[end], met.mask)

    @torch.no_grad()
    def whole(self, end: str, several: Sequence[_Met] = ()) -> float:
        """The mean share that is lost, of these or of all."""
        several = several or self.met
        return sum(float(self.lost(end, met)) for met in several) / len(several)

    def close(self, part: Part, held: Moving) -> None:
        """Least squares for the matrix that is added up where the part ends, if there is one, and if it helps where it
        was not fitted."""

        def run(met: _Met) -> Tensor:
            return run_to(self.block, part.sum, lambda: self.forward(*_copied(met.args), **_copied(met.kwargs)))

        name = adds_up(self.block, part.parameters, lambda: run(self.met[0]))
        layer = None if name is None else self.block.get_submodule(name)
        if not isinstance(layer, nn.Linear) or (layer.bias is not None and f"{name}.bias" not in part.parameters):
            return
        own = {key: held.parameters[f"{name}.{key}"] for key in ("weight", "bias") if getattr(layer, key) is not None}
        mask, gathered = held.masks.get(f"{name}.weight"), Gathered(layer)
        apart = len(self.met) // 4 or (len(self.met) > 1)  # are not summed at first, and say how much damping is best
        summed, judging = self.met[: len(self.met) - apart], self.met[len(self.met) - apart :] or self.met

        def add(several: Sequence[_Met]) -> None:
            for met in several:
                gathered.run(lambda met=met: run(met), met.wanted[part.sum], met.mask)  # type: ignore[misc]

        @torch.no_grad()
        def put(values: Mapping[str, Tensor]) -> None:
            for key, each in values.items():
                own[key].copy_(each)

        start = {key: each.detach().clone() for key, each in own.items()}
        add(summed)

        def error(damping: float) -> float:
            put(gathered.solved(mask, damping))
            found = self.whole(part.end, judging)
            put(start)
            return found

        best = best_damping(DAMPINGS, error, self.whole(part.end, judging))
        if best is not None:
            if apart:
                add(judging)
            put(gathered.solved(mask, best[0]))

    def descended(self, part: Part, held: Moving, way: Epochs, seed: int) -> LocalPart:
        named = {local: held.parameters[local] for local in part.parameters}
        start = {local: each.detach().clone() for local, each in named.items()}
        before = self.whole(part.end)
        flags = {local: each.requires_grad for local, each in held.parameters.items()}
        try:
            for local, each in held.parameters.items():
                each.requires_grad_(local in named)
            self.close(part, held)
            movers = movers_for(self.block, named, held.masks)
            descent = Descent(movers, way.count * len(self.met), rate=way.rate)
            with torch.enable_grad():
                for epoch in range(way.count):
                    for at in order_of(seed, epoch, len(self.met)):
                        descent.step(self.lost(part.end, self.met[at]))
        finally:
            for local, each in held.parameters.items():
                each.requires_grad_(flags[local])
        after = self.whole(part.end)
        if not after < before:
            with torch.no_grad():
                for local, each in named.items():
                    each.copy_(start[local])
            after = before
        return LocalPart(self.name, part.end or "output", before, after)
