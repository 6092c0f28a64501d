"""``secateur bench``: what zeros would be worth to the user's own model, on this machine.

Law: every figure is measured in this run, beside the dense model, in alternating rounds; the model's weights may be
random, for time does not depend on their values.
"""

import copy
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from secateur import native, patterns
from secateur.allocation import uniform
from secateur.blockwise import blaming_config, build_on_meta
from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.cli.factories import inputs_of, model_of
from secateur.cli.terminal import clear_errors, printing, table_of, terminable, waiting
from secateur.inference import Packing, pack
from secateur.pipeline import sparsify
from secateur.shrinking import shrink
from secateur.support import bytes_text, printable, run_batch, track

__all__ = ["bench"]

_ROUNDS = 7
_SECONDS_A_ROUND = 0.02


@dataclass(frozen=True)
class _Row:
    name: str
    sparsity: float | None
    model: nn.Module
    packing: Packing | None = None


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_FACTORY",
            help="A Hugging Face directory, of which no code is run; or module:factory, what makes the model, called "
            "without arguments: the module is imported, and its code is run.",
        ),
    ],
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:INPUTS",
            help="A tensor or a dict of keyword arguments, or a function that makes one; of the size to be served. "
            "Its module is imported and run, too. A directory needs none.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Of a directory: how many texts or images at once.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Of a directory: how many tokens in each text.")] = 64,
    sparsity: Annotated[
        list[float] | None,
        typer.Option("--sparsity", "-s", help="Fraction removed, in [0, 1). Repeatable; 0.5, 0.8 and 0.9 if left out."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern", "-p", help="Repeatable; unstructured, 16x1 and columns:64 if left out. As in secateur prune."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; its own setting if left out.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer of each form.")] = False,
) -> None:
    """Prune copies of a model in several patterns, pack them, and time them beside the dense one.

    Beside them: the model as it is with its own zeros packed, if it has any; half of its work removed as whole channels
    (shrink); and int8, dense and shrunken. Accuracy is not looked at: what the zeros cost, only training and validation
    tell. Importing a module runs its code: name only what you trust.
    """
    with clear_errors(), terminable():
        chosen = {word: patterns.parse(word) for word in pattern or ("unstructured", "16x1", "columns:64")}
        for word, each in chosen.items():
            if each.density is not None:
                raise ValueError(f"{word} has a sparsity of its own; bench wants patterns that take any.")
        for fraction in sparsity or ():
            if not 0 <= fraction < 1:
                raise ValueError(f"--sparsity is a fraction in [0, 1), not {fraction}; 90 % is written 0.9.")
        built, inputs, what = _model_and_inputs(model, example, batch, tokens)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads or before)
            rows, missing = _rows(built, inputs, chosen, sparsity or [0.5, 0.8, 0.9])
            times = _times([_call(row.model, inputs) for row in rows])
            used = torch.get_num_threads()
        finally:
            torch.set_num_threads(before)
        with printing() as console:
            table = table_of("pattern", "sparsity", ">ms", ">times faster", ">size", "packed")
            for row, own in zip(rows, times, strict=True):
                faster = statistics.median(dense / packed for dense, packed in zip(times[0], own, strict=True))
                table.add_row(
                    row.name,
                    "" if row.sparsity is None else f"{row.sparsity:.0%}",
                    f"{statistics.median(own):.3g}",
                    f"{faster:.2f}",
                    bytes_text(_bytes(row.model)),
                    "" if row.packing is None else f"{len(row.packing.packed)} of {len(row.packing.layers)} layers",
                )
            console.print(table)
            console.print(f"\n{what}{used} thread{'s' * (used > 1)}; {native.describe()}.")
            for name, why in missing.items():
                console.print(f"No {name}: {why}", markup=False)
            console.print("Zeros alone do nothing: a layer is packed where that was measured to be faster.")
            if layers:
                for row in rows:
                    if row.packing is not None:
                        percentage = "" if row.sparsity is None else f" {row.sparsity:.0%}"
                        console.print(f"\n{row.name}{percentage}\n{row.packing}", markup=False)
        sys.stdout.flush()


