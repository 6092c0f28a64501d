"""The law of replaying: what is measured is what a whole run measures, whatever the measure does."""

import contextlib
import inspect

import pytest
import torch

from secateur.search import Replayed
from secateur.search.score import pieces_of
from support.families import batches as family_batches
from support.families import make
from support.measured import text, words
from support.stacks import data, stack


@contextlib.contextmanager
def changed(model, name, by=1.5):
    parameter = model.get_parameter(name)
    whole = parameter.data
    parameter.data = whole * by
    try:
        yield
    finally:
        parameter.data = whole


def total(model, batches):
    """A measure that any change shows in."""

    @torch.no_grad()
    def measure():
        return float(sum((model(each).double() * torch.arange(1, 4)[:, None, None]).sum() for each in batches))

    return measure


def counted(module):
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("at", [0, 1, 2])
def test_only_what_is_behind_the_change_is_run(at):
    model, batches = words(layers=3), text()
    measure = total(model, batches)
    expected = measure()
    replayed = Replayed(model, measure)
    assert replayed.dense == expected
    inner = [counted(block.up) for block in model.blocks]
    with changed(model, f"blocks.{at}.up.weight"):
        found = replayed([f"blocks.{at}.up.weight"])
        ran = [len(each) for each in inner]
        assert found == measure() != expected
    assert ran == [len(batches) if block >= at else 0 for block in range(3)]
    assert replayed.passes == pytest.approx((3 - at) / 3)
    assert measure() == expected  # nothing of it stays
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "bart", "gpt2", "mixtral"])
def test_families_are_measured_as_they_are(family):
    """An encoder's states go to every block of a decoder; masks and positions go around the blocks."""
    model, batches = make(family).eval(), family_batches(family)

    @torch.no_grad()
    def measure():
        return float(sum(model(**each, use_cache=False).logits.double().square().sum() for each in batches))

    replayed = Replayed(model, measure)
    blocks = list(pieces_of(model))
    for block in (blocks[0], blocks[-1], blocks[len(blocks) // 2]):
        name = next(f"{block}.{local}" for local, each in pieces_of(model)[block].named_parameters() if each.dim() == 2)
        with changed(model, name):
            assert replayed([name]) == measure() != replayed.dense
    assert replayed.passes < 3


def test_a_pass_on_other_inputs_is_run_whole():
    model = stack()
    batches = data()

    @torch.no_grad()
    def measure():
        answer = model(batches[0])
        return float(model(torch.cat([batches[0][:, :3], answer], 1)).sum())  # of what it said itself

    replayed = Replayed(model, measure)
    with changed(model, "layers.2.up.weight"):
        assert replayed(["layers.2.up.weight"]) == measure() != replayed.dense
    assert replayed.passes == pytest.approx((1 + 3) / 6)


def test_a_measure_that_generates_with_a_cache_is_run_whole():
    model = make("llama").eval()
    ids = torch.arange(3, 9)[None]
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.no_grad()
    def measure():
        cached = model(ids, use_cache=True)
        following = model(ids[:, :1], **{name: cached.past_key_values}, use_cache=True)
        return float(following.logits.double().square().sum())

    replayed = Replayed(model, measure)
    weight = "model.layers.1.mlp.down_proj.weight"
    with changed(model, weight):
        assert replayed([weight]) == measure() != replayed.dense


def test_beyond_the_limit_passes_are_run_whole():
    model, batches = words(), text()
    measure = total(model, batches)
    replayed = Replayed(model, measure, limit=3 * 3 * 12 * 12 * 4)  # of a pass and a half
    with changed(model, "blocks.1.up.weight"):
        assert replayed(["blocks.1.up.weight"]) == measure()
    assert 0.5 < replayed.passes < 1


def test_a_measure_that_fails_leaves_the_model():
    model = stack()
    calls = []

    def measure():
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return float(model(data()[0]).detach().sum())

    replayed = Replayed(model, measure)
    with pytest.raises(KeyboardInterrupt):
        replayed(["layers.1.up.weight"])
    assert not any("forward" in vars(layer) for layer in model.layers)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
