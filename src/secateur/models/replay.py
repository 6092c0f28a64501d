"""Runs a model block by block with its own forward pass, which is ended at the current block.

Law: what a block receives is what the model's code gives it, masks, position embeddings and outputs of other blocks
included; replaying every block ends in the outputs of the full forward pass.

The model's forward function is called again for every block and batch. Blocks that are finished are stand-ins that
return their stored outputs, so a run costs the code between the blocks and one block. Which stored outputs the rest of
the model still needs is found out: a stand-in whose output was dropped returns NaN, and a NaN that reaches a block's
arguments shows that it is needed (an encoder's states, say, which every block of a decoder receives).

Where the dense model runs beside, the pruned one goes on with the rows that the dense one selects by top-k, in that
order, as the queries of RT-DETR are: else rows would be compared with those of other places.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.support import Forward, device_of, mapped, moved, naming, private, run_batch, running_as, track

RUNS_AGAIN = (
    "{name} runs more than once in a forward pass (its weights are shared between layers or inputs), and a directory "
    "is gone through block by block, which would see its first run only. Load the model, and pass the model itself."
)

Call = Callable[[], Any]
Handler = Callable[[str, tuple[Any, ...], dict[str, Any], Call], None]


class LostOutputError(Exception):
    """A block needs the output of an earlier one that was dropped."""


class _Stop(BaseException):
    """Ends a forward pass; no `Exception`, so that no model's own code takes it for an error."""


class Outputs:
    """The stored outputs of blocks for each batch: in memory, or in memory-mapped files.

    What is dropped gives its memory to the next of its shape, so that a walk does not cut the heap up.

    >>> outputs = Outputs()
    >>> outputs.save("blocks.0", 0, (torch.ones(2), None))
    >>> outputs.load("blocks.0", 0)
    (tensor([1., 1.]), None)
    """

    def __init__(self, folder: Path | None = None, stream: str = "") -> None:
        self.folder = folder
        self.prefix = f"{stream}." if stream else ""
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._own: dict[tuple[str, int], list[Tensor]] = {}
        self._held: dict[str, dict[int, Any]] = {}
        self._files: dict[tuple[str, int], list[Path]] = {}

    def save(self, name: str, number: int, output: Any) -> None:
        self._held.setdefault(name, {})[number] = mapped(
            output, lambda tensor: self._placed(name, number, tensor.detach())
        )

    def load(self, name: str, number: int) -> Any:
        return self._held[name][number]

    def drop(self, name: str, number: int) -> None:
        self._held[name].pop(number, None)
        for tensor in self._own.pop((name, number), []):
            self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
        if not self._held[name]:
            del self._held[name]
        for path in self._files.pop((name, number), []):
            path.unlink(missing_ok=True)

    def has(self, name: str, number: int) -> bool:
        return number in self._held.get(name, ())

    def names(self) -> list[str]:
        return list(self._held)

    def clear(self) -> None:
        for name, held in list(self._held.items()):
            for number in list(held):
                self.drop(name, number)
        self._free.clear()

    def _placed(self, name: str, number: int, tensor: Tensor) -> Tensor:
        if self.folder is None or not tensor.numel():
            free = self._free.get((tensor.shape, tensor.dtype))
            place = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._own.setdefault((name, number), []).append(place)
            return place.copy_(tensor)
        files = self._files.setdefault((name, number), [])
        path = self.folder / f"{self.prefix}{name}.{number}.{len(files)}.activations"
        files.append(path)
        # room for the file is asked for now: a full disk is an error here, and not a signal when a page is written
        with naming(path), open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        mapping = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return mapping.view(tensor.shape).copy_(tensor)


class Weights:
    """Where a model's weights are: in the model, so that nothing is to be done. `BlockFiles` reads them."""

    def load(self, block: str, *, finished: bool) -> None:
        """The block's weights are there from now on; those of a finished block are the pruned ones."""

    def unload(self, block: str) -> None:
        """They need not be there any more."""

    def arrive(self, module: nn.Module) -> None:
        """A module outside the blocks that holds parameters of its own is about to run."""

    def keeping(self, dense: Collection[nn.Module]) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Within, these modules have the source's weights, also in a finished block."""
        return contextlib.nullcontext()

    def write(self, block: str, new: Mapping[str, Tensor]) -> Mapping[str, Any]:  # noqa: ARG002
        """Writes new values, by names in the block, into the copy, if there is one; what was written, by names in
        files."""
        return {}


