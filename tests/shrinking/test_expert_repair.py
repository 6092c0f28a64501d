"""Laws of repaired mixtures: nearer to what the dense one gave, by their last matrices alone, or as they were."""

import copy

import pytest
import torch

import zoo
from secateur import shrink
from support.unchanged import is_unchanged, state_of


def batches():
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 53, (4, 16), generator=draw)} for _ in range(4)]


def shrunk(**how):
    model, _ = zoo.ZOO["mixtral"]()
    dense = copy.deepcopy(model)
    shrink(model, batches()[0], experts=1, batches=batches(), **how)
    return model.eval(), dense.eval()


def test_the_outputs_come_nearer_by_the_last_matrices_alone():
    repaired, dense = shrunk()
    plain, _ = shrunk(repair=False)
    changed = {name for name, each in plain.state_dict().items() if not torch.equal(each, repaired.state_dict()[name])}
    assert changed == {name for name, _ in plain.named_parameters() if name.endswith("experts.down_proj")}
    errors = []
    for model in (plain, repaired):
        found = []
        for each in (dense, model):
            hook = each.model.layers[0].mlp.register_forward_hook(lambda _m, _a, out, found=found: found.append(out))
            with torch.no_grad():
                each(**batches()[0])
            hook.remove()
        errors.append(float((found[0] - found[1]).norm()))
    assert errors[1] < 0.95 * errors[0]
    assert all(each.requires_grad for each in repaired.parameters())


def test_what_fails_later_takes_it_back():
    model, _ = zoo.ZOO["mixtral"]()
    state = state_of(model)

    def fails(_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        shrink(model, batches()[0], experts=1, batches=batches(), report=fails)
    assert is_unchanged(model, state)


def test_half_precision_stays_as_it_is():
    model, _ = zoo.ZOO["mixtral"]()
    model.bfloat16()
    rows = model.model.layers[0].mlp.experts.down_proj.clone()
    shrink(model, batches()[0], experts=1, batches=batches())
    left = model.model.layers[0].mlp.experts.down_proj
    assert all(any(torch.equal(each, row) for row in rows) for each in left)
