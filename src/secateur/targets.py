"""Which weights of a model are pruned, and what is left alone by default: one table, asked with a module or a name.

Law: no tensor is a target twice, and a glob that matches nothing is an error. Where there is a module its class
decides, and a name only where no class can tell. Where there is only a name, what looks like something to leave alone
is left alone: to prune too little costs a little size, to prune an embedding costs the model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

__all__ = [
    "KINDS",
    "Kind",
    "VECTORS",
    "find_layers",
    "find_targets",
    "identity_of",
    "is_expert",
    "kinds_by_name",
    "kinds_within",
    "left_alone",
    "matched",
    "stored_inputs_first",
    "turned",
    "turned_evidence",
]


@dataclass(frozen=True)
class Kind:
    """What is left alone unless it is asked for.

    Attributes:
        reason: the word for it in records and tables.
        why: in a sentence.
        modules: the classes whose parameters it is.
        named: how its parameters are named, where there is only a name.
        by_name: whether the name decides beside a module, too, since no class tells.
    """

    reason: str
    why: str
    modules: tuple[type[nn.Module], ...] = ()
    named: re.Pattern[str] = re.compile("(?!)")
    by_name: bool = False


# The first that fits is the reason; heads before embeddings because of GPT-NeoX's embed_out.
KINDS = (
    Kind(
        "output heads",
        "A row is one word's score, and no layer after it makes up for what it loses.",
        named=re.compile(
            r"(^|\.)(([a-z0-9]+_)*heads?|embed_out|classifier|score|qa_outputs|cls|vocab_projector|output_projection"
            r"|pre_classifier)\.|^(fc|output|model\.output)\.weight$"
        ),
    ),
    Kind(
        "adapters",
        "The factors of a low rank are small, and were trained to correct the weight beside them.",
        named=re.compile(r"(^|\.)(lora|vera|oft|hada|lokr|adalora)_[A-Za-z0-9_]+(\.|$)"),
        by_name=True,
    ),
    Kind(
        "embeddings",
        "A row is read by itself: what it loses, its word or position has lost.",
        (nn.Embedding, nn.EmbeddingBag),
        re.compile(
            r"(^|\.)(wte|wpe|shared|relative_attention_bias|[A-Za-z0-9_]*embed[A-Za-z0-9_]*)(\.|$)", re.IGNORECASE
        ),
    ),
    Kind(
        "normalizations",
        "A factor for each feature: there is nothing to gain.",
        (
            nn.GroupNorm,
            nn.LayerNorm,
            nn.LocalResponseNorm,
            nn.RMSNorm,
            nn.modules.batchnorm._NormBase,
        ),
        re.compile(r"(^|\.)([A-Za-z0-9_]*norm[0-9_a-z]*|ln_?[a-z0-9]+|bn[0-9]*)\.", re.IGNORECASE),
    ),
    Kind(
        "routers",
        "Small, and they choose the experts: an error sends a token elsewhere.",
        named=re.compile(r"(^|\.)(router|shared_expert_gate)(\.|$)"),
        by_name=True,
    ),
    Kind(
        "state matrices",
        "The logarithm of a decay, as in Mamba: 0 is a decay like others, and not nothing.",
        named=re.compile(r"(^|\.)A_logs?$"),
        by_name=True,
    ),
)
HEADS, EMBEDDINGS = (next(kind for kind in KINDS if kind.reason == word) for word in ("output heads", "embeddings"))
ROUTERS = "routers"
MAGNITUDES = "magnitudes of weight normalization"
VECTORS = "vectors and scalars"
_EXPERTS = re.compile("[a-z_]*experts")
_GATE = re.compile("gate|wg|[a-z_]*router")  # a router if there are experts beside it; else a layer like others
_PRUNABLE_NAMES = re.compile(r"(^|\.)(weight|in_proj_weight)$")

_OF_A_KIND = tuple(each for kind in KINDS for each in kind.modules)
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
    {'0.weight': 'embeddings', '1.bias': 'vectors and scalars'}
    """
    chosen = set(targets)
    owners = _owners(model)
    kinds = _kinds(model)
    reasons: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in chosen:
            continue
        same = identity_of(parameter)
        if same in kinds:
            reasons[name] = kinds[same]
        elif parameter.dim() < 2:
            reasons[name] = VECTORS
        elif any(_is_layer(module) for module in owners[same]):
            reasons[name] = "excluded"
        else:
            reasons[name] = f"neither linear nor convolution ({type(owners[same][0]).__name__})"
    return reasons


def kinds_within(model: nn.Module) -> dict[str, str]:
    """``{name: reason}`` of the matrices that are left alone for what they are, under the first of their names.

    Embeddings, normalizations and magnitudes of weight normalization by the class of the module; routers, adapters and
    state matrices by their names, and bare parameters that are called embeddings. An output head is what transformers'
    ``get_output_embeddings`` gives, or a linear layer that is called one and has an output for each row of an
    embedding; and what lies beside it in a module that is called one. A classifier's last layer is a layer like others.

    >>> class Model(nn.Module):
    ...     def __init__(self, classes):
    ...         super().__init__()
    ...         self.words, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, classes)
    >>> kinds_within(Model(9))
    {'words.weight': 'embeddings', 'head.weight': 'output heads'}
    >>> kinds_within(Model(2))
    {'words.weight': 'embeddings'}
    """
    kinds = _kinds(model)
    found = ((name, kinds.get(identity_of(each))) for name, each in model.named_parameters() if each.dim() >= 2)
    return {name: reason for name, reason in found if reason is not None}


