"""Whole blocks are removed from a directory, those whose loss moves the outputs least; blocks before them are repaired.

Law: every tensor that is written is one of the source's, under the number that its block has now, byte for byte, but
for those that are patched, which are named; the output appears under its name complete or not at all, and a run that
was killed goes on to the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from secateur.checkpoints import (
    RECORD,
    Checkpoint,
    Origin,
    Run,
    copy_others,
    meta_model_of,
    open_checkpoint,
    previous_record,
    record_text,
    request_of,
    write_sliced,
)
from secateur.coupling import Axis, Group, may_leave
from secateur.models import NUMBERS, DenseOutputs, InFiles, digest, example_for, held_batches, loaded_model
from secateur.shrinking.configuration import Described, has_configuration
from secateur.shrinking.directory import config_text, facts_of, origins_text
from secateur.shrinking.gates import GateBudget, Gated, Gates, descended, ranked_start
from secateur.shrinking.kinds.blocks import (
    AT_ONCE,
    DepthCosts,
    Stack,
    narrowed,
    passed_on,
    passing,
    patched_in_directory,
    prove_without,
    renamed,
    stacks_of,
)
from secateur.shrinking.request import InDirectory, Request
from secateur.shrinking.result import ShrunkDirectory, blocks_content, patched_tables
from secateur.shrinking.select import check_globs, least, select, too_few
from secateur.support import Forward, Part, rank_and_world, track

BLOCKS = "blocks.json"
FORMAT = "secateur blocks"


@dataclass(frozen=True)
class ShrunkDepth(ShrunkDirectory):
    """The result of `shrink` with ``leave=Blocks(...)``; prints as a table. Beside what `ShrunkDirectory` has:

    Attributes:
        gone: the blocks that left, in the order in which they were chosen.
        stayed: ``{name: why}`` of blocks that could not leave.
        lost: the divergence of the outputs on the calibration without them, before what follows is patched.
        patched: ``{name in the files written: share}`` of repaired weights and biases: the share that each recovers of
            the squared residual, which is what the removed blocks added to the stream.
        gates: what gates came to, as in `Shrunk`.
    """

    gone: tuple[str, ...]
    stayed: Mapping[str, str] = field(repr=False)
    lost: float
    patched: Mapping[str, float] = field(repr=False)
    gates: Mapping[str, Gated] = field(default_factory=dict, repr=False)

    def content(self) -> Iterable[Part]:
        return (*blocks_content(self), *patched_tables(self.patched))

    def summary(self) -> Iterable[Part]:
        return blocks_content(self)


@dataclass(frozen=True)
class _Deep:
    """A directory, and how its model counts blocks."""

    checkpoint: Checkpoint
    place: InFiles
    described: Described
    stacks: Sequence[Stack]
    prefix: str

    @functools.cached_property
    def costs(self) -> DepthCosts:
        return DepthCosts(self.place, self.place.batches)

    @functools.cached_property
    def _known(self) -> dict[tuple[str, ...], dict[str | None, float]]:
        return {}

    def cost(self, gone: Sequence[str], more: Sequence[str]) -> Mapping[str | None, float]:
        """What the outputs lose without those that are gone, under None, and without each one more."""
        found = self._known.setdefault(tuple(gone), {})
        if not found or any(each not in found for each in more):
            found.update(self.costs([*gone], [each for each in more if each not in found]))
        return found

    def fields(self, gone: Sequence[str]) -> dict[Any, Any]:
        return {at: value for stack in self.stacks for at, value in stack.fields(self.described, gone).items()}

    @functools.cached_property
    def in_files(self) -> list[Stack]:
        """The stacks, also under the paths that files have for them, where transformers renames what it loads."""
        found = [*self.stacks]
        for stack in self.stacks:
            named = re.compile(rf"{re.escape(stack.name)}\.(\d+)\.")
            paths: set[str] | None = None
            for target, group in self.place.files.group_of.items():
                if group.alone and (number := named.match(target)) is not None:
                    (name,) = group.sources
                    its = {name[: each.start()] for each in re.finditer(rf"\.{number[1]}\.", name)}
                    paths = its if paths is None else paths & its
            found += [replace(stack, name=path) for path in sorted(paths or ())]
        return found

    def written(self, gone: Sequence[str]) -> dict[str, Origin]:
        """Which of the source's tensors each one is."""
        found: dict[str, Origin] = {}
        for old in self.checkpoint:
            name = renamed(old, self.in_files, gone, self.prefix)
            if name is not None:
                found[name] = (old, {})
        return found


