"""Which of the teacher's blocks a block follows: told by the weights, in the teacher's order, or not at all."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import sparsify
from secateur.kinds import Blocks
from secateur.recovery import recover
from secateur.recovery.local import followed, sketch_of
from secateur.shrinking import shrink
from support.families import batches, make, saved_deep


def blocks_of(count, seed=0):
    torch.manual_seed(seed)
    return {f"h.{at}": nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)) for at in range(count)}


def ask(blocks, theirs):
    sketches = [lambda name, own=own: sketch_of(own[name]) for own in (blocks, theirs)]
    return followed(list(blocks), list(theirs), *sketches)


@given(
    st.integers(2, 7).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), min_size=1)))
)
def test_each_of_the_teachers_blocks_is_followed_once_and_in_order(drawn):
    count, kept = drawn
    theirs = blocks_of(count)
    blocks = {f"h.{at}": copy.deepcopy(theirs[f"h.{old}"]) for at, old in enumerate(sorted(kept))}
    for each in blocks.values():
        sparsify(each, 0.5)
    found = ask(blocks, theirs)
    every = [name for each in found.values() for name in (*each.skipped, *each.blocks)]
    assert every == list(theirs)
    assert [each.blocks[0] for each in found.values()] == [f"h.{old}" for old in sorted(kept)]


def test_what_the_weights_do_not_tell_is_said():
    theirs = blocks_of(3)
    assert "do not say which of these h.0 was" in ask(blocks_of(2, seed=1), theirs)
    turned = {"h.0": theirs["h.2"], "h.1": theirs["h.0"]}
    assert "do not say which of these h.1 was" in ask(turned, theirs)
    assert "of other names" in ask(blocks_of(4), theirs)
    assert "of other names" in ask({"layers.0": theirs["h.0"]}, theirs)
    narrow = {"h.0": nn.Sequential(nn.Embedding(2, 3)), "h.1": theirs["h.1"]}
    assert "do not say which of these h.0 was" in ask(narrow, theirs)


def deep(layers):
    torch.manual_seed(0)
    model = make("llama", num_hidden_layers=layers)
    for each in model.parameters():
        if each.dim() > 1:
            nn.init.normal_(each, std=0.3)
    return model


@pytest.mark.parametrize("gone", [[1], [0], [3], [1, 2]], ids=str)
def test_the_last_part_of_a_block_comes_near_to_what_the_teacher_passes_on_before_the_next(gone):
    teacher = deep(4)
    model = copy.deepcopy(teacher)
    model.model.layers = nn.ModuleList(each for at, each in enumerate(model.model.layers) if at not in gone)
    for at, each in enumerate(model.model.layers):
        each.self_attn.layer_idx = at
    model.config.num_hidden_layers = len(model.model.layers)
    tokens = [{"input_ids": torch.randint(3, 64, (4, 12)), "use_cache": False} for _ in range(3)]
    done = recover(model, teacher, tokens, steps=0, local=3)
    assert not done.left_out
    assert len(done.parts) == 2 * len(model.model.layers)
    first = gone[0]
    if first:  # what is before the gap has nothing to learn but its end
        assert all(part.before < 1e-9 for part in done.parts[: 2 * first - 1])
        assert done.parts[2 * first - 1].before > 1e-3
    assert done.parts[-1].after < done.parts[-1].before


def test_a_directory_of_fewer_blocks_is_recovered_block_by_block(tmp_path):
    saved_deep("llama", tmp_path / "dense")
    shrink(tmp_path / "dense", leave=Blocks(0.25), out=tmp_path / "fewer", batches=batches("llama"))
    done = recover(tmp_path / "fewer", tmp_path / "dense", batches("llama"), out=tmp_path / "out", steps=0)
    assert not done.left_out
    assert len(done.parts) == 6
