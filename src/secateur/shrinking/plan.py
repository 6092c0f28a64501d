"""What leaves a model, written down: a `Plan` is carried out on a module, taken back, saved and read.

Law: all of a plan is carried out or nothing, and one that does not fit the model changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.coupling import Branch, Coupling, Kept, replacement
from secateur.support import Fields, tensors_of, write_whole

__all__ = [
    "Factors",
    "Plan",
    "carry_out",
    "factors_of",
    "load_shrunken",
    "multiplied",
    "number_at",
    "plan_of",
    "plan_without",
    "plans_of",
    "save_shrunken",
    "text_of",
    "zero",
]

# (dimension, what its positions are multiplied by)
Factors = list[tuple[int, npt.NDArray[np.float64]]]

_FORMAT = "secateur shrink plan"
_VERSIONS = (1, 2)  # plans that need no more are written as 1, which earlier versions of secateur read
_MAX_BYTES = 4_000_000_000  # of plan.json: of every tensor all that stays is written as numbers
_LARGEST, _HUGE = 2**63 - 1, 1e308  # what an index, and a float, can be
_ATTRIBUTE = "shrink_plans"  # of a shrunken model: what was removed, in order
# Numbers that torch's own modules hold for their printed form and do not use in a forward pass: as their tensors say.
_SIZES: dict[type[nn.Module], dict[str, Callable[[Any], int]]] = {
    nn.Linear: {"in_features": lambda m: m.weight.shape[1], "out_features": lambda m: m.weight.shape[0]},
    nn.Bilinear: {
        "in1_features": lambda m: m.weight.shape[1],
        "in2_features": lambda m: m.weight.shape[2],
        "out_features": lambda m: m.weight.shape[0],
    },
    nn.modules.conv._ConvNd: {
        "in_channels": lambda m: m.weight.shape[0] if m.transposed else m.weight.shape[1] * m.groups,
        "out_channels": lambda m: m.weight.shape[1] * m.groups if m.transposed else m.weight.shape[0],
    },
    nn.modules.batchnorm._NormBase: {
        "num_features": lambda m: next(t.shape[0] for t in (m.weight, m.running_mean) if t is not None)
    },
    nn.GroupNorm: {"num_channels": lambda m: m.weight.shape[0]},
    nn.Embedding: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.EmbeddingBag: {"embedding_dim": lambda m: m.weight.shape[1], "num_embeddings": lambda m: m.weight.shape[0]},
    nn.PReLU: {"num_parameters": lambda m: m.weight.shape[0]},
    nn.MultiheadAttention: {
        "head_dim": lambda m: m.embed_dim // m.num_heads,
        "kdim": lambda m: m.embed_dim if m._qkv_same_embed_dim else m.k_proj_weight.shape[1],
        "vdim": lambda m: m.embed_dim if m._qkv_same_embed_dim else m.v_proj_weight.shape[1],
    },
    nn.RNNBase: {"input_size": lambda m: m.weight_ih_l0.shape[1], "hidden_size": lambda m: m.weight_hh_l0.shape[1]},
    nn.RNNCellBase: {"input_size": lambda m: m.weight_ih.shape[1], "hidden_size": lambda m: m.weight_hh.shape[1]},
}


@dataclass(frozen=True)
class Plan:
    """What leaves a model: kept indices of tensors' dimensions, numbers that modules hold, and whole modules.

    Attributes:
        tensors: ``{name: (shape before, {dimension: kept indices})}``.
        numbers: ``[(place, before, after)]``; a place is the path of a module, then names, keys and indices.
        scales: ``[(name, dimension, indices, factor)]``: entries, of those before, that are multiplied by a number,
            since the code divides by the root of a size that became smaller.
        modules: ``{path: form}`` of what stays in place of modules that leave; see `Removed` in `secateur.coupling`.
    """

    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]]
    numbers: list[tuple[tuple[str | int, ...], int, int]]
    scales: list[tuple[str, int, npt.NDArray[np.int64], float]] = field(default_factory=list)
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def takes(self, branch: Branch) -> bool:
        """Whether nothing is left of a residual branch: all that has its parameters leaves."""
        return all(any(name.startswith(f"{path}.") for path in self.modules) for name in branch.parameters)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "tensors": {
                name: {"shape": list(shape), "kept": {str(at): each.tolist() for at, each in kept.items()}}
                for name, (shape, kept) in self.tensors.items()
            },
            "numbers": [{"place": list(place), "from": old, "to": new} for place, old, new in self.numbers],
            "scales": [
                {"tensor": name, "dimension": at, "indices": indices.tolist(), "by": factor}
                for name, at, indices, factor in self.scales
            ],
            **({"modules": {path: dict(form) for path, form in self.modules.items()}} if self.modules else {}),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """What `to_json` made."""
        return _plan_in(Fields(values, Path("plan.json")))


def _plan_in(read: Fields) -> Plan:
    tensors = {
        name: (tuple(entry.each("shape", int)), _kept(entry.inner("kept")))
        for name, entry in read.inners_named("tensors")
    }
    numbers = [(_place(each), each.take("from", int), each.take("to", int)) for each in read.inners("numbers")]
    scales = [
        (
            each.take("tensor", str),
            each.take("dimension", int),
            np.asarray(each.each("indices", int, least=0, most=_LARGEST), dtype=np.int64),
            float(each.take("by", float, least=-_HUGE, most=_HUGE)),
        )
        for each in (read.inners("scales") if "scales" in read.values else ())
    ]
    modules: dict[str, Mapping[str, Any]] = {}
    for path, form in read.inners_named("modules") if "modules" in read.values else ():
        try:
            replacement(form.values)  # one that cannot be made is no plan
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise form.wrong("", f"describes no module ({error})") from None
        modules[path] = dict(form.values)
    return Plan(tensors, numbers, scales, modules)


def _kept(read: Fields) -> dict[int, npt.NDArray[np.int64]]:
    for at in read.values:
        if not re.fullmatch(r"\d{1,9}", at, re.ASCII):
            raise read.wrong(at, "is not the number of a dimension")
    return {int(at): np.asarray(read.each(at, int, least=0, most=_LARGEST), dtype=np.int64) for at in read.values}


def _place(number: Fields) -> tuple[str | int, ...]:
    found = number.take("place", list)
    if not all(type(each) in (str, int) for each in found) or len(found) < 2:
        raise number.wrong("place", "is no place of a number: the path of a module, then names, keys and indices")
    return tuple(found)


def plans_of(model: nn.Module) -> list[Plan]:
    """What left a model until now, in order."""
    return list(getattr(model, _ATTRIBUTE, ()))


def save_shrunken(model: nn.Module, directory: str | Path) -> None:
    """Write ``plan.json`` and ``model.safetensors`` of a shrunken model; `load_shrunken` reads them. No pickle.

    >>> import tempfile
    >>> from secateur import shrink
    >>> model = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_shrunken(model, folder)
    ...     fresh = load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)
    >>> torch.equal(fresh(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    from safetensors.torch import save

    plans = plans_of(model)
    if not plans:
        raise ValueError("this model was not shrunken; save its state_dict instead.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}
    # a plan of one save beside the weights of another is told by it: two files cannot be replaced at once
    write_whole(directory / "model.safetensors", save(tensors, {"format": "pt", "plan": _fingerprint(plans)}))
    write_whole(directory / "plan.json", text_of(plans))


def text_of(plans: Sequence[Plan]) -> str:
    """What ``plan.json`` holds."""
    version = 2 if any(plan.modules or plan.scales for plan in plans) else 1
    every = [plan.to_json() for plan in plans]
    return json.dumps({"format": _FORMAT, "version": version, "fingerprint": _fingerprint(plans), "plans": every})


def _fingerprint(plans: Sequence[Plan]) -> str:
    """SHA-256 of what the plans say: shapes before, indices, numbers, scales, modules."""
    return hashlib.sha256(json.dumps([plan.to_json() for plan in plans], sort_keys=True).encode()).hexdigest()


def load_shrunken(model: nn.Module, directory: str | Path) -> nn.Module:
    """Shrink a freshly built model as `save_shrunken` wrote it, and load its weights; on meta, it becomes real.

    Raises:
        ValueError: the plan is not one that this version reads, or does not fit the model; nothing is changed.

    >>> import tempfile
    >>> from secateur import shrink
    >>> model = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
    ...     save_shrunken(model, folder)
    ...     load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)[0].weight.shape
    torch.Size([7, 4])
    """
    directory = Path(directory)
    plans = _read_plans(directory / "plan.json")
    tensors, of = _read_weights(directory / "model.safetensors")
    if of is not None and of != _fingerprint(plans):
        raise ValueError(f"plan.json and model.safetensors in {directory} are not of one save; save the model again.")
    undo: list[Callable[[], None]] = []
    try:
        for plan in plans:
            undo += [_carry_out_of(directory / "plan.json", model, plan)]
        mine = tensors_of(model)
        if mine.keys() != tensors.keys():
            other = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"the model and {directory} differ in {', '.join(other[:5])}.")
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, in the model {tuple(tensor.shape)}"
                raise ValueError(f"{name} has in {directory} shape {shapes} once the plan is carried out.")
            if _kind(tensor) != _kind(tensors[name]):
                dtypes = f"{tensors[name].dtype}, in the model {tensor.dtype}"
                raise ValueError(f"{directory / 'model.safetensors'}: {name} is of dtype {dtypes}.")
        for name, tensor in mine.items():
            undo += [_put(model, tensor, tensors.pop(name))]
        return model
    except BaseException:
        for each in reversed(undo):
            each()
        raise


def _carry_out_of(path: Path, model: nn.Module, plan: Plan) -> Callable[[], None]:
    try:
        return carry_out(model, plan, None)
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def _read_plans(path: Path) -> list[Plan]:
    hint = f" {path.name} is no plan that this version of secateur reads; save the model again."
    read = Fields.read(path, hint=hint, largest=_MAX_BYTES)
    if read.take("format", str) != _FORMAT:
        raise read.wrong("format", f"is not {_FORMAT!r}")
    if (version := read.take("version", int)) not in _VERSIONS:
        raise read.wrong(f"version {version}", f"is not one of {', '.join(map(str, _VERSIONS))}")
    plans = [_plan_in(each) for each in read.inners("plans")]
    if "fingerprint" in read.values and read.take("fingerprint", str) != _fingerprint(plans):
        raise read.wrong("fingerprint", "is not that of the plans: it was changed after it was written")
    return plans


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors, and the fingerprint of the plans that they were saved with."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get("plan")  # noqa: SIM118
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} holds no whole tensors: {error}.") from error


def _kind(tensor: Tensor) -> str:
    """Numbers of one kind become each other with a rounding at most."""
    if tensor.is_floating_point() or tensor.is_complex():
        return "real" if tensor.is_floating_point() else "complex"
    return "truth" if tensor.dtype == torch.bool else "integer"


def plan_of(model: nn.Module, coupling: Coupling, kept: Kept) -> Plan:
    """What leaves when this is kept of the axes."""
    tensors: dict[str, tuple[tuple[int, ...], dict[int, npt.NDArray[np.int64]]]] = {}
    for name, tensor in tensors_of(model).items():
        masks = coupling.kept(name, kept)
        cuts = {at: np.flatnonzero(mask) for at, mask in enumerate(masks) if not mask.all()}
        if cuts:
            tensors[name] = (tuple(tensor.shape), cuts)
    counts = {axis: int(mask.sum()) for axis, mask in kept.items()}
    numbers = [(each.place, each.value, value) for each, value in coupling.attributes(counts).items()]
    return Plan(tensors, numbers, coupling.scales(counts))


def plan_without(branches: Iterable[Branch]) -> Plan:
    """What leaves with residual branches; of modules within others that leave, only the outer."""
    modules = {path: form for branch in branches for path, form in branch.modules.items()}
    outer = {path: form for path, form in modules.items() if not any(path.startswith(f"{other}.") for other in modules)}
    return Plan({}, [], modules=outer)


def carry_out(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    """Slice tensors, set numbers, and put other modules in place; all or nothing. Returns what takes it back.

    What left is let go of by the optimizer, too: a parameter of a module that left is in none of its groups.
    """
    tensors = tensors_of(model)
    places = _places(model, plan.modules)
    smaller: dict[str, Tensor] = {}
    scales = factors_of(plan)
    states: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, (shape, kept) in plan.tensors.items():
        if name not in tensors:
            raise ValueError(f"the model has no tensor {name}, which the plan makes smaller.")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the plan was made for {shape}.")
        if not all(0 <= at < len(shape) and _fits(each, shape[at]) for at, each in kept.items()):
            raise ValueError(f"the plan keeps entries of {name} that its shape {shape} does not have.")
        smaller[name] = multiplied(_sliced(tensor.data, kept), scales.get(name, []))
        state = {} if optimizer is None else optimizer.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and tuple(value.shape) == shape:
                states.append((state, key, _sliced(value, kept)))
    for place, old, _ in plan.numbers:
        if number_at(model, place) != old:
            raise ValueError(f"{_spelled(place)} is {number_at(model, place)}; the plan was made for {old}.")
    before = {name: (tensors[name].data, tensors[name].grad) for name in smaller}
    changed = {id(tensors[name]) for name in smaller}
    printed = [
        (module, key, vars(module)[key], size)
        for module in model.modules()
        if any(id(tensor) in changed for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for kind, facts in _SIZES.items()
        if isinstance(module, kind)
        for key, size in facts.items()
    ]
    states_before = [(state, key, state[key]) for state, key, _ in states]
    history = plans_of(model)
    groups = [] if optimizer is None else [(group, group["params"]) for group in optimizer.param_groups]
    known = {} if optimizer is None or not places else dict(optimizer.state)
    written = [_written(model, place) for place, _, _ in plan.numbers]

    def undo() -> None:
        for parent, key, old_module, _ in places:
            parent._modules[key] = old_module
        for group, members in groups:
            group["params"] = members
        if optimizer is not None and known:
            optimizer.state.clear()
            optimizer.state.update(known)  # in their order
        for name, (value, grad) in before.items():
            _set_data(tensors[name], value, grad)
        for held, key, old in written:
            held[key] = old
        for module, key, old, _ in printed:
            vars(module)[key] = old
        for state, key, value in states_before:
            state[key] = value
        vars(model)[_ATTRIBUTE] = history
        if not history:
            del vars(model)[_ATTRIBUTE]

    try:
        for name, value in smaller.items():
            grad = before[name][1]
            if grad is not None:
                inverse = [(at, 1 / factors) for at, factors in scales.get(name, [])]
                grad = multiplied(_sliced(grad, plan.tensors[name][1]), inverse)
            _set_data(tensors[name], value, grad)
        for place, _, new in plan.numbers:
            _set(model, place, new)
        for module, key, _, size in printed:
            vars(module)[key] = int(size(module))
        for state, key, value in states:
            state[key] = value
        for parent, key, _, new_module in places:
            parent._modules[key] = new_module
        if optimizer is not None and places:
            left = {id(each) for each in tensors.values()} - {id(each) for each in tensors_of(model).values()}
            for group, members in groups:
                for each in members:
                    if id(each) in left and each in optimizer.state:
                        del optimizer.state[each]
                group["params"] = [each for each in members if id(each) not in left]
        vars(model)[_ATTRIBUTE] = [*history, plan]
        return undo
    except BaseException:
        undo()
        raise


def _places(
    model: nn.Module, modules: Mapping[str, Mapping[str, Any]]
) -> list[tuple[nn.Module, str, nn.Module, nn.Module]]:
    """(parent, key, module, what stays) of the modules that leave, wherever the model has them."""
    stays: dict[int, nn.Module] = {}
    for path, form in modules.items():
        try:
            module = model.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"the model has no module {path}, which the plan takes out.") from error
        if not path or type(module).__name__ != form["was"]:
            raise ValueError(
                f"{path or 'the model'} is a {type(module).__name__}; the plan was made for {form['was']}."
            )
        stays[id(module)] = replacement(form).train(module.training)
    return [
        (parent, key, child, stays[id(child)])
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and id(child) in stays
    ]


def _fits(indices: npt.NDArray[np.int64], size: int) -> bool:
    return bool(
        indices.ndim == 1
        and len(indices)
        and indices[0] >= 0
        and indices[-1] < size
        and (indices[1:] > indices[:-1]).all()  # a difference could wrap around
    )


def _sliced(tensor: Tensor, kept: Mapping[int, npt.NDArray[np.int64]]) -> Tensor:
    for at, indices in kept.items():
        tensor = tensor.index_select(at, torch.from_numpy(indices).to(tensor.device))
    return tensor.contiguous()


def factors_of(plan: Plan) -> dict[str, Factors]:
    """For each tensor that is scaled ``(dimension, factors of the positions that stay)``."""
    found: dict[str, Factors] = {}
    for name, at, indices, factor in plan.scales:
        shape, kept = plan.tensors.get(name, ((), {}))
        if not 0 <= at < len(shape) or not _fits(indices, shape[at]):
            raise ValueError(f"the plan scales entries of {name} that it does not make smaller, or that are not there.")
        factors = np.ones(shape[at])
        factors[indices] = factor
        found.setdefault(name, []).append((at, factors[kept[at]] if at in kept else factors))
    return found


def multiplied(tensor: Tensor, scales: Factors) -> Tensor:
    """Along a dimension; not rounded to half precision before."""
    for at, factors in scales:
        shape = [1] * tensor.dim()
        shape[at] = -1
        wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        tensor = (wide * torch.from_numpy(factors).to(wide).reshape(shape)).to(tensor.dtype)
    return tensor


def _set_data(tensor: Tensor, value: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    if tensor.requires_grad:
        # A graph that is still alive, as that of the last loss, keeps autograd's node for the old shape; it is let go
        # only where the type of the data changes.
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = value
    tensor.grad = grad


def number_at(model: nn.Module, place: Sequence[str | int]) -> int:
    """The integer that a module holds at a place: the path of the module, then names, keys and indices."""
    try:
        held: Any = model.get_submodule(str(place[0]))
        for key in place[1:]:
            held = _inside(held)[key]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the model has no number at {_spelled(place)}.") from error
    if not isinstance(held, int):
        raise ValueError(f"{_spelled(place)} is no integer.")
    return held


def _set(model: nn.Module, place: Sequence[str | int], value: int) -> None:
    _with(model.get_submodule(str(place[0])), place[1:], value)


def _written(model: nn.Module, place: Sequence[str | int]) -> tuple[dict[Any, Any], Any, Any]:
    """Where `_set` writes, and what is there: the innermost that is no tuple or list, which are made anew."""
    held: Any = model.get_submodule(str(place[0]))
    found: tuple[dict[Any, Any], Any, Any] | None = None
    for key in place[1:]:
        inside = _inside(held)
        if isinstance(inside, dict):
            found = inside, key, inside[key]
        held = inside[key]
    assert found is not None  # a module comes first
    return found


def _with(held: Any, keys: Sequence[str | int], value: int) -> Any:
    """The same with a number at the place of these keys replaced: in place, but for tuples and lists.

    A list that a configuration was made of is often that of other models, too.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(held, tuple | list):
        return type(held)([_with(each, rest, value) if at == key else each for at, each in enumerate(held)])
    inside = _inside(held)
    inside[key] = _with(inside[key], rest, value)
    return held


def _inside(held: Any) -> Any:
    return held if isinstance(held, dict | list | tuple) else vars(held)


def _spelled(place: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in place if part != "")


def _put(model: nn.Module, tensor: Tensor, value: Tensor) -> Callable[[], None]:
    """Gives a tensor its values; one on meta becomes real, wherever the model has it. Returns what takes it back."""
    if not tensor.is_meta:
        before = tensor.detach().clone()

        def undo() -> None:
            tensor.data.copy_(before)

        try:
            tensor.data.copy_(value)
            return undo
        except BaseException:
            undo()
            raise
    new = nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    places: list[tuple[Any, Any]] = []
    for module in model.modules():
        flat = vars(module).get("_flat_weights")  # where torch's recurrent modules have their parameters once more
        held_by: list[Any] = [module._parameters, module._buffers, *([flat] if isinstance(flat, list) else [])]
        for held in held_by:
            items = enumerate(held) if isinstance(held, list) else held.items()
            places += [(held, key) for key, each in items if each is tensor]

    def back() -> None:
        for held, key in places:
            held[key] = tensor

    try:
        for held, key in places:
            held[key] = new
        return back
    except BaseException:
        back()
        raise


def zero(tensor: Tensor, at: int, gone: Tensor) -> None:
    """Zero in place where a bool vector along one dimension is true."""
    if gone.any():
        shape = [1] * tensor.dim()
        shape[at] = -1
        tensor.data.masked_fill_(gone.reshape(shape).to(tensor.device), 0)
