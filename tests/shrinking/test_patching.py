"""Laws of patches: what is linear leaves without error, nothing gets worse, and what must not change does not."""

import copy
import re

import pytest
import torch
from torch import nn

import zoo
from secateur import shrink
from secateur.coupling import find_coupling
from secateur.kinds import Branches
from secateur.shrinking.kinds.branches import OutputCosts
from secateur.shrinking.kinds.patching import patch
from secateur.solvers import Fit, ScaleFit
from secateur.support import Undo, run_example
from support.deep import WIDTH, Block, Parallel, PostNorm, batches, deep
from support.unchanged import is_unchanged, state_of


def without(model, held, *gone, repair=True, **given):
    """The model without the branches that hold these parameters."""
    count = len(find_coupling(model, held[0]).branches)
    small = copy.deepcopy(model)
    done = shrink(small, held[0], leave=Branches(len(gone) / count), include=gone, batches=held, repair=repair, **given)
    assert all(name not in dict(small.named_parameters()) for name in gone)
    return small, done


def error(model, dense, held):
    with torch.no_grad():
        wanted = torch.cat([dense(each) for each in held]).double()
        return float((torch.cat([model(each) for each in held]).double() - wanted).norm() / wanted.norm())


def test_what_is_linear_in_what_the_patch_sees_leaves_without_error():
    class Own(nn.Module):
        """What is added lies in the span of what the matrix before it was given: its own outputs, once more."""

        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            own = self.first.down(self.first.up(self.first.norm(x)).relu())
            x = x + own
            return x + self.second(own)

    torch.manual_seed(0)
    model, held = nn.Sequential(nn.Linear(4, WIDTH), Own(), Block(), nn.Linear(WIDTH, 3)), batches()
    plain, _ = without(model, held, "1.second.weight", repair=False)
    patched, done = without(model, held, "1.second.weight")
    assert error(plain, model, held) > 0.01
    assert error(patched, model, batches(seed=7)) < 1e-5
    assert done.patched["1.first.down.weight"] == pytest.approx(1, abs=1e-6)
    assert re.search(r"residual behind them that are recovered: .*1\.first\.down\.weight", str(done))


@pytest.mark.parametrize("make", [Block, PostNorm, Parallel])
@pytest.mark.parametrize("place", [1, 2, 4])
def test_outputs_are_no_further_than_without_a_patch(make, place):
    held = batches(4)  # as many as outputs are compared on
    for seed in range(3):
        model = deep(make, seed=seed)
        gone = f"{place}.{'f.2' if make is Parallel else 'down'}.weight"
        plain, _ = without(model, held, gone, repair=False)
        patched, _ = without(model, held, gone)
        assert error(patched, model, held) <= error(plain, model, held) * (1 + 1e-6)


def test_a_patch_helps_on_inputs_that_it_did_not_see():
    model, held, unseen = deep(), batches(), batches(seed=9)
    gone = ["3.down.weight", "4.down.weight"]
    plain, _ = without(model, held, *gone, repair=False)
    patched, _ = without(model, held, *gone)
    assert error(patched, model, unseen) < error(plain, model, unseen) / 2


def test_where_nothing_lacks_nothing_changes():
    model, held = deep(), batches()
    nn.init.zeros_(model[3].down.weight)
    nn.init.zeros_(model[3].down.bias)
    state = state_of(model)
    small, done = without(model, held, "3.down.weight")
    assert done.patched == {}
    others = dict(small.named_parameters())
    assert all(torch.equal(each, model.get_parameter(name)) for name, each in others.items())
    assert is_unchanged(model, state)


def test_what_is_before_stays_bit_for_bit():
    model, held = deep(), batches()
    small, done = without(model, held, "4.down.weight")
    assert [*done.patched] == ["3.down.weight"]
    changed = {name for name, each in small.named_parameters() if not torch.equal(each, model.get_parameter(name))}
    assert {"3.down.weight", "3.down.bias"} <= changed <= {"3.down.weight", "3.down.bias", "5.down.weight"}


def test_a_patch_that_moves_outputs_further_is_taken_back(monkeypatch):
    model, held = deep(), batches()
    branches = [each for each in find_coupling(model, held[0]).branches if "3.down.weight" in each.parameters]
    costs, state = OutputCosts(model, held), state_of(model)
    rising = iter(range(100))
    monkeypatch.setattr(costs, "now", lambda **_: float(next(rising)))
    assert patch(model, branches, held, costs=costs, forward=None, undo=Undo()) == {}
    assert is_unchanged(model, state)


def test_what_is_no_better_on_rows_that_were_not_seen_is_no_patch():
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(40, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    for solver in (Fit(torch.ones(30, 30), torch.zeros(30)), ScaleFit(torch.ones(30), torch.zeros(30))):
        solver.add(x[:20], noise[:20], held_out=False)
        solver.add(x[20:], -noise[20:] * 1e-3, held_out=True)
        assert solver.solved() == (None, 0.0)


def test_more_damping_where_there_is_less_to_learn_from():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 40, generator=generator, dtype=torch.float64)
    residual = x[:, :1] + 3 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    solver = Fit(torch.zeros(1, 40), None)
    solver.add(x[:45], residual[:45], held_out=False)
    solver.add(x[45:], residual[45:], held_out=True)
    found, _ = solver.solved()
    if found is not None:
        exact = torch.linalg.lstsq(x, residual).solution.norm()
        assert found[0].norm() < exact
    assert Fit.dampings[0] < 1e-6


@pytest.mark.parametrize(
    ("family", "is_patched"),
    [
        ("llama", True),
        ("gpt2", True),
        ("gpt_neox", True),  # both branches of a block in one sum
        ("bert", True),
        ("t5", True),
        ("vit", True),
        ("mlp_mixer", True),
        ("convnext", False),  # scaled on the way to the sum
        ("resnet_basic", False),  # normalized and activated
    ],
)
def test_families(family, is_patched):
    model, inputs = zoo.ZOO[family]()
    model.eval()
    found = []
    for repair in (False, True):
        small = copy.deepcopy(model)
        done = shrink(
            small, inputs, leave=Branches(0.3), batches=[inputs] * 4, forward=run_example, repair=repair, modes=[False]
        )
        held = OutputCosts(model, [inputs], run_example)
        held.model = small
        found.append(held.now())
        assert bool(done.patched) == (repair and is_patched)
    assert found[1] <= found[0]
    assert not is_patched or found[1] < found[0] / 2
