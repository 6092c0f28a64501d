"""Masks on models: applied, attached, nested, saved; nothing changes when a call fails."""

import copy
import math
import os
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur import (
    NM,
    Block,
    Channels,
    Pruner,
    Rows,
    Unstructured,
    apply_,
    attach,
    criteria,
    detach,
    prune,
    sparsify,
    sparsity_of,
)
from secateur.allocation import erk, uniform
from secateur.pipeline import Masks, iterate_masks, make_masks, masks
from secateur.pipeline.masks import load, save
from secateur.prune import changes
from secateur.storage import save_compressed
from secateur.targets import find_targets


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 16), nn.LayerNorm(16),
        nn.Linear(16, 8),
    ).to(dtype)  # fmt: skip


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, before):
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_sparsify_is_exact_and_changes_nothing_else(dtype, sparsity):
    model = network(dtype)
    before = snapshot(model)
    parameters = dict(model.named_parameters())
    found = sparsify(model, sparsity)
    assert list(found) == ["0.weight", "4.weight", "6.weight"]
    total = sum(mask.numel() for mask in found.values())
    assert sum(int(mask.sum()) for mask in found.values()) == total - round(sparsity * total)
    for name, tensor in model.state_dict().items():
        expected = before[name] * found[name] if name in found else before[name]
        assert torch.equal(tensor, expected), name
    assert dict(model.named_parameters()) == parameters
    assert sparsity_of(found) == pytest.approx(sparsity, abs=1 / total)


def test_a_removed_nan_becomes_zero():
    weights = {"w": torch.tensor([math.nan, math.inf, -math.inf, 3.0])}
    for layout in (lambda w: w, lambda w: torch.stack([w, w], 1)[:, 0]):
        copied = {"w": layout(weights["w"].clone())}
        apply_(copied, {"w": torch.tensor([False, False, False, True])})
        assert copied["w"].tolist() == [0.0, 0.0, 0.0, 3.0]
        assert not copied["w"].signbit().any()


def test_apply_tells_autograd():
    weight = torch.randn(4, requires_grad=True)
    squared = (weight * weight).sum()
    apply_({"w": weight}, {"w": torch.tensor([True, False, True, True])})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_a_failing_call_changes_nothing():
    model = network()
    before = snapshot(model)
    good = make_masks(dict(find_targets(model)), 0.5)
    wrong_shape = good | {"6.weight": torch.ones(3, 3, dtype=torch.bool)}
    wrong_dtype = good | {"6.weight": good["6.weight"].float()}
    for call in (apply_, attach):
        with pytest.raises(ValueError, match=r"6\.weight: a mask of shape \(3, 3\) for a weight of shape \(8, 16\)"):
            call(model, wrong_shape)
        with pytest.raises(TypeError, match=r"6\.weight: a mask is a bool tensor"):
            call(model, wrong_dtype)
        with pytest.raises(KeyError, match="'nowhere', but no such weight"):
            call(model, good | {"nowhere": torch.ones(1, dtype=torch.bool)})
        assert same(model, before)
    model[6].weight.data[0, 0] = math.nan
    before = snapshot(model)
    for options in ({}, {"allocate": erk}, {"pattern": Rows()}, {"criterion": criteria.lamp}):
        with pytest.raises(ValueError, match=r"6\.weight: a score is NaN"):
            sparsify(model, 0.5, **options)
    model[6].weight.data[0, 0] = 1
    with pytest.raises(ValueError, match=r"0\.weight: 2:3 needs an input dimension divisible by 3"):
        sparsify(model, pattern=NM(2, 3))
    before = snapshot(model)
    with pytest.raises(ValueError, match="For 50 percent"):
        sparsify(model, 50)
    assert same(model, before)


