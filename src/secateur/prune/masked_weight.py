"""A pruned weight is ``mask * orig``, computed whenever it is read; what is masked is exactly 0.

Nothing is stored, so nothing can be stale: a parent that reads the weight without calling the module, a copy, a
pickle, a functional call all see the parameter and the mask of that moment. To that end the class of a pruned module
is a subclass of its own class, of the same name, that holds one property for each pruned tensor. Only within one
forward of torch's attention and recurrent networks, which read a weight again and again, do the reads share a product.
"""

from __future__ import annotations

import cmath
import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from secateur.support import local, private

if TYPE_CHECKING:
    from collections.abc import Mapping

# bound here: a look-up less at every read
_is_tracing, _is_wrapped = private.is_tracing, private.is_wrapped
_PARAMETERS, _BUFFERS = private.PARAMETERS, private.BUFFERS
_HALVES = (torch.float16, torch.bfloat16)
_LAYERS: weakref.WeakValueDictionary[tuple[type, frozenset[tuple[str, bool]]], type] = weakref.WeakValueDictionary()


def masked(orig: Tensor, mask: Tensor) -> Tensor:
    """``mask * orig`` in the dtype of ``orig``, exactly 0 where the mask is 0; gradients reach ``orig`` masked.

    A plain product would keep ``0 * inf`` and ``0 * nan``. The product is what autograd sees (so that sparse gradients
    pass), and the zeros are written afterwards. An `orig` sharded over ranks meets its part of a whole mask, and an
    `orig` gathered for a forward meets the gathered mask.

    >>> masked(torch.tensor([1.0, float("inf"), 3.0]), torch.tensor([1.0, 0.0, 0.5]))
    tensor([1.0000, 0.0000, 1.5000])
    """
    if getattr(orig, "device_mesh", None) is not getattr(mask, "device_mesh", None):
        mask = placed_like(mask, orig)
    if mask.dtype != orig.dtype:
        mask = mask.to(dtype=orig.dtype)
    product = mask * orig
    if not _is_known_to_be_finite(product):
        with torch.no_grad():
            local(product).masked_fill_(local(mask) == 0, 0)  # a DTensor of torch 2.7 can not
    return product


def _is_known_to_be_finite(product: Tensor) -> bool:
    """One sum tells, for it is finite only if every entry is: a fifth of the time of writing the zeros on a CPU.

    Where the values are not there to be asked (compiled, traced, batched by vmap) or asking would wait for another
    device, nothing is known.
    """
    if torch.compiler.is_compiling() or _is_tracing():
        return False
    if type(product) is not Tensor or not product.is_cpu or _is_wrapped(product):
        return False
    values = product.detach() if product.requires_grad else product  # a quarter of the time of no_grad()
    total = values.sum(dtype=torch.float32) if values.dtype in _HALVES else values.sum()
    return cmath.isfinite(total.item())


def placed_like(mask: Tensor, orig: Tensor) -> Tensor:
    """`mask` cut over ranks as `orig` is, or gathered if `orig` is whole.

    Cutting sends nothing, for each rank has the whole.
    """
    mesh = getattr(orig, "device_mesh", None)
    if mesh is getattr(mask, "device_mesh", None):
        return mask
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = mask.full_tensor() if isinstance(mask, DTensor) else mask
    return distribute_tensor(whole, mesh, orig.placements, src_data_rank=None) if isinstance(orig, DTensor) else whole


def is_computed_on_read(module: nn.Module, name: str) -> bool:
    """Whether reading ``module.<name>`` computes it from ``<name>_orig`` and ``<name>_mask``."""
    return name in getattr(type(module), "_secateur_reads", ())


