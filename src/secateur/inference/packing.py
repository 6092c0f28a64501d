"""Layers that skip what was removed, put in a model where they are measured to be faster. What pack says on a page: a
row a layer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.inference.blocks import (
    Absorbed,
    chains,
    fused_blocks,
    may_follow,
    rectifier_of,
    run_and_follow,
    sequences,
)
from secateur.inference.convolution import (
    BlockConv1d,
    BlockConv2d,
    ChannelsLastMaxPool2d,
    FoldedConv2d,
    SparseConv1d,
    SparseConv2d,
    kept_places,
    lay_out,
    may_be_turned,
    may_fold,
    why_no_sparse_convolution,
)
from secateur.inference.linear import (
    BlockLinear,
    GroupedLinear,
    Pointwise,
    SemiStructuredLinear,
    SparseLinear,
    WindowLinear,
    why_no_semi_structured_device,
    why_not_semi_structured,
)
from secateur.native import LANES, MOST_COLUMNS, available, describe, scaled
from secateur.report import Reported
from secateur.support import (
    Column,
    Forward,
    Part,
    Table,
    alternating,
    bytes_text,
    device_of,
    matched,
    moved,
    naming_example,
    percent,
    private,
    refuse_sharded,
    refuse_unloaded,
    run_example,
    to_int8,
    track,
    unchanged,
    unwrapped,
)

# ---- Layers that skip what was removed, put in a model where they are measured to be faster.
#
# Law: a packed layer's output is that of the dense layer with its zeros, within rounding; a layer stays dense unless
# another form beats the best dense one on the user's own batch.

_GROUPS = (256, 128, 64, 32, 16)  # outputs that may share a choice of inputs, the fastest first
_SLACK = 1.05  # times the fewest products that any number of groups needs
_FEW_VECTORS = 16  # with more, SparseLinear is faster than WindowLinear
_WORTH_TRYING = 0.8  # of the dense products; above that no form was ever faster
_TOO_WRONG = 0.1  # of its output that rounding may change of a layer
_WORTH_CONVOLVING = 0.5  # the same of convolutions
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}  # by the dimensions of an input
_WORTH_SHARING = 2  # times the kept products: a block of outputs was never faster by more for each product


@dataclass(frozen=True)
class PackedLayer:
    """The result of `pack` for one layer: the form that was chosen, the times, and why.

    - ``kind``: the form that it has now; ``"dense"`` where it stayed.
    - ``why``: the reason for staying dense, or empty.
    - ``dense_ms``, ``best_dense_ms``, ``packed_ms``: one call on the example; the layer as it was, the fastest dense
      form, the fastest other form (None: there was nothing to time).
    - ``dense_bytes``, ``bytes``: of its weight and bias, before and now.
    - ``fused``: the names of the modules after it whose work it does, too.
    - ``error``: what rounding to int8 changes of its output on the example, ``‖change‖ / ‖output‖``; of the fastest
      packed form, also where the layer stayed dense. None where nothing is rounded.
    - ``int8``: what is rounded to int8 in the form that it has now: "values", and "inputs" as they come.
    - ``dense_int8_ms``: torch's own dense layer in int8, which is then one of the dense forms.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sparsity: float
    why: str = ""
    dense_ms: float | None = None
    best_dense_ms: float | None = None
    packed_ms: float | None = None
    dense_bytes: int = 0
    bytes: int = 0
    fused: tuple[str, ...] = ()
    error: float | None = None
    int8: tuple[str, ...] = ()
    dense_int8_ms: float | None = None

    @property
    def speedup(self) -> float | None:
        """Against the fastest dense form; above 1 is faster, also where the layer stayed dense."""
        return None if not self.packed_ms or self.best_dense_ms is None else self.best_dense_ms / self.packed_ms


