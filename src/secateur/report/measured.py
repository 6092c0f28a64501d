"""What a model weighs and takes, before and after; what it has to multiply; on what it ran.

Law: both sides run in one process, in turns, on the same inputs; nothing is worked out from counts.
"""

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.support import (
    Column,
    Table,
    alternating,
    bytes_text,
    in_mode,
    private,
    processor,
    ratio,
    ratios,
    run_example,
)
from secateur.version import __version__

ROUNDS, SECONDS = 9, 1.0  # so many at least, and more of what is fast


@dataclasses.dataclass(frozen=True)
class Timed:
    """A model before and after, measured.

    Attributes:
        call: what one call is, in words, such as "1 × 32 tokens".
        nbytes: ``(before, after)``, of parameters and buffers in memory.
        before, after: seconds of one call, in each of the rounds.
        threads: that torch ran in.

    >>> timed = Timed("the example", (400, 100), [0.002, 0.002, 0.003], [0.001, 0.001, 0.0015], 1)
    >>> timed.times_faster, timed.table().title
    (2.0, 'Before and after, measured')
    """

    call: str
    nbytes: tuple[int, int]
    before: Sequence[float]
    after: Sequence[float]
    threads: int

    @property
    def times_faster(self) -> float:
        """The median of the rounds' ratios."""
        return ratio([*self.after], [*self.before])

    def line(self) -> str:
        """As it is said in a sentence."""
        each = ratios([*self.after], [*self.before])
        was, now = (f"{1000 * statistics.median(times):.3g} ms" for times in (self.before, self.after))
        rounds = f"medians of {len(each)} rounds, in turns, {self.threads} thread{'s' * (self.threads > 1)}"
        won = sum(faster > 1 for faster in each)
        return (
            f"Measured: {self.call} took {was} and takes {now} ({rounds}). It was faster in {won} of them: "
            f"{self.times_faster:.2f} times in the middle one, {min(each):.2f} to {max(each):.2f} in all."
        )

    def table(self) -> Table:
        """Bytes and milliseconds, a row each, with a bar for what is left."""
        rows: list[tuple[str, float, float]] = [("bytes in memory", *self.nbytes)]
        for word, which in (("median", statistics.median), ("fastest round", min), ("slowest round", max)):
            before, after = (1000 * which(times) for times in (self.before, self.after))
            rows.append((f"{self.call}: ms, {word}", before, after))

        def shown(value: float) -> str:
            return bytes_text(value) if isinstance(value, int) else f"{value:.3g}"

        return Table.of(
            "measured",
            rows,
            Column.name("What"),
            Column("Before", show=shown, side="right"),
            Column("After", show=shown, side="right"),
            Column.portion("Left", lambda row: row[2] / row[1] if row[1] else None),
            title="Before and after, measured",
        )


def before_and_after(dense: nn.Module, model: nn.Module, example_inputs: Any, *, call: str = "the example") -> Timed:
    """Run both on the example, in evaluation mode and in turns: at least nine rounds, and one second.

    Args:
        dense: what it was. Keep a copy: verbs change a model in place.
        model: what became of it.
        example_inputs: what both are called with, as in `torch.export`: a tuple holds positional arguments, a mapping
            keyword arguments, and anything else is the only argument.
        call: what that is, in words.

    Raises:
        Exception: whatever a model raises on the example. Modes are put back.

    >>> import copy
    >>> from secateur import shrink
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> dense = copy.deepcopy(model)
    >>> done = shrink(model, torch.randn(2, 8), 0.5)
    >>> timed = before_and_after(dense, model, torch.randn(2, 8))
    >>> timed.nbytes[1] < timed.nbytes[0]
    True
    """
    with torch.no_grad(), in_mode(dense, training=False), in_mode(model, training=False):
        calls = {at: partial(run_example, each, example_inputs) for at, each in enumerate((dense, model))}
        times = alternating(calls, ROUNDS, seconds=SECONDS, told="timing it before and after")
    return Timed(call, (_nbytes(dense), _nbytes(model)), times[0], times[1], torch.get_num_threads())


def _nbytes(model: nn.Module) -> int:
    """Each tensor once, however many names it has."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({(each.data_ptr(), each.shape): each.nbytes for each in tensors}.values())


def environment() -> dict[str, str]:
    """The versions, the processor and the number of threads; neither host name nor path.

    >>> list(environment())
    ['secateur', 'torch', 'numpy', 'python', 'system', 'processor', 'cores', 'torch threads']
    """
    return {
        "secateur": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}".strip(),
        "processor": processor(),
        "cores": str(os.cpu_count() or "unknown"),
        "torch threads": str(torch.get_num_threads()),
    }


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