def shrink_blocks_directory(place: InDirectory, asked: Request, example_inputs: Any) -> ShrunkDepth:
    """`shrink` of a directory into another one: whole blocks leave, and what follows stays as it is."""
    started = time.monotonic()
    if not asked.blocks:
        raise ValueError("no block leaves: say how many, such as leave=Blocks(0.1) or Blocks(2).")
    if place.batches is None:
        raise ValueError(f"{place.source}: blocks leave by what the outputs lose on a text; pass batches=.")
    if rank_and_world()[1] > 1:
        raise ValueError("blocks of a directory are chosen by one process: start it without torchrun.")
    verify, amount = asked.verify, asked.blocks
    every, held = held_batches(place.batches)
    checkpoint = open_checkpoint(place.source)
    previous = previous_record(place.source)
    model = meta_model_of(checkpoint)
    if not has_configuration(model):
        raise ValueError(f"{type(model).__name__} has no config that could say the number of its blocks.")
    described = Described(model)
    deep = _Deep(
        checkpoint,
        place.walk(checkpoint, place.work, held),
        described,
        stacks_of(model, described),
        f"{getattr(model, 'base_model_prefix', '')}.",
    )
    example_inputs = example_for(model) if example_inputs is None and verify else example_inputs
    candidates = _candidates(deep, asked.include, asked.exclude)
    every_block = sum(len(stack.blocks) for stack in deep.stacks)
    target = int(amount) if amount >= 1 else math.ceil(amount * every_block - 1e-9)

    def learn() -> Gated:
        def free(gone: Sequence[str]) -> dict[str, int]:
            return {each: 1 for each in candidates if each not in gone}

        first, _ = least(deep.cost, free, target, at_once=AT_ONCE)
        alone = deep.cost([], candidates)
        order = [*first, *sorted(free(first), key=lambda each: alone[each])]
        model = loaded_model(place.source, place.device)
        return learnt_blocks(model, candidates, target, every, place.forward, order)

    def choose(gates: Gated | None) -> _Chosen:
        worths = {} if gates is None else dict(zip(candidates, gates.worths["blocks"].tolist(), strict=True))
        return _chosen(deep, candidates, target, example_inputs, worths, verify=verify)

    def misfit(found: _Chosen) -> str | None:
        fits = len(set(found.gone)) == target and {*found.gone} <= {*candidates}
        return None if fits else "is not so many blocks as leave"

    def misgated(found: Gated) -> str | None:
        its = {name: len(each) for name, each in found.worths.items()}
        return None if its == {"blocks": len(candidates)} else "is not of the blocks that may leave"

    learns = asked.gates and target < len(candidates)
    if place.out is None:
        gates = learn() if learns else None
        return _planned(deep, place, choose(gates), {}, started, gates)
    with deep.place.begun(place.out, request_of("depth", asked, data=digest(every), repair=place.repair)) as run:
        gates = run.stage("gates", Gated, learn, misgated) if learns else None
        chosen = run.stage("chosen", _Chosen, lambda: choose(gates), misfit)
        patched = _patched(run, deep, chosen.gone) if place.repair else {}
        done = _planned(deep, place, chosen, patched, started, gates)
        _publish(run, deep, done, {"data": {"sha256": run.request["data"]}, "repair": place.repair}, previous)
    return replace(done, seconds=time.monotonic() - started)


def _candidates(deep: _Deep, include: Any, exclude: Any) -> list[str]:
    blocks = [block for stack in deep.stacks for block in stack.blocks]
    names = {block: {name for name, _ in deep.place.blocks[block].named_parameters(block)} for block in blocks}
    check_globs({*blocks, *(name for its in names.values() for name in its)}, [*(include or ()), *exclude])
    return [block for block in blocks if may_leave({block, *names[block]}, include, exclude)]


# ---- choosing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chosen:
    """Which blocks leave, why others could not, what the outputs lose, and on what it was proved."""

    gone: tuple[str, ...]
    stayed: Mapping[str, str]
    lost: float
    proof: str


def learnt_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    target: int,
    batches: Sequence[Any],
    forward: Forward | None,
    order: Sequence[str],
) -> Gated:
    """Gates of the blocks that may leave, so many of them; they begin with an order in which these would. A gate is
    multiplied into what its block adds to the stream.

    Args:
        model: in memory, with its weights.
    """
    group = Group("blocks", Axis(len(blocks)), len(blocks), (), 0, ())
    budget = GateBudget.counting([[group]], target / len(blocks))
    places = {name: at for at, name in enumerate(blocks)}

    def within(gates: Gates) -> contextlib.AbstractContextManager[None]:
        return passing(
            model, blocks, lambda name, args, kwargs, out: passed_on(args, kwargs, out, gates["blocks"][places[name]])
        )

    start = ranked_start(
        [torch.tensor([float(order.index(name)) for name in blocks], dtype=torch.float32, device="cpu")]
    )
    dense = DenseOutputs(model, batches, forward, numbers=NUMBERS)
    return descended(dense, budget, start, within, [model.get_submodule(name) for name in blocks])