@dataclass(frozen=True)
class Packing(Reported):
    """The result of `pack`; prints as a table.

    ``blocks`` are the names of modules that add a shortcut in the store of a packed convolution, ``poolings`` those of
    max-poolings that are computed with the channels of a place side by side.
    """

    layers: tuple[PackedLayer, ...]
    blocks: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ()

    @property
    def packed(self) -> tuple[PackedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.kind != "dense")

    def content(self) -> Iterator[Part]:
        """A row for each layer, and their sum in words."""
        told = "The fastest dense form in times of the fastest other one, of each layer where that was timed."
        yield self.table().drawn("times_faster", "What skipping zeros gains", told)
        yield ""
        yield self.said()

    def table(self, title: str = "Layer by layer") -> Table:
        """A row for each layer."""
        error = Column.portion("error", lambda each: each.error, none="", bar=False)
        return Table.of(
            "layers",
            self.layers,
            Column.name("Layer", lambda each: each.name),
            Column.shape("Shape", lambda each: each.shape),
            Column.portion("Zeros", lambda each: each.sparsity),
            Column.figure("ms dense", lambda each: each.best_dense_ms),
            Column.figure("packed", lambda each: each.packed_ms, key="ms_packed"),
            Column.figure("times faster", lambda each: each.speedup, ".2f"),
            *([error] if any(each.error is not None for each in self.layers) else []),
            Column.bytes("size before", lambda each: each.dense_bytes, detail=True),
            Column.bytes("size", lambda each: each.bytes, detail=True),
            Column.name("Now", _now),
            title=title,
        )

    def said(self) -> str:
        """Their sum in words."""
        before, after = sum(each.dense_bytes for each in self.layers), sum(each.bytes for each in self.layers)
        counted = f"{len(self.packed)} of {len(self.layers)} layers packed"
        said = f"{counted}; their {bytes_text(before)} are now {bytes_text(after)}."
        worst = max((each.error for each in self.packed if each.error is not None), default=None)
        if worst is not None:
            said += f" Rounding changes a packed layer's output by {percent(worst)} at most."
        if self.blocks:
            said += f" Blocks that add and rectify in the store of a convolution: {len(self.blocks)}."
        if self.poolings:
            said += f" Max-poolings with channels side by side: {len(self.poolings)}."
        return said


def _now(layer: PackedLayer) -> str:
    int8 = [f"{' and '.join(layer.int8)} in int8"] * bool(layer.int8)
    why = [layer.why.replace("dense is", "which is")] * bool(layer.why)
    return ", ".join([layer.kind, *int8, *why, *[f"with {' and '.join(layer.fused)}"] * bool(layer.fused)])


