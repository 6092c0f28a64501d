"""What zeros are worth at inference: kernels beside the best dense product and their floors, and whole models.

    python benchmarks/inference.py kernels [--threads 1,2] [--batches 1,16,256] [--rounds 9] [--clock wall|cpu]
    python benchmarks/inference.py models [--threads 1,2] [--only GLOB] [--minilm DIR] [--rounds 15] [--clock wall|cpu]

Law: everything that is compared runs in one process, alternating, and a ratio is the median of the rounds' ratios. The
best dense product is the fastest of torch's `linear`, the same on a transposed weight, and oneDNN's packed one (which a
frozen `torch.compile` uses), measured in the same rounds. On a busy machine ``--clock cpu`` with one thread is
steadier.

A floor is the larger of two times: the bytes that a product has to read, over the bandwidth of summing 256 MB, and its
multiplications and additions, over the rate of a dense product of 2048³; both measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import Block, Unstructured, kernels, shrink, sparsify
from secateur.allocation import uniform
from secateur.inference import BlockLinear, GroupedLinear, SparseLinear, WindowLinear, pack
from secateur.patterns import GroupedColumns

SIZE = 4096
# the least ratios to the best dense product that were asked for, at batches 1, 16 and 256
GOALS = {
    "CSR 80 %": (1.6, 2.1, 1.4),
    "CSR 90 %": (3.1, 4.0, 3.0),
    "CSR 95 %": (5.9, 7.8, 5.5),
    "16×1 90 %": (4.9, 8.0, 5.6),
    "grouped columns 80 %": (2.1, 2.4, 3.4),
    "grouped columns 90 %": (3.2, 4.8, 6.2),
    "windows bfloat16 50 %": (1.4,),  # asked of a bitmask
    "windows bfloat16 70 %": (2.0,),
    "windows bfloat16 90 %": (2.2,),
}


def alternating(functions: dict[str, Callable[[], Any]], rounds: int, clock: str) -> dict[str, list[float]]:
    """Milliseconds of each in each round, after one that does not count."""
    now = time.perf_counter if clock == "wall" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, function in functions.items():
                started = now()
                calls = 0
                while calls < 1 or now() - started < 0.005:
                    function()
                    calls += 1
                if turn:
                    times[name].append((now() - started) / calls * 1e3)
    return times


def ratio(ours: list[float], rival: list[float]) -> float:
    return statistics.median(theirs / own for own, theirs in zip(ours, rival, strict=True))


def floors(rounds: int, clock: str) -> tuple[float, float]:
    """(bytes, operations) in a millisecond."""
    large, square = torch.ones(64 << 20), torch.randn(2048, 2048)
    times = alternating({"sum": large.sum, "product": lambda: square @ square}, rounds, clock)
    return large.nbytes / statistics.median(times["sum"]), 2 * 2048**3 / statistics.median(times["product"])


@functools.cache
def masked(pattern: Any, sparsity: float, dtype: torch.dtype = torch.float32) -> Tensor:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    sparsify(layer, sparsity, pattern=pattern, allocate=uniform)
    return layer.weight.detach().to(dtype)


@functools.cache
def windows(sparsity: float, dtype: torch.dtype) -> WindowLinear:
    return WindowLinear.from_dense(masked(Unstructured(), sparsity, dtype))


def forms(batch: int) -> Iterator[tuple[str, torch.dtype, Any]]:
    """Names, dtypes and layers; windows for few vectors only, as `pack` does."""
    for dtype, word in ((torch.float32, ""), (torch.bfloat16, "bfloat16 ")):
        for sparsity in (0.5, 0.7, 0.8, 0.9, 0.95) if batch <= 16 else ():
            yield f"windows {word}{sparsity * 100:.0f} %", dtype, windows(sparsity, dtype)
        for sparsity in (0.5, 0.7, 0.9) if word else (0.8, 0.9, 0.95):
            weight = masked(Unstructured(), sparsity, dtype)
            yield f"CSR {word}{sparsity * 100:.0f} %", dtype, SparseLinear.from_dense(weight, batch=batch)
    for sparsity in (0.8, 0.9):
        yield (
            f"16×1 {sparsity * 100:.0f} %",
            torch.float32,
            BlockLinear.from_dense(masked(Block(16, 1), sparsity)),
        )
    for sparsity in (0.8, 0.9):
        yield (
            f"grouped columns {sparsity * 100:.0f} %",
            torch.float32,
            GroupedLinear.from_dense(masked(GroupedColumns(256), sparsity), outputs=256).requires_grad_(False),
        )


def dense_products(weight: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    turned = weight.t().contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
    return {
        "linear": lambda: functional.linear(x, weight),
        "transposed": lambda: x @ turned,
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
    }


def bench_kernels(options: argparse.Namespace) -> None:
    print(f"{SIZE}×{SIZE}; {kernels.describe()}; clock: {options.clock}\n")
    for threads in options.threads:
        torch.set_num_threads(threads)
        bandwidth, rate = floors(options.rounds, options.clock)
        print(f"\n{threads} thread(s): {bandwidth / 1e6:.1f} GB/s, {rate / 1e6:.0f} GFLOP/s\n")
        print("| form | batch | best dense, ms | ours, ms | times faster | goal | floor, ms | ours / floor |")
        print("|---|---|---|---|---|---|---|---|")
        for number, batch in enumerate(options.batches):
            x = torch.randn(batch, SIZE)
            dense = {kind: torch.randn(SIZE, SIZE).to(kind) for kind in (torch.float32, torch.bfloat16)}
            for name, dtype, layer in forms(batch):
                own_x = x.to(dtype)
                rivals = dense_products(dense[dtype], own_x)
                times = alternating({**rivals, "ours": partial(layer, own_x)}, options.rounds, options.clock)
                best = min(rivals, key=lambda rival: statistics.median(times[rival]))
                ours, faster = statistics.median(times["ours"]), ratio(times["ours"], times[best])
                read = sum(tensor.nbytes for tensor in layer.state_dict().values()) + 8 * batch * SIZE
                floor = max(read / bandwidth, 2 * layer.values.numel() * batch / rate)
                goals = GOALS.get(name, ())
                goal = (
                    f"{goals[number]} {'met' if faster >= goals[number] else 'missed'}" if number < len(goals) else ""
                )
                print(
                    f"| {name} | {batch} | {statistics.median(times[best]):.2f} ({best}) | {ours:.2f} | "
                    f"**{faster:.2f}** | {goal} | {floor:.2f} | {ours / floor:.1f} |",
                    flush=True,
                )


# ------------------------------------------------------------------------------------------------------ whole models


def digits_mlp() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model.eval(), torch.rand(64, 64)


def digits_cnn() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(64, 256, 1), nn.ReLU(), nn.Conv2d(256, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval(), torch.rand(
        64, 1, 8, 8
    )


def encoder(folder: Path | None) -> tuple[nn.Module, Any]:
    """MiniLM where its folder is given, else a BERT of the same shape with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    if folder is not None:
        model = BertModel.from_pretrained(folder)
    else:
        model = BertModel(
            BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        )
    return Only(model.eval(), "last_hidden_state"), torch.randint(1000, 20000, (8, 64))


