"""onnxsim 0.8.1 on a BERT as a file of ONNX: its calibrated pruning of units and heads, then its ridge repair.

Law: it is given a graph in which it finds heads, which in the one that torch writes it does not: shapes are constants
but for batch and tokens, and the biases of queries, keys and values are rows of their matrices. Judged in ONNX Runtime
like all others. `pip install --no-deps onnxsim==0.8.1`, elsewhere (see packages.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.inference.exported import quiet, session
from benchmarks.shrinking.real import HALF, UNITS
from benchmarks.support.language_models import MiniLM
from benchmarks.support.tables import head, row

SHARES = {UNITS: (0.5, 0.0), HALF: (0.5, 0.5)}  # of units, of heads


class _Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return y


def graph_of(model: Any, example: dict[str, Tensor]) -> Any:
    """As torch writes it, of any batch and length, with what onnxsim looks for in attention."""
    import onnx

    model.set_attn_implementation("eager")
    dims = {0: torch.export.Dim("batch", min=1, max=512), 1: torch.export.Dim("tokens", min=2, max=512)}
    with tempfile.TemporaryDirectory() as scratch, quiet():
        path = Path(scratch) / "model.onnx"
        given = (example["input_ids"][:4], example["attention_mask"][:4])
        shapes = {"input_ids": dims, "attention_mask": dims}
        torch.onnx.export(_Encoder(model), given, dynamo=True, dynamic_shapes=shapes, verbose=False).save(
            str(path), external_data=False
        )
        graph = onnx.load(path)
    masks = {name for node in graph.graph.node if node.op_type == "Where" for name in node.output}
    known = [each for each in graph.graph.value_info if each.name in masks]  # the others differ from what is inferred
    del graph.graph.value_info[:]
    graph.graph.value_info.extend(known)
    with_constant_shapes(graph, model.config)
    with_biases_as_rows(graph)
    return graph


def with_constant_shapes(graph: Any, config: Any) -> None:
    """Into heads and back, in place: zeros are what comes in."""
    from onnx import numpy_helper

    width, heads = config.hidden_size, config.num_attention_heads
    made_by = {name: node for node in graph.graph.node for name in node.output}
    for place, node in enumerate(graph.graph.node):
        if node.op_type == "Reshape" and (shape := made_by.get(node.input[1])) and shape.op_type == "Concat":
            dims = [0, 0, heads, width // heads] if len(shape.input) == 4 else [0, 0, width]
            name = f"constant_shape_{place}"
            graph.graph.initializer.append(numpy_helper.from_array(np.array(dims), name))
            node.input[1] = name
            del node.attribute[:]  # by which a zero would be a zero


def with_biases_as_rows(graph: Any) -> None:
    """``x·W + b`` before heads is ``[x 1]·[W; b]``, in place: a matrix product with an addition behind is not found."""
    from onnx import helper, numpy_helper

    held = {each.name: each for each in graph.graph.initializer}
    made_by = {name: node for node in graph.graph.node for name in node.output}
    rows: dict[str, str] = {}  # what was read to what is read with a one behind
    nodes, gone = [], set()
    for node in graph.graph.node:
        if node.op_type == "Reshape" and (added := made_by.get(node.input[0])) and added.op_type == "Add":
            product = made_by[added.input[0]]
            gone.add(added.output[0])
            weight, bias = (numpy_helper.to_array(held[name]) for name in (product.input[1], added.input[1]))
            name = f"{added.input[1]}_row"
            graph.graph.initializer.append(numpy_helper.from_array(np.concatenate([weight, bias[None]]), name))
            read = product.input[0]
            if read not in rows:
                rows[read] = f"{read}_and_one"
            product.input[0], product.input[1], product.output[0] = rows[read], name, added.output[0]
    for name, value in {"zero": [0.0], "one": [1.0]}.items():
        graph.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), f"constant_{name}"))
    for name, value in {"start": [0], "end": [1], "axis": [2]}.items():
        graph.graph.initializer.append(numpy_helper.from_array(np.array(value), f"constant_{name}"))
    for node in graph.graph.node:
        if node.op_type == "Add" and node.output[0] in gone:
            continue
        nodes.append(node)
        for name in node.output:
            if name in rows:
                first, none, ones = f"{name}_first", f"{name}_zero", f"{name}_one"
                nodes += [
                    helper.make_node("Slice", [name, "constant_start", "constant_end", "constant_axis"], [first]),
                    helper.make_node("Mul", [first, "constant_zero"], [none]),
                    helper.make_node("Add", [none, "constant_one"], [ones]),
                    helper.make_node("Concat", [name, ones], [rows[name]], axis=-1),
                ]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    kept = [each for each in graph.graph.initializer if each.name in read]
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(kept)


def parameters(graph: Any) -> int:
    """Entries of its floating-point constants."""
    import onnx

    floating = [each for each in graph.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    return sum(int(np.prod(each.dims)) for each in floating)


def repaired(directory: Path, samples: int, level: str) -> None:
    """Three rows: the whole graph, what is left of it, and the same repaired; a line as soon as each step is done.

    Args:
        samples: sentences to calibrate with.
        level: of `SHARES`.
    """
    import onnx
    import onnxsim

    subject = MiniLM(directory)
    batches = subject.batches(0, samples)
    graph = graph_of(subject.model, batches[0])
    given = [{name: batch[name].numpy() for name in ("input_ids", "attention_mask")} for batch in batches]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    print(f"{samples} sentences, {tokens} tokens with padding; {level}")
    print(head(["onnxsim 0.8.1", "parameters left", *subject.columns, "s", "of processor"]), flush=True)

    def step(name: str, make: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        made = make()
        seconds = (time.perf_counter() - wall, time.process_time() - cpu)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.onnx"
            onnx.save(made, path)
            run = session(path, 1)
            found = subject.measure(lambda **batch: _Output(run(batch["input_ids"], batch["attention_mask"])))
        left = parameters(made)
        figures = [f"{left / 1e6:.2f} M ({left / parameters(graph):.3f})", *(f"{each:.4f}" for each in found)]
        print(row([name, *figures, *(f"{each:.0f}" for each in seconds)]), flush=True)
        return made

    units, heads = SHARES[level]
    step("whole", lambda: graph)
    smaller = step(
        "units left, by Wanda", lambda: onnxsim.apply_structured_wanda_pruning_cpp(graph, given, sparsity=units)
    )
    if heads:
        smaller = step(
            "and heads", lambda: onnxsim.apply_attention_head_wanda_pruning_cpp(smaller, given, sparsity=heads)
        )
    step("and repaired by ridge", lambda: onnxsim.apply_pruning_finetune_cpp(graph, smaller, given))


class _Output:
    """What the measure asks of a model of transformers."""

    def __init__(self, states: Any) -> None:
        self.last_hidden_state = torch.as_tensor(states)
