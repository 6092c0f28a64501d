"""What torch sets for the whole process, for one thread alone; and a lock around what can be set for all only. How a
batch is run, what its loss is, and how a model is left as it was.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.support import private
from secateur.support.machine import devices_in_use
from secateur.support.text import printable

# ---- What torch sets for the whole process, for one thread alone; and a lock around what can be set for all only.
#
# Law: no thread sees what another one asked for, and afterwards everything is as before, in whatever order threads
# end.

# Random generators, and what is patched in a class, are the whole process's: who seeds or patches holds this.
ONE_AT_A_TIME = threading.RLock()

# torch's functions that make tensors of numbers, and take a dtype
_MAKERS = {"arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted"}
_MAKERS |= {"empty_strided", "eye", "fft_fftfreq", "fft_rfftfreq", "full", "hamming_window", "hann_window"}
_MAKERS |= {"kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randn", "range", "scalar_tensor"}
_MAKERS |= {"tensor", "zeros"}
_COMPLEX = {torch.float16: torch.complex32, torch.float64: torch.complex128}


class NewTensors(TorchFunctionMode):
    """A context with another default dtype for new tensors: ``set_default_dtype`` for one thread.

    That is what is made of numbers, and what is computed of integers alone. (``torch.Tensor(3)`` is none of torch's
    functions and stays as it is.)

    >>> with NewTensors(torch.float64):
    ...     torch.ones(2).dtype, torch.tensor([1, 2]).dtype, (torch.tensor([1, 2]) / 2).dtype
    (torch.float64, torch.int64, torch.float64)
    >>> torch.ones(2).dtype
    torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return in_dtype(self.dtype, func, args, kwargs or {})


