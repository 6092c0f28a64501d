"""Width and bits in one search: a rung loses less than all that cost no more, what is assembled is rounded and taken
back, bytes are those of the weights as they are written, and the bits that were chosen are those that are served."""

import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from secateur import fit, shrink
from secateur.runtimes import OnnxRuntime, rounding
from secateur.search import make_levels, write_probes
from secateur.search.levels import BYTES, RoundedLevels, Rung, matrices_of
from secateur.search.space import Predicted
from secateur.support import tensors_of
from support.unchanged import is_unchanged, state_of

pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")  # from 1.22 on
MIXED = OnnxRuntime(4, modules=())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Tied(nn.Module):
    """A table, two blocks, and a head that is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(48, 32), nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.blocks(self.table(ids)))


def tied():
    torch.manual_seed(0)
    return Tied().eval()


def tokens(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(48, (4, 8), generator=generator) for _ in range(count)]


@pytest.fixture(scope="module")
def ladder():
    model = tied()
    exact = make_levels(model, tokens(), shares=(0.25, 0.5), round_to=8)
    cells = {cell[0].weight: cell for cell in matrices_of(model, MIXED)}
    first, second = exact
    matrices = {
        name: [cells.pop(f"{name.removesuffix('.up.weight')}.{part}.weight")[0] for part in ("up", "down")]
        for name in (first, second)
    } | cells
    rungs = [Rung(0, 32, 0.0), Rung(0, 8, 0.1), Rung(1, 8, 0.2), Rung(1, 4, 0.3), Rung(2, 4, 0.4)]
    head = [Rung(0, 32, 0.0), Rung(0, 8, 0.1), Rung(0, 4, 0.2)]
    return model, RoundedLevels(exact, {first: rungs, second: rungs, "table.weight": head}, matrices)


def output(model):
    with torch.no_grad():
        return model(tokens(1)[0])


def test_matrices_that_share_a_weight_are_one():
    shapes = [[(one.module, one.shape, one.is_table) for one in cell] for cell in matrices_of(tied(), MIXED)]
    assert shapes[0] == [("table", (48, 32), True), ("head", (48, 32), False)]
    assert [cell[0][0] for cell in shapes[1:]] == [f"blocks.{at}.{part}" for at in (0, 1) for part in ("up", "down")]


def test_the_first_rung_is_the_model_and_any_other_is_taken_back(ladder):
    model, levels = ladder
    before, dense = state_of(model), output(model)
    with levels.assembled(model, dict.fromkeys(levels, 0)):
        assert torch.equal(output(model), dense)
    choice = dict.fromkeys(levels, 2)
    with levels.assembled(model, choice):
        found = output(model)
    with levels.exact.assembled(model, dict.fromkeys(levels.exact, 1)), rounding(model, levels.bits(choice)):
        assert torch.equal(output(model), found)
    assert not torch.equal(found, dense)
    assert levels.bits(choice) == {f"blocks.{at}.{part}": 8 for at in (0, 1) for part in ("up", "down")} | {
        "table": 8,
        "head": 4,
    }
    assert is_unchanged(model, before)
    assert not any("forward" in vars(each) for each in model.modules())
    assert torch.equal(output(model), dense)


def test_what_was_there_is_put_back_after_an_exception_too():
    model, calls = tied(), []
    mine = model.head.forward = lambda x: calls.append(1) or nn.functional.linear(x, model.head.weight)
    with pytest.raises(KeyError), rounding(model, {"head": 8, "table": 8}):
        output(model)
        raise KeyError
    assert not calls
    assert vars(model.head)["forward"] is mine
    assert "forward" not in vars(model.table)


def test_bytes_are_counted_by_hand(ladder):
    """One group at its fourth rung, half of 64 units in 4 bits, and the tied weight in 8 bits, twice."""
    model, levels = ladder
    first, *_ = levels
    floats = 4 * sum(each.numel() for each in tensors_of(model).values())
    assert levels.cost({}, "bytes") == floats
    both = 2 * 32 * 32
    got = levels.cost({first: 4}, "bytes")
    assert got == pytest.approx(floats - 4 * (64 * 32 * 2 + 64) + 4 * 32 + BYTES[4] * both)
    assert levels.cost({first: 4, "table.weight": 1}, "bytes") == pytest.approx(got - 48 * 32 * (4 - 2 * BYTES[8]))
    assert levels["table.weight"][2].costs["bytes"] == pytest.approx(-48 * 32 * (4 - BYTES[8] - BYTES[4]))
    assert levels.cost({first: 4}, "params") == levels.exact.cost({first: 2}, "params")


def test_it_can_be_pickled(ladder):
    model, levels = ladder
    again = pickle.loads(pickle.dumps(levels))
    choice = dict.fromkeys(levels, 1)
    with levels.assembled(model, choice):
        wanted = output(model)
    with again.assembled(model, choice):
        assert torch.equal(output(model), wanted)
    assert str(again) == str(levels)


def test_4_bits_are_of_blocks_of_32_inputs_by_hand():
    linear = nn.Linear(64, 1, bias=False)
    linear.weight.data = torch.cat([torch.linspace(0, 15, 32), torch.linspace(-3, 0, 32)])[None]
    step = torch.tensor([1.0] * 32 + [0.2] * 32)
    wanted = (linear.weight.detach() / step).round() * step
    with rounding(linear, {"": 4}):
        assert torch.allclose(linear(torch.eye(64)).T, wanted, atol=1e-5)


def fitted(model, limits, **how):
    how = {"finals": 1, "shares": (0.25, 0.5, 0.75), "round_to": 8, "runtime": "onnxruntime:mixed"} | how
    return fit(model, tokens(), budget=limits, **how)


@pytest.mark.parametrize("share", [0.6, 0.3, 0.2])
def test_the_budget_holds_for_the_weights_as_they_are_written(share, tmp_path):
    model = tied()
    dense = sum(each.numel() for each in model.parameters())
    done = fitted(model, {"bytes": share})
    ladder = done.levels
    assert isinstance(ladder, RoundedLevels)
    for name, its in ladder.items():  # what costs less loses more, of each group
        assert (its[0].bits, its[0].loss) == (32, 0.0), name
        assert [each.loss for each in its] == sorted(each.loss for each in its)
        spent = [each.costs["bytes"] for each in its]
        assert spent == sorted(spent, reverse=True)
    assert done.got["bytes"] <= share * done.dense["bytes"]
    assert share == 0.2 or {"int8", "int4"} & {*done.candidates}  # the search begins with the whole model in these
    assert done.loss <= min(done.candidates.values())
    assert done.bits == ladder.bits(done.choice)
    assert {*done.bits.values()} <= {8, 4}
    assert done.bits
    left = sum(each.numel() for each in model.parameters())
    assert left <= dense
    assert "bits" in str(done)
    sizes = {name: module.weight.numel() for name, module in model.named_modules() if hasattr(module, "weight")}
    biases = sum(each.numel() for each in model.parameters() if each.dim() == 1)
    by_hand = 4 * biases + sum(BYTES[done.bits.get(name, 32)] * size for name, size in sizes.items())
    by_hand -= 4 * model.table.weight.numel() * ("head" not in done.bits)  # then it is there once
    assert done.got["bytes"] == pytest.approx(by_hand)


def test_the_bits_that_were_chosen_are_served(tmp_path):
    model = tied()
    bits = {"table": 8, "head": 4, "blocks.0.up": 8, "blocks.0.down": 4, "blocks.1.up": 4}
    runtime = OnnxRuntime(4, modules=(*bits.items(),))
    for name in ("float", "rounded"):
        (tmp_path / name).mkdir()
    runtime.write(model, tokens(1)[0], tmp_path / "float")
    runtime.rounded(tmp_path / "float", tmp_path / "rounded")
    graph = onnx.load(tmp_path / "rounded" / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    assert [kinds.count(each) for each in ("MatMulNBits", "MatMulInteger", "MatMul", "Gemm")] == [3, 1, 1, 0]
    (table,) = (node for node in graph.node if node.op_type == "Gather")
    types = {each.name: each.data_type for each in graph.initializer}
    assert types[table.input[0]] in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    loaded = runtime.load(tmp_path / "rounded")
    (found,) = loaded.run(loaded.feeds(tokens(1)[0]))
    with rounding(model, bits):
        near = output(model)
    apart = (torch.from_numpy(found) - output(model)).norm()
    assert (torch.from_numpy(found) - near).norm() < apart


def test_convolutions_are_in_8_bits_by_ranges_or_in_float(tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8)]
    model = nn.Sequential(*layers).eval()
    pictures = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    before = state_of(model)
    copied = pickle.loads(pickle.dumps(model))
    done = fit(copied, pictures, budget={"bytes": 0.6}, finals=1, shares=(0.25, 0.5), runtime="onnxruntime:mixed")
    assert {*done.bits.values()} == {8}
    assert done.got["bytes"] <= 0.6 * done.dense["bytes"]
    runtime = OnnxRuntime(8, calibrated=True, modules=(("2", 8),))
    for name in ("float", "rounded"):
        (tmp_path / name).mkdir()
    runtime.write(model, pictures[0], tmp_path / "float")
    feeds = runtime.load(tmp_path / "float").feeds(pictures[0])
    runtime.rounded(tmp_path / "float", tmp_path / "rounded", [feeds])
    graph = onnx.load(tmp_path / "rounded" / "model.onnx").graph
    sizes = {
        each.name: int(np.prod(each.dims)) for each in graph.initializer if each.data_type == onnx.TensorProto.INT8
    }
    assert [size for size in sizes.values() if size > 64] == [16 * 16 * 9]
    (found,) = runtime.load(tmp_path / "rounded").run(feeds)
    with torch.no_grad(), rounding(model, {"2": 8}):
        near = model(pictures[0])
    with torch.no_grad():
        dense = model(pictures[0])
    assert is_unchanged(model, before)
    assert (torch.from_numpy(found) - near).norm() < 0.5 * dense.norm()
    assert not torch.equal(near, dense)


def test_what_bits_save_has_no_factor():
    its = Predicted(10.0, {"a": [0.0, 2.0]}, factor=0.5, sure={"a": [0.0, 3.0]})
    assert (its.of({}), its.of({"a": 1}), its.own("a", 1), its.by_table({"a": 1})) == (10.0, 6.0, 4.0, 2.0)


REFUSED = {
    "it chooses bits, too": lambda: shrink(tied(), tokens(1)[0], 0.3, target="latency", runtime="onnxruntime:mixed"),
    "of parameters": lambda: fitted(tied(), {"params": 0.5}),
    "of a score": lambda: fit(tied(), tokens(), keep=0.9, runtime="onnxruntime:mixed"),
    "of zeros": lambda: fitted(tied(), {"bytes": 0.5}, over=("shrink", "oneshot")),
    "of a directory": lambda: fit(Path("any"), tokens(), budget={"bytes": 0.5}, runtime="onnxruntime:mixed", out="b"),
    "of 16": lambda: OnnxRuntime(4, modules=(("head", 16),)),
    "of 8 for the rest": lambda: OnnxRuntime(8, modules=()),
    "as probes": lambda: write_probes(tied(), tokens(1)[0], "probes", runtime="onnxruntime:mixed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_bits_of_each_matrix_is_refused(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"bits|probes are for"):
        REFUSED[what]()
    assert not [*tmp_path.iterdir()]