def compute_on_read(module: nn.Module, name: str, *, by_hook: bool = False) -> None:
    """From here on ``module.<name>`` is ``masked(<name>_orig, <name>_mask)``, computed at every read.

    With `by_hook`, it is what ``apply_mask`` of the forward pre-hook for that name returns. Assigning a tensor to the
    name has no effect, and deleting it ends the arrangement, as `stop_computing_on_read` does.
    """
    module.__dict__.pop(name, None)
    cls = type(module)
    if getattr(cls, "_secateur_reads", {}).get(name) == by_hook:
        return
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop(private.FLAT_WEIGHTS, None)
    if _is_parametrized_class(module):
        # parametrize made this class for this module and expects to find its own base right below.
        cls.__bases__ = (_with_reads(cls.__bases__[0], {name: by_hook}),)
    else:
        module.__class__ = _with_reads(cls, {name: by_hook})


def stop_computing_on_read(module: nn.Module, name: str) -> None:
    """The module gets its former class back, unless other tensors of it are pruned.

    Where another library has put a class of its own on top (``fully_shard``), that class stays, and with it a property
    that finds nothing to compute: from then on the name is looked up as in any module.
    """
    cls = type(module)
    own: Mapping[str, bool] = cls.__dict__.get("_secateur_own", {})
    if name not in own:
        return
    left = {other: by_hook for other, by_hook in own.items() if other != name}
    base = cls.__bases__[0]
    module.__class__ = _with_reads(base, left) if left else base
    if isinstance(module, nn.RNNBase) and not getattr(type(module), "_secateur_reads", ()):
        module.__dict__[private.FLAT_WEIGHTS] = _flat_weights(module)


def _is_parametrized_class(module: nn.Module) -> bool:
    cls = type(module)
    return nn.utils.parametrize.is_parametrized(module) and cls.__name__.startswith("Parametrized")


def _with_reads(cls: type, reads: Mapping[str, bool]) -> type:
    """The subclass of `cls` that computes `reads`; where `cls` is one already, of its base, with both."""
    own: Mapping[str, bool] = cls.__dict__.get("_secateur_own", {})
    base = cls.__bases__[0] if own else cls
    reads = {**own, **reads}
    key = (base, frozenset(reads.items()))
    layer = _LAYERS.get(key)  # held: a class that no module has any more may be collected at any moment
    if layer is None:
        layer = _LAYERS[key] = _layer(base, reads)
    return layer


def _layer(base: type, reads: Mapping[str, bool]) -> type:
    shared = base in _READ_REPEATEDLY and not any(reads.values())
    space: dict[str, Any] = {name: _property(name, by_hook, shared) for name, by_hook in reads.items()}
    if shared:
        space["forward"] = _sharing_products(base.forward)  # type: ignore[attr-defined]
    space |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce(base, reads),
        "__prepare_scriptable__": _refuse_script,
        "__jit_unused_properties__": [*getattr(base, "__jit_unused_properties__", ()), *reads, "qconfig"],
        "_secateur_own": dict(reads),
        "_secateur_reads": {**getattr(base, "_secateur_reads", {}), **reads},
        "qconfig": property(_read_qconfig, _refuse_qconfig, _delete_qconfig),
    }
    if issubclass(base, nn.RNNBase):
        # An RNN computes with this list. As a stored list it would hold the products of the last call.
        space[private.FLAT_WEIGHTS] = property(_flat_weights, _keep_as_it_is)
        space[private.UPDATE_FLAT_WEIGHTS] = _nothing_to_update
        space["__jit_unused_properties__"].append(private.FLAT_WEIGHTS)
    return type(base)(base.__name__, (base,), space)


class _Forward(threading.local):
    """The forward that shares its products, if one runs in this thread: its module, and what was computed for it."""

    module: nn.Module | None = None
    products: dict[str, Any]


_forward = _Forward()
# Their forwards ask a weight for its dtype before they compute with it, and run nobody else's code in between.
_READ_REPEATEDLY = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)


