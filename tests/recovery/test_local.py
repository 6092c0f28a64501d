"""Block by block: nearer to the teacher or as it was, one block at a time, and the rest of the model as it is."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import sparsify
from secateur.kinds import Blocks
from secateur.models import find_blocks, prepared
from secateur.recovery import recover, recovering
from secateur.recovery.local import (
    Gathered,
    adds_up,
    followed,
    of_one_block,
    parts_of_block,
    run_to,
    share_lost,
    sketch_of,
    stream_in,
)
from secateur.shrinking import shrink
from support.families import EVERY_FAMILY, batches, make, saved_deep


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_part_comes_nearer_or_stays(family):
    teacher = make(family)
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    done = recover(model, teacher, batches(family), steps=0, local=2)
    assert not done.left_out
    blocks = find_blocks(model)
    assert {part.block for part in done.parts} == set(blocks)
    assert all(part.after <= part.before for part in done.parts)
    assert sum(part.after < part.before for part in done.parts) > len(done.parts) // 2
    assert all(was == now for was, now in done.zeros.values())
    assert len(done.zeros) > 2
    inside = tuple(f"{name}." for name in blocks)
    for name, each in model.state_dict().items():
        if not name.startswith(inside):
            assert torch.equal(each, before[name]), f"{name} is in no block"


def test_a_token_counts_by_its_share():
    wanted = torch.randn(2, 3, 4)
    ours = wanted + torch.randn(2, 3, 4)
    big = wanted * torch.tensor([1.0, 1e4, 1.0])[:, None], ours * torch.tensor([1.0, 1e4, 1.0])[:, None]
    assert torch.allclose(share_lost(ours, wanted), share_lost(big[1], big[0]))
    mask = torch.tensor([[True, True, False]] * 2)
    assert torch.allclose(share_lost(ours, wanted, mask), share_lost(ours[:, :2], wanted[:, :2]))
    assert float(share_lost(wanted, wanted)) == 0
    assert torch.isfinite(share_lost(torch.zeros(1, 2), torch.zeros(1, 2)))


def test_what_blocks_share_is_not_for_one_of_them_to_move():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)))
    model[1][0].weight = model[0][0].weight
    model.head = model[2][0].weight
    names = [name for name, _ in model.named_parameters()]
    assert of_one_block(model, ["0", "1", "2"], names) == {"0.0.bias", "1.0.bias", "2.0.bias"}


def test_other_stacks_and_widths_are_left_out_and_the_outputs_compared():
    teacher = make("llama")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = 1
    config.layer_types = None
    fewer = type(teacher)(config)
    tokens = [{"input_ids": torch.randint(3, 64, (2, 8))}]
    done = recover(fewer, teacher, tokens, steps=2)
    assert done.left_out == (
        "the local part, since the model has 1 blocks and the teacher 2, and the weights do not say which of these "
        "model.layers.0 was",
    )
    assert done.steps == 2
    config = copy.deepcopy(teacher.config)
    config.hidden_size = 12
    config.head_dim = 4
    narrower = type(teacher)(config)
    done = recover(narrower, teacher, tokens, steps=2)
    assert "what model.layers.0 passes on has shape (2, 8, 12) here, and (2, 8, 16) in the teacher" in done.left_out[0]
    network = nn.Linear(4, 4)
    done = recover(network, nn.Linear(4, 4), [torch.randn(2, 4)], steps=1, loss="mse")
    assert "has no repeated blocks" in done.left_out[0]


@pytest.mark.parametrize("listed", [True, False])
def test_of_a_list_the_batches_are_spread_over_it(listed, monkeypatch):
    monkeypatch.setattr(recovering, "LOCAL_BATCHES", 4)
    teacher = make("llama")
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    tokens = [{"input_ids": torch.randint(3, 64, (2, length))} for length in range(3, 11)]
    seen = set()

    def forward(each, batch):
        seen.add(batch["input_ids"].shape[1])
        return each(**batch)

    loader = torch.utils.data.DataLoader(tokens, batch_size=None)
    recover(model, teacher, tokens if listed else loader, steps=0, forward=forward)
    assert seen == ({3, 5, 7, 9} if listed else {3, 4, 5, 6})


def test_a_block_that_runs_twice_is_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

        def forward(self, x):
            return self.layers[0](self.layers[0](x))

    done = recover(Twice(), Twice(), [torch.randn(2, 4)], steps=1, loss="mse")
    assert "runs more than once in a forward pass" in done.left_out[0]


def test_an_error_of_the_models_own_is_none_to_go_on_after():
    model, teacher = make("llama"), make("llama")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        recover(model, teacher, [{"nonsense": torch.ones(1)}], steps=0)


# ---- The matrix whose outputs are added up, and its least squares under a mask. ----


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def test_what_is_added_up_is_found_by_its_gradient():
    half, x = Half(), torch.randn(5, 4)
    names = [name for name, _ in half.named_parameters()]
    assert adds_up(half, names, lambda: half(x)) == "down"
    assert adds_up(half, ["up.weight"], lambda: half(x)) is None
    assert adds_up(half, names, lambda: half.norm(half(x))) is None, "not after a normalization"
    assert adds_up(half, names, lambda: half.last(half(x))) == "last", "the last one"
    assert adds_up(half, names, lambda: 2 * half(x)) is None
    with torch.no_grad():
        assert adds_up(half, names, lambda: half(x).detach()) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_least_squares_leave_zeros_and_lack_less(bias, masked):
    layer = nn.Linear(6, 3, bias=bias)
    teacher = nn.Linear(6, 3)
    mask = torch.rand(3, 6) > 0.5 if masked else None
    if masked:
        layer.weight.data.mul_(mask)
    x = [torch.randn(4, 40, 6) for _ in range(3)]
    padding = torch.ones(4, 40, dtype=torch.bool)
    padding[:, 30:] = False
    x[0][~padding] = 1e4
    wanted = [teacher(each).detach() for each in x]
    wanted[0][~padding] = 1e6

    def lost():
        pairs = [(layer(each), aim) for each, aim in zip(x, wanted, strict=True)]
        shares = [((a - b).square().sum(-1) / b.square().sum(-1))[padding].sum() for a, b in pairs]
        return sum(float(each.detach()) for each in shares)

    before, gathered = lost(), Gathered(layer)
    for each, aim in zip(x, wanted, strict=True):
        gathered.run(lambda each=each: layer(each), aim, padding)
    values = gathered.solved(mask)
    assert set(values) == ({"weight", "bias"} if bias else {"weight"})
    heavy = gathered.solved(mask, 100.0)["weight"]
    assert (heavy - layer.weight).norm() < (values["weight"] - layer.weight).norm()
    layer.load_state_dict(values)
    assert lost() < before
    if masked:
        assert bool(layer.weight[~mask].eq(0).all())
    if bias and not masked:
        assert torch.allclose(layer.weight, teacher.weight, atol=0.1)


# The parts of blocks of many families: attention up to the residual sum, and the rest; every parameter in one.


ENDS = {
    "llama": ["post_attention_layernorm", ""],
    "qwen3": ["post_attention_layernorm", ""],
    "gemma2": ["pre_feedforward_layernorm", ""],
    "gpt2": ["ln_2", ""],
    "bert": ["attention.output.LayerNorm", ""],
    "mixtral": ["post_attention_layernorm", ""],
    "gpt_neox": [""],  # attention and MLP side by side
    "bart": ["self_attn_layer_norm", ""],
}


@pytest.mark.parametrize("family", ENDS)
def test_a_block_ends_in_the_middle_where_attention_joins_the_stream(family):
    model = make(family)
    block = next(iter(find_blocks(model).values()))
    found = []

    def look(module, args, kwargs, output):
        if not found:
            found.append(0)  # the runs below are of the block itself
            parameters = dict(block.named_parameters())
            found[0] = parts_of_block(block, parameters, lambda: block(*args, **kwargs))
            ends = [run_to(block, part.end, lambda: block(*args, **kwargs)) for part in found[0]]
            found.append([end.shape == stream_in(output).shape for end in ends])

    with torch.no_grad(), prepared(model):
        handle = block.register_forward_hook(look, with_kwargs=True)
        batch = batches(family)[0]
        model(**batch) if isinstance(batch, dict) else model(batch)
        handle.remove()
    parts, comparable = found
    assert [part.end for part in parts] == ENDS[family]
    assert all(comparable)
    every = [local for part in parts for local in part.parameters]
    assert sorted(every) == sorted(local for local, _ in block.named_parameters())
    assert len(set(every)) == len(every)
    matrices = [any(block.get_parameter(each).dim() > 1 for each in part.parameters) for part in parts]
    assert all(matrices)


def test_torchs_own_layer_has_halves_and_a_plain_one_is_one_part():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    parts = parts_of_block(layer, dict(layer.named_parameters()), lambda: layer(x))
    assert [part.end for part in parts] == ["norm1", ""]
    assert "self_attn.in_proj_weight" in parts[0].parameters
    linear = nn.Linear(4, 4)
    assert [
        part.end for part in parts_of_block(linear, dict(linear.named_parameters()), lambda: linear(x[..., :4]))
    ] == [""]
    assert not any(each.requires_grad for each in layer.requires_grad_(False).parameters())
    parts_of_block(layer, dict(layer.named_parameters()), lambda: layer(x))
    assert not any(each.requires_grad for each in layer.parameters()), "as it was"


def test_a_block_that_takes_another_way_is_told():
    with pytest.raises(ValueError, match="a Sequential did not run its 0, as it did before; pass batches of one kind"):
        run_to(nn.Sequential(nn.LayerNorm(2)), "0", lambda: None)
    with pytest.raises(ValueError, match="a Identity returns no tensor of features"):
        run_to(nn.Identity(), "", lambda: None)


# ---- Which of the teacher's blocks a block follows: told by the weights, in the teacher's order, or not at all. ----


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
