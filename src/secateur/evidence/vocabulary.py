"""The words for what data says about weights, and which of them a criterion names.

Law: a criterion is given exactly what it names; an unknown word is an error before anything runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["Evidence", "VOCABULARY", "checked_words", "needs"]

Evidence = dict[str, dict[str, Tensor]]

VOCABULARY = {
    "grad": "the loss's gradient, the mean over batches, of the weight's shape",
    "grad_sq": "the gradient's square, the mean over batches, of the weight's shape; batches of one example give the "
    "diagonal of the empirical Fisher matrix",
    "hessian_grad": "Hg, the Hessian of the mean loss times its gradient g, of the weight's shape",
    "flow": "the gradient of the summed outputs with respect to |w| in the network of absolute values, at an input of "
    "ones, in float64, of the weight's shape",
    "movement": "the sum over training steps of -w * gradient, of the weight's shape; gathered by a Pruner",
    "input_norm": "the L2 norm of each input feature over all tokens, broadcastable to the weight",
    "input_mean": "the mean of each input feature over all tokens, broadcastable to the weight",
    "input_var": "the variance of each input feature over all tokens (divided by their number), broadcastable to the "
    "weight",
    "output_norm": "the L2 norm of each output feature over all tokens, broadcastable to the weight",
    "gram": "X'X of the inputs X over all tokens, (inputs, inputs); of a convolution an input is one entry of a patch",
}


def needs(criterion: Callable[..., Any]) -> tuple[str, ...]:
    """The evidence that a criterion names: its keyword parameters without a default.

    Raises:
        TypeError: a name is not in the vocabulary; the message lists it.

    >>> def wanda(weight, *, input_norm):
    ...     return weight.abs() * input_norm
    >>> needs(wanda)
    ('input_norm',)
    """
    try:
        parameters = inspect.signature(criterion).parameters.values()
    except ValueError:  # built-in functions such as torch.abs show no signature
        return ()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return checked_words(named, _name(criterion))


def checked_words(words: Iterable[str], who: str) -> tuple[str, ...]:
    """The words, each once; ``TypeError`` for one that is not in the vocabulary."""
    words = tuple(dict.fromkeys(words))
    unknown = [word for word in words if word not in VOCABULARY]
    if unknown:
        listed = "; ".join(f"{name}: {meaning}" for name, meaning in VOCABULARY.items())
        raise TypeError(f"{who} asks for evidence that nobody collects: {', '.join(unknown)}. There is {listed}.")
    return words


def _name(criterion: Any) -> str:
    while isinstance(criterion, functools.partial):
        criterion = criterion.func
    return str(getattr(criterion, "__name__", criterion))
