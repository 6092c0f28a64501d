"""`Distillation`: adds the loss against a teacher to a custom training loop. Adapters of peft merged into a sparse
model: `merge_keeping_zeros`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.models import Tokens
from secateur.pipeline import Masks
from secateur.recovery.descent import removed_of, settled
from secateur.recovery.losses import OutputLoss, chosen_for, count_rows, features_of, loss_between, parse
from secateur.support import Column, Part, Shown, Table, Undo, device_of, in_mode, moved, percent, printable, unwrapped
from secateur.training import Pruner

# ---- `Distillation`: adds the loss against a teacher to a custom training loop.
#
# Law: the teacher is only run, in evaluation mode and without gradients; what the model returns is not changed.


class Distillation:
    """The loss between a model's outputs and its teacher's on the same inputs, and the zeros that stay meanwhile.

    Args:
        teacher: any module that takes what the model takes.
        loss: as for `recover`.
        share: of this loss, in [0, 1]; the rest is the loop's own.

    >>> distillation = Distillation(nn.Linear(2, 2), loss="mse")
    >>> model = nn.Linear(2, 2)
    >>> inputs = torch.randn(3, 2)
    >>> distillation.loss_of(model(inputs), (inputs,), {}).requires_grad
    True
    """

    def __init__(self, teacher: nn.Module, loss: str | OutputLoss | None = None, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, the teacher's part of the loss; got {share!r}.")
        self.teacher, self.loss, self.share = teacher, parse(loss), float(share)
        self.last: tuple[Tensor, int] | None = None

    def loss_of(self, outputs: Any, args: Any, kwargs: Any) -> Tensor:
        """How far the outputs are from the teacher's on the same arguments; without labels, which it needs not."""
        given = {name: value for name, value in kwargs.items() if name not in ("labels", "num_items_in_batch")}
        device = device_of(self.teacher)
        with torch.no_grad(), in_mode(self.teacher, training=False):
            wanted = self.teacher(*moved(tuple(args), device), **moved(given, device))
        if self.loss is None:
            self.loss = chosen_for(wanted)
        mask = Tokens.of(given).own
        found = loss_between(outputs, wanted, given, self.loss, mask)
        rows = 0 if callable(self.loss) else count_rows(features_of(outputs), mask)
        self.last = found, rows
        return found

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within, each run of the model in training mode leaves its loss in ``last``: ``(loss, rows)``."""
        handle = self.attach(model)
        try:
            yield
        finally:
            handle.remove()

    def attach(self, model: nn.Module) -> Any:
        """As `watching`; what is returned is to be removed."""

        def see(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            if module.training:
                self.loss_of(outputs, args, kwargs)

        return model.register_forward_hook(see, with_kwargs=True)

    def mixed(self, own: Tensor | None) -> Tensor:
        """The loop's own loss and that of the last run, in their shares; that of the last run is used up.

        Raises:
            ValueError: the model was not run since.
        """
        if self.last is None:
            raise ValueError("the model that was to be watched has not been run: name the module that training runs.")
        (found, _), self.last = self.last, None
        return found if own is None or self.share == 1 else self.share * found + (1 - self.share) * own

    @staticmethod
    def labelled(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
        """How many of the labels that a model of transformers was given its Trainer counts: of the next token's there
        is none for the first. (Trainers that count that one, too, weigh their own loss less, and this one alike.)

        >>> int(Distillation.labelled(nn.Identity(), {"labels": torch.tensor([[1, 2, -100]])}))
        2
        """
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        labels = given.get("shift_labels")
        if labels is None:
            model = unwrapped(model)
            causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
            causal = causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            labels = given["labels"][..., 1:] if causal else given["labels"]
        return torch.as_tensor(labels.ne(-100).sum())

    @staticmethod
    def keeping_zeros(model: nn.Module, optimizer: Any) -> Pruner | None:
        """A `Pruner` that removes nothing and keeps what is removed, as `recover` finds it; None where nothing is."""
        masks: Masks = removed_of(model)
        if not masks:
            return None
        return Pruner(model, optimizer, lambda _step: 0.0, within=masks, include=list(masks), verbose=False)


# ---- Adapters of peft merged into a sparse model: `merge_keeping_zeros`.
#
# Law: what was zero in the weights below the adapters is zero afterwards, and nothing else became zero; a call that
# fails changes nothing.


@dataclass(frozen=True)
class Merged(Shown):
    """The result of `merge_keeping_zeros`: the merged model, and the zeros of each weight that had an adapter or was
    trained as a copy.

    ``kept`` are those before and after; ``plain`` those that a merge without masks would have left.
    """

    model: nn.Module = field(repr=False)
    kept: Mapping[str, int]
    plain: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in the merged weights."""
        return sum(self.kept.values()) / sum(self.sizes.values())

    @property
    def plain_sparsity(self) -> float:
        """What a merge without masks would have left of it."""
        return sum(self.plain.values()) / sum(self.sizes.values())

    def content(self) -> Iterator[Part]:
        yield Table.of(
            "weights",
            self.kept,
            Column("Weight", str),
            Column.count("Entries", lambda name: self.sizes[name]),
            Column.count("Zeros", lambda name: self.kept[name]),
            Column.count("After a plain merge", lambda name: self.plain[name]),
        )
        yield ""
        yield (
            f"{percent(self.sparsity)} of {len(self.kept)} merged weights is zero, as before; a plain merge would have "
            f"left {percent(self.plain_sparsity)}."
        )


