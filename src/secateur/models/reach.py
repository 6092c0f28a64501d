"""What calibration texts reach of a model: tokens of its vocabulary, experts, units; and what they never reach.

Law: nothing changes. A unit is an input of a linear layer or a convolution. It fired in a text where it came to a
hundredth of the most that it came to in any text, so that one text alone leaves out only what is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.coupling import find_coupling
from secateur.models.batches import NamedTexts, example_for, example_of, shorter
from secateur.models.files import build_on_meta, loaded_model
from secateur.models.hosts import Host, InFiles, InMemory
from secateur.models.routing import routed_by
from secateur.models.solving import held_batches
from secateur.report import Reported
from secateur.support import Column, Forward, Part, Shown, Table, all_gather, printable, private
from secateur.targets import is_expert

_FIRED = 0.01
_NAMED = 20  # places, and units of one, on a page
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
            "reached",
            self.texts.items(),
            Column("Never reached by", key="text"),
            Column.count("Sequences", lambda each: each[1].sequences),
            never("Tokens", lambda each: self.vocabulary - each.tokens, self.vocabulary),
            never("Experts", lambda each: sum(map(len, each.experts.values())), self.experts),
            never("Units", lambda each: sum(map(len, each.units.values())), self.units),
            Column("Which experts", lambda each: each[1].experts, _places, detail=True),
            Column("Which units", lambda each: each[1].units, _places, detail=True),
            title="What each text never reached",
        )


def _places(missed: Mapping[str, Sequence[int]]) -> str:
    """``router: 1, 5``, of the first places and numbers.

    >>> _places({"0": range(22), "2": (1,)})
    '0: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 and 2 more; 2: 1'
    """
    lines = []
    for name, each in list(missed.items())[:_NAMED]:
        more = f" and {len(each) - _NAMED:,} more" if len(each) > _NAMED else ""
        lines.append(f"{printable(name)}: {', '.join(map(str, each[:_NAMED]))}{more}")
    return "; ".join(lines) + (f"; and {len(missed) - _NAMED} more places" if len(missed) > _NAMED else "")


@dataclass(frozen=True, eq=False)
class ByText(Reported):
    """A result of calibration; ``reach`` is what each of its texts reached, where they have names."""

    reach: Reach | None = field(default=None, kw_only=True, repr=False)

    def over_texts(self, model: nn.Module | str | Path, batches: Any, **how: Any) -> Self:
        """The same with what its texts reach of the model, as it was, where they have names."""
        reach = reached_by_name(model, batches, **how)
        return self if reach is None else replace(self, reach=reach)

    def by_text(self) -> Iterator[Part]:
        """What there is to say of each text."""
        if self.reach is not None:
            yield from self.reach.content()
            yield ""


def reached(
    model: nn.Module | str | Path,
    batches: NamedTexts | _Texts,
    *,
    forward: Forward | None = None,
    activations: Path | str | None = None,
    device: torch.device | str | None = None,
) -> Reach:
    """What each of several texts reaches of a model, and what none of its tokens ever does.

    What no text exercises, data ranks last: a mixture without half of its experts keeps most of what it can do if it
    was calibrated with the right text, and less than half with the wrong one (arXiv:2510.13999).

    Args:
        model: a module, or the directory of one, of which a block is in memory at a time.
        batches: what `read_calibration` makes of named texts, or ``{name: batches}``.
        forward: ``(model, batch) -> outputs``; by default the batch is what the model is called with.
        activations, device: of a directory, as of `oneshot`.

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
    host = _host(model, next(iter(texts.values())), forward, activations, device)
    hosts = {name: host.over(held_batches(its)[1]) for name, its in texts.items()}
    most = {name: _most(each) for name, each in hosts.items()}
    whole = {path: torch.stack([found[path] for found in most.values() if path in found]).amax(0)
             for path in dict.fromkeys(path for found in most.values() for path in found)}  # fmt: skip
    experts, count = _unreached_experts(hosts, next(iter(texts.values()))[0])
    return Reach(
        {
            name: TextReach(len(its), len(_tokens(its)), experts.get(name, {}), _silent(most[name], whole))
            for name, its in texts.items()
        },
        getattr(getattr(host.model, "config", None), "vocab_size", 0) or 0,
        count,
        sum(map(len, whole.values())),
    )


def reached_by_name(model: nn.Module | str | Path, batches: Any, **how: Any) -> Reach | None:
    """`reached`, of batches of texts that have names; None of others."""
    return reached(model, batches, **how) if isinstance(batches, NamedTexts) else None


def _host(
    model: nn.Module | str | Path,
    batches: Sequence[Any],
    forward: Forward | None,
    activations: Path | str | None,
    device: torch.device | str | None,
) -> Host:
    """The model in memory, or a directory's block by block; one that is not of repeated blocks is loaded."""
    if isinstance(model, nn.Module):
        return InMemory(model, batches, forward=forward)
    checkpoint = open_checkpoint(Path(model))
    try:
        host = InFiles(checkpoint, checkpoint.root, batches, forward=forward, activations=activations, device=device)
        host.check()
    except CheckpointError:
        return InMemory(loaded_model(Path(model), device), batches, forward=forward)
    return host


def _most(host: Host) -> dict[str, Tensor]:
    """The largest size of each input of the model's linear layers and convolutions, of all processes."""
    found: dict[str, Tensor] = {}

    def watch(path: str, at: int) -> Any:
        def see(_: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                sizes = args[0].detach().abs().transpose(at, -1).flatten(0, -2).amax(0).float().cpu()
                found[path] = torch.maximum(found[path], sizes) if path in found else sizes

        return see

    named = dict(host.model.named_modules())
    layers = {path: -1 for path, module in named.items() if isinstance(module, nn.Linear)}
    layers |= {path: 1 for path, module in named.items() if private.is_convolution(module)}
    hooks = [named[path].register_forward_pre_hook(watch(path, at)) for path, at in layers.items()]
    try:
        host.run()
    finally:
        for hook in hooks:
            hook.remove()
    everywhere = all_gather(found)
    return {
        path: torch.stack([each[path] for each in everywhere if path in each]).amax(0)
        for path in layers
        if any(path in each for each in everywhere)
    }


def _silent(found: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    never = {
        path: (found[path] < _FIRED * most) | (most == 0) if path in found else torch.ones_like(most, dtype=torch.bool)
        for path, most in whole.items()
    }
    return {path: tuple(each.nonzero().flatten().tolist()) for path, each in never.items() if each.any()}


def _unreached_experts(hosts: Mapping[str, Host], batch: Any) -> tuple[dict[str, dict[str, tuple[int, ...]]], int]:
    """``{text: {router: experts}}``, and how many experts there are."""
    host = next(iter(hosts.values()))
    model = host.model
    if not any(is_expert(name.rpartition(".")[2]) for name, _ in model.named_modules()):
        return {}, 0
    if isinstance(host, InFiles):
        whole = build_on_meta(host.source)
        coupling = find_coupling(whole, example_for(whole))
    else:
        coupling = find_coupling(model, shorter(example_of(model, batch)))
    groups = [group for group in coupling.groups if group.chosen]
    found = {}
    for name, every in hosts.items():
        routed = routed_by(every, coupling, groups) if groups else {}
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
