"""Work on parts of tensors in threads.

Law: results come in the order of the parts, and only a few parts are taken ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

_Item = TypeVar("_Item")


_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], parts: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """``work(part)`` for each part, in order; only a few parts are taken ahead, so they may be large.

    >>> list(in_threads(abs, range(-3, 0), threads=2))
    [3, 2, 1]
    """
    if threads <= 1:
        yield from map(work, parts)
        return
    ahead: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for part in parts:
                ahead.append(pool.submit(work, part))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