def merge_keeping_zeros(model: nn.Module) -> Merged:
    """Merges the adapters of a `peft` model as ``W + mask ∘ Δ``; the mask is 0 where W is, so that the zeros stay.

    A plain ``merge_and_unload`` fills them. An adapter that was trained without the mask computed with the entries that
    are left out here, so that the merged model is another one than was trained; `recover` with ``adapters=`` trains
    under the mask (as SQFT's SparsePEFT, arXiv:2410.03750). Modules that were trained as copies of their own
    (``modules_to_save``) keep the zeros of what they are copies of, in weights that pruning may touch.

    Args:
        model: what ``peft.get_peft_model`` or ``peft.inject_adapter_in_model`` made, of LoRA or another kind that can
            be merged. It is used up, as by ``merge_and_unload``.

    Returns:
        The model without adapters, as ``model``, and the zeros that it has and would have had.

    Raises:
        ValueError: there are no adapters, they are merged already, a weight below one holds no floating numbers or no
            values, or would hold NaN or infinity; or peft cannot merge them. Nothing is changed then.
        TypeError: it is no module.

    >>> from peft import LoraConfig, get_peft_model
    >>> network = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> with torch.no_grad():
    ...     _ = network[0].weight.tril_()
    >>> adapted = get_peft_model(network, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    >>> merged = merge_keeping_zeros(adapted)
    >>> int((merged.model[0].weight == 0).sum()), merged.plain_sparsity
    (6, 0.0)
    """
    model = unwrapped(model)
    try:
        return _merged_keeping_zeros(model)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        said = printable(" ".join(str(error).split()), 400)
        raise ValueError(
            f"the adapters of {type(model).__name__} cannot be merged into what is below them "
            f"({type(error).__name__}: {said}); load both again."
        ) from error


def _merged_keeping_zeros(model: nn.Module) -> Merged:
    layers = dict(_adapted_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters to merge: it is no model of peft's.")
    weights: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        if getattr(layer, "merged", False):
            raise ValueError(f"{name}: its adapters are merged already; take them out with unmerge_adapter first.")
        weight = getattr(layer.base_layer, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            raise ValueError(
                f"{name}: the {type(layer.base_layer).__name__} below it has no weight of floating numbers of its own; "
                "where masks are attached, write the zeros first, with secateur.prune.remove."
            )
        if weight.is_meta:
            raise ValueError(f"{name}: the weight below it has no values, but is on the meta device; load it first.")
        weights[f"{_plain(name)}.weight"] = weight
    copies = {name: saved for name, saved in _saved_copies(model) if name not in weights}
    with Undo() as undo, torch.no_grad():
        undo.modules(model.modules())
        undo.contents(
            *(each for layer in layers.values() if isinstance(each := getattr(layer, "merged_adapters", 0), list))
        )
        olds = dict(zip(weights, undo.values(*weights.values()), strict=True))
        biases = [
            bias for layer in layers.values() if isinstance(bias := getattr(layer.base_layer, "bias", None), Tensor)
        ]
        undo.values(*biases, *(saved for saved, _ in copies.values()))
        for each in (*weights.values(), *biases):  # of which some kinds of adapters put another in the place
            undo.call(setattr, each, "data", each.data)
        merged = _merged(model, layers)
        for name, (saved, old) in copies.items():
            weights[name], olds[name] = saved, old
        plain = {name: _zeros(weight) for name, weight in weights.items()}
        for name, weight in weights.items():
            if not bool(weight.isfinite().all()):
                raise ValueError(f"{name}: merged, it would hold NaN or infinity; its adapter or it does already.")
            weight.copy_(settled(olds[name], weight, olds[name].ne(0)))
    sizes = {name: weight.numel() for name, weight in weights.items()}
    return Merged(merged, {name: _zeros(weight) for name, weight in weights.items()}, plain, sizes)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of peft's that hold another one and can be merged into it."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module) and callable(getattr(module, "merge", None)):
            yield name, module


def _saved_copies(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Parameter, Tensor]]]:
    """The weights that were trained as copies of their own (``modules_to_save``) and have zeros where pruning left
    some, with what they were copied from. (All of a weight is zero where it began so.)"""
    for name, module in _wrappers(model):
        saved, old = module.modules_to_save[module.active_adapters[0]], module.original_module
        for own, mask in removed_of(old).items():
            if bool(mask.any()):
                yield f"{_plain(name)}.{own}", (saved.get_parameter(own), old.get_parameter(own).detach())


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        copies, active = getattr(module, "modules_to_save", None), getattr(module, "active_adapters", ())
        if isinstance(copies, nn.ModuleDict) and active and active[0] in copies:
            yield name, module


def _merged(model: Any, layers: Mapping[str, Any]) -> nn.Module:
    if callable(getattr(model, "merge_and_unload", None)):
        found: nn.Module = model.merge_and_unload()
        return found
    for name, layer in layers.items():
        layer.merge()
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, layer.base_layer)
    for name, wrapper in list(_wrappers(model)):
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, wrapper.modules_to_save[wrapper.active_adapters[0]])
    plain: nn.Module = model
    return plain


def _plain(name: str) -> str:
    """A layer's name in the model without adapters."""
    return name.removeprefix("base_model.model.")


def _zeros(weight: Tensor) -> int:
    return weight.numel() - int(weight.count_nonzero())
