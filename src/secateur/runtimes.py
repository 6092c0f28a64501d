"""What runs a finished model, as ``runtime=`` says, and how long a pass takes there.

Law: what is timed is what the runtime loads: the exported graph, whose weights are constants, with as many threads as
torch has. The model stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import io
import logging
import statistics
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from secateur.support import (
    ONE_AT_A_TIME,
    alternating,
    device_of,
    devices_in_use,
    in_mode,
    mapped,
    moved,
    printable,
    private,
    ratio,
    run_example,
    tensors_in,
    unchanged,
    unknown,
)

__all__ = [
    "Elsewhere", "Loaded", "OnnxRuntime", "OpenVINO", "Runtime", "Timer", "Torch", "is_mixed", "parse", "rounding",
    "sums_overflow", "timed_by",
]  # fmt: skip

OUTPUT = "output"  # what an output of no name is called; of several their places follow: output_0, output_1
_ROUNDS, _SECONDS = 9, 1.0
_FILE, _IR = "model.onnx", "model.xml"
_LARGE = 2**31  # bytes: more than one file of ONNX holds
_SMALL = 64  # numbers of a constant that is written as it is
_AT_ONCE = 16  # products whose inputs are in memory
_BLOCK, _IN_8_BITS = 32, 4  # of 4 bits: inputs that share a range; how exact products are, as ONNX Runtime numbers it


@runtime_checkable
class Runtime(Protocol):
    """``(model, example_inputs) -> call``, of which each call runs the model once, in evaluation mode.

    Attributes:
        clock: by which its calls are timed.

    >>> isinstance(Torch(), Runtime)
    True
    """

    def __call__(self, model: nn.Module, example_inputs: Any, *, traced: bool = False) -> Callable[[], object]:
        """The call.

        Args:
            traced: by torch's older exporter, which takes a hundredth of the time for a single operation.

        Raises:
            ValueError: the model cannot be exported. ImportError: the runtime is not installed.
        """

    @property
    def clock(self) -> Callable[[], float]: ...


@runtime_checkable
class Elsewhere(Protocol):
    """A machine that is not this one: nothing is run, and each operation has a price; see `secateur.operations`.

    >>> isinstance(parse(lambda operation, shapes: 1.0), Elsewhere)
    True
    """

    def of(self, operation: Any) -> float:
        """Milliseconds of an operation of `secateur.operations`."""

    def total(self, model: nn.Module, example_inputs: Any) -> float:
        """Milliseconds of all that a model calls on the example."""


def clock_of_threads() -> Callable[[], float]:
    """Of a single thread the time that it computed: what else the machine does would count as waiting; where no device
    is waited for."""
    alone = torch.get_num_threads() == 1 and not devices_in_use()[1]
    return time.thread_time if alone else time.perf_counter


@dataclass(frozen=True)
class Torch:
    """PyTorch itself, on the device where the model is.

    >>> Torch()(nn.Linear(2, 1), torch.ones(3, 2))().shape
    torch.Size([3, 1])
    """

    def __call__(self, model: nn.Module, example_inputs: Any, **_: Any) -> Callable[[], object]:
        return functools.partial(run_example, model, moved(example_inputs, device_of(model)))

    @property
    def clock(self) -> Callable[[], float]:
        return clock_of_threads()

    def __str__(self) -> str:
        return f"torch {torch.__version__}"


@dataclass(frozen=True)
class Loaded:
    """A graph that a runtime has read from a folder.

    Attributes:
        inputs, outputs: their names, in order.
        run: ``{input: array} -> arrays``, in the order of the outputs.

    >>> Loaded(("x",), ("y",), lambda feeds: [feeds["x"] + 1]).feeds(torch.ones(1))
    {'x': array([1.], dtype=float32)}
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Mapping[str, Any]], Sequence[Any]]

    def feeds(self, example_inputs: Any) -> dict[str, Any]:
        """What the graph is fed with, of what the model is called with."""
        return _named([*self.inputs], example_inputs, [*tensors_in(example_inputs)])


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on the processor; ``pip install "secateur[onnx]"``.

    Attributes:
        bits: 8: weights of matrix products in 8 bits, and their inputs as they come, as ``quantize_dynamic`` does it;
            tables of embeddings, too. Weights have 7 where a processor without VNNI would overflow. Convolutions stay
            in float, which is faster there unless their inputs are calibrated. 4: weights of matrix products in 4 bits,
            a range for each 32 inputs of an output, by ``MatMulNBitsQuantizer`` (ONNX Runtime 1.22 or later), their
            inputs in 8 bits as they come, and tables in 8. 32: as they are.
        calibrated: of 8 bits: convolutions, too, by ranges of their inputs that are known, as ``quantize_static`` does
            it. What is only timed is calibrated on the example.
        modules: of ``"onnxruntime:mixed"``: ``(module, bits)`` of each linear and table that has fewer than 32, and, if
            it is ``calibrated``, of each convolution; which they are, and how many, is what `secateur.fit` finds out.
            None where all have the same.

    >>> OnnxRuntime() == parse("onnxruntime")
    True
    """

    bits: int = 32
    calibrated: bool = False
    modules: tuple[tuple[str, int], ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (32, 8, 4) or (self.calibrated and self.bits != 8):
            given = f"{self.bits!r}{', calibrated' * self.calibrated}"
            raise ValueError(f"bits is 32, 8 or 4, and only 8 can be calibrated; got {given}.")
        mixed = self.bits == 4 or self.calibrated
        if self.modules is not None and not (mixed and {*dict(self.modules).values()} <= {*self.menu}):
            raise ValueError(
                "modules= has 8 or 4 bits of each, of what is calibrated 8, and bits is the least of them; got "
                f"{self.modules} and {self.bits}."
            )

    @property
    def menu(self) -> tuple[int, ...]:
        """The bits below 32 that modules may have, where these are chosen."""
        return (8,) if self.calibrated else (8, 4)

    def package(self) -> Any:
        """Of it; ImportError with what to install."""
        found = _installed("onnxruntime", "ONNX Runtime", '"secateur[onnx]"')
        if self.bits == 4:
            try:
                importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
            except ImportError as error:
                raise ImportError(
                    f"4 bits need ONNX Runtime 1.22 or later, and this is {found.__version__}: pip install --upgrade "
                    "onnxruntime"
                ) from error
        return found

    def __call__(self, model: nn.Module, example_inputs: Any, *, traced: bool = False) -> Callable[[], object]:
        self.package()
        with _exported(model, example_inputs, traced) as folder, _or_says(f"{self} does not run the model"):
            loaded = self.load(folder)
            feeds = loaded.feeds(example_inputs)
            if self.bits < 32:
                self.rounded(folder, folder / "rounded", [feeds])
                loaded = self.load(folder / "rounded")
            call = functools.partial(loaded.run, feeds)
            call()  # what it does not compute it says here
        return call

    @property
    def clock(self) -> Callable[[], float]:
        return clock_of_threads()  # with one thread it computes in the one that calls

    def write(self, model: nn.Module, example_inputs: Any, folder: Path) -> None:
        """``model.onnx`` in a folder: the model in evaluation mode, in float, for any number of examples, and of
        tokens, as far as its code allows.

        Raises:
            ValueError: it cannot be exported.
        """
        _export(model, example_inputs, folder, any_size=True)

    def check(self, model: nn.Module) -> None:
        """Raises ValueError for a model in bfloat16, of which no matrix can be exported."""
        _refuse_bfloat16(model)

    def write_alone(self, model: nn.Module, example_inputs: Any, path: Path) -> None:
        """A small file of a single operation, for inputs of these shapes alone: of weights it says their shape, and the
        runtime makes them when it reads it.

        Raises:
            ValueError: it cannot be exported.
        """
        try:
            self._write_alone(model, example_inputs, path, traced=True)
        except ValueError:  # as of attention whose heads share keys
            self._write_alone(model, example_inputs, path, traced=False)

    def _write_alone(self, model: nn.Module, example_inputs: Any, path: Path, *, traced: bool) -> None:
        with _exported(model, example_inputs, traced) as folder, _or_says(f"{self} does not take it", ""):
            if self.bits < 32:
                self.rounded(folder, folder / "rounded", [self.load(folder).feeds(example_inputs)])
                folder = folder / "rounded"
            _hollow(folder / _FILE, path)
            self.package().InferenceSession(str(path), self._options(), providers=["CPUExecutionProvider"])

    def load(self, folder: Path) -> Loaded:
        """The graph that `write` or `rounded` wrote, with as many threads as torch has."""
        path = str(folder / _FILE)
        session = self.package().InferenceSession(path, self._options(), providers=["CPUExecutionProvider"])
        inputs, outputs = (tuple(each.name for each in some()) for some in (session.get_inputs, session.get_outputs))
        return Loaded(inputs, outputs, functools.partial(session.run, None))

    def _options(self) -> Any:
        options = self.package().SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        return options

    def rounded(
        self, source: Path, folder: Path, feeds: Iterable[Mapping[str, Any]] = (), keep: Collection[str] = ()
    ) -> None:
        """Writes the graph of a folder to another one in 8 bits, or in 4, by the quantizers of ONNX Runtime.

        Args:
            feeds: what inputs are calibrated on, where it is ``calibrated``.
            keep: operations that stay in float, by the names of `matrices`.

        Raises:
            ValueError: it cannot.
        """
        folder.mkdir(exist_ok=True)
        with _or_says(f"{self} does not round the model", ""), _quiet():
            wide: list[str] = []
            if self.modules is not None:
                of = dict(self.modules)
                bits = {operation: of.get(module, 32) for operation, module in self.matrices(source).items()}
                exact, wide = ([each for each, its in bits.items() if its == number] for number in (32, 8))
                keep = [*keep, *exact]
            if self.calibrated:
                _in_static_int8(source / _FILE, folder / _FILE, feeds, keep)
            elif self.modules is not None:
                _in_int4(source / _FILE, folder / _FILE, keep, wide)
            else:
                (_in_int4 if self.bits == 4 else _in_int8)(source / _FILE, folder / _FILE, keep)

    def matrices(self, folder: Path) -> dict[str, str]:
        """``{operation: module}`` of those of a graph in float that multiply with a weight, or look up its rows."""
        import onnx

        graph = onnx.load(folder / _FILE, load_external_data=False).graph
        floats = (each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT)
        weights = {each.name for each in floats if len(each.dims) > 1}
        weights |= {node.output[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights}
        found = {}
        for node in graph.node:
            of = {"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0}.get(node.op_type)
            if of is not None and node.input[of] in weights:
                said = {each.key: each.value for each in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "[]")
                modules = [each for each in ast.literal_eval(said)[:-1] if each]
                found[node.name] = modules[-1] if modules else node.name
        return found

    def errors(self, folder: Path, feeds: Mapping[str, Any]) -> dict[str, float]:
        """``{operation: share of its output's norm}`` by which the output moves if its weight, and of 8 bits its input,
        is rounded and nothing else, on these inputs: of those of `matrices`, but for convolutions.
        """
        import onnx

        graph, places = (model := onnx.load(folder / _FILE)).graph, self.matrices(folder)
        values = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        values |= {node.output[0]: _turned(node, values) for node in graph.node if _turns(node, values)}
        tables = [node for node in graph.node if node.name in places and node.op_type == "Gather"]
        found = {node.name: _apart_by(_rounded(table := values[node.input[0]], 255), table) for node in tables}
        products = [node for node in graph.node if node.name in places and node.op_type in ("MatMul", "Gemm")]
        known = {*feeds, *(each.name for each in graph.output)}
        read = {node.input[0]: None for node in products if node.input[0] not in known}
        graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in read)
        with tempfile.TemporaryDirectory(prefix="secateur-") as place:
            onnx.save(model, Path(place, _FILE), save_as_external_data=_nbytes_of(folder) > _LARGE)
            session = self.package().InferenceSession(
                str(Path(place, _FILE)), self._options(), providers=["CPUExecutionProvider"]
            )
            for at in range(0, len(products), _AT_ONCE):
                some = products[at : at + _AT_ONCE]
                names = [*{node.input[0]: None for node in some if node.input[0] not in feeds}]
                read_now = session.run(names, dict(feeds)) if names else []  # of no names it gives all
                given = {**feeds, **dict(zip(names, read_now, strict=True))}
                for node in some:
                    turned = any(each.name == "transB" and each.i for each in node.attribute)
                    x, weight = given[node.input[0]], values[node.input[1]].T if turned else values[node.input[1]]
                    by = _rounded(weight, _steps(), -2) if self.bits == 8 else _in_blocks(weight)
                    near = (_rounded(x, 255) if self.bits == 8 else x) @ by
                    found[node.name] = _apart_by(near, x @ weight)
        return found

    def __str__(self) -> str:
        how = "" if self.bits == 32 else f", int{self.bits}"
        how = how if self.modules is None else ", mixed"
        return f"ONNX Runtime {metadata.version('onnxruntime')}{how}{', calibrated' if self.calibrated else ''}"


@dataclass(frozen=True)
class OpenVINO:
    """OpenVINO on the processor; ``pip install openvino "secateur[onnx]"``.

    Attributes:
        bits: 8: matrix products, convolutions and tables in 8 bits, by ranges of their inputs that are known, as
            ``nncf.quantize`` does it; ``pip install nncf``, too. Weights have 7 where a processor without VNNI would
            overflow. What is only timed is calibrated on the example. 32: as they are.

    >>> OpenVINO() == parse("openvino")
    True
    """

    bits: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (32, 8):
            raise ValueError(f"bits is 32 or 8; got {self.bits!r}.")

    def package(self) -> Any:
        """Of it; ImportError with what to install."""
        if self.bits == 8:
            with _quiet():
                _installed("nncf", "NNCF, which rounds for OpenVINO,", 'nncf openvino "secateur[onnx]"')
        return _installed("openvino", "OpenVINO", 'openvino "secateur[onnx]"')

    def __call__(self, model: nn.Module, example_inputs: Any, *, traced: bool = False) -> Callable[[], object]:
        self.package()
        with _exported(model, example_inputs, traced) as folder, _or_says(f"{self} does not run the model"):
            loaded = self._loaded(folder / _FILE)
            feeds = loaded.feeds(example_inputs)
            if self.bits == 8:
                loaded = self._loaded(self._in_int8(folder / _FILE, [feeds]))
            call = functools.partial(loaded.run, feeds)
            call()
        return call

    def write(self, model: nn.Module, example_inputs: Any, folder: Path) -> None:
        """``model.xml`` and ``model.bin`` in a folder, in float, for any number of examples and tokens, as
        ``model.onnx`` is by `OnnxRuntime.write`."""
        openvino = self.package()
        with tempfile.TemporaryDirectory(prefix="secateur-") as exported:
            _export(model, example_inputs, Path(exported), any_size=True)
            with _or_says(f"{self} does not read the model", ""):
                openvino.save_model(openvino.convert_model(Path(exported, _FILE)), folder / _IR, compress_to_fp16=False)

    def rounded(
        self, source: Path, folder: Path, feeds: Iterable[Mapping[str, Any]] = (), keep: Collection[str] = ()
    ) -> None:
        """Writes the graph of a folder to another one in 8 bits.

        Args:
            feeds: what inputs are calibrated on.
            keep: operations that stay in float, by their names.

        Raises:
            ValueError: it cannot.
        """
        folder.mkdir(exist_ok=True)
        with _or_says(f"{self} does not round the model", ""):
            self.package().save_model(self._in_int8(source / _IR, feeds, keep), folder / _IR, compress_to_fp16=False)

    def _in_int8(self, path: Path, feeds: Iterable[Mapping[str, Any]], keep: Collection[str] = ()) -> Any:
        openvino, nncf = self.package(), importlib.import_module("nncf")
        graph, given = openvino.Core().read_model(str(path)), [dict(each) for each in feeds]
        convolved = any("Convolution" in each.get_type_name() for each in graph.get_ops())
        more = {"overflow_fix": nncf.OverflowFix.ENABLE} if sums_overflow() else {}  # where ONNX Runtime overflows
        with _quiet():
            return nncf.quantize(
                graph,
                nncf.Dataset(given),
                subset_size=len(given),
                model_type=None if convolved else nncf.ModelType.TRANSFORMER,  # whose attention stays near
                ignored_scope=nncf.IgnoredScope(names=[*keep]),
                advanced_parameters=nncf.AdvancedQuantizationParameters(**more),
            )

    def load(self, folder: Path) -> Loaded:
        """The graph that `write` or `rounded` wrote, with as many threads as torch has."""
        return self._loaded(folder / _IR)

    def _loaded(self, graph: Any) -> Loaded:
        how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        given = str(graph) if isinstance(graph, Path) else graph
        compiled = self.package().Core().compile_model(given, "CPU", {"PERFORMANCE_HINT": "LATENCY", **how})
        request = compiled.create_infer_request()
        inputs, outputs = (tuple(each.any_name for each in some) for some in (compiled.inputs, compiled.outputs))
        return Loaded(inputs, outputs, lambda feeds: [*request.infer(dict(feeds)).values()])

    @property
    def clock(self) -> Callable[[], float]:
        return time.perf_counter  # it has threads of its own

    def __str__(self) -> str:
        return f"OpenVINO {metadata.version('openvino')}{', int8' if self.bits == 8 else ''}"


def _llama_cpp(bits: int) -> Runtime:
    from secateur.llamacpp import LlamaCpp

    return LlamaCpp(bits)


_WORDS: Mapping[str, Callable[[], Runtime]] = {
    "torch": Torch,
    "onnxruntime": OnnxRuntime,
    "onnxruntime:int8": functools.partial(OnnxRuntime, 8),
    "onnxruntime:int4": functools.partial(OnnxRuntime, 4),
    "onnxruntime:mixed": functools.partial(OnnxRuntime, 4, modules=()),
    "openvino": OpenVINO,
    "openvino:int8": functools.partial(OpenVINO, 8),
    "llamacpp": functools.partial(_llama_cpp, 32),
    "llamacpp:int8": functools.partial(_llama_cpp, 8),
    "llamacpp:int4": functools.partial(_llama_cpp, 4),
}


def parse(runtime: Runtime | Elsewhere | Path | Callable[..., float] | str | None) -> Runtime | Elsewhere:
    """The value that a word means; None is torch. The path of a ``.csv`` is a table of times, and a function
    ``(operation, shapes) -> milliseconds`` a price of each operation: see `secateur.operations`.

    Raises:
        ValueError: a word that means none, or a table that is damaged. TypeError: what is none of them.

    >>> parse("onnxruntime:int8"), parse(None)
    (OnnxRuntime(bits=8, calibrated=False), Torch())
    """
    if isinstance(runtime, Path) or (isinstance(runtime, str) and runtime.lower().endswith(".csv")):
        from secateur.operations import PriceTable

        return PriceTable.read(runtime)
    if isinstance(runtime, str):
        if runtime not in _WORDS:
            raise unknown(runtime, _WORDS, "runtime")
        return _WORDS[runtime]()
    if runtime is None:
        return Torch()
    if isinstance(runtime, types.FunctionType | types.MethodType | functools.partial):
        from secateur.operations import Priced

        return Priced(runtime)
    if isinstance(runtime, type) or not isinstance(runtime, Runtime | Elsewhere):
        raise TypeError(
            f"runtime= is one of {', '.join(map(repr, _WORDS))}, or a value of them, the path of a table of times "
            f"(.csv), or a function (operation, shapes) -> milliseconds; not {runtime!r}."
        )
    return runtime


def is_mixed(runtime: object) -> bool:
    """Whether each part of a model has as many bits there as is chosen for it.

    >>> is_mixed(parse("onnxruntime:mixed")), is_mixed(parse("onnxruntime:int4"))
    (True, False)
    """
    return isinstance(runtime, OnnxRuntime) and runtime.modules is not None


def timed_by(
    runtime: Runtime | Elsewhere | Path | Callable[..., float] | str | None,
    is_timed: bool,
    *,
    whole: bool = False,
    mixed: bool = False,
) -> Runtime | Elsewhere:
    """`parse`, where something is timed; else a ValueError if a runtime is asked for, or one which runs a ``whole``
    model alone where parts are timed, or a ``mixed`` one where no bits are chosen. ImportError before anything is
    computed where it is not installed.

    >>> timed_by("torch", True)
    Torch()
    >>> timed_by("torch", False)
    Traceback (most recent call last):
    ValueError: runtime= says where a latency is measured, and none is asked for: make it the target, or budget it.
    """
    found = parse(runtime)
    if is_mixed(found) and not mixed:
        raise ValueError(f"{runtime!r} chooses bits, too, which takes a budget= of secateur.fit, or secateur.deploy.")
    if runtime is not None and not is_timed and not is_mixed(found):
        raise ValueError(
            "runtime= says where a latency is measured, and none is asked for: make it the target, or budget it."
        )
    if getattr(found, "whole", False) and not whole:
        raise ValueError(f"{runtime!r} runs no part of a model alone, whose time a level could be; deploy takes it.")
    if hasattr(found, "package"):
        found.package()
    return found


class Timer:
    """How long a pass of a model takes in a runtime, and of others that are timed in turns with it.

    Args:
        dense: the model that others are compared with.
        example_inputs: what it is called with.
        runtime: where; torch if left out. Elsewhere nothing is timed: it is the sum of what operations take there.
        seconds: of the turns with one other model, at least nine of each.

    >>> model = nn.Linear(4, 8)
    >>> before, after = Timer(model, torch.ones(2, 4), seconds=0.01)(model)
    >>> before > 0 and after > 0
    True
    """

    def __init__(
        self,
        dense: nn.Module,
        example_inputs: Any,
        runtime: Runtime | Elsewhere | None = None,
        *,
        seconds: float = _SECONDS,
    ) -> None:
        self.dense, self.example, self.seconds = dense, example_inputs, seconds
        self.runtime = Torch() if runtime is None else runtime
        if isinstance(self.runtime, Elsewhere):
            self._total = self.runtime.total(dense, example_inputs)
            if not self._total:
                raise ValueError(
                    f"by {self.runtime} the model takes no time at all: no share of that can be asked for."
                )
        else:
            self._call = self._called(dense, self.runtime)

    def _called(self, model: nn.Module, runtime: Runtime) -> Callable[[], object]:
        with torch.no_grad(), unchanged(model), in_mode(model, training=False):
            return runtime(model, self.example)

    @torch.no_grad()
    def __call__(self, other: nn.Module, runtime: Runtime | None = None) -> tuple[float, float]:
        """Milliseconds of the dense model, and of the other, here or in another runtime, by the median of the
        ratios."""
        if isinstance(self.runtime, Elsewhere):
            return self._total, self.runtime.total(other, self.example)
        calls = {"dense": self._call, "other": self._called(other, runtime or self.runtime)}
        with (
            unchanged(self.dense),
            unchanged(other),
            in_mode(self.dense, training=False),
            in_mode(other, training=False),
        ):
            rounds = alternating(calls, _ROUNDS, seconds=self.seconds, clock=self.runtime.clock)
        before = 1e3 * statistics.median(rounds["dense"])
        return before, before / ratio(rounds["other"], rounds["dense"])


def _installed(name: str, called: str, what: str) -> Any:
    """A package, beside those that torch exports by."""
    try:
        for each in ("onnx", "onnxscript"):
            importlib.import_module(each)
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{called} is not installed: pip install {what}") from error


# ---- Exported to ONNX, and rounded by the quantizers of ONNX Runtime.


@contextlib.contextmanager
def _exported(model: nn.Module, example_inputs: Any, traced: bool) -> Iterator[Path]:
    """A folder with a graph that runtimes load, for inputs of these shapes alone."""
    with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
        _export(model, example_inputs, Path(folder), traced=traced)
        yield Path(folder)


def _export(
    model: nn.Module, example_inputs: Any, folder: Path, *, traced: bool = False, any_size: bool = False
) -> None:
    _refuse_bfloat16(model)
    here = moved(example_inputs, device_of(model))
    path = folder / _FILE
    with _or_says("the model cannot be exported to ONNX", *[""] * any_size), _quiet():
        if traced:
            with private.without_graphs_printed():
                torch.onnx.export(model, **_arguments(here), f=str(path), dynamo=False)
            _strip(path)
            return
        how = [*_for_any_size(model, here), {}] if any_size else [{}]
        for at, each in enumerate(how):
            try:
                # of a copy: of what a model keeps, the exporter puts back tensors alone
                given = {**_arguments(here), **each, "dynamo": True, "verbose": False}
                with private.never_traced():
                    program = torch.onnx.export(copy.deepcopy(model), **given)
                break
            except Exception:
                if at == len(how) - 1:
                    raise
        assert program is not None
        program.save(str(path), external_data=_nbytes(model) > _LARGE // 2)
        _strip(path)


def _refuse_bfloat16(model: nn.Module) -> None:
    if any(each.dtype == torch.bfloat16 for each in model.state_dict().values()):
        raise ValueError("runtimes on processors take no bfloat16: convert it to float32 for this.")


def _strip(path: Path) -> None:
    """Takes out the exporter's shapes of what is between: those that quantizers infer again differ."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    del graph.graph.value_info[:]
    onnx.save(graph, path)


def _hollow(path: Path, smaller: Path) -> None:
    """The graph with a node that makes each large constant that is one number over and over."""
    import onnx

    graph = (model := onnx.load(path)).graph
    for each in [*graph.initializer]:
        value = onnx.numpy_helper.to_array(each)
        if value.size > _SMALL and (value == value.flat[0]).all():
            shape = onnx.numpy_helper.from_array(np.array(value.shape, dtype=np.int64), f"{each.name}_shape")
            one = onnx.numpy_helper.from_array(value.reshape(-1)[:1], "value")
            graph.initializer.remove(each)
            graph.initializer.append(shape)
            graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", [shape.name], [each.name], value=one))
    onnx.save(model, smaller)


def _arguments(example_inputs: Any) -> dict[str, Any]:
    if isinstance(example_inputs, Mapping):
        return {"args": (), "kwargs": {**example_inputs}}
    return {"args": tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)}