def in_dtype(dtype: torch.dtype, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call of one of torch's functions: what would come out in the default dtype comes out in this one."""
    out = func(*args, **kwargs)
    default = torch.get_default_dtype()
    into = {default: dtype, _complex(default): _complex(dtype)}
    if dtype == default or not any(
        isinstance(each, Tensor) and each.dtype in into for each in private.tree_leaves(out)
    ):
        return out
    for each in private.tree_leaves((args, dict(kwargs))):
        if isinstance(each, torch.dtype) or (
            isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
        ):
            return out  # it is what was asked for, or what its arguments are
    if isinstance(out, Tensor) and getattr(func, "__name__", "") in _MAKERS:
        return func(*args, **{**kwargs, "dtype": into[out.dtype]})  # from the numbers, not rounded before
    return private.tree_map_only(Tensor, lambda each: each.to(into.get(each.dtype, each.dtype)), out)


def _complex(dtype: torch.dtype) -> torch.dtype:
    return _COMPLEX.get(dtype, torch.complex64)


# ---- Where a verb's model is: a module, which it changes in place, or a directory, of which it writes another one.
#
# Law: what belongs to the one is refused of the other, before anything is read or run.


Arguments = ParamSpec("Arguments")
OfModule = TypeVar("OfModule", covariant=True)
OfDirectory = TypeVar("OfDirectory", covariant=True)

TYPE_CHECKING = False  # as type checkers know, this name is True; jedi, which would show *args of a Verb, believes it
if TYPE_CHECKING:

    class Verb(Protocol[Arguments, OfModule, OfDirectory]):
        @overload
        def __call__(self, model: nn.Module, *args: Arguments.args, **kwargs: Arguments.kwargs) -> OfModule: ...
        @overload
        def __call__(self, model: Path | str, *args: Arguments.args, **kwargs: Arguments.kwargs) -> OfDirectory: ...


class Returns(Generic[OfModule, OfDirectory]):
    """A decorator that does nothing, and says to type checkers what a verb returns of a module, what of a directory.

    >>> @Returns[int, str]()
    ... def verb(model, amount=0.5): ...
    >>> import inspect
    >>> inspect.signature(verb)
    <Signature (model, amount=0.5)>
    """

    def __call__(
        self, verb: Callable[Concatenate[nn.Module | Path | str, Arguments], OfModule | OfDirectory]
    ) -> Verb[Arguments, OfModule, OfDirectory]:
        return verb  # type: ignore[return-value]


def directories(model: Path | str, out: Path | str | None) -> tuple[Path, Path]:
    """The directory that a verb is given, and the one that it writes; `ValueError` where that has no name.

    >>> directories("dense", None)
    Traceback (most recent call last):
    ValueError: dense is a directory, which is not changed; name the one to write with out=.
    """
    if out is None:
        raise ValueError(f"{model} is a directory, which is not changed; name the one to write with out=.")
    return Path(model), Path(out)


def for_directories(**given: Any) -> None:
    """`ValueError` for the first argument that is not None and means nothing of a module."""
    why = "a model in memory is run where it is and changed in place: save it yourself afterwards"
    refuse(f"is for directories; {why}.", **given)


def refuse(why: str, **given: Any) -> None:
    """`ValueError` for the first argument that is not None.

    >>> refuse("is for directories.", device=None, out="sparse")
    Traceback (most recent call last):
    ValueError: out= is for directories.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}= {why}")


def check_choose(word: object, *words: str) -> None:
    """`ValueError` where what chooses is none of these words, or none at all.

    >>> check_choose("luck", "gates", "swaps")
    Traceback (most recent call last):
    ValueError: choose must be "gates" or "swaps", or left out, not 'luck'.
    """
    if word is not None and word not in words:
        said = " or ".join(f'"{each}"' for each in words)
        raise ValueError(f"choose must be {said}, or left out, not {word!r}.")


# ---- How a batch is run, what its loss is, and how a model is left as it was.
#
# Law: after `unchanged`, modes, gradients, requires_grad, buffers and random states are what they were before, also
# when the body raised.

Forward = Callable[[nn.Module, Any], Any]
Loss = Callable[..., Tensor]


def run_batch(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """The model's outputs on a batch.

    A tensor is the input; of a tuple or list the first entry is the input and the others are targets, as in
    `torch.optim.swa_utils.update_bn`; a mapping, such as transformers' BatchEncoding, holds keyword arguments.
    ``forward(model, batch)`` replaces all that.

    Raises:
        TypeError: a batch of another kind, without ``forward``.

    >>> run_batch(nn.Identity(), (torch.ones(2), "targets"))
    tensor([1., 1.])
    """
    if forward is not None:
        return forward(model, batch)
    return model(**batch) if isinstance(batch, Mapping) else model(batch_inputs(batch))


def batch_inputs(batch: Any) -> Any:
    """What of a batch `run_batch` passes to the model.

    Raises:
        TypeError: a batch of another kind.

    >>> batch_inputs(("inputs", "targets"))
    'inputs'
    """
    if isinstance(batch, tuple | list) and len(batch):
        return batch[0]
    if isinstance(batch, Mapping | Tensor):
        return batch
    what = f"an empty {type(batch).__name__}" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    raise TypeError(
        f"a batch is a tensor, a tuple or list that begins with the input, or a mapping of keyword arguments, not "
        f"{what}; pass forward=(model, batch) -> outputs."
    )


def loss_of(outputs: Any, batch: Any, loss: Loss | None = None, number: int = 0) -> Tensor:
    """The loss of one batch, a scalar that gradients can be asked of.

    ``loss(outputs, *targets)`` where the batch is a tuple or list, ``loss(outputs)`` where it is a tensor,
    ``loss(outputs, batch)`` where it is anything else. Without ``loss``: ``outputs.loss``, ``outputs["loss"]``, or the
    outputs themselves if they are one number.

    Args:
        number: which batch it is, from 0; for messages.

    Raises:
        TypeError: there is no loss, or it is not one number.
        ValueError: it is NaN or infinite, or depends on no parameter.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> loss_of(weight * 3, torch.ones(2), loss=torch.sum).item()
    6.0
    """
    found: Any
    if loss is None:
        found = _own_loss(outputs)
        if found is None:
            raise TypeError(
                f"the model's outputs ({type(outputs).__name__}) hold no loss; pass loss=(outputs, *targets) -> "
                "scalar, such as torch.nn.functional.cross_entropy, or batches with labels."
            )
    elif isinstance(batch, Tensor):
        found = loss(outputs)
    elif isinstance(batch, tuple | list):
        found = loss(outputs, *batch[1:])
    else:
        found = loss(outputs, batch)
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise TypeError(f"the loss is {what}, not one number; return its mean over the batch.")
    if not bool(found.isfinite()):
        raise ValueError(f"the loss of batch {number} is {found.item()}; gradients of it would say nothing.")
    if not found.requires_grad:
        raise ValueError("the loss depends on no parameter; was the model run under no_grad, or the loss detached?")
    return found.reshape(())


def _own_loss(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def moved(batch: Any, device: torch.device | None) -> Any:
    """The batch with every tensor in it on ``device``, and `normal`; the batch itself where there is nothing to move.
    Of one without values it raises what `refuse_unseen` does.

    >>> moved({"x": torch.ones(1), "name": "one"}, torch.device("cpu"))
    {'x': tensor([1.]), 'name': 'one'}
    """
    refuse_unseen(batch, device)
    return mapped(batch, normal if device is None else lambda tensor: normal(tensor.to(device)))


def refuse_unseen(inputs: Any, device: torch.device | None) -> None:
    """Raises ValueError for inputs on the meta device of a model on another one: some operations take them there, and
    what they return has no values either.

    >>> refuse_unseen({"x": torch.ones(2, device="meta")}, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: an input on the meta device has no values (x of shape (2,), float32), and the model is on cpu: give it there.
    """  # noqa: E501
    if device is not None and device.type != "meta" and any(each.is_meta for each in tensors_in(inputs)):
        shapes = " and ".join(shapes_in_words(inputs))
        raise ValueError(
            f"an input on the meta device has no values ({shapes}), and the model is on {device}: give it there."
        )


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch of the same kind with the function's values in its tensors' places; itself where they are the same.

    >>> mapped((torch.ones(2), ["name", torch.ones(1)]), torch.neg)
    (tensor([-1., -1.]), ['name', tensor([-1.])])
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        entries = {key: mapped(value, function) for key, value in batch.items()}
        if all(entries[key] is value for key, value in batch.items()):
            return batch
        if not isinstance(batch, MutableMapping):
            return entries
        other = copy.copy(batch)  # a BatchEncoding stays one, and a ModelOutput, which has no update
        for key, value in entries.items():
            other[key] = value
        return other
    if isinstance(batch, tuple | list):
        parts = [mapped(part, function) for part in batch]
        if all(part is old for part, old in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def normal(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one of `torch.inference_mode`, outside of which autograd refuses it.

    >>> with torch.inference_mode():
    ...     made = torch.ones(2)
    >>> normal(made).is_inference(), made.is_inference()
    (False, True)
    """
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def share_of(batch: Any, share: float) -> Any:
    """The first examples of a batch, so much of it, where all tensors in it have as many; else the batch, such as one
    whose input is a list of pictures.

    >>> share_of((torch.arange(4), torch.ones(4, 2)), 0.5)[0]
    tensor([0, 1])
    >>> share_of(([torch.ones(3, 8, 8)], [{}]), 0.5)[0][0].shape
    torch.Size([3, 8, 8])
    """
    is_sequence = isinstance(batch, tuple | list) and bool(batch)
    if not isinstance(batch, Tensor | Mapping | tuple | list) or (is_sequence and isinstance(batch[0], tuple | list)):
        return batch
    sizes = {each.shape[0] if each.dim() else 0 for each in tensors_in(batch)}
    if len(sizes) != 1 or min(sizes) < 2:
        return batch
    count = max(1, math.ceil(share * min(sizes)))
    return batch if count >= min(sizes) else mapped(batch, lambda tensor: tensor[:count])


def device_of(model: nn.Module) -> torch.device | None:
    """The device for batches: that of the first parameter, else of the first buffer; None without any, or on meta."""
    for tensor in (*model.parameters(), *model.buffers()):
        return None if tensor.device.type == "meta" else tensor.device
    return None


def check_batches(batches: Iterable[Any]) -> None:
    """Raises TypeError for one batch: going through a tensor or a dict gives its rows or its keys, and no batches."""
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(f"batches is an iterable of batches, not a {type(batches).__name__}; pass [batch].")


def is_empty(batch: Any) -> bool:
    """Whether a batch has tensors but no entry in them that has a value, or an ``attention_mask`` that calls all tokens
    padding.

    >>> is_empty((torch.zeros(0, 8), torch.zeros(0))), is_empty(torch.zeros(1, 8)), is_empty("a text")
    (True, False, False)
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_meta and not mask.any():
        return True
    found = list(tensors_in(batch))
    return bool(found) and not any(each.numel() for each in found)


def check_data(batches: Sequence[Any], why: str) -> None:
    """Raises ValueError where there are no batches, none of them holds a sample, or one is on the meta device.

    >>> check_data([torch.zeros(0, 8)], "since levels are measured by running the model")
    Traceback (most recent call last):
      ...
    ValueError: the batches hold no token and no sample, or all is padding: pass at least one that does, since levels are measured by running the model.
    """  # noqa: E501
    if not len(batches):
        raise ValueError(f"there are no batches: pass at least one, {why}.")
    if any(each.is_meta for batch in batches for each in tensors_in(batch)):
        raise ValueError(f"a batch is on the meta device, where it has no values: pass those that do, {why}.")
    if all(map(is_empty, batches)):
        raise ValueError(
            f"the batches hold no token and no sample, or all is padding: pass at least one that does, {why}."
        )


def repeatable(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, in a list if they can be gone through only once.

    Raises:
        TypeError: it is a batch, and not several; see `check_batches`.

    >>> repeatable(iter([1, 2]))
    [1, 2]
    """
    check_batches(batches)
    return list(batches) if iter(batches) is batches else batches


def usable(device: torch.device | str | None) -> torch.device:
    """The device, if tensors can be made there; None: the processor.

    Raises:
        ValueError: they can't, and why.

    >>> usable(None), usable("cpu")
    (device(type='cpu'), device(type='cpu'))
    """
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"device {str(device)!r} can't be used here: {why}.") from None
    return found


def unwrapped(model: nn.Module, *, resized: bool = False) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile's OptimizedModule, if it is in any.

    Raises:
        ValueError: its parameters are to be ``resized``, and DistributedDataParallel would go on with those they were.
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is a torch.nn.Module, and this is of type {type(model).__name__}.")
    while True:
        if resized and isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "DistributedDataParallel sends gradients of the shapes that it was made with: pass model.module, on "
                "every rank with the same data, and wrap what comes of it."
            )
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inside := private.inside_compiled(model)) is not None:
            model = inside
        else:
            return model


