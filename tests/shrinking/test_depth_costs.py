"""What outputs lose without blocks is what they do in memory, in one pass over the weights."""

import itertools

import pytest
import torch

from secateur.checkpoints import open_checkpoint
from secateur.models import InFiles, Tokens, divergence
from secateur.shrinking.kinds.blocks import DepthCosts, few_batches, passing
from secateur.shrinking.select import least
from support.families import batches, saved_deep
from support.stacks import contents


def place_of(folder, held):
    return InFiles(open_checkpoint(folder), folder, held)


def in_memory(model, held, gone):
    total, rows = 0.0, 0
    with torch.no_grad():
        for batch in held:
            dense = model(**batch)
            with passing(model, gone):
                lost, count = divergence(dense, model(**batch), Tokens.of(batch).own)
            total, rows = total + lost, rows + count
    return total / rows


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_costs_are_those_of_the_model_in_memory(tmp_path, family):
    """T5's decoder is given what its encoder gave, in each run its own."""
    model = saved_deep(family, tmp_path / "dense", 3)
    before = contents(tmp_path / "dense")
    place = place_of(tmp_path / "dense", batches(family))
    costs = DepthCosts(place, place.batches)
    blocks = list(place.blocks)
    for gone in ((), blocks[1:2]):
        more = [each for each in blocks if each not in gone]
        found = costs(gone, more)
        assert next(iter(found)) is None
        assert found.keys() == {None, *more}
        for each in found:
            wanted = in_memory(model, batches(family), [*gone, *([each] if each else [])])
            assert found[each] == pytest.approx(wanted, rel=1e-3, abs=1e-7), each
    assert all(each.is_meta for block in place.blocks.values() for each in block.parameters())
    assert contents(tmp_path / "dense") == before


def test_a_pass_reads_each_block_once_whatever_is_tried(tmp_path, monkeypatch):
    saved_deep("llama", tmp_path / "dense")
    place = place_of(tmp_path / "dense", batches("llama"))
    costs = DepthCosts(place, place.batches)
    read = []
    load = place.files.load
    monkeypatch.setattr(place.files, "load", lambda name, **how: read.append(name) or load(name, **how))
    costs((), list(place.blocks))
    assert read == list(place.blocks)


def test_a_weight_that_is_not_finite_is_found(tmp_path):
    model = saved_deep("llama", tmp_path / "dense")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(torch.inf)
    model.save_pretrained(tmp_path / "broken")
    place = place_of(tmp_path / "broken", batches("llama"))
    with pytest.raises(ValueError, match=r"what model\.layers\.3 receives in batch 0 holds NaN"):
        DepthCosts(place, place.batches)


def test_the_first_thousand_tokens_are_enough():
    assert [each.shape for each in few_batches([torch.zeros(1, 512, dtype=torch.long)] * 9)] == [(1, 512)] * 2
    assert [each.shape for each in few_batches([torch.zeros(4, 512, dtype=torch.long)] * 9)] == [(2, 512)]
    assert len(few_batches([torch.zeros(3, 5)] * 9)) == 4
    assert few_batches(["words"]) == ["words"]


def test_blocks_leave_one_by_one_each_the_one_that_adds_least():
    """Against trying all: what one costs grows with what is gone."""
    torch.manual_seed(0)
    own, pairs = torch.rand(7).tolist(), torch.rand(7, 7).tolist()

    def price(gone):
        return sum(own[each] for each in gone) + sum(pairs[min(p)][max(p)] for p in itertools.combinations(gone, 2))

    passes = []

    def costs(gone, more):
        passes.append(len(more))
        return {None: price(gone)} | {each: price([*gone, each]) for each in more}

    gone, lost = least(costs, lambda gone: {each: 1 for each in range(7) if each not in gone}, 4, at_once=4)
    expected = []
    for _ in range(4):
        expected.append(
            min((each for each in range(7) if each not in expected), key=lambda each: price([*expected, each]))
        )
    assert gone == expected
    assert lost == pytest.approx(price(gone))
    assert passes[0] == 7
    assert max(passes[1:]) <= 4
