"""What calibration texts reach of a model: tokens of its vocabulary, experts, units; and what they never reach.

Law: nothing changes. A unit is an input of a linear layer or a convolution. It fired in a text where it came to a
hundredth of the most that it came to in any text, so that one text alone leaves out only what is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.coupling import find_coupling
from secateur.models import InMemory, NamedTexts, loaded_model
from secateur.shrinking.kinds.routing import routed_by
from secateur.shrinking.request import example_of, shorter
from secateur.support import (
    Column,
    Forward,
    Part,
    Shown,
    Table,
    device_of,
    moved,
    private,
    run_batch,
    unchanged,
    unwrapped,
)
from secateur.targets import is_expert

_FIRED = 0.01
_Texts = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class TextReach:
    """What one text reaches.

    Attributes:
        sequences: how many of it there were.
        tokens: how many different tokens of the vocabulary it has.
        experts: ``{router: experts}`` that none of its tokens was sent to.
        units: ``{module: inputs}`` that never fired.
    """

    sequences: int
    tokens: int
    experts: Mapping[str, tuple[int, ...]]
    units: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Reach(Shown):
    """What each text reaches, by name; it prints as a table.

    Attributes:
        texts: ``{name: what it reaches}``.
        vocabulary: how many tokens the model has, ``experts`` and ``units`` likewise; 0 where it does not say.
    """

    texts: Mapping[str, TextReach]
    vocabulary: int
    experts: int
    units: int

    def content(self) -> Iterator[Part]:
        def never(head: str, missed: Callable[[TextReach], int], whole: int) -> Column:
            of = (lambda each: (missed(each[1]), whole)) if whole else (lambda _: None)
            return Column(head, of, lambda pair: "{:,} of {:,}".format(*pair), "right", number=lambda pair: pair[0])

        yield Table.of(
            "texts",
            self.texts.items(),
            Column("Never reached by", key="text"),
            Column.count("Sequences", lambda each: each[1].sequences),
            never("Tokens", lambda each: self.vocabulary - each.tokens, self.vocabulary),
            never("Experts", lambda each: sum(map(len, each.experts.values())), self.experts),
            never("Units", lambda each: sum(map(len, each.units.values())), self.units),
        )


def reached(model: nn.Module | str | Path, batches: NamedTexts | _Texts, *, forward: Forward | None = None) -> Reach:
    """What each of several texts reaches of a model, and what none of its tokens ever does.

    What no text exercises, data ranks last: a mixture without half of its experts keeps most of what it can do if it
    was calibrated with the right text, and less than half with the wrong one (arXiv:2510.13999).

    Args:
        model: a module, or the directory of one, which is loaded.
        batches: what `read_calibration` makes of named texts, or ``{name: batches}``.
        forward: ``(model, batch) -> outputs``; by default the batch is what the model is called with.

    Raises:
        ValueError: a text has no batches.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = model[0].weight.data.copy_(torch.eye(2))
    >>> found = reached(model, {"left": [torch.tensor([[1.0, 0.0]])], "right": [torch.tensor([[0.0, 1.0]])]})
    >>> found.texts["left"].units
    {'0': (1,), '2': (1,)}
    """
    texts = batches.by_name() if isinstance(batches, NamedTexts) else batches
    if not isinstance(texts, Mapping) or not texts or not all(map(len, texts.values())):
        raise ValueError("a text has no batches; pass {name: batches}, or what read_calibration makes of named texts.")
    inner = unwrapped(model) if isinstance(model, nn.Module) else loaded_model(Path(model))
    most = {name: _most(inner, its, forward) for name, its in texts.items()}
    whole = {path: torch.stack([found[path] for found in most.values() if path in found]).amax(0)
             for path in dict.fromkeys(path for found in most.values() for path in found)}  # fmt: skip
    experts, count = _unreached_experts(inner, texts, forward)
    return Reach(
        {
            name: TextReach(len(its), len(_tokens(its)), experts.get(name, {}), _silent(most[name], whole))
            for name, its in texts.items()
        },
        getattr(getattr(inner, "config", None), "vocab_size", 0) or 0,
        count,
        sum(map(len, whole.values())),
    )


def _most(model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> dict[str, Tensor]:
    """The largest size of each input of the model's linear layers and convolutions."""
    found: dict[str, Tensor] = {}

    def watch(path: str, at: int) -> Any:
        def see(_: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                sizes = args[0].detach().abs().transpose(at, -1).flatten(0, -2).amax(0).float().cpu()
                found[path] = torch.maximum(found[path], sizes) if path in found else sizes

        return see

    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers |= {path: module for path, module in model.named_modules() if private.is_convolution(module)}
    hooks = [
        module.register_forward_pre_hook(watch(path, -1 if isinstance(module, nn.Linear) else 1))
        for path, module in layers.items()
    ]
    try:
        with unchanged(model), torch.no_grad():
            model.eval()
            for batch in batches:
                on_device = moved(batch, device_of(model))
                run_batch(model, on_device) if forward is None else forward(model, on_device)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _silent(found: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    never = {
        path: (found[path] < _FIRED * most) | (most == 0) if path in found else torch.ones_like(most, dtype=torch.bool)
        for path, most in whole.items()
    }
    return {path: tuple(each.nonzero().flatten().tolist()) for path, each in never.items() if each.any()}


def _unreached_experts(
    model: nn.Module, texts: _Texts, forward: Forward | None
) -> tuple[dict[str, dict[str, tuple[int, ...]]], int]:
    """``{text: {router: experts}}``, and how many experts there are."""
    if not any(is_expert(name.rpartition(".")[2]) for name, _ in model.named_modules()):
        return {}, 0
    coupling = find_coupling(model, shorter(example_of(model, next(iter(texts.values()))[0])))
    groups = [group for group in coupling.groups if group.chosen]
    found = {}
    for name, its in texts.items():
        routed = routed_by(InMemory(model, its, forward=forward), coupling, groups) if groups else {}
        found[name] = {router: each.unreached for router, each in routed.items() if each.unreached}
    return found, sum(group.size for group in groups)


def _tokens(batches: Sequence[Any]) -> set[int]:
    """The different tokens of integers that a model is called with, which are no padding."""
    found: set[int] = set()
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            found.update((ids if mask is None else ids[mask.bool()]).flatten().tolist())
    return found