def pack(
    model: nn.Module,
    example_inputs: Any,
    *,
    at_least: float = 1.1,
    kernels_too: bool = True,
    semi_structured: bool = False,
    fuse: bool = True,
    values: str | None = None,
    inputs: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    forward: Forward | None = None,
) -> Packing:
    """Replace layers whose zeros pay by faster ones, in place; each is timed on the example inputs and stays dense
    unless ``at_least`` times faster than the best dense form of it.

    Linear layers, transformers' ``Conv1D`` and convolutions of one and two dimensions are looked at; attached masks
    count as zeros and are left behind. The model is run once on the example, in evaluation mode, and each layer then
    meets the inputs that reached it: use a batch of the size and threads that will be served. Zeros alone do nothing:
    where no form is faster, the report says so and the layer stays as it is; `secateur.shrink` makes it smaller.

    Convolutions become `SparseConv2d` and `SparseConv1d`, where kernels in C were compiled; from 70 % zeros on that can
    pay. Where 4 consecutive outputs share their zeros, as the patterns "4x1" and "16x1" leave them, they become
    `BlockConv2d` and `BlockConv1d`, which are faster. A batch normalization in evaluation mode and a ReLU, ReLU6,
    Hardswish or SiLU that alone read a convolution's output on the example become part of it (``fused``), and an
    `Absorbed` is left where they were: call ``model.eval()`` before. A block that only calls layers, adds and
    rectifies, as those of residual networks do, becomes a `FusedBlock` that adds in the convolution's store
    (``blocks``), and an `nn.Sequential` in which packed convolutions or such blocks follow each other a
    `FusedSequential`, in place. Beside packed convolutions, one that stays dense takes in its batch normalization
    (`FoldedConv2d`), and a max-pooling takes images whose channels lie side by side, where that is measured to be
    faster (`ChannelsLastMaxPool2d`). The weights of the other convolutions are laid out in torch's usual memory format,
    which packed ones read and write: a network in ``channels_last`` comes out like any other, and either runs on images
    of both formats.

    With ``values="int8"`` the kernels' weights are rounded to 8 bits, with a scale for each output, and zeros stay
    zeros. That takes a quarter of float32's bytes; with one vector at a time reading them is all the work. What it
    changes of each layer's output is measured (``error``), and a form that changes more than a tenth is not taken.
    Weights that were rounded already, as `secateur.solvers.with_rounding` leaves them, are found to be. Among the dense
    forms to beat is then torch's dense int8.

    Args:
        model: changed in place, unless an error is raised.
        example_inputs: what the model is called with, as in `torch.export`: a tuple holds positional arguments, a
            mapping keyword arguments, and anything else is the only argument.
        at_least: how many times faster than the best dense form.
        kernels_too: False for plain torch operations only: what is packed trains, and exports to ONNX.
        semi_structured: on a CUDA device, also try 2:4 on sparse tensor cores (`SemiStructuredLinear`), for weights in
            float16 or bfloat16 with multiples of 32 outputs and 64 inputs, whose zeros are 2:4.
        fuse: False to leave everything that is no packed layer as it is.
        values: "int8" for kernels, on CPUs, whose weights are rounded to int8; None for the weights as they are.
        inputs: "int8" to also try layers that round their inputs to 8 bits as they come, and take them where they are
            ``at_least`` times faster than the other forms; needs ``values="int8"``. Linear layers round each vector,
            convolutions each image.
        include, exclude: globs over layers' names (``"encoder.*"``).
        forward: ``(model, example_inputs) -> outputs`` for a model that is called otherwise.

    Returns:
        What was chosen for each layer, and what was measured.

    Raises:
        ValueError: there is no such layer, ``at_least`` is not positive, ``values`` or ``inputs`` is another word or
            goes without what it needs, a weight to be rounded is not finite, ``semi_structured`` without a GPU that
            can, or a packed layer's output is not that of the dense one.

    >>> from secateur import apply_, make_masks
    >>> from secateur.targets import find_targets
    >>> from secateur.patterns import GroupedColumns
    >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    >>> masks = make_masks(find_targets(model, include="0.weight"), 0.9, pattern=GroupedColumns(256))
    >>> done = apply_(model, masks)
    >>> packing = pack(model, torch.randn(1, 1024))
    >>> len(packing.layers), packing.layers[1].why
    (2, 'no zeros')
    """
    if not at_least > 0:
        raise ValueError(f"at_least says how many times faster, so it is positive; got {at_least}.")
    _check_words(values, inputs, kernels_too)
    model = unwrapped(model)
    refuse_sharded(model, "pack")
    device = device_of(model) or torch.device("cpu")
    refuse_unloaded(model)
    if semi_structured and (why := why_no_semi_structured_device(device)):
        raise ValueError(f"{why}; leave semi_structured out.")
    chosen = _layers(model, include, exclude)
    seen = _seen(model, chosen, example_inputs, forward or run_example)
    layers: dict[str, PackedLayer] = {}
    replacements: dict[str, nn.Module] = {}
    asked = _Asked(at_least, kernels_too, semi_structured, values is not None, inputs is not None)
    for name, module in track(chosen.items(), "timing layers"):
        x = seen.inputs.get(name)
        if asked.values and not bool(cast("Tensor", module.weight).isfinite().all()):
            raise ValueError(f"{name}: its weight holds NaN or infinity, which has no place in int8.")
        found, replacement = _consider(model, name, module, x, asked)
        if isinstance(replacement, SparseConv2d) and fuse and (after := seen.followers.get(name)):
            found = dataclasses.replace(found, fused=tuple(after))
            replacement = _fused(replacement, module, [model.get_submodule(each) for each in after])
        layers[name] = found
        if replacement is not None:
            replacements[name] = replacement.train(module.training)
    poolings: dict[str, nn.Module] = {}
    if fuse and any(isinstance(each, SparseConv2d) for each in replacements.values()):
        poolings = _poolings(model, seen, at_least)
        for name, (layer, replacement) in _folded(model, layers, seen, poolings).items():
            layers[name], replacements[name] = layer, replacement
    absorbed = {name for layer in layers.values() for name in layer.fused}
    for name, pooling in seen.pooled.items():
        if pooling in poolings and name not in absorbed and type(model.get_submodule(name)) is nn.ReLU:
            poolings[pooling] = ChannelsLastMaxPool2d(cast("nn.MaxPool2d", poolings[pooling]), rectified=True)
            absorbed.add(name)
    for name in absorbed:
        replacements[name] = Absorbed().train(model.get_submodule(name).training)
    for name, replacement in {**replacements, **poolings}.items():
        put(model, name, replacement)
    blocks = fused_blocks(model) if fuse else {}
    for name, block in blocks.items():
        put(model, name, block)
    for name, chain in chains(model).items() if blocks else ():
        put(model, name, chain)
    if fuse:
        sequences(model)
    lay_out(model)
    return Packing(tuple(layers.values()), tuple(blocks), tuple(poolings))


