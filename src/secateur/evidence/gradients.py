"""Where a model holds its weights: the modules and keys of each, of which a tied one has several. What takes a backward
pass: gradients and their squares, Hessian products, and the flow of absolute values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.support import Forward, Loss, loss_of, mapped, private, run_batch, track
from secateur.targets import identity_of

# ---- Where a model holds its weights: the modules and keys of each, of which a tied one has several.
#
# Law: parameters over one memory are one weight.


class Place(NamedTuple):
    """Where a weight is in the model."""

    module_name: str
    module: nn.Module
    key: str
    parent: nn.Module | None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = private.parameters_of(self.module)[self.key]
        assert parameter is not None
        return parameter


def places_of(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, list[Place]]:
    """``{name: places}``, several where a weight is tied; of names for one tensor the first."""
    names: dict[Hashable, str] = {}
    for name, weight in weights.items():
        names.setdefault(identity_of(weight), name)
    places: dict[str, list[Place]] = {name: [] for name in names.values()}
    for module_name, module in model.named_modules():
        parent = model.get_submodule(module_name.rpartition(".")[0]) if module_name else None
        for key, parameter in private.parameters_of(module).items():
            same = None if parameter is None else names.get(identity_of(parameter))
            if same is not None:
                places[same].append(Place(module_name, module, key, parent))
    for name, found in places.items():
        if not found:
            raise ValueError(
                f"{name} is no parameter of this {type(model).__name__}; pass weights=find_targets(model)."
            )
    return places


def distinct(places: list[Place]) -> list[nn.Parameter]:
    """The Parameters that are one weight: several where two of them share memory."""
    return list({id(place.parameter): place.parameter for place in places}.values())


# ---- What takes a backward pass: gradients and their squares, Hessian products, and the flow of absolute values.
#
# Law: sums are in float32 or wider, the flow in float64; a weight that no loss reaches is an error that names it.

_UNREACHED = "{name}: {what} on it; leave it out with exclude=, or pass batches or a loss= that do."
GRADIENTS = frozenset(["grad", "grad_sq", "hessian_grad"])


class Gradients:
    """Takes each parameter's gradient as it arrives, adds it to the sums if it is asked for, and drops it."""

    def __init__(self, places: Mapping[str, list[Place]], words: frozenset[str]) -> None:
        self.words = words
        self.wanted = {name: distinct(found) for name, found in places.items()} if words else {}
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


def averaged(sums: dict[str, Tensor], count: int, group: Any) -> dict[str, Tensor]:
    """The sums over ``count`` batches, in place made means over them and over the ranks of a group."""
    if group is not None and sums:
        from torch import distributed

        total = torch.tensor(float(count), dtype=torch.float32, device=next(iter(sums.values())).device)
        for tensor in (total, *(sums[name] for name in sorted(sums))):  # gradients arrive in any order
            distributed.all_reduce(tensor, group=group)
        count = int(total)
    return {name: tensor.div_(count) for name, tensor in sums.items()}


def hessian_product(
    model: nn.Module,
    places: Mapping[str, list[Place]],
    slopes: Mapping[str, Tensor],
    batches: Iterable[Any],
    loss: Loss | None,
    forward: Forward | None,
) -> dict[str, Tensor]:
    """Sum over batches of the gradient of ``g · gradient``, with g, the slopes, held fixed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wanted = [(name, parameter) for name, found in places.items() for parameter in distinct(found)]
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


def flow_of(
    model: nn.Module, places: Mapping[str, list[Place]], batch: Any, forward: Forward | None
) -> dict[str, Tensor]:
    """The gradients of the summed outputs in the network of absolute values, in float64 and outside the model."""
    absolute: dict[Hashable, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            same = identity_of(tensor)
            if same not in absolute:
                absolute[same] = tensor.detach().double().abs()
            replaced[f"model.{name}"] = absolute[same]
    wanted = {name: absolute[identity_of(found[0].parameter)].requires_grad_() for name, found in places.items()}
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
