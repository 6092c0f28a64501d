"""A model in memory: refused before anything changes, or pruned in place and left as it was otherwise."""

import pytest
import torch
from torch import nn

from secateur import NM, criteria, fit, pack, prune, recover, sensitivity, shrink
from secateur.allocation import owl
from secateur.models import oneshot
from secateur.models.batches import which, with_batch_in_errors
from secateur.models.replay import LostOutputError
from secateur.solvers import from_criterion, sparsegpt
from secateur.support import naming_example
from support.families import batches, make
from support.stacks import MAGNITUDE, data, stack
from support.unchanged import is_unchanged, state_of


def test_the_model_is_left_as_it_was_but_for_its_weights():
    model = stack()
    model.train()
    model.layers[1].eval()
    state = torch.get_rng_state()
    oneshot(model, data(), 0.5)
    assert model.training
    assert not model.layers[1].training
    assert "forward" not in model.layers[0].__dict__
    assert not model.layers[0]._forward_pre_hooks
    assert not model.enter._forward_pre_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    llama = make("llama")
    llama.config.use_cache = True
    oneshot(llama, batches("llama", count=1), 0.5, solver=MAGNITUDE)
    assert llama.config.use_cache is True


def test_errors_of_a_model_in_memory():
    for keywords, kind, message in (
        ({"sparsity": None}, ValueError, "needs a sparsity"),
        ({"sparsity": 50}, ValueError, "For 50 percent write 0.5"),
        ({"pattern": NM(2, 4), "sparsity": 0.6}, ValueError, "removes 0.5 of the weights, not 0.6"),
        ({"batches": []}, ValueError, "no batches"),
        ({"batches": torch.zeros(2, 5)}, TypeError, r"pass \[batch\]"),
        ({"include": "layers.9*"}, ValueError, "no parameter matches"),
        ({"include": "head.weight"}, ValueError, "head.weight is outside the blocks"),
        ({"exclude": "layers*"}, ValueError, "no matrix is left to prune"),
        ({"out": "there"}, ValueError, "out= is for directories"),
        ({"solver": from_criterion(criteria.taylor)}, TypeError, "asks for grad_sq; a walk over blocks gathers"),
        ({"allocate": owl, "pattern": NM(2, 4), "sparsity": None}, ValueError, "leave allocate out"),
        ({"model": nn.BatchNorm1d(2)}, ValueError, "has no repeated blocks"),
        ({"batches": [torch.full((2, 5), torch.nan)]}, ValueError, r"layers\.0 receives in batch 0 holds NaN"),
    ):
        model = keywords.get("model") or stack()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        arguments = {"sparsity": 0.5, "batches": data(), **{key: v for key, v in keywords.items() if key != "model"}}
        with pytest.raises(kind, match=message):
            oneshot(model, **arguments)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), message


def test_models_that_are_not_ready():
    with pytest.raises(ValueError, match=r"enter\.weight is on the meta device"):
        oneshot(stack().to("meta"), data(), 0.5)
    model = stack()
    prune.l1_unstructured(model.layers[1].up, "weight", 0.5)
    with pytest.raises(ValueError, match=r"layers\.1\.up\.weight_orig: a mask is attached"):
        oneshot(model, data(), 0.5)
    model = stack()
    with torch.no_grad():
        model.layers[1].up.weight[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"layers\.1\.up\.weight: the weight of shape \(12, 8\) has entries that are NaN"
    ):
        oneshot(model, data(), 0.5)


def test_a_layer_of_no_width_has_the_sparsity_that_was_asked_for():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    model[0].weight = nn.Parameter(torch.empty(0, 6))
    model[0].bias, model[1].weight = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(4, 0))
    model.add_module("2", nn.Linear(4, 8))
    oneshot(model, [torch.randn(9, 6)], 0.5, solver="magnitude", allocate="erk")
    assert model[2].weight.eq(0).sum() == 16


def test_a_failure_in_a_later_block_says_which_are_pruned():
    model, calls = stack(), []

    def failing(weight, sparsity, pattern, *, gram):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("no solution")
        return sparsegpt(weight, sparsity, pattern, gram=gram)

    dense = stack()
    with pytest.raises(ValueError, match=r"layers\.1\.down\.weight: no solution") as caught:
        oneshot(model, data(), 0.5, solver=failing)
    assert caught.value.__notes__ == ["Pruned already, and left so: layers.0 to layers.0 (1 blocks)."]
    assert model.layers[0].up.weight.eq(0).float().mean() == 0.5
    assert torch.equal(model.layers[1].up.weight, dense.layers[1].up.weight), "a block changes as a whole"
    assert "forward" not in model.layers[2].__dict__


