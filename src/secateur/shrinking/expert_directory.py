"""Experts leave a directory: which, by what a text or a profile says; then its files are sliced, a tensor at a time.

Law: every tensor that is written is one of the source's, or rows of one, byte for byte; the output appears under its
name complete or not at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.blockwise import DirectoryWalk, digest, held_batches
from secateur.checkpoints import (
    NO_WEIGHTS,
    OTHER_WEIGHTS,
    RECORD,
    Checkpoint,
    CheckpointError,
    check_arguments,
    check_places,
    copy_tree,
    nbytes_of_cut,
    new_directory,
    open_checkpoint,
    previous_record,
    record_text,
    shape_of_cut,
)
from secateur.coupling import Axis
from secateur.shrinking.counts import Choice
from secateur.shrinking.directory import config_text
from secateur.shrinking.experts import choose_experts, ranked
from secateur.shrinking.mixtures import Mixtures, mixtures_of
from secateur.shrinking.origins import Origin, origins_text, write_origins
from secateur.shrinking.profiles import Profile, Text, read_profile, write_profile
from secateur.shrinking.request import Request, request
from secateur.shrinking.tables import experts_parts
from secateur.support import Forward, Part, Shown, track

__all__ = ["EXPERTS", "FORMAT", "ShrunkExperts", "shrink_experts_checkpoint"]

EXPERTS = "experts.json"
FORMAT = "secateur experts"
_HELD_OUT = 4  # every fourth batch of a profile's text ranks nothing: on it is measured what leaving experts costs


@dataclass(frozen=True)
class ShrunkExperts(Shown):
    """What `shrink_experts_checkpoint` did.

    Attributes:
        out: the directory that was written, if one was.
        rank: by what experts were ranked.
        counts: ``{router: (experts before, after)}``; empty where none were to leave.
        kept: ``{router: experts that stay}``.
        unreached: ``{router: experts}`` that no token reached.
        profile: what is known of the experts; None without data.
        fields: the fields of the configuration that changed, ``{dotted name: (before, after)}``.
        parameters, nbytes: ``(before, after)``, of the tensors in the files.
        proof: on which model it was proved that nothing else changes, in words.
        unreached_first: whether those were to leave before others.
        left_out: files of the source that hold the weights in other forms, and were not copied.
        seconds: wall time.
    """

    out: Path | None
    rank: str
    counts: Mapping[str, tuple[int, int]]
    kept: Mapping[str, tuple[int, ...]] = field(repr=False)
    unreached: Mapping[str, tuple[int, ...]] = field(repr=False)
    profile: Profile | None = field(repr=False)
    fields: Mapping[str, tuple[Any, Any]]
    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    proof: str
    unreached_first: bool
    left_out: tuple[Path, ...]
    seconds: float

    def _parts(self) -> Iterable[Part]:
        return experts_parts(self)


def shrink_experts_checkpoint(
    source: Path | str,
    out: Path | str | None,
    remove: float = 0.0,
    *,
    batches: Iterable[Any] | None = None,
    profile: Path | str | None = None,
    plan: Path | str | None = None,
    rank: str | None = None,
    unreached_first: bool = False,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    text: str = "batches",
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> ShrunkExperts:
    """Writes to ``out`` the model of a Hugging Face directory with fewer experts; ``from_pretrained`` loads it.

    The model runs block by block, with one block's weights in memory, and data says what each expert does (`shrink`,
    ``rank_experts``). The configuration says the new number, all mixtures of one size keep the same, and never fewer
    than are chosen at a time. Nothing of what stays is changed. ``secateur.json`` and ``experts.json``, what each
    tensor was, are added.

    Args:
        source: a directory with ``config.json`` and safetensors files, sharded or not, each expert by itself or not.
        out: must not exist, nor lie inside ``source``. None: nothing is written but a profile.
        remove: the fraction of the experts of each mixture, or how many (1, 2, ...).
        batches: what a DataLoader yields, as for `oneshot`.
        profile: a file for what the batches say; one that is there gets it added. A quarter of the batches ranks
            nothing then, and says what the outputs of each mixture lose without experts.
        plan: such a file, in place of batches: nothing is run.
        rank: ``"reap"``, ``"total"``, ``"frequency"``, ``"activation"`` or ``"criterion"`` (magnitude; the default
            without data), as ``rank_experts`` of `shrink`.
        unreached_first: experts that no token reached leave first.
        include, exclude: globs over names of routers and tensors of mixtures.
        text: what the profile calls the batches.
        forward, activations, device: as for `oneshot`.
        verify: prove on random weights, on a smaller model of the class, that nothing else changes.
        arguments: what ``secateur.json`` shall say of how this was called.

    Raises:
        CheckpointError: a damaged checkpoint or profile, one of another model, or an ``out`` that cannot be.
        ValueError: nothing can leave, or not as much as asked, or no configuration says it.
        OSError: a full disk, a missing permission. Nothing is left under ``out`` in any case.

    >>> import tempfile
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    >>> config = MixtralConfig(vocab_size=9, num_hidden_layers=1, num_local_experts=4, **sizes)
    >>> folder = Path(tempfile.mkdtemp())
    >>> MixtralForCausalLM(config).save_pretrained(folder / "whole")
    >>> batches = [{"input_ids": torch.randint(0, 9, (2, 8))} for _ in range(4)]
    >>> done = shrink_experts_checkpoint(folder / "whole", folder / "small", 0.25, batches=batches)
    >>> done.counts
    {'model.layers.0.mlp.gate.weight': (4, 3)}
    >>> MixtralForCausalLM.from_pretrained(folder / "small").config.num_local_experts
    3
    """
    started = time.monotonic()
    asked = request(
        experts=remove,
        rank_experts=rank,
        unreached_first=unreached_first,
        include=include,
        exclude=exclude,
        verify=verify,
        uniform=True,
    )
    by_data = rank != "criterion"
    if batches is not None and plan is not None:
        raise ValueError("a plan says what a text said: pass batches, or plan.")
    if batches is None and plan is None and rank not in (None, "criterion"):
        raise ValueError(f"rank={rank!r} needs data: pass batches, or plan.")
    if profile is not None and batches is None:
        raise ValueError("a profile is of batches; pass them.")
    root, out = Path(source), None if out is None else Path(out)
    said = check_arguments(arguments)
    check_places(root, root.parent / f"{root.name}.smaller" if out is None else out)
    if out is not None and out.exists():
        raise CheckpointError(f"{out}: already exists; nothing is overwritten. Choose another name, or remove it.")
    if out is not None and not remove:
        raise ValueError("say how many experts leave: remove is 0.")
    checkpoint = open_checkpoint(root)
    previous = previous_record(root)
    before = None if profile is None or not Path(profile).exists() else read_profile(Path(profile))
    known = None if plan is None else read_profile(Path(plan))
    mixtures = mixtures_of(checkpoint, asked)
    if known is not None:
        _check_same(known, mixtures, Path(plan or ""))
    if batches is not None and by_data:
        known = _profiled(mixtures, asked, batches, text, forward, activations, device, curves=profile is not None)
        if before is not None:
            known = before.plus(known, Path(profile or ""))
    routed = None if known is None else {group.axis: known.routed[group.name] for group in mixtures.groups}
    fewer = choose_experts(mixtures.subject, asked, (), routed) if remove else None
    written = mixtures.written(fewer.choice.plan) if fewer else {name: (name, {}) for name in checkpoint}
    entries = checkpoint.entries
    shapes = {name: shape_of_cut(entries[old], cuts) for name, (old, cuts) in written.items()}
    nbytes = sum(nbytes_of_cut(entries[written[name][0]], shape) for name, shape in shapes.items())
    chosen = fewer.choice.fields if fewer else {}
    groups = [group for group in mixtures.groups if fewer and group.axis in fewer.choice.kept]
    done = ShrunkExperts(
        out=out,
        rank=rank or ("criterion" if known is None else "reap"),
        counts=fewer.counts if fewer else {},
        kept={group.name: tuple(fewer.choice.kept[group.axis].nonzero()[0].tolist()) for group in groups if fewer},
        unreached=_unreached(known),
        profile=known,
        fields={".".join(map(str, at)): (mixtures.configured.value(at), value) for at, value in chosen.items()},
        parameters=(sum(each.numel for each in entries.values()), sum(map(math.prod, shapes.values()))),
        nbytes=(checkpoint.nbytes, nbytes),
        proof=mixtures.proof,
        unreached_first=unreached_first,
        left_out=() if out is None else _left_out(checkpoint),
        seconds=time.monotonic() - started,
    )
    if out is not None and fewer is not None:
        with new_directory(out) as temporary:
            _write(mixtures, temporary, done, fewer.choice, written, said, previous)
    if profile is not None and known is not None:
        write_profile(known, Path(profile))
    return done


def _unreached(known: Profile | None) -> dict[str, tuple[int, ...]]:
    found = {} if known is None else {name: each.unreached for name, each in known.routed.items()}
    return {name: each for name, each in found.items() if each}


def _check_same(known: Profile, mixtures: Mixtures, path: Path) -> None:
    mine = {name: len(each.tokens) for name, each in known.routed.items()}
    for name, size in mixtures.sizes.items():
        if mine.get(name) != size:
            raise CheckpointError(f"{path}: says nothing of {name}, which chooses between {size} experts here.")


def _profiled(
    mixtures: Mixtures,
    asked: Request,
    batches: Iterable[Any],
    text: str,
    forward: Forward | None,
    activations: Path | str | None,
    device: torch.device | str | None,
    *,
    curves: bool,
) -> Profile:
    every, held = held_batches(batches)
    unseen = held[_HELD_OUT - 1 :: _HELD_OUT] if curves else []
    seen = [each for at, each in enumerate(held) if not curves or at % _HELD_OUT != _HELD_OUT - 1]
    if curves and not unseen:
        raise ValueError(f"a profile holds out every fourth batch: give {_HELD_OUT} at least, not {len(held)}.")
    walk = DirectoryWalk(
        mixtures.checkpoint,
        mixtures.checkpoint.root,
        seen,
        forward=forward,
        activations=None if activations is None else Path(activations),
        device=device,
    )
    walk.check()
    routed = mixtures.routed(seen, walk)
    rank = asked.rank_experts or "reap"
    lost = {}
    if curves:
        scores: Mapping[Axis, Tensor] = ranked(mixtures.subject, mixtures.groups, asked, routed)
        lost = mixtures.curves(unseen, walk, scores)
    named = {group.name: group.axis for group in mixtures.groups}
    return Profile(
        (Text(text, digest(every), _tokens(seen), _tokens(unseen)),),
        rank,
        {name: routed[axis] for name, axis in named.items()},
        {name: lost[axis] for name, axis in named.items() if axis in lost},
    )


def _tokens(batches: Sequence[Any]) -> int:
    """How many tokens are no padding, as far as a batch says."""
    count = 0
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        count += int(mask.sum()) if isinstance(mask, Tensor) else ids.numel() if isinstance(ids, Tensor) else 0
    return count


# ---- writing --------------------------------------------------------------------------------------------------------


def _left_out(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Files that hold the weights in other forms."""
    root = checkpoint.root
    weights = {file.relative_to(root) for file in checkpoint.files}
    others = {path.relative_to(root) for path in root.rglob("*") if path.suffix in OTHER_WEIGHTS}
    return tuple(sorted(path for path in others - weights if path.name not in NO_WEIGHTS))