def _sharing_products(base_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class of torch's, in which each product is computed once; none outlives the call.

    Under a class of somebody else's (a parametrization, ``fully_shard``), whose code may run in between, and while
    torch compiles, which finds equal products by itself, every read computes.
    """

    @functools.wraps(base_forward)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or "_secateur_own" not in type(module).__dict__:
            return base_forward(module, *args, **kwargs)
        outer = dict(_forward.__dict__)
        _forward.module, _forward.products = module, {}
        try:
            return base_forward(module, *args, **kwargs)
        finally:
            _forward.__dict__.clear()
            _forward.__dict__.update(outer)

    return forward


def _property(name: str, by_hook: bool, shared: bool = False) -> property:
    orig_name, mask_name = name + "_orig", name + "_mask"

    def read(module: nn.Module) -> Any:
        orig: Any
        mask: Any
        try:  # the tables themselves: nn.Module's lookup, which comes to the same, takes longer than a small product
            tables = module.__dict__
            orig, mask = tables[_PARAMETERS][orig_name], tables[_BUFFERS][mask_name]
        except KeyError:  # registered elsewhere, such as by a parametrization or in a replica
            orig, mask = getattr(module, orig_name), getattr(module, mask_name)
        return masked(orig, mask)

    def read_shared(module: nn.Module) -> Any:
        if torch.compiler.is_compiling() or _forward.module is not module:
            return read(module)
        products = _forward.products
        if name not in products:
            products[name] = read(module)
        return products[name]

    def read_by_hook(module: nn.Module) -> Any:
        for hook in private.pre_hooks_of(module).values():
            if getattr(hook, "_tensor_name", None) == name:
                return hook.apply_mask(module)
        return read(module)

    def delete(module: nn.Module) -> None:
        stop_computing_on_read(module, name)

    return property(read_by_hook if by_hook else read_shared if shared else read, _keep_as_it_is, delete)


def _keep_as_it_is(module: nn.Module, value: object) -> None:
    """Hooks, torch's among them, assign the product before every forward; the next read computes the same."""


def _flat_weights(module: nn.Module) -> list[Any]:
    return [getattr(module, name, None) for name in private.flat_names_of(module)]


def _nothing_to_update(module: nn.Module) -> None:
    """An RNN would compare its list with its weights before each forward: eight products more of every weight."""


def _reduce(base: type, reads: Mapping[str, bool]) -> Callable[[Any, Any], Any]:
    """Copies and pickles name the module's own class, and put this one on again."""

    def reduce_ex(module: nn.Module, protocol: Any) -> Any:
        reduced: Any = cast("Any", base).__reduce_ex__(module, protocol)
        if isinstance(reduced, str):
            return reduced
        make, arguments, *rest = reduced
        arguments = tuple(base if argument is type(module) else argument for argument in arguments)
        return (revive, (make, arguments, base, dict(reads)), *rest)

    return reduce_ex


def revive(make: Callable[..., nn.Module], arguments: tuple[Any, ...], base: type, reads: dict[str, bool]) -> nn.Module:
    """What copies and pickles of a pruned module call: the module, with the class that computes its weights on top.

    Pickles name it ``secateur.prune.revive``, which stays.
    """
    module = make(*arguments)
    if type(module) is base:
        module.__class__ = _with_reads(base, reads)
    return module


def _refuse_script(module: nn.Module) -> Any:
    raise RuntimeError(
        f"torch.jit.script cannot compile a pruned {type(module).__name__}: "
        f"call prune.remove on {', '.join(type(module)._secateur_reads)} first, or use torch.jit.trace."  # type: ignore[attr-defined]
    )


def _read_qconfig(module: nn.Module) -> Any:
    try:
        return module.__dict__["qconfig"]
    except KeyError:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute 'qconfig'") from None


def _refuse_qconfig(module: nn.Module, qconfig: object) -> None:  # noqa: ARG001
    # Quantization gives every module a qconfig, maps modules by their exact class, and copies their hooks: a pruned
    # module would be passed over without a word, or break in the forward.
    raise RuntimeError(
        f"A pruned {type(module).__name__} cannot be prepared for quantization: "
        f"call prune.remove on {', '.join(type(module)._secateur_reads)} first."  # type: ignore[attr-defined]
    )


def _delete_qconfig(module: nn.Module) -> None:
    del module.__dict__["qconfig"]
