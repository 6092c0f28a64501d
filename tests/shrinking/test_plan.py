"""Laws of plans: all of one is carried out or nothing, and files that are not whole are refused by their names."""

import copy
import json
import random
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import load_shrunken, save_shrunken, shrink
from secateur.shrinking import execution, files
from secateur.shrinking.execution import carry_out
from secateur.shrinking.plan import plans_of
from secateur.support import tensors_of
from support.unchanged import is_unchanged, state_of

X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


class Model(nn.Module):
    """Has all that a plan changes: tensors, numbers in tuples and objects, printed sizes, and modules that leave."""

    def __init__(self):
        super().__init__()
        self.shape = [4, 6]
        self.up, self.heads, self.down = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x):
        hidden = self.heads(self.up(x).relu()).view(*x.shape[:-1], self.shape[0], self.shape[1])
        x = x + self.down(hidden.reshape(*x.shape[:-1], self.shape[0] * self.shape[1]))
        for each in self.more:
            x = x + each(x)
        return x


def made():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.more[1][2].parameters():
            parameter.mul_(0.01)  # the branch of the least influence
    return model


def trained(model):
    optimizer = torch.optim.AdamW([{"params": list(each.parameters())} for each in model.children()])
    model(X).square().sum().backward()
    optimizer.step()
    return optimizer


def everything(model, optimizer=None):
    """All that a call could change, with the identity of what has one."""
    named = tensors_of(model).items()
    tensors = {
        name: (id(each), each.shape, *([] if each.is_meta else [each.data_ptr(), each.tolist()]))
        for name, each in named
    }
    grads = {name: None if each.grad is None else (id(each.grad), each.grad.shape) for name, each in named}
    held = [
        (path, id(module), [(key, repr(value), id(value)) for key, value in vars(module).items() if key[0] != "_"])
        for path, module in model.named_modules()
    ]
    groups = states = None
    if optimizer is not None:
        groups = [[id(each) for each in group["params"]] for group in optimizer.param_groups]
        states = [(id(key), [(word, id(value)) for word, value in its.items()]) for key, its in optimizer.state.items()]
    return tensors, grads, held, groups, states, torch.is_grad_enabled()


class Failure(KeyboardInterrupt):
    pass


def fail_at(step, call, *names):
    """Calls, and raises before the step-th line that is executed in functions of these names."""
    before, left = sys.gettrace(), [step]

    def trace(frame, event, _):
        if frame.f_code.co_filename not in (execution.__file__, files.__file__) or frame.f_code.co_name not in names:
            return None
        if event == "line":
            if not left[0]:
                sys.settrace(before)
                raise Failure
            left[0] -= 1
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def every_step(make, call, *names):
    """Fails at one step after the other until there is none left; returns how many there were."""
    for step in range(10_000):
        case = make()
        before = everything(*case)
        try:
            fail_at(step, lambda case=case: call(*case), *names)
        except Failure:
            assert everything(*case) == before, f"step {step}"
        else:
            return step
    raise AssertionError("no end")


def plans_for(model):
    shrink(model, X, 0.4, branches=0.3, target="units")
    return plans_of(model)


def test_a_plan_that_fails_at_any_step_is_taken_back():
    both = plans_for(made())
    assert both[0].modules
    assert both[1].numbers

    def make():
        model = made()
        return model, trained(model)

    def call(model, optimizer):
        first = carry_out(model, both[0], optimizer)
        try:
            carry_out(model, both[1], optimizer)
        except Failure:
            first()
            raise

    names = "carry_out", "_let_go", "_set_data", "_set", "_with", "_inside", "<lambda>"
    assert every_step(make, call, *names) > 100


def test_taking_back_leaves_even_lists_and_the_order_of_states():
    model = made()
    optimizer = trained(model)
    before = everything(model, optimizer)
    undone = [carry_out(model, plan, optimizer) for plan in plans_for(made())]
    assert everything(model, optimizer) != before
    for each in reversed(undone):
        each()
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("device", ["cpu", "meta"])
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


def test_what_fails_after_the_plan_was_carried_out_takes_it_back():
    model = made()
    before = everything(model)

    def report(_):
        raise Failure

    with pytest.raises(Failure):
        shrink(model, X, 0.4, branches=0.3, target="units", report=report)
    assert everything(model) == before


# ---- files ----------------------------------------------------------------------------------------------------------


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


def test_no_plan_that_was_changed_does_half(saved):
    """It is refused with the file's name and changes nothing, or it was still a whole plan."""
    values, draw = unprinted(saved), random.Random(0)
    refused = 0
    for _ in range(400):
        other = copy.deepcopy(values)
        for _ in range(draw.randrange(1, 3)):
            changed(other, draw)
        (saved / "plan.json").write_text(json.dumps(other), "utf-8")
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


def test_no_weights_that_were_damaged_are_half_loaded(saved):
    whole, draw = (saved / "model.safetensors").read_bytes(), random.Random(0)
    length = int.from_bytes(whole[:8], "little") + 8
    refused = 0
    for number in range(400):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: draw.randrange(len(data))]
        else:
            for _ in range(draw.randrange(1, 5)):
                data[draw.randrange(8 if number % 4 == 1 else length)] = draw.randrange(256)
        (saved / "model.safetensors").write_bytes(data)
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
