"""A directory of a mixture-of-experts model: which tensors hold which experts, and the experts' statistics on data.
What was learnt of the experts of a directory, in a file: what they give, and what the model loses without some.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.checkpoints import Checkpoint, CheckpointError, Origin, meta_model_of
from secateur.coupling import Coupling, Group, Scope, find_coupling
from secateur.kinds import RANKS, Experts
from secateur.models import (
    MOST,
    InFiles,
    Replay,
    Routed,
    RunAlong,
    Stored,
    Tokens,
    divergence,
    example_for,
    mixture_of,
    routed_by,
    run_through,
)
from secateur.report import Reported
from secateur.shrinking.apply import carry_out
from secateur.shrinking.configuration import PROVED, Configured, has_configuration
from secateur.shrinking.directory import of_zeros
from secateur.shrinking.kinds.experts import choose_experts, tied_mixtures
from secateur.shrinking.plan import Plan, plan_of
from secateur.shrinking.request import PruningTarget, Request, pruning_target
from secateur.shrinking.select import groups_in_scope
from secateur.support import (
    Between,
    Fields,
    Part,
    Undo,
    all_gather,
    plain,
    printable,
    private,
    write_whole,
)

# A directory of a mixture-of-experts model: which tensors hold which experts, and the experts' statistics on data.
#
# Law: the weights stay in the files; of them one block is in memory while a text is run, and none while a plan is
# made. Whether a file holds experts each by itself or all in one tensor makes no difference.

TOGETHER = (1 / 8, 1 / 4, 1 / 2)  # of the experts of all mixtures at once


@dataclass(eq=False)
class Beyond:
    """What the model loses when a share of the experts leaves all mixtures: how far its outputs are from the dense
    ones, as `secateur.models.divergence` has it, over so many tokens."""

    lost: Annotated[float, Between(0, MOST)] = 0.0
    tokens: Annotated[int, Between(0)] = 0

    def everywhere(self) -> Beyond:
        """The sums of all processes."""
        return Beyond(sum(all_gather(self.lost)), sum(all_gather(self.tokens)))


@dataclass(frozen=True, eq=False)
class Mixtures:
    """A directory of a mixture-of-experts model, the groups of its experts, and the tensors that hold them.

    Attributes:
        checkpoint: of it.
        walk: the model with weights in the files, without batches.
        subject: the model on the meta device.
        configured: what its configuration says.
        groups: those of experts that may leave.
        proof: on which model it was proved that nothing else changes, in words.
    """

    checkpoint: Checkpoint
    walk: InFiles
    subject: PruningTarget
    configured: Configured
    groups: Sequence[Group]
    proof: str

    @property
    def sizes(self) -> dict[str, int]:
        """How many experts each mixture has, by the name of its router."""
        return {group.name: group.size for group in self.groups}

    def written(self, plan: Plan) -> dict[str, Origin]:
        """What each tensor of the smaller directory is made of; what is no key has left.

        Raises:
            CheckpointError: a file holds experts in a form of which none can be taken.
        """
        found: dict[str, Origin] = {name: (name, {}) for name in self.checkpoint}
        for mine, (shape, cuts) in plan.tensors.items():
            group = self.walk.files.group_of.get(mine)
            if group is None:
                if mine in dict(self.subject.model.named_parameters()):
                    raise CheckpointError(f"{self.checkpoint.root}: {mine} is in no file.")
                continue  # the model makes it itself
            if len(group.sources) == 1:
                (name,) = group.sources
                if self.checkpoint.entries[name].shape != tuple(shape):
                    raise self._of_another_form(name)
                found[name] = (name, cuts)
                continue
            experts = self._experts(mine, shape[0])
            if set(cuts) != {0}:
                raise self._of_another_form(group.sources[0])
            kept = [experts[at] for at in cuts[0]]
            for names in experts:
                for name in names:
                    found.pop(name, None)
            for place, names in zip(experts, kept, strict=False):
                found.update({new: (old, {}) for new, old in zip(place, names, strict=True)})
        return found

    def _experts(self, mine: str, count: int) -> list[tuple[str, ...]]:
        """The tensors in files of each expert of one that transformers joins: seen by joining numbers."""
        group = self.walk.files.group_of[mine]
        entries = [self.checkpoint.entries[name] for name in group.sources]
        tags = [
            torch.full([1] * len(entry.shape), float(at), dtype=torch.float32, device="cpu")
            for at, entry in enumerate(entries)
        ]
        made = group.read(tags)[mine]
        if made.shape[0] != count:
            raise self._of_another_form(group.sources[0])
        numbers = [[int(each) for each in part.flatten().tolist()] for part in made]
        if sorted(each for part in numbers for each in part) != list(range(len(tags))):
            raise self._of_another_form(group.sources[0])
        return [tuple(group.sources[each] for each in part) for part in numbers]

    def _of_another_form(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.root}: {printable(name)} holds experts in a form of which none can be taken. Load the "
            "model, use shrink(..., leave=Experts(...), uniform=True), and save it."
        )

    # ---- data -----------------------------------------------------------------------------------------------------

    def routed(self, batches: Sequence[Any], walk: InFiles) -> dict[str, Routed]:
        """The statistics of the experts on a text, from one walk.

        Raises:
            ValueError: of no expert of a mixture were outputs seen.
        """
        for group in self.groups:
            path, _ = mixture_of(walk.model, group)
            if not any(path == block or path.startswith(f"{block}.") for block in walk.blocks):
                raise ValueError(
                    f"{group.name}: its experts are in none of the blocks that are run one by one; load the model and "
                    "use shrink(..., leave=Experts(...), batches=...)."
                )
        return routed_by(walk.over(batches), self.subject.coupling, self.groups)

    def beyond(self, batches: Sequence[Any], walk: InFiles, scores: Mapping[str, Tensor]) -> dict[float, Beyond]:
        """The loss of the model's outputs on a text when a share of the experts leaves every mixture, least scores
        first: one walk for each share, beside the dense model."""
        found = {}
        for share in TOGETHER:
            plans = {group.name: self._plan(group, scores[group.name], share) for group in self.groups}
            its = {name: plan for name, plan in plans.items() if plan is not None}
            if len(its) == len(plans):
                found[share] = self._beyond(batches, walk, its).everywhere()
        return found

    def _beyond(self, batches: Sequence[Any], whole: InFiles, plans: Mapping[str, Plan]) -> Beyond:
        walk = whole.over(batches)
        inside = {
            name: [group for group in self.groups if mixture_of(walk.model, group)[0].startswith(f"{name}.")]
            for name in walk.blocks
        }
        outputs: list[Any] = []
        tokens = Tokens()
        own = walk.forward

        def forward(model: nn.Module, batch: Any) -> Any:
            nonlocal tokens
            tokens = Tokens.of(batch)
            outputs.append(own(model, batch))
            return outputs[-1]

        walk.forward = forward
        for keeps_all in (False, True):
            found = Beyond()
            with walk.replaying(dense=True) as replay, torch.no_grad():
                replay.keep_all = keeps_all
                undo = Undo()

                def without(name: str, replay: Replay = replay, undo: Undo = undo) -> None:
                    with replay.of_dense():
                        replay.store(name)
                    for group in inside[name]:
                        undo.call(carry_out(walk.model, plans[group.name], None))

                for _ in run_through(replay, visit=without):
                    undo.roll_back()
                    undo.forget()
                if replay.keep_all and not keeps_all:
                    continue  # it went back on its way, and did not know then what had left
                for number, batch in enumerate(batches):
                    outputs.clear()
                    with replay.of_dense():
                        replay.run(number, batch, lambda *_: None)
                    replay.run(number, batch, lambda *_: None)
                    if not isinstance(batches, RunAlong):
                        lost, count = divergence(outputs[0], outputs[1], tokens.own)
                        found.lost, found.tokens = found.lost + lost, found.tokens + count
                break
        return found

    def _plan(self, group: Group, scores: Tensor, share: float) -> Plan | None:
        """The mixture without a share of its experts; None where so many cannot leave."""
        count = max(1, round(share * group.size))
        if count == group.size or self.subject.coupling.contradicted({group.name: group.size - count}):
            return None
        mask = np.ones(group.size, dtype=bool)
        mask[scores.argsort(stable=True).numpy()[:count]] = False
        return plan_of(self.subject.model, self.subject.coupling, {group.name: mask})


def mixtures_of(checkpoint: Checkpoint, asked: Request) -> Mixtures:
    """The mixtures of a directory; ``asked`` says which of them may lose experts.

    Raises:
        CheckpointError: no model can be made of what the directory says.
        ValueError: it is none that can be watched without values, nothing is chosen between, or no configuration says
            another number.
    """
    walk = InFiles(checkpoint, checkpoint.root, [])
    meta = meta_model_of(checkpoint)
    if not has_configuration(meta):
        raise ValueError(f"{type(meta).__name__} has no config that could say how many experts are left.")
    coupling, example = _watched(meta)
    configured = Configured(meta, tied_mixtures(Scope.of(coupling), asked))
    scope = tied_mixtures(configured.scope, asked)
    stored = Stored(meta, checkpoint, ())
    subject = PruningTarget(meta, scope, [example], stored, stored.rows, configured)
    groups = groups_in_scope(scope, asked, chosen=True)
    proof = _proved(configured, example) if asked.verify else "not proved, as asked"
    return Mixtures(checkpoint, walk, subject, configured, groups, proof)


def _watched(model: nn.Module) -> tuple[Coupling, dict[str, Any]]:
    """The coupling of a model on the meta device: experts run all at once there, since nothing says who goes where."""
    example = example_for(model)
    key, value = private.experts_at_once()
    with Undo() as undo:
        configs = {
            id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None
        }
        for config in configs.values():
            if hasattr(config, key):
                undo.attributes(config, key)
                setattr(config, key, value)
        try:
            coupling = find_coupling(model, example)
        except Exception as error:  # whatever the model raises
            with contextlib.suppress(Exception):
                return find_coupling(of_zeros(model), example), example
            raise ValueError(
                f"{type(model).__name__} cannot be watched on the meta device ({type(error).__name__}: "
                f"{printable(str(error), 200)}); load it and use shrink(..., leave=Experts(...), uniform=True)."
            ) from error
        undo.roll_back()
    return coupling, example


def _proved(configured: Configured, example: Any) -> str:
    """On a smaller model of the same structure experts leave, and the proof is made; on which one, in words."""
    changes = configured.reduced(PROVED)
    if changes is None:
        return "not proved: no model of this class was small enough"
    small = configured.build(changes, "cpu")
    said = Configured(small, Scope.of(find_coupling(small, example)))
    subject = pruning_target(small, said.scope, [example], configured=said, proved_on=small)
    choose_experts(subject, Request(leave=(Experts(1),)), ())
    return configured.proved_on(changes)


# What was learnt of the experts of a directory, in a file: what they give, and what the model loses without some.
#
# Law: a file that says something else is refused, with its name and the field.

_FORMAT = "secateur experts profile"


@dataclass(frozen=True)
class Text:
    """What was run: its name, its digest, tokens that ranked experts, and tokens that were held out."""

    data: str
    sha256: str
    tokens: Annotated[int, Between(0)]
    held_out: Annotated[int, Between(0)]


@dataclass(frozen=True, eq=False)
class Profile(Reported):
    """Of each mixture, by the name of its router, what data says.

    Attributes:
        text: that was run.
        rank: by what experts left where it was measured what that costs.
        routed: of the experts.
        beyond: of a share of the experts of all mixtures, what the model's outputs lost without them, on tokens that
            ranked nothing.
        source: the SHA-256 of the weights' files and ``config.json`` of the directory that was run.
    """

    text: Text
    rank: str
    routed: Mapping[str, Routed]
    beyond: Mapping[Annotated[float, Between(0, 1)], Beyond] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict, repr=False)

    def content(self) -> Iterator[Part]:
        from secateur.shrinking.result import every_expert

        yield from self.summary()
        yield every_expert(self, {})

    def summary(self) -> Iterator[Part]:
        from secateur.shrinking.result import profile_content

        return profile_content(self)

    def wrong(self) -> str | None:
        """Why no run has measured it."""
        if self.rank not in RANKS:
            return f"has a rank that is none of {', '.join(RANKS)}"
        for name, each in self.routed.items():
            if len(each.tokens) != len(each.weighted) or not len(each.tokens):
                return f"has not of as many experts of {name} how many tokens as how much weight"
        return None

    def check_source(self, there: Mapping[str, str], path: Path) -> None:
        """Raises CheckpointError if what was run is not the directory with these files."""
        if other := sorted(name for name in {*self.source, *there} if self.source.get(name) != there.get(name)):
            raise CheckpointError(
                f"{path}: is of another model: {printable(', '.join(other[:3]), 200)} of the directory that was run "
                "differs. Name its profile, or another file for a new one."
            )


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON, complete or not at all."""
    said = {"format": _FORMAT, "version": 2, "profile": plain(profile)}
    write_whole(path, json.dumps(said, indent=1, allow_nan=False) + "\n")


def read_profile(path: Path) -> Profile:
    """What `write_profile` wrote.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    try:
        read = Fields.read(path, error=CheckpointError, hint=" secateur shrink --profile writes one.").of_format(
            _FORMAT, 2
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; secateur shrink --profile writes one.") from None
    profile: Profile = read.value("profile", Profile)
    if (why := profile.wrong()) is not None:
        raise read.wrong("profile", why)
    return profile
