"""Which weights of a model are pruned, and what is left alone by default: one table, asked with a module or a name.

Law: no tensor is a target twice, and a glob that matches nothing is an error. A model and the directory that it is
saved in have the same targets: names decide in both, and a class only where a name says nothing. What looks like
something to leave alone is left alone: to prune too little costs a little size, to prune an embedding costs the model.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from secateur.support import is_sharded, matched, private

__all__ = [
    "KINDS",
    "Kind",
    "VECTORS",
    "check_lengths",
    "computed_weights",
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
        named: how its parameters are named, parametrized or not.
        beside_embeddings: how they are named in a model that has embeddings.

    >>> from secateur.targets import KINDS
    >>> head = next(kind for kind in KINDS if kind.reason == "output heads")
    >>> bool(head.named.search("lm_head.weight"))
    True
    """

    reason: str
    why: str
    modules: tuple[type[nn.Module], ...] = ()
    named: re.Pattern[str] = re.compile("(?!)")
    beside_embeddings: re.Pattern[str] = re.compile("(?!)")


# The first that fits is the reason; heads before embeddings because of GPT-NeoX's embed_out.
KINDS = (
    # A classifier's head, too, where it sits on a body that has embeddings: it is small, and was trained shortly upon a
    # body that had long been, so that it is the first that a common threshold empties; movement pruning, oBERT and oViT
    # leave it dense. A network without embeddings was trained as a whole: SNIP, RigL and STR prune its last layer, and
    # nine tenths of VGG are in its classifier. No head is what lies in a numbered block, such as a head of attention.
    Kind(
        "output heads",
        "A row is the score of one word or class, and no layer after it makes up for what it loses.",
        named=re.compile(r"(^|\.)(lm_heads?|embed_out|vocab_projector|shared_head)\."),
        beside_embeddings=re.compile(
            r"^([A-Za-z_]\w*\.)*?(([a-z0-9]+_)*heads?|classifier|pre_classifier|score|qa_outputs|cls|output_projection)\."
            r"|^(fc|output|proj_out|model\.output)\.weight$"
        ),
    ),
    Kind(
        "adapters",
        "The factors of a low rank are small, and were trained to correct the weight beside them.",
        named=re.compile(r"(^|\.)(lora|vera|oft|hada|lokr|adalora)_[A-Za-z0-9_]+(\.|$)"),
    ),
    # Of words, positions and patches; four names deep, so that a model which is called an embedder is none.
    Kind(
        "embeddings",
        "A row is read by itself: what it loses, its word or position has lost. All else rests on a patch's.",
        (nn.Embedding, nn.EmbeddingBag),
        re.compile(
            r"(^|\.)([A-Za-z0-9_]*embed[A-Za-z0-9_]*(\.[^.]+){0,3}|(wte|wpe|shared|relative_attention_bias)\.weight)$",
            re.IGNORECASE,
        ),
    ),
    Kind(
        "normalizations",
        "A factor for each feature: there is nothing to gain.",
        (nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm, *private.normalizations()),
        re.compile(r"(^|\.)([A-Za-z0-9_]*norm[0-9_a-z]*|ln_?[a-z0-9]+|bn[0-9]*)(\.[^.]+){1,2}$", re.IGNORECASE),
    ),
    Kind(
        "routers",
        "Small, and they choose the experts: an error sends a token elsewhere.",
        named=re.compile(r"(^|\.)(router|shared_expert_gate)(\.|$)"),
    ),
    Kind(
        "state matrices",
        "The logarithm of a decay, as in Mamba: 0 is a decay like others, and not nothing.",
        named=re.compile(r"(^|\.)A_logs?$"),
    ),
)
HEADS, EMBEDDINGS = (next(kind for kind in KINDS if kind.reason == word) for word in ("output heads", "embeddings"))
ROUTERS = "routers"
MAGNITUDES = "magnitudes of weight normalization"
VECTORS = "vectors and scalars"
NO_WEIGHTS = "not named *.weight"
_EXPERTS = re.compile("[a-z_]*experts")
_GATE = re.compile("gate|wg|[a-z_]*router")  # a router if there are experts beside it; else a layer like others
# of layers, recurrent layers and attention, and where a mask or a norm of weights is attached
_WEIGHTS = re.compile(r"(^|\.)((in|q|k|v)_proj_)?weight(_[ihr]+(_l[0-9]+)?(_reverse)?)?(_orig|_v)?$")
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.([^.]+)\.original[0-9]*$")


