"""Tensors: read on access, sharded over ranks (DTensor), by which modules they are held, and rounded to 8 bits."""

from __future__ import annotations

import gc
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.support import private

if TYPE_CHECKING:
    from collections.abc import Iterator


# ---- Tensors by name that are read or made on every access, and held by nobody.
#
# Law: asked for its names, how many they are, or whether it is equal, such a mapping reads no tensor.


class LazyTensors(Mapping[str, Tensor]):
    """``{name: tensor}``: a class made from it says which names there are, and how one's tensor is read.

    `Mapping`'s own ``in`` would read a tensor, and its ``==`` all of them: here one is equal to itself.

    >>> import torch
    >>> class Zeros(LazyTensors):
    ...     known = ("a", "b")
    ...     def __getitem__(self, name):
    ...         return torch.zeros(1)
    >>> zeros = Zeros()
    >>> list(zeros), "b" in zeros, zeros == Zeros()
    (['a', 'b'], True, False)
    """

    @property
    @abstractmethod
    def known(self) -> Collection[str]:
        """The names, in order; a mapping or a set answers ``in`` at once."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


# ---- Sharded tensors (DTensor): what each rank holds, what all hold together.
#
# Law: plain tensors go through every function here unchanged, and torch.distributed is imported for DTensors only.


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor.

    >>> import torch
    >>> is_sharded(torch.zeros(1))
    False
    """
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    sharded: Any = tensor
    part: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of all ranks' parts, on each rank."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that is whole and the same on all ranks, on the device of another and sharded as that is."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor.to(like.device)
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = like
    mesh = sharded.device_mesh
    everywhere = DTensor.from_local(tensor.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = everywhere.redistribute(placements=sharded.placements)
    return part


def memory_format(tensor: Tensor) -> torch.memory_format:
    """``channels_last`` or ``channels_last_3d`` where a tensor lies so and not as its shape says; else the usual one.

    >>> import torch
    >>> memory_format(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)), memory_format(torch.ones(2, 3))
    (torch.channels_last, torch.contiguous_format)
    """
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    turned = form and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=form)
    return form if form and turned else torch.contiguous_format


def sharded_as(part: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor, as one that is sharded as another is; nothing is sent."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def count_nonzero(tensor: Tensor) -> int:
    """The number of nonzero entries of a tensor, over all ranks.

    >>> import torch
    >>> count_nonzero(torch.tensor([0.0, 2.0]))
    1
    """
    return int(whole(tensor.ne(0).sum()))


# ---- Which modules hold a parameter: the other ends of tied weights, the wrappers that replicate or shard it.
#
# A module does not know who else holds its parameter, so the interpreter is asked. A parameter that nothing but its
# module refers to, the usual case, costs one look at its reference count.


class _Index:
    """All live modules of the process."""

    def __init__(self) -> None:
        self.modules: dict[int, weakref.ref[nn.Module]] = {}
        self.moment: object = None

    def refresh(self) -> None:
        """Adds the modules made since the last time.

        Looking through all objects takes some 50 ms. Unless the collector has passed its second or third generation
        since, whatever is new is in the first two, and there are few in them.
        """
        moment = _collections()
        young = gc.get_objects(0) + gc.get_objects(1)
        # Python 3.14 has no generations of that kind. A collection in between may have moved what is new.
        complete = sys.version_info < (3, 14) and self.moment == moment == _collections()
        if not complete:
            self.modules.clear()
        kinds = _subclasses(nn.Module)
        for found in young if complete else gc.get_objects():
            if type(found) in kinds:
                self.modules[id(found)] = weakref.ref(found)
        self.moment = moment

    def __iter__(self) -> Iterator[nn.Module]:
        for reference in list(self.modules.values()):
            module = reference()
            if module is not None:
                yield module


_index = _Index()


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()[1:]]


def _subclasses(cls: type) -> set[type]:
    """`cls` and all below it: looking a type up in a set costs a third of ``issubclass``, on some 10^5 objects."""
    found, left = set(), [cls]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left.extend(type.__subclasses__(each))
    return found


def _registered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's dictionary of parameters; modules that have none (scripted, half built) hold nothing."""
    parameters = vars(module).get(private.PARAMETERS)
    return parameters if isinstance(parameters, dict) else {}


def _modules_that_may_hold(module: nn.Module, key: str) -> Iterator[nn.Module]:
    """Nothing, where the module's own dictionary is all that refers to the parameter; else every live module."""
    if key not in private.parameters_of(module):
        return
    # The dictionary and the argument make 2. Nothing here may hold the parameter in a variable before this line.
    references = sys.getrefcount(private.parameters_of(module)[key])
    wanted = private.parameters_of(module)[key]
    listed = sum(each is wanted for each in private.flat_weights_of(module))  # of an RNN
    if references <= 2 + listed:
        return
    _index.refresh()
    yield from _index


def other_owners(module: nn.Module, key: str) -> list[tuple[nn.Module, str]]:
    """``(module, key)`` of every other place where the Parameter object ``module._parameters[key]`` is registered.

    >>> encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> decoder.weight = encoder.weight
    >>> other_owners(encoder, "weight") == [(decoder, "weight")]
    True
    """
    owners: list[tuple[nn.Module, str]] = []
    own = private.parameters_of(module)
    for other in _modules_that_may_hold(module, key):
        wanted, registered = own[key], _registered(other)
        if other is not module and registered is own:
            continue  # a shallow copy: what happens to the one happens to the other
        for other_key, parameter in registered.items():
            if parameter is wanted and parameter is not None and (other is not module or other_key != key):
                owners.append((other, other_key))
    return owners


