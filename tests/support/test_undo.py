"""Taking back: whichever step fails, everything is as it was, the same objects with the same contents."""

import copy

import pytest
import torch
from torch import nn

from secateur.support import Undo


class Counted(nn.Linear):
    """A class to put on a module."""


class Base:
    pass


class OtherBase(Base):
    pass


class Derived(Base):
    pass


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def picture(model, optimizer):
    """Everything that the steps below change: which objects, and what they hold."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "values": {name: tensor.tolist() for name, tensor in tensors.items()},
        "order": list(tensors),
        "classes": [type(module) for module in model.modules()],
        "attributes": [list(vars(module)) for module in model.modules()],
        "sizes": model[0].out_features,
        "forward hooks": [list(module._forward_pre_hooks) for module in model.modules()],
        "state": [
            (id(key), id(held), [(name, id(each), each.tolist()) for name, each in held.items()])
            for key, held in optimizer.state.items()
        ],
        "state itself": id(optimizer.state),
        "rates": (id(optimizer.param_groups), [group["lr"] for group in optimizer.param_groups]),
        "trained": [(id(group), [id(each) for each in group["params"]]) for group in optimizer.param_groups],
        "step hooks": list(optimizer._optimizer_step_post_hooks),
        "bases": Derived.__bases__,
    }


def changes(model, optimizer):
    """Steps of all kinds, one after the other."""

    def rename():
        model[0].register_parameter("weight_orig", model[0]._parameters.pop("weight"))

    def load():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def train_less():
        optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[0]["lr"] = 7.0

    def derive():
        Derived.__bases__ = (OtherBase,)

    yield lambda: model[2].weight.data.zero_()
    yield lambda: model[1].running_mean.add_(1)
    yield lambda: optimizer.state[model[2].bias]["momentum_buffer"].mul_(2)
    yield rename
    yield lambda: model[0].register_buffer("weight_mask", torch.ones(3, 3))
    yield lambda: setattr(model[0], "out_features", 2)
    yield lambda: setattr(model[0], "note", "new")
    yield lambda: setattr(model[0], "__class__", Counted)
    yield derive
    yield lambda: model[0].register_forward_pre_hook(print)
    yield lambda: model._modules.__setitem__("2", nn.Identity())
    yield lambda: optimizer.register_step_post_hook(print)
    yield lambda: optimizer.state[model[1].weight].clear()
    yield lambda: optimizer.state.pop(model[1].bias)
    yield load
    yield lambda: optimizer.state.clear()
    yield train_less


STEPS = len(list(changes(None, None)))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("fails_after", range(STEPS + 1))
def test_whichever_step_fails_everything_is_as_it_was(fails_after, error):
    model, optimizer = trained()
    before = picture(model, optimizer)
    with pytest.raises(error, match="stop"), Undo() as undo:
        undo.modules(model.modules())
        undo.attributes(Derived, "__bases__")
        undo.optimizers([optimizer])
        undo.values(*model.parameters(), *model.buffers())
        undo.values(*(each["momentum_buffer"] for each in optimizer.state.values()))
        for number, change in enumerate(changes(model, optimizer)):
            if number == fails_after:
                raise error("stop")
            change()
        raise error("stop")
    assert picture(model, optimizer) == before


def test_a_block_that_goes_well_can_be_taken_back_later_or_forgotten():
    kept = {}
    for again in ("roll_back", "forget"):
        numbers = torch.ones(2)
        with Undo() as undo:
            undo.values(numbers)
            numbers.zero_()
        assert numbers.tolist() == [0, 0]
        getattr(undo, again)()
        kept[again] = numbers.tolist()
        numbers.fill_(5)
        undo.roll_back()
        assert numbers.tolist() == [5, 5], "once only"
    assert kept == {"roll_back": [1, 1], "forget": [0, 0]}


def test_records_are_put_back_last_first_and_one_within_another():
    order = []
    inner = Undo()
    inner.call(order.append, "inner")
    with pytest.raises(ValueError, match="x"), Undo() as undo:
        undo.call(order.append, "first")
        undo.call(inner.roll_back)
        undo.call(order.append, "last")
        raise ValueError("x")
    assert order == ["last", "inner", "first"]


def test_a_record_that_cannot_be_put_back_keeps_no_other_from_it():
    held, first = {"a": 1}, []

    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory") as caught, Undo() as undo:
        undo.call(first.append, 1)
        undo.contents(held)
        undo.call(fail)
        held["b"] = 2
        raise ValueError("the reason")
    assert held == {"a": 1}
    assert first == [1]
    assert isinstance(caught.value.__context__, ValueError), "the reason is shown, too"


def test_an_interrupt_while_records_are_put_back_is_raised_when_all_are():
    held, broken = {"a": 1}, []

    def interrupted():
        broken.append(1)
        if len(broken) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Undo() as undo:
        undo.contents(held)
        undo.call(interrupted)
        held.clear()
        raise ValueError("the reason")
    assert held == {"a": 1}
    assert len(broken) == 2, "what was broken into is done once more"


def test_attributes_that_were_not_there_and_sets_and_lists():
    class Thing:
        old = 1

    thing, numbers, names = Thing(), [1, 2], {"a"}
    undo = Undo()
    undo.attributes(thing, "old", "new")
    undo.contents(numbers, names)
    thing.old, thing.new = 2, 3
    numbers.append(3)
    names.add("b")
    undo.roll_back()
    assert (thing.old, hasattr(thing, "new"), numbers, names) == (1, False, [1, 2], {"a"})