def find_layers(
    model: nn.Module, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Parameter]:
    """`find_targets`, but without ``include`` only the weights of linear layers and convolutions.

    What is pruned while training by default: recurrent weights and bare parameters (position embeddings, class tokens)
    are left alone. The projections of attention, transformers' ``Conv1D`` and classes that are called "Linear", such as
    torch_geometric's, are linear layers.

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

    What `kinds_by_name` leaves alone for its names (a tied one for any of them), and what no name tells: embeddings and
    normalizations by the class of their module, magnitudes of weight normalization, and the output head that
    transformers' ``get_output_embeddings`` gives.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.words, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    >>> kinds_within(Model())
    {'words.weight': 'embeddings', 'head.weight': 'output heads'}
    """
    kinds = _kinds(model)
    found = ((name, kinds.get(identity_of(each))) for name, each in model.named_parameters() if each.dim() >= 2)
    return {name: reason for name, reason in found if reason is not None}


def kinds_by_name(shapes: Mapping[str, tuple[int, ...]], embeddings: Iterable[str] = ()) -> dict[str, str]:
    """``{name: reason}`` of the tensors that are left alone for their names: what is named as `KINDS` says, and what is
    neither called a weight (``weight``, ``in_proj_weight``, ``weight_ih_l0``, …) nor a matrix for each of several
    experts: buffers, class tokens, tables of biases.

    Args:
        shapes: of all tensors of the model, by their names.
        embeddings: the names of those that are known to be embeddings, whatever they are called.

    >>> shapes = {"mlp.gate.weight": (4, 8), "mlp.experts.0.up.weight": (8, 8), "plain.gate.weight": (8, 8)}
    >>> kinds_by_name({**shapes, "lm_head.weight": (9, 8), "rnn.weight_ih_l0": (8, 8), "class_token": (1, 8)})
    {'mlp.gate.weight': 'routers', 'lm_head.weight': 'output heads', 'class_token': 'not named *.weight'}

    A classifier's head is one where there are embeddings:

    >>> kinds_by_name({"conv1.weight": (8, 3, 3, 3), "classifier.weight": (2, 8)})
    {}
    >>> kinds_by_name({"patch_embed.weight": (8, 3, 4, 4), "classifier.weight": (2, 8)})
    {'patch_embed.weight': 'embeddings', 'classifier.weight': 'output heads'}
    """
    plain = {name: _PARAMETRIZED.sub(r"\1\2", name) for name in shapes}
    embedded = {name for name in shapes if EMBEDDINGS.named.search(plain[name])}.union(embeddings)
    around = {path for name in embedded for path in _paths(plain.get(name, name))}
    beside = _beside_experts(shapes)
    reasons: dict[str, str] = {}
    for name, shape in shapes.items():
        called = plain[name]
        if embedded and _in_a_head(called, around):
            reasons[name] = HEADS.reason
        elif kind := next((kind for kind in KINDS if kind.named.search(called)), None):
            reasons[name] = kind.reason
        elif _is_router(called, beside):
            reasons[name] = ROUTERS
        elif name.endswith("original0") and called != name and math.prod(shape) == max(shape, default=1):
            reasons[name] = MAGNITUDES
        elif len(shape) >= 2 and not _WEIGHTS.search(called) and not _is_fused(name, shape):
            reasons[name] = NO_WEIGHTS
    return reasons


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    """Whether it is a matrix for each of several experts."""
    return len(shape) == 3 and is_expert(name) and not name.endswith("bias")