def _poolings(model: nn.Module, seen: _Seen, at_least: float) -> dict[str, nn.Module]:
    """The max-poolings that are faster of images whose channels lie side by side, each timed on its input."""
    found: dict[str, nn.Module] = {}
    for name in seen.poolings:
        module, x = model.get_submodule(name), seen.inputs.get(name)
        if x is None or x.dim() != 4:
            continue
        turned = ChannelsLastMaxPool2d(cast("nn.MaxPool2d", module))
        with torch.no_grad():
            as_it_is, faster = _timed([module.forward, turned], x.contiguous())
        if as_it_is >= at_least * faster:
            found[name] = turned
    return found


def _folded(
    model: nn.Module, layers: Mapping[str, PackedLayer], seen: _Seen, poolings: Mapping[str, nn.Module]
) -> dict[str, tuple[PackedLayer, nn.Module]]:
    """The convolutions that stay dense and take in the batch normalization that alone reads their outputs."""
    found: dict[str, tuple[PackedLayer, nn.Module]] = {}
    for name, layer in layers.items():
        after = seen.followers.get(name, [])
        module, x = model.get_submodule(name), seen.inputs.get(name)
        if layer.kind != "dense" or not after or x is None or not may_fold(module):
            continue
        norm = model.get_submodule(after[0])
        if not private.is_batchnorm(norm) or _is_shared(model, module):
            continue
        turned = seen.pooled.get(after[-1], "") in poolings
        made = FoldedConv2d.from_module(module, norm, channels_last=turned)
        with torch.no_grad():
            _check_same(name, made(x), norm(module(x)))
        found[name] = dataclasses.replace(layer, fused=(after[0],)), made
    return found


def _fused(packed: SparseConv2d, module: nn.Module, after: list[nn.Module]) -> SparseConv2d:
    """The same layer with the work of what follows it."""
    norm = next((each for each in after if private.is_batchnorm(each)), None)
    if norm is not None:
        values, inputs = (None if not rounded else "int8" for rounded in (_rounds(packed), packed.rounds_inputs))
        packed = type(packed).from_module(module, norm, together=packed.together, values=values, inputs=inputs)
        packed = packed.to(packed.values.device)
    for each in after:
        if word := rectifier_of(each):
            packed.rectified, packed.rectifier = True, word
    return packed


def _layers(
    model: nn.Module, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> dict[str, nn.Module]:
    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    if _is_layer(model):
        raise ValueError(
            f"the model is a single {type(model).__name__}; put it in nn.Sequential, so that it can be replaced."
        )
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer or convolution.")
    included, excluded = matched(include, layers, "layer"), matched(exclude, layers, "layer") or set()
    return {
        name: module
        for name, module in layers.items()
        if (included is None or name in included) and name not in excluded
    }


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or private.is_convolution(module) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


@dataclass(frozen=True)
class _Seen:
    """What a run of the model showed."""

    inputs: Mapping[str, Tensor]  # the first that each layer and pooling was called with
    followers: Mapping[str, list[str]]  # what alone reads each convolution's output, and can be part of it
    pooled: Mapping[str, str]  # the pooling that alone reads an output of those
    poolings: Collection[str]


def _seen(model: nn.Module, layers: Mapping[str, nn.Module], example_inputs: Any, forward: Forward) -> _Seen:
    """One run on the example, in evaluation mode."""
    inputs: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, Tensor):
                inputs.setdefault(name, given)  # detached afterwards: that would be a reader

        return see

    convolutions = {name: module for name, module in layers.items() if private.is_convolution(module)}
    followers, poolings = may_follow(model), may_follow(model, may_be_turned)
    with unchanged(model), torch.no_grad():
        watched = {**layers, **poolings}
        handles = [m.register_forward_pre_hook(watch(name), with_kwargs=True) for name, m in watched.items()]
        try:
            model.eval()
            example = moved(example_inputs, device_of(model))
            with naming_example(model, example) if forward is run_example else contextlib.nullcontext():
                found, pooled = run_and_follow(convolutions, followers, lambda: forward(model, example), poolings)
        finally:
            for handle in handles:
                handle.remove()
    return _Seen({name: x.detach() for name, x in inputs.items()}, found, pooled, poolings)


