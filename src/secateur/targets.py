"""Which weights of a model are pruned: by the kind of module that owns them, narrowed by globs, tied weights once.

Law: no tensor is a target twice, and a glob that matches nothing is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

__all__ = [
    "find_layers",
    "find_targets",
    "identity_of",
    "left_alone",
    "matched",
    "stored_inputs_first",
    "turned",
    "turned_evidence",
]

_LEFT_ALONE = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)


_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)


def find_layers(
    model: nn.Module, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Parameter]:
    """`find_targets`, but without ``include`` only the weights of linear layers and convolutions.

    What is pruned while training by default: recurrent weights and bare parameters (position embeddings, class tokens)
    are left alone. The projections of attention and transformers' ``Conv1D`` are linear layers.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.positions = nn.Parameter(torch.zeros(16, 4))
    ...         self.head = nn.Linear(4, 2)
    >>> list(find_layers(Model()))
    ['head.weight']
    """
    targets = find_targets(model, include=include, exclude=exclude)
    if include is not None:
        return targets
    owners = _owners(model)
    layers = {
        name: weight for name, weight in targets.items() if any(_is_layer(m) for m in owners[identity_of(weight)])
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer or convolution to prune; name other weights with include=: "
            f"there are {', '.join(list(targets)[:5])}."
        )
    return layers


def left_alone(model: nn.Module, targets: Iterable[str]) -> dict[str, str]:
    """``{name: why}`` of the parameters that are not pruned: what they belong to, or that they were not chosen.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    >>> left_alone(model, find_targets(model))
    {'0.weight': 'Embedding', '1.bias': 'bias or other vector'}
    """
    chosen = set(targets)
    owners = _owners(model)
    reasons: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in chosen:
            continue
        kinds = [module for module in owners[identity_of(parameter)] if isinstance(module, _LEFT_ALONE)]
        if kinds:
            reasons[name] = type(kinds[0]).__name__
        elif parameter.dim() < 2:
            reasons[name] = "bias or other vector"
        elif any(_is_layer(module) for module in owners[identity_of(parameter)]):
            reasons[name] = "excluded"
        else:
            reasons[name] = f"neither linear nor convolution ({type(owners[identity_of(parameter)][0]).__name__})"
    return reasons


def turned(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The same, with those of the names transposed: patterns are defined on (outputs, inputs).

    >>> import torch
    >>> turned({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, ["a"])["a"].shape
    torch.Size([3, 2])
    """
    which = set(names)
    return {name: tensor.t() if name in which else tensor for name, tensor in tensors.items()}


def turned_evidence(evidence: Mapping[str, Mapping[str, Tensor]], names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """`turned` for all evidence of the weight's shape, or that broadcasts to it; a Gram matrix stays as it is."""
    which = set(names)
    return {
        name: {
            word: value.t() if name in which and word != "gram" and value.dim() == 2 else value
            for word, value in entry.items()
        }
        for name, entry in evidence.items()
    }


def stored_inputs_first(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names whose weights are stored (inputs, outputs): transformers' ``Conv1D``, as in GPT-2.

    >>> stored_inputs_first(nn.Sequential(nn.Linear(2, 3)), ["0.weight"])
    []
    """
    owners = _owners(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        name
        for name in names
        if any(
            type(module).__name__ == "Conv1D" and hasattr(module, "nf")
            for module in owners[identity_of(parameters[name])]
        )
        and parameters[name].dim() == 2
    ]


def find_targets(
    model: nn.Module, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Parameter]:
    """``{name: parameter}`` of the weights that pruning is for.

    By default every floating-point parameter of two or more dimensions, of any module, but for embeddings,
    normalizations and the magnitudes of weight normalization: the weights of linear, convolution, recurrent and
    attention layers, and bare parameters of modules of one's own. A tensor that is shared, as one Parameter or as two
    over the same memory, has the first of its names and is found once; if an embedding shares it, it is left alone.

    Args:
        model: any module; lazy modules must have been run once.
        include: globs over parameter names that replace the default (``"encoder.*.weight"``), so that embeddings can be
            asked for.
        exclude: globs that are left out of either.

    Raises:
        TypeError: it is no module.
        ValueError: a glob matches no parameter (close names are suggested), a chosen parameter is not initialized or
            not floating point, or nothing is left to prune.

    >>> list(find_targets(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))))
    ['1.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"weights are found in a module, not in a {type(model).__name__}. For a dict of tensors call "
            "make_masks(weights, ...) on those that are to be pruned, and apply_(weights, masks); for a directory of "
            "safetensors files, sparsify_checkpoint(source, out, ...)."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_names: dict[Hashable, str] = {}
    for name, parameter in parameters.items():
        first_names.setdefault(identity_of(parameter), name)
    left_alone = {
        identity_of(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, _LEFT_ALONE) or _is_weight_norm_magnitude(module, name)
    }
    included = matched(include, parameters)
    excluded = {identity_of(parameters[name]) for name in matched(exclude, parameters) or ()}
    chosen: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        same = identity_of(parameter)
        if same in excluded or first_names[same] in chosen:
            continue
        lazy = isinstance(parameter, nn.UninitializedParameter)
        if included is None:
            wanted = lazy or (parameter.is_floating_point() and parameter.dim() >= 2 and same not in left_alone)
        else:
            wanted = name in included
        if not wanted:
            continue
        if lazy:
            raise ValueError(f"{name} is not initialized; run the model once on an example batch before pruning.")
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}; only floating-point weights can be pruned.")
        chosen[first_names[same]] = parameter
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no weights to prune: by default floating-point parameters of two or more "
            "dimensions outside embeddings and normalizations; name others with include=."
        )
    return chosen


def _owners(model: nn.Module) -> dict[Hashable, list[nn.Module]]:
    """The modules that hold each parameter; of a parametrized one, the layer that it is a parametrization of."""
    owners: dict[Hashable, list[nn.Module]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        layer_path, found, _ = f".{path}".partition(".parametrizations.")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(identity_of(parameter), []).append(modules[layer_path[1:]] if found else module)
    return owners


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _LAYERS) or type(module).__name__ == "Conv1D"


def identity_of(parameter: nn.Parameter) -> Hashable:
    """Equal for one Parameter, and for Parameters that are one tensor in memory."""
    lazy = isinstance(parameter, nn.UninitializedParameter)
    if lazy or parameter.device.type == "meta" or parameter.numel() == 0 or hasattr(parameter, "placements"):
        return id(parameter)
    return parameter.device, parameter.dtype, parameter.data_ptr(), parameter.shape, parameter.stride()


def _is_weight_norm_magnitude(module: nn.Module, name: str) -> bool:
    """``original0`` of the parametrization, ``<name>_g`` of the older hook: a number an output."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return name == "original0" and type(module[0]).__name__ == "_WeightNorm"
    return name.endswith("_g") and f"{name[:-1]}v" in module._parameters


def matched(globs: str | Iterable[str] | None, names: Iterable[str]) -> set[str] | None:
    if globs is None:
        return None
    names = list(names)
    found: set[str] = set()
    for glob in [globs] if isinstance(globs, str) else globs:
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            close = difflib.get_close_matches(glob, names, n=3, cutoff=0.0)
            raise ValueError(f"no parameter matches {glob!r}; the closest names are {', '.join(close) or 'none'}.")
        found.update(matches)
    return found