def kinds_by_name(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """``{name: reason}`` of the tensors that are left alone for their names, where there are only names and shapes.

    Everything that `kinds_within` leaves alone and, since no module says what it is, what is named like it:
    classifiers, convolutions that embed patches, linear layers of a normalization. And what is neither named
    ``*.weight`` (or ``in_proj_weight``) nor a matrix for each of several experts.

    >>> shapes = {"mlp.gate.weight": (4, 8), "mlp.experts.0.up.weight": (8, 8), "plain.gate.weight": (8, 8)}
    >>> kinds_by_name({**shapes, "score.weight": (2, 8), "rnn.weight_ih_l0": (8, 8)})
    {'mlp.gate.weight': 'routers', 'score.weight': 'output heads', 'rnn.weight_ih_l0': 'not named *.weight'}
    """
    beside = _beside_experts(shapes)
    reasons: dict[str, str] = {}
    for name, shape in shapes.items():
        reason = next((kind.reason for kind in KINDS if kind.named.search(name)), None)
        if reason is None and _is_router(name, beside):
            reason = ROUTERS
        fused = len(shape) == 3 and is_expert(name) and not name.endswith("bias")
        if reason is None and not fused and not _PRUNABLE_NAMES.search(name):
            reason = "not named *.weight"
        if reason is not None:
            reasons[name] = reason
    return reasons


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one of several experts.

    >>> is_expert("mlp.experts.3.up_proj.weight"), is_expert("mlp.shared_expert.up_proj.weight")
    (True, False)
    """
    return any(_EXPERTS.fullmatch(part) for part in name.split("."))


def _beside_experts(names: Iterable[str]) -> set[str]:
    """The paths of modules, each with its dot, that have experts."""
    found = set()
    for name in names:
        parts = name.split(".")
        found |= {
            "".join(f"{part}." for part in parts[:at]) for at, part in enumerate(parts) if _EXPERTS.fullmatch(part)
        }
    return found


def _is_router(name: str, beside_experts: set[str]) -> bool:
    at = 0
    for part in name.split(".")[:-1]:
        if _GATE.fullmatch(part) and name[:at] in beside_experts:
            return True
        at += len(part) + 1
    return False


def _kinds(model: nn.Module) -> dict[Hashable, str]:
    """The reasons of `kinds_within`, by the identity of the parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners = _owners(model)
    heads = tuple(_heads(model))
    beside = _beside_experts(parameters)
    reasons: dict[Hashable, str] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if _is_weight_norm_magnitude(module, name):
                reasons[identity_of(parameter)] = MAGNITUDES
    for name, parameter in parameters.items():
        same = identity_of(parameter)
        bare = not any(_is_layer(module) or isinstance(module, _OF_A_KIND) for module in owners[same])
        for kind in KINDS:
            if (
                any(isinstance(module, kind.modules) for module in owners[same])
                or (kind is HEADS and name.startswith(heads))
                or (kind.by_name and kind.named.search(name))
                or (kind is EMBEDDINGS and bare and kind.named.search(name))
                or (kind.reason == ROUTERS and _is_router(name, beside))
            ):
                reasons.setdefault(same, kind.reason)
    return reasons


def _heads(model: nn.Module) -> Iterator[str]:
    """The paths, each with its dot, of the modules that score a vocabulary."""
    modules = dict(model.named_modules())
    words = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    given = {id(_output_embeddings(module)) for module in modules.values()} - {id(None)}
    for path, module in modules.items():
        outputs = getattr(module, "nf", getattr(module, "out_features", None)) if _is_layer(module) else None
        called = HEADS.named.search(f"{path}.") or HEADS.named.search(f"{path}.weight")
        if path and (id(module) in given or (called and outputs in words)):
            parts = path.split(".")
            around = [".".join(parts[:at]) for at, part in enumerate(parts, 1) if HEADS.named.search(f"{part}.")]
            yield next((f"{each}." for each in around if not _holds_words(modules[each])), f"{path}.")


def _holds_words(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Embedding) for each in module.modules())


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    """Of a model of transformers the layer that scores its vocabulary, if it has one."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        found = ask() if callable(ask) else None
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) else None


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

    By default every floating-point parameter of two or more dimensions, of any module, but for what `kinds_within`
    leaves alone (embeddings, output heads over a vocabulary, normalizations, routers, adapters): the weights of linear,
    convolution, recurrent and attention layers, and bare parameters of modules of one's own. A tensor that is shared,
    as one Parameter or as two over the same memory, has the first of its names and is found once; if an embedding
    shares it, it is left alone.

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
    kinds = _kinds(model) if include is None else {}
    included = matched(include, parameters)
    excluded = {identity_of(parameters[name]) for name in matched(exclude, parameters) or ()}
    chosen: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        same = identity_of(parameter)
        if same in excluded or first_names[same] in chosen:
            continue
        lazy = isinstance(parameter, nn.UninitializedParameter)
        if included is None:
            wanted = lazy or (parameter.is_floating_point() and parameter.dim() >= 2 and same not in kinds)
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
            "dimensions outside embeddings, output heads, normalizations, routers and adapters; name others with "
            "include=."
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
    """The names that one of the globs matches; None for no globs. A glob that matches nothing is a ValueError."""
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