@contextlib.contextmanager
def running_as(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A context in which a call of these modules is one of these functions.

    >>> layer = nn.ReLU()
    >>> with running_as({layer: lambda x: -x}):
    ...     layer(torch.ones(1))
    tensor([-1.])
    >>> layer(torch.ones(1))
    tensor([1.])
    """
    before: dict[nn.Module, Any] = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A context that undoes the effects of running a model, forward and backward: modes, buffers, gradients.

    That is: ``training`` of every submodule, ``.grad`` (None inside) and ``requires_grad`` of every parameter, the
    buffers' objects and contents, tensors in plain attributes with what stands beside them, and the random states of
    torch (CPU and the model's devices), numpy and Python. Hooks that step an optimizer as gradients arrive are silent
    inside, and compiled modules run uncompiled. The weights themselves are not copied. Costs a copy of the buffers, but
    for pruning masks.

    >>> model = nn.BatchNorm1d(2)
    >>> with unchanged(model):
    ...     _ = model(torch.randn(8, 2))
    >>> model.running_mean
    tensor([0., 0.])
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    parameters = list(model.parameters())
    flags = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    arrivals: list[Any] = [private.arrival_hooks_of(parameter) for parameter in parameters]
    left = _kept(modules)
    contents = {id(buffer): (buffer, buffer.detach().clone()) for module in modules for buffer in _changing(module)}
    devices = {tensor.device for tensor in (*parameters, *model.buffers())}
    with _same_random_states(devices), _uncompiled():
        try:
            for parameter in parameters:
                parameter.grad = None
                if private.arrival_hooks_of(parameter) is not None:
                    private.set_arrival_hooks(parameter, OrderedDict())
            yield
        finally:
            left()
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            with torch.no_grad():
                for buffer, content in contents.values():
                    if not torch.equal(buffer, content):
                        buffer.copy_(content)
            for parameter, (requires_grad, grad), hooks in zip(parameters, flags, arrivals, strict=True):
                if parameter.requires_grad != requires_grad:
                    with torch.inference_mode(parameter.is_inference()):  # elsewhere it cannot be set
                        parameter.requires_grad_(requires_grad)
                parameter.grad = grad
                if private.arrival_hooks_of(parameter) is not hooks:
                    private.set_arrival_hooks(parameter, hooks)
            reshard(model)


def _kept(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """What puts back buffers that a run has replaced, and the plain attributes of modules in which it has replaced a
    tensor: the weight of the last forward pass that hooks of pruning leave there, or anchors, and beside them the shape
    that they are of."""
    modules = [*modules]
    before = [(vars(module), dict(vars(module))) for module in modules]
    tables = [(private.buffers_of(module), dict(private.buffers_of(module))) for module in modules]

    def put_back() -> None:
        for now, then in before:
            if any(isinstance(own, Tensor) and now.get(key) is not own for key, own in then.items()):
                for key in now.keys() - then.keys():
                    del now[key]
                now.update(then)
        for now, then in tables:
            if any(now.get(key) is not buffer for key, buffer in then.items()):
                now.update(then)

    return put_back


def reshard(model: nn.Module) -> None:
    """``fully_shard`` leaves the outermost module gathered until a backward pass, which may not follow; whoever changed
    the shards now would find the gathered weights unchanged in the next forward pass."""
    for module in model.modules():
        if _gathers(module):
            shards: Any = module
            shards.reshard()


def refuse_sharded(model: nn.Module, verb: str) -> None:
    """Raises ValueError for a model of which each process has a part, where a verb looks at whole weights.

    >>> refuse_sharded(nn.Linear(1, 1), "pack")
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):  # a DTensor
            raise ValueError(
                f"{name} is sharded over processes, and {verb} looks at whole weights: call it before fully_shard, or "
                "save the model (get_model_state_dict with full_state_dict=True) and load it without, or name its "
                "directory."
            )


