"""Which dimensions of a model's tensors count tokens: those that grow where the configuration says more tokens. The
fields of configurations that name tokens by their numbers, and these fields under new numbers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import unwrapped

# ---- Which dimensions of a model's tensors count tokens: those that grow where the configuration says more tokens.
#
# Law: no table of names and no equal length decides it. A model of the same class is built without weights for a
# longer vocabulary, and what became longer by as much is the vocabulary's, in the embedding, the head, a bias or a
# buffer.

Place = tuple[str, ...]
_MORE = 128  # tokens; a multiple of what sizes are rounded to


@dataclass(frozen=True)
class Axes:
    """The dimensions, fields and attributes of a model that count tokens.

    Attributes:
        rows: how many tokens the model knows.
        places: the fields of the configuration that say so.
        tensors: ``{name: dimension}`` of tensors, each under all of its names.
        attributes: ``(module, attribute)`` of numbers that modules keep of it.
        shapes: of all tensors of the model, by name.
    """

    rows: int
    places: tuple[Place, ...]
    tensors: Mapping[str, int]
    attributes: tuple[tuple[str, str], ...]
    shapes: Mapping[str, tuple[int, ...]]


def axes_of(model: Any, build: Callable[[Any], nn.Module]) -> Axes:
    """Finds what counts tokens in a model; ``build(config)`` makes a model of a configuration, without weights.

    Raises:
        ValueError: no embedding of tokens, or no field of the configuration that says how many there are.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> config = BertConfig(vocab_size=48, hidden_size=48, num_hidden_layers=1, num_attention_heads=2)
    >>> def build(config):
    ...     with torch.device("meta"):
    ...         return BertForMaskedLM(config)
    >>> found = axes_of(build(config), build)
    >>> found.places, sorted(found.tensors.items())[:2]
    ((('vocab_size',),), [('bert.embeddings.word_embeddings.weight', 0), ('cls.predictions.bias', 0)])
    """
    name = type(model).__name__
    embedding = embedding_of(model)
    rows = embedding.shape[0]
    mine = _tensors(model)
    heads = {"input": _names_of(mine, embedding)}
    output = getattr(_asked(model, "get_output_embeddings"), "weight", None)
    if isinstance(output, Tensor) and output.shape[:1] == (rows,):
        heads["output"] = _names_of(mine, output)
    tried: dict[Place, nn.Module] = {}
    for place, value in _integers(model.config):
        if value == rows:
            grown = _built(model.config, [place], rows + _MORE, build)
            if grown is not None and any(_grew(mine, grown, names) for names in heads.values()):
                tried[place] = grown
    places = list(tried)
    grown = tried[places[0]] if len(places) == 1 else None
    if grown is None or not all(_grew(mine, grown, names) for names in heads.values()):
        named = [place for place, value in _integers(model.config) if value == rows and "vocab" in place[-1]]
        places = list(dict.fromkeys([*places, *named]))
        grown = _built(model.config, places, rows + _MORE, build)
    if not places or grown is None or not all(_grew(mine, grown, names) for names in heads.values()):
        raise ValueError(
            f"no field of {name}'s configuration says that it knows {rows:,} tokens, so none can say that they are "
            "fewer; resize_token_embeddings, or a configuration that says it, comes first."
        )
    _check_others(model, places, rows, build)
    theirs = _tensors(grown)
    if mine.keys() != theirs.keys():
        raise ValueError(f"{name} has other tensors where its vocabulary is longer; none is left out of it.")
    tensors: dict[str, int] = {}
    for key, tensor in mine.items():
        dims = [at for at, (one, other) in enumerate(zip(tensor.shape, theirs[key].shape, strict=True)) if one != other]
        if not dims:
            continue
        (at, *others) = dims
        if others or theirs[key].shape[at] != rows + _MORE or tensor.shape[at] != rows:
            raise ValueError(
                f"{key} of {name} has shape {tuple(tensor.shape)}, and {tuple(theirs[key].shape)} for {_MORE} tokens "
                "more: which of its entries is which token's is not known."
            )
        tensors[key] = at
    return Axes(
        rows,
        tuple(places),
        tensors,
        tuple(_grown_numbers(model, grown, rows)),
        {key: tuple(tensor.shape) for key, tensor in mine.items()},
    )


def _check_others(model: Any, places: Sequence[Place], rows: int, build: Callable[[Any], nn.Module]) -> None:
    """Refuses a second table of tokens, of another length: its rows are other tokens', and which is not known."""
    around = {place[:-1] for place in places}
    for place, value in _integers(model.config):
        if place[:-1] not in around or place in places or "vocab" not in place[-1] or value <= rows // 2:
            continue
        grown = _built(model.config, [place], value + _MORE, build)
        for path, module in () if grown is None else grown.named_modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == value + _MORE:
                raise ValueError(
                    f"{type(model).__name__} has a second table of tokens, {path}, of which {'.'.join(place)} says "
                    f"that it has {value:,} rows; which of them are whose is not known."
                )


