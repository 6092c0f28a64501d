"""The model that a directory's ``config.json`` describes, on the meta device: with its buffers, without its weights.

Law: only a model of transformers' own is built, of no more than the files could hold; whatever goes wrong on the way
names ``config.json``.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from secateur.checkpoints import Checkpoint, CheckpointError
from secateur.support import ONE_AT_A_TIME, NewTensors, printable, private

__all__ = [
    "blaming_config",
    "build_on_meta",
    "family_of",
    "most_parameters",
    "parameters_counted",
]


def build_on_meta(checkpoint: Checkpoint) -> nn.Module:
    """The model of a directory, its parameters on the meta device; tied ones are one object.

    Class and configuration are those of `family_of`. Its dtype is that of most of the checkpoint's bytes.

    Raises:
        CheckpointError: what `family_of` refuses, a configuration that no model can be made of, one of other sizes
            than the files hold, an adapter, or a quantized checkpoint.
    """
    root = checkpoint.root
    if (root / "adapter_config.json").exists() and not (root / "config.json").exists():
        raise CheckpointError(f"{root}: holds an adapter and no model; merge it into its model first, and save that.")
    kind, config = family_of(checkpoint)
    if "quantization_config" in checkpoint.config:
        raise CheckpointError(
            f"{root / 'config.json'}: the model is quantized; prune the original, and quantize the result."
        )
    with blaming_config(root), NewTensors(most_common_dtype(checkpoint)):
        skeleton = None
        # some models compute with what they make, and cannot on the meta device
        with (
            contextlib.suppress(Exception),
            torch.device("meta"),
            _parameters_on_meta(),
            parameters_counted(checkpoint),
        ):
            skeleton = kind(copy.deepcopy(config))
        if skeleton is not None:  # before any buffer takes memory
            _check_sizes(skeleton, checkpoint)
        with _parameters_on_meta(), parameters_counted(checkpoint):
            model: nn.Module = kind(config)
    return model.eval().requires_grad_(False)


def family_of(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The class that ``config.json`` names under ``architectures``, of transformers' own models, and the configuration.

    No code from the directory is run, and none is fetched; the name is looked up, but only a model's class is taken.

    Raises:
        CheckpointError: no ``config.json``, no such class, a configuration of another family or that transformers
            refuses; or transformers is missing.
    """
    root = checkpoint.root
    where = root / "config.json"
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            "a directory is pruned block by block through transformers: pip install 'secateur[transformers]', or load "
            "the model yourself and pass it."
        ) from None
    if not checkpoint.config:
        raise CheckpointError(f"{root}: has no config.json, which says what model this is.")
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{where}: names no architectures; load the model yourself and pass it.")
    name = printable(names[0])
    check_layers(checkpoint)
    for place, value in _fields(checkpoint.config):
        if "_implementation" in place and isinstance(value, str) and "/" in value:
            raise CheckpointError(f"{where}: {printable(place)} is code from elsewhere, which is not fetched.")
    try:
        kind: Any = getattr(transformers, names[0], None)
    except Exception:  # a module of transformers' that cannot be imported here
        kind = None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{where}: names the architecture {name}, and transformers {transformers.__version__} has no model of that "
            "name; load the model yourself and pass it."
        )
    with blaming_config(root):
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    wanted: Any = getattr(kind, "config_class", None)
    if not isinstance(wanted, type) or not isinstance(config, wanted):
        raise CheckpointError(
            f"{where}: names the architecture {name}, and is a {type(config).__name__}, which is another family's."
        )
    return kind, config


SMALL_BUFFERS = 2**28  # bytes, such as those of a causal mask
_LAYERS = re.compile(r"(^|[._])n?_?layers?$")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``(place, value)`` of all fields, also those of configurations inside, such as ``text_config.num_layers``."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        place, value = left.pop()
        yield place, value
        if isinstance(value, Mapping):
            left.extend((f"{place}.{key}", inner) for key, inner in value.items())


def _check_sizes(model: nn.Module, checkpoint: Checkpoint) -> None:
    mine = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name, entry in checkpoint.entries.items():
        for alias in (name, prefix + name, name.removeprefix(prefix)):
            if alias in mine and mine[alias].shape != torch.Size(entry.shape):
                raise CheckpointError(
                    f"{checkpoint.root}: {printable(name)} has shape {tuple(entry.shape)}, and its config.json asks "
                    f"for {tuple(mine[alias].shape)}."
                )
    taken = sum(buffer.nbytes for buffer in model.buffers())
    if taken > max(SMALL_BUFFERS, checkpoint.nbytes):
        raise CheckpointError(
            f"{checkpoint.root / 'config.json'}: describes a model whose buffers alone take {taken / 1e9:.3g} GB, and "
            f"the files hold {checkpoint.nbytes / 1e9:.3g} GB."
        )


@contextlib.contextmanager
def blaming_config(root: Path, what: str = "no model can be made of it") -> Iterator[None]:
    """Whatever transformers or a model of its own raises becomes one line that names ``config.json``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        said = printable(" ".join(str(error).split()), 400)
        raise CheckpointError(f"{root / 'config.json'}: {what} ({type(error).__name__}: {said}).") from error


def most_parameters(names: Collection[str]) -> int:
    """How many parameters a model may have whose files hold tensors of these names: some are tied, or made of others.

    >>> most_parameters(["fc.weight"])
    10004
    """
    return 10_000 + 4 * len(names)


def check_layers(checkpoint: Checkpoint) -> None:
    """`CheckpointError` for a configuration with more layers than the files could hold: to build them takes hours."""
    for place, value in _fields(checkpoint.config):
        if _LAYERS.search(place) and type(value) is int and value > most_parameters(checkpoint):
            raise CheckpointError(
                f"{checkpoint.root / 'config.json'}: {printable(place)} is {printable(str(value), 40)}, and the files "
                f"hold {len(checkpoint):,} tensors; it is damaged, or another model's."
            )


@contextlib.contextmanager
def parameters_counted(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever a configuration asks for, the model that is built in here has no more than the files could hold."""
    most, count, here = most_parameters(checkpoint), 0, threading.get_ident()

    def counted(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == here  # the hook is the process's
        if count > most:
            raise CheckpointError(
                f"{checkpoint.root}: config.json asks for more than {most:,} parameters, and the files hold "
                f"{len(checkpoint):,} tensors; it is damaged, or another model's."
            )

    hook = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def most_common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of the floating-point tensors, by bytes."""
    sizes: dict[torch.dtype, int] = {}
    for entry in checkpoint.entries.values():
        if entry.is_floating_point and entry.torch_dtype is not None:
            sizes[entry.torch_dtype] = sizes.get(entry.torch_dtype, 0) + entry.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.root}: holds no floating-point tensor of 16 bits or more.")
    return max(sizes, key=lambda dtype: sizes[dtype])


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters move to the meta device as modules of this thread take them, buffers are made as ever: a rotary
    embedding computes its frequencies, and no file holds them."""
    with ONE_AT_A_TIME:  # the class is the process's; what other threads build stays what it is
        original, here = nn.Module.register_parameter, threading.get_ident()

        def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(self, name, param)
            if threading.get_ident() == here and param is not None and param.device.type != "meta":
                private.parameters_of(self)[name] = nn.Parameter(param.to("meta"), requires_grad=False)

        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]
