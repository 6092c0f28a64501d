"""What each of several texts reaches of a model: experts, units and tokens, one text beside the other."""

import copy
import functools

import pytest
import torch
from torch import nn

import zoo
from secateur import fit, oneshot, reached, recover, sensitivity, shrink, sparsify
from secateur.kinds import Experts
from secateur.models import NamedTexts
from support.families import make


def tokens(low, high, count=3):
    return [{"input_ids": torch.randint(low, high, (2, 8))} for _ in range(count)]


@pytest.mark.long
def test_an_expert_that_one_text_alone_is_sent_to_is_named_for_the_other():
    model, _ = zoo.ZOO["mixtral"]()
    vocabulary = model.config.vocab_size
    texts = {"low": tokens(0, vocabulary // 2), "high": tokens(vocabulary // 2, vocabulary)}
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = reached(model, texts)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert found.experts == model.config.num_hidden_layers * model.config.num_local_experts
    for name, its in texts.items():
        alone = shrink(zoo.ZOO["mixtral"]()[0], zoo.ZOO["mixtral"]()[1], leave=Experts(1), batches=its, repair=False)
        assert {**found.texts[name].experts} == {**alone.unreached}
        assert found.texts[name].tokens == len({*torch.cat([each["input_ids"] for each in its]).flatten().tolist()})
    assert f"{vocabulary - found.texts['low'].tokens} of {vocabulary}" in str(found)


def test_a_unit_fires_where_it_comes_near_to_its_most():
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 3, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    bright, dark = torch.ones(1, 1, 4, 4), -torch.ones(1, 1, 4, 4)
    found = reached(model, {"bright": [(bright,)], "both": [(bright,), (dark,)], "dim": [(0.005 * bright,)]})
    assert {name: dict(each.units) for name, each in found.texts.items()} == {
        "bright": {"2": (1,)},
        "both": {},
        "dim": {"0": (0,), "2": (0, 1)},
    }
    assert found.units == 3


def test_batches_of_named_texts_are_taken_apart_again():
    batches = NamedTexts(tokens(0, 9, 4), ["b", "a", "b", "b"])
    assert {name: len(its) for name, its in batches.by_name().items()} == {"b": 3, "a": 1}
    assert {name: each.sequences for name, each in reached(make("llama"), batches).texts.items()} == {"b": 3, "a": 1}


def test_block_by_block_a_directory_reaches_what_its_model_does(tmp_path):
    for name in ("mixtral", "llama"):
        model = make(name)
        model.save_pretrained(tmp_path / name)
        texts = {"low": tokens(0, 9), "high": tokens(9, 30)}
        here, there = reached(model, texts), reached(tmp_path / name, texts)
        assert here.texts["low"].experts == there.texts["low"].experts
        assert here.texts["high"].units == there.texts["high"].units
        assert (here.experts, here.units, here.vocabulary) == (there.experts, there.units, there.vocabulary)


VERBS = {
    "sparsify": functools.partial(sparsify, sparsity=0.3, criterion="wanda"),
    "shrink": functools.partial(shrink, sparsity=0.3),
    "oneshot": functools.partial(oneshot, sparsity=0.5),
    "recover": functools.partial(recover, steps=2, local=0),
    "sensitivity": functools.partial(sensitivity, shares=(0.5,)),
    "fit": functools.partial(fit, budget={"params": 0.8}, shares=(0.5,), finals=1),
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_says_what_named_texts_reach(verb):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)))
    batches = NamedTexts([torch.rand(64, 8), torch.zeros(64, 8), torch.rand(64, 8)], ["code", "none", "code"])
    first = reached(blocks, batches)
    given = {"teacher": copy.deepcopy(blocks)} if verb == "recover" else {}
    done = VERBS[verb](blocks, batches=batches, **given)
    assert {**done.reach.texts} == {**first.texts}
    assert done.reach.texts["none"].units["0.0"] == tuple(range(8))
    assert str(first).splitlines()[0] in str(done)
    assert [row["text"] for row in done.json()["reached"]] == ["code", "none"]
    unnamed = VERBS[verb](copy.deepcopy(blocks), batches=list(batches), **given)
    assert unnamed.reach is None
    assert "Never reached by" not in str(unnamed)


def test_a_text_without_batches_is_refused():
    with pytest.raises(ValueError, match="a text has no batches; pass"):
        reached(nn.Linear(2, 2), {"one": []})


def test_batches_without_the_names_of_their_texts_are_refused():
    with pytest.raises(ValueError, match=r"pass \{name: batches\}"):
        reached(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
