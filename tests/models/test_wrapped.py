"""A model inside a compiled or a replicated one: each verb does to it what it does to the bare one."""

import functools

import pytest
import torch
from torch import nn

from secateur import pack, sparsify
from secateur.inference import packing
from secateur.models import oneshot, reached
from secateur.search import sensitivity
from secateur.vocabulary import shrink_vocabulary
from support.fitting import blocks, inputs
from support.vocabularies import TEXT, model_of, wrapped

WRAPPERS = {"compiled": functools.partial(torch.compile, backend="eager"), "parallel": nn.DataParallel}
VERBS = {
    "sparsify": lambda model: [int(each.sum()) for each in sparsify(model, 0.5).values()],
    "oneshot": lambda model: [(each.name, each.error) for each in oneshot(model, inputs(), 0.5).layers],
    "sensitivity": lambda model: sensitivity(model, inputs(), shares=(0.5,)).scores,
    "reached": lambda model: reached(model, {"one": inputs()[:1], "all": inputs()}).texts,
    "pack": lambda model: [*pack(model, inputs()[0]).packed],
    "shrink_vocabulary": lambda model: shrink_vocabulary(model, wrapped("byte level"), [TEXT[:200]], exact=True),
}


def made(verb):
    if verb == "shrink_vocabulary":
        return model_of("tied", len(wrapped("byte level")) + 7), {"input_ids": torch.arange(8)[None]}
    model = blocks(2)
    if verb == "pack":
        sparsify(model, 0.95)
    return model, inputs()[0]


def run(model, x):
    with torch.no_grad():
        return model(**x).logits if isinstance(x, dict) else model(x)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.long
def test_it_is_done_to_the_model_inside(verb, wrap, monkeypatch):
    # what pack makes is ten times faster, so that it is there
    monkeypatch.setattr(packing, "_timed", lambda each, _: [0.1 if isinstance(made, nn.Module) else 1 for made in each])
    (bare, x), (inside, _) = made(verb), made(verb)
    around = WRAPPERS[wrap](inside)
    assert torch.equal(run(around, x), run(bare, x))
    assert VERBS[verb](around) == VERBS[verb](bare)
    mine, its = inside.state_dict(), bare.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in its)
    assert [type(each) for each in inside.modules()] == [type(each) for each in bare.modules()]
    assert verb != "pack" or type(inside[0].up) is not nn.Linear
    assert torch.equal(run(around, x), run(bare, x))  # nothing of what was compiled before is left
