"""Laws of files: a shrunken model is loaded as it was saved, and files that are not whole are refused by name."""

import contextlib
import copy
import functools
import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import load_shrunken, save_shrunken, shrink, verify_shrunken
from secateur.shrinking import files as disk
from secateur.shrinking.plan import plans_of
from support.planned import Model, X, every_step, everything, made, plans_for
from support.unchanged import is_unchanged, state_of


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def test_saved_and_loaded_also_on_meta_and_twice_shrunken(tmp_path):
    model, x = small(), torch.randn(2, 4)
    shrink(model, x, 0.3)
    shrink(model, x, 0.3)
    save_shrunken(model, tmp_path / "it")
    loaded = load_shrunken(small(), tmp_path / "it")
    with torch.device("meta"):
        fresh = small()
    real = load_shrunken(fresh, tmp_path / "it")
    for each in (loaded, real):
        assert torch.equal(each(x), model(x))
        assert len(each.shrink_plans) == 2
        assert each[0].out_features == model[0].out_features
        verify_shrunken(small(), each, x)


def number(name, was):
    return lambda plan: plan["plans"][0]["numbers"].append({"place": ["0", name], "from": was, "to": 2})


def spoil(folder, change):
    """Changes a plan, and what would tell that it was changed."""
    values = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    del values["fingerprint"]
    change(values)
    (folder / "plan.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.update(version=99), "version 99"),
        (lambda plan: plan.pop("plans"), "no plan that this version"),
        (lambda plan: plan["plans"][0]["tensors"].update(other={"shape": [1], "kept": {}}), "no tensor other"),
        (lambda plan: plan["plans"][0]["tensors"]["0.weight"].update(shape=[9, 9]), "the plan was made for"),
        (lambda plan: plan["plans"][0]["tensors"]["0.weight"]["kept"].update({"0": [0, 99]}), "does not have"),
        (lambda plan: plan["plans"][0]["tensors"]["0.weight"]["kept"].update({"0": [3, 1]}), "does not have"),
        (lambda plan: plan["plans"][0]["tensors"]["0.weight"]["kept"].update({"7": [0]}), "does not have"),
        (number("nope", 1), "no number at"),
        (number("weight", 1), "no number at"),
        (number("training", 5), "made for 5"),
        (number("in_features", 4.0), "must be a number|made for 4"),
        (number("weight", float("nan")), "no plan that this version"),
    ],
)
def test_a_hostile_plan_is_refused_and_changes_nothing(tmp_path, change, words):
    save_shrunken(shrink(small(), torch.randn(2, 4), 0.5).model, tmp_path)
    spoil(tmp_path, change)
    fresh = small()
    state = state_of(fresh)
    with pytest.raises(ValueError, match=words):
        load_shrunken(fresh, tmp_path)
    assert is_unchanged(fresh, state)


def test_files_that_do_not_fit_change_nothing(tmp_path):
    save_shrunken(shrink(small(), torch.randn(2, 4), 0.5).model, tmp_path)
    (tmp_path / "plan.json").write_text("[1, 2", encoding="utf-8")
    with pytest.raises(ValueError, match="no plan that this version"):
        load_shrunken(small(), tmp_path)
    with pytest.raises(ValueError, match="was not shrunken"):
        save_shrunken(small(), tmp_path)
    other = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 3))
    save_shrunken(shrink(small(), torch.randn(2, 4), 0.5).model, tmp_path)
    state = state_of(other)
    with pytest.raises(ValueError, match=r"differ in 3\.bias, 3\.weight"):
        load_shrunken(other, tmp_path)
    assert is_unchanged(other, state)


