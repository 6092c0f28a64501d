"""A shrunken model on disk: its weights, and the plans that made it; no pickle.

Law: the two files are of one save or refused, and a model that they do not fit stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.checkpoints import new_directory
from secateur.shrinking.apply import carry_out
from secateur.shrinking.kinds.heads import plan_without_heads, pruned_heads
from secateur.shrinking.plan import Plan, plan_in, plans_of
from secateur.support import Fields, Undo, private, tensors_of, unwrapped, write_whole

_FORMAT = "secateur shrink plan"
_VERSIONS = (1, 2)  # plans that need no more are written as 1, which earlier versions of secateur read


_COMING = "plan.coming.json"
_MAX_BYTES = 4_000_000_000  # of plan.json: of every tensor all that stays is written as numbers


def save_shrunken(model: nn.Module, directory: str | Path) -> None:
    """Write ``plan.json`` and ``model.safetensors`` of a shrunken model; `load_shrunken` reads them. No pickle.

    A directory that is new is there with both, or not at all. What one that was there holds can be loaded wherever the
    save is stopped: it is this model or the one before.

    >>> import tempfile
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> done = shrink(model, torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_shrunken(model, folder)
    ...     fresh = load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)
    >>> torch.equal(fresh(torch.ones(1, 4)), model(torch.ones(1, 4)))
    True
    """
    from safetensors.torch import save

    model = unwrapped(model)
    plans = plans_of(model)
    if not plans:
        raise ValueError("this model was not shrunken, so there is no plan to save; save its state_dict instead.")
    directory = Path(directory)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of(model).items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(directory) if directory.is_dir() else new_directory(directory) as made:
        # the weights say of which plan they are: until that has its name, which comes last, it is read under this one
        coming = write_whole(made / _COMING, json_of_plans(plans))
        try:
            write_whole(made / "model.safetensors", save(tensors, {"format": "pt", "plan": _fingerprint(plans)}))
        except Exception:  # where it was interrupted nobody knows which plan the weights are of
            coming.unlink()
            raise
        coming.replace(made / "plan.json")


def json_of_plans(plans: Sequence[Plan]) -> str:
    """What ``plan.json`` holds."""
    version = 2 if any(plan.modules or plan.scales for plan in plans) else 1
    every = [plan.to_json() for plan in plans]
    return json.dumps({"format": _FORMAT, "version": version, "fingerprint": _fingerprint(plans), "plans": every})


def _fingerprint(plans: Sequence[Plan]) -> str:
    """SHA-256 of what the plans say: shapes before, indices, numbers, scales, modules."""
    return hashlib.sha256(json.dumps([plan.to_json() for plan in plans], sort_keys=True).encode()).hexdigest()


def load_shrunken(model: nn.Module, directory: str | Path) -> nn.Module:
    """Shrink a freshly built model to the plan that `save_shrunken` wrote, and load its weights; parameters on the meta
    device become real. A directory of transformers 4 has no plan, but ``pruned_heads`` in its ``config.json``: these
    heads leave.

    Raises:
        ValueError: the plan is not one that this version reads, or does not fit the model; nothing is changed.

    >>> import tempfile
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> done = shrink(model, torch.zeros(1, 4), 0.5)
    >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
    ...     save_shrunken(model, folder)
    ...     load_shrunken(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), folder)[0].weight.shape
    torch.Size([8, 4])
    """
    directory, given, model = Path(directory), model, unwrapped(model, resized=True)
    path = directory / "plan.json"
    if heads := None if path.exists() else pruned_heads(directory):
        path, plans = directory / "config.json", [plan_without_heads(model, heads)]
    else:
        plans = read_plans(path)
    tensors, of = _read_weights(directory / "model.safetensors")
    if of not in (None, _fingerprint(plans)):
        path = directory / _COMING  # of a save that was stopped before this had its name
        if not path.exists() or of != _fingerprint(plans := read_plans(path)):
            raise ValueError(
                f"plan.json and model.safetensors in {directory} are not of one save; save the model again."
            )
    undo = Undo()
    try:  # no `with`, as in `carry_out`
        for plan in plans:
            undo.call(_carry_out_of(path, model, plan))
        unsaved = _unsaved(model)
        # no comprehension, which Python 3.12 leaves without coming by `except` where it is interrupted in its end
        mine = dict(filter(lambda each: each[0] in tensors or each[0] not in unsaved, tensors_of(model).items()))
        if mine.keys() != tensors.keys():
            other = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"the model and {directory} differ in {', '.join(other[:5])}.")
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape and name not in unsaved:
                shapes = f"{tuple(tensors[name].shape)}, in the model {tuple(tensor.shape)}"
                raise ValueError(f"{name} has in {directory} shape {shapes} once the plan is carried out.")
            if _kind(tensor) != _kind(tensors[name]):
                dtypes = f"{tensors[name].dtype}, in the model {tensor.dtype}"
                raise ValueError(f"{directory / 'model.safetensors'}: {name} is of dtype {dtypes}.")
        for name, tensor in mine.items():
            _put(model, tensor, tensors.pop(name), undo)
        return given
    except BaseException:
        undo.roll_back()
        raise


def _carry_out_of(path: Path, model: nn.Module, plan: Plan) -> Callable[[], None]:
    try:
        return carry_out(model, plan, None)
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error


def read_plans(path: Path) -> list[Plan]:
    """The plans in a ``plan.json``, in order."""
    hint = f" {path.name} is no plan that this version of secateur reads; save the model again."
    read = Fields.read(path, hint=hint, largest=_MAX_BYTES)
    if read.take("format", str) != _FORMAT:
        raise read.wrong("format", f"is not {_FORMAT!r}")
    if (version := read.take("version", int)) not in _VERSIONS:
        raise read.wrong(f"version {version}", f"is not one of {', '.join(map(str, _VERSIONS))}")
    plans = [plan_in(each) for each in read.inners("plans")]
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


def _unsaved(model: nn.Module) -> set[str]:
    """The buffers that no state dict holds: a forward pass may put others in place, as large as its input asks."""
    return {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in private.unsaved_buffers_of(module)
    }


def _put(model: nn.Module, tensor: Tensor, value: Tensor, undo: Undo) -> None:
    """Gives a tensor its values; one on meta becomes real, wherever the model has it."""
    if not tensor.is_meta and tensor.shape != value.shape:
        value = value.to(tensor)
    elif not tensor.is_meta:
        undo.values(tensor)
        tensor.data.copy_(value)
        return
    new = nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    for held, key in _places(model, tensor):
        undo.call(operator.setitem, held, key, tensor)
        held[key] = new


def _places(model: nn.Module, tensor: Tensor) -> list[tuple[Any, Any]]:
    """``(table or list, key)`` of everywhere that a model has a tensor."""
    return [
        (held, key)
        for module in model.modules()
        for held in (private.parameters_of(module), private.buffers_of(module), private.flat_weights_of(module))
        for key, each in (enumerate(held) if isinstance(held, list) else held.items())
        if each is tensor
    ]