def _write(
    mixtures: Mixtures,
    target: Path,
    done: ShrunkExperts,
    choice: Choice,
    written: Mapping[str, Origin],
    said: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
) -> None:
    checkpoint = mixtures.checkpoint
    weights = {file.relative_to(checkpoint.root) for file in checkpoint.files}
    for _ in track(copy_tree(checkpoint.root, target, skip={*weights, *done.left_out}), "copying"):
        pass
    digests = write_origins(checkpoint, target, written, nbytes=done.nbytes[1], parameters=done.parameters[1])
    (target / "config.json").write_text(config_text(checkpoint, mixtures.configured, choice.fields), "utf-8")
    (target / EXPERTS).write_text(origins_text(checkpoint, written, FORMAT), "utf-8")
    found = {
        "experts": {name: {"from": size, "to": left} for name, (size, left) in done.counts.items()},
        "kept": {name: list(each) for name, each in done.kept.items()},
        "rank": done.rank,
        "texts": [] if done.profile is None else [vars(text) for text in done.profile.texts],
        "config": {name: {"from": before, "to": after} for name, (before, after) in done.fields.items()},
        "parameters": {"from": done.parameters[0], "to": done.parameters[1]},
        "proof": done.proof,
        "sha256": digests,
    }
    (target / RECORD).write_text(record_text("experts", found, arguments=said, previous=previous), "utf-8")
