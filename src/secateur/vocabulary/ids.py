"""The fields of configurations that name tokens by their numbers, and these fields under new numbers.

Law: a number that no token of the model has, such as -1, stays what it is; nothing else in a configuration changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["numbers_in", "renumbered"]

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
