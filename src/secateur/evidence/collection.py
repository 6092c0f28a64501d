"""What a criterion needs beside the weight: asked for by naming it, as a pytest fixture is asked for.

Law: a criterion receives exactly the evidence that it names, an unknown name is an error before anything runs, and
gathering it leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from secateur.evidence.statistics import STATISTICS, Layer, Sums, layer_of, mirrored, narrowed
from secateur.support import (
    Forward,
    Loss,
    device_of,
    is_sharded,
    loss_of,
    mapped,
    moved,
    repeatable,
    replicating_group,
    run_batch,
    track,
    unchanged,
    unwrapped,
    whole,
)
from secateur.targets import find_targets
from secateur.targets import identity_of as identity_of_parameter

__all__ = ["VOCABULARY", "collect", "needs"]

Evidence = dict[str, dict[str, Tensor]]

VOCABULARY = {
    "grad": "the loss's gradient, the mean over batches, of the weight's shape",
    "grad_sq": "the gradient's square, the mean over batches, of the weight's shape; batches of one example give the "
    "diagonal of the empirical Fisher matrix",
    "hessian_grad": "Hg, the Hessian of the mean loss times its gradient g, of the weight's shape",
    "flow": "the gradient of the summed outputs with respect to |w| in the network of absolute values, at an input of "
    "ones, in float64, of the weight's shape",
    "movement": "the sum over training steps of -w * gradient, of the weight's shape; gathered by a Pruner",
    "input_norm": "the L2 norm of each input feature over all tokens, broadcastable to the weight",
    "input_mean": "the mean of each input feature over all tokens, broadcastable to the weight",
    "input_var": "the variance of each input feature over all tokens (divided by their number), broadcastable to the "
    "weight",
    "output_norm": "the L2 norm of each output feature over all tokens, broadcastable to the weight",
    "gram": "X'X of the inputs X over all tokens, (inputs, inputs); of a convolution an input is one entry of a patch",
}


def needs(criterion: Callable[..., Any]) -> tuple[str, ...]:
    """The evidence that a criterion names: its keyword parameters without a default.

    Raises:
        TypeError: a name is not in the vocabulary; the message lists it.

    >>> def wanda(weight, *, input_norm):
    ...     return weight.abs() * input_norm
    >>> needs(wanda)
    ('input_norm',)
    """
    try:
        parameters = inspect.signature(criterion).parameters.values()
    except ValueError:  # built-in functions such as torch.abs show no signature
        return ()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return _known(named, _name(criterion))


def _known(words: Iterable[str], who: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(words))
    unknown = [word for word in words if word not in VOCABULARY]
    if unknown:
        listed = "; ".join(f"{name}: {meaning}" for name, meaning in VOCABULARY.items())
        raise TypeError(f"{who} asks for evidence that nobody collects: {', '.join(unknown)}. There is {listed}.")
    return words


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    asked: Callable[..., Any] | Iterable[str],
    *,
    weights: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    forward: Forward | None = None,
    train: bool = False,
) -> Evidence:
    """``{name: {word: tensor}}``: what a criterion names, gathered by running the model; what `make_masks` takes.

    One pass over the batches, two for ``hessian_grad``, none but the first batch's shapes for ``flow``. The loss is
    differentiated only where gradients are asked for. The model is as it was afterwards, also after an exception:
    modes, gradients, buffers, random states; the weights never change. Under an autocast of the caller's, gradients
    and sums are in float32 or wider all the same.

    Memory: for each word one tensor of float32 (or the weight's dtype, if wider) for each weight asked for, the Gram
    matrix or some vectors; ``grad_sq`` holds a batch's gradients beside. Gradients of other weights are dropped as
    they arrive. ``flow`` and ``hessian_grad`` are dearer: a float64 copy of the model, and a graph for a second
    derivative.

    Args:
        model: any module. Of one in DistributedDataParallel (or the module inside it) or ``fully_shard``, each rank
            passes its own batches, and all ranks get the evidence over all of them.
        batches: tensors, tuples that begin with the input, or mappings of keyword arguments; see `secateur.support`.
            Moved to the model's device. An ``attention_mask`` (batch, sequence) in a mapping leaves padding out of
            the statistics of inputs and outputs.
        asked: a criterion, or some words of `VOCABULARY`.
        weights: ``{name: parameter}`` of the model; by default its `find_targets`.
        loss: ``(outputs, *targets) -> scalar`` for tuples, ``(outputs)`` for tensors, ``(outputs, batch)`` for
            mappings; by default the outputs' own ``loss``.
        forward: ``(model, batch) -> outputs``, instead of the above.
        train: run the model in training mode.

    Raises:
        TypeError: a word is unknown or can't be gathered from batches, a weight's module is of a kind whose inputs
            are not known, or there is no loss.
        ValueError: no batches, a loss or evidence that is not finite, a weight that the batches never reach.

    >>> layer = nn.Linear(2, 1)
    >>> collect(layer, [torch.tensor([[3.0, 1.0]]), torch.tensor([[4.0, 0.0]])], ["input_norm"])
    {'weight': {'input_norm': tensor([[5., 1.]])}}
    """
    words = needs(asked) if callable(asked) else _known([asked] if isinstance(asked, str) else asked, "this call")
    weights = find_targets(model) if weights is None else weights
    if "movement" in words:
        raise TypeError(
            "movement adds up over training steps and can't be collected from batches; give the criterion to a Pruner, "
            "which gathers it while the model trains."
        )
    if not words or not weights:
        return {name: {} for name in weights}
    inner = unwrapped(model)
    places = _places(inner, weights)
    group = replicating_group(*next(iter(places.values()))[0][1:3])
    sharded = [name for name in places if is_sharded(weights[name])]
    if sharded and (impossible := [word for word in ("hessian_grad", "flow") if word in words]):
        raise TypeError(f"{sharded[0]} is sharded, and {impossible[0]} can't be gathered on shards; gather it before.")
    batches = repeatable(batches) if "hessian_grad" in words else batches

    found: Evidence = {name: {} for name in places}
    device = device_of(inner)
    first, count = None, 0
    gradients = _Gradients(places, frozenset(words) & _GRADIENTS)
    statistics = _Statistics(places, frozenset(words) & frozenset(STATISTICS))
    with unchanged(inner), torch.inference_mode(False), statistics.hooked():
        inner.train(train)
        gradients.watch(inner)
        for batch in track(batches, "gathering evidence"):
            batch = moved(batch, device)
            first, count = (batch if first is None else first), count + 1
            if not statistics.words and not gradients.words:
                break  # flow looks at the first batch's shapes
            with torch.set_grad_enabled(bool(gradients.words)):
                with statistics.listening(batch):
                    outputs = run_batch(inner, batch, forward)
                if gradients.words:
                    loss_of(outputs, batch, loss, count - 1).backward()  # type: ignore[no-untyped-call]
                    gradients.end_batch()
            del outputs
        if not count:
            raise ValueError("there are no batches: evidence comes from running the model.")
        gradients.refuse_unreached()
        _merge(found, "grad", _averaged(gradients.sums, count, group))
        _merge(found, "grad_sq", _averaged(gradients.squares, count, group))
        if "hessian_grad" in words:
            slopes = {name: entry["grad"] for name, entry in found.items()}
            products = _hessian_product(
                inner, places, slopes, (moved(batch, device) for batch in batches), loss, forward
            )
            _merge(found, "hessian_grad", _averaged(products, count, group))
        for name, entry in statistics.results(weights, _groups(group, weights)).items():
            found[name] |= entry
        if "flow" in words:
            _merge(found, "flow", _averaged(_flow(inner, places, first, forward), 1, group))
    for name, entry in found.items():
        for word in words:
            if not _is_finite(entry[word]):
                raise ValueError(f"{name}: {word} has entries that are NaN or infinite; look at the batches for such.")
    names = {_identity(weights[name]): name for name in places}
    return {name: {word: found[names[_identity(weight)]][word] for word in words} for name, weight in weights.items()}


class _Place(NamedTuple):
    """Where a weight is in the model."""

    module_name: str
    module: nn.Module
    key: str
    parent: nn.Module | None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter


def _places(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, list[_Place]]:
    """``{name: places}``, several where a weight is tied; of names for one tensor the first."""
    names: dict[Hashable, str] = {}
    for name, weight in weights.items():
        names.setdefault(_identity(weight), name)
    places: dict[str, list[_Place]] = {name: [] for name in names.values()}
    for module_name, module in model.named_modules():
        parent = model.get_submodule(module_name.rpartition(".")[0]) if module_name else None
        for key, parameter in module._parameters.items():
            same = None if parameter is None else names.get(_identity(parameter))
            if same is not None:
                places[same].append(_Place(module_name, module, key, parent))
    for name, found in places.items():
        if not found:
            raise ValueError(
                f"{name} is no parameter of this {type(model).__name__}; pass weights=find_targets(model)."
            )
    return places


def _identity(tensor: Tensor) -> Hashable:
    """Equal for tensors that are one weight in memory, be they Parameters or detached."""
    return identity_of_parameter(cast("nn.Parameter", tensor))


def _distinct(places: list[_Place]) -> list[nn.Parameter]:
    """The Parameters that are one weight: several where two of them share memory."""
    return list({id(place.parameter): place.parameter for place in places}.values())


def _merge(found: Evidence, word: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        found[name][word] = tensor


_UNREACHED = "{name}: {what} on it; leave it out with exclude=, or pass batches or a loss= that do."
_GRADIENTS = frozenset(["grad", "grad_sq", "hessian_grad"])


class _Gradients:
    """Takes each parameter's gradient as it arrives, adds it to the sums if it is asked for, and drops it."""

    def __init__(self, places: Mapping[str, list[_Place]], words: frozenset[str]) -> None:
        self.words = words
        self.wanted = {name: _distinct(found) for name, found in places.items()} if words else {}
        self.names = {id(parameter): name for name, found in self.wanted.items() for parameter in found}
        self.sums: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        """Inside `unchanged`, which takes the hooks away again."""
        self.parameters = list(model.parameters()) if self.words else []
        for parameter in self.parameters:
            if id(parameter) in self.names:
                parameter.requires_grad_()
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived)  # type: ignore[no-untyped-call]

    def arrived(self, parameter: Tensor) -> None:
        # a parameter's gradient may come in several parts (reentrant checkpoints): their square needs the whole
        if "grad_sq" not in self.words:
            self.take(parameter)
        elif id(parameter) not in self.names:
            parameter.grad = None

    def take(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and (name := self.names.get(id(parameter))) is not None:
            _add(self.sums, name, _whole_like(grad, parameter))

    def refuse_unreached(self) -> None:
        for name in self.wanted:
            if name not in self.sums:
                raise ValueError(_UNREACHED.format(name=name, what="the loss of no batch depends"))

    def end_batch(self) -> None:
        if "grad_sq" in self.words:
            for name, found in self.wanted.items():
                batch: dict[str, Tensor] = {}
                for parameter in found:
                    if parameter.grad is not None:
                        _add(batch, name, _whole_like(parameter.grad, parameter))
                if batch:
                    _add(self.squares, name, batch[name].square())
        for parameter in self.parameters:
            self.take(parameter)


def _whole_like(grad: Tensor, parameter: Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad.to_dense()
    placements = getattr(parameter, "placements", None)
    return grad if placements is None else grad.redistribute(placements=placements)  # type: ignore[attr-defined]


def _add(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    """In float32 or wider."""
    if name not in sums:
        sums[name] = torch.zeros_like(more, dtype=torch.promote_types(more.dtype, torch.float32))
    sums[name].add_(more)


def _averaged(sums: dict[str, Tensor], count: int, group: Any) -> dict[str, Tensor]:
    """The sums over ``count`` batches, in place made means over them and over the ranks of a group."""
    if group is not None and sums:
        from torch import distributed

        total = torch.tensor(float(count), device=next(iter(sums.values())).device)
        for tensor in (total, *(sums[name] for name in sorted(sums))):  # gradients arrive in any order
            distributed.all_reduce(tensor, group=group)
        count = int(total)
    return {name: tensor.div_(count) for name, tensor in sums.items()}


def _hessian_product(
    model: nn.Module,
    places: Mapping[str, list[_Place]],
    slopes: Mapping[str, Tensor],
    batches: Iterable[Any],
    loss: Loss | None,
    forward: Forward | None,
) -> dict[str, Tensor]:
    """Sum over batches of the gradient of ``g · gradient``, with g, the slopes, held fixed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = [(name, parameter) for name, found in places.items() for parameter in _distinct(found)]
    parameters = [parameter for _, parameter in wanted]
    products: dict[str, Tensor] = {name: torch.zeros_like(slope) for name, slope in slopes.items()}
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    # neither the fused attention kernels nor cuDNN's recurrent ones have a second derivative
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=not recurrent):
        for number, batch in enumerate(track(batches, "gathering evidence, second pass")):
            value = loss_of(run_batch(model, batch, forward), batch, loss, number)
            gradients = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
            terms = [
                (slopes[name].to(gradient.dtype) * gradient).sum()
                for (name, _), gradient in zip(wanted, gradients, strict=True)
                if gradient is not None and gradient.requires_grad
            ]
            if not terms:
                continue  # a loss that is linear in the weights: H = 0
            parts = torch.autograd.grad(
                torch.stack([term.to(value.device) for term in terms]).sum(), parameters, allow_unused=True
            )
            for (name, _), part in zip(wanted, parts, strict=True):
                if part is not None:
                    products[name].add_(part)
    return products


class _Runner(nn.Module):
    """A model and the way to run it, as one module with parameters."""

    def __init__(self, model: nn.Module, how: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.how = how

    def forward(self, batch: Any) -> Any:
        return run_batch(self.model, batch, self.how)


def _flow(
    model: nn.Module, places: Mapping[str, list[_Place]], batch: Any, forward: Forward | None
) -> dict[str, Tensor]:
    """The gradients of the summed outputs in the network of absolute values, in float64 and outside the model."""
    absolute: dict[Hashable, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            same = _identity(tensor)
            if same not in absolute:
                absolute[same] = tensor.detach().double().abs()
            replaced[f"model.{name}"] = absolute[same]
    wanted = {name: absolute[_identity(found[0].parameter)].requires_grad_() for name, found in places.items()}
    with torch.enable_grad(), torch.autocast(next(iter(wanted.values())).device.type, enabled=False):
        model.eval()  # batch normalization by its running statistics: those of a batch of ones are no one's
        outputs = torch.func.functional_call(_Runner(model, forward), replaced, (mapped(batch, _ones_like),))
        total = _principal(outputs).sum()
        if not total.requires_grad:
            raise ValueError("the outputs depend on no weight; was the model run under no_grad?")
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    flows: dict[str, Tensor] = {}
    for name, gradient in zip(wanted, gradients, strict=True):
        if gradient is None:
            raise ValueError(_UNREACHED.format(name=name, what="the outputs do not depend"))
        flows[name] = gradient
    return flows


def _ones_like(tensor: Tensor) -> Tensor:
    """One example of a tensor's shape: ones in float64; what is not floating point, such as token ids, stays."""
    one = tensor[:1] if tensor.dim() else tensor
    return torch.ones_like(one, dtype=torch.float64) if one.is_floating_point() else one


def _principal(outputs: Any) -> Tensor:
    """The tensor of a model's outputs: the outputs, their ``logits``, or the first of them that is not the loss."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        named = {key: value for key, value in outputs.items() if key != "loss"}
        outputs = [named["logits"]] if "logits" in named else list(named.values())
    if isinstance(outputs, tuple | list):
        for output in outputs:
            if isinstance(output, Tensor) and output.is_floating_point():
                return output
    raise TypeError(
        f"flow sums the model's outputs, and there is no tensor in a {type(outputs).__name__}; pass forward=."
    )


class _Statistics:
    """Hooks on the modules that own the weights; they add up what goes in and comes out while `listening`."""

    def __init__(self, places: Mapping[str, list[_Place]], words: frozenset[str]) -> None:
        self.words = words
        self.layers = {name: [_layer(name, place, words) for place in found] for name, found in places.items() if words}
        self.sums = {name: Sums(words) for name in self.layers}
        self.places = places
        self.active = False
        self.keep: Tensor | None = None
        for name, layers in self.layers.items():
            if len({layer.kind for layer in layers}) > 1:
                kinds = " and ".join(f"{place.module_name} ({type(place.module).__name__})" for place in places[name])
                raise TypeError(
                    f"{name} is shared by {kinds}, whose inputs are not the same features; leave it out with exclude=, "
                    f"or take a criterion without {', '.join(sorted(words))}."
                )

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            layer.module.register_forward_hook(functools.partial(self._see, self.sums[name], layer), with_kwargs=True)
            for name, layers in self.layers.items()
            for layer in layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def listening(self, batch: Any) -> Iterator[None]:
        """Only in the forward pass: in the backward one, activation checkpoints run modules again."""
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self.keep = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _see(self, sums: Sums, layer: Layer, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.active:
            with torch.no_grad():
                layer.observe(sums, args, kwargs, output, self.keep)
            sums.calls += 1

    def results(self, weights: Mapping[str, Tensor], groups: list[Any]) -> Evidence:
        for group in groups:
            _sum_over_ranks(self.sums, group, device=next(iter(weights.values())).device)
        found: Evidence = {}
        for name, sums in self.sums.items():
            if not sums.calls:
                place = self.places[name][0]
                raise ValueError(
                    f"{name}: the batches never ran {place.module_name or 'the model'} "
                    f"({type(place.module).__name__}); leave it out with exclude=, or pass batches that do."
                )
            weight, layer = weights[name], self.layers[name][0]
            found[name] = {word: _placed(_statistic(word, sums, layer, weight.shape), weight) for word in self.words}
        return found


def _layer(name: str, place: _Place, words: frozenset[str]) -> Layer:
    layer = layer_of(place.module, place.key, place.parent)
    missing = sorted(words if layer is None else words - layer.words)
    if layer is None or missing:
        where = f"{place.module_name} " if place.module_name else ""
        raise TypeError(
            f"{name} belongs to {where}({type(place.module).__name__}), of which {', '.join(missing)} can't be "
            f"gathered; leave it out with exclude=, or take a criterion without."
        )
    return layer


def _statistic(word: str, sums: Sums, layer: Layer, shape: torch.Size) -> Tensor:
    if word == "gram":
        assert sums.gram is not None
        return mirrored(narrowed(sums.gram, sums.dtype))
    if word == "output_norm":
        assert sums.outputs is not None
        return layer.outputs(narrowed(sums.outputs.sqrt(), sums.dtype), shape)
    tokens = torch.as_tensor(sums.tokens, dtype=torch.float64)
    if word == "input_norm":
        assert sums.squares is not None
        vector = sums.squares.sqrt()
    else:
        assert sums.totals is not None
        tokens = tokens.to(sums.totals)
        vector = sums.totals / tokens
        if word == "input_var":
            assert sums.squares is not None
            vector = (sums.squares / tokens - vector.square()).clamp_(min=0)
    return layer.inputs(narrowed(vector, sums.dtype), shape)


def _placed(statistic: Tensor, weight: Tensor) -> Tensor:
    """On the weight's device; for a weight in shards, whole on every rank."""
    statistic = statistic.to(weight.device)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return statistic
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(statistic, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _groups(group: Any, weights: Mapping[str, Tensor]) -> list[Any]:
    """The groups of ranks that see different batches."""
    if group is not None:
        return [group]
    sharded: list[Any] = [weight for weight in weights.values() if is_sharded(weight)]
    mesh = sharded[0].device_mesh if sharded else None
    return [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _sum_over_ranks(sums: Mapping[str, Sums], group: Any, device: torch.device) -> None:
    """Every rank's sums become the sums over all; a layer that one rank's batches never reached counts as 0 there."""
    from torch import distributed

    fields = ("calls", "tokens", "totals", "squares", "outputs", "gram")
    for each in sums.values():
        each.calls, each.tokens = (torch.as_tensor(value, dtype=torch.float64) for value in (each.calls, each.tokens))
    here = {
        (name, key): (tuple(value.shape), value.dtype, each.dtype)
        for name, each in sums.items()
        for key in fields
        if (value := getattr(each, key)) is not None
    }
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, here, group=group)
    # a place never reached has tokens of shape (), and attention's three inputs have (3, 1): the larger one is right;
    # and so is the wider one where a rank met numbers that are too large for float32
    union: dict[tuple[str, str], Any] = {}
    for ranks in everyone:
        for spot, found in ranks.items():
            union[spot] = max(
                union.get(spot, found), found, key=lambda each: (len(each[0]), each[1].itemsize, each[2].itemsize)
            )
    for (name, key), (shape, dtype, result) in sorted(union.items(), key=lambda item: item[0]):
        each = sums[name]
        value = getattr(each, key)
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        tensor = zeros if value is None else zeros.add_(value.to(device))
        distributed.all_reduce(tensor, group=group)
        setattr(each, key, tensor)
        each.dtype = result


def _is_finite(tensor: Tensor) -> bool:
    if is_sharded(tensor):
        return bool(whole((tensor * 0).sum()).isfinite())
    return bool(tensor.isfinite().all())


def _name(criterion: Any) -> str:
    while isinstance(criterion, functools.partial):
        criterion = criterion.func
    return str(getattr(criterion, "__name__", criterion))
