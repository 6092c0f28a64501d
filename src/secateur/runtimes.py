"""What runs a finished model, as ``runtime=`` says, and how long a pass takes there.

Law: what is timed is what the runtime loads: the exported graph, whose weights are constants, with as many threads as
torch has. The model stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from secateur.support import (
    ONE_AT_A_TIME,
    alternating,
    device_of,
    in_mode,
    moved,
    printable,
    ratio,
    run_example,
    tensors_in,
    unchanged,
    unknown,
)

__all__ = ["OnnxRuntime", "OpenVINO", "Runtime", "Timer", "Torch", "finish", "parse", "timed_by"]

_ROUNDS, _SECONDS = 9, 1.0
_LARGE = 2**31  # bytes: more than one file of ONNX holds


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


def _clock() -> Callable[[], float]:
    """Of a single thread the time that it computed: what else the machine does would count as waiting."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
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
        return _clock()

    def __str__(self) -> str:
        return f"torch {torch.__version__}"


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on the processor; ``pip install "secateur[onnx]"``.

    Attributes:
        int8: weights of matrix products in 8 bits, and their inputs as they come, as ``quantize_dynamic`` does it.
            Convolutions stay in float, which is faster there unless their inputs are calibrated.

    >>> OnnxRuntime() == parse("onnxruntime")
    True
    """

    int8: bool = False

    def package(self) -> Any:
        """Of it; ImportError with what to install."""
        return _installed("onnxruntime", "ONNX Runtime", '"secateur[onnx]"')

    def __call__(self, model: nn.Module, example_inputs: Any, *, traced: bool = False) -> Callable[[], object]:
        onnxruntime = self.package()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        with _exported(model, example_inputs, traced) as (path, tensors), _or_says(f"{self} does not run the model"):
            if self.int8:
                path = _in_int8(path)
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            feeds = _named([each.name for each in session.get_inputs()], example_inputs, tensors)
            call = functools.partial(session.run, None, feeds)
            call()  # what it does not compute it says here
        return call

    @property
    def clock(self) -> Callable[[], float]:
        return _clock()  # with one thread it computes in the one that calls

    def __str__(self) -> str:
        return f"ONNX Runtime {metadata.version('onnxruntime')}{', int8' if self.int8 else ''}"


@dataclass(frozen=True)
class OpenVINO:
    """OpenVINO on the processor; ``pip install openvino "secateur[onnx]"``.

    >>> OpenVINO() == parse("openvino")
    True
    """

    def package(self) -> Any:
        """Of it; ImportError with what to install."""
        return _installed("openvino", "OpenVINO", 'openvino "secateur[onnx]"')

    def __call__(self, model: nn.Module, example_inputs: Any, *, traced: bool = False) -> Callable[[], object]:
        openvino = self.package()
        how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        with _exported(model, example_inputs, traced) as (path, tensors), _or_says(f"{self} does not run the model"):
            compiled = openvino.Core().compile_model(str(path), "CPU", {"PERFORMANCE_HINT": "LATENCY", **how})
            feeds = _named([each.any_name for each in compiled.inputs], example_inputs, tensors)
            call = functools.partial(compiled.create_infer_request().infer, feeds)
            call()
        return call

    @property
    def clock(self) -> Callable[[], float]:
        return time.perf_counter  # it has threads of its own

    def __str__(self) -> str:
        return f"OpenVINO {metadata.version('openvino')}"


_WORDS: Mapping[str, Callable[[], Runtime]] = {
    "torch": Torch,
    "onnxruntime": OnnxRuntime,
    "onnxruntime:int8": functools.partial(OnnxRuntime, int8=True),
    "openvino": OpenVINO,
}


def parse(runtime: Runtime | str | None) -> Runtime:
    """The value that a word means; None is torch.

    Raises:
        ValueError: a word that means none. TypeError: what is neither.

    >>> parse("onnxruntime:int8"), parse(None)
    (OnnxRuntime(int8=True), Torch())
    """
    if isinstance(runtime, str):
        if runtime not in _WORDS:
            raise unknown(runtime, _WORDS, "runtime")
        return _WORDS[runtime]()
    if runtime is None:
        return Torch()
    if isinstance(runtime, type) or not isinstance(runtime, Runtime):
        raise TypeError(f"runtime= is one of {', '.join(map(repr, _WORDS))}, or a value of them, not {runtime!r}.")
    return runtime


def timed_by(runtime: Runtime | str | None, is_timed: bool) -> Runtime:
    """`parse`, where something is timed; else a ValueError if a runtime is asked for. ImportError before anything is
    computed where it is not installed.

    >>> timed_by("torch", True)
    Torch()
    >>> timed_by("torch", False)
    Traceback (most recent call last):
    ValueError: runtime= says where a latency is measured, and none is asked for: make it the target, or budget it.
    """
    if runtime is not None and not is_timed:
        raise ValueError(
            "runtime= says where a latency is measured, and none is asked for: make it the target, or budget it."
        )
    found = parse(runtime)
    if isinstance(found, OnnxRuntime | OpenVINO):
        found.package()
    return found


def finish() -> Callable[[], object] | None:
    """What waits for a device whose calls return before they are done; None where there is none.

    >>> finish() is None or torch.cuda.is_available()
    True
    """
    return torch.cuda.synchronize if torch.cuda.is_available() else None


class Timer:
    """How long a pass of a model takes in a runtime, and of others that are timed in turns with it.

    Args:
        dense: the model that others are compared with.
        example_inputs: what it is called with.
        runtime: where; torch if left out.
        seconds: of the turns with one other model, at least nine of each.

    >>> model = nn.Linear(4, 8)
    >>> before, after = Timer(model, torch.ones(2, 4), seconds=0.01)(model)
    >>> before > 0 and after > 0
    True
    """

    def __init__(
        self, dense: nn.Module, example_inputs: Any, runtime: Runtime | None = None, *, seconds: float = _SECONDS
    ) -> None:
        self.dense, self.example, self.seconds = dense, example_inputs, seconds
        self.runtime = Torch() if runtime is None else runtime
        self._call = self._called(dense)

    def _called(self, model: nn.Module) -> Callable[[], object]:
        with torch.no_grad(), unchanged(model), in_mode(model, training=False):
            return self.runtime(model, self.example)

    @torch.no_grad()
    def __call__(self, other: nn.Module) -> tuple[float, float]:
        """Milliseconds of the dense model, and of the other by the median of the ratios."""
        calls = {"dense": self._call, "other": self._called(other)}
        with (
            unchanged(self.dense),
            unchanged(other),
            in_mode(self.dense, training=False),
            in_mode(other, training=False),
        ):
            rounds = alternating(calls, _ROUNDS, seconds=self.seconds, finish=finish(), clock=self.runtime.clock)
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


# ---- Exported to ONNX, in a folder that is gone afterwards.


@contextlib.contextmanager
def _exported(model: nn.Module, example_inputs: Any, traced: bool) -> Iterator[tuple[Path, list[torch.Tensor]]]:
    """A file that runtimes load, and the tensors of the example in order."""
    if any(each.dtype == torch.bfloat16 for each in model.state_dict().values()):
        raise ValueError("runtimes on processors take no bfloat16: convert it to float32 for this.")
    here = moved(example_inputs, device_of(model))
    arguments: dict[str, Any] = {"args": tuple(here) if isinstance(here, tuple | list) else (here,)}
    if isinstance(here, Mapping):
        arguments = {"args": (), "kwargs": {**here}}
    with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
        path = Path(folder, "model.onnx")
        with _or_says("the model cannot be exported to ONNX"), _quiet():
            if traced:
                torch.onnx.export(model, **arguments, f=str(path), dynamo=False)
            else:
                # of a copy: of what a model keeps, the exporter puts back tensors alone
                program = torch.onnx.export(copy.deepcopy(model), **arguments, dynamo=True, verbose=False)
                assert program is not None
                program.save(str(path), external_data=_nbytes(model) > _LARGE // 2)
        yield path, list(tensors_in(example_inputs))


@contextlib.contextmanager
def _or_says(what: str) -> Iterator[None]:
    """ValueError, in a line, of whatever another library raises."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the exporter wraps what went wrong in what to do about the exporter
            cause = cause.__cause__
        first = next(iter(str(cause).strip().splitlines()), "").rstrip(".")
        raise ValueError(
            f'{what}: {type(cause).__name__}: {printable(first, 300)}. Leave out runtime=, or give runtime="torch".'
        ) from error


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
            yield
        finally:
            logging.disable(was)


def _in_int8(path: Path) -> Path:
    """Beside a file of ONNX one whose matrix products are of 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_name("int8.onnx")
    graph = onnx.load(path, load_external_data=False)
    del graph.graph.value_info[:]  # the exporter's shapes and those that are inferred again differ
    onnx.save(graph, path)
    batched = any(len(tensor.dims) == 3 for tensor in graph.graph.initializer)  # such products take one scale only
    with _quiet():
        quantize_dynamic(
            path,
            smaller,
            op_types_to_quantize=["MatMul"],
            per_channel=not batched,
            weight_type=QuantType.QInt8,
            use_external_data_format=sum(each.stat().st_size for each in path.parent.iterdir()) > _LARGE,
        )
    return smaller


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
