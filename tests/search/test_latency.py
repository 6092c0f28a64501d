"""Times of operations: what a model calls, each measured once, on disk and in between; no clock in any verdict."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from secateur.runtimes import OnnxRuntime, Torch
from secateur.search import latency
from secateur.search.latency import FILE, Operation, Times, operations_of, saved_by
from secateur.shrinking import Plan
from support.measured import ByParameters


def net():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def counted(monkeypatch):
    """Milliseconds that are what the numbers of an operation come to; and which were measured."""
    seen = []

    def turns(calls, rounds, **_):
        seen.extend(calls)
        return {numbers: [float(sum(numbers)) / 1e3] * rounds for numbers in calls}

    monkeypatch.setattr(latency, "alternating", turns)
    return seen


def of(*numbers, form="linear(#)"):
    return Operation(form, numbers, lambda: None)


def test_what_computes_is_an_operation_and_what_only_looks_is_not():
    class Looking(nn.Module):
        def forward(self, x):
            a, b = x.transpose(0, 1).reshape(2, -1).chunk(2)
            return (a * b)[:, 1:].unsqueeze(0).relu_(), x.shape, x.float()

    names = {each.form.partition("(")[0] for each in operations_of(Looking(), torch.ones(4, 6))}
    assert names == {"torch.Tensor.mul", "torch.Tensor.relu_", "torch.Tensor.reshape"}  # which had to copy


def test_the_same_call_twice_is_one_operation():
    layer = nn.Linear(4, 4)
    found = operations_of(nn.Sequential(layer, layer, nn.Linear(4, 4)), torch.ones(2, 4))
    assert list(found.values()) == [3]


def test_an_operation_can_be_called_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    shapes = {tuple(each.call()().shape) for each in operations_of(model, torch.ones(2, 3, 8, 8))}
    assert shapes == {(2, 4, 6, 6), (2, 2)}
    embedded = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    for each in operations_of(embedded, torch.zeros(2, 5, dtype=torch.long)):
        each.call()()


def test_recording_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model.train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert operations_of(model, torch.randn(8, 4)) == operations_of(model, torch.randn(8, 4))
    assert model.training
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_each_operation_is_measured_once(monkeypatch):
    seen = counted(monkeypatch)
    times = Times()
    assert times({of(8): 2, of(100): 1}) == 116
    assert times({of(8): 1}) == 8
    assert sorted(seen) == [(8,), (100,)]


def test_between_two_that_are_near_nothing_is_measured(monkeypatch):
    seen = counted(monkeypatch)
    times = Times()
    times.measure([of(8, 3), of(12, 3), of(40, 3)])
    seen.clear()
    assert times.known(of(10, 3)) == pytest.approx(13)
    assert times.known(of(20, 3)) is None  # too far from both
    assert times.known(of(10, 4)) is None  # on no line
    assert times.known(of(10, 3, form="conv(#)")) is None
    times.measure([of(10, 3), of(20, 3)])
    assert seen == [(20, 3)]


def test_what_a_plan_saves_is_the_difference_of_what_is_called(monkeypatch):
    seen = counted(monkeypatch)
    model = net()
    before = [each.clone() for each in model.parameters()]
    kept = np.arange(16)
    tensors = {"0.weight": ((32, 4), {0: kept}), "0.bias": ((32,), {0: kept}), "2.weight": ((32, 32), {1: kept})}
    saved = saved_by(model, torch.ones(2, 4), {"half": Plan(tensors, []), "none": Plan({}, [])}, Times())
    assert saved["none"] == 0
    assert saved["half"] > 0
    assert len(seen) == 6  # two products and a ReLU, before and after; the last product is the same
    assert all(map(torch.equal, before, model.parameters()))


def test_a_plan_that_cannot_run_leaves_the_model_as_it_is():
    model = net()
    wrong = Plan({"0.weight": ((32, 4), {0: np.arange(16)})}, [])
    with pytest.raises(RuntimeError):
        saved_by(model, torch.ones(2, 4), {"half": wrong}, Times())
    assert model[0].weight.shape == (32, 4)


def test_times_are_there_the_next_time(monkeypatch, tmp_path):
    seen = counted(monkeypatch)
    first = Times(tmp_path)
    first.measure([of(8), of(9, form="conv(#)")])
    again = Times(tmp_path)
    assert again({of(8): 1, of(9, form="conv(#)"): 3}) == 35
    assert len(seen) == 2


@pytest.mark.parametrize("part", ["processor", "accelerator", "runtime", "torch", "threads"])
def test_times_of_another_machine_are_measured_anew(monkeypatch, tmp_path, part):
    seen = counted(monkeypatch)
    Times(tmp_path).measure([of(8)])
    said = json.loads((tmp_path / FILE).read_text())
    said["machine"][part] = "another"
    (tmp_path / FILE).write_text(json.dumps(said))
    Times(tmp_path).measure([of(8)])
    assert seen == [(8,), (8,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: said.update(format="other"), "format is not 'secateur latency', version 1"),
        (lambda said: said.update(version=2), "format is not"),
        (lambda said: said.update(more=1), "more is not known"),
        (lambda said: said.pop("times"), "times is missing"),
        (lambda said: said["times"].append(["a", [1], -1.0]), r"times\[1\]\[2\] must be a number of at least"),
        (lambda said: said["times"].append(["a", [1.5], 1.0]), r"times\[1\]\[1\]\[0\] must be a whole number"),
        (lambda said: said["times"].append(["a", [2**70], 1.0]), r"times\[1\]\[1\]\[0\] must be a whole number"),
        (lambda said: said["times"].append([None, [1], 1.0]), r"times\[1\]\[0\] must be"),
        (lambda said: said["times"].append([]), r"times\[1\] must be a list of 3, not of 0"),
    ],
)
def test_a_damaged_file_is_named(monkeypatch, tmp_path, change, message):
    counted(monkeypatch)
    Times(tmp_path).measure([of(8)])
    said = json.loads((tmp_path / FILE).read_text())
    change(said)
    (tmp_path / FILE).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=rf"latency\.json: damaged: {message}.*Delete it: it is then measured again"):
        Times(tmp_path)


def test_a_runtime_times_each_operation_with_its_constants():
    """A product's weights are constants, which a runtime may lay out as it likes; what it is given is not."""
    times = Times(runtime=ByParameters())
    found = operations_of(net(), torch.ones(2, 4))
    assert times(found) == 1e3 * (sum(each.numel() for each in net().parameters()) + 2)  # of each ReLU one


def test_what_a_runtime_does_not_take_by_itself_is_timed_in_torch():
    class Refusing(Torch):
        def __call__(self, *_, **__):
            raise ValueError("the model cannot be exported")

    assert Times(runtime=Refusing())(operations_of(net(), torch.ones(2, 4))) > 0


def test_an_operation_computes_the_same_in_a_runtime():
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    for each in operations_of(model, x):
        own, its = each.call()(), each.call(OnnxRuntime())()[0]
        torch.testing.assert_close(torch.from_numpy(its), own)