@dataclass(frozen=True)
class _Asked:
    """What `pack` was asked for."""

    at_least: float
    kernels_too: bool
    semi_structured: bool
    values: bool
    inputs: bool


def _check_words(values: str | None, inputs: str | None, kernels_too: bool) -> None:
    for name, word in (("values", values), ("inputs", inputs)):
        if word not in (None, "int8"):
            raise ValueError(f"{name} is 'int8' or None, not {word!r}.")
    if inputs is not None and values is None:
        raise ValueError('inputs="int8" goes with values="int8": what rounds its inputs has rounded weights.')
    if values is not None and not kernels_too:
        raise ValueError('values="int8" is what kernels read; leave kernels_too=False out.')


def _consider(
    model: nn.Module, name: str, module: nn.Module, x: Tensor | None, asked: _Asked
) -> tuple[PackedLayer, nn.Module | None]:
    with torch.no_grad():
        weight = cast("Tensor", module.weight).detach()
        zeros = 1 - int(torch.count_nonzero(weight)) / weight.numel() if weight.numel() else 0.0
        bias = cast("Tensor | None", module.bias)
        size = weight.nbytes + (0 if bias is None else bias.nbytes)
        known = PackedLayer(name, "dense", tuple(weight.shape), zeros, dense_bytes=size, bytes=size)
        why = _why_not(model, module, zeros, x)
        if why or x is None:
            return dataclasses.replace(known, why=why), None
        matrix = weight.t() if is_conv1d(module) else weight.flatten(1)
        batch = x.numel() // max(matrix.shape[1], 1)
        with_kernels = asked.kernels_too and x.device.type == "cpu"
        candidates: list[nn.Module] = []
        if not private.is_convolution(module) or _is_pointwise(module):
            candidates += _candidates(matrix, bias, batch, with_kernels, asked)
        no_fours = why_not_semi_structured(matrix) if asked.semi_structured else ""
        if asked.semi_structured and not no_fours:
            candidates.append(SemiStructuredLinear.from_dense(matrix.contiguous(), bias))
        if private.is_convolution(module):
            candidates = [Pointwise(each, module.stride) for each in candidates]
            if with_kernels and available() and not _why_no_convolution(module, zeros, weight.dtype):
                values, made = "int8" if asked.values else None, _size_of_output(module, x)
                forms = _forms_of_convolution(cast("nn.Conv2d", module), bool(asked.inputs))
                candidates += [form(module, size=made, values=values) for form in forms]
        if not candidates:
            why = no_fours or _no_form(module, zeros, with_kernels)
            return dataclasses.replace(known, why=why), None
        expected = module(x)
        # what a packed layer is given where others are packed, too, whatever memory format the network came in
        usual = x.contiguous() if with_kernels and private.is_convolution(module) else x
        of_rounded = _of_rounded(module, x) if any(_rounds(each) for each in candidates) else expected
        errors: list[float | None] = []
        for each in candidates:
            freeze_like(module, each.to(x.device).eval())
            made = each(usual)
            if not _rounds(each, inputs=True):  # those see other inputs
                _check_same(name, made, of_rounded if _rounds(each) else expected)
            errors.append(_error(made, expected) if _rounds(each) else None)
        near = [(c, e) for c, e in zip(candidates, errors, strict=True) if e is None or e <= _TOO_WRONG]
        if not near:
            least = min(each for each in errors if each is not None)
            why = f"rounding would change its output by {percent(least)}"
            return dataclasses.replace(known, error=least, why=why), None
        was_training = module.training
        module.eval()
        as_it_was = functools.partial(_of_another, module.forward, x)  # in its own memory format
        dense: list[Callable[[Tensor], Any]] = [as_it_was, *_other_dense(module, matrix, bias, x)]
        product = _dense_int8(module, matrix, bias, x) if asked.values else None
        if product is not None:
            dense.append(product)
        try:
            times = _timed([*dense, *(candidate for candidate, _ in near)], usual)
        finally:
            module.train(was_training)
    best_dense, dense_int8 = min(times[: len(dense)]), times[len(dense) - 1] if product is not None else None
    packed, (replacement, error) = min(
        zip(times[len(dense) :], near, strict=True),
        # what rounds more has to be worth it
        key=lambda each: each[0] * (max(asked.at_least, 1.0) if _rounds(each[1][0], inputs=True) else 1.0),
    )
    found = dataclasses.replace(
        known, dense_ms=times[0], best_dense_ms=best_dense, packed_ms=packed, error=error, dense_int8_ms=dense_int8
    )
    if best_dense < asked.at_least * packed:
        told = "torch's dense int8 is" if best_dense == dense_int8 else "dense is"
        why = f"{told} {'faster' if best_dense <= packed else 'nearly as fast'}"
        return dataclasses.replace(found, why=why), None
    kind = type(replacement.linear if isinstance(replacement, Pointwise) else replacement).__name__
    int8 = ("values",) * _rounds(replacement) + ("inputs",) * _rounds(replacement, inputs=True)
    return dataclasses.replace(
        found, kind=kind, int8=int8, bytes=sum(tensor.nbytes for tensor in replacement.state_dict().values())
    ), replacement


