"""The verb `shrink`: coupled slices leave a model, which stays an ordinary module, but smaller; or a directory.

Law: the smaller model computes what the original computes with the removed entries zeroed, and a call that fails leaves
the model as it was.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.allocation import Allocation
from secateur.checkpoints import places
from secateur.coupling import Branch, Coupling, Scope, counts_kept, find_coupling
from secateur.criteria import magnitude
from secateur.kinds import Blocks, Branches, Experts, Heads, Kind, Outputs
from secateur.models import (
    NUMBERS,
    ByText,
    DenseOutputs,
    InMemory,
    example_of,
    loaded_model,
    naming_batch,
    reached_by_name,
    shorter,
    with_batch_in_errors,
    without_cache,
)
from secateur.pipeline import reestimate_batchnorm
from secateur.runtimes import Elsewhere, Runtime, Timer
from secateur.shrinking.apply import carry_out
from secateur.shrinking.calibrated import calibrated_selection
from secateur.shrinking.costs import SECONDS, cost_of
from secateur.shrinking.directory import CheckpointShrinking, shrink_units_directory
from secateur.shrinking.gates import Gated
from secateur.shrinking.kinds.blocks_directory import ShrunkDepth, shrink_blocks_directory
from secateur.shrinking.kinds.branches import OutputCosts
from secateur.shrinking.kinds.experts import leave_experts
from secateur.shrinking.kinds.experts_directory import ShrunkExperts, shrink_experts_directory
from secateur.shrinking.kinds.heads import leave_heads
from secateur.shrinking.kinds.outputs import leave_outputs
from secateur.shrinking.kinds.patching import leave_branches
from secateur.shrinking.plan import Plan
from secateur.shrinking.request import InDirectory, Request, request, warn_without_data
from secateur.shrinking.result import model_content
from secateur.shrinking.select import Choice, Leaving, Left, names_of
from secateur.shrinking.select import choose as choose_units
from secateur.support import (
    Forward,
    Part,
    Returns,
    Undo,
    check_batches,
    check_data,
    for_directories,
    mapped,
    naming_example,
    normal,
    on_rank_zero,
    private,
    refuse,
    refuse_sharded,
    refuse_unloaded,
    tensors_of,
    unwrapped,
    without_autocast,
)

# what leaves before units, in this order: the value that `leave=` takes, and who chooses, proves and repairs
LEAVE: dict[type[Any], Callable[[Leaving, Any], Left]] = {
    Branches: leave_branches,
    Experts: leave_experts,
    Heads: leave_heads,
    Outputs: leave_outputs,
}


@dataclass(frozen=True, eq=False)
class Shrunk(ByText):
    """The result of `shrink`; prints as a table.

    Attributes:
        model: the module that became smaller, the same object as before.
        asked: what was asked for.
        got: the fraction of the target that left, the nearest to what was asked that exists (times are measured).
        beside: the two that are nearest to what was asked and exist, less first; ``got`` is one of them.
        branches: the residual branches that the model had.
        stayed: ``{name: why}`` of branches that were not to leave, or could not.
        patched: ``{name: share}`` of weights that were repaired: the share that each recovers of the squared residual,
            which is what the removed branches behind it added to the stream, on the calibration.
        heads: ``{group: (heads before, after)}`` of the attentions of which heads left.
        outputs: ``{group: (outputs before, after)}`` of the heads of which outputs left.
        compared: in one mode the model compares its outputs, as a softmax does: now those that stay.
        unread: ``{name: integer}`` of modules that still say how many there were, as no pass read them.
        experts: ``{router: (experts before, after)}`` of the mixtures of which experts left.
        unreached: ``{router: experts}`` that no token of the batches was sent to.
        mended: ``{router: share}``: the share of the squared residual behind a mixture that its repaired experts
            recover on held-out tokens; ``{router: why}`` in ``unmended`` of those that stay as they were.
        scope: the groups of channels of the model without the branches and experts that left, and what is frozen, also
            by the proof.
        kept: which units stay, of the groups that lost some.
        plans: what left, in order: branches, then experts, then channels.
        gates: what gates came to where they chose, ``{"branches", "experts" or "units": Gated}``; ``lost`` is how far
            the outputs on the batches are from the dense ones in the end.
        rotated: the groups of dimensions inside heads that were rotated before some left.
        in_blocks: ``{parameter: note}`` of the weights whose Gram matrix was too large, so that it was summed, and the
            weight repaired, in blocks of inputs.
        multiply_adds: those of the example before and after, as far as they are contractions.
        parameters, nbytes: ``(before, after)``, the bytes of parameters and buffers.
    """

    model: nn.Module = field(repr=False)
    asked: Request
    got: float
    beside: tuple[float, float]
    branches: Sequence[Branch] = field(repr=False)
    scope: Scope = field(repr=False)
    kept: Mapping[str, npt.NDArray[np.bool_]] = field(repr=False)
    plans: Sequence[Plan] = field(repr=False)
    multiply_adds: tuple[int, int]
    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    stayed: Mapping[str, str] = field(default_factory=dict, repr=False)
    patched: Mapping[str, float] = field(default_factory=dict, repr=False)
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    outputs: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    compared: bool = False
    unread: Mapping[str, int] = field(default_factory=dict, repr=False)
    experts: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    unreached: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    mended: Mapping[str, float] = field(default_factory=dict, repr=False)
    unmended: Mapping[str, str] = field(default_factory=dict, repr=False)
    gates: Mapping[str, Gated] = field(default_factory=dict, repr=False)
    lost: float | None = None
    rotated: Sequence[str] = ()
    in_blocks: Mapping[str, str] = field(default_factory=dict, repr=False)

    def content(self) -> Iterable[Part]:
        return model_content(self, full=True)

    def summary(self) -> Iterable[Part]:
        return model_content(self, full=False)


@Returns[Shrunk, CheckpointShrinking | ShrunkExperts | ShrunkDepth]()
@without_autocast()
def shrink(
    model: nn.Module | Path | str,
    example_inputs: Any = None,
    sparsity: float | None = None,
    *,
    leave: Kind | str | Iterable[Kind | str] | None = None,
    target: str = "params",
    runtime: str | Path | Runtime | Elsewhere | Callable[..., float] | None = None,
    batches: Iterable[Any] | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    criterion: str | Callable[..., Tensor] = magnitude,
    choose: str | None = None,
    allocate: str | Allocation | None = None,
    round_to: int | None = None,
    uniform: bool = False,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    repair: bool = True,
    rotate: bool = False,
    forward: Forward | None = None,
    modes: Iterable[bool] | None = None,
    more_inputs: Iterable[Any] = (),
    optimizer: torch.optim.Optimizer | None = None,
    verify: bool = True,
    report: Callable[[Shrunk], None] | None = None,
    out: Path | str | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
) -> Shrunk | CheckpointShrinking | ShrunkExperts | ShrunkDepth:
    """Take whole channels, heads and hidden units out of a model, in place; returns what left, which prints as a table.

    Which slices live and die together is found by watching a forward pass (`find_coupling`); the outputs of the model
    keep their shapes. With ``leave``, experts, residual branches or blocks leave before.

    With ``batches``, data decides what leaves: the units whose removal costs the outputs of the layers behind them
    least after these are repaired (optimal brain surgery on the Gram matrix of their inputs, as in ZipLM,
    arXiv:2302.04089, and SlimGPT, arXiv:2412.18110), with groups competing by the same loss. Then what stays is
    repaired: block by block, least squares moves the columns that are left. Without, each unit's score is the sum of
    the criterion's scores over all entries that would leave with it, divided by its group's mean; biases and
    normalizations count only where a group has no matrices.

    Of a Hugging Face directory a smaller one is written, which ``from_pretrained`` loads, as with ``uniform`` of the
    loaded model. The model is only built on the meta device, and its files are read twice: once to rank, once to slice,
    one tensor at a time. Shards keep their names, tensors their order, dtypes and ``__metadata__``; ``config.json`` and
    the index say the new sizes, others are copied, ``secateur.json`` and what each tensor was are added. With
    ``batches`` the model is run, block by block as by `oneshot`: once to measure, and once more to repair what
    multiplied the units. One block's weights are in memory, twice while it is repaired, and what blocks pass on. A run
    that was killed goes on where it was when it is started again, from ``<out>.unfinished``, to the same bytes; in
    processes of `torch.distributed` each takes its share of the batches.

    Args:
        model: any module; its parameters stay the same objects, with smaller data. Or a directory with ``config.json``
            and safetensors files, sharded or not.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments, which is completed to
            ask for no cache and no routers' scores beside the results where it does not say so. None: the first of
            ``batches``; of it two rows, and a few tokens of a text, but for a ``target`` of time.
        sparsity: the fraction of ``target`` that leaves, in [0, 1): what leaves is the nearest that exists, off by at
            most half of the smallest step. Where steps are so coarse that this is more than a twentieth of the target,
            the smaller of the two nearest models is taken. None: the units that are zero in all members leave, or, with
            ``leave``, nothing but that.
        leave: what leaves first: `Branches`, `Experts`, `Heads`, `Outputs` of a module, each a value or a word such as
            ``"experts:25%"`` or ``["branches:3", "outputs:person,car"]``; units make up what is missing to
            ``sparsity``. Of a directory one kind leaves a run, `Experts`, `Blocks` or `Outputs`, and nothing else.
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep, or its name; see `secateur.criteria`.
        choose: "gates" learns which units leave, which of ``Experts`` and ``Branches``, and which of a directory's
            ``Blocks``, on the loss of the whole model: a number for each, between 0 and 1, multiplied in where matrices
            read it, descends on how far the outputs are from the dense ones, while all together cost what may be left,
            in 200 steps of a batch each.
            None: by what the next matrices lose, of experts by their rank, of branches one after the other. "swaps":
            so, too, but units that left come back while others leave, as long as less is lost (OSSCAR,
            arXiv:2403.12983); that takes about twice the time of the choice and gains little.
        allocate: how many units each group keeps, or its word; it is given the groups by their names. By default the
            same fraction of each, but the width of a residual stream stays until others have lost half, and heads as
            long as it is enough that others leave; of "units" all lose it. An allocation that is given, such as
            `uniform`, decides about all groups.
        include, exclude: globs over the names of groups and of all their tensors: shrink only these; leave these whole.
        round_to: counts are multiples of this, or all. By default of 16 in groups of 64 units or more, since other
            counts run no faster; of 8, 4, 2 or 1 where one such step would be more than 1 % of the target; of
            32, 16 or 8 where the times of a table have such steps.
        target: what ``sparsity`` is a fraction of: ``"params"`` (entries of parameters), ``"macs"`` (multiply-adds of
            the example), ``"bytes"`` (of parameters and buffers), ``"latency"`` (time of the example in evaluation
            mode, measured beside the model's own; not of a directory), ``"units"``; of mixtures ``"active_params"``
            (those that one token passes through), of what reads text ``"kv_bytes"`` (what its cache keeps of a token).
        runtime: where that time is measured, with as many threads as torch has: ``"torch"``, which is meant if left
            out, ``"onnxruntime"``, ``"onnxruntime:int8"``, ``"onnxruntime:int4"``, ``"openvino"``, ``"openvino:int8"``,
            or a value of `secateur.runtimes`. Each model that is timed is exported. Or by what each operation takes on
            another machine: a table (``"board.csv"``) or a function, as of `secateur.fit`.
        evidence: ``{name: {keyword: Tensor}}`` for a criterion that names some; see `secateur.evidence.collect`.
        batches: real inputs: what a DataLoader yields, or
            `secateur.read_calibration`. They are run through it twice, in evaluation mode, a block at a time; padding
            by an ``attention_mask`` does not count. The criterion ranks only units that nothing is measured of: no
            matrix in a block multiplies what they give. They say which branches and experts leave, too.
        repair: move what stays, too: columns, what branches added is merged into the weights before them, and the last
            matrices of experts that stay. Without batches it means nothing.
        rotate: before dimensions inside heads leave, rotate those of a module's values, and of its queries and keys,
            so that what matters least leaves; where nothing lies between that is of each dimension by itself, such as
            rotary positions. It asks for ``batches`` and ``repair``, and for one more walk over the blocks. Of a
            directory, and with ``uniform``, all heads of a role keep as many, where the configuration can say how wide
            they are, and which frequencies rotary positions keep (LongRoPE, Ding et al. 2024, arXiv:2402.13753).
        forward: ``(model, batch) -> outputs``, how a batch is run; see `secateur.oneshot`.
        modes, more_inputs: which passes to watch; see `find_coupling`.
        optimizer: its state (moments, momentum) loses the same slices, so that training goes on.
        uniform: keep what the model's configuration can say, in general as many units in each layer, and change it, so
            that ``save_pretrained`` and ``from_pretrained`` need nothing else; a model without a configuration keeps
            equally many units in groups that play the same role. Which units leave is still each layer's own choice.
        verify: compare, on a copy with random weights in float64, with the original whose removed entries are zero.
            What does not agree is frozen, and the rest tried again. Of a directory's large model the proof is on one of
            the same class with few and narrow layers.
        report: called in the end with what is returned; if it raises, the model is as it was.
        out: for a directory, the one to write, which must not exist. None: only say what would leave.
        activations, device: for a directory with batches, as for `oneshot`.

    Returns:
        A `Shrunk`: what was asked and what left, what is frozen and why; ``.model`` is the module, the same object. Of
        a directory a `CheckpointShrinking`, `ShrunkExperts` or `ShrunkDepth`.

    Raises:
        ValueError: nothing can leave, or not as much as asked; the message says what is frozen and why. With
            ``batches``: there are none, one does not run through the model, they hold NaN,
            or nothing that may leave is measured.
        CheckpointError: a damaged checkpoint, one that is not of its model, or an ``out`` that cannot be. After any
            error nothing is left under it.

    Warns:
        WithoutDataWarning: a model of residual blocks is to lose units, and neither ``batches`` nor a criterion with
            evidence says which.

    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> print(shrink(model, torch.zeros(1, 4), 0.5))
    Group       Units  Leaves with
    0.weight  16 -> 8  0.bias[0], 2.weight[1]
    <BLANKLINE>
    Stays whole, such as  Dimensions  because
    0.weight[1]                    1  an input of the model
    2.weight[0]                    2  an output of the model
    <BLANKLINE>
    Total          before  after   left
    parameters        131     67  51.1%
    multiply-adds     112     56  50.0%
    bytes           524 B  268 B  51.1%
    Asked: 50.0% of the params. Gone: 48.9%. The nearest that exist are 48.9% and 55.0%.
    Proved on random weights that nothing else changed.
    >>> model
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=3, bias=True)
    )

    Half of these units are copies, so with data nothing is lost:

    >>> blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2)))
    >>> with torch.no_grad():
    ...     for block in blocks:
    ...         _ = block[0].weight[3:].copy_(block[0].weight[:3]), block[0].bias[3:].copy_(block[0].bias[:3])
    >>> batches = [torch.randn(32, 4) for _ in range(2)]
    >>> before = blocks(batches[0])
    >>> done = shrink(blocks, batches[0], 0.45, batches=batches, include="*.0.bias", uniform=True)
    >>> [block[0].out_features for block in blocks], torch.allclose(blocks(batches[0]), before, atol=1e-3)
    ([3, 3], True)

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    >>> folder = Path(tempfile.mkdtemp())
    >>> LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(folder / "dense")
    >>> done = shrink(folder / "dense", sparsity=0.5, out=folder / "small")
    >>> LlamaForCausalLM.from_pretrained(folder / "small").num_parameters() == done.parameters[1]
    True
    """
    in_directory = isinstance(model, Path | str)
    if isinstance(example_inputs, float):
        raise TypeError(f"the second argument is what the model is called with; pass sparsity={example_inputs}.")
    if rotate and (batches is None or not repair):
        raise ValueError("rotate moves weights by real inputs; pass batches= (--data), with repair, or leave it out.")
    asked = request(
        sparsity=sparsity,
        leave=leave,
        criterion=criterion,
        choose=choose,
        allocate=allocate,
        include=include,
        exclude=exclude,
        round_to=round_to,
        target=target,
        runtime=runtime,
        evidence=evidence,
        uniform=uniform or in_directory,
        rotate=rotate,
        verify=verify,
    )
    if batches is None and asked.choose is not None:
        raise ValueError(f"{asked.choose} need real inputs; pass batches=, or leave out choose=.")
    if isinstance(model, Path | str):
        why = "is for modules: a directory is called as its configuration says; load the model for this."
        refuse(
            why,
            evidence=evidence,
            modes=modes,
            more_inputs=more_inputs or None,
            optimizer=optimizer,
            report=report,
        )
        if asked.gates and batches is not None:
            batches = list(batches)
        place = InDirectory(*places(model, out), batches, repair, forward, activations, device)
        with torch.inference_mode(False):
            smaller = _shrunk_directory(place, asked, example_inputs)
        if isinstance(smaller, CheckpointShrinking | ShrunkExperts) and smaller.gates and place.out is not None:
            smaller = replace(smaller, lost=on_rank_zero(functools.partial(_lost_in, place)))
        return smaller.over_texts(model, batches, forward=forward, activations=activations, device=device)
    for_directories(out=out, activations=activations, device=device)
    refuse(
        "is of a directory; a module's experts leave by batches=.",
        profile=asked.experts.profile,
        plan=asked.experts.plan,
    )
    if asked.blocks:
        raise ValueError("Blocks leave a directory; of a module residual branches leave: leave=Branches(...).")
    if batches is None and asked.experts.rank not in (None, "criterion"):
        raise ValueError(f'the rank "{asked.experts.rank}" of experts runs the model on real inputs; pass batches=.')
    given, model = model, unwrapped(model, resized=True)
    refuse_sharded(model, "shrink")
    _check_values(model)
    held = None if batches is None else _held(batches)  # run through several times
    by_batch = example_inputs is None
    if by_batch:
        example_inputs = _example_in(model, held, forward, target)
    example_inputs = without_cache(model, example_inputs)
    inputs = [example_inputs, *(without_cache(model, each) for each in more_inputs)]
    watched = functools.partial(
        find_coupling,
        model,
        example_inputs,
        modes=None if modes is None else tuple(modes),
        more_inputs=inputs[1:],
    )
    with naming_batch(held, held[0]) if by_batch and held else naming_example(model, example_inputs):
        coupling = before = watched()
    reach = reached_by_name(model, batches, forward=forward)
    dense, work = _totals(model), coupling.multiply_adds({})
    dense_outputs = None  # compared with the dense outputs when batch normalizations are re-estimated
    if held is None:
        warn_without_data(model, before, asked)
    else:
        forward = with_batch_in_errors(held, forward)
        if repair and any(map(private.is_batchnorm, model.modules())):
            dense_outputs = OutputCosts(model, held, forward)
    judge = None  # of the outputs in the end, where gates are learnt on them
    if held is not None and asked.gates and not any(isinstance(each, Outputs) for each in asked.leave):
        judge = DenseOutputs(model, held, forward, numbers=NUMBERS // 4)
    known = names_of(before)
    plans: list[Plan] = []
    facts: dict[str, Any] = {}  # on what left before units
    choice: Choice | None = None
    gates: dict[str, Gated] = {}
    rotated: Sequence[str] = ()
    share, rest = 1.0, asked  # what is left of the target without that, and what is to leave of it
    first = [each for kind in LEAVE for each in asked.leave if isinstance(each, kind) and each.remove]
    if any(isinstance(each, Branches) for each in first):
        known |= {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    with _out_of_inference(model), Undo() as undo:
        leaving = functools.partial(
            Leaving, model, inputs=inputs, known=known, batches=held, forward=forward, repair=repair, undo=undo
        )
        for kind in first:
            share_left = _share_left(model, coupling, example_inputs, asked)
            left = LEAVE[type(kind)](leaving(coupling=coupling, asked=rest), kind)
            plans.append(left.plan)
            gates |= {} if left.gates is None else {type(kind).__name__.lower(): left.gates}
            undo.call(carry_out(model, left.plan, optimizer))
            if left.configured is not None:
                undo.call(left.configured.adopt(model, left.fields))
            coupling = watched()
            facts |= {**left.facts, **left.mend(coupling)}
            share *= share_left(coupling)
            rest = replace(asked, sparsity=0.0 if sparsity is None else max(0.0, 1 - (1 - sparsity) / share))
        if dense_outputs is not None and held is not None and "outputs" in facts:  # what stays of them is what it was
            dense_outputs = OutputCosts(model, held, forward)
        scope = Scope.of(coupling)
        if rest.sparsity or not first:
            subject = leaving(coupling=coupling, asked=rest).target()
            saved: Mapping[str, Tensor] = {}
            if held is None:
                choice = choose_units(subject, rest, known)
            else:
                host = InMemory(model, held, forward=forward)
                found = calibrated_selection(subject, rest, host, repair=repair, known=known, undo=undo)
                choice, saved = found.choice, found.before
                gates |= {} if found.gates is None else {"units": found.gates}
                rotated = found.rotated
            plans.append(choice.plan)
            undo.call(carry_out(model, choice.plan, optimizer, saved))
            if dense_outputs is not None and held is not None and choice.plan.tensors:
                _reestimate(model, held, dense_outputs, forward, undo)
            if subject.configured is not None:
                undo.call(subject.configured.adopt(model, choice.fields))
        kept = {} if choice is None else choice.kept
        counts = counts_kept(kept)
        parameters, nbytes = zip(dense, _totals(model), strict=True)
        done = Shrunk(
            model=given,
            asked=asked,
            got=1 - share * (1.0 if choice is None else choice.left),
            beside=(1 - share, 1 - share) if choice is None else _gone(share, choice),
            branches=before.branches,
            scope=scope if choice is None else choice.scope,
            kept=kept,
            plans=plans,
            multiply_adds=(work, coupling.multiply_adds(counts)),
            parameters=parameters,
            nbytes=nbytes,
            gates=gates,
            lost=None if judge is None else judge.of(model),
            rotated=rotated,
            in_blocks={} if choice is None else choice.in_blocks,
            reach=reach,
            **facts,
        )
        if report is not None:
            report(done)
    return done


def _shrunk_directory(
    place: InDirectory, asked: Request, example_inputs: Any
) -> CheckpointShrinking | ShrunkExperts | ShrunkDepth:
    """The smaller directory, by the one kind that leaves it."""
    source = place.source
    if len(asked.leave) + bool(asked.sparsity) > 1:
        raise ValueError(
            f"{source}: of a directory one kind leaves a run, or units by sparsity=. Ask for one of them, and then for "
            "the next with OUT as the directory."
        )
    if asked.leave and not isinstance(asked.leave[0], Blocks | Branches | Experts | Outputs):
        kind = type(asked.leave[0]).__name__
        raise ValueError(f"{source}: {kind} leave a module; load the model for this, and save what is left.")
    if asked.leave and isinstance(asked.leave[0], Experts):
        refuse("is not needed: a directory's experts are found by its configuration.", example_inputs=example_inputs)
        return shrink_experts_directory(place, asked)
    if asked.leave and not isinstance(asked.leave[0], Outputs):
        return shrink_blocks_directory(place, asked, example_inputs)
    if asked.sparsity is None and not asked.leave:
        raise ValueError(f"{source}: say how much leaves, by sparsity= or by leave=.")
    return shrink_units_directory(place, asked, example_inputs)


def _lost_in(place: InDirectory) -> float:
    """How far the outputs of the directory that was written are from the dense ones, on the batches."""
    assert place.batches is not None
    assert place.out is not None
    dense = DenseOutputs(
        loaded_model(place.source, place.device), list(place.batches), place.forward, numbers=NUMBERS // 4
    )
    return dense.of(loaded_model(place.out, place.device))


def _reestimate(
    model: nn.Module, batches: Sequence[Any], costs: OutputCosts, forward: Forward | None, undo: Undo
) -> None:
    """Re-estimates batch normalizations where that brings the outputs nearer to the dense model's. After a good repair
    the inputs are nearly what they were, and the statistics of the training are better than those of a few batches."""
    now, buffers = costs.now(), [*model.buffers()]
    before = undo.values(*buffers)
    reestimate_batchnorm(model, batches, forward=forward)
    if not costs.now() < now:
        for buffer, numbers in zip(buffers, before, strict=True):
            buffer.copy_(numbers)


def _check_values(model: nn.Module) -> None:
    """Raises ValueError for a model that has nothing to rank."""
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters, so nothing of it can leave.")
    refuse_unloaded(model)


def _out_of_inference(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context outside of a caller's inference mode, since what is made in it can neither be told apart by versions
    nor trained; a model that was made in it stays in it."""
    made = any(each.is_inference() for each in model.parameters())
    return contextlib.nullcontext() if made else torch.inference_mode(False)