def replicating_group(module: nn.Module, key: str) -> Any:
    """The process group over which DistributedDataParallel keeps copies of ``module._parameters[key]``, or None."""
    if not _has_ranks():
        return None
    for other in _modules_that_may_hold(module, key):
        if isinstance(other, nn.parallel.DistributedDataParallel):
            wanted = private.parameters_of(module)[key]
            if any(parameter is wanted for parameter in other.module.parameters()):
                return other.process_group
    return None


def sharded_parameter(module: nn.Module, key: str) -> Any:
    """The record that ``fully_shard`` keeps of ``module._parameters[key]``, gathered parameters put away; or None.

    It names the place (`private.gathered_as`) where the parameter is swapped for the gathered one around each forward,
    which therefore has to follow when the parameter is registered under another name.
    """
    if not _has_ranks():
        return None
    for state in private.composed_states():
        for group in private.shard_groups_of(state):
            for record in group.fsdp_params:
                info = private.gathered_as(record)
                places = [
                    (info.module, info.param_name),
                    *zip(info.shared_modules, info.shared_param_names, strict=True),
                ]
                if any(owner is module and name == key for owner, name in places):
                    if not group.is_sharded:
                        group.reshard()
                    return record
    return None


def _has_ranks() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


# ---- Weights as whole numbers of 8 bits times a scale for each output.
#
# Law: 0 stays 0; a weight that lies on such a grid already is found again, number for number, and nothing is rounded
# twice.

MOST_IN_INT8 = 127  # numbers are -127 ... 127, as many below zero as above
_SPARE = 0xFF  # bits of a float32 that a scale leaves empty: times a number of 7 bits it is exact


def is_narrow(tensor: Tensor) -> bool:
    """Whether it holds numbers in half precision or less."""
    return tensor.is_floating_point() and tensor.element_size() < 4 and not tensor.is_meta


def widened(tensor: Tensor) -> Tensor:
    """Half precision as float32; any other tensor itself.

    >>> widened(torch.ones(1, dtype=torch.bfloat16)).dtype, widened(torch.ones(1, dtype=torch.int8)).dtype
    (torch.float32, torch.int8)
    """
    return tensor.float() if is_narrow(tensor) else tensor


def to_int8(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A weight as ``numbers * scales[:, None]``, each the nearest; what is 0 stays 0.

    Args:
        weight: (outputs, ...), any real floating dtype.
        scales: float32 (outputs); by default those of `rounding_scales`.

    Returns:
        int8 in the weight's shape, within ±127, and the scales.

    Raises:
        ValueError: an entry is NaN or infinite.

    >>> numbers, scales = to_int8(torch.tensor([[1.27, 0.0, -0.5], [0.0, 0.0, 0.0]]))
    >>> numbers, scales
    (tensor([[127,   0, -50],
            [  0,   0,   0]], dtype=torch.int8), tensor([0.0100, 1.0000]))
    """
    weight = weight.detach().float()
    scales = rounding_scales(weight) if scales is None else scales
    each = scales.view(-1, *[1] * (weight.dim() - 1))
    return (weight / each).round_().clamp_(-MOST_IN_INT8, MOST_IN_INT8).to(torch.int8), scales


def rounding_scales(weight: Tensor) -> Tensor:
    """The scale of each output (outputs, ...): that of the grid on which its float32 weights lie, else the least with
    which the largest is within ±127; 1 where all are 0.

    Scales have 16 significant bits, so that a number times its scale is no further rounded, and the grid of a weight
    that was rounded can be seen from the weight alone.

    Raises:
        ValueError: an entry is NaN or infinite.

    >>> weight = torch.tensor([[0.25, -1.5, 0.75]])
    >>> rounding_scales(rounding_scales(weight)[:, None] * torch.tensor([[21, -127, 64]])) == rounding_scales(weight)
    tensor([True])
    """
    rows = weight.detach().float().flatten(1) if weight.dim() > 1 else weight.detach().float()[:, None]
    if not rows.numel():
        return torch.ones(len(rows), device=rows.device, dtype=torch.float32)
    largest = rows.abs().amax(1)
    if not bool(largest.isfinite().all()):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} holds NaN or infinity, which has no place in int8.")
    least = torch.finfo(torch.float32).tiny * (_SPARE + 1)  # below it bits are missing
    upwards = (largest / MOST_IN_INT8).clamp_min(least).view(torch.int32) + _SPARE
    scales = torch.where(largest > 0, (upwards & ~_SPARE).view(torch.float32), 1.0)
    unknown = largest > least * MOST_IN_INT8
    for number in range(MOST_IN_INT8, 0, -1):
        scale = largest / number
        maybe = (unknown & ((scale.view(torch.int32) & _SPARE) == 0)).nonzero()[:, 0]
        if not len(maybe):
            continue
        near = rows[maybe, :64] / scale[maybe, None]
        maybe = maybe[near.eq(near.round()).all(1)]
        numbers = (rows[maybe] / scale[maybe, None]).round_()
        found = maybe[(numbers * scale[maybe, None] == rows[maybe]).all(1)]
        scales[found] = scale[found]
        unknown[found] = False
    return scales
