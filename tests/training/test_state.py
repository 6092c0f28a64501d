"""What fails changes nothing: a damaged state is refused whole or trains on; so are making, following and rewinding."""

import copy
import math
import pickle
import random

import pytest
import torch
from torch import nn

from secateur import NM, Channels, Pruner, criteria, regrowth, schedules
from secateur.allocation import erk
from secateur.training import growing
from secateur.training.zeros import Zeros

EXAMPLE = torch.zeros(2, 8)
STEPS = 12
CONFIGURATIONS = {
    "gradual": {"schedule": 0.8, "every": 2},
    "channels": {"schedule": 0.5, "every": 2, "pattern": Channels()},
    "rigl": {"schedule": schedules.constant(0.7), "regrow": regrowth.rigl(), "allocate": erk, "every": 2},
    "sr-ste": {"schedule": schedules.constant(0.5), "pattern": NM(2, 4), "regrow": regrowth.sr_ste()},
    "movement": {"schedule": 0.8, "criterion": criteria.movement},
    "grad_sq": {"schedule": 0.8, "criterion": lambda weight, *, grad_sq: weight**2 * grad_sq, "every": 4},
    "growing": {"regularize": growing(0.5, EXAMPLE, begin=1)},
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def train(model, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].flip(1) * inputs[:, 4:]).square().mean().backward()
        optimizer.step()


def begun(options, steps):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    pruner = Pruner(model, optimizer, total_steps=STEPS, verbose=False, **options)
    pruner.follow(average)
    train(model, optimizer, steps)
    return model, optimizer, average, pruner


def picture(model, optimizer, average, pruner):
    """All that a call which fails may not change, as copies."""
    memory, zeros = pruner._zeros.memory, pruner._zeros
    return {
        "weights": dict(model.state_dict()),
        "average": dict(average.state_dict()),
        "optimizer": optimizer.state_dict(),
        "identities": [id(value) for each in optimizer.state.values() for value in each.values()],
        "memory": {name: getattr(memory, name) for name in type(memory).__dataclass_fields__},
        "state": pruner.state_dict(),
        "metrics": pruner.metrics(),
        "random": torch.get_rng_state(),
        "start": {name: value for name, (value, _) in zeros._start.items()},
        "untouched": sorted(zeros.untouched_start()),
        "places": len(zeros._places),
        "hooks": list(optimizer._optimizer_step_post_hooks),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def assert_unchanged(before, *run):
    now = picture(*run)
    for word, value in before.items():
        assert same(value, now[word]), word


# Damage

JUNK = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, 10**5000, 0.0, 0.5, -0.5, 1.5, 1e300, math.nan, math.inf,
    -math.inf, "", "x", "0.weight", b"x", (), [], {}, [None], [[]], [[[]]], {"0.weight": None}, {"x": {"y": []}},
    {1: 2}, ["0.weight"] * 3, [(16, 8)] * 3, object(), 1j, torch.tensor(0.5), torch.zeros(0), torch.zeros(3),
    torch.zeros(16, 8),
    {"0.weight": torch.zeros(16, 8)}, {"0.weight": torch.full((16, 8), math.nan)},
]  # fmt: skip