def embedding_of(model: Any) -> Tensor:
    """The rows of tokens that a model begins with."""
    found = getattr(_asked(model, "get_input_embeddings"), "weight", None)
    if not isinstance(found, Tensor) or found.dim() != 2 or not hasattr(model, "config"):
        raise ValueError(
            f"{type(model).__name__} says of no embedding that tokens enter by it, as models of transformers do with "
            "get_input_embeddings; pass the part of it that is one."
        )
    return found


def _asked(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):  # a model of none
        return None


def _names_of(tensors: Mapping[str, Tensor], tensor: Tensor) -> list[str]:
    return [name for name, each in tensors.items() if each is tensor]


def _grew(mine: Mapping[str, Tensor], grown: nn.Module, names: Sequence[str]) -> bool:
    theirs = _tensors(grown)
    return all(
        name in theirs and theirs[name].shape == (mine[name].shape[0] + _MORE, *mine[name].shape[1:]) for name in names
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def parts_in(config: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """A configuration and those inside of it, each with where it is."""
    yield place, config
    for key, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and not key.startswith("_"):
            yield from parts_in(value, (*place, key))


def _integers(config: Any) -> Iterator[tuple[Place, int]]:
    for place, part in parts_in(config):
        for key, value in vars(part).items():
            if type(value) is int and not key.startswith("_"):
                yield (*place, key), value


def with_field(config: Any, place: Place, value: Any) -> None:
    """Sets a field of a configuration, or of one inside of it."""
    for key in place[:-1]:
        config = getattr(config, key)
    setattr(config, place[-1], value)


def _built(config: Any, places: Sequence[Place], value: int, build: Callable[[Any], nn.Module]) -> nn.Module | None:
    changed = copy.deepcopy(config)
    try:
        for place in places:
            with_field(changed, place, value)
        return build(changed)
    except Exception:  # whatever a configuration or a model raises for values that do not fit each other
        return None


def _grown_numbers(model: nn.Module, grown: nn.Module, rows: int) -> Iterator[tuple[str, str]]:
    theirs = dict(grown.named_modules())
    for path, module in unwrapped(model).named_modules():
        if path in theirs:
            for key, value in vars(module).items():
                if type(value) is int and value == rows and vars(theirs[path]).get(key) == rows + _MORE:
                    yield path, key


def builder(kind: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Models of a class on the meta device."""

    def build(config: Any) -> nn.Module:
        with torch.device("meta"):
            return kind(config)

    return build


# ---- The fields of configurations that name tokens by their numbers, and these fields under new numbers.
#
# Law: a number that no token of the model has, such as -1, stays what it is; nothing else in a configuration changes.

_ONE_OR_MANY = re.compile(
    r"(^|_)(tokens?|words)_(ids?|index)$|^(bos|eos|pad|unk|mask)_index$|^(begin_)?suppress_tokens$"
)
_OF_NAMES = re.compile(r"^(lang|task)_to_id$")  # {language: its token}
_SECOND = "forced_decoder_ids"  # [[place, token], …]
_FIRST = "sequence_bias"  # [[[token, …], bias], …]
_BY_TOKEN = "added_tokens_decoder"  # {"token": …}


def numbers_in(values: Mapping[str, Any]) -> set[int]:
    """All numbers of tokens that a configuration names, also in objects inside of it.

    >>> sorted(numbers_in({"eos_token_id": [2, 7], "vocab_size": 9, "text": {"bad_words_ids": [[4, 5], [0]]}}))
    [0, 2, 4, 5, 7]
    """
    found: set[int] = set()

    def noted(number: int) -> int:
        found.add(number)
        return number

    _walked(values, noted)
    return found


def renumbered(values: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """The same under the new numbers, where there are any.

    >>> renumbered({"eos_token_id": [2, -1], "forced_decoder_ids": [[2, 7]]}, {2: 1, 7: 3})
    {'eos_token_id': [1, -1], 'forced_decoder_ids': [[2, 3]]}
    """
    return _walked(values, lambda number: new.get(number, number))


def _walked(values: Mapping[str, Any], name: Callable[[int], int]) -> dict[str, Any]:
    return dict(_items(values, name))


def _items(values: Mapping[str, Any], name: Callable[[int], int]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == _SECOND and isinstance(value, list):
            yield (
                key,
                [
                    [each[0], _named(each[1], name)] if isinstance(each, list) and len(each) == 2 else each
                    for each in value
                ],
            )
        elif key == _FIRST and isinstance(value, list):
            yield (
                key,
                [[_named(each[0], name), *each[1:]] if isinstance(each, list) and each else each for each in value],
            )
        elif key == _BY_TOKEN and isinstance(value, Mapping):
            yield key, {str(name(int(each))) if str(each).isdigit() else each: inner for each, inner in value.items()}
        elif _ONE_OR_MANY.search(str(key)):
            yield key, _named(value, name)
        elif _OF_NAMES.search(str(key)) and isinstance(value, Mapping):
            yield key, {each: _named(number, name) for each, number in value.items()}
        elif isinstance(value, Mapping):
            yield key, _walked(value, name)
        else:
            yield key, value


def _named(value: Any, name: Callable[[int], int]) -> Any:
    if type(value) is int:
        return name(value)
    return [_named(each, name) for each in value] if isinstance(value, list | tuple) else value
