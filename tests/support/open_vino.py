"""A stand-in for OpenVINO and NNCF, of a hundred megabytes: ONNX Runtime computes, and its static quantizer rounds."""

import tempfile
import types
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from secateur.runtimes import OnnxRuntime


class Graph:
    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)

    def get_ops(self) -> list[Any]:
        kinds = ("Convolution" if node.op_type == "Conv" else node.op_type for node in self.model.graph.node)
        return [types.SimpleNamespace(get_type_name=lambda kind=kind: kind) for kind in kinds]


class Core:
    def read_model(self, path: str) -> Graph:
        return Graph(Path(path))

    def compile_model(self, given: str | Graph, device: str, how: dict[str, Any]) -> Any:
        assert (device, how["INFERENCE_PRECISION_HINT"]) == ("CPU", "f32")
        model = (given if isinstance(given, Graph) else Graph(Path(given))).model
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        inputs, outputs = (
            [types.SimpleNamespace(any_name=each.name) for each in some()]
            for some in (session.get_inputs, session.get_outputs)
        )
        names = [each.any_name for each in outputs]
        request = types.SimpleNamespace(infer=lambda feeds: dict(zip(names, session.run(names, feeds), strict=True)))
        return types.SimpleNamespace(inputs=inputs, outputs=outputs, create_infer_request=lambda: request)


def save_model(graph: Graph, path: Path, *, compress_to_fp16: bool) -> None:
    assert not compress_to_fp16
    onnx.save(graph.model, path)
    path.with_suffix(".bin").write_bytes(b"")


def openvino() -> types.ModuleType:
    made = types.ModuleType("openvino")
    vars(made).update(convert_model=Graph, Core=Core, save_model=save_model)
    return made


def nncf(asked: list[Any]) -> types.ModuleType:
    """``asked`` gets the number of examples and the type of each model that was rounded, and how overflows are met."""

    def quantize(
        graph: Graph,
        examples: list[Any],
        subset_size: int,
        model_type: str,
        ignored_scope: Any,
        advanced_parameters: Any,
    ) -> Graph:
        asked.append((len(examples), model_type, *vars(advanced_parameters).values()))
        assert (subset_size, ignored_scope.names) == (len(examples), [])
        with tempfile.TemporaryDirectory() as place:
            onnx.save(graph.model, Path(place, "model.onnx"))
            OnnxRuntime(8, calibrated=True).rounded(Path(place), Path(place, "made"), examples)
            return Graph(Path(place, "made", "model.onnx"))

    made = types.ModuleType("nncf")
    vars(made).update(quantize=quantize, Dataset=list, IgnoredScope=types.SimpleNamespace)
    vars(made).update(AdvancedQuantizationParameters=types.SimpleNamespace)
    made.OverflowFix = types.SimpleNamespace(ENABLE="enable")  # type: ignore[attr-defined]
    made.ModelType = types.SimpleNamespace(TRANSFORMER="transformer")  # type: ignore[attr-defined]
    return made
