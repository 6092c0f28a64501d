"""Convolutions that skip zeros, beside the best dense ones and their floors: layers, their sums, whole networks.

The best dense convolution is the fastest of torch's eager one, eager with the channels of a place side by side, and
those of oneDNN with weights laid out beforehand (which a frozen `torch.compile` uses) for either memory format, in the
same rounds. A floor is the kept products at the rate of a dense product of 2048³ that was measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.inference.exported import (
    onnx_file,
    onnx_file_of_convolutions,
    openvino_session,
    quiet,
    session,
)
from benchmarks.inference.products import floors, in_milliseconds
from benchmarks.inference.subjects import Digits, cached
from benchmarks.support.tables import head, row
from benchmarks.support.timing import ratio
from secateur import Block, Unstructured, demo
from secateur.inference import BlockConv2d, SparseConv2d, pack
from secateur.native import describe
from secateur.patterns import Pattern, word_of
from secateur.support import private

# (images, channels, size, outputs, kernel, stride)
LAYERS = {
    "3×3, one image": [(1, 64, 56, 64, 3, 1), (1, 128, 28, 128, 3, 1), (1, 256, 14, 256, 3, 1), (1, 512, 7, 512, 3, 1)],
    "3×3, stride 2": [(1, 64, 56, 128, 3, 2), (1, 128, 28, 256, 3, 2), (1, 256, 14, 512, 3, 2)],
    "3×3, 16 images": [
        (16, 64, 56, 64, 3, 1),
        (16, 128, 28, 128, 3, 1),
        (16, 256, 14, 256, 3, 1),
        (16, 512, 7, 512, 3, 1),
    ],
    "1×1, one image": [
        (1, 64, 56, 256, 1, 1),
        (1, 256, 56, 64, 1, 1),
        (1, 1024, 14, 256, 1, 1),
        (1, 512, 7, 2048, 1, 1),
    ],
}
SPARSITIES = (0.7, 0.8, 0.9, 0.95, 0.98)
GOALS = {("3×3, one image", 0.9): 3.5, ("3×3, one image", 0.95): 5.5}
GOALS_OF_50 = {(1, 0.9): 2.8, (1, 0.95): 4.0, (16, 0.9): 2.8, (16, 0.95): 3.8}


def dense_forms(module: nn.Conv2d, x: Tensor) -> dict[str, Callable[[], Any]]:
    turned = copy.deepcopy(module).to(memory_format=torch.channels_last)
    last = x.contiguous(memory_format=torch.channels_last)
    forms: dict[str, Callable[[], Any]] = {"eager": partial(module, x), "channels last": partial(turned, last)}
    for name, given in (("oneDNN", x), ("oneDNN, channels last", last)):
        if (made := private.frozen_convolution(module, given)) is not None:
            forms[name] = partial(made, given)
    return forms


def masked(weight: Tensor, sparsity: float, outputs: int = 1) -> Tensor:
    """A random mask of exactly that sparsity, in blocks of so many outputs."""
    units = weight.numel() // outputs
    kept = torch.zeros(units, dtype=torch.bool)
    kept[torch.randperm(units)[: round((1 - sparsity) * units)]] = True
    blocks = kept.view(weight.shape[0] // outputs, 1, -1).expand(-1, outputs, -1)
    return weight * blocks.reshape(weight.shape)


def form_of(outputs: int) -> type[SparseConv2d]:
    return SparseConv2d if outputs == 1 else BlockConv2d


def in_blocks(outputs: int) -> str:
    return "" if outputs == 1 else f", {outputs}×1"


def bench_layers(options: argparse.Namespace, rate: float) -> None:
    columns = [
        "",
        "best dense, ms",
        *(f"{100 * each:.0f} %, float32 / int8" for each in SPARSITIES),
        "floor / ours at 90 %",
        "goals",
    ]
    print(head(columns))
    for group, layers in LAYERS.items():
        for (images, channels, size, outputs, kernel, stride), shared in itertools.product(layers, options.outputs):
            module = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False).requires_grad_(False)
            x, weight = torch.randn(images, channels, size, size), module.weight.clone()
            forms = dense_forms(module, x)
            dense, ours, rounding = [*forms], {}, {}
            expected = module(x).shape
            for sparsity in SPARSITIES:
                module.weight.copy_(masked(weight, sparsity, shared))
                layer = form_of(shared).from_module(module, size=expected[2:])
                torch.testing.assert_close(layer(x), module(x), rtol=1e-3, atol=1e-3)
                ours[sparsity] = partial(layer, x)
                inputs_too = SparseConv2d.from_module(module, size=expected[2:], values="int8", inputs="int8")
                rounding[f"int8 {sparsity}"] = partial(inputs_too, x)
            module.weight.copy_(weight)
            times = in_milliseconds({**forms, **ours, **rounding}, options.rounds, options.clock)
            best = min(dense, key=lambda name: statistics.median(times[name]))
            faster = {each: ratio(times[each], times[best]) for each in SPARSITIES}
            products = 0.1 * weight.numel() * expected[0] * expected[2] * expected[3]
            floor = 2 * products / rate / statistics.median(times[0.9])
            goals = [
                f"{goal} {'met' if faster[sparsity] >= goal else 'missed'}"
                for (name, sparsity), goal in GOALS.items()
                if name == group and shared == 1
            ]
            told = f"{group}: {channels}×{size}² to {outputs}{in_blocks(shared)}"
            cells = [
                told,
                f"{statistics.median(times[best]):.2f} ({best})",
                *(f"{faster[each]:.2f} / {ratio(times[f'int8 {each}'], times[best]):.2f}" for each in SPARSITIES),
            ]
            print(row([*cells, f"{floor:.2f}", ", ".join(goals)]), flush=True)


def resnet(depth: int, sparsity: float, outputs: int = 1) -> nn.Module:
    """As transformers builds it, with random masks on all convolutions but the first."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(num_labels=1000, **(BASIC if depth == 18 else {}))
    return sparse(Logits(ResNetForImageClassification(config)), sparsity, outputs)


