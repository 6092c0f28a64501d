"""What `docs/start/scale.md` projects: its tables are what the shapes give, and the shapes are those of the models."""

import math

import pytest

from benchmarks.scale import run
from benchmarks.scale.shapes import ONE_BILLION, WIDER, shapes_of

pytestmark = pytest.mark.examples


def test_the_page_is_what_is_reckoned_now():
    page = run.PAGE.read_text(encoding="utf-8")
    assert run.written(page) == page


def test_shapes_are_those_of_the_whole_model():
    import torch
    import transformers

    config = {**ONE_BILLION, "num_hidden_layers": 3}
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config))
    found = shapes_of(config)
    assert found.parameters == sum(math.prod(each.shape) for each in whole.parameters())
    assert found.inputs == (2048, 2048, 2048, 5632)


@pytest.mark.parametrize("name", WIDER)
def test_more_processes_hold_less_and_take_less_time(name):
    model = shapes_of(WIDER[name])
    for of in (run.recovering, lambda *given: run.block_by_block(*given)[1]):
        one, two, eight = (of(model, processes) for processes in run.PROCESSES)
        assert one > two > eight
    one, two = (run.oneshot_seconds(model, processes) for processes in (1, 2))
    assert one["running"] == 2 * two["running"]
    assert one["disk"] == two["disk"]
