"""What `docs/start/scale.md` projects: its tables are what the shapes give, and the shapes are those of the models."""

import math

import pytest

from benchmarks.scale import rates, run
from benchmarks.scale.shapes import ONE_BILLION, WIDER, shapes_of

pytestmark = pytest.mark.examples


def test_the_page_is_what_is_reckoned_now():
    page = run.PAGE.read_text(encoding="utf-8")
    assert run.written(page) == page


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        ({**ONE_BILLION, "num_hidden_layers": 3}, (2048, 2048, 2048, 5632)),
        (WIDER["8 B"], (4096, 4096, 4096, 14336)),
    ],
    ids=["1 B", "8 B"],
)
def test_shapes_are_those_of_the_whole_model(config, inputs):
    import torch
    import transformers

    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config))
    found = shapes_of(config)
    assert found.parameters == sum(math.prod(each.shape) for each in whole.parameters())
    blocks = [sum(math.prod(each.shape) for each in block.parameters()) for block in whole.model.layers]
    assert blocks == [found.block] * found.blocks
    assert found.inputs == inputs
    linear = [each for each in whole.model.layers[0].modules() if isinstance(each, torch.nn.Linear)]
    assert tuple(tuple(each.weight.shape) for each in linear) == found.matrices


@pytest.mark.parametrize("name", WIDER)
def test_more_processes_hold_less_and_take_less_time(name):
    model = shapes_of(WIDER[name])
    for of in (run.recovering, lambda *given: run.block_by_block(*given)[1]):
        one, two, eight = (of(model, processes) for processes in run.PROCESSES)
        assert one > two > eight
    one, two = (run.oneshot_seconds(model, processes) for processes in (1, 2))
    assert one["running"] == 2 * two["running"]
    assert one["disk"] == two["disk"]
    one, two = (run.shrink_seconds(model, processes) for processes in (1, 2))
    assert one["summing"] == 2 * two["summing"]
    assert one["solving"] == two["solving"]  # by the first
    for seconds in (run.sensitivity_seconds, lambda *given: sum(run.fit_seconds(*given).values())):
        one, two, eight = (seconds(model, processes) for processes in run.PROCESSES)
        assert one > two > eight > one / 8


def test_what_was_run_is_projected():
    block, four = (shapes_of({**ONE_BILLION, "num_hidden_layers": layers}) for layers in (1, 4))
    for verb in ("oneshot", "shrink"):
        one, more = (run.of_one_core(model, 1024, verb) for model in (block, four))
        assert one[0] < more[0] < 4 * one[0] + 1
        assert one[1] == more[1]


def test_rates_are_of_what_the_verbs_do(tmp_path):
    assert rates.eliminating(64) > 0
    assert all(each > 0 for each in rates.filing(64, tmp_path))
    assert rates.packing(64) > 0
    assert rates.probing(64, tmp_path) > 0
