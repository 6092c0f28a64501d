"""Models in ONNX Runtime, and in int8."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.runtimes import sums_overflow


def int8(model: nn.Module) -> nn.Module:
    """Linear layers in int8, activations by what they are at run time: torch's own, without calibration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


def onnx_file(path: Path, model: nn.Module, example: tuple[Tensor, ...], quantized: bool) -> Path:
    """The model exported to one file, and quantized (int8 weights by channel, activations at run time)."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    if path.exists():
        return path
    unfinished = path.with_suffix(".unfinished")
    with quiet():
        torch.onnx.export(model, example, dynamo=True, verbose=False).save(str(unfinished), external_data=False)
        if quantized:
            graph = onnx.load(unfinished)
            del graph.graph.value_info[:]  # the exporter's shapes and those that are inferred anew differ
            onnx.save(graph, unfinished)
            grouped = any(len(tensor.dims) == 3 for tensor in graph.graph.initializer)
            how = {"per_channel": not grouped, "reduce_range": sums_overflow()}  # batched products take one scale only
            quantize_dynamic(unfinished, unfinished, **how)
    return unfinished.rename(path)


def onnx_file_of_convolutions(
    path: Path, model: nn.Module, example: tuple[Tensor, ...], ranges: Sequence[tuple[Tensor, ...]] = ()
) -> Path:
    """The same with convolutions in int8, too, and activations whose ranges are those of ``ranges``, else of the
    example: what engines read that have int8 kernels of convolutions (quantize and dequantize between; weights by
    channel)."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    plain = onnx_file(path.with_suffix(".float"), model, example, False)
    names = [each.name for each in _session(plain, 1).get_inputs()]

    class Once(CalibrationDataReader):
        given = iter(
            [{name: each.numpy() for name, each in zip(names, one, strict=True)} for one in ranges or [example]]
        )

        def get_next(self) -> Any:
            return next(self.given, None)

    with quiet():
        kinds: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        kinds["reduce_range"] = sums_overflow()
        quantize_static(plain, path, Once(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
    return path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's list of what it skips, the quantizer's advice, and warnings of what will change."""
    loggers = [logging.getLogger(name) for name in (None, "torch.onnx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def session(path: Path, threads: int) -> Callable[..., Any]:
    ready = _session(path, threads)
    names, first = [each.name for each in ready.get_inputs()], [ready.get_outputs()[0].name]
    return lambda *tensors: ready.run(
        first, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    )[0]


def openvino_session(path: Path, threads: int, precision: str = "f32") -> Callable[..., Any] | None:
    """The same in OpenVINO, where it is installed; by itself it computes in bfloat16 where a processor has it."""
    if importlib.util.find_spec("openvino") is None:
        return None
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    settings["INFERENCE_PRECISION_HINT"] = precision
    ready = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda *tensors: ready.infer([tensor.numpy() for tensor in tensors], share_inputs=True)


def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def bytes_of(model: nn.Module) -> int:
    """Of its parameters and buffers, tied ones once; of quantized modules what saving them takes."""
    tensors = list(model.state_dict().values())
    if all(isinstance(tensor, Tensor) for tensor in tensors):
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell()


def slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.replace("×", "x")).strip("-")