def test_files_of_two_saves_are_told_apart(tmp_path):
    def saved(folder, share):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        save_shrunken(shrink(model, torch.zeros(1, 4), share, target="units").model, tmp_path / folder)

    fresh = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    state = state_of(fresh)
    saved("a", 0.5)
    saved("b", 0.25)
    (tmp_path / "a" / "plan.json").replace(tmp_path / "b" / "plan.json")  # as where a save ended between its files
    with pytest.raises(ValueError, match=r"plan.json and model.safetensors in .*b are not of one save"):
        load_shrunken(fresh, tmp_path / "b")
    saved("b", 0.25)
    plan = tmp_path / "b" / "plan.json"
    text = json.loads(plan.read_text())
    text["plans"][0]["tensors"]["0.weight"]["shape"] = [16, 5]
    plan.write_text(json.dumps(text))
    with pytest.raises(ValueError, match="it was changed after it was written"):
        load_shrunken(fresh, tmp_path / "b")
    assert is_unchanged(fresh, state)


def test_a_save_that_fails_leaves_the_save_before(tmp_path, monkeypatch):
    model = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.zeros(1, 4), 0.5).model
    save_shrunken(model, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(disk, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        save_shrunken(shrink(model, torch.zeros(1, 4), 0.5).model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    ("error", "after"),
    [(OSError(28, "No space left on device"), False), (KeyboardInterrupt(), False), (KeyboardInterrupt(), True)],
    ids=["full", "stopped before", "stopped after"],
)
def test_a_save_that_ends_at_any_step_leaves_what_can_be_loaded(tmp_path, monkeypatch, error, after):
    """Before or after each change of the disk."""
    old, new = small(), small()
    shrink(old, torch.zeros(2, 4), 0.25)
    shrink(new, torch.zeros(2, 4), 0.5)
    for step in range(1, 20):
        save_shrunken(old, tmp_path)
        count = 0

        def failing(change, *given, step=step, **more):
            nonlocal count
            count += 1
            if count == step and not after:
                raise error
            change(*given, **more)
            if count == step:
                raise error

        with monkeypatch.context() as patch:
            for name in ("fsync", "chmod", "replace"):
                patch.setattr(os, name, functools.partial(failing, getattr(os, name)))
            with contextlib.suppress(type(error)):
                save_shrunken(new, tmp_path)
        found = load_shrunken(small(), tmp_path)[0].out_features
        if count < step:
            break
        assert found in (old[0].out_features, new[0].out_features)
        assert not [*tmp_path.glob("*.tmp")]
    assert step == 8
    assert found == new[0].out_features
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "plan.json"}


def test_a_save_in_a_new_folder_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    model = small()
    shrink(model, torch.zeros(2, 4), 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "json_of_plans", lambda _: "\ud800")  # no text that a file can hold
        with pytest.raises(UnicodeEncodeError):
            save_shrunken(model, tmp_path / "it")
    assert not [*tmp_path.iterdir()]
    save_shrunken(model, tmp_path / "it")
    assert {path.name for path in (tmp_path / "it").iterdir()} == {"model.safetensors", "plan.json"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.long
def test_loading_that_fails_at_any_step_is_taken_back(tmp_path, device):
    model = made()
    plans_for(model)
    save_shrunken(model, tmp_path)

    def make():
        with torch.device(device):
            fresh = Model()
        return (fresh,)

    steps = every_step(make, lambda fresh: load_shrunken(fresh, tmp_path), "load_shrunken", "_put", "carry_out")
    assert steps > 100


@pytest.fixture
def saved(tmp_path):
    model = made()
    plans_for(model)
    save_shrunken(model, tmp_path)
    return tmp_path


def unprinted(folder):
    """The plan as values, without what tells that it was changed."""
    values = json.loads((folder / "plan.json").read_text("utf-8"))
    del values["fingerprint"]
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    return values


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "dtype"), [("up.bias", torch.int64), ("seen", torch.float64), ("seen", torch.bool)])
def test_weights_of_another_kind_are_refused_by_name(saved, device, name, dtype):
    (saved / "plan.json").write_text(json.dumps(unprinted(saved)), "utf-8")
    tensors = load_file(saved / "model.safetensors")
    save_file({**tensors, name: tensors[name].to(dtype)}, saved / "model.safetensors")
    with torch.device(device):
        fresh = Model()
    before = everything(fresh)
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name} is of dtype {dtype}, in the model"):
        load_shrunken(fresh, saved)
    assert everything(fresh) == before
    assert plans_of(fresh) == []