def refuse_unloaded(model: nn.Module, names: Container[str] | None = None) -> None:
    """Raises ValueError for a parameter without values, of those that are named or of all.

    >>> refuse_unloaded(nn.Linear(1, 1, device="meta"))
    Traceback (most recent call last):
    ValueError: weight is on the meta device and has no values; load the weights first.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta and (names is None or name in names):
            said = ", without a device_map that offloads them" if private.offloads(model) else " first"
            raise ValueError(f"{name} is on the meta device and has no values; load the weights{said}.")


def refuse_inference(model: nn.Module) -> None:
    """Raises ValueError for a model through which no gradient flows, since it was made in inference mode.

    >>> with torch.inference_mode():
    ...     refuse_inference(nn.Linear(1, 1))
    Traceback (most recent call last):
    ValueError: Linear was made in torch.inference_mode, where nothing learns; make or load it outside.
    """
    if any(each.is_inference() for each in model.parameters()):
        kind = type(model).__name__
        raise ValueError(f"{kind} was made in torch.inference_mode, where nothing learns; make or load it outside.")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2's ``fully_shard`` gathers the weights of a module of it, and shares out their gradients.

    >>> is_fully_sharded(nn.Linear(1, 1))
    False
    """
    return any(map(_gathers, model.modules()))


