"""Tensors by name that are read or made on every access, and held by nobody.

Law: asked for its names, how many they are, or whether it is equal, such a mapping reads no tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

__all__ = ["LazyTensors"]


class LazyTensors(Mapping[str, Tensor]):
    """``{name: tensor}``: a class made from it says which names there are, and how one's tensor is read.

    `Mapping`'s own ``in`` would read a tensor, and its ``==`` all of them: here one is equal to itself.

    >>> import torch
    >>> class Zeros(LazyTensors):
    ...     known = ("a", "b")
    ...     def __getitem__(self, name):
    ...         return torch.zeros(1)
    >>> zeros = Zeros()
    >>> list(zeros), "b" in zeros, zeros == Zeros()
    (['a', 'b'], True, False)
    """

    @property
    @abstractmethod
    def known(self) -> Collection[str]:
        """The names, in order; a mapping or a set answers ``in`` at once."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
