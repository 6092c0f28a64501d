"""Laws of what several threads do at once: each as if it were alone, and afterwards all is as before."""

import copy
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch._dynamo  # with the compiler there, what it may do is shared, too
from torch import nn

from secateur import shrink, verify_shrunken
from secateur.checkpoints import open_checkpoint
from secateur.models import build_on_meta
from secateur.shrinking import plans_of
from secateur.shrinking.files import json_of_plans
from secateur.shrinking.proof import outputs
from secateur.support import NewTensors

X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


class Noisy(nn.Module):
    """Draws numbers, makes tensors of numbers, and takes branches by chance."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = (self.up(x) + 0.1 * torch.randn(3).sum()).tanh()
        x = x + self.down(torch.nn.functional.dropout(hidden, 0.3, self.training))
        return self.last(x * torch.ones(8)) * (1 + random.random() + np.random.rand())  # noqa: NPY002  what a model may use


def recurrent():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0].sum(-1)

    return nn.Sequential(nn.Linear(8, 12), Last(12, 16, 2, batch_first=True))


MAKERS = [
    Noisy,
    recurrent,
    lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Linear(8, 2)),
]


def made(number):
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return MAKERS[number % len(MAKERS)]()


def shrunk(model, number):
    return shrink(model, X, 0.3, target="units" if number % 2 else "params").model


@pytest.fixture
def hurried():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def settings():
    return torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()


def drawn():
    """Where the generators are."""
    numpys = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


@pytest.mark.long
def test_eight_threads_shrink_what_one_does_and_leave_every_setting(hurried):
    count = 24
    models = [made(number) for number in range(count)]
    originals = copy.deepcopy(models)
    alone = [shrunk(made(number), number) for number in range(count)]
    before = settings(), drawn()
    together = threading.Barrier(8)

    def work(numbers):
        together.wait()
        for number in numbers:
            shrunk(models[number], number)
            if number < 8:
                verify_shrunken(originals[number], models[number], X)
        return settings()

    with ThreadPoolExecutor(8) as pool:
        after = list(pool.map(work, [range(start, count, 8) for start in range(8)]))
    assert set(after) == {before[0]} == {settings()}
    assert drawn() == before[1]
    for one, other in zip(alone, models, strict=True):
        assert json_of_plans(plans_of(one)) == json_of_plans(plans_of(other))


def test_a_proof_does_not_change_what_another_thread_makes():
    asked, told = threading.Event(), threading.Event()
    found = []

    class Waits(nn.Linear):
        def forward(self, x):
            asked.set()
            told.wait(10)
            found.append(torch.ones(1).dtype)
            return super().forward(x)

    def look():
        asked.wait(10)
        found.append((torch.ones(1).dtype, torch.get_default_dtype(), nn.Linear(2, 2).weight.dtype))
        told.set()

    other = threading.Thread(target=look)
    other.start()
    outputs(Waits(4, 3).double(), torch.zeros(1, 4))
    other.join()
    assert found == [(torch.float32,) * 3, torch.float64]


def test_a_model_that_is_built_on_meta_leaves_those_of_other_threads_real(tmp_path, monkeypatch):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=9, **sizes)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    asked, told = threading.Event(), threading.Event()
    found = []
    build = transformers.LlamaForCausalLM.__init__

    def slow(self, config):
        asked.set()
        told.wait(10)
        build(self, config)

    def look():
        asked.wait(10)
        found.append(nn.Linear(2, 2).weight)
        told.set()

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", slow)
    other = threading.Thread(target=look)
    other.start()
    model = build_on_meta(open_checkpoint(tmp_path))
    other.join()
    assert (found[0].device.type, found[0].dtype) == ("cpu", torch.float32)
    assert {(each.device.type, each.dtype) for each in model.parameters()} == {("meta", torch.bfloat16)}
    assert not any(each.is_meta for each in model.buffers())
    assert torch.get_default_dtype() == torch.float32


def test_new_tensors_are_of_the_dtype_that_was_asked_for():
    whole = torch.arange(4)
    with NewTensors(torch.float64):
        assert torch.tensor(0.1).item() == 0.1  # not rounded before
        for each in (torch.rand(2), torch.linspace(0, 1, 3), torch.full((2,), 0.5), whole / 3, torch.fft.fftfreq(4)):
            assert each.dtype == torch.float64
        assert torch.where(whole > 1, 0.5, 0.25).dtype == torch.float64
        assert torch.tensor(1j).dtype == torch.complex128
        assert torch.ones(2, dtype=torch.float32).dtype == torch.float32
        assert (torch.ones(2, dtype=torch.float16) * 2).dtype == torch.float16
        assert [each.dtype for each in (torch.tensor([1]), torch.arange(3), whole * 2)] == [torch.int64] * 3


def test_a_proof_takes_tensors_that_torch_makes_by_other_ways():
    class Legacy(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.fixed = nn.Linear(4, 12), nn.Linear(12, 4), torch.eye(4)

        def forward(self, x):
            rows = torch.Tensor([[1.0, 0.5], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
            return self.down(self.up(x).relu()) @ self.fixed @ rows

    model, x = Legacy(), torch.randn(2, 4)
    original = copy.deepcopy(model)
    shrink(model, x, 0.5, target="units")
    assert model.up.out_features == 6
    verify_shrunken(original, model, x)
