"""Laws of repaired mixtures: nearer to the dense stream, by their last matrices alone, or as they were and told so."""

import copy

import pytest
import torch

import zoo
from secateur import shrink
from secateur.kinds import Experts
from secateur.models import Outputs, WeightView
from secateur.shrinking.kinds import expert_repair
from secateur.shrinking.kinds.expert_repair import _ridge
from support.unchanged import is_unchanged, state_of


def batches(count=4):
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 53, (4, 16), generator=draw)} for _ in range(count)]


def shrunk(name="mixtral", dtype=torch.float32, **how):
    model, inputs = zoo.ZOO[name]()
    model = model.to(dtype).eval()
    dense = copy.deepcopy(model)
    done = shrink(model, inputs, leave=Experts(1), **{"batches": batches(), **how})
    return model.eval(), dense, done


def off(dense, model):
    """How far the streams behind the blocks are from the dense ones, a number a block."""
    found = []
    for each in (dense, model):
        outs = []
        hooks = [
            layer.register_forward_hook(lambda _m, _a, out, outs=outs: outs.append(out)) for layer in each.model.layers
        ]
        with torch.no_grad():
            for batch in batches():
                each(**batch)
        for hook in hooks:
            hook.remove()
        found.append(outs)
    lost = [float((one - two).float().square().sum()) for one, two in zip(*found, strict=True)]
    layers = len(dense.model.layers)
    return [sum(lost[at::layers]) for at in range(layers)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streams_come_nearer_by_the_last_matrices_alone(dtype):
    repaired, dense, done = shrunk(dtype=dtype)
    plain, _, before = shrunk(dtype=dtype, repair=False)
    assert (before.mended, before.unmended) == ({}, {})
    changed = {name for name, each in plain.state_dict().items() if not torch.equal(each, repaired.state_dict()[name])}
    assert changed == {name for name, _ in plain.named_parameters() if name.endswith("experts.down_proj")}
    assert {each.dtype for each in repaired.parameters()} == {dtype}
    for less, more in zip(off(dense, repaired), off(dense, plain), strict=True):
        assert less < 0.9 * more
    assert {*done.mended} == {*done.experts}
    assert all(0 < share < 1 for share in done.mended.values())
    assert "experts that stay recover" in str(done)
    assert all(each.requires_grad for each in repaired.parameters())


def test_what_fails_later_takes_it_back():
    model, inputs = zoo.ZOO["mixtral"]()
    state = state_of(model)

    def fails(_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        shrink(model, inputs, leave=Experts(1), batches=batches(), report=fails)
    assert is_unchanged(model, state)


@pytest.mark.long
def test_a_mixture_behind_a_normalization_is_brought_nearer_to_its_own_outputs():
    _, _, done = shrunk("mixture_gemma4")
    assert {*done.mended} | {*done.unmended} == {*done.experts}
    assert done.mended


def test_what_cannot_be_repaired_is_told_and_stays(monkeypatch):
    monkeypatch.setattr(expert_repair, "rows_of_experts", lambda *_: None)
    model, _, done = shrunk()
    plain, _, _ = shrunk(repair=False)
    assert done.mended == {}
    assert {*done.unmended.values()} == {"what its experts give is not added up as it is"}
    assert "Not repaired: model.layers.0" in str(done)
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in model.state_dict().items())


def test_nothing_changes_where_held_out_tokens_gain_nothing(monkeypatch):
    monkeypatch.setattr(expert_repair, "DAMPINGS", (1e12,))  # so that no matrix moves by more than it is rounded
    model, _, done = shrunk(dtype=torch.bfloat16)
    plain, _, _ = shrunk(dtype=torch.bfloat16, repair=False)
    assert all("too coarse" in why or "no change" in why for why in done.unmended.values())
    assert done.mended == {}
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in model.state_dict().items())


def test_in_inference_mode_they_are_repaired_alike_and_can_be_trained():
    plain, _, done = shrunk()
    model, inputs = zoo.ZOO["mixtral"]()
    with torch.inference_mode():
        there = shrink(model.float().eval(), inputs, leave=Experts(1), batches=batches())
    assert there.mended == done.mended
    assert not there.unmended
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert not other.is_inference()
        assert torch.equal(one, other)
    with torch.inference_mode():  # as what is made in it always was
        made = shrink(copy.deepcopy(model), inputs, 0.1).model
    assert all(each.is_inference() for each in made.parameters())


def test_one_batch_is_enough():
    _, _, done = shrunk(batches=batches(1))
    assert {*done.mended} | {*done.unmended} == {*done.experts}


def test_a_block_that_runs_twice_is_left_as_it_is():
    model, inputs = zoo.ZOO["mixtral"]()
    model.model.layers[1] = model.model.layers[0]
    done = shrink(model, inputs, leave=Experts(1), batches=batches())
    assert {*done.unmended.values()} == {"model.layers.0 runs more than once in a forward pass"}


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ridge_regression_is_the_least_of_what_it_says(shape, dtype):
    rows, residual, damping = torch.randn(shape, dtype=dtype), torch.randn(shape[0], 3, dtype=dtype), 0.3
    found = _ridge(rows, residual, damping)
    slope = rows.T @ (rows @ found - residual) + damping * found
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)


def test_a_gram_matrix_without_a_factor_is_damped_more():
    rows = torch.full((9, 4), 1e4)  # of one direction alone
    assert bool(_ridge(rows, torch.ones(9, 2), 1e-9).isfinite().all())


def test_changes_of_all_experts_lie_in_one_piece_of_memory():
    """So that they take no more than they hold."""
    pieces = [WeightView("experts.down_proj", at * 12, (3, 4), (4, 1)) for at in range(3)]
    kept = expert_repair._Kept(Outputs(), residual=torch.zeros(1), pieces=pieces)
    changes = expert_repair._room(kept)
    assert [each.shape for each in changes.values()] == [(4, 3)] * 3
    assert len({each.untyped_storage().data_ptr() for each in changes.values()}) == 1
    starts = sorted(each.storage_offset() for each in changes.values())
    assert starts == [0, 12, 24]
