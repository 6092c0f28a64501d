"""The model that a directory's ``config.json`` describes, on the meta device: with its buffers, without its weights.

Law: only a model of transformers' own is built, of no more than the files could hold; whatever goes wrong on the way
names ``config.json``.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator

import torch
from torch import nn

from secateur.checkpoints import Checkpoint, CheckpointError, blaming_config, family_of, parameters_counted
from secateur.support import ONE_AT_A_TIME, NewTensors, printable, private

__all__ = ["build_on_meta", "parameters_on_meta"]


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
            parameters_on_meta(),
            parameters_counted(checkpoint),
        ):
            skeleton = kind(copy.deepcopy(config))
        if skeleton is not None:  # before any buffer takes memory
            _check_sizes(skeleton, checkpoint)
        with parameters_on_meta(), parameters_counted(checkpoint):
            model: nn.Module = kind(config)
    return model.eval().requires_grad_(False)


SMALL_BUFFERS = 2**28  # bytes, such as those of a causal mask


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
def parameters_on_meta() -> Iterator[None]:
    """A context in which new modules of this thread have their parameters on the meta device, but real buffers: a
    rotary embedding computes its frequencies, and no file holds them."""
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