def decoder() -> tuple[nn.Module, Any]:
    """A GPT-2 of 8 layers, width 768, one token after 64 others, whose keys and values are held."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_layer=8, n_embd=768, n_head=12, vocab_size=20000)).eval()
    return NextToken(model), torch.randint(0, 20000, (1, 1))


class Only(nn.Module):
    """One of a transformer's outputs."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model, self.field = model, field

    def forward(self, tokens: Tensor) -> Tensor:
        return getattr(self.model(tokens), self.field)


class NextToken(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():
            self.past = [
                (layer.keys, layer.values)
                for layer in model(torch.arange(64)[None], use_cache=True).past_key_values.layers
            ]

    def forward(self, tokens: Tensor) -> Tensor:
        from transformers import DynamicCache

        return self.model(tokens, past_key_values=DynamicCache(self.past), use_cache=True).last_hidden_state


def pruned(model: nn.Module, example: Any, pattern: Any, sparsity: float) -> tuple[nn.Module, str]:
    model = copy.deepcopy(model)
    sparsify(model, sparsity, pattern=pattern, allocate=uniform)
    packing = pack(model, example)
    kinds = [layer.kind for layer in packing.packed]
    return model, f"{len(kinds)}/{len(packing.layers)} layers packed"


def shrunken(model: nn.Module, example: Any, sparsity: float) -> tuple[nn.Module, str]:
    model = copy.deepcopy(model)
    shrink(model, example, sparsity, target="macs", verify=False)
    return model, "channels gone"


def int8(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def onnx_session(model: nn.Module, example: Tensor, threads: int, quantized: bool) -> Callable[[], Any]:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "model.onnx")
        torch.onnx.export(model, (example,), dynamo=True, verbose=False).save(str(path))
        if quantized:
            graph = onnx.load(path)
            del graph.graph.value_info[:]  # the exporter's shapes and those that are inferred anew differ
            onnx.save(graph, path)
            quantize_dynamic(path, Path(folder, "int8.onnx"))
            path = Path(folder, "int8.onnx")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: example.numpy()}
    return lambda: session.run(None, feed)