def _model_and_inputs(where: str, example: str | None, batch: int, tokens: int) -> tuple[nn.Module, Any, str]:
    """The model, one batch for it, and what the batch is, if that was chosen here."""
    if not Path(where).is_dir():
        if example is None:
            raise ValueError(
                f"{where} is no directory, so --example has to say what the model is given: module:inputs, "
                "a tensor or a dict of keyword arguments."
            )
        return model_of(where)[0], inputs_of(example), ""
    kind = type(build_on_meta(open_checkpoint(Path(where))))
    with waiting("loading the model"), blaming_config(Path(where), "its model cannot be loaded"):
        built: nn.Module = kind.from_pretrained(where, local_files_only=True, dtype="auto")  # type: ignore[attr-defined]
    if example is not None:
        return built, inputs_of(example), ""
    inputs, what = _inputs_for(built, where, batch, tokens)
    return built, inputs, f"{what}; "


def _inputs_for(model: Any, where: str, batch: int, tokens: int) -> tuple[dict[str, Tensor], str]:
    """Random inputs of the size that a transformers model's configuration allows."""
    config, main = model.config, model.main_input_name
    text, draw = config.get_text_config(), torch.Generator().manual_seed(0)
    if main == "input_ids" and getattr(text, "vocab_size", None):
        longest = getattr(text, "max_position_embeddings", None) or tokens
        if tokens > longest:
            raise ValueError(f"--tokens {tokens} is more than the {longest} positions of {printable(where)}.")
        ids = torch.randint(0, text.vocab_size, (batch, tokens), generator=draw)
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        return inputs, f"{batch} × {tokens} tokens"
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and size:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        images = torch.randn(batch, channels, height, width, generator=draw)
        return {"pixel_values": images.to(model.dtype)}, f"{batch} × {channels} × {height} × {width} pixels"
    raise CheckpointError(f"{printable(where)}: its config.json does not tell what it is given; say it with --example.")


def _rows(
    model: nn.Module, inputs: Any, chosen: dict[str, patterns.Pattern], sparsities: list[float]
) -> tuple[list[_Row], dict[str, str]]:
    """The rows, the dense model first, and why others are missing."""
    model.eval().requires_grad_(False)
    rows, missing = [_Row("dense", None, model)], {}
    as_it_is = copy.deepcopy(model)
    packing = pack(as_it_is, inputs)
    if any(layer.sparsity > 0.01 for layer in packing.layers):
        rows.append(_Row("as it is", None, as_it_is, packing))
    wanted = [(word, sparsity) for word in chosen for sparsity in sparsities]
    for word, sparsity in track(wanted, "pruning and packing"):
        other = copy.deepcopy(model)
        sparsify(other, sparsity, pattern=chosen[word], allocate=uniform)
        rows.append(_Row(word, sparsity, other, pack(other, inputs)))
    smaller = copy.deepcopy(model)
    try:
        with waiting("shrinking"):
            shrink(smaller, inputs[0] if isinstance(inputs, tuple | list) else inputs, 0.5, target="macs", verify=False)
        rows.append(_Row("shrink, half the work", None, smaller))
    except Exception as error:  # the user's model may be of any kind, and the other rows stand
        missing["shrink, half the work"] = _line(error)
    for row in [rows[0], *(row for row in rows if row.name.startswith("shrink"))]:
        name = "int8" if row.name == "dense" else f"{row.name}, int8"
        try:
            quantized = _int8(row.model)
            with torch.no_grad():
                run_batch(quantized, inputs)
            rows.append(_Row(name, None, quantized))
        except Exception as error:  # as above
            missing[name] = _line(error)
    return rows, missing


def _int8(model: nn.Module) -> nn.Module:
    """A copy with linear layers in int8, activations by what they are at run time: what torch does by itself."""
    if not any(type(module) is nn.Linear for module in model.modules()):
        raise ValueError("torch has it for linear layers, and there is none.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names a successor, in a package of its own
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    return quantized


def _line(error: Exception) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 150)


def _call(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    return lambda: run_batch(model, inputs)


def _times(calls: list[Callable[[], Any]]) -> list[list[float]]:
    """Milliseconds of each, in rounds in which they alternate; the first round does not count."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for turn in track(range(_ROUNDS + 1), "timing"):
            for call, own in zip(calls, times, strict=True):
                started, count = time.perf_counter(), 0
                while not count or time.perf_counter() - started < _SECONDS_A_ROUND:
                    call()
                    count += 1
                if turn:
                    own.append((time.perf_counter() - started) / count * 1e3)
    return times


def _bytes(model: nn.Module) -> int:
    """Of parameters and buffers, each once; of quantized layers what saving them takes."""
    state = list(model.state_dict().values())
    if all(isinstance(value, Tensor) for value in state):
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in state}.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()