class SameRows(TorchFunctionMode):
    """Within, rows that are selected by top-k, or of boxes by suppression (`torchvision.ops.nms`), are recorded, or
    those that are known are selected again.

    An axis as long as one of a parameter is none of rows: so experts are chosen, and units that stay active. What top-k
    selects from is put into ``scores``, where that is given; a selection has the same key in it as in ``known``.
    """

    def __init__(
        self,
        sizes: Collection[int],
        known: dict[Hashable, Tensor],
        *,
        records: bool,
        place: Call,
        scores: dict[Hashable, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.sizes, self.known, self.records, self.place, self.scores = sizes, known, records, place, scores
        self.times: Counter[Hashable] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk) and "out" not in kwargs:
            given = args[0] if args else kwargs["input"]
            axis = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            if not given.dim() or given.shape[axis] in self.sizes:
                return output
            rows = self._same(output.indices, given, axis)
            return output if rows is output.indices else type(output)((given.gather(axis, rows), rows))
        if getattr(func, "__name__", "") == "nms" and isinstance(output, Tensor):
            return self._same(output, args[0] if args else kwargs["dets"])
        return output

    def _same(self, rows: Tensor, given: Tensor, *how: int) -> Tensor:
        """The rows of the given tensor that are recorded; these, where none are."""
        key = self.place(), given.shape, *how, rows.shape if how else None  # suppression leaves any number
        self.times[key] += 1
        if self.records:
            self.known[key, self.times[key]] = rows
        if how and self.scores is not None and given.is_floating_point():
            self.scores[key, self.times[key]] = given.clone()  # what the model writes into it later does not count
        return self.known.get((key, self.times[key]), rows)


def same_rows(
    model: nn.Module, known: dict[Hashable, Tensor], *, records: bool, scores: dict[Hashable, Tensor] | None = None
) -> SameRows:
    """`SameRows` of any runs of a model, and of others whose modules have the same names: by which of them selects.

    >>> model, rows, scores = nn.Softmax(-1), {}, torch.tensor([[0.0, 2.0, 1.0]])
    >>> with same_rows(model, rows, records=True):
    ...     _ = model(scores).topk(1)
    >>> with same_rows(model, rows, records=False):
    ...     model(-scores).topk(1).indices
    tensor([[1]])
    """
    names = {id(module): name for name, module in model.named_modules()}

    def place() -> str | None:
        frame = inspect.currentframe()
        while frame is not None and id(frame.f_locals.get("self")) not in names:
            frame = frame.f_back
        return None if frame is None else names[id(frame.f_locals["self"])]

    return SameRows(_sizes_in(model), known, records=records, place=place, scores=scores)


def _sizes_in(model: nn.Module) -> set[int]:
    return {size for parameter in model.parameters() for size in parameter.shape}


class Replay:
    """The forward passes of a model over batches, one block at a time.

    Args:
        model: any module, in evaluation mode.
        blocks: ``{name: module}`` of it.
        batches: what it is run on.
        weights: where its weights are.
        outputs: where the outputs of finished blocks are.
        dense: where those of the dense model are, which runs beside the pruned one; None where it does not.
        forward: how a batch is run; see `secateur.support.run_batch`.
        device: where the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        batches: Sequence[Any] = (),
        *,
        weights: Weights | None = None,
        outputs: Outputs | None = None,
        dense: Outputs | None = None,
        forward: Forward | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.blocks = dict(blocks)
        self.batches = batches
        self.weights = Weights() if weights is None else weights
        self.outputs = Outputs() if outputs is None else outputs
        self.dense = dense
        self._stream = self.outputs
        self.how = forward
        self.device = device
        self.done: list[str] = []
        self.forwards: dict[str, Callable[..., Any]] = {}  # the blocks' own, while stand-ins are in their places
        self.keep_all = False
        self._likes: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._poisons: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._shapes: dict[tuple[str, int], Any] = {}
        self._poisoned: set[str] = set()
        self._unneeded: list[str] = []
        self._used_poison = False
        self._at = 0
        self._handler: Handler | None = None
        self._reached: str | None = None
        self._provisional: tuple[str, Any] | None = None
        self._calls: set[str] = set()
        self._within = False
        self._outside: set[nn.Module] = set()
        self._sizes = _sizes_in(model)
        self._selected: dict[int, dict[Hashable, Tensor]] = {}  # of each batch, by the dense model

    @property
    def at(self) -> int:
        """The number of the batch that runs."""
        return self._at

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the stand-ins in the blocks' places; they are taken away at the end."""
        inside = {module for block in self.blocks.values() for module in block.modules()}
        handles = [
            module.register_forward_pre_hook(self._arrive)
            for module in self.model.modules()
            if module not in inside and any(True for _ in module.parameters(recurse=False))
        ]
        self.forwards = {name: block.forward for name, block in self.blocks.items()}
        try:
            with running_as({self.blocks[name]: self._stand_in(name, own) for name, own in self.forwards.items()}):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def of_dense(self) -> Iterator[None]:
        """Within, finished blocks return what they returned in the dense model; their weights are the caller's part."""
        assert self.dense is not None
        self._stream = self.dense
        try:
            yield
        finally:
            self._stream = self.outputs

    def run(self, number: int, batch: Any, handler: Handler) -> str | None:
        """Runs a batch up to the first block that is not done, and calls the handler there with the block's name, its
        arguments, and what computes its output; returns the name, or None where the forward pass came to its end.

        Raises:
            LostOutputError: the block's arguments depend on an output that was dropped.
            ValueError: the block's arguments are not numbers.
        """
        self._at, self._handler, self._reached, self._used_poison = number, handler, None, False
        self._calls.clear()
        with contextlib.suppress(_Stop), torch.no_grad(), self._same_rows(number):
            run_batch(self.model, moved(batch, self.device), self.how)
        return self._reached

    def _same_rows(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Rows of the dense model in both; where a run only finds out what is needed, values may be NaN."""
        is_dense = self._stream is self.dense
        if self.dense is None or (is_dense and self._within):
            return contextlib.nullcontext()
        known = self._selected.setdefault(number, {})
        return SameRows(self._sizes, known, records=is_dense, place=lambda: self._reached)

    def find_next(self) -> str | None:
        """The block that the model runs next, or None where it comes to its end."""
        return self.run(0, self.batches[0], lambda *_: None)

    def store(self, name: str) -> None:
        """Runs a block on all batches and stores what it returns; from now on it is a stand-in that returns that.

        What the next block does not need of the blocks before is dropped on the way, batch by batch. Within `of_dense`
        the block is not finished yet: the pruned one is run after it.
        """
        for number, batch in enumerate(track(self.batches, f"running {name or 'the model'}")):
            self.run(number, batch, lambda name, args, kwargs, call: self.keep(name, call()))  # noqa: ARG005
            self.drop_unneeded(name, number, batch)
        if self._stream is self.outputs:
            self.done.append(name)

    def keep(self, name: str, output: Any) -> None:
        """Stores what a block returned in the run that reached it."""
        self._stream.save(name, self._at, output)
        self._shapes[name, self._at] = mapped(output, self._like)

    def fork(self, name: str, number: int, output: Any) -> None:
        """From here on there is a run of this number, too: up to this block as the one that is there, and of what the
        block returns in it, ``output``."""
        for other in self._stream.names():
            if other != name and self._stream.has(other, self._at):
                self._stream.save(other, number, self._stream.load(other, self._at))
        self._stream.save(name, number, output)
        self._shapes.update({(other, number): shape for (other, at), shape in self._shapes.items() if at == self._at})
        self._shapes[name, number] = mapped(output, self._like)

    def drop_unneeded(self, name: str, number: int, batch: Any) -> None:
        """Of this batch, what the block after ``name``, whose outputs are kept, does not need; told by the first."""
        if number == 0:
            self._unneeded = [] if self.keep_all else self._find_unneeded(name, batch)
        for other in self._unneeded:
            if self._stream.has(other, number):
                self._stream.drop(other, number)

    def is_run_again(self, name: str, batch: Any, output: Any) -> bool:
        """Whether the model runs a block a second time after it has returned ``output`` for the first batch, as ALBERT
        does."""
        again: list[str] = []
        self._provisional = (name, output)
        try:
            with self._not_past_the_blocks():
                self.run(0, batch, lambda reached, *_: again.append(reached))
        finally:
            self._provisional = None
        return again == [name]

    def _find_unneeded(self, name: str, batch: Any) -> list[str]:
        """The blocks whose outputs do not reach the arguments of the block after ``name``, for the first batch."""
        found = []
        self.done.append(name)
        try:
            for other in [other for other in self._stream.names() if other != name]:
                self._poisoned.add(other)
                try:
                    with self._not_past_the_blocks():
                        self.run(0, batch, lambda *_: None)
                except LostOutputError:
                    self._poisoned.discard(other)
                else:
                    found.append(other)
        finally:
            self.done.remove(name)
            self._poisoned.difference_update(found)  # of the other batches they are still there
        return found

    @contextlib.contextmanager
    def _not_past_the_blocks(self) -> Iterator[None]:
        """Ends a run at the first module outside the blocks that was not run so far, such as a head."""
        self._within = True
        try:
            yield
        finally:
            self._within = False

    def restart(self, *, keep_all: bool) -> None:
        """Back to before the first block; with ``keep_all`` nothing is dropped from now on."""
        self.clear()
        self.done.clear()
        self._poisoned.clear()
        self._selected.clear()
        self.keep_all = keep_all

    def clear(self) -> None:
        """Gives up all stored outputs."""
        self._poisons.clear()
        self.outputs.clear()
        if self.dense is not None:
            self.dense.clear()

    def _like(self, tensor: Tensor) -> Tensor:
        """One tensor on the meta device for all of a shape: many small things that stay would cut the memory up."""
        key = (tensor.shape, tensor.dtype)
        if key not in self._likes:
            self._likes[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return self._likes[key]

    def _arrive(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if self._within and module not in self._outside:
            raise _Stop
        self._outside.add(module)
        self.weights.arrive(module)

    def _stand_in(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if name in self.done:
                if name in self._calls:
                    raise ValueError(RUNS_AGAIN.format(name=name))
                self._calls.add(name)
                return self._remembered(name)
            if self._provisional is not None and self._provisional[0] == name and self._reached is None:
                self._reached = name
                return self._provisional[1]
            self._check(name, args, kwargs)
            self._reached = name
            assert self._handler is not None
            self._handler(name, args, kwargs, lambda: original(*args, **kwargs))
            raise _Stop

        return forward

    def _remembered(self, name: str) -> Any:
        # where the block is: of a model on several devices its own one
        device = device_of(self.blocks[name]) or self.device or torch.device("cpu")
        if name in self._poisoned or not self._stream.has(name, self._at):
            self._used_poison = True
            return mapped(self._shapes[name, self._at], lambda tensor: self._poison(tensor, device))
        # a copy: the model may write to it, as to `h += y`, and is given it again
        return mapped(self._stream.load(name, self._at), lambda tensor: tensor.to(device, copy=True))

    def _poison(self, like: Tensor, device: torch.device) -> Tensor:
        """NaN, or zeros where there is none; one tensor for all of a shape, as long as nobody writes to it.

        To fill one for each block that is behind took a seventh of the time of a walk over thirty blocks.
        """
        key = (like.shape, like.dtype, device)
        held = self._poisons.get(key)
        if held is None or private.version_of(held):
            fill = torch.nan if like.is_floating_point() else 0
            with torch.inference_mode(False):  # a tensor of that mode counts no writes
                held = self._poisons[key] = torch.full(like.shape, fill, dtype=like.dtype, device=device)
        return held

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        found = False

        def look(tensor: Tensor) -> Tensor:
            nonlocal found
            found = found or (tensor.is_floating_point() and bool(tensor.isnan().any()))
            return tensor

        mapped((args, kwargs), look)
        if found and self._used_poison:
            raise LostOutputError(name)
        if found and not self._within:
            raise ValueError(
                f"what {name} receives in batch {self._at} holds NaN; look at the batch, at the model's configuration "
                "(config.json) and its weights, or run the model in a wider dtype (float16 overflows where bfloat16 "
                "does not)."
            )
