"""A model that has all that a plan changes, and calls that fail at every step."""

import sys

import torch
from torch import nn

from secateur import shrink
from secateur.kinds import Branches
from secateur.shrinking import apply as execution
from secateur.shrinking import files
from secateur.shrinking.plan import plans_of
from secateur.support import tensors_of

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
    case = make()
    before = everything(*case)
    for step in range(10_000):  # what is as it was can fail once more
        try:
            fail_at(step, lambda: call(*case), *names)
        except Failure:
            assert everything(*case) == before, f"step {step}"
        else:
            return step
    raise AssertionError("no end")


def plans_for(model):
    shrink(model, X, 0.4, leave=Branches(0.3), target="units")
    return plans_of(model)