def test_attach_and_detach():
    model, zeroed = network(), network()
    original = snapshot(model)
    found = sparsify(zeroed, 0.6)
    attach(model, found)
    assert prune.is_pruned(model)
    assert sparsity_of(model) == pytest.approx(sparsity_of(found))
    batch = torch.randn(5, 4, 4, 4)
    assert torch.equal(model.eval()(batch), zeroed.eval()(batch))
    assert torch.equal(model[0].weight_orig, original["0.weight"])
    again = detach(model)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert not prune.is_pruned(model)
    assert list(dict(model.named_parameters())) != []
    assert all(torch.equal(tensor, zeroed.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert detach(model) == {}


@settings(max_examples=40)
@given(first=st.floats(0, 1), second=st.floats(0, 1), seed=st.integers(0, 99))
def test_masks_nest_within_earlier_ones(first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(12, 8, generator=generator), "b": torch.randn(6, 4, generator=generator)}
    low, high = min(first, second), max(first, second)
    torch.manual_seed(seed)
    earlier = make_masks(weights, low, criterion=criteria.random, allocate=uniform)
    for allocate in (uniform, erk, masks.everywhere):
        try:
            later = make_masks(weights, high, within=earlier, allocate=allocate)
        except ValueError as error:
            # an allocation that gives a tensor more than is left of it, or leaves too few for one each
            assert "earlier masks keep fewer" in str(error) or "too few" in str(error)  # noqa: PT017
            continue
        assert all(bool((earlier[name] | ~later[name]).all()) for name in weights)
        total = sum(mask.numel() for mask in later.values())
        if allocate is not uniform:
            assert sum(int(mask.sum()) for mask in later.values()) == total - round(high * total)
    structured = make_masks(weights, pattern=NM(2, 4), within=earlier)
    assert all(bool((earlier[name] | ~structured[name]).all()) for name in weights)
    assert all(int(mask.reshape(-1, 4).sum(1).max()) <= 2 for mask in structured.values())


def test_channels_within_unstructured_masks_rank_what_is_left():
    weight = torch.tensor([[9.0, 9.0], [1.0, 1.0], [2.0, 2.0]])
    earlier = {"w": torch.tensor([[False, False], [True, True], [False, True]])}
    mask = make_masks({"w": weight}, 2 / 3, pattern=Channels(), within=earlier)["w"]
    assert mask.tolist() == [[False, False], [True, True], [False, False]]
    with pytest.raises(ValueError, match="earlier masks keep fewer units"):
        make_masks({"w": weight}, 0.0, pattern=Channels(), within=earlier)
    with pytest.raises(ValueError, match="earlier masks keep fewer units"):
        make_masks({"w": weight}, 0.0, within=earlier)


def test_masks_one_at_a_time_from_a_lazy_mapping():
    class Lazy(Mapping):
        """Loads on access."""

        def __init__(self):
            self.shapes = {"a": (40, 30), "b": (10, 10), "c": (7,)}

        def __getitem__(self, name):
            return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(len(name) + ord(name[0])))

        def __iter__(self):
            return iter(self.shapes)

        def __len__(self):
            return 3

    lazy = Lazy()
    for options in (
        {},
        {"allocate": uniform},
        {"allocate": erk},
        {"pattern": Channels()},
        {"criterion": criteria.lamp},
    ):
        everything = make_masks({name: lazy[name] for name in lazy}, 0.5, **options)
        one_by_one = dict(iterate_masks(lazy, 0.5, **options))
        assert all(torch.equal(one_by_one[name], everything[name]) for name in lazy)
        assert all(torch.equal(mask, everything[name]) for name, mask in make_masks(lazy, 0.5, **options).items())


def test_save_and_load(tmp_path):
    found = sparsify(network(), 0.5)
    path = tmp_path / "masks.safetensors"
    save(found, path, metadata={"sparsity": 0.5})
    again = load(path)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert os.listdir(tmp_path) == ["masks.safetensors"]
    with pytest.raises(TypeError, match="0: a mask is a bool tensor"):
        save({"0": torch.ones(2)}, path)
    assert torch.equal(load(path)["0.weight"], found["0.weight"])
    (tmp_path / "junk").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="junk is not a safetensors file"):
        load(tmp_path / "junk")
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="is this a file of weights"):
        load(tmp_path / "weights")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "masks"
    save({"w": torch.tensor([True])}, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space"):
        save({"w": torch.tensor([False])}, path)
    assert load(path)["w"].item() is True
    assert os.listdir(tmp_path) == ["masks"]


def test_targets():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm((4, 4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.rnn = nn.LSTM(4, 4)
            self.bare = nn.Parameter(torch.randn(4, 4))
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.head = nn.Linear(4, 10)
            self.head.weight = self.embed.weight

    model = Model()
    assert list(find_targets(model)) == [
        "attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0",
        "first.weight",
    ]  # fmt: skip
    assert list(find_targets(model, include="*.weight")) == [
        "embed.weight", "norm.weight", "attention.out_proj.weight", "first.weight",
    ]  # fmt: skip
    assert list(find_targets(model, include="head.weight")) == ["embed.weight"]
    assert list(find_targets(model, include=["first.*", "second.*"], exclude="*.bias")) == ["first.weight"]
    assert "first.weight" not in find_targets(model, exclude="second.weight")
    with pytest.raises(ValueError, match=r"no parameter matches 'frist\.weight'; the closest names are first\.weight"):
        find_targets(model, exclude="frist.weight")
    with pytest.raises(ValueError, match=r"has no weights to prune: .* include=: there are weight \(normalizations\)"):
        find_targets(nn.LayerNorm(3))
    with pytest.raises(ValueError, match=r"there are 0 \(not named \*\.weight\)\."):
        find_targets(nn.ParameterList([torch.randn(4, 3)]))
    with pytest.raises(ValueError, match=r"0\.weight is not initialized; run the model once"):
        find_targets(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="only floating-point weights"):
        odd = nn.Linear(2, 2)
        odd.codes = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        find_targets(odd, include="codes")


def test_sparsify_counts_what_attached_masks_removed():
    model = network()
    attach(model, make_masks(dict(find_targets(model)), 0.5, criterion=criteria.random))
    first = {name: buffer.bool() for name, buffer in model.named_buffers() if name.endswith("_mask")}
    found = sparsify(model, 0.75, criterion=criteria.random)
    assert list(found) == ["0.weight_orig", "4.weight_orig", "6.weight_orig"]
    assert sparsity_of(model) == pytest.approx(0.75, abs=1e-3)
    assert all(not bool((mask & ~first[name.replace("_orig", "_mask")]).any()) for name, mask in found.items())


def test_two_parameters_over_one_memory_are_one_target():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.data)
    found = sparsify(model, 0.5)
    assert list(found) == ["0.weight"]
    assert int(torch.count_nonzero(model[1].weight)) == 18


def test_an_expanded_weight_is_refused():
    with pytest.raises(ValueError, match="w is an expanded tensor"):
        apply_({"w": torch.ones(1, 4).expand(3, 4)}, {"w": torch.ones(3, 4, dtype=torch.bool)})


def test_the_default_device_has_no_say():
    ways = ({}, {"allocate": erk}, {"pattern": Rows()}, {"pattern": NM(2, 4)}, {"criterion": criteria.random})
    models = [network() for _ in ways]
    with torch.device("meta"):
        for model, options in zip(models, ways, strict=True):
            found = sparsify(model, 0.5, **options)  # 0.5 is what 2:4 implies
            assert sparsity_of(found) == pytest.approx(0.5, abs=0.02)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save({"w": torch.tensor([True])}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "real")["w"].item() is True


def test_meta_and_empty():
    for allocate in (None, "uniform", "erk", "owl"):
        with pytest.raises(ValueError, match=r"0\.weight: on the meta device"):
            sparsify(nn.Sequential(nn.Linear(3, 3, device="meta")), 0.5, allocate=allocate)
    assert make_masks({"w": torch.zeros(0, 4)}, 0.5)["w"].shape == (0, 4)
    assert sparsity_of({}) == 0.0
    assert np.isclose(sparsity_of({"w": torch.zeros(3)}), 1.0)


def test_attaching_is_all_or_nothing():
    def refused(change, error, message):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        found = make_masks(find_targets(model), 0.5)
        change(model)
        before, names = snapshot(model), [name for name, _ in model.named_parameters()]
        with pytest.raises(error, match=message):
            attach(model, found)
        assert same(model, before)
        assert [name for name, _ in model.named_parameters()] == names

    refused(lambda model: setattr(model[2], "weight_mask", 1), KeyError, "'weight_mask' already exists")

    def over_one_memory(model):
        memory = torch.randn(32)
        model[1].weight, model[2].weight = (nn.Parameter(memory[at : at + 16].view(4, 4)) for at in (0, 8))

    refused(over_one_memory, ValueError, "different parameters over the same memory")
    refused(lambda model: attach(model, {"2.weight": torch.ones(4, 4, dtype=torch.bool)}), KeyError,
            r"'2\.weight', but no such weight; a mask is attached to it: detach\(model\) first")  # fmt: skip


def test_what_is_attached_is_not_attached_again():
    model = network()
    attach(model, make_masks(find_targets(model), 0.5))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"0\.weight_orig belongs to a mask that is attached already"):
        attach(model, make_masks(find_targets(model), 0.7))
    assert same(model, before)
    with pytest.raises(KeyError, match=r"a mask is attached to it: detach\(model\) first"):
        apply_(model, {"0.weight": torch.ones(8, 4, 3, 3, dtype=torch.bool)})


def test_detaching_leaves_names_that_only_look_like_masks():
    model = nn.Linear(4, 4)
    model.scale_orig = nn.Parameter(torch.ones(4))
    model.register_buffer("scale_mask", torch.ones(4))
    found = make_masks({"weight": model.weight}, 0.5)
    attach(model, found)
    assert torch.equal(detach(model)["weight"], found["weight"])
    assert {name for name, _ in model.named_parameters()} == {"weight", "bias", "scale_orig"}


@pytest.mark.parametrize("allocate", [uniform, erk, masks.everywhere])
@pytest.mark.parametrize("pattern", [Unstructured(), Block(1, 2), Channels(1)], ids=str)
@pytest.mark.parametrize(
    "criterion",
    [
        lambda weight: weight.abs().log(),
        lambda weight: (weight.abs() * 10).int(),
        lambda weight: weight > 1,
        criteria.elementwise(lambda weight: weight.abs().log()),
        criteria.elementwise(lambda weight: (weight.abs() * 10).long()),
    ],
    ids=["minus infinity", "int", "bool", "minus infinity, elementwise", "long, elementwise"],
)
def test_any_scores_within_earlier_masks(criterion, pattern, allocate):
    """What an earlier mask removed is below everything else, also below a score of -inf."""
    weight = torch.tensor([[0.0, 0, 1, 2], [0, 3, 0, 4]])
    earlier = pattern.spread(torch.arange(pattern.pool(weight).numel()).view(1, -1) > 0, weight.shape)
    units = pattern.pool(earlier.float()) > 0
    for kept in range(1, int(units.sum()) + 1):
        mask = make_masks({"w": weight}, 1 - kept / units.numel(), pattern=pattern, criterion=criterion,
                          allocate=allocate, within={"w": earlier})["w"]  # fmt: skip
        assert int(pattern.pool(mask.float()).sum()) == kept
        assert bool((earlier | ~mask).all())


def test_earlier_masks_that_do_not_fit():
    weights = {"w": torch.randn(2, 4)}
    for options in (
        {"sparsity": 0.5},
        {"pattern": NM(2, 4)},
        {"sparsity": 0.5, "pattern": Rows(), "allocate": uniform},
    ):
        with pytest.raises(ValueError, match=r"w: an earlier mask of shape \(1, 4\) for a weight of shape \(2, 4\)"):
            make_masks(weights, within={"w": torch.ones(1, 4)}, **options)
        with pytest.raises(ValueError, match="'v' is not among the weights"):
            make_masks(weights, within={"v": torch.ones(2, 4)}, **options)
    few = {"w": torch.arange(8).view(2, 4) < 2}
    for make in (make_masks, lambda *a, **k: dict(iterate_masks(*a, **k))):
        with pytest.raises(ValueError, match="earlier masks keep fewer units"):
            make(weights, 0.5, within=few)


def test_what_the_users_own_functions_return_is_checked():
    class Pattern:
        density = None

        def __init__(self, spread):
            self.spread = spread

        def pool(self, scores):
            return scores.reshape(1, -1)

    weights = {"w": torch.randn(2, 4)}
    for spread, message in (
        (lambda keep, shape: keep.view(shape).int(), r"spread returned torch\.int32 of shape \(2, 4\)"),
        (lambda keep, _: keep, r"spread returned torch\.bool of shape \(1, 8\), not a bool mask of shape \(2, 4\)"),
        (lambda *_: None, "spread returned NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            make_masks(weights, 0.5, pattern=Pattern(spread))
    with pytest.raises(
        TypeError, match=r"a pattern is a value such as Rows\(\), or the word for one such as '2:4', not"
    ):
        make_masks(weights, 0.5, pattern=Rows)
    with pytest.raises(ValueError, match="gave no count for w"):
        make_masks(weights, 0.5, allocate=lambda *_: {})
    with pytest.raises(TypeError, match=r"w: a count is an integer, .*, not 2\.5"):
        make_masks(weights, 0.5, allocate=lambda *_: {"w": 2.5})
    assert int(make_masks(weights, 0.5, allocate=lambda *_: {"w": np.int64(3)})["w"].sum()) == 3
    with pytest.raises(TypeError, match=r"weights are a mapping \{name: tensor\}, such as find_targets"):
        make_masks(nn.Linear(2, 2), 0.5)


def test_masks_that_share_memory_are_saved(tmp_path):
    memory = torch.rand(6) > 0.5
    found = {"a": memory[:4], "b": memory[2:], "c": memory, "d": memory[:1].expand(5)}
    save(found, tmp_path / ("long" * 60))
    assert all(torch.equal(mask, found[name]) for name, mask in load(tmp_path / ("long" * 60)).items())
    with pytest.raises(IsADirectoryError, match="is a folder; name the file of masks in it"):
        load(tmp_path)


def test_empty_tensors_beside_others():
    for shape in ((0, 4), (4, 0), (0, 4, 0)):
        for pattern in (Unstructured(), Rows(), Block(2, 2), Channels(), Channels(-1), NM(2, 4, axis=0)):
            for allocate in (uniform, erk, masks.everywhere):
                weights = {"empty": torch.zeros(shape), "w": torch.randn(4, 4)}
                found = make_masks(weights, None if pattern.density else 0.5, pattern=pattern, allocate=allocate)
                assert found["empty"].shape == shape
                assert 8 <= int(found["w"].sum()) <= 16, "an empty tensor's channels may be among those that go"


BAD = {
    "meta": (lambda mask: mask.to("meta"), ValueError, r"4\.weight: .* is on the meta device"),
    "sparse": (lambda mask: mask.to_sparse(), TypeError, r"4\.weight: .* not one of layout torch.sparse_coo"),
    "other values": (lambda mask: mask * 0.5, (TypeError, ValueError), r"4\.weight: .* torch.float32"),
    "nan": (lambda mask: mask * torch.nan, (TypeError, ValueError), r"4\.weight: .* torch.float32"),
    "shape": (lambda mask: mask[1:], ValueError, r"4\.weight: .* of shape \(15, 32\) for a weight of shape \(16, 32\)"),
    "no tensor": (lambda mask: mask.tolist(), TypeError, r"4\.weight: .* not a list"),
}
VERBS = {
    "apply_": lambda model, found, _path: apply_(model, found),
    "attach": lambda model, found, _path: attach(model, found),
    "make_masks": lambda model, found, _path: make_masks(find_targets(model), 0.9, within=found),
    "sparsify": lambda model, found, _path: sparsify(model, 0.9, within=found),
    "save_compressed": lambda model, found, path: save_compressed(model, path / "x.safetensors", masks=found),
    "Pruner": lambda model, found, _path: Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), 0.9, total_steps=9, within=found, verbose=False
    ),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize(("spoil", "error", "message"), BAD.values(), ids=BAD)
def test_a_mask_that_is_none_is_refused_at_the_door_of_every_verb(verb, spoil, error, message, tmp_path):
    model = network()
    found = make_masks(find_targets(model), 0.5)
    found["4.weight"] = spoil(found["4.weight"])
    before, names = snapshot(model), [name for name, _ in model.named_parameters()]
    with pytest.raises(error, match=message):
        verb(model, found, tmp_path)
    assert same(model, before)
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [apply_, attach])
def test_a_weight_without_values_is_refused_at_the_door(verb):
    model = network()
    found = make_masks(find_targets(model), 0.5)
    model[6].to("meta")
    before = {name: tensor.clone() for name, tensor in model[:6].state_dict().items()}
    with pytest.raises(ValueError, match=r"6\.weight is on the meta device"):
        verb(model, found)
    assert same(model[:6], before)
    with pytest.raises(TypeError, match=r"w is a tensor of layout torch.sparse_coo"):
        apply_({"w": torch.eye(3).to_sparse()}, {"w": torch.eye(3).bool()})


@pytest.mark.parametrize("breaks_at", [1, 2, 3])
@pytest.mark.parametrize("verb", ["attach", "detach"])
def test_an_interrupt_leaves_all_masks_attached_or_none(verb, breaks_at, monkeypatch):
    model = network()
    model.append(nn.Linear(8, 16))
    model[7].weight = nn.Parameter(model[6].weight.detach().T.clone())
    found = make_masks(find_targets(model), 0.5)
    if verb == "detach":
        attach(model, found)
    before, parameters = snapshot(model), dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    name = {"attach": "compute_on_read", "detach": "stop_computing_on_read"}[verb]
    calls, original = [], getattr(changes, name)

    def interrupted(*arguments, **keywords):
        original(*arguments, **keywords)
        calls.append(arguments)
        if len(calls) == breaks_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(changes, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(model, found) if verb == "attach" else detach(model)
    monkeypatch.undo()
    assert same(model, before)
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert [type(module) for module in model.modules()] == classes
    assert prune.is_pruned(model) == (verb == "detach")
    if verb == "attach":
        attach(model, found)
    expected = {name: tensor.clone() for name, tensor in found.items()}
    assert all(torch.equal(mask, expected[name]) for name, mask in detach(model).items())
    assert sparsity_of(model) == pytest.approx(0.5, abs=1e-3)


def test_detaching_is_all_or_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attach(model, make_masks(find_targets(model), 0.5))
    model.append(nn.Linear(4, 4))
    model[2].weight = model[1].weight_orig  # shares the weight but not the mask
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"are one tensor, and Linear\.weight is not pruned"):
        detach(model)
    assert same(model, before)
    assert prune.is_pruned(model[0])
    assert prune.is_pruned(model[1])


@pytest.mark.parametrize(
    ("mask", "what"),
    [(None, "is gone"), (torch.ones(3, 4), "is none of its"), (torch.ones(4, 4, device="meta"), "is none of its")],
)
def test_a_mask_that_does_not_fit_is_named_and_all_stay_attached(mask, what):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    attach(model, make_masks(find_targets(model), 0.5))
    del model[1].weight_mask
    if mask is not None:
        model[1].register_buffer("weight_mask", mask)
    with pytest.raises(ValueError, match=rf"^1\.weight: its mask, weight_mask, {what}"):
        detach(model)
    assert prune.is_pruned(model[0])
    assert prune.is_pruned(model[1])


def test_what_verbs_return_prints_as_a_table_and_is_a_dict():
    model = network()
    for found in (make_masks(find_targets(model), 0.5), sparsify(model, 0.5), masks.masks_from_zeros(model)):
        assert isinstance(found, dict)
        assert repr(found) == repr(dict(found))
        lines = str(found).splitlines()
        assert lines[0].split() == ["Weight", "Shape", "Kept", "Removed", "Sparsity"]
        assert [line.split()[0] for line in lines[1:-1]] == list(found)
        kept = sum(int(mask.sum()) for mask in found.values())
        assert lines[-1].split() == [
            f"{len(found)}", "in", "all", f"{kept:,}", f"{sum(m.numel() for m in found.values()) - kept:,}", "0.5",
        ]  # fmt: skip


def test_masks_are_saved_and_copied_as_a_dict_is(tmp_path):
    found = make_masks({"weight": torch.randn(4, 4), "other": torch.randn(3)}, 0.5)
    torch.save({"masks": found}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)["masks"]
    for other in (loaded, pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert list(other) == list(found)
        assert all(torch.equal(other[name], mask) for name, mask in found.items())
    assert type(copy.copy(found)) is type(copy.deepcopy(found)) is Masks
    assert copy.deepcopy(found)["weight"] is not found["weight"]


def equal(found, expected):
    return list(found) == list(expected) and all(torch.equal(mask, expected[name]) for name, mask in found.items())


def test_globs_choose_among_weights_in_every_verb():
    model = network()
    weights = dict(find_targets(model))
    first, *others = weights
    found = make_masks(weights, 0.5, include=first)
    assert list(found) == [first]
    assert equal(found, make_masks({first: weights[first]}, 0.5))
    assert list(make_masks(weights, 0.5, exclude=[first])) == others
    with pytest.raises(ValueError, match=r"no parameter matches 'nothing'; the closest names are"):
        make_masks(weights, 0.5, include="nothing")
    apply_(model, found)
    assert sparsity_of(model, include=first) == pytest.approx(0.5, abs=0.01)
    assert sparsity_of(model, exclude=first) == sparsity_of(weights, exclude=first) == 0
    assert list(masks.masks_from_zeros(model)) == list(masks.masks_from_zeros(weights, include=first)) == [first]