def mobilenet(sparsity: float, outputs: int = 1) -> nn.Module:
    """MobileNetV2 as transformers builds it: nearly all of its work is in convolutions of 1×1. Depthwise ones stay."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    torch.manual_seed(0)
    config = MobileNetV2Config(num_labels=1000, tf_padding=False)
    return sparse(Logits(MobileNetV2ForImageClassification(config)), sparsity, outputs)


def detector(sparsity: float, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return sparse(Detector(), sparsity, outputs)


BASIC = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
OTHERS = {"mobilenet": ("MobileNetV2", mobilenet, 224), "detector": ("detector", detector, 320)}


def sparse(model: nn.Module, sparsity: float, outputs: int = 1) -> nn.Module:
    """With random masks on all convolutions but the first and depthwise ones, and normalizations as after training."""
    model = model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3 and module.groups == 1:
            alike = outputs if module.out_channels % outputs == 0 else 1
            module.weight.copy_(masked(module.weight, sparsity, alike))
        if isinstance(module, nn.BatchNorm2d):  # nothing is exactly 0 or 1
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.uniform_(0.5, 1.0)
            module.bias.normal_(0, 0.1)
    return model


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.model(x).logits
        return made


class Detector(nn.Module):
    """A backbone (ResNet-18 as transformers builds it), a pyramid of its last three stages, and a head for each.

    The shape of detectors in one stage: from (n, 3, h, w) to (n, places of all levels, 4 + classes).
    """

    def __init__(self, width: int = 128, classes: int = 80) -> None:
        from transformers import ResNetBackbone, ResNetConfig

        super().__init__()
        stages = ["stage2", "stage3", "stage4"]
        self.backbone = ResNetBackbone(ResNetConfig(**BASIC, out_features=stages))
        sizes = BASIC["hidden_sizes"][1:]
        self.lateral = nn.ModuleList(nn.Conv2d(size, width, 1) for size in sizes)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in sizes)
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, 4 + classes, 1),
            )
            for _ in sizes
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        levels = [side(each) for side, each in zip(self.lateral, self.backbone(x).feature_maps, strict=True)]
        for upper in (1, 0):
            levels[upper] = levels[upper] + functional.interpolate(levels[upper + 1], scale_factor=2.0)
        found = [
            head(smooth(each)).flatten(2) for head, smooth, each in zip(self.heads, self.smooth, levels, strict=True)
        ]
        return torch.cat(found, 2).transpose(1, 2)


def bench_sums(options: argparse.Namespace) -> None:
    """Each distinct convolution once, times how often the network has it; the first stays dense."""
    print("\n" + head(["convolutions of", "batch", "zeros", "best dense, ms", "sparse, ms", "times faster"]))
    for depth in options.depths:
        for images in options.images:
            for sparsity, outputs in itertools.product(options.sparsities, options.outputs):
                model = resnet(depth, sparsity, outputs)
                shapes: dict[Any, tuple[nn.Conv2d, Tensor, int]] = {}

                def see(module: nn.Conv2d, args: tuple[Tensor], shapes: dict[Any, Any] = shapes) -> None:
                    key = (module.weight.shape, module.stride, args[0].shape)
                    shapes[key] = (module, args[0], shapes[key][2] + 1 if key in shapes else 1)

                handles = [m.register_forward_pre_hook(see) for m in model.modules() if isinstance(m, nn.Conv2d)]
                model(torch.randn(images, 3, 224, 224))
                for handle in handles:
                    handle.remove()
                dense = sparse = 0.0
                for module, x, count in shapes.values():
                    forms = dense_forms(module, x)
                    names = [*forms]
                    if module.in_channels > 3:
                        layer = form_of(outputs).from_module(module, size=module(x).shape[2:])
                        forms["ours"] = partial(layer, x)
                    times = in_milliseconds(forms, max(3, options.rounds // 3), options.clock)
                    best = min(statistics.median(times[name]) for name in names)
                    dense += count * best
                    sparse += count * (statistics.median(times["ours"]) if "ours" in times else best)
                zeros = f"{100 * sparsity:.0f} %{in_blocks(outputs)}"
                cells = [f"ResNet-{depth}", f"{images}", zeros, f"{dense:.1f}", f"{sparse:.1f}"]
                print(row([*cells, f"**{dense / sparse:.2f}**"]), flush=True)


def frozen(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    import torch._inductor.config as inductor

    with quiet(), inductor.patch(freezing=True):
        compiled = torch.compile(model)
        compiled(x)
        compiled(x)
    return compiled


FLOAT = ["eager", "channels last", "torch.compile, frozen", "ONNX Runtime", "OpenVINO"]
HALF = ["bfloat16, OpenVINO"]  # on processors that multiply in it
INT8 = ["int8, ONNX Runtime", "int8, OpenVINO"]
OURS = ["packed", "packed and compiled", "packed, values in int8", "packed, values and inputs in int8"]
TURNED = "packed from channels last"  # a network and example that came in that memory format


def whole_rivals(model: nn.Module, x: Tensor, folder: Path, compiling: bool) -> dict[str, Callable[[], Any]]:
    """Every dense form that there is here, in float32 and int8."""
    threads = torch.get_num_threads()
    last = x.contiguous(memory_format=torch.channels_last)
    plain = onnx_file(folder / "model.onnx", model, (x,), False)
    rounded = onnx_file_of_convolutions(folder / "int8.onnx", model, (x,))
    calls: dict[str, Callable[[], Any]] = {
        "eager": partial(model, x),
        "channels last": partial(copy.deepcopy(model).to(memory_format=torch.channels_last), last),
        "ONNX Runtime": partial(session(plain, threads), x),
        "int8, ONNX Runtime": partial(session(rounded, threads), x),
    }
    if compiling:
        calls["torch.compile, frozen"] = partial(frozen(copy.deepcopy(model), x), x)
    for name, path, precision in (
        ("OpenVINO", plain, "f32"),
        ("bfloat16, OpenVINO", plain, "bf16"),
        ("int8, OpenVINO", rounded, "f32"),
    ):
        if (made := openvino_session(path, threads, precision)) is not None:
            calls[name] = partial(made, x)
    return calls


def networks(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[float, int], nn.Module], int]]:
    """(title, what builds it with a share of zeros, height and width of an image) of those that were asked for."""
    for name in options.models:
        if name == "resnet":
            yield from ((f"ResNet-{depth}", partial(resnet, depth), 224) for depth in options.depths)
        else:
            yield OTHERS[name]


def bench_whole(options: argparse.Namespace) -> None:
    shown = (*FLOAT, *HALF, *INT8, *OURS, *[TURNED] * options.channels_last)
    columns = ["end to end", "threads", "batch", "zeros", *(f"{name}, ms" for name in shown)]
    print("\n" + head([*columns, "than the best dense", "goal", "than the best int8"]))
    compiling = not options.without_compiling
    for title, build, size in networks(options):
        for images in options.images:
            for sparsity, outputs in itertools.product(options.sparsities, options.outputs):
                model, x = build(sparsity, outputs), torch.randn(images, 3, size, size)
                packed, rounded, inputs_too = (copy.deepcopy(model) for _ in range(3))
                packing = pack(packed, x)
                torch.testing.assert_close(packed(x), model(x), rtol=1e-3, atol=1e-3)
                pack(rounded, x, values="int8")
                in_int8 = pack(inputs_too, x, values="int8", inputs="int8")
                with tempfile.TemporaryDirectory() as folder:
                    calls = whole_rivals(model, x, Path(folder), compiling)
                ours_of = dict(zip((OURS[0], *OURS[2:]), (packed, rounded, inputs_too), strict=True))
                calls |= {name: partial(each, x) for name, each in ours_of.items()}
                told = ""
                if options.channels_last:
                    turned = copy.deepcopy(model).to(memory_format=torch.channels_last)
                    last = x.contiguous(memory_format=torch.channels_last)
                    again = pack(turned, last)
                    torch.testing.assert_close(turned(last), model(x), rtol=1e-3, atol=1e-3)
                    calls[TURNED] = partial(turned, last)
                    told = f"from channels last {len(again.packed)} layers packed, {len(again.blocks)} blocks; "
                if compiling:
                    calls["packed and compiled"] = partial(frozen(copy.deepcopy(packed), x), x)
                times = in_milliseconds(calls, options.rounds, options.clock)
                medians = {name: statistics.median(own) for name, own in times.items()}
                floats, ints, ours, best = (
                    min((n for n in names if n in medians), key=lambda n: medians[n])
                    for names in (FLOAT, INT8, OURS[:2], OURS)
                )
                faster = ratio(times[ours], times[floats])
                goal = GOALS_OF_50.get((images, sparsity)) if (title, outputs) == ("ResNet-50", 1) else None
                met = "" if goal is None else f"{goal} {'met' if faster >= goal else 'missed'}"
                cells = [title, f"{torch.get_num_threads()}", f"{images}"]
                cells += [f"{100 * sparsity:.0f} %{in_blocks(outputs)}"]
                cells += [f"{medians[name]:.1f}" if name in medians else "–" for name in shown]
                against = f"**{ratio(times[best], times[ints]):.2f}** ({ints})"
                print(row([*cells, f"**{faster:.2f}** ({floats})", met, against]), flush=True)
                if options.channels_last:
                    told += f"{ratio(times[TURNED], times[OURS[0]]):.2f} times as fast as from the usual layout; "
                error = float((inputs_too(x) - model(x)).norm() / model(x).norm())
                told += f"{len(packing.packed)} layers packed, {len(packing.blocks)} blocks; inputs in int8: "
                told += f"{sum('inputs' in each.int8 for each in in_int8.layers)} layers, "
                told += f"logits change by {100 * error:.2g} %"
                print(f"<!-- {told} -->", flush=True)
                torch.compiler.reset()


def bench_digits(options: argparse.Namespace) -> None:
    """A residual network that was trained sparse: the same answers, and the time of each form."""
    print(
        "\n"
        + head(["digits, trained", "right, %", "packed, right, %", "images", "best dense, ms", "packed, ms", "faster"])
    )
    build = partial(demo.DigitsNet, 64, 128)
    with torch.enable_grad():
        subject = Digits("digits", build, ("stem.*", "head.*"), options.cache / "cnn")
    for sparsity, outputs in itertools.product(options.sparsities, options.outputs):
        model, pattern = copy.deepcopy(subject.model), Unstructured() if outputs == 1 else Block(outputs, 1)

        def make(model: nn.Module, sparsity: float = sparsity, pattern: Pattern = pattern) -> None:
            subject.prune(model, pattern, sparsity)

        with torch.enable_grad():
            cached(options.cache / "cnn" / f"{word_of(pattern)}-{100 * sparsity:.0f}.safetensors", model, make)
        model.eval().requires_grad_(False)
        right = subject.accuracy(model)
        for images in (1, 64):
            x = subject.data.test_images[:images]
            turned = copy.deepcopy(model).to(memory_format=torch.channels_last)
            forms: dict[str, Callable[[], Any]] = {"eager": partial(model, x), "channels last": partial(turned, x)}
            forms["compiled"] = partial(frozen(copy.deepcopy(model), x), x)
            packed = copy.deepcopy(model)
            packing = pack(packed, x)
            times = in_milliseconds({**forms, "packed": partial(packed, x)}, options.rounds, options.clock)
            best = min(forms, key=lambda name: statistics.median(times[name]))
            faster = (
                f"**{ratio(times['packed'], times[best]):.2f}** ({len(packing.packed)} of {len(packing.layers)} layers)"
            )
            cells = [
                f"{100 * sparsity:.0f} %{in_blocks(outputs)}",
                f"{right:.1f}",
                f"{subject.accuracy(packed):.1f}",
                f"{images}",
            ]
            cells += [f"{statistics.median(times[best]):.2f} ({best})", f"{statistics.median(times['packed']):.2f}"]
            print(row([*cells, faster]), flush=True)
            torch.compiler.reset()


def bench_convolutions(options: argparse.Namespace) -> None:
    parts = options.parts
    with torch.no_grad():
        for threads in options.threads:
            torch.set_num_threads(threads)
            bandwidth, rate = floors(options.rounds, options.clock)
            print(f"{describe()}; {threads} thread(s); clock: {options.clock}; ", end="")
            print(f"{bandwidth / 1e6:.1f} GB/s, {rate / 1e6:.0f} GFLOP/s\n")
            if "layers" in parts:
                bench_layers(options, rate)
            if "sums" in parts:
                bench_sums(options)
            if "whole" in parts:
                bench_whole(options)
            if "digits" in parts:
                bench_digits(options)
