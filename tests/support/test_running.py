"""How a model is run: what a batch and example inputs mean, and that it is afterwards as it was."""

import copy
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import criteria, fit, oneshot, pack, recover, sensitivity, shrink, sparsify, verify_shrunken
from secateur.coupling import find_coupling
from secateur.evidence import collect
from secateur.pipeline import reestimate_batchnorm
from secateur.runtimes import OnnxRuntime
from secateur.search import write_probes
from secateur.support import (
    count_nonzero,
    free_memory,
    in_mode,
    is_sharded,
    laid_out,
    local,
    repeatable,
    restored,
    rounding_scales,
    run_batch,
    seeded,
    tensors_in,
    tensors_of,
    to_int8,
    unchanged,
    whole,
)
from secateur.support import machine as module
from support.fitting import blocks, inputs
from support.unchanged import DEFAULTS, is_unchanged, state_of


@pytest.fixture(params=["asleep", "in use"])
def gpus(monkeypatch, request):
    """Two GPUs that torch sees; what is asked of their generators."""
    kind, asked = types.ModuleType("gpu"), []
    kind.is_initialized = lambda: request.param == "in use"
    kind.device_count = lambda: 2
    kind.get_rng_state = lambda device: asked.append(f"read {device}") or device
    kind.set_rng_state = lambda state, device: asked.append(f"put {state} to {device}")
    monkeypatch.setattr(torch, "gpu", kind, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: kind)
    accelerator = types.SimpleNamespace(type="gpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    real = torch.device
    monkeypatch.setattr(torch, "device", lambda name: accelerator if name == "gpu" else real(name))
    monkeypatch.setattr(torch, "manual_seed", lambda number: asked.append(f"seed {number}"))
    return request.param, asked


def test_generators_of_gpus_are_restored_and_none_is_woken(gpus):
    """To ask a GPU that nobody uses for its generator takes memory there, and ends forking of processes."""
    state, asked = gpus
    before = torch.get_rng_state()
    with seeded():
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
    of_gpus = ["read 0", "read 1", "seed 20000", "put 0 to 0", "put 1 to 1"]
    assert asked == (of_gpus if state == "in use" else [])


class Sum(nn.Module):
    def forward(self, x, y=None):
        return x if y is None else x + y


@pytest.mark.parametrize("batch", [torch.ones(4, 2), {"input": torch.ones(4, 2)}, "ab"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda _model, batches: repeatable(batches),
        lambda model, batches: collect(model, batches, "input_norm"),
        lambda model, batches: sparsify(model, 0.5, criterion=criteria.wanda, batches=batches),
        lambda model, batches: reestimate_batchnorm(model, batches),
    ],
)
def test_one_batch_is_not_taken_for_several(verb, batch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = model[0].weight.clone()
    with pytest.raises(TypeError, match=r"batches is an iterable of batches, not a (Tensor|dict|str); pass \[batch\]"):
        verb(model, batch)
    assert torch.equal(model[0].weight, before)


def test_of_a_batch_the_target_is_split_off():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert run_batch(Sum(), (one, two), None) is one
    assert run_batch(Sum(), [one, two], lambda model, batch: model(*batch)).tolist() == [3, 3]


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_they_were_also_after_an_error(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    with pytest.raises(RuntimeError, match="stop"), in_mode(model, training=training):
        assert model[0].training == model[1].training == training
        raise RuntimeError("stop")
    assert (model[0].training, model[1].training) == (True, False)


def test_buffers_are_as_they_were():
    model = nn.BatchNorm1d(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with restored(model):
        model(torch.randn(4, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Averaging(nn.Module):
    """Writes a new tensor to a buffer at each step of training, as moving averages do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


@pytest.mark.parametrize("context", [restored, unchanged])
def test_a_buffer_that_a_run_replaced_is_the_one_that_was_there(context):
    model = Averaging()
    before = model.mean
    with context(model):
        model(torch.ones(2, 4))
        assert model.mean is not before
    assert model.mean is before
    assert model.mean.tolist() == [0, 0, 0, 0]


class Remembering(nn.Module):
    """Computes a table at the first call, and remembers in a number that it did."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.known, self.ready = 0, False

    def forward(self, x):
        if self.known < len(x) or not self.ready:
            self.table[: len(x)] = torch.arange(len(x)) + 1.0
            self.known, self.ready = len(x), True
        return x * self.table[: len(x)]


def test_a_number_that_says_what_a_buffer_holds_is_as_it_was():
    model = Remembering()
    with restored(model):
        model(torch.ones(3))
    assert (model.known, model.ready) == (0, False)
    assert model(torch.ones(3)).tolist() == [1, 2, 3]


def test_tensors_each_once():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer)
    assert list(tensors_of(model)) == ["0.weight", "0.bias"]
    one = torch.ones(1)
    nested = {"a": [one, (torch.zeros(1),)], "b": "text", "c": 3}
    assert [tensor.item() for tensor in tensors_in(nested)] == [1, 0]


# Plain tensors go through every function unchanged; what ranks do is in the tests of distributed pruning.


def test_plain_tensors_are_themselves():
    tensor = torch.tensor([0.0, 2.0, -0.0])
    assert not is_sharded(tensor)
    assert local(tensor) is whole(tensor) is laid_out(tensor, torch.zeros(2)) is tensor
    assert count_nonzero(tensor) == 1


# What is free is the least of what the machine, the container and the process's own limit leave.


MACHINE = {"/proc/meminfo": "MemFree: 1 kB\nMemAvailable:    9000 kB\n"}
GROUP = {
    "/sys/fs/cgroup/memory.max": "8000000\n",
    "/sys/fs/cgroup/memory.current": "3000000\n",
    "/sys/fs/cgroup/memory.stat": "active_file 5\ninactive_file 1000000\n",
}
OLD_GROUP = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "700000\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
    "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 7\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MACHINE, 9000 * 1024),
        (GROUP, 6_000_000),
        (MACHINE | GROUP, 6_000_000),
        (OLD_GROUP, 400_007),
        (MACHINE | GROUP | {"/sys/fs/cgroup/memory.max": "max\n"}, 9000 * 1024),
        (MACHINE | GROUP | {"/sys/fs/cgroup/memory.current": "9000000\n"}, 0),
    ],
)
def test_the_least_of_what_is_said(files, free, monkeypatch):
    def read(path, **_named):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert free_memory() == free


def test_a_limit_of_the_process_counts(monkeypatch):
    resource = pytest.importorskip("resource")
    files = {**MACHINE, "/proc/self/statm": "2 1 1\n"}
    monkeypatch.setattr(module, "_text", lambda path: files.get(path, ""))
    limit = 10 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert free_memory() == 8 * resource.getpagesize()


# Weights as whole numbers times scales: nearest, found again, and refused where there is no number.


@settings(max_examples=60)
@given(data=st.data())
def test_each_is_the_nearest_and_zeros_stay(data):
    shape = data.draw(st.sampled_from([(5, 70), (3, 4, 2, 2), (1, 1), (4,), (0, 3), (3, 0)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    weight = torch.randn(shape, generator=generator) * 10.0 ** data.draw(st.integers(-30, 30))
    weight = weight * (torch.rand(shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    weight = weight.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    numbers, scales = to_int8(weight)
    assert (numbers.dtype, numbers.shape, scales.dtype) == (torch.int8, weight.shape, torch.float32)
    assert not numbers[weight == 0].any()
    each = scales.view(-1, *[1] * (weight.dim() - 1))
    assert bool(((numbers * each - weight.float()).abs() <= 0.5001 * each).all())
    assert numbers.abs().amax() <= 127 if numbers.numel() else True
    again, same = to_int8(numbers * each)  # exact: a scale has 16 bits
    torch.testing.assert_close(again * same.view_as(each), numbers * each, rtol=0, atol=0)


@settings(max_examples=30)
@given(most=st.integers(1, 127), seed=st.integers(0, 999))
def test_a_grid_is_found_whatever_number_is_its_largest(most, seed):
    """After calibration the largest number of an output is not always 127."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 80, generator=generator)
    scales = rounding_scales(weight)
    numbers = torch.randint(-most, most + 1, weight.shape, generator=generator)
    on_grid = numbers * scales[:, None]
    found, own = to_int8(on_grid)
    assert torch.equal(found * own[:, None], on_grid)


def test_half_of_the_smallest_numbers():
    """Of what is below any scale nothing is left but zeros; nothing is divided by 0."""
    numbers, scales = to_int8(torch.tensor([[1e-44, -1e-40], [0.0, -0.0]]))
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())
    assert not numbers.any()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_refused(odd):
    with pytest.raises(
        ValueError, match=r"a weight of shape \(2, 2\) holds NaN or infinity, which has no place in int8"
    ):
        to_int8(torch.tensor([[1.0, 2.0], [odd, 0.0]]))


class Anchored(nn.Module):
    """It keeps what it made for a shape, as a detector does."""

    shape = None  # of the class, until it runs

    def __init__(self):
        super().__init__()
        self.layer, self.anchors = nn.Linear(3, 3), torch.empty(0)

    def forward(self, x):
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, torch.ones(x.shape)
        return self.layer(x) + self.anchors


@pytest.mark.parametrize("seen", [[], [2], [2, 5]], ids=str)
@pytest.mark.parametrize(
    "verb",
    [
        lambda model, x: find_coupling(model, x),
        lambda model, x: collect(model, [x], ["input_norm"]),
        lambda model, x: shrink(model, x, 0.3, batches=[x, x], verify=True),
    ],
    ids=["find_coupling", "collect", "shrink"],
)
def test_what_a_run_keeps_beside_a_tensor_goes_with_it(verb, seen):
    """Of a detector the anchors and the shape that they are of: one without the other is wrong for ever."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3), Anchored())
    for rows in seen:
        model(torch.zeros(rows, 3))
    verb(model, torch.randn(4, 3))
    for rows in (*reversed(seen), 4, 2, 5):
        assert model(torch.zeros(rows, 3)).shape == (rows, 3)


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, ids, _: shrink(model, ids, 0.3),
        lambda model, ids, here: shrink(model, here, 0.3, more_inputs=[ids]),
        lambda model, ids, here: verify_shrunken(model, shrink(copy.deepcopy(model), here, 0.3).model, ids),
        lambda model, ids, _: pack(model, ids),
        lambda model, ids, _: write_probes(model, ids, "unwritten"),
        lambda model, ids, _: OnnxRuntime()(model, ids),
        lambda model, ids, _: recover(model, copy.deepcopy(model), [ids]),
    ],
    ids=["shrink", "more inputs", "verify_shrunken", "pack", "write_probes", "runtime", "recover"],
)
def test_token_ids_without_values_are_told_before_anything_runs(verb, tmp_path, monkeypatch):
    """torch looks them up in a table that has values, and gives what has none."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    here = torch.ones(2, 3, dtype=torch.int64)
    said = r"on the meta device has no values \(shape \(2, 3\), int64\), and the model is on cpu: give it there\.$"
    with pytest.raises(ValueError, match=said):
        verb(model, here.to("meta"), here)
    assert [each.shape[0] for each in model.parameters()] == [9, 8, 8, 4, 4]
    assert not any(tmp_path.iterdir())


# ---- What a caller has around a verb: inference mode, as predictors have; other defaults of torch's; autocast.


TEACHER = blocks(2)
with torch.no_grad():
    for each in TEACHER.parameters():
        each.mul_(1.5)
LEARNING = {
    "shrink": lambda model, batches: shrink(model, batches[0], 0.3, batches=batches),
    "shrink by gates": lambda model, batches: shrink(model, batches[0], 0.3, batches=batches, choose="gates"),
    "oneshot by gates": lambda model, batches: oneshot(model, batches, 0.5, choose="gates"),
    "fit": lambda model, batches: fit(model, batches, budget={"params": 0.7}, shares=[0.5], finals=1),
    "recover": lambda model, batches: recover(model, TEACHER, batches, steps=2),
}


@pytest.mark.parametrize("verb", LEARNING)
def test_batches_of_inference_mode_are_taken_as_others_are(verb):
    found = []
    for inference in (False, True):
        model = blocks(2)
        with torch.inference_mode(inference):
            batches = [each.clone() for each in inputs()]
        assert batches[0].is_inference() == inference
        LEARNING[verb](model, batches)
        found.append({name: each.clone() for name, each in model.state_dict().items()})
    assert found[0].keys() == found[1].keys()
    assert any(not torch.equal(each, found[0][name]) for name, each in blocks(2).state_dict().items())
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name])


@pytest.mark.parametrize("verb", LEARNING)
def test_a_model_of_inference_mode_does_not_learn_and_stays_as_it_is(verb):
    with torch.inference_mode():
        model = blocks(2)
    state, flags = state_of(model), [each.requires_grad for each in model.parameters()]
    said = r"Sequential was made in torch\.inference_mode, where nothing learns; make or"
    if verb == "recover":  # which trains only some, and names the first
        said = r"0\.\S+ was made under torch\.inference_mode and can't be trained; make the model without it"
    with pytest.raises(ValueError, match=said):
        LEARNING[verb](model, inputs())
    assert is_unchanged(model, state)
    assert [each.requires_grad for each in model.parameters()] == flags == [True] * len(flags)


VERBS = {
    **LEARNING,
    "sparsify": lambda model, _: sparsify(model, 0.5),
    "shrink without data": lambda model, batches: shrink(model, batches[0], 0.3),
    "oneshot": lambda model, batches: oneshot(model, batches, 0.5),
    "sensitivity": lambda model, batches: model.found(sensitivity(model, batches, shares=[0.5]).scores),
}


def found_by(verb, model, batches):
    scores = []
    model.found = scores.append
    VERBS[verb](model, batches)
    return model.state_dict(), scores


@pytest.mark.filterwarnings("ignore::secateur.shrinking.WithoutDataWarning")
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_dtypes_and_devices_that_are_torchs_defaults_do_not_matter(verb, default):
    model, batches = blocks(2), inputs()
    other = copy.deepcopy(model)
    tensors, scores = found_by(verb, model, batches)
    with DEFAULTS[default]():
        others, other_scores = found_by(verb, other, batches)
    assert scores == other_scores
    assert tensors.keys() == others.keys()
    for name, each in tensors.items():
        assert torch.equal(each, others[name])


@pytest.mark.filterwarnings("ignore::secateur.shrinking.WithoutDataWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_a_callers_autocast_does_not_count_and_remembers_no_weights_that_are_gone(verb):
    """It keeps a narrow copy of each weight that requires a gradient, whatever becomes of the weight."""
    model, batches = blocks(2), inputs()
    other = copy.deepcopy(model)
    tensors, scores = found_by(verb, model, batches)
    with torch.autocast("cpu", torch.bfloat16):
        other(batches[0])
        others, other_scores = found_by(verb, other, batches)
        after = other(batches[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(batches[0]), after)
    assert not torch.equal(other(batches[0]), after), "the autocast was left off"
    assert scores == other_scores
    assert tensors.keys() == others.keys()
    for name, each in tensors.items():
        assert torch.equal(each, others[name])


def test_a_model_that_runs_under_autocast_alone_enters_it_itself():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.within = blocks(2)
            for each in self.within.modules():
                if isinstance(each, nn.Linear):
                    each.bfloat16()

        def forward(self, inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return self.within(inputs)

    model, batches = Narrow(), inputs()
    oneshot(model, batches, 0.5)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="must have the same dtype") as caught:
        oneshot(model.within, batches, 0.5)
    assert caught.value.__notes__ == [
        "A torch.autocast around the call does not count: a model that needs one enters it in its forward."
    ]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="sparsity") as caught:
        oneshot(model, batches, 2.0)
    assert not hasattr(caught.value, "__notes__")


def test_what_does_not_learn_takes_a_model_of_inference_mode():
    with torch.inference_mode():
        model = blocks(2)
    oneshot(model, inputs(), 0.5)
    other = blocks(2)
    oneshot(other, inputs(), 0.5)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.requires_grad