def leaves(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, child in children:
        yield from leaves(child, (*path, key))


def tensor_damage(tensor, choose):
    kinds = [
        lambda: tensor.to("meta"),
        lambda: tensor.to_sparse() if tensor.dim() else tensor[None],
        lambda: tensor.double(),
        lambda: tensor.float(),
        lambda: tensor.half(),
        lambda: tensor.long(),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.bool(),
        lambda: tensor.to(torch.int8),
        lambda: tensor[:-1] if tensor.dim() else tensor[None],
        lambda: tensor[None],
        lambda: tensor.reshape(-1),
        lambda: tensor[..., None],
        lambda: tensor.float() * math.nan,
        lambda: tensor.to(torch.float32) + math.inf,
        lambda: ~tensor if tensor.dtype in (torch.bool, torch.uint8) else -tensor,
        lambda: tensor * 0,
        lambda: tensor.float() * 1e30,
        lambda: torch.randint_like(tensor, 0, 2),
        lambda: tensor.tolist(),
        lambda: tensor.numpy(),
        lambda: (
            tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor.t() if tensor.dim() == 2 else 7
        ),
        lambda: nn.Parameter(tensor) if tensor.is_floating_point() else tensor.expand(2, *tensor.shape),
        lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor + 1,
    ]
    return choose.choice(kinds)()


def damaged(value, path, choose):
    """The value, or what is left of it, with one leaf of it spoiled."""
    if path:
        key, rest = path[0], path[1:]
        deleted = not rest and choose.random() < 0.25
        if isinstance(value, dict):
            items = [(each, child) for each, child in value.items() if not (deleted and each == key)]
            return {each: damaged(child, rest, choose) if each == key else child for each, child in items}
        items = [child for at, child in enumerate(value) if not (deleted and at == key)]
        return type(value)(
            damaged(child, rest, choose) if at == key and not deleted else child for at, child in enumerate(items)
        )
    if isinstance(value, torch.Tensor) and choose.random() < 0.7:
        return tensor_damage(value, choose)
    if isinstance(value, dict) and value and choose.random() < 0.5:
        added = {choose.choice(["extra", "0.bias", 0, "version "]): choose.choice(JUNK), **value}
        return added if choose.random() < 0.5 else {**dict(reversed(value.items())), "masks": choose.choice(JUNK)}
    if isinstance(value, list | tuple) and value and choose.random() < 0.5:
        return choose.choice(
            [value[::-1], value[:-1], [*value, value[0]], tuple(value), [value], dict(enumerate(value))]
        )
    if type(value) in (int, float) and choose.random() < 0.5:
        return choose.choice([-value, value + 1, value * 10**9, float(value), str(value), [value], -value - 1])
    if isinstance(value, str) and choose.random() < 0.5:
        return choose.choice([value + "x", value.encode(), [value], value[1:], "2.weight"])
    return choose.choice(JUNK)


def many(options, begin, seed, count):
    """Of damaged states how many were refused and how many accepted; anything else fails."""
    choose = random.Random(seed)
    told = [0, 0]
    source = begun(options, begin)[-1].state_dict()
    run = begun(options, choose.choice([0, begin]))
    for _ in range(count):
        state = damaged(copy.deepcopy(source), choose.choice(list(leaves(source))), choose)
        before = copy.deepcopy(picture(*run))
        try:
            run[-1].load_state_dict(state)
        except ValueError:
            told[0] += 1
            assert_unchanged(before, *run)
            continue
        told[1] += 1
        train(run[0], run[1], 2)
        for name, mask in run[-1].masks.items():
            assert (run[0].get_parameter(name)[~mask] == 0).all()
        run = begun(options, choose.choice([0, begin]))
    return told


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_damaged_state_is_refused_whole_or_trains_on(name, begin):
    refused, accepted = many(CONFIGURATIONS[name], begin, f"{name} {begin}", 30)
    assert refused + accepted == 30
    assert refused > 10


def test_a_state_is_named_what_is_wrong_with_it():
    pruner = begun(CONFIGURATIONS["movement"], 3)[-1]
    good = pruner.state_dict()

    def without(*names):
        return {name: value for name, value in good.items() if name not in names}

    for state, message in [
        (None, "a Pruner's state is a dict"),
        (without("churn"), "the state has no churn: a fraction in"),
        (without("target"), "the state has no target: a sparsity in"),
        (good | {"stepp": 1}, "the state has 'stepp', which no Pruner writes"),
        (good | {"step": -1}, "the state's step is not a number of steps; got int -1"),
        (good | {"seed": 10**5000}, "the state was changed after it was written"),
        (good | {"target": math.nan}, "the state's target is not a sparsity in .*; got float nan"),
        (good | {"target": 0.7}, "the state was changed after it was written"),
        (good | {"masks": good["masks"].to("meta")}, "the state's masks is not a vector of torch.uint8.* on meta"),
        (without("held"), "0.weight: the state has no held of it, which the Pruner remembers"),
        (without("movement"), "0.weight: the state has no movement of it, which the Pruner remembers"),
        (good | {"grad_sq": good["movement"]}, "the state's grad_sq is not .* not negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            pruner.load_state_dict(state)
    pruner.load_state_dict(without("crc"))  # as in states from before it


def test_a_state_that_was_loaded_stays_as_it_was():
    """Movement is summed up in place: not in the tensors of the state."""
    state = begun(CONFIGURATIONS["movement"], 3)[-1].state_dict()
    kept = copy.deepcopy(state)
    model, optimizer, _, pruner = begun(CONFIGURATIONS["movement"], 0)
    pruner.load_state_dict(state)
    train(model, optimizer, 3)
    assert same(kept, state)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_interrupt_while_a_state_is_loaded_changes_nothing(name, monkeypatch):
    state = begun(CONFIGURATIONS[name], 4)[-1].state_dict()
    run = begun(CONFIGURATIONS[name], 0)
    before = copy.deepcopy(picture(*run))
    original = Zeros.zero

    def interrupted(self, *places):
        original(self, *places)
        raise KeyboardInterrupt

    monkeypatch.setattr(Zeros, "zero", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run[-1].load_state_dict(state)
    monkeypatch.undo()
    assert_unchanged(before, *run)
    run[-1].load_state_dict(state)
    assert run[-1].step == 4


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pruner_is_not_pickled_or_copied_but_its_state_is(copied):
    model, optimizer, _, pruner = begun(CONFIGURATIONS["gradual"], 4)
    with pytest.raises(TypeError, match=r"can't be pickled or copied: .* Save state_dict\(\)"):
        copied(pruner)
    pickle.dumps([model, optimizer])  # these go on as they are
    _, _, _, again = begun(CONFIGURATIONS["gradual"], 0)
    again.load_state_dict(pickle.loads(pickle.dumps(pruner.state_dict())))
    assert same(again.state_dict(), pruner.state_dict())


# Making


class Closed:
    """A stdout whose other end is gone."""

    def __init__(self, error):
        self.error = error

    def write(self, _text):
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file."),
     UnicodeEncodeError("ascii", "×", 0, 1, "ordinal not in range(128)")],
)  # fmt: skip
def test_a_timetable_that_cannot_be_printed_is_no_error(error, monkeypatch):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monkeypatch.setattr("sys.stdout", Closed(error))
    pruner = Pruner(model, optimizer, schedules.constant(0.5))
    train(model, optimizer, 2)
    assert pruner.step == 2


def test_whatever_fails_while_a_pruner_is_made_leaves_model_and_optimizer(monkeypatch):
    def late(step):
        if step > 3:
            raise IndexError("beyond the list")
        return 0.5

    def make(**options):
        return Pruner(model, optimizer, **{"schedule": schedules.constant(0.5), "total_steps": 9, **options})

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    def refused(error, **options):
        with pytest.raises(error):
            make(**options)
        assert same(before, [model.state_dict(), optimizer.state_dict()])
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_step_pre_hooks

    refused(IndexError, schedule=late)  # the timetable asks it for later steps
    monkeypatch.setattr("sys.stdout", Closed(KeyboardInterrupt()))
    refused(KeyboardInterrupt)
    refused(KeyboardInterrupt, regrow=regrowth.sr_ste(), pattern=NM(2, 4))
    monkeypatch.undo()
    refused(TypeError, seed=0.5)
    make(verbose=False)


# Following and rewinding


def without_values(model):
    twin = copy.deepcopy(model)
    twin[4].to("meta")
    return twin


@pytest.mark.parametrize("name", ["gradual", "sr-ste", "growing"])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model: nn.Sequential(*model[:4], nn.Linear(8, 5)), ValueError, r"4\.(weight|bias) .* shape \(5"),
        (lambda model: nn.Sequential(nn.Linear(8, 17), *model[1:]), ValueError, r"0\.(weight|bias) .* shape \(17"),
        (without_values, ValueError, r"4\.(weight|bias) is of .* on meta"),
        (lambda model: model[:4], KeyError, r"4\.weight"),
    ],
)
def test_a_model_that_cannot_follow_is_refused(name, make, error, message):
    run = begun(CONFIGURATIONS[name], 3)
    other = make(copy.deepcopy(run[0]))
    before, its = copy.deepcopy(picture(*run)), copy.deepcopy(other.state_dict())
    with pytest.raises(error, match=message):
        run[-1].follow(other)
    assert_unchanged(before, *run)
    assert all(value.is_meta or torch.equal(value, other.state_dict()[key]) for key, value in its.items())
    train(run[0], run[1], 2)