def _why_not(model: nn.Module, module: nn.Module, zeros: float, x: Tensor | None) -> str:
    """Why a layer cannot be packed, or an empty string."""
    if zeros == 0:
        return "no zeros"
    if x is None:
        return "not called on the example; something else reads its weight, or nothing does"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized; remove the parametrization first"
    as_torch = type(module).forward is nn.Linear.forward or private.convolves_as_torch(module)
    if not is_conv1d(module) and not as_torch:
        return f"{type(module).__name__} computes in its own way"
    if any(not hasattr(hook, "_tensor_name") for hook in private.hooks_of(module)):
        return "it has hooks, which would be lost"
    if _is_shared(model, module):
        return "its weight is shared with another module"
    if cast("Tensor", module.weight).dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"its weight is {cast('Tensor', module.weight).dtype}"
    return ""


def _is_shared(model: nn.Module, module: nn.Module) -> bool:
    """Whether another module has a parameter of this one, too."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    holders = sum(id(p) in own for m in model.modules() for p in private.parameters_of(m).values() if p is not None)
    return holders > len(own)


def _is_pointwise(module: Any) -> bool:
    """Whether it is a linear layer at each place."""
    one_place = all(size == 1 for size in module.kernel_size) and not any(private.padding_of(module))
    return one_place and module.groups == 1 and not module.transposed


def _why_no_convolution(module: Any, zeros: float, dtype: torch.dtype) -> str:
    """Why a convolution has no form that skips its zeros, or an empty string."""
    if 1 - zeros > _WORTH_CONVOLVING:
        return f"{zeros:.0%} zeros; a convolution is faster from about 70 % on"
    if dtype == torch.float64:
        return f"its weight is {dtype}"
    return why_no_sparse_convolution(module)


def _forms_of_convolution(module: nn.Conv2d, inputs_too: bool) -> Iterator[Callable[..., SparseConv2d]]:
    """What makes the forms that skip a convolution's zeros; blocks of outputs where its zeros are made of these."""
    weight, shared = module.weight.detach(), BlockConv2d.OUTPUTS
    is_line, kept, products = weight.dim() == 3, int(weight.count_nonzero()), math.inf
    if not module.out_channels // module.groups % shared:
        products = shared * int(kept_places(weight, shared).sum())
    if products <= min(_WORTH_CONVOLVING * weight.numel(), _WORTH_SHARING * kept):
        yield (BlockConv1d if is_line else BlockConv2d).from_module
    unstructured = (SparseConv1d if is_line else SparseConv2d).from_module
    if products > kept * _SLACK:  # where the blocks are whole they were always faster, or as fast
        yield unstructured
    if inputs_too:
        yield functools.partial(unstructured, inputs="int8")