# Which batch a model does not run on is said.


class Refusing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("sizes"), IndexError("out of range"), ValueError("no\nsuch"), KeyError("a")]
)
def test_a_batch_is_named_by_its_number_and_its_shape(error):
    batches = [torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"batch 1 of 2 \(shape \(2, 4\), int64\) \(.*Error: ") as raised:
        with_batch_in_errors(batches, None)(Refusing(error), batches[1])
    assert raised.value.__cause__ is error
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, batches: oneshot(model, batches, 0.5),
        lambda model, batches: shrink(model, sparsity=0.5, batches=batches),
        lambda model, batches: sensitivity(model, batches),
        lambda model, batches: recover(model, stack(), batches),
        lambda model, batches: fit(model, batches, budget={"params": 0.7}),
    ],
    ids=["oneshot", "shrink", "sensitivity", "recover", "fit"],
)
def test_verbs_name_the_batch_that_a_model_does_not_run_on(verb):
    model = stack()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"does not run on batch 0 of 1 \(shape \(3, 99\), float32\)"):
        verb(model, [torch.zeros(3, 99)])
    with pytest.raises(ValueError, match="on the meta device"):
        verb(model, [data()[0], torch.zeros(3, 5, device="meta")])
    assert is_unchanged(model, before)


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, example: shrink(model, example, 0.5),
        lambda model, example: sensitivity(model, data(), example_inputs=example),
        lambda model, example: fit(model, data(), budget={"params": 0.7}, example_inputs=example),
        lambda model, example: pack(model, example),
    ],
    ids=["shrink", "sensitivity", "fit", "pack"],
)
def test_verbs_say_that_a_model_does_not_run_on_the_example(verb):
    model = stack()
    before = state_of(model)
    with pytest.raises(
        ValueError, match=r"not run on the example \(shape \(3, 99\), float32\) .*; give one that it takes"
    ):
        verb(model, torch.zeros(3, 99))
    with pytest.raises(ValueError, match=r"the example \(words of shape \(3, 5\), float32\) \(TypeError: .* 'words'\)"):
        verb(model, {"words": torch.zeros(3, 5)})
    assert is_unchanged(model, before)


def test_a_lazy_model_that_is_refused_stays_lazy():
    example = torch.zeros(2, 8)
    for verb in (lambda m: shrink(m, example, 0.5), lambda m: fit(m, [example], budget={"params": 0.7})):
        model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4))
        with pytest.raises(ValueError, match="has no shape yet; run the model once on an example before"):
            verb(model)
        assert all(map(nn.parameter.is_lazy, model.parameters()))


def test_what_fails_beside_an_example_that_the_model_takes_passes():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.zeros(1, 4)
    with pytest.raises(KeyError, match="mine"), naming_example(model, batch):
        raise KeyError("mine")
    with pytest.raises(ValueError, match="Expected more than 1 value"), naming_example(model, batch):
        model(batch)  # in training mode
    with (
        pytest.raises(ValueError, match="give one of at least one sample"),
        naming_example(nn.MaxPool1d(2), torch.zeros(1, 0)),
    ):
        nn.MaxPool1d(2)(torch.zeros(1, 0))
    assert model.training
    assert model[1].num_batches_tracked <= 1  # torch counts before it refuses


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError("disk"), LostOutputError("block"), torch.OutOfMemoryError("full")]
)
def test_what_is_not_the_batchs_fault_passes(error):
    with pytest.raises(type(error)) as raised:
        with_batch_in_errors([], None)(Refusing(error), torch.zeros(1))
    assert raised.value is error


def test_a_batch_of_no_known_kind_is_told_as_ever():
    with pytest.raises(TypeError, match="a batch is a tensor"):
        with_batch_in_errors([3], None)(nn.Identity(), 3)


def test_a_forward_of_ones_own_raises_what_it_raises_with_a_note():
    batches = [(torch.zeros(2, 3), "name")]

    def forward(model, batch):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as raised:
        with_batch_in_errors(batches, forward)(nn.Identity(), batches[0])
    assert raised.value.__notes__ == ["This was batch 0 of 1 (shape (2, 3), float32)."]


def test_a_batch_without_tensors_is_named_by_its_kind():
    assert which([], "words") == "a batch of a str"
    assert which([[]], []) == "a batch of a list"