def _chosen(
    deep: _Deep,
    candidates: Sequence[str],
    target: int,
    example_inputs: Any,
    worths: Mapping[str, float],
    *,
    verify: bool,
) -> _Chosen:
    """With ``worths`` those that are worth least leave; else next that without which the outputs move least."""
    small = narrowed(deep.described, deep.stacks) if verify else {}
    proof = deep.described.proved_on(small) if verify else "not proved, as asked"

    def propose(stayed: Mapping[str, str]) -> tuple[list[str], float]:
        left = [each for each in candidates if each not in stayed]

        def leaving(gone: Sequence[str]) -> dict[str, int]:
            """One block of each stack stays."""
            last = {each for its in deep.stacks if len({*its.blocks} - {*gone}) == 1 for each in its.blocks}
            return {each: 1 for each in left if each not in gone and each not in last}

        if worths:
            gone = list[str]()
            while len(gone) < target and (free := leaving(gone)):
                gone.append(min(free, key=worths.__getitem__))
            lost = deep.cost(gone, [])[None]
        else:
            gone, lost = least(deep.cost, leaving, target, at_once=AT_ONCE)
        if len(gone) < target:
            blocks = sum(len(stack.blocks) for stack in deep.stacks)
            raise too_few(f"{len(gone)} of the {blocks} blocks", target, stayed)
        return gone, lost

    def proved(gone: Sequence[str]) -> str | None:
        return prove_without(deep.described, deep.stacks, gone, example_inputs, small)

    def without_wrong(stayed: dict[str, str], proposed: tuple[list[str], float]) -> dict[str, str] | None:
        gone, _ = proposed
        words = proved(gone) if verify else None
        if words is None:
            return None
        alone = {each: proved([each]) for each in track(gone, "proving block after block")} if len(gone) > 1 else {}
        wrong = {each: f"the model without it: {said}" for each, said in alone.items() if said is not None}
        together = "it" if len(gone) == 1 else "these"
        return stayed | (wrong or dict.fromkeys(gone, f"the model without {together}: {words}"))

    stayed, (gone, lost) = select(dict[str, str](), propose, without_wrong)
    return _Chosen(tuple(gone), stayed, lost, proof)


def _patched(run: Run, deep: _Deep, gone: Sequence[str]) -> dict[str, float]:
    """What took over what the blocks added, in the copy; nothing where the outputs are further off by that."""

    def patch() -> dict[str, float]:
        patched = patched_in_directory(deep.place, deep.stacks, gone)
        if patched and not deep.costs(gone, written=True)[None] <= deep.cost(gone, [])[None]:
            deep.place.files.restore(patched)
            return {}
        return patched

    def misnamed(found: dict[str, float]) -> str | None:
        wrong = sorted(found.keys() - {name for name, _ in deep.place.model.named_parameters()})
        return f"names {wrong[0]}, which the model has not" if wrong else None

    found = run.stage("patched", dict[str, float], patch, misnamed)
    run.check_said({file for name in found for file in deep.place.files.sources_of(name)})
    return found


# ---- writing --------------------------------------------------------------------------------------------------------


def _planned(
    deep: _Deep,
    place: InDirectory,
    chosen: _Chosen,
    patched: Mapping[str, float],
    started: float,
    gates: Gated | None,
) -> ShrunkDepth:
    gone = chosen.gone
    fields, written = deep.fields(gone), deep.written(gone)
    moved = {
        renamed(file, deep.in_files, gone, deep.prefix): share
        for name, share in patched.items()
        for file in deep.place.files.sources_of(name)
    }
    return ShrunkDepth(
        counts={stack.name: (len(stack.blocks), len(stack.stay(gone))) for stack in deep.stacks},
        gone=gone,
        stayed=chosen.stayed,
        lost=chosen.lost,
        patched={name: share for name, share in moved.items() if name is not None},
        gates={} if gates is None else {"blocks": gates},
        **facts_of(place, deep.checkpoint, written, deep.described, fields, proof=chosen.proof, started=started),
    )


def _publish(
    run: Run,
    deep: _Deep,
    done: ShrunkDepth,
    calibration: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
) -> None:
    folder, copied = run.remade(), open_checkpoint(run.folder)
    written = deep.written(done.gone)
    copy_others(copied, folder, done.left_out)
    digests = write_sliced(copied, folder, written, nbytes=done.nbytes[1], parameters=done.parameters[1])
    (folder / "config.json").write_text(config_text(copied, deep.described, deep.fields(done.gone)), "utf-8")
    (folder / BLOCKS).write_text(origins_text(copied, written, FORMAT), "utf-8")
    found = {
        "blocks": {name: {"from": before, "to": after} for name, (before, after) in done.counts.items()},
        "gone": list(done.gone),
        "config": {name: {"from": before, "to": after} for name, (before, after) in done.fields.items()},
        "parameters": {"from": done.parameters[0], "to": done.parameters[1]},
        "proof": done.proof,
        "calibration": {
            **calibration,
            "lost": done.lost if math.isfinite(done.lost) else None,
            "patched": dict(done.patched),
        },
        "sha256": digests,
    }
    (folder / RECORD).write_text(record_text("shrink", found, previous=previous), "utf-8")
    run.publish(folder)