def _size_of_output(module: Any, x: Tensor) -> list[int]:
    """Height and width of what a convolution makes of x; of one dimension its length."""
    padding = private.padding_of(module)[::-1]  # after and before each dimension, from the first
    sizes = x.shape[-len(module.kernel_size) :]
    return [
        (size + padding[2 * d] + padding[2 * d + 1] - module.dilation[d] * (module.kernel_size[d] - 1) - 1)
        // module.stride[d]
        + 1
        for d, size in enumerate(sizes)
    ]


def _no_form(module: nn.Module, zeros: float, kernels_too: bool) -> str:
    if private.is_convolution(module) and not _is_pointwise(module):
        if why := _why_no_convolution(module, zeros, module.weight.dtype):
            return why
        return describe() if kernels_too else "only kernels of one place have a form in plain operations"
    if kernels_too and not available():
        return f"{zeros:.0%} zeros in no pattern that plain operations skip, and {describe()}"
    return f"{zeros:.0%} zeros in no pattern that can be skipped"


def _candidates(
    weight: Tensor, bias: Tensor | None, batch: int, with_kernels: bool, asked: _Asked
) -> Iterator[nn.Module]:
    """The forms that leave at least a fifth of the products out."""
    rows, columns = weight.shape
    alive = weight.ne(0)
    products = {outputs: _grouped_products(alive, outputs) for outputs in (*_GROUPS, rows) if 0 < outputs <= rows}
    fewest = min(products.values(), default=math.inf)
    if products and fewest <= _WORTH_TRYING * rows * columns:
        outputs = max(size for size, count in products.items() if count <= fewest * _SLACK)
        yield GroupedLinear.from_dense(weight, bias, outputs=outputs)
    if not with_kernels or not available() or weight.dtype == torch.float64:
        return
    scales = None
    if asked.values:
        weight, scales = to_int8(weight)
    if int(alive.sum()) <= _WORTH_TRYING * rows * columns and batch <= _FEW_VECTORS:
        yield WindowLinear.from_dense(weight, bias, scales=scales)
        if asked.inputs:
            yield WindowLinear.from_dense(weight, bias, scales=scales, round_inputs=True)
    if columns > MOST_COLUMNS:
        return
    blocks = functional.pad(alive, (0, 0, 0, -rows % LANES)).view(-1, LANES, columns).any(1)
    if int(blocks.sum()) * LANES <= _WORTH_TRYING * rows * columns:
        yield BlockLinear.from_dense(weight, bias, scales=scales)
        if asked.inputs:
            yield BlockLinear.from_dense(weight, bias, scales=scales, round_inputs=True)
    if int(alive.sum()) <= _WORTH_TRYING * rows * columns:
        yield SparseLinear.from_dense(weight, bias, batch=batch, scales=scales)
        if asked.inputs and batch > _FEW_VECTORS:
            yield SparseLinear.from_dense(weight, bias, batch=batch, scales=scales, round_inputs=True)


def _rounds(candidate: nn.Module, inputs: bool = False) -> bool:
    """Whether a form has rounded weights, or rounds its inputs, too."""
    form = candidate.linear if isinstance(candidate, Pointwise) else candidate
    return getattr(form, "rounds_inputs", False) if inputs else getattr(form, "scales", None) is not None


def _of_rounded(module: nn.Module, x: Tensor) -> Tensor:
    """What a layer makes of x with its weights rounded to int8."""
    layer: Any = module
    weight = layer.weight.detach()
    numbers, scales = to_int8(weight.t() if is_conv1d(module) else weight)
    rounded = scaled(numbers.float(), scales).to(weight.dtype)
    if not private.is_convolution(module):
        return functional.linear(x, rounded, layer.bias)
    convolve = getattr(functional, f"conv{weight.dim() - 2}d")
    padded = functional.pad(x, private.padding_of(layer))
    made: Tensor = convolve(padded, rounded, layer.bias, layer.stride, 0, layer.dilation, layer.groups)
    return made