def test_a_state_loaded_after_a_model_follows_finds_the_weights_as_they_were():
    options = CONFIGURATIONS["rigl"]
    model, _, _, pruner = begun(options, 0)
    pruner.load_state_dict(begun({"schedule": 0.5, "regrow": regrowth.rigl()}, 0)[-1].state_dict())
    assert same(dict(model.state_dict()), dict(network().state_dict()))


def broken(state, change):
    state = copy.deepcopy(state)
    change(state)
    return state


@pytest.mark.parametrize("name", ["gradual", "sr-ste", "movement", "growing"])
@pytest.mark.parametrize(
    ("model_change", "optimizer_change", "message"),
    [
        (lambda state: state.pop("4.weight"), None, r"(?s)don't fit the model: .*4\.weight"),
        (lambda state: state.update({"4.weight": torch.zeros(3)}), None, r"(?s)don't fit the model: .*4\.weight"),
        (lambda state: state.update({"4.weight": torch.zeros(4, 8, device="meta")}), None, r"(?s)don't fit.*4\.weight"),
        (lambda state: state.update({"4.weight": "x"}), None, r"(?s)don't fit the model: .*4\.weight"),
        (None, lambda state: state.clear(), "doesn't fit the optimizer: KeyError"),
        (None, lambda state: state["param_groups"].clear(), "doesn't fit the optimizer: ValueError"),
        (None, lambda state: state["state"].update({2: 5}), "fit the optimizer"),
        (None, lambda state: state["state"][2].pop("exp_avg"), r"2\.weight: .* has no exp_avg for the optimizer"),
        (
            None,
            lambda state: state["state"][2].update(exp_avg=torch.zeros(3)),
            r"2\.weight: exp_avg has shape \(3,\) in the state to go back to, the optimizer's has \(8, 16\)",
        ),
        (None, lambda state: state["state"][2].update(exp_avg=torch.zeros(8, 16, device="meta")), "fit the optimizer"),
    ],
)
def test_what_cannot_be_gone_back_to_changes_nothing(name, model_change, optimizer_change, message):
    run = begun(CONFIGURATIONS[name], 3)
    saved = copy.deepcopy([run[0].state_dict(), run[1].state_dict()])
    train(run[0], run[1], 2)
    for change, number in ((model_change, 0), (optimizer_change, 1)):
        if change is not None:
            saved[number] = broken(saved[number], change)
    before = copy.deepcopy(picture(*run))
    identities = picture(*run)["identities"]
    with pytest.raises(ValueError, match=message):
        run[-1].rewind(*saved)
    assert_unchanged(before | {"identities": identities}, *run)
    if model_change is not None:
        with pytest.raises(ValueError, match=message):
            run[-1].rewind(saved[0])
        assert_unchanged(before, *run)
    train(run[0], run[1], 2)


def test_a_ticket_can_be_drawn_again_and_again():
    """Rewinding and training on change nothing in the states that are gone back to."""
    model, optimizer, _, pruner = begun({"schedule": schedules.constant(0.0)}, 2)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    kept = copy.deepcopy(saved)
    for sparsity in (0.3, 0.6):
        pruner.prune(sparsity)
        pruner.rewind(*saved)
        train(model, optimizer, 2)
        assert same(kept, saved)
    with pytest.raises(ValueError, match="sparsity is the fraction that is removed"):
        pruner.prune(math.nan)
