"""A model and its inputs, named on the command line as ``module.path:name``. A model in every form that bench and pack
compare, and the time of each, beside the dense one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import native
from secateur.allocation import uniform
from secateur.checkpoints import CheckpointError, open_checkpoint
from secateur.cli.terminal import waiting
from secateur.inference import Packing, pack
from secateur.models import loaded_model, sparsify
from secateur.patterns import Pattern
from secateur.report import Reported, Timed, before_and_after
from secateur.shrinking import WithoutDataWarning, shrink
from secateur.support import (
    Column,
    Part,
    Table,
    alternating,
    bytes_text,
    check_batches,
    device_of,
    moved,
    printable,
    ratio,
    run_example,
    tensors_in,
    track,
)

# ---- A model and its inputs, named on the command line as ``module.path:name``.
#
# Law: modules are looked for in the current directory first, and what the user's own code raises is said to be its
# own.


def model_of(path: str) -> tuple[nn.Module, str]:
    """The model that ``module:name`` is or makes, and the expression that gives a fresh one."""
    found = _object_at(path)
    name = path.partition(":")[2]
    if isinstance(found, nn.Module):
        return found, name
    if not callable(found):
        raise ValueError(f"{path} is of type {type(found).__name__}; give a function that makes a torch.nn.Module.")
    with blamed(f"{path}()"):
        model = found()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}() gave a value of type {type(model).__name__}, not a torch.nn.Module.")
    return model, f"{name}()"


def inputs_of(path: str) -> Any:
    found = _object_at(path)
    if callable(found):
        with blamed(f"{path}()"):
            found = found()
    if not isinstance(found, Tensor | tuple | list | Mapping):
        raise ValueError(
            f"{path} gave a value of type {type(found).__name__}; "
            "give a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    return found


def batches_of(path: str, samples: int) -> list[Any]:
    """The first batches of what ``module:name`` is or makes, until there are so many examples."""
    found = _object_at(path)
    batches: list[Any] = []
    with blamed(path):
        for batch in found() if callable(found) else found:
            batches.append(batch)
            samples -= next((len(each) for each in tensors_in(batch) if each.dim()), 1)
            if samples <= 0:
                break
    check_batches(batches)
    return batches


def _object_at(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} names nothing in a module; write it module.path:name, as in models.vision:build.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    with blamed(f"importing {module}"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # it imports something else that is missing
            found = None
    if found is None:
        raise ValueError(f"there is no module {module}, neither in this directory nor installed.")
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}.")
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Whatever the user's code raises within becomes a line that says whose code it was."""
    try:
        yield
    except Exception as error:
        debug = "SECATEUR_DEBUG=1 shows where."
        raise ValueError(f"{what} raised {type(error).__name__}: {str(error).rstrip('.')}. {debug}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """All tensors of the model, by name; of those that are one tensor under several names one suffices."""
    checkpoint, mine = open_checkpoint(path), model.state_dict(keep_vars=True)
    given = {id(mine[name]) for name in checkpoint if name in mine}
    for names, words in (
        ([name for name in mine if id(mine[name]) not in given], "lacks"),
        ([name for name in checkpoint if name not in mine], "holds what the model does not have:"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{path} does not fit the model: it {words} {', '.join(names[:3])}{more}.")
    for name, entry in checkpoint.entries.items():
        if entry.shape != tuple(mine[name].shape):
            shapes = f"{entry.shape}, in the model {tuple(mine[name].shape)}"
            raise ValueError(f"{path} does not fit the model: {name} has shape {shapes}.")
    model.load_state_dict(dict(checkpoint), strict=False)


# ---- A model in every form that bench and pack compare, and the time of each, beside the dense one.
#
# Law: every figure is measured in this run, in alternating rounds; the model's weights may be random, for time does
# not depend on their values.
#
# ``--report``: what a command was asked and what came of it, on a page beside what it prints.
#
# Law: a page that could not be written is refused before the work starts; it says what stdout says, and more.

ROUNDS = 7
SECONDS_A_TURN = 0.02
MOST_BYTES = 4 * 10**9  # of two models in memory at once, for the times on a page
TOKENS = 32  # of the one sequence that they are timed on


@dataclass(frozen=True)
class Form:
    name: str
    sparsity: float | None
    model: nn.Module
    packing: Packing | None = None

    @property
    def title(self) -> str:
        return self.name if self.sparsity is None else f"{self.name} {self.sparsity:.0%}"


@dataclass(frozen=True)
class Bench(Reported):
    """What was measured: ``times`` are seconds of one call of each form in each round; ``missing`` says why; ``what``
    the inputs are."""

    forms: list[Form]
    times: list[list[float]]
    missing: dict[str, str]
    threads: int
    what: str = ""

    def content(self) -> Iterator[Part]:
        """A row for each form, and one for each layer of every packed one."""
        yield from self.summary()
        for form in self.forms:
            if form.packing is not None:
                title = f"The layers of {form.title}"
                yield ""
                yield form.title
                yield dataclasses.replace(form.packing.table(title), name=f"layers of {form.title}")

    def summary(self) -> Iterator[Part]:
        """A row for each form, compared with the dense one in medians over rounds."""

        def layers(form: Form) -> str | None:
            packing = form.packing
            return None if packing is None else f"{len(packing.packed)} of {len(packing.layers)} layers"

        def ms(which: Callable[[list[float]], float]) -> Callable[[tuple[Form, list[float]]], float]:
            return lambda each: 1e3 * which(each[1])

        yield Table.of(
            "forms",
            zip(self.forms, self.times, strict=True),
            Column.name("pattern", lambda each: each[0].name),
            Column("sparsity", lambda each: each[0].sparsity, "{:.0%}".format),
            Column.figure("ms", ms(statistics.median)),
            Column.figure("ms, fastest round", ms(min), detail=True),
            Column.figure("ms, slowest round", ms(max), detail=True),
            Column.figure("times faster", lambda each: ratio(each[1], self.times[0]), ".2f"),
            Column.bytes("size", lambda each: stored_bytes(each[0].model)),
            Column("packed", lambda each: layers(each[0])),
            title="Form by form",
        )
        yield ""
        yield ran_on(self.what, self.threads)
        yield from (f"No {name}: {why}" for name, why in self.missing.items())
        yield "Zeros alone do nothing: a layer is packed where that was measured to be faster."


def ran_on(what: str, threads: int) -> str:
    """The inputs, the threads and the kernels, in a sentence."""
    return f"{what}{threads} thread{'s' * (threads > 1)}; {native.describe()}."


def model_and_inputs(where: str, example: str | None, batch: int, tokens: int) -> tuple[nn.Module, Any, str]:
    """The model, what it is called with, and in words what that is, if it was chosen here."""
    if not Path(where).is_dir():
        if example is None:
            raise ValueError(
                f"{where} is no directory, so --example has to say what the model is given: module:inputs, "
                "a tensor, a tuple of arguments or a dict of keyword arguments."
            )
        built = model_of(where)[0]
        return built, moved(inputs_of(example), device_of(built)), ""
    built = model_in(Path(where))
    if example is not None:
        return built, inputs_of(example), ""
    inputs, what = inputs_for(built, where, batch, tokens)
    return built, inputs, f"{what}; "


def model_in(directory: Path) -> nn.Module:
    """The model in a Hugging Face directory, in memory."""
    with waiting("loading the model"):
        return loaded_model(directory)


def inputs_for(model: Any, where: str, batch: int, tokens: int) -> tuple[dict[str, Tensor], str]:
    """Random inputs of the size that a transformers model's configuration allows."""
    config, main = model.config, model.main_input_name
    text, draw = config.get_text_config(), torch.Generator().manual_seed(0)
    if main == "input_ids" and getattr(text, "vocab_size", None):
        longest = getattr(text, "max_position_embeddings", None) or tokens
        if tokens > longest:
            raise ValueError(f"--tokens {tokens} is more than the {longest} positions of {printable(where)}.")
        ids = torch.randint(0, text.vocab_size, (batch, tokens), generator=draw, device="cpu")
        inputs = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        return inputs, f"{batch} × {tokens} tokens"
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and size:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        images = torch.randn(batch, channels, height, width, generator=draw, dtype=torch.float32, device="cpu")
        return {"pixel_values": images.to(model.dtype)}, f"{batch} × {channels} × {height} × {width} pixels"
    raise CheckpointError(f"{printable(where)}: its config.json does not tell what it is given; say it with --example.")


def timed_directories(before: Path, after: Path) -> Timed | str:
    """What a directory's model took and what the new one takes; or, in words, why that was not measured.

    Both are loaded, so that they have to fit in memory together, and run one random sequence of 32 tokens, or one
    random image. The work is done and written by now: what goes wrong here is said, and nothing more.
    """
    try:
        total = sum(entry.nbytes for each in (before, after) for entry in open_checkpoint(each).entries.values())
        if total > MOST_BYTES:
            return (
                f"Time was not measured: both models in memory are {bytes_text(total)}, more than "
                f"{bytes_text(MOST_BYTES)}. secateur bench DIR measures one."
            )
        dense, model = model_in(before), model_in(after)
        config: Any = model.config
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        inputs, what = inputs_for(model, str(after), 1, min(TOKENS, longest or TOKENS))
        return before_and_after(dense, model, inputs, call=what)
    except Exception as error:  # of a directory of any kind, whose tensors alone the verb may have needed
        return f"Time was not measured: {_line(error)}"


def measured(
    model: nn.Module,
    inputs: Any,
    chosen: Mapping[str, Pattern],
    sparsities: Sequence[float],
    threads: int | None = None,
    *,
    what: str = "",
) -> Bench:
    """Every form of the model, timed in turns with as many threads; torch's own setting is put back."""
    with with_threads(threads):
        forms, missing = _forms(model, inputs, chosen, sparsities)
        return Bench(forms, _timed(forms, inputs), missing, torch.get_num_threads(), what)


def packed(
    model: nn.Module, example_inputs: Any, threads: int | None = None, /, *, what: str = "", **options: Any
) -> tuple[Packing, list[str]]:
    """The model packed in place, with the options of `secateur.pack`, and what the whole of it took and takes, in
    words, where anything was packed."""
    model.eval().requires_grad_(False)
    with with_threads(threads):
        dense = copy.deepcopy(model)
        packing = pack(model, example_inputs, **options)
        said = []
        if packing.packed:
            before, after = _timed([Form("dense", None, dense), Form("packed", None, model, packing)], example_inputs)
            was, now = (1e3 * statistics.median(own) for own in (before, after))
            faster = ratio(after, before)
            said = [f"The model takes {now:.3g} ms, and took {was:.3g}; round by round {faster:.2f} times as fast."]
        return packing, [*said, ran_on(what, torch.get_num_threads())]


def _timed(forms: Sequence[Form], inputs: Any) -> list[list[float]]:
    calls = {number: functools.partial(run_example, form.model, inputs) for number, form in enumerate(forms)}
    with torch.no_grad():
        return list(alternating(calls, ROUNDS, at_least=SECONDS_A_TURN, told="timing").values())


@contextlib.contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """So many threads within; torch's own setting is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _forms(
    model: nn.Module, inputs: Any, chosen: Mapping[str, Pattern], sparsities: Sequence[float]
) -> tuple[list[Form], dict[str, str]]:
    """The forms, the dense model first, and why others are missing."""
    model.eval().requires_grad_(False)
    forms, missing = [Form("dense", None, model)], {}
    as_it_is = copy.deepcopy(model)
    packing = pack(as_it_is, inputs)
    if any(layer.sparsity > 0.01 for layer in packing.layers):
        forms.append(Form("as it is", None, as_it_is, packing))
    wanted = [(word, sparsity) for word in chosen for sparsity in sparsities]
    for word, sparsity in track(wanted, "pruning and packing"):
        other = copy.deepcopy(model)
        sparsify(other, sparsity, pattern=chosen[word], allocate=uniform)
        forms.append(Form(word, sparsity, other, pack(other, inputs)))
    smaller = copy.deepcopy(model)
    try:
        with waiting("shrinking"), warnings.catch_warnings():
            warnings.simplefilter("ignore", WithoutDataWarning)  # what is measured is time alone
            shrink(smaller, inputs, 0.5, target="macs", verify=False)
        forms.append(Form("shrink, half the work", None, smaller))
    except Exception as error:  # the user's model may be of any kind, and the other forms stand
        missing["shrink, half the work"] = _line(error)
    for form in [forms[0], *(each for each in forms if each.name.startswith("shrink"))]:
        name = "int8" if form.name == "dense" else f"{form.name}, int8"
        try:
            quantized = _int8(form.model)
            with torch.no_grad():
                run_example(quantized, inputs)
            forms.append(Form(name, None, quantized))
        except Exception as error:  # as above
            missing[name] = _line(error)
    return forms, missing


def _int8(model: nn.Module) -> nn.Module:
    """A copy with linear layers in int8, activations by what they are at run time: what torch does by itself."""
    if not any(type(module) is nn.Linear for module in model.modules()):
        raise ValueError("torch has it for linear layers, and there is none.")
    if (there := device_of(model)) is not None and there.type != "cpu":
        raise ValueError(f"torch has it for the CPU, and the model is on {there}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch names a successor, in a package of its own
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    return quantized


def _line(error: Exception) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 150)


def stored_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, each once; of quantized layers what saving them takes."""
    state = list(model.state_dict().values())
    if all(isinstance(value, Tensor) for value in state):
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in state}.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()