def size_of(model: nn.Module) -> float:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell() / 1e6


def bench_models(options: argparse.Namespace) -> None:
    makers = {
        "digits MLP, 64 images": digits_mlp,
        "digits CNN, 64 images": digits_cnn,
        "encoder, 8 texts of 64 tokens": lambda: encoder(options.minilm),
        "GPT-2 of 8 layers, next token": decoder,
    }
    for title, make in makers.items():
        if not fnmatch.fnmatch(title, options.only):
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            model, example = make()
            runs: dict[str, tuple[Callable[[], Any], str]] = {
                "eager": (partial(model, example), f"{size_of(model):.1f} MB")
            }
            runs["torch.compile"] = (partial(torch.compile(model), example), "")
            for name, quantized in (("ONNX Runtime", False), ("ONNX Runtime int8", True)):
                try:
                    runs[name] = (onnx_session(model, example, threads, quantized), "")
                except Exception as error:  # an exporter's failure is a row
                    print(f"({title}: no {name}: {type(error).__name__})")
            runs["torch int8, linear layers"] = (partial(int8(model), example), "")
            for label, pattern in (
                ("unstructured", Unstructured()),
                ("16×1", Block(16, 1)),
                ("columns:64", GroupedColumns(64)),
            ):
                for sparsity in (0.5, 0.8, 0.9):
                    smaller, what = pruned(model, example, pattern, sparsity)
                    key = f"{label} {sparsity:.0%}, packed"
                    runs[key] = (partial(smaller, example), f"{size_of(smaller):.1f} MB, {what}")
            try:
                smaller, what = shrunken(model, example, 0.5)
                runs["shrink, half the MACs"] = (partial(smaller, example), f"{size_of(smaller):.1f} MB, {what}")
            except ValueError as error:  # what cannot shrink that far is left out, and said
                print(f"({title}: no shrink: {error})")
            times = alternating({name: run for name, (run, _) in runs.items()}, options.rounds, options.clock)
            print(f"\n{title}, {threads} thread(s)\n\n| | ms | times faster than eager | |\n|---|---|---|---|")
            for name, (_, note) in runs.items():
                faster = ratio(times[name], times["eager"])
                print(f"| {name} | {statistics.median(times[name]):.2f} | {faster:.2f} | {note} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("what", choices=["kernels", "models"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--only", default="*")
    parser.add_argument("--minilm", type=Path)
    options = parser.parse_args()
    bench_kernels(options) if options.what == "kernels" else bench_models(options)


if __name__ == "__main__":
    main()