def times_the_mean(parameter: Tensor) -> int:
    """What ``fully_shard`` makes of the gradients of all processes, in their means: 1; but gloo sums where it is asked
    for a mean, in torch before https://github.com/pytorch/pytorch/issues/162338 was mended. All processes ask.

    >>> times_the_mean(torch.ones(2))
    1
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None or parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return 1
    from torch import distributed

    group, made = mesh.get_group(mesh.ndim - 1), torch.empty(1, dtype=torch.float32, device="cpu")
    ones = torch.ones(distributed.get_world_size(group), dtype=torch.float32, device="cpu")
    distributed.reduce_scatter_tensor(made, ones, op=distributed.ReduceOp.AVG, group=group)
    return int(made)


def _gathers(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _changing(module: nn.Module) -> Iterator[Tensor]:
    """The buffers that a forward pass may change: all but the masks of pruned tensors."""
    for key, buffer in private.buffers_of(module).items():
        is_mask = key.endswith("_mask") and f"{key.removesuffix('_mask')}_orig" in private.parameters_of(module)
        if buffer is not None and buffer.device.type != "meta" and not is_mask:
            yield buffer


@contextlib.contextmanager
def _same_random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    at_torch, at_python = torch.get_rng_state(), random.getstate()
    at_numpy = np.random.get_state()  # noqa: NPY002 - data sets draw from it
    at_devices: list[tuple[Any, Any, tuple[Any, ...]]] = []
    for device in devices:
        if device.type not in ("cpu", "meta"):
            backend: Any = torch.get_device_module(device)
            place = () if device.type == "mps" else (device,)
            at_devices.append((backend, backend.get_rng_state(*place), place))
    try:
        yield
    finally:
        torch.set_rng_state(at_torch)
        random.setstate(at_python)
        np.random.set_state(at_numpy)  # noqa: NPY002
        for backend, state, place in at_devices:
            backend.set_rng_state(state, *place)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Hooks on the submodules of a compiled module do not run, or compile it again; nothing is compiled yet where
    the compiler was never imported. In one thread at a time: the stance is the process's."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with ONE_AT_A_TIME, torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context, or a decorator of a verb, in which a caller's autocast does not count: sums and solvers need the width
    of the weights. Afterwards that autocast has no narrow copies of what the weights were before. An error of dtypes
    has a note that says so, since the model may need an autocast to run.

    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    accelerator = torch.accelerator.current_accelerator()
    kinds = [kind for kind in ("cpu", accelerator and accelerator.type) if kind and torch.is_autocast_enabled(kind)]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        except Exception as error:
            if kinds and "dtype" in str(error):
                error.add_note(_UNCOUNTED)
            raise
        finally:
            torch.clear_autocast_cache()


_UNCOUNTED = "A torch.autocast around the call does not count: a model that needs one enters it in its forward."


def run_example(model: nn.Module, example_inputs: Any) -> Any:
    """What the model returns for example inputs, what it is called with, as in `torch.export`: a tuple or list
    holds positional arguments, a mapping keyword arguments, and anything else is the only argument.

    >>> run_example(torch.add, (torch.ones(2), torch.ones(2)))
    tensor([2., 2.])
    """
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    return model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)


@contextlib.contextmanager
def naming_example(model: nn.Module, example_inputs: Any) -> Iterator[None]:
    """A context in which a model is run on an example. Where that fails, and the model alone in evaluation mode, too,
    the error is a ValueError that says so. What this library refuses passes: of a lazy model no example is run."""
    refuse_unseen(example_inputs, device_of(model))
    try:
        yield
    except Exception as error:
        if is_our_own(error):
            raise
        try:
            with in_mode(model, training=False), restored(model), seeded(), torch.no_grad():
                run_example(model, example_inputs)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise error from None
        except Exception as alone:
            shapes = " and ".join(shapes_in_words(example_inputs)) or f"a {type(example_inputs).__name__}"
            said = printable(" ".join(str(alone).split()), 400)
            empty = any(not each.numel() for each in tensors_in(example_inputs))
            what = "that it takes: a tensor, a tuple of positional arguments or a dict of keyword arguments"
            raise ValueError(
                f"the model does not run on the example ({shapes}) ({type(alone).__name__}: {said}); give one "
                f"{'of at least one sample' if empty else what}."
            ) from error
        raise


def is_our_own(error: Exception) -> bool:
    """Whether a call of this library found it, and not the model's code or torch's, of which no frame may be seen."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    frame = None if trace is None else trace.tb_frame
    own = frame is not None and str(frame.f_globals.get("__name__")).startswith("secateur.")
    # where torch's operations are called
    watched = frame is not None and frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
    return isinstance(error, ValueError | TypeError) and own and not watched