def _paths(name: str) -> Iterator[str]:
    """The modules that a parameter is in, from the outermost, each with its dot."""
    parts = name.split(".")[:-1]
    yield from ("".join(f"{part}." for part in parts[:at]) for at in range(1, len(parts) + 1))


def _in_a_head(name: str, around_embeddings: set[str]) -> bool:
    """Whether a parameter beside embeddings is in a module that is called a head, and is no whole model."""
    named = HEADS.beside_embeddings
    return bool(named.fullmatch(name)) or any(
        named.fullmatch(path) and path not in around_embeddings for path in _paths(name)
    )


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
    reasons: dict[Hashable, str] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if _is_weight_norm_magnitude(module, name):
                reasons[identity_of(parameter)] = MAGNITUDES
    for same, owners in _owners(model).items():
        kind = next((kind for kind in KINDS if any(isinstance(module, kind.modules) for module in owners)), None)
        if kind is not None:
            reasons.setdefault(same, kind.reason)
    embeddings = []  # where they are: a head that is tied to one is not
    for path, module in model.named_modules():
        if isinstance(module, EMBEDDINGS.modules):
            embeddings.append(f"{path}.weight")
        given = _output_embeddings(module)
        for parameter in () if given is None else given.parameters(recurse=False):
            reasons.setdefault(identity_of(parameter), HEADS.reason)
    shapes = {name: () if is_lazy(each) else tuple(each.shape) for name, each in parameters.items()}
    for name, reason in kinds_by_name(shapes, embeddings).items():
        reasons.setdefault(identity_of(parameters[name]), reason)
    return reasons


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
    """`turned` for all evidence of the weight's shape, or that broadcasts to it; a Gram matrix stays as it is.

    >>> import torch
    >>> gathered = {"c_fc.weight": {"grad": torch.zeros(4, 6), "gram": torch.eye(4)}}
    >>> turned_evidence(gathered, ["c_fc.weight"])["c_fc.weight"]["grad"].shape
    torch.Size([6, 4])
    """
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
    matrices = {name: each for name, each in model.named_parameters(remove_duplicate=False) if each.dim() == 2}
    return [
        name
        for name in names
        if name in matrices
        and any(
            type(module).__name__ == "Conv1D" and hasattr(module, "nf")
            for module in owners[identity_of(matrices[name])]
        )
    ]


