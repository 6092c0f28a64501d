"""The verb `sparsify`: choose weights, make masks, zero what is not kept; with data, by what the data says.

Law: every mask is ready before the first weight changes, and a call that fails leaves the weights as they were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.allocation import Allocation, Tables, check_sparsity, settled
from secateur.checkpoints import CheckpointSparsification, sparsify_files
from secateur.criteria import magnitude
from secateur.evidence import collect, needs
from secateur.models.reach import reached_by_name
from secateur.patterns import Pattern, Unstructured
from secateur.pipeline import Masks, apply_, attached_masks, batchnorms, choose_masks, reestimate_batchnorm
from secateur.selection import LazyScores
from secateur.support import (
    Forward,
    Loss,
    Returns,
    Undo,
    check_batches,
    directories,
    for_directories,
    refuse,
    repeatable,
    track,
)
from secateur.targets import check_lengths, find_targets, stored_inputs_first, turned, turned_evidence

MOST_ROUNDS = 1_000_000  # each of which has a sparsity in a list


@Returns[Masks, CheckpointSparsification]()
def sparsify(
    model: nn.Module | Path | str,
    sparsity: float | None = None,
    *,
    pattern: str | Pattern | None = None,
    criterion: str | Callable[..., Tensor] = magnitude,
    allocate: str | Allocation | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    within: Mapping[str, Tensor] | None = None,
    evidence: Mapping[str, Mapping[str, Tensor]] | None = None,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    forward: Forward | None = None,
    rounds: int = 1,
    reestimate: bool | None = None,
    out: Path | str | None = None,
    seed: int = 0,
) -> Masks | CheckpointSparsification:
    """Zero a fraction of a model's weights, in place, and return the masks ``{name: bool tensor, True = kept}``.

    They are a dict; printed, they are a table of what is kept of each weight. Of a directory a copy is written to
    ``out``, without its model code: shards, tensor order, dtypes, ``__metadata__``, the index and every other file stay
    byte for byte, and only the bytes of removed weights become zero. ``secateur.json`` is added. One tensor and its
    mask are in memory at a time.

    By default global magnitude pruning: of all weights that `find_targets` finds, exactly
    ``round(sparsity · weights)`` go, those with the smallest ``|w|``, and each tensor keeps at least one. To train on,
    call `apply_` after each optimizer step; to make the zeros reversible, `attach` the masks instead.

    Weights compete as widely as the criterion says that its scores compare (`secateur.criteria.compares`): over the
    model, as magnitudes do; within a layer, RIA's; within an output, Wanda's. Within layers and outputs each of them
    loses the same share, rounded in each. A wider competition is carried out if it is asked for, with a warning.

    With ``batches``, what the criterion asks for is collected from them, and the running statistics of batch
    normalization are re-estimated on the pruned model, so that these buffers change too. With ``rounds``, the sparsity
    grows as 1 - (1 - s)^(k / rounds), and each round's evidence comes from the model that the former rounds left:
    iterative SynFlow (Tanaka et al. 2020, arXiv:2006.05467: 100 rounds) and FORCE (de Jorge et al. 2020,
    arXiv:2006.09081).

    Where the model is run after weights were zeroed (more than one round, or re-estimation), a copy of the weights is
    held until the end, so that a failure, such as a loss that becomes NaN, can put them back.

    Args:
        model: any module; or a Hugging Face directory, or any with ``*.safetensors`` files.
        sparsity: fraction of units removed, in [0, 1]; none for a pattern that fixes it, such as ``NM(2, 4)``.
        pattern: who competes with whom, or a word for it, such as ``"2:4"``; see `secateur.patterns`. `Rows` by default
            for scores that compare within an output, else `Unstructured`. It is applied to (outputs, inputs), also
            where transformers' ``Conv1D`` stores (inputs, outputs).
        criterion: ``(weight, *, <evidence>) -> scores``, higher = keep, or its name; see `secateur.criteria`.
        allocate: how many units each tensor keeps, or its name; see `secateur.allocation`. `everywhere` by default for
            scores that compare over the model, else `uniform`.
        include, exclude: globs over names of parameters, or of tensors in files; see `find_targets`.
        within, evidence: see `make_masks`. Where masks are attached, they are earlier masks: what they removed stays
            removed and counts.
        batches: what a DataLoader yields: tensors, tuples that begin with the input, or mappings of keyword arguments.
            An iterator that can be gone through only once is kept in a list if it is needed again; a criterion that
            asks for ``flow`` alone looks at the first batch only. The masks say what each text
            never reached, where texts have names (`read_calibration`).
        loss, forward: see `secateur.evidence.collect`.
        rounds: in how many steps; masks nest.
        reestimate: whether to run `reestimate_batchnorm` after every round; by default if there are batches and a
            BatchNorm.
        out: for a directory, the one to write, which must not exist. Nothing of it is run, so that ``within``,
            ``evidence``, ``batches`` and what belongs to these are for modules.
        seed: for a directory, of criteria that draw random numbers; for a module `torch.manual_seed` is.

    Raises:
        CheckpointError: a damaged checkpoint, or an ``out`` that cannot be. After any error nothing is left under it.
        ValueError, TypeError: what `find_targets`, `make_masks` and `collect` refuse; a criterion asks for evidence
            and there are no batches; rounds with a pattern that fixes its sparsity, or with evidence gathered before.
            The model is unchanged then, as after any other exception.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> masks = sparsify(model, 0.75)
    >>> sum(int(mask.sum()) for mask in masks.values())
    32
    >>> def wanda(weight, *, input_norm):
    ...     return weight.abs() * input_norm
    >>> masks = sparsify(model, 0.875, criterion=wanda, batches=[torch.randn(4, 8)], rounds=2)
    >>> sum(int(mask.sum()) for mask in masks.values())
    16

    >>> import tempfile
    >>> from safetensors.torch import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "dense").mkdir()
    >>> save_file({"fc1.weight": torch.tensor([[1.0, -4.0, 3.0, 2.0]])}, folder / "dense/model.safetensors")
    >>> done = sparsify(folder / "dense", 0.5, out=folder / "sparse")
    >>> load_file(folder / "sparse/model.safetensors")
    {'fc1.weight': tensor([[ 0., -4.,  3.,  0.]])}
    """
    criterion, pattern, allocate = settled(criterion, pattern, allocate)
    if isinstance(model, Path | str):
        why = "is for modules: files of a directory are read, and nothing is run; use oneshot, or load the model."
        refuse(
            why, within=within, evidence=evidence, batches=batches, loss=loss, forward=forward, reestimate=reestimate
        )
        refuse(why, rounds=None if rounds == 1 else rounds)
        places = directories(model, out)
        return sparsify_files(*places, sparsity, pattern, criterion, allocate, include, exclude, seed)
    refuse("is for directories; of a module call torch.manual_seed before.", seed=seed or None)
    for_directories(out=out)
    weights: dict[str, Tensor] = dict(find_targets(model, include=include, exclude=exclude))
    # an unstructured mask is the same either way, but for the order of ties
    inputs_first = [] if pattern == Unstructured() else stored_inputs_first(model, weights)
    attached = {name: mask.ne(0) for name, mask in attached_masks(model, weights).items()}
    within = {**attached, **(within or {})} or None
    asked = needs(criterion)
    collecting = bool(asked) and evidence is None
    if collecting and batches is None:
        raise TypeError(
            f"the criterion asks for {', '.join(asked)}; pass batches=, and for gradients loss=, unless the "
            "model's outputs hold one. Or pass evidence={name: {word: tensor}}."
        )
    reestimating = batches is not None and bool(batchnorms(model)) if reestimate is None else reestimate
    if reestimating and batches is None:
        raise TypeError("batch normalization is re-estimated from data; pass batches=, or leave reestimate out.")
    steps = _steps(weights, sparsity, rounds, pattern, within)
    if len(steps) > 1 and asked and evidence is not None:
        raise ValueError("evidence that was gathered before serves one round; pass batches= instead, or rounds=1.")
    reach = reached_by_name(model, batches, forward=forward)
    if batches is not None and (collecting + reestimating) * len(steps) > 1:
        check_batches(batches)
        first_is_enough = set(asked) == {"flow"} and not reestimating
        batches = list(itertools.islice(batches, 1)) if first_is_enough else repeatable(batches)

    statistics = (
        [buffer for module in batchnorms(model).values() for buffer in module.buffers()] if reestimating else []
    )
    changing = [*weights.values(), *statistics] if len(steps) > 1 or reestimating else []
    masks = Masks()
    with Undo() as undo:
        undo.values(*changing)
        for step in track(steps, "pruning round by round"):
            if collecting:
                assert batches is not None
                evidence = collect(model, batches, asked, weights=weights, loss=loss, forward=forward)
            masks = choose_masks(
                turned(weights, inputs_first),
                step,
                pattern=pattern,
                criterion=criterion,
                allocate=allocate,
                within=None if within is None else turned(within, inputs_first),
                evidence=None if evidence is None else turned_evidence(evidence, inputs_first),
            )
            masks = Masks(turned(masks, inputs_first))
            check_lengths(model, masks)
            apply_(weights, masks)
            within = {**(within or {}), **masks}
            if reestimating:  # in every round, since the next one's evidence passes through the normalizations
                assert batches is not None
                reestimate_batchnorm(model, batches, forward=forward)
    masks.reach = reach
    return masks


def _steps(
    weights: Mapping[str, Tensor],
    sparsity: float | None,
    rounds: int,
    pattern: Pattern,
    within: Mapping[str, Tensor] | None,
) -> Sequence[float | None]:
    """The sparsity after each round: from what earlier masks left, every round removes the same share of the rest."""
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(f"rounds is how many steps lead to the sparsity, 1 to {MOST_ROUNDS:,}; got {rounds!r}.")
    if rounds == 1:
        return [sparsity]
    if pattern.density is not None or sparsity is None:
        raise ValueError(f"{rounds} rounds need a sparsity that grows, and {pattern} with {sparsity} has none.")
    check_sparsity(sparsity)
    tables = Tables(LazyScores(weights, magnitude, among=within), pattern)
    units = sum(math.prod(tables.shape(name)) for name in weights)
    density = sum(tables.left(name) for name in weights) / max(units, 1)
    share = (1 - sparsity) / density if density else 1.0
    return [*(1 - density * share ** (done / rounds) for done in range(1, rounds)), sparsity]
