"""The stages of a block are found by structure, and each is solved on what the pruned ones before it give."""

import pytest
import torch

from secateur import Rows, Unstructured
from secateur.models import oneshot
from secateur.models.blocks import choose_targets, find_blocks
from secateur.models.observation import prepared, stages_of
from secateur.models.replay import Replay
from secateur.solvers import admm, aimed, sparsegpt
from support.families import Encoder, batches, make
from support.stacks import WANDA, data, stack

ATTENTION = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
LLAMA = (*ATTENTION, ("gate_proj", "up_proj"), ("down_proj",))
EXPECTED = {
    "llama": [LLAMA],
    "qwen3": [LLAMA],
    "gemma3": [LLAMA],
    "phi3": [(("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",))],
    "gpt2": [(("c_attn",), ("attn.c_proj",), ("c_fc",), ("mlp.c_proj",))],
    "gpt_neox": [(("query_key_value", "dense_h_to_4h"), ("attention.dense", "dense_4h_to_h"))],
    "falcon": [(("query_key_value", "dense_h_to_4h"), ("self_attention.dense", "dense_4h_to_h"))],
    "bert": [(("query", "key", "value"), ("attention.output.dense",), ("intermediate.dense",), ("output.dense",))],
    "t5": [
        (("q", "k", "v"), ("o",), ("wi",), ("wo",)),
        (("0.*.q", "0.*.k", "0.*.v", "1.*.k", "1.*.v"), ("0.*.o",), ("1.*.q",), ("1.*.o",), ("wi",), ("wo",)),
    ],
    "qwen2_moe": [
        (
            *ATTENTION,
            ("experts.gate_up_proj", "shared_expert.gate_proj", "shared_expert.up_proj"),
            ("experts.down_proj", "shared_expert.down_proj"),
        )
    ],
    "mamba": [(("in_proj",), ("x_proj",), ("dt_proj",), ("conv1d", "out_proj"))],
}


def stages_in(model, found):
    """``{block: stages}``, names as `EXPECTED` has them."""
    blocks = find_blocks(model)
    targets, _ = choose_targets(model, blocks, None, None)
    replay, stages = Replay(model, blocks, found), {}
    with prepared(model), replay.installed():
        while (name := replay.find_next()) is not None:
            wanted = {local: p for local, p in blocks[name].named_parameters() if f"{name}.{local}" in targets}
            stages[name], _ = stages_of(replay, name, wanted)
            replay.store(name)
    return stages


def is_named(name, short):
    pieces = short.split("*")
    name = name.removesuffix(".weight").removesuffix(".")
    return name.endswith(pieces[-1]) and (len(pieces) == 1 or pieces[0] in name)


@pytest.mark.parametrize("family", EXPECTED)
def test_stages_are_found_in_all_families_without_names(family):
    stages = stages_in(make(family), batches(family, count=1))
    kinds = {tuple(tuple(stage) for stage in found) for found in stages.values()}
    assert len(kinds) == len(EXPECTED[family])
    for found, expected in zip(sorted(kinds, key=len), EXPECTED[family], strict=True):
        assert [len(stage) for stage in found] == [len(stage) for stage in expected]
        for stage, shorts in zip(found, expected, strict=True):
            for short in shorts:
                assert sum(is_named(name, short) for name in stage) == 1, (short, stage)


def test_stages_of_pytorchs_own_layers():
    torch.manual_seed(0)
    stages = stages_in(Encoder().eval(), [torch.randint(64, (2, 7))])
    for found in stages.values():
        assert [sorted(stage) for stage in found] == [
            ["self_attn.in_proj_weight"], ["self_attn.out_proj.weight"], ["linear1.weight"], ["linear2.weight"],
        ]  # fmt: skip


@pytest.mark.parametrize("aim", [0.0, 0.5, 1.0])
def test_what_is_lacking_is_that_of_a_direct_computation(aim):
    """Inside a block the dense product's output, at its end the dense stream; nothing where nothing is aimed at."""
    model, by_hand, dense = stack(), stack(), stack()
    oneshot(model, data(), 0.5, solver=sparsegpt, pattern=Rows(), aim=aim)
    x = by_hand.enter(torch.cat(data())).detach()
    wanted = x.clone()
    with torch.no_grad():
        for layer, original in zip(by_hand.layers, dense.layers, strict=True):
            gram = x.T @ x
            residual_cross = (original.up(wanted) - original.up(x)).T @ x
            target = aimed(layer.up.weight, residual_cross, gram=gram, aim=aim)
            layer.up.weight.copy_(sparsegpt(target, 0.5, Rows(), gram=gram)[0])
            seen = layer.up(x).relu()
            gram = seen.T @ seen
            after = original(wanted)
            residual_cross = (after - (x + original.down(seen))).T @ seen
            target = aimed(layer.down.weight, residual_cross, gram=gram, aim=aim)
            layer.down.weight.copy_(sparsegpt(target, 0.5, Rows(), gram=gram)[0])
            x, wanted = layer(x), after
    for (name, one), other in zip(model.state_dict().items(), by_hand.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)


def test_nothing_to_prune_leaves_every_bit():
    model, before = stack(), stack().state_dict()
    oneshot(model, data(), 0.0, solver=WANDA, pattern=Unstructured())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_aiming_brings_the_outputs_nearer_to_the_dense_models():
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(3, 5, generator=generator)  # inputs of few directions, so that there is something to make up
    found = [torch.randn(32, 3, generator=generator) @ mixing for _ in range(4)]
    errors = {}
    for aim in (0.0, 0.5):
        model = stack(layers=4)
        oneshot(model, found, 0.6, solver=admm, aim=aim)
        with torch.no_grad():
            errors[aim] = sum(float((model(x) - stack(layers=4)(x)).square().sum()) for x in found)
    assert errors[0.5] < errors[0.0]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"aim": 1.5}, ValueError, "that is fitted; got 1.5"),
        ({"aim": 0.5, "solver": WANDA}, TypeError, r"from_criterion\(wanda\) does not name the Gram matrix"),
    ],
)
def test_what_can_not_be_aimed_at(keywords, error, message):
    with pytest.raises(error, match=message):
        oneshot(stack(), data(), 0.5, **keywords)
