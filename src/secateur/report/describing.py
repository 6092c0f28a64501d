"""A network described: which weights its masks keep, and what one forward pass has to multiply.

Law: nothing of the network is changed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.report.results import Layer, Network
from secateur.support import in_mode, private, run_example

__all__ = ["count_multiply_adds", "describe"]


def describe(title: str, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, bins: int = 60) -> Network:
    """The `Network` that the masks make of these weights, which are those **before** pruning.

    ``weights`` and ``masks`` go by parameter name; a mask is a bool tensor of its weight's shape, True = kept. Weights
    without a mask are left out. The histogram has ``bins`` bins, symmetric about 0, over all the masked weights.

    Raises ``ValueError`` where a mask has no weight or another shape than its weight, or a weight is not finite.

    >>> weight = torch.tensor([[3.0, -1.0], [0.5, -4.0]])
    >>> network = describe("top half", {"w": weight}, {"w": weight.abs() > 2}, bins=4)
    >>> network.edges, network.kept, network.removed
    ((-4.0, -2.0, 0.0, 2.0, 4.0), (1, 0, 0, 1), (0, 1, 1, 0))
    """
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(f"there is a mask for {name} but no weight; weights has {_few(weights)}.")
        weight = weights[name]
        if weight.shape != mask.shape:
            raise ValueError(f"the mask of {name} has shape {tuple(mask.shape)}, its weight {tuple(weight.shape)}.")
        if not weight.isfinite().all():
            raise ValueError(f"{name} holds inf or NaN; a histogram needs finite weights.")
    largest = max((float(weights[name].abs().max()) for name, mask in masks.items() if mask.numel()), default=0.0)
    edges = np.linspace(-1, 1, bins + 1) * (largest or 1.0)
    kept, removed = np.zeros(bins, dtype=np.int64), np.zeros(bins, dtype=np.int64)
    layers = []
    for name, mask in masks.items():
        weight, mask = weights[name].detach().double().cpu(), mask.detach().bool().cpu()
        kept += np.histogram(weight[mask].numpy(), edges)[0]
        removed += np.histogram(weight[~mask].numpy(), edges)[0]
        layers.append(Layer(name, tuple(mask.shape), int(mask.sum())))
    return Network(title, tuple(layers), tuple(edges.tolist()), tuple(kept.tolist()), tuple(removed.tolist()))


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def count_multiply_adds(model: nn.Module, example_inputs: Any) -> int:
    """``Σ over layers: nonzero weights · places where each is used``: what one forward pass has to multiply and add.

    Of linear layers and convolutions alone; a place is a position of the output (of a transposed convolution: of the
    input), padding included. Biases, normalizations, activations and attention's products are not counted. This is the
    work that is left in theory: a dense kernel multiplies by the zeros too.

    The model is run once on ``example_inputs``, what it is called with as in `torch.export` (a tuple holds positional
    arguments, a mapping keyword arguments), in evaluation mode and without gradients.

    >>> layer = nn.Linear(3, 2)
    >>> with torch.no_grad():
    ...     _ = layer.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 3.0]]))
    >>> count_multiply_adds(layer, torch.zeros(5, 3))
    15
    """
    total = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        if isinstance(module, nn.Linear):
            places = output.numel() // max(module.out_features, 1)
        elif private.is_transposed_convolution(module):
            places = given[0].numel() // module.in_channels
        else:
            assert private.is_convolution(module)
            places = output.numel() // module.out_channels
        total += int(weight.count_nonzero()) * places

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | private.Convolution)]
    hooks = [module.register_forward_hook(count) for module in layers]
    try:
        with in_mode(model, training=False), torch.no_grad():
            run_example(model, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return total