def _error(made: Tensor, expected: Tensor) -> float:
    norm = float(expected.double().norm()) if expected.numel() else 0.0
    return float((made.double() - expected.double()).norm()) / norm if norm else 0.0


def _dense_int8(module: nn.Module, matrix: Tensor, bias: Tensor | None, x: Tensor) -> Callable[[Tensor], Any] | None:
    """The dense layer in int8 that torch has for linear layers on CPUs."""
    if private.is_convolution(module) or x.device.type != "cpu" or not x.numel():
        return None
    return private.int8_linear(matrix, bias)


def _grouped_products(alive: Tensor, outputs: int) -> int:
    rows, columns = alive.shape
    kept = functional.pad(alive, (0, 0, 0, -rows % outputs)).view(-1, outputs, columns).any(1).sum(1)
    return int(kept.max()) * kept.shape[0] * outputs


def _other_dense(
    module: nn.Module, matrix: Tensor, bias: Tensor | None, x: Tensor
) -> Iterator[Callable[[Tensor], Any]]:
    """The packed dense products that torch.compile uses when it freezes a model, and convolutions with the channels of
    a place side by side."""
    if x.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    if x.dtype != matrix.dtype or x.dtype not in (torch.float32, torch.bfloat16) or not x.numel():
        return
    if private.is_convolution(module):
        yield from _other_convolutions(module, x)
        return
    flat = x.reshape(-1, x.shape[-1])
    if (product := private.frozen_linear(matrix, bias, flat)) is not None:
        yield lambda x: product(x.reshape(-1, x.shape[-1]))


def _other_convolutions(module: Any, x: Tensor) -> Iterator[Callable[[Tensor], Any]]:
    """In each memory format but its own, and in each with the weight laid out beforehand."""
    if x.dim() != len(module.kernel_size) + 2:
        return
    for layout in (torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())):
        given, turned = x.contiguous(memory_format=layout), copy.deepcopy(module)
        turned.weight = nn.Parameter(module.weight.detach().clone(memory_format=layout), requires_grad=False)
        if (given.stride(), turned.weight.stride()) != (x.stride(), module.weight.stride()):
            yield functools.partial(_of_another, turned.forward, given)
        if (made := private.frozen_convolution(turned, given)) is not None:
            yield functools.partial(_of_another, made, given)


def _of_another(convolved: Callable[[Tensor], Any], given: Tensor, _: Tensor) -> Any:
    """Of the same numbers in their own memory format."""
    return convolved(given)


def _check_same(name: str, packed: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[expected.dtype]
    if not math.isfinite(scale):
        raise ValueError(f"{name}: its output on the example is not finite, so there is nothing to compare with.")
    if (
        packed.shape != expected.shape
        or float((packed - expected).abs().max() if packed.numel() else 0) > tolerance * scale
    ):
        raise ValueError(
            f"{name}: the packed layer's output is not that of the dense one; exclude it, and report this."
        )


def _timed(functions: list[Callable[[Tensor], Any]], x: Tensor) -> list[float]:
    """Milliseconds of each on x, the median of rounds in which they alternate."""
    calls = {number: functools.partial(function, x) for number, function in enumerate(functions)}
    longest = max(seconds for [seconds] in alternating(calls, 1, repeats=2).values())
    repeats = max(1, min(50, int(0.001 / max(longest, 1e-6))))
    times = alternating(calls, 9, repeats=repeats)
    return [1e3 * statistics.median(seconds) for seconds in times.values()]


def freeze_like(dense: nn.Module, packed: nn.Module) -> None:
    """A packed layer trains its weight and its bias where the dense one does, each by itself."""
    own = [*dense.named_parameters(recurse=False)]
    of_weight, of_bias = (
        any(each.requires_grad for name, each in own if name.startswith("bias") == is_bias) for is_bias in (False, True)
    )
    for name, parameter in packed.named_parameters():
        parameter.requires_grad_(of_bias if name.endswith("bias") else of_weight)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Where a module is, under each of its names."""
    old = model.get_submodule(name)
    for each in [other for other, found in model.named_modules(remove_duplicate=False) if found is old]:
        parent, _, key = each.rpartition(".")
        private.submodules_of(model.get_submodule(parent))[key] = module