def plan_with(shape="1", kept=""):
    entry = f'{{"a": {{"shape": [{shape}], "kept": {{{kept}}}}}}}'
    return f'{{"format": "secateur shrink plan", "version": 1, "plans": [{{"tensors": {entry}, "numbers": []}}]}}'


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}",
        plan_with("Infinity"),
        plan_with("1e999"),
        plan_with(kept='"0": [1' + "0" * 30 + "]"),
        '{"format": NaN}',
        "",
        "\x00",
        "3",
    ],
    ids=range(9),
)
def test_a_plan_that_is_none_is_refused_by_name(saved, text):
    (saved / "plan.json").write_text(text, "utf-8")
    model = made()
    before = everything(model)
    with pytest.raises(ValueError, match=r"plan\.json is no plan that this version of secateur reads"):
        load_shrunken(model, saved)
    assert everything(model) == before


ODD = [float("inf"), float("nan"), -1, 0, 2**70, -(2**63), 1.5, True, None]


ODD += ["x", "", "0", [], {}, [0], [[1]], {"a": [None]}]


def changed(values, draw):
    """One value somewhere is another, is left out, or is there twice."""
    places = []

    def walk(held):
        for key in list(held) if isinstance(held, dict) else range(len(held)):
            places.append((held, key))
            if isinstance(held[key], dict | list):
                walk(held[key])

    walk(values)
    held, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        del held[key]
    elif kind == 1 and isinstance(held, list):
        held.append(copy.deepcopy(held[key]))
    elif kind == 2 and type(held[key]) is int:
        held[key] += draw.choice([-1, 1, 1000])
    else:
        held[key] = copy.deepcopy(draw.choice(ODD))


def refused_or_whole(saved, spoil):
    """Loads so many spoilt files; each is refused with its name and changes nothing, or it was still whole."""
    refused = 0
    for number in range(400):
        spoil(number)
        model = made()
        before = everything(model)
        try:
            load_shrunken(model, saved)
        except ValueError as error:
            words = str(error)
        else:
            continue
        refused += 1
        assert str(saved) in words
        assert everything(model) == before, words
    assert refused > 300


@pytest.mark.long
def test_no_plan_that_was_changed_does_half(saved):
    values, draw = unprinted(saved), random.Random(0)

    def spoil(_):
        other = copy.deepcopy(values)
        for _ in range(draw.randrange(1, 3)):
            changed(other, draw)
        (saved / "plan.json").write_text(json.dumps(other), "utf-8")

    refused_or_whole(saved, spoil)


@pytest.mark.long
def test_no_weights_that_were_damaged_are_half_loaded(saved):
    whole, draw = (saved / "model.safetensors").read_bytes(), random.Random(0)
    length = int.from_bytes(whole[:8], "little") + 8

    def spoil(number):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: draw.randrange(len(data))]
        else:
            for _ in range(draw.randrange(1, 5)):
                data[draw.randrange(8 if number % 4 == 1 else length)] = draw.randrange(256)
        (saved / "model.safetensors").write_bytes(data)

    refused_or_whole(saved, spoil)


def test_a_recurrent_model_on_meta_becomes_real_and_runs(tmp_path):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.down = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x):
            return self.down(self.lstm(x)[0][:, -1])

    model = shrink(Last(), X, 0.4).model
    save_shrunken(model, tmp_path)
    with torch.device("meta"):
        fresh = Last()
    torch.testing.assert_close(load_shrunken(fresh, tmp_path)(X), model(X))
    assert is_unchanged(fresh, state_of(fresh))


class Places(nn.Module):
    """Its table of places is made as large as the input asks, and is in no state dict."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])
        return self.last(self.first(x).relu()) + self.table[:, None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_buffer_that_no_state_dict_holds_comes_back_as_large_as_it_was(tmp_path, device):
    x = torch.randn(2, 5, 4)
    small = shrink(Places(), x, 0.4).model
    expected = small(x)
    save_shrunken(small, tmp_path)
    with torch.device(device):
        fresh = Places()
    loaded = load_shrunken(fresh, tmp_path)
    assert loaded.table.shape == (5,)
    torch.testing.assert_close(loaded(x), expected)
