"""Re-estimation of batch normalization: running statistics of the pruned model, from data.

Law: nothing but the running statistics changes, and they only when all batches have passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.support import (
    Column,
    Forward,
    Part,
    Shown,
    Table,
    check_batches,
    device_of,
    moved,
    private,
    replicating_group,
    run_batch,
    track,
    unchanged,
    unwrapped,
    warn,
)


@dataclass(frozen=True)
class BatchNormShift:
    """One batch normalization: how far its running statistics moved, over its channels.

    - ``mean``: the root mean square of a mean's change, in standard deviations as they were.
    - ``variance``: the geometric mean of a variance's ratio, now to before; 1 where a channel had or has none.
    """

    name: str
    channels: int
    mean: float
    variance: float


@dataclass(frozen=True)
class Reestimation(Shown):
    """The result of `reestimate_batchnorm`; prints as a table. ``unreached``: layers that no batch ran through."""

    batches: int
    layers: tuple[BatchNormShift, ...]
    unreached: tuple[str, ...] = ()

    def content(self) -> Iterator[Part]:
        yield Table.of(
            "layers",
            self.layers,
            Column("BatchNorm", lambda each: each.name),
            Column.count("Channels", lambda each: each.channels),
            Column.figure("Mean moved by σ", lambda each: each.mean, key="mean"),
            Column.figure("Variance times", lambda each: each.variance, key="variance"),
        )
        yield ""
        yield f"{len(self.layers)} re-estimated from {self.batches} batches."
        for name in self.unreached:
            yield f"{name or 'the model'}: not reached, and left as it was."


def reestimate_batchnorm(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> Reestimation:
    """``mean ← (1/B) Σ mean(batch)``, ``var ← (1/B) Σ var(batch)`` : re-estimates the running statistics of every
    BatchNorm.

    Removed weights shift what comes out of each layer, and a normalization by the dense network's statistics then
    costs most of the accuracy: a ResNet-8 at 90 % sparsity went from 39.5 to 93.5 % by this alone, without training.

    Every BatchNorm (1d, 2d, 3d, SyncBatchNorm) with ``track_running_stats`` that the batches reach normalizes by the
    batch and averages over all of them; everything else is in evaluation mode, dropout and frozen weights included. As
    in `torch.optim.swa_utils.update_bn` each batch weighs the same, whatever its size. Modes, momenta, gradients and
    random states are as before; ``num_batches_tracked`` is the number of batches. Ranks of a DistributedDataParallel
    pass their own batches and get the mean of their statistics.

    Args:
        batches: what a DataLoader yields, as in `secateur.evidence.collect`; several hundred examples or more.
        forward: ``(model, batch) -> outputs``, for batches of another kind.

    Raises:
        ValueError: no batches, a batch of one value a channel, statistics that are not finite. The former statistics
            are kept then, as after any other exception.

    >>> model = nn.BatchNorm1d(1)
    >>> done = reestimate_batchnorm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [5.0]])])
    >>> done.batches, round(done.layers[0].mean, 3)
    (2, 3.5)
    >>> model.running_mean, model.running_var
    (tensor([3.5000]), tensor([1.]))
    """
    check_batches(batches)
    found = batchnorms(model)
    if not found:
        warn(
            f"{type(model).__name__} has no BatchNorm with running statistics; there is nothing to re-estimate.",
        )
        return Reestimation(0, ())
    inner = unwrapped(model)
    device = device_of(inner)
    momenta = {module: module.momentum for module in found.values()}
    count = 0
    with unchanged(inner), torch.no_grad():
        try:
            inner.eval()
            for module in found.values():
                module.reset_running_stats()
                module.momentum = None  # the cumulative average
                module.training = True
            for batch in track(batches, "re-estimating batch normalization"):
                run_batch(inner, moved(batch, device), forward)
                count += 1
        finally:
            for module, momentum in momenta.items():
                module.momentum = momentum
        if not count:
            raise ValueError("there are no batches: running statistics come from running the model.")
        group = _group(inner)
        # what the batches never reached keeps its statistics
        reached = {name: module for name, module in found.items() if module.num_batches_tracked}
        statistics = {name: _averaged(module, group) for name, module in reached.items()}
    for name, (mean, variance, _) in statistics.items():
        if not bool(mean.isfinite().all() and variance.isfinite().all()):
            raise ValueError(f"{name or type(model).__name__}: the statistics of the batches are not finite.")
    shifts = tuple(_shift(name, found[name], mean, variance) for name, (mean, variance, _) in statistics.items())
    with torch.no_grad():
        for name, new in statistics.items():
            module = found[name]
            for old, value in zip(
                (module.running_mean, module.running_var, module.num_batches_tracked), new, strict=True
            ):
                old.copy_(value)
    return Reestimation(count, shifts, tuple(name for name in found if name not in statistics))


def _shift(name: str, module: Any, mean: Tensor, variance: Tensor) -> BatchNormShift:
    before, deviation = module.running_var.double(), (module.running_var.double() + module.eps).sqrt()
    moved = (mean.double() - module.running_mean.double()) / deviation
    times = torch.where((before > 0) & (variance > 0), variance.double() / before, 1.0)
    root = float(moved.square().mean().sqrt()) if moved.numel() else 0.0
    return BatchNormShift(name, mean.numel(), root, float(times.log().mean().exp()) if times.numel() else 1.0)


def batchnorms(model: nn.Module) -> dict[str, Any]:
    """``{name: module}`` of the batch normalizations that have running statistics.

    >>> list(batchnorms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    ['1']
    """
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if private.is_batchnorm(module)
        and module.track_running_stats
        and module.running_mean is not None
        and module.num_batches_tracked is not None
    }


def _averaged(module: Any, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of this rank, or the mean over the ranks of a group."""
    mean, variance = module.running_mean.clone(), module.running_var.clone()
    if group is not None:
        from torch import distributed

        for tensor in (mean, variance):
            distributed.all_reduce(tensor, group=group)
            tensor.div_(distributed.get_world_size(group))
    return mean, variance, module.num_batches_tracked.clone()


def _group(model: nn.Module) -> Any:
    """The ranks that hold copies of the model, or None."""
    for module in model.modules():
        for key, parameter in private.parameters_of(module).items():
            if parameter is not None:
                return replicating_group(module, key)
    return None
