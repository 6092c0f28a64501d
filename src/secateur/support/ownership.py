"""Which modules hold a parameter: the other ends of tied weights, the wrappers that replicate or shard it.

A module does not know who else holds its parameter, so the interpreter is asked. A parameter that nothing but its
module refers to, the usual case, costs one look at its reference count.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from secateur.support import private

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["other_owners", "replicating_group", "sharded_parameter"]


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
