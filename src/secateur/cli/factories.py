"""A model and its inputs, named on the command line as ``module.path:name``.

Law: modules are looked for in the current directory first, and what the user's own code raises is said to be its own.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur.checkpoints import open_checkpoint

__all__ = ["blamed", "inputs_of", "load_weights", "model_of"]


def model_of(path: str) -> tuple[nn.Module, str]:
    """The model that ``module:name`` is or makes, and the expression that gives a fresh one."""
    found = _object_at(path)
    name = path.partition(":")[2]
    if isinstance(found, nn.Module):
        return found, name
    if not callable(found):
        raise ValueError(f"{path} is of type {type(found).__name__}; give a function that makes a torch.nn.Module.")
    with blamed(f"{path}()"):
        model = found()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}() gave a value of type {type(model).__name__}, not a torch.nn.Module.")
    return model, f"{name}()"


def inputs_of(path: str) -> Any:
    found = _object_at(path)
    if callable(found):
        with blamed(f"{path}()"):
            found = found()
    if not isinstance(found, Tensor | tuple | list | Mapping):
        raise ValueError(
            f"{path} gave a value of type {type(found).__name__}; "
            "give a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    return found


def _object_at(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} names nothing in a module; write it module.path:name, as in models.vision:build.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with blamed(f"importing {module}"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # it imports something else that is missing
            found = None
    if found is None:
        raise ValueError(f"there is no module {module}, neither in this directory nor installed.")
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}.")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Whatever the user's code raises within becomes a line that says whose code it was."""
    try:
        yield
    except Exception as error:
        debug = "SECATEUR_DEBUG=1 shows where."
        raise ValueError(f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}. {debug}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """All tensors of the model, by name; of those that are one tensor under several names one suffices."""
    checkpoint, mine = open_checkpoint(path), model.state_dict(keep_vars=True)
    given = {id(mine[name]) for name in checkpoint if name in mine}
    for names, words in (
        ([name for name in mine if id(mine[name]) not in given], "lacks"),
        ([name for name in checkpoint if name not in mine], "holds what the model does not have:"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} does not fit the model: it {words} {', '.join(names[:3])}{more}.")
    for name, entry in checkpoint.entries.items():
        if entry.shape != tuple(mine[name].shape):
            shapes = f"{entry.shape}, in the model {tuple(mine[name].shape)}"
            raise ValueError(f"{path} does not fit the model: {name} has shape {shapes}.")
    model.load_state_dict(dict(checkpoint), strict=False)