def _held(batches: Iterable[Any]) -> list[Any]:
    check_batches(batches)
    with torch.inference_mode(False):
        held = [mapped(batch, normal) for batch in batches]
    check_data(held, "or leave batches out to rank by the criterion")
    return held


def _example_in(model: nn.Module, batches: Sequence[Any] | None, forward: Forward | None, target: str) -> Any:
    """The example inputs that the first batch gives."""
    if batches is None or forward is not None:
        raise ValueError(
            "give example_inputs, what the model is called with; or batches= without forward=, of which the first says "
            "it."
        )
    if target == "latency":
        return example_of(model, batches[0], None)
    return shorter(example_of(model, batches[0]))


def _gone(share: float, choice: Choice) -> tuple[float, float]:
    less, more = choice.beside
    return 1 - share * less, 1 - share * more


def _totals(model: nn.Module) -> tuple[int, int]:
    """Parameters, and bytes of all tensors."""
    tensors = tensors_of(model).values()
    return sum(each.numel() for each in model.parameters()), sum(each.nbytes for each in tensors)


def _share_left(model: nn.Module, before: Coupling, example_inputs: Any, asked: Request) -> Callable[[Coupling], float]:
    """A function that says, once branches have left, which share of the model's present target is left."""
    if asked.target == "units":
        return lambda _: 1.0  # a branch has none: the fraction is of those that stay
    if asked.target == "latency":
        timer = Timer(copy.deepcopy(model), example_inputs, asked.runtime, seconds=SECONDS)

        def ratio(_: Coupling) -> float:
            dense, left = timer(model)
            return left / dense

        return ratio
    whole = cost_of(model, before, example_inputs, asked.target)({})
    return lambda after: cost_of(model, after, example_inputs, asked.target)({}) / whole if whole else 1.0