def shapes_in_words(value: Any, name: str = "") -> Iterator[str]:
    """What the tensors of a batch are like, in words.

    >>> [*shapes_in_words({"x": torch.ones(2, 3), "y": (torch.ones(2).long(),)})]
    ['x of shape (2, 3), float32', 'y of shape (2,), int64']
    """
    if isinstance(value, Tensor):
        words = f"shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
        yield f"{name} of {words}" if name else words
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from shapes_in_words(each, printable(str(key)))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from shapes_in_words(each, name)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields all tensors in nested containers and objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, str | bytes | int | float | bool | type(None)) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, tuple | list | set | frozenset):
            parts = value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            parts = vars(value).values()
        else:
            return
        for part in parts:
            yield from tensors_in(part, seen)


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A context in which all modules are in training or evaluation mode; each mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A context that restores buffers, and numbers and flags of modules: they often say how much a buffer holds.
    Tensors in plain attributes are restored with what stands beside them. Compiled modules run uncompiled inside.
    """
    left = _kept(model.modules())
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    plain = [(module, name, value) for module in model.modules() for name, value in vars(module).items()]
    plain = [each for each in plain if type(each[2]) in (bool, int, float)]
    try:
        with _uncompiled():
            yield
    finally:
        left()
        for buffer, value in saved:
            if buffer.shape == value.shape and not value.is_meta:
                buffer.data.copy_(value)
        for module, name, value in plain:
            now = vars(module).get(name)
            if isinstance(now, int | float) and now != value:  # also one that remembers where it is from
                setattr(module, name, value)


def seed_torch(number: int) -> None:
    """`torch.manual_seed`; where no device but the CPU is in use, without writing down the stack for one to come, which
    takes longer than a pass of a small model."""
    if devices_in_use()[1]:
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def restoring_generators() -> contextlib.AbstractContextManager[None]:
    """A context after which torch's random generators are as they were before, those of devices in use, too.

    >>> with restoring_generators():
    ...     first = torch.rand(1)
    >>> bool(torch.rand(1) == first)
    True
    """
    kind, devices = devices_in_use()
    return torch.random.fork_rng(devices, device_type=kind)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """A context with fixed random seeds, so that each pass takes the same way; generators are restored.

    In one thread at a time: the generators are the process's.
    """
    with ONE_AT_A_TIME, restoring_generators():
        before = random.getstate(), np.random.get_state()  # noqa: NPY002  what a model may use
        try:
            seed_torch(20_000)
            random.seed(20_000)
            np.random.seed(20_000)  # noqa: NPY002
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