def _for_any_size(model: nn.Module, example_inputs: Any) -> Iterator[dict[str, Any]]:
    """The arguments of an export that takes other numbers of examples, and of tokens, and whose outputs have the
    model's names; then of one that has the names alone. A size of one would be taken for the only one."""
    sizes = {each.shape[0] if each.dim() else 0 for each in tensors_in(example_inputs)}
    twice = mapped(example_inputs, lambda each: torch.cat([each, each])) if sizes == {1} else example_inputs
    any_of = torch.export.Dim.AUTO

    def is_of_tokens(value: torch.Tensor) -> bool:
        return value.dim() == 2 and not value.is_floating_point()

    def dims(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return {0: any_of, 1: any_of} if is_of_tokens(value) else {0: any_of}

    with torch.no_grad():
        outputs = run_example(model, twice)
    if isinstance(outputs, Mapping):
        names, values = [*outputs], [*outputs.values()]
    elif isinstance(outputs, tuple | list):
        names, values = [f"output_{at}" for at in range(len(outputs))], [*outputs]
    else:
        names, values = ["output"], [outputs]
    named = {"output_names": names} if all(isinstance(each, torch.Tensor) for each in values) else {}
    tokens = {each.shape[1] for each in tensors_in(twice) if is_of_tokens(each)}
    longer = mapped(twice, lambda each: torch.cat([each, each], 1) if is_of_tokens(each) else each)
    for each in [longer] * (tokens == {1}) + [twice] if len(sizes) == 1 and min(sizes) else []:
        given = _arguments(each)
        free = {name: dims(its) for name, its in given["kwargs"].items()} if "kwargs" in given else None
        yield {**given, "dynamic_shapes": tuple(map(dims, given["args"])) if free is None else free, **named}
    yield named


@contextlib.contextmanager
def _or_says(what: str, advice: str = ' Leave out runtime=, or give runtime="torch".') -> Iterator[None]:
    """ValueError, in a line, of whatever another library raises. That a disk is full, or may not be written, passes: it
    is not about the model, and nothing may be left out for it."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the exporter wraps what went wrong in what to do about the exporter
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None
        first = next(iter(str(cause).strip().splitlines()), "").rstrip(".")
        raise ValueError(f"{what}: {type(cause).__name__}: {printable(first, 300)}.{advice}") from error


def _nbytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.state_dict().values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters and quantizers say much that is not about the model. In one thread at a time: what is said is the
    process's."""
    with ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        was = logging.root.manager.disable
        logging.disable(logging.ERROR)  # which the exception says, too
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            logging.disable(was)


def _in_int8(path: Path, smaller: Path, keep: Collection[str]) -> None:
    """From a file of ONNX one whose matrix products, and tables, are of 8 bits."""
    model, keep = _folded(path, keep)
    _dynamic(model, smaller, ["MatMul", "Gather"], keep, _nbytes_of(path.parent) > _LARGE)


def _in_int4(path: Path, smaller: Path, keep: Collection[str], wide: Collection[str] = ()) -> None:
    """One whose weights of matrix products are of 4 bits, but for those of several matrices at once, and of 8 bits if
    they are ``wide``; tables of 8."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    model, keep = _folded(path, keep)
    wide = [name for each in wide for name in (each, f"{each}_MatMul")]
    ONNXModel(model).replace_gemm_with_matmul()
    apart = {"nodes_to_exclude": [*keep, *wide]}
    made = MatMulNBitsQuantizer(model, 4, _BLOCK, is_symmetric=False, accuracy_level=_IN_8_BITS, **apart)
    made.process()
    graph = made.model.model.graph
    keep += [node.name for node in graph.node if node.op_type == "MatMul" and node.name not in wide]
    _dynamic(made.model.model, smaller, ["Gather", "MatMul"], keep, _nbytes_of(path.parent) > _LARGE)


def _dynamic(model: Any, smaller: Path, types: list[str], keep: list[str], large: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    batched = any(len(each.dims) == 3 for each in model.graph.initializer)  # such products take one scale only
    quantize_dynamic(
        model,
        smaller,
        op_types_to_quantize=types,
        per_channel=not batched,
        weight_type=QuantType.QInt8,
        reduce_range=sums_overflow(),
        nodes_to_exclude=keep,
        use_external_data_format=large,
    )


@functools.cache
def sums_overflow() -> bool:
    """Whether ONNX Runtime adds products of bytes in 16 bits, which two large ones overflow, as it and OpenVINO do on
    processors without VNNI. There weights have 7 bits (``reduce_range``), which cannot.

    >>> sums_overflow() in (False, True)
    True
    """
    import onnx
    from onnx import helper

    of = onnx.TensorProto
    given = [helper.make_tensor_value_info("x", of.UINT8, [1, 64])]
    made = [helper.make_tensor_value_info("y", of.INT32, [1, 64])]
    weight = onnx.numpy_helper.from_array(np.full((64, 64), 127, np.int8), "weight")
    node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    model = helper.make_model(
        helper.make_graph([node], "products", given, made, [weight]),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    runtime = OnnxRuntime()
    session = runtime.package().InferenceSession(
        model.SerializeToString(), runtime._options(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {"x": np.full((1, 64), 255, np.uint8)})
    return bool((found != 64 * 255 * 127).any())


def _steps() -> int:
    """Between the least and the largest weight of a product in int8."""
    return 127 if sums_overflow() else 255


def _folded(path: Path, keep: Collection[str]) -> tuple[Any, list[str]]:
    """The graph, in which a weight that is transposed for a product that is rounded, as that of a head which is tied to
    a table, is one of its own, since quantizers see no other; and which operations stay as they are: also tables that
    those which do read."""
    import onnx

    graph = (model := onnx.load(path)).graph
    weights = {each.name: each for each in graph.initializer}
    read = {name for node in graph.node if node.name in keep for name in node.input}
    for node in [*graph.node]:
        if not _turns(node, weights):
            continue
        if node.output[0] in read:
            read.add(node.input[0])
            continue
        turned = _turned(node, {node.input[0]: onnx.numpy_helper.to_array(weights[node.input[0]])})
        graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(turned), node.output[0]))
        graph.node.remove(node)
    tables = [node.name for node in graph.node if node.op_type == "Gather" and node.input[0] in read]
    # of a product with a bias quantizers make two
    return model, [*keep, *(f"{each}_MatMul" for each in keep), *tables]


def _turns(node: Any, weights: Collection[str]) -> bool:
    return node.op_type == "Transpose" and node.input[0] in weights


def _turned(node: Any, values: Mapping[str, Any]) -> Any:
    return values[node.input[0]].transpose(next((each.ints for each in node.attribute if each.name == "perm"), None))


@contextlib.contextmanager
def rounding(model: nn.Module, bits: Mapping[str, int]) -> Iterator[None]:
    """A context in which linears, convolutions and tables of these names compute nearly what they do with so many bits
    in `OnnxRuntime`: weights and, of 8 bits, inputs are rounded.

    >>> model = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, 0.1]]))
    >>> with rounding(model, {"0": 4}):
    ...     model(torch.tensor([[0.0, 1.5]])).item()
    0.20000001788139343
    """
    with contextlib.ExitStack() as undo, torch.no_grad():
        for name, its in bits.items():
            module: Any = model.get_submodule(name)
            values = module.weight.detach().float().numpy(force=True)
            table = isinstance(module, nn.Embedding)
            axes = tuple(range(1, values.ndim))
            if table:
                near = _rounded(values, 255)
            else:
                near = _in_blocks(values.T).T if its == 4 else _rounded(values, _steps(), axes)
            weight = torch.from_numpy(np.ascontiguousarray(near)).to(module.weight)
            made = functools.partial(nn.functional.embedding, weight=weight)
            if not table:
                made = functools.partial(_multiplied, module, weight, its)
            had = {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
            undo.callback(vars(module).update, had)
            undo.callback(vars(module).pop, "forward")
            vars(module)["forward"] = made
        yield


def _multiplied(module: Any, weight: torch.Tensor, bits: int, x: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
        step = ((high - low) / 255).clamp(min=torch.finfo(x.dtype).tiny)
        x = (x / step).round() * step
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, module.bias)
    return private.convolved(module, x, weight)


def _rounded(values: Any, steps: int, axis: int | tuple[int, ...] | None = None) -> Any:
    """The nearest of so many steps between the least and the largest number, 0 being one of them.

    >>> _rounded(np.array([-1.0, 0.2, 0.9, 2.0]), 3)
    array([-1.,  0.,  1.,  2.])
    """
    low, high = (some(values, axis=axis, keepdims=True, initial=0) for some in (np.min, np.max))
    step = np.where(high > low, (high - low) / steps, 1).astype(values.dtype)
    return np.rint(values / step) * step


def _in_blocks(weight: Any) -> Any:
    """In 4 bits, each 32 inputs of an output by themselves."""
    parts = np.split(weight, range(_BLOCK, weight.shape[-2], _BLOCK), axis=-2)
    return np.concatenate([_rounded(each, 15, -2) for each in parts], axis=-2)


def _apart_by(near: Any, exact: Any) -> float:
    return float(np.linalg.norm(near - exact) / (np.linalg.norm(exact) or 1.0))


def _in_static_int8(path: Path, smaller: Path, feeds: Iterable[Mapping[str, Any]], keep: Collection[str]) -> None:
    """The same with convolutions and what stands between them, by the ranges that these inputs lead to."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Feeds(CalibrationDataReader):  # type: ignore[misc]
        left = iter(feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    large = _nbytes_of(path.parent) > _LARGE
    with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
        folded = Path(folder, _FILE)  # its normalizations are in its convolutions
        quant_pre_process(path, folded, skip_symbolic_shape=True, save_as_external_data=large)
        quantize_static(
            folded,
            smaller,
            Feeds(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            reduce_range=sums_overflow(),
            nodes_to_exclude=[*keep],
            use_external_data_format=large,
        )


def _nbytes_of(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir() if each.is_file())


def _named(names: list[str], example_inputs: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What the graph is fed with: by name where the example has names, else in order.

    >>> _named(["b", "a"], {"a": torch.ones(1), "b": torch.zeros(1)}, [])["a"]
    array([1.], dtype=float32)
    """
    if isinstance(example_inputs, Mapping) and {*names} <= {*example_inputs}:
        tensors = [example_inputs[name] for name in names]
    if len(tensors) != len(names):
        raise ValueError(
            f"the exported graph takes {len(names)} inputs ({', '.join(names)}), and the example has {len(tensors)} "
            "tensors; pass what the model needs alone."
        )
    return {name: each.detach().cpu().numpy() for name, each in zip(names, tensors, strict=True)}