def find_targets(
    model: nn.Module, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
) -> dict[str, nn.Parameter]:
    """``{name: parameter}`` of the weights that pruning is for.

    By default every floating-point parameter of two or more dimensions, of any module, but for what `kinds_within`
    leaves alone (embeddings, output heads, normalizations, routers, adapters, what is not called a weight): the weights
    of linear, convolution, recurrent and attention layers, and those of custom modules. A tensor that is shared,
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
            "safetensors files, sparsify(DIR, ..., out=OUT)."
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
        left = [
            f"{name} ({kinds[identity_of(each)]})" for name, each in parameters.items() if identity_of(each) in kinds
        ]
        raise ValueError(
            f"{type(model).__name__} has no weights to prune: by default floating-point parameters of two or more "
            "dimensions outside embeddings, output heads, normalizations, routers and adapters; name others with "
            f"include={': there are ' if left else ''}{', '.join(left[:3])}."
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
    known = isinstance(module, nn.Linear | nn.MultiheadAttention) or private.is_convolution(module)
    return known or type(module).__name__ == "Conv1D" or any("Linear" in each.__name__ for each in type(module).__mro__)


def identity_of(tensor: Tensor) -> Hashable:
    """Equal for one tensor, and for tensors that are the same memory, seen in the same way.

    >>> import torch
    >>> weight = torch.ones(2, 3)
    >>> identity_of(weight) == identity_of(nn.Parameter(weight)), identity_of(weight) == identity_of(weight.t())
    (True, False)
    """
    if is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0 or is_sharded(tensor):
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


_PLAIN = (
    "make them plain first, by torch.nn.utils.parametrize.remove_parametrizations(module, name) or "
    "torch.nn.utils.remove_weight_norm(module)"
)


def computed_weights(model: nn.Module) -> str:
    """What to do with a model whose weights are computed at every pass; nothing of others.

    >>> computed_weights(nn.Linear(2, 2))
    ''
    >>> computed_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))).partition(":")[0]
    ' 1 of its weights, such as weight, are computed at every pass, as by weight normalization'
    """
    found = [
        full
        for path, module in model.named_modules()
        for name in (*getattr(module, "parametrizations", ()), *_magnitudes(module))
        if not isinstance(module, nn.utils.parametrize.ParametrizationList)
        and (full := f"{path}.{name}".lstrip(".").removesuffix("_g"))
    ]
    if not found:
        return ""
    return (
        f" {len(found)} of its weights, such as {found[0]}, are computed at every pass, as by weight normalization: "
        f"{_PLAIN}; the model computes the same."
    )


def check_lengths(model_or_shapes: nn.Module | Mapping[str, Sequence[int]], masks: Mapping[str, Tensor]) -> None:
    """`ValueError` where masks leave nothing of an output that weight normalization divides by its length.

    Args:
        model_or_shapes: a module; or of all tensors of a model their shapes, by which names tell what is normalized.
        masks: ``{name: mask}`` of some of them.

    >>> import torch
    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> name = "parametrizations.weight.original1"
    >>> check_lengths(layer, {name: torch.tensor([[True, False], [False, True]])})
    >>> try:
    ...     check_lengths(layer, {name: torch.tensor([[True, True], [False, False]])})
    ... except ValueError as error:
    ...     print(str(error).partition(",")[0])
    parametrizations.weight.original1: of 1 outputs nothing would stay
    """
    if isinstance(model_or_shapes, nn.Module):
        magnitudes: Callable[[str], Sequence[int] | None] = _magnitudes_in(model_or_shapes).get
    else:
        magnitudes = functools.partial(_magnitudes_by_name, model_or_shapes)
    for direction, mask in masks.items():
        shape = magnitudes(direction)
        if shape is None:
            continue
        whole = [at for at in range(mask.dim()) if not shape or shape[at] == 1]
        if gone := int((mask.count_nonzero(dim=whole) == 0).sum()):
            raise ValueError(
                f"{direction}: of {gone} outputs nothing would stay, and weight normalization divides by their "
                f"lengths: the model would compute NaN. Ask for less, or {_PLAIN}."
            )


def _magnitudes_in(model: nn.Module) -> dict[str, Sequence[int]]:
    """``{direction: shape of its magnitudes}``."""
    return {
        f"{path}.{'original1' if name == 'original0' else f'{name[:-1]}v'}".lstrip("."): module.get_parameter(
            name
        ).shape
        for path, module in model.named_modules()
        for name in _magnitudes(module)
    }


def _magnitudes_by_name(shapes: Mapping[str, Sequence[int]], name: str) -> Sequence[int] | None:
    """The shape of the magnitudes of a direction; None of what is no direction."""
    other = re.sub("original1$", "original0", re.sub("_v$", "_g", name))
    shape = shapes.get(other) if other != name else None
    if shape is None or len(shape) not in (0, len(shapes[name])) or math.prod(shape) != max(shape, default=1):
        return None
    return shape


def _magnitudes(module: nn.Module) -> list[str]:
    """The names of its magnitudes of weight normalization."""
    return [name for name in private.parameters_of(module) if _is_weight_norm_magnitude(module, name)]


def _is_weight_norm_magnitude(module: nn.Module, name: str) -> bool:
    """``original0`` of the parametrization, ``<name>_g`` of the older hook: a number an output."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return name == "original0" and type(module[0]).__name__ == "_WeightNorm"
    return name.endswith("_g") and f"{name[:-1]}v" in private.parameters_of(module)
