"""A checkpoint's tensors as those of a model, whose weights stay on disk: one block's at a time are read into it. The
model that a directory's ``config.json`` describes, on the meta device: with its buffers, without its weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.checkpoints import (
    Checkpoint,
    CheckpointError,
    Cuts,
    blaming_config,
    bytes_of,
    family_of,
    most_parameters,
    open_checkpoint,
    parameters_counted,
    row_pieces,
    slicing,
    write_tensor,
)
from secateur.models.blocks import full_name
from secateur.models.replay import Weights
from secateur.support import ONE_AT_A_TIME, LazyTensors, NewTensors, printable, private, tensors_of, track

# ------------------------------------------------------------------------------------ names in files and in the model


# A checkpoint's tensors as those of a model, whose weights stay on disk: one block's at a time are read into it.
#
# Law: what is read is checked against the shape that the model has, what is written goes to the bytes it was read
# from, and nothing else changes.


@dataclass(frozen=True)
class Group:
    """Tensors of a checkpoint that together make up tensors of the model: one each, or the experts of a fused one.

    ``parts`` are those of each expert, which make up one row of the fused tensor, if that is so; ``alone`` is one
    tensor that has another name at most.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    read: Callable[[Sequence[Tensor]], dict[str, Tensor]]
    write: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    parts: tuple[Group, ...] = ()
    alone: bool = False

    def read_from(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What the tensors in files make up: a fused one row after row, so that there is never more than one of them
        twice in memory."""
        if not self.parts:
            return self.read([checkpoint[name] for name in self.sources])
        (target,) = self.targets
        whole: Tensor | None = None
        for at, part in enumerate(self.parts):
            row = part.read([checkpoint[name] for name in part.sources])[target]
            if whole is None:
                whole = row.new_empty((len(self.parts), *row.shape[1:]))
            whole[at] = row[0]
        assert whole is not None
        return {target: whole}

    def cuts(self, checkpoint: Checkpoint, cuts: Cuts) -> dict[str, Cuts]:
        """What stays of each tensor in files where this stays of the one that they make up.

        Raises:
            CheckpointError: nothing of it can leave so.
        """
        if self.alone or not cuts:
            return dict.fromkeys(self.sources, cuts)
        parts = self.parts or (self,)
        shapes = [[checkpoint.entries[name].shape for name in part.sources] for part in parts]
        found: list[Cuts] = []
        lost = (bool(self.parts) and 0 in cuts) or shapes.count(shapes[0]) < len(shapes)
        for place, shape in enumerate([] if lost else shapes[0]):
            left = {at: parts[0].left_of(shapes[0], place, at, cuts) for at in range(len(shape))}
            found.append({at: rows for at, rows in left.items() if len(rows) < shape[at]})
        if lost or any(not len(rows) for its in found for rows in its.values()):
            raise CheckpointError(
                f"{checkpoint.root}: {self.targets[0]} is made of {printable(self.sources[0])} and others, of which "
                "this cannot leave; load the model, use shrink(..., uniform=True), and save it."
            )
        return {name: its for part in parts for name, its in zip(part.sources, found, strict=True)}

    def left_of(self, shapes: Sequence[tuple[int, ...]], place: int, at: int, cuts: Cuts) -> npt.NDArray[np.int64]:
        """Which indices are left of a dimension of one of the tensors in files of these shapes: seen by where numbers
        go. No index where they are not everywhere the same."""
        tags = [torch.full(shape, -1.0, dtype=torch.float64, device="cpu") for shape in shapes]
        numbers = torch.arange(shapes[place][at], dtype=torch.float64, device="cpu")
        tags[place].copy_(numbers.reshape([-1, *[1] * (len(shapes[place]) - at - 1)]))
        made = self.read(tags)
        for dim, kept in cuts.items():
            made = {name: each.index_select(dim, torch.from_numpy(kept)) for name, each in made.items()}
        none = torch.empty(0, 1, dtype=torch.float32, device="cpu")
        left = self.write(made).get(self.sources[place], none).movedim(at, 0).flatten(1)
        rows = left[:, :1]
        is_right = left.numel() and (left == rows).all() and (rows >= 0).all() and (rows.diff(dim=0) > 0).all()
        return rows[:, 0].numpy().astype(np.int64) if is_right else np.zeros(0, dtype=np.int64)


def groups_of(model: nn.Module, checkpoint: Checkpoint) -> list[Group]:
    """How the tensors of the checkpoint are those of the model; what the model has no place for is left out.

    Names are equal, or differ by the prefix of the base model, or by what transformers' own loader does on the way:
    since version 5 it fuses experts, and takes them apart again when a model is saved.
    """
    mine = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    groups: list[Group] = []
    left: list[str] = []
    missing = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for name in checkpoint:
        shortened = name.removeprefix(prefix)
        target = next((n for n in (name, prefix + name, shortened) if n in mine), None)
        if target is None or (prefix == "." and target != name):
            left.append(name)
        else:
            groups.append(_renamed(name, target))
            missing.discard(id(mine[target]))
    if not missing or not left:
        return groups
    # transformers' renaming takes its time with each name: what no tensor of the model could be made of is not asked
    if len(left) > most_parameters(list(mine)) + sum(len(tensor) for tensor in mine.values() if tensor.dim() > 2):
        raise CheckpointError(
            f"{checkpoint.root}: holds {len(left):,} tensors that {type(model).__name__} has no place for, such as "
            f"{printable(left[0])}, and not all that it has; it is of another model than its config.json says."
        )
    return groups + _converted(model, checkpoint, left, mine)


def _renamed(source: str, target: str) -> Group:
    read, write = (lambda tensors: {target: tensors[0]}), (lambda made: {source: made[target]})
    return Group((source,), (target,), read, write, alone=True)


def _converted(
    model: nn.Module, checkpoint: Checkpoint, names: Sequence[str], mine: Mapping[str, Tensor]
) -> list[Group]:
    """What transformers' conversions make of these names, by running them on tensors of the meta device."""
    groups = []
    for target, (conversion, found) in private.loaded_as(model, names, mine).items():
        if len(found) == 1 and found[0][1] is None:
            if target in mine:
                groups.append(_renamed(found[0][0], target))
            continue
        if any(pattern is None for _, pattern in found):
            continue
        read = _reader(conversion, target, found, model)
        meta = [torch.empty(checkpoint.entries[name].shape, device="meta") for name, _ in found]
        try:
            targets = tuple(read(meta))
        except (AssertionError, RuntimeError) as error:  # of torch, which joins them; 2.7 asserts
            raise CheckpointError(
                f"{checkpoint.root}: {target} is made of {printable(found[0][0])} and {len(found) - 1} others, whose "
                f"shapes do not fit each other ({printable(str(error).splitlines()[0], 150)})."
            ) from None
        if all(name in mine for name in targets):
            write = functools.partial(private.reverted, model)
            parts = _rows_of(conversion, target, found, model, [len(each.shape) for each in meta], write)
            groups.append(Group(tuple(name for name, _ in found), targets, read, write, parts))
    return groups


def _rows_of(
    conversion: Any,
    target: str,
    found: Sequence[tuple[str, str | None]],
    model: Any,
    dims: Sequence[int],
    write: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
) -> tuple[Group, ...]:
    """The tensors in files of each row of a fused one, such as of each expert: seen by joining their numbers. Nothing
    where a row is not made of tensors of its own."""
    try:
        made = _reader(conversion, target, found, model)(
            [torch.full([1] * dim, float(at), dtype=torch.float32, device="cpu") for at, dim in enumerate(dims)]
        )
    except (AssertionError, RuntimeError):  # as of one that goes by sizes; 2.7 asserts
        return ()
    if len(made) != 1 or len(next(iter(made.values()))) < 2:
        return ()
    numbers = [sorted({int(each) for each in row.flatten().tolist()}) for row in next(iter(made.values()))]
    if sorted(each for row in numbers for each in row) != list(range(len(found))):
        return ()
    parts = []
    for row in numbers:
        its = [found[at] for at in row]
        parts.append(Group(tuple(name for name, _ in its), tuple(made), _reader(conversion, target, its, model), write))
    alone = parts[0].read(
        [torch.full([1] * dims[at], float(at), dtype=torch.float32, device="cpu") for at in numbers[0]]
    )
    same = alone.keys() == made.keys() and all(torch.equal(alone[name], made[name][:1]) for name in made)
    return tuple(parts) if same else ()


def _reader(
    conversion: Any, target: str, found: Sequence[tuple[str, str | None]], model: Any
) -> Callable[[Sequence[Tensor]], dict[str, Tensor]]:
    def read(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        parts = [(name, pattern, tensor) for (name, pattern), tensor in zip(found, tensors, strict=True)]
        return private.converted(conversion, target, parts, model)

    return read


class Stored(LazyTensors):
    """A model's tensors by its names, each read from the files on access, and joined where the model joins them.

    Args:
        model: on meta; its parameters get the dtypes of the files.
        checkpoint: of it.
        needed: the names without which it cannot be; None: those of all parameters.

    Attributes:
        names: ``{name in the files: name in the model}``.
        computed: parameters that no file holds, since transformers computes them of the configuration.

    Raises:
        CheckpointError: a parameter is not there, is of another shape, or of numbers that rank nothing.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_file({"weight": torch.eye(3)}, folder / "model.safetensors")
    >>> with torch.device("meta"):
    ...     stored = Stored(nn.Linear(3, 3, bias=False), open_checkpoint(folder))
    >>> stored["weight"].sum().item(), stored.cuts({"weight": {0: np.array([0, 2])}})
    (3.0, {'weight': {0: array([0, 2])}})
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, needed: Collection[str] | None = None) -> None:
        self.checkpoint = checkpoint
        self.names: dict[str, str] = {}
        self._groups: dict[str, list[Group]] = {}
        needed, kind = dict(model.named_parameters()) if needed is None else needed, type(model).__name__
        tensors = tensors_of(model)
        first = {id(tensor): name for name, tensor in tensors.items()}
        mine = {name: first[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
        for group in groups_of(model, checkpoint):
            if len(group.targets) > 1 or (name := mine.get(group.targets[0])) is None:
                continue
            entries = [checkpoint.entries[each] for each in group.sources]
            made = group.read([torch.empty(entry.shape, device="meta") for entry in entries])[group.targets[0]]
            if made.shape != tensors[name].shape and name in needed:
                raise CheckpointError(
                    f"{entries[0].path}: {printable(group.sources[0])} has shape {entries[0].shape}, in {kind} as "
                    f"config.json says it {tuple(tensors[name].shape)}."
                )
            no_floats = [entry for entry in entries if not entry.is_floating_point]
            if no_floats and name in needed and isinstance(tensors[name], nn.Parameter):
                raise CheckpointError(
                    f"{no_floats[0].path}: {printable(no_floats[0].name)} is of dtype {no_floats[0].dtype}, which "
                    "ranks nothing by itself; save the model in 16 or 32 bits first."
                )
            if not no_floats and isinstance(tensors[name], nn.Parameter):
                tensors[name].data = tensors[name].data.to(entries[0].torch_dtype)
            self.names |= dict.fromkeys(group.sources, name)
            self._groups.setdefault(name, []).append(group)
        self.computed = frozenset(
            name
            for path, module in model.named_modules()
            for key in private.parameters_of(module)
            if (name := full_name(path, key)) in needed and name not in self._groups
            if private.made_on_loading(model, module, key, name) is not None
        )
        missing = [name for name in needed if name not in self._groups and name not in self.computed]
        if missing:
            others = [name for name in checkpoint.entries if name not in self.names]
            hint = f", which hold {printable(others[0])}" if others else ""
            raise CheckpointError(
                f"{checkpoint.root}: {missing[0]} of {kind} is not in the files{hint}. Where transformers takes "
                "tensors apart as it loads them, load the model, use shrink(..., uniform=True), and save it."
            )

    def __getitem__(self, name: str) -> Tensor:
        group = self._groups[name][0]
        return group.read_from(self.checkpoint)[group.targets[0]]

    def rows(self, name: str, step: int) -> Iterator[Tensor]:
        """The rows of a parameter, some at a time: all but the last a multiple of ``step``."""
        group, entry = self._groups[name][0], self.checkpoint.entries[self._groups[name][0].sources[0]]
        if group.alone and entry.shape and entry.name not in self.checkpoint.moved:
            row = entry.nbytes // entry.shape[0]
            yield from row_pieces(self.checkpoint, entry, max(1, slicing.PIECE // max(1, step * row)) * step)
        elif group.parts:
            for start in range(0, len(group.parts), step):
                some = replace(group, parts=group.parts[start : start + step])
                yield some.read_from(self.checkpoint)[group.targets[0]]
        else:
            yield self[name]

    def is_alone(self, name: str) -> bool:
        """Whether each of the files that hold a parameter has it as it is."""
        return all(group.alone for group in self._groups.get(name, ()))

    def cuts(self, kept: Mapping[str, Cuts]) -> dict[str, Cuts]:
        """What stays of each tensor in files that becomes smaller, where this stays of those of the model."""
        every: dict[str, Cuts] = {}
        for name in track([name for name in kept if name in self._groups], "looking for what is left in files"):
            for group in self._groups[name]:
                every |= group.cuts(self.checkpoint, kept[name])
        return {file: cuts for file, cuts in every.items() if cuts}

    def __contains__(self, name: object) -> bool:  # constants of the model are read, and rank nothing
        its = [each for group in self._groups.get(str(name), ()) for each in group.sources]
        return bool(its) and all(self.checkpoint.entries[each].is_floating_point for each in its)

    @property
    def known(self) -> Collection[str]:
        return self._groups


# ------------------------------------------------------------------------------------------------ reading and writing


class Written(NamedTuple):
    """Of a tensor in a file: its entries, those that are not 0, and whether these have the source's values."""

    numel: int
    nonzero: int
    kept_as_they_were: bool


class BlockFiles(Weights):
    """The weights of a model on the meta device: read from a checkpoint, and written into a copy of it.

    Args:
        model: from `build_on_meta`.
        blocks: ``{name: module}``.
        source: the checkpoint that is pruned.
        work: a copy of it, into which pruned blocks are written.
        device: where the weights are put.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        source: Checkpoint,
        work: Path,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.blocks, self.source, self.work = model, blocks, source, work
        self.device = device or torch.device("cpu")
        self.written: dict[str, str] = {}  # the SHA-256 of each tensor that was, by its name in the files
        self.group_of: dict[str, Group] = {}
        for group in groups_of(model, source):
            self.group_of.update(dict.fromkeys(group.targets, group))
        self.names = {module: name for name, module in model.named_modules()}
        self.dense: Collection[nn.Module] = ()
        self.resting = {
            (module, key): parameter
            for module in model.modules()
            for key, parameter in private.parameters_of(module).items()
        }
        # of names that are one tensor, a checkpoint holds one
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)

    def check(self, *, whole: bool = False) -> None:
        """Whether the files hold what the blocks want, or the ``whole`` model, before anything is read.

        Raises:
            CheckpointError: a tensor is missing, or has another shape.
        """
        for block in [self.model] if whole else self.blocks.values():
            for module in block.modules():
                for key, parameter in private.parameters_of(module).items():
                    if parameter is not None:
                        full = full_name(self.names[module], key)
                        if self._group(full) is None and self._computed(module, key, full) is not None:
                            continue
                        group = self._wanted(full, parameter)
                        entries = [self.source.entries[name] for name in group.sources]
                        made = group.read([torch.empty(entry.shape, device="meta") for entry in entries])
                        self._check_shape(full, made.get(full, next(iter(made.values()))), parameter)

    def load(self, block: str, *, finished: bool) -> None:
        """Puts a block's weights in place, from the source, or from the pruned copy."""
        modules = list(self.blocks[block].modules())
        self._fill([each for each in modules if each not in self.dense], pruned=finished)
        self._fill([each for each in modules if each in self.dense], pruned=False)

    @contextlib.contextmanager
    def keeping(self, dense: Collection[nn.Module]) -> Iterator[None]:
        self.dense = dense
        try:
            yield
        finally:
            self.dense = ()

    def unload(self, block: str) -> None:
        """Back to the meta device."""
        for module in self.blocks[block].modules():
            for key in private.parameters_of(module):
                private.parameters_of(module)[key] = self.resting[module, key]

    def arrive(self, module: nn.Module) -> None:
        """Reads the weights of a module outside the blocks, which stay; of an embedding, rows as they are looked up."""
        if any(p is not None and p.device.type == "meta" for p in private.parameters_of(module).values()):
            self._fill([module], pruned=False)

    def tie(self) -> None:
        """Parameters that are one in the model are one again, after they were read by each of their names."""
        for first, *others in self.aliases.values():
            for name in others:
                path, _, key = name.rpartition(".")
                own = private.parameters_of(self.model.get_submodule(path))
                own[key] = self.model.get_parameter(first)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Within, modules outside the blocks read their weights as they run; at the end those that did go again."""
        inside = {module for block in self.blocks.values() for module in block.modules()}
        own = [module for module in self.model.modules() if module not in inside and private.parameters_of(module)]
        before = [dict(private.parameters_of(module)) for module in own]
        hooks = [module.register_forward_pre_hook(lambda module, _: self.arrive(module)) for module in own]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, parameters in zip(own, before, strict=True):
                private.parameters_of(module).update(parameters)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within, the model runs from end to end: a block's weights are read when it runs, and go when it has run."""
        hooks = []
        for name, block in self.blocks.items():
            hooks += [
                block.register_forward_pre_hook(lambda *_, name=name: self.load(name, finished=False)),
                block.register_forward_hook(lambda *_, name=name: self.unload(name), always_call=True),
            ]
        try:
            with self.arriving():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def write(self, block: str, new: Mapping[str, Tensor]) -> dict[str, Written]:
        """Writes new values, by names in the block, into the copy; returns what was written, by names in files."""
        return self.put({f"{block}.{local}": values for local, values in new.items()})

    def put(self, fulls: Mapping[str, Tensor]) -> dict[str, Written]:
        """`write` of parameters anywhere in the model.

        Entries that did not change keep their bytes, also where a file stores another dtype than the model computes in.
        """
        groups = {id(self._group(name)): self._group(name) for name in fulls}
        written: dict[str, Written] = {}
        for group in groups.values():
            assert group is not None
            before = dict(zip(group.sources, self._tensors(group, pruned=False), strict=True))
            made = group.read([before[name] for name in group.sources])
            if not _are_equal(group.write(made), before):
                raise CheckpointError(
                    f"{self.source.root}: {group.targets[0]} is made of {printable(group.sources[0])} and others, and "
                    "cannot be taken apart again by this version of transformers; load the model and pass it."
                )
            changed = {}
            for name in list(made):  # one by one, since all experts' matrices may be one of them
                stored = made.pop(name)
                changed[name] = _changed(stored, fulls[alias].cpu()) if (alias := self._alias(name, fulls)) else stored
                del stored
            for name, values in group.write(changed).items():
                path = self.work / self.source.entries[name].path.relative_to(self.source.root)
                write_tensor(path, replace(self.source.entries[name], path=path), values)
                self.written[name] = hashlib.sha256(bytes_of(values)).hexdigest()
                same = torch.equal(values, before[name].where(values.ne(0), 0))
                written[name] = Written(values.numel(), int(values.count_nonzero()), same)
        for path in {self.source.entries[name].path for name in written}:
            with open(self.work / path.relative_to(self.source.root), "rb") as file:
                os.fsync(file.fileno())
        return written

    def sources_of(self, name: str) -> tuple[str, ...]:
        """The tensors in files that a parameter is made of."""
        return self._wanted(name, None).sources

    def restore(self, names: Iterable[str]) -> None:
        """Parameters have the source's values in the copy again."""
        for name in names:
            group = self._wanted(name, None)
            self.put({name: group.read(self._tensors(group, pruned=False))[group.targets[0]]})

    def taken_apart(self, block: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the block's shapes, such as masks, as the tensors in files that they belong to."""
        found: dict[str, Tensor] = {}
        fulls = {f"{block}.{local}": tensor.cpu() for local, tensor in tensors.items()}
        groups = {id(group): group for name in fulls if (group := self._group(name)) is not None}
        for group in groups.values():
            made = {
                name: fulls[alias] if (alias := self._alias(name, fulls)) else self._resting_like(name)
                for name in group.targets
            }
            found.update(group.write(made))
        return found

    def _resting_like(self, name: str) -> Tensor:
        resting = self._resting_parameter(name)
        assert resting is not None
        return torch.ones(resting.shape, dtype=torch.bool, device="cpu")

    def stands_alone(self, name: str) -> bool:
        """Whether a tensor in a file is one tensor of the model."""
        return any(group.sources == (name,) and len(group.targets) == 1 for group in self.group_of.values())

    def left_alone(self, pruned: Iterable[str], reasons: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """``{reason: names in files}`` of what was not pruned, given the reasons by names in the model."""
        why = {name: reason for reason, names in reasons.items() for name in names}
        chosen = set(pruned)
        found: dict[str, list[str]] = {}
        reason_of: dict[str, str] = {}
        for group in self.group_of.values():
            known = [why[name] for target in group.targets for name in self._also(target) if name in why]
            if known:
                reason_of.update(dict.fromkeys(group.sources, known[0]))
        for name, entry in self.source.entries.items():
            if name in chosen:
                continue
            reason = "vectors and scalars" if len(entry.shape) < 2 else "of no use to the model"
            found.setdefault(reason_of.get(name, reason), []).append(name)
        return found

    def _also(self, name: str) -> list[str]:
        parameter = self._resting_parameter(name)
        return [name] if parameter is None else [name, *self.aliases.get(id(parameter), [])]

    def _alias(self, name: str, fulls: Mapping[str, Tensor]) -> str | None:
        if name in fulls:
            return name
        parameter = self._resting_parameter(name)
        return next((other for other in self.aliases.get(id(parameter), ()) if other in fulls), None)

    def _resting_parameter(self, name: str) -> Tensor | None:
        path, _, key = name.rpartition(".")
        return self.resting.get((self.model.get_submodule(path), key))

    def _group(self, name: str) -> Group | None:
        if name in self.group_of:
            return self.group_of[name]
        parameter = self._resting_parameter(name)
        others = self.aliases.get(id(parameter), []) if parameter is not None else []
        return next((self.group_of[other] for other in others if other in self.group_of), None)

    def _fill(self, modules: Any, *, pruned: bool) -> None:
        made: dict[str, Tensor] = {}
        for module in modules:
            path = self.names[module]
            for key in (*private.parameters_of(module), *private.buffers_of(module)):
                resting = self.resting.get((module, key))
                if resting is None and private.buffers_of(module).get(key) is None:
                    continue
                full = f"{path}.{key}" if path else key
                if resting is None and self._group(full) is None:
                    continue  # a buffer that no file holds was made with the model
                if self._group(full) is None and (computed := self._computed(module, key, full)) is not None:
                    self._place(module, key, full, computed)
                    continue
                group = self._wanted(full, resting)
                if full not in made:
                    lookup = isinstance(module, nn.Embedding) and len(group.sources) == 1
                    checkpoint = self._copy if pruned else self.source
                    rows = group.read([self._mapped(group.sources[0])]) if lookup else None
                    values = group.read_from(checkpoint) if rows is None else rows
                    made.update(values)
                    if full not in made:  # tied: the file has it by its other name
                        made[full] = next(iter(values.values()))
                self._place(module, key, full, made.pop(full))

    def _computed(self, module: nn.Module, key: str, full: str) -> Tensor | None:
        """A parameter that transformers makes of the configuration as it loads a model; None for others."""
        return private.made_on_loading(self.model, module, key, full) if key in private.parameters_of(module) else None

    def _place(self, module: nn.Module, key: str, full: str, values: Tensor) -> None:
        resting = self.resting.get((module, key))
        expected = resting if resting is not None else private.buffers_of(module)[key]
        assert expected is not None
        self._check_shape(full, values, expected)
        if resting is None:
            private.buffers_of(module)[key] = values.to(self.device, expected.dtype)
        else:
            private.parameters_of(module)[key] = nn.Parameter(
                values.to(self.device, expected.dtype), requires_grad=False
            )

    def _wanted(self, full: str, like: Tensor | None) -> Group:
        group = self._group(full)
        if group is None:
            shape = "" if like is None else f", of shape {tuple(like.shape)},"
            raise CheckpointError(
                f"{self.source.root}: {full}{shape} is in no shard; the directory is incomplete, or of another model "
                "than its config.json says."
            )
        return group

    def _check_shape(self, full: str, values: Tensor, expected: Tensor) -> None:
        if values.shape != expected.shape:
            raise CheckpointError(
                f"{self.source.root}: {full} has shape {tuple(values.shape)}, and its config.json asks for "
                f"{tuple(expected.shape)}."
            )

    def _tensors(self, group: Group, *, pruned: bool) -> list[Tensor]:
        checkpoint = self._copy if pruned else self.source
        return [checkpoint[name] for name in group.sources]

    @property
    def _copy(self) -> Checkpoint:
        entries = {
            name: replace(entry, path=self.work / entry.path.relative_to(self.source.root))
            for name, entry in self.source.entries.items()
        }
        return Checkpoint(self.work, (), entries, {})

    def _mapped(self, name: str) -> Tensor:
        """A tensor whose pages are read when they are touched: of an embedding, the rows that are looked up."""
        entry = self.source.entries[name]
        if not entry.nbytes or entry.torch_dtype is None:
            return self.source[name]
        raw = np.memmap(entry.path, dtype=np.uint8, mode="c", offset=entry.start, shape=(entry.nbytes,))
        if raw.ctypes.data % max(entry.torch_dtype.itemsize, 1):
            return self.source[name]
        return torch.from_numpy(raw).view(entry.torch_dtype).reshape(entry.shape)


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in others)


def _changed(stored: Tensor, new: Tensor) -> Tensor:
    """The new values in the stored dtype; what did not change, seen in the dtype of the new ones, stays as stored."""
    same = new.eq(stored.to(new.dtype)) & new.ne(0)
    return torch.where(same, stored, new.to(stored.dtype))


# The model that a directory's ``config.json`` describes, on the meta device: with its buffers, without its weights.
#
# Law: only a model of transformers' own is built, of no more than the files could hold; whatever goes wrong on the
# way names ``config.json``.


def loaded_model(folder: Path, device: torch.device | str | None = None) -> nn.Module:
    """The model of a Hugging Face directory in memory, of the class that `build_on_meta` finds, in evaluation mode.

    Raises:
        CheckpointError: what `build_on_meta` refuses, or it cannot be loaded.
    """
    from transformers.utils import logging

    kind: Any = type(build_on_meta(open_checkpoint(folder)))
    # Its own bar would be drawn in a pipe as well
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with blaming_config(folder, "its model cannot be loaded"):
        model: nn.Module = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype="auto")
    return model.to(device).eval()


def build_on_meta(checkpoint: Checkpoint) -> nn.Module:
    """The model of a directory, its parameters on the meta device; tied ones are one object.

    Class and configuration are those of `family_of`. Its dtype is that of most of the checkpoint's bytes.

    Raises:
        CheckpointError: what `family_of` refuses, a configuration that no model can be made of, one of other sizes
            than the files hold, an adapter, or a quantized checkpoint.
    """
    root = checkpoint.root
    if (root / "adapter_config.json").exists() and not (root / "config.json").exists():
        raise CheckpointError(f"{root}: holds an adapter and no model; merge it into its model first, and save that.")
    kind, config = family_of(checkpoint)
    if "quantization_config" in checkpoint.config:
        raise CheckpointError(
            f"{root / 'config.json'}: the model is quantized; prune the original, and quantize the result."
        )
    with blaming_config(root), NewTensors(most_common_dtype(checkpoint)):
        skeleton = None
        # some models compute with what they make, and cannot on the meta device
        with (
            contextlib.suppress(Exception),
            torch.device("meta"),
            parameters_on_meta(),
            parameters_counted(checkpoint),
        ):
            skeleton = kind(copy.deepcopy(config))
        if skeleton is not None:  # before any buffer takes memory
            _check_sizes(skeleton, checkpoint)
        with parameters_on_meta(), parameters_counted(checkpoint):
            model: nn.Module = kind(config)
    return model.eval().requires_grad_(False)


SMALL_BUFFERS = 2**28  # bytes, such as those of a causal mask


def _check_sizes(model: nn.Module, checkpoint: Checkpoint) -> None:
    mine = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name, entry in checkpoint.entries.items():
        for alias in (name, prefix + name, name.removeprefix(prefix)):
            if alias in mine and mine[alias].shape != torch.Size(entry.shape):
                raise CheckpointError(
                    f"{checkpoint.root}: {printable(name)} has shape {tuple(entry.shape)}, and its config.json asks "
                    f"for {tuple(mine[alias].shape)}."
                )
    taken = sum(buffer.nbytes for buffer in model.buffers())
    if taken > max(SMALL_BUFFERS, checkpoint.nbytes):
        raise CheckpointError(
            f"{checkpoint.root / 'config.json'}: describes a model whose buffers alone take {taken / 1e9:.3g} GB, and "
            f"the files hold {checkpoint.nbytes / 1e9:.3g} GB."
        )


def most_common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of the floating-point tensors, by bytes."""
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        if entry.is_floating_point and entry.torch_dtype is not None:
            sizes[entry.torch_dtype] = sizes.get(entry.torch_dtype, 0) + entry.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.root}: holds no floating-point tensor of 16 bits or more.")
    return max(sizes, key=lambda dtype: sizes[dtype])


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which new modules of this thread have their parameters on the meta device, but real buffers: a
    rotary embedding computes its frequencies, and no file holds them."""
    with ONE_AT_A_TIME:  # the class is the process's; what other threads build stays what it is
        original, here = nn.Module.register_parameter, threading.get_ident()

        def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(self, name, param)
            if threading.get_ident() == here and param is not None and param.device.type != "meta":
                private.parameters_of(self)[name] = nn.Parameter(param.to("meta"), requires_grad=False)

        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]
