"""Adapters of peft merged under the mask: the count of zeros is the same, to the last one."""

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur import prune, sparsify
from secateur.recovery import merge_keeping_zeros
from support.families import make

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what is deprecated
peft = pytest.importorskip("peft")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 100), st.sampled_from([0.3, 0.9])
)
def test_zeros_stay_and_the_rest_is_the_plain_merge(dtype, seed, sparsity):
    torch.manual_seed(seed)
    base = network()
    sparsify(base, sparsity)
    base.to(dtype)
    before = {name: each.clone() for name, each in base.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    plain = copy.deepcopy(adapted).merge_and_unload().state_dict()
    done = merge_keeping_zeros(adapted)
    assert type(done.model) is nn.Sequential
    for name, each in done.model.state_dict().items():
        if name.endswith("weight"):
            assert torch.equal(each.eq(0), before[name].eq(0))
            kept = each.ne(0) & plain[name].ne(0)
            assert torch.equal(each[kept], plain[name][kept])
        else:
            assert torch.equal(each, before[name])
    assert set(done.kept) == {"0.weight", "2.weight"}
    assert done.kept == {name: int(before[name].eq(0).sum()) for name in done.kept}
    assert done.plain == {name: int(plain[name].eq(0).sum()) for name in done.kept}
    assert done.plain_sparsity < done.sparsity
    assert "a plain merge would have left" in str(done)


def test_a_language_model_and_adapters_that_were_injected():
    model = make("llama")
    sparsify(model, 0.5)
    zeros = {name: int(each.eq(0).sum()) for name, each in model.named_parameters()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    injected = peft.inject_adapter_in_model(config, copy.deepcopy(model))
    for done in (merge_keeping_zeros(peft.get_peft_model(model, config)), merge_keeping_zeros(injected)):
        assert {name: int(each.eq(0).sum()) for name, each in done.model.named_parameters()} == zeros
        assert len(done.kept) == 4
        assert not any("lora" in name for name, _ in done.model.named_modules())


def test_a_call_that_fails_changes_nothing(monkeypatch):
    base = network()
    sparsify(base, 0.5)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))
    before = {name: each.clone() for name, each in adapted.state_dict().items()}
    monkeypatch.setattr("secateur.recovery.distillation.settled", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge_keeping_zeros(adapted)
    assert adapted.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in adapted.state_dict().items())
    monkeypatch.undo()
    merge_keeping_zeros(adapted)


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="Sequential has no adapters to merge: it is no model of peft's"):
        merge_keeping_zeros(network())
    with pytest.raises(TypeError, match=r"a model is a torch\.nn\.Module, and this is of type str"):
        merge_keeping_zeros("x")
    adapted = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0"]))
    adapted.merge_adapter()
    with pytest.raises(ValueError, match="its adapters are merged already; take them out with unmerge_adapter first"):
        merge_keeping_zeros(adapted)
    adapted.unmerge_adapter()
    layer = adapted.base_model.model[0].base_layer
    layer.weight = nn.Parameter(torch.ones(8, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="the Linear below it has no weight of floating numbers"):
        merge_keeping_zeros(adapted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda adapted: adapted.base_model.model[0].lora_B["default"].weight.data.fill_(torch.nan), "would hold NaN"),
        (lambda adapted: adapted.to("meta"), "0: the weight below it has no values"),
    ],
)
def test_weights_that_are_no_numbers_are_named_and_nothing_changes(change, said):
    adapted = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    change(adapted)
    names = [*adapted.state_dict()]
    with pytest.raises(ValueError, match=said):
        merge_keeping_zeros(adapted)
    assert [*adapted.state_dict()] == names


def of_another_shape(adapted):
    adapted.base_model.model[0].lora_A["default"].weight = nn.Parameter(torch.ones(2, 7))


def with_a_mask_that_does_not_fit(adapted):
    base = adapted.base_model.model[0].base_layer
    prune.l1_unstructured(base, "weight", amount=0.5)
    base.weight_mask = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            of_another_shape,
            r"^the adapters of PeftModel cannot be merged into .* \(RuntimeError: .*\); load both again\.$",
        ),
        (with_a_mask_that_does_not_fit, "the adapters of PeftModel cannot be merged"),
    ],
)
def test_adapters_that_cannot_be_merged_are_one_line_and_nothing_changes(change, said):
    adapted = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    change(adapted)
    before = copy.deepcopy(adapted.state_dict())
    with pytest.raises(ValueError, match=said):
        merge_keeping_zeros(adapted)
    assert all(torch.equal(each, before[name]) for name, each in adapted.state_dict().items())


def test_a_kind_of_adapter_that_puts_other_memory_in_the_place_is_taken_back_too():
    config = peft.IA3Config(target_modules=["0", "2"], feedforward_modules=[])
    adapted = peft.get_peft_model(network(), config)
    layer = adapted.base_model.model[2]
    layer.base_layer.bias = nn.Parameter(torch.ones(4, 4))  # which cannot be scaled, once the weight is
    weight, before = layer.base_layer.weight, layer.base_layer.weight.detach().clone()
    layer.ia3_l["default"].data = torch.full((4, 1), 2.0)
    memory = weight.data_ptr()
    with pytest.raises(ValueError, match="the adapters of PeftModel cannot be merged"):
        merge_keeping_zeros(adapted)
    assert weight.data_ptr() == memory
    assert torch.equal(weight, before)


@pytest.mark.parametrize("wrap", [nn.DataParallel, functools.partial(torch.compile, backend="eager")])
def test_the_model_inside_another_one_is_merged(wrap):
    base = network()
    sparsify(base, 0.5)
    names, zeros = [*base.state_dict()], base[0].weight == 0
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    merged = merge_keeping_zeros(wrap(adapted))
    assert [*merged.model.state_dict()] == names
    assert torch.equal(merged.model[0].weight == 0, zeros)


@pytest.mark.parametrize("injected", [False, True])
def test_what_was_trained_as_a_copy_keeps_its_zeros_too(injected):
    model = make("llama")
    sparsify(model, 0.5)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # as a head that training is to fill
    zeros = {name: int(each.eq(0).sum()) for name, each in model.named_parameters()}
    saved = ["down_proj", "input_layernorm", "lm_head"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model) if injected else peft.get_peft_model(model, config)
    copies = [each for name, each in adapted.named_parameters() if "modules_to_save" in name]
    assert len(copies) == 5
    with torch.no_grad():
        for each in copies:
            each.add_(1.0)
    done = merge_keeping_zeros(adapted)
    after = {name: int(each.eq(0).sum()) for name, each in done.model.named_parameters()}
    assert after == {**zeros, "lm_head.weight": 0}
    assert {name for name in done.kept if "down_proj" in name} == {
        f"model.layers.{at}.mlp.down_proj.weight" for at in (0, 1)
    }
    assert all(done.plain[name] == 0 < done.kept[name] for name in done.kept)
    for name, each in done.model.named_parameters():
        if "input_layernorm" in name:
            assert bool(each.eq(2).all()), "what was trained is there"
