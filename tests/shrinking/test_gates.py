"""Laws of gates: 1 is the model bit for bit, 0 the model without the unit; what they cost; what local losses miss; of
units, experts and branches."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from secateur import Blocks, Branches, Experts, shrink
from secateur.coupling import Scope, find_coupling
from secateur.models import InMemory, distance
from secateur.runtimes import parse
from secateur.shrinking import calibrated, carry_out, gates, plan_of, pruning_target, tie_roles
from secateur.shrinking.costs import TiedGroups, cost_of, timed_amount
from secateur.shrinking.kinds import blocks_directory, experts_directory
from secateur.shrinking.kinds.blocks import passed_on, passing
from secateur.shrinking.measure import Measuring
from secateur.shrinking.request import Request
from support.families import batches as batches_of
from support.families import make
from support.measured import loss_of, text, trained, words
from support.mixtures import batches as mixed
from support.mixtures import mixtral
from support.stacks import data, stack
from support.told import tables_of
from support.unchanged import is_unchanged, state_of


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(gates, "STEPS", 30)


def pictures():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()


def llama():
    return make("llama").eval(), batches_of("llama")


SUBJECTS = {
    "words": lambda: (words(), text(count=2)),
    "stack": lambda: (stack(layers=2), data(count=2)),
    "pictures": lambda: (pictures(), [torch.randn(2, 3, 8, 8) for _ in range(2)]),
    "llama": llama,
}


def placed(model, batches, share=0.5, *, tied=False, target="params"):
    """The model's groups, what a walk measured, and where gates are multiplied in."""
    example = {**batches[0], "use_cache": False} if isinstance(batches[0], dict) else batches[0]
    scope = Scope.of(find_coupling(model, example))
    scope = tie_roles(scope) if tied else scope
    subject = pruning_target(model, scope, [example])
    host = InMemory(model, batches)
    job = Measuring(scope.coupling, scope.groups)
    host.walk(job)
    return subject, Request(sparsity=share, target=target), job.measured, host


def outputs(model, batch):
    with torch.no_grad():
        found = model(**batch) if isinstance(batch, dict) else model(batch)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("name", SUBJECTS)
def test_gates_of_one_are_the_model_and_gates_of_zero_the_model_without_the_units(name):
    model, batches = SUBJECTS[name]()
    subject, _, measured, host = placed(model, batches)
    groups = subject.scope.groups
    places = gates.gate_places(subject, groups, measured, host.blocks)
    assert {key for its in places.values() for key, *_ in its} == {group.name for group in groups}
    dense, state = outputs(model, batches[0]), state_of(model)
    with gates.gated(model, places, {group.name: torch.ones(group.size) for group in groups}):
        assert torch.equal(outputs(model, batches[0]), dense)
    assert is_unchanged(model, state)
    ties = [group.tied for group in groups]  # of groups that are tied one alone cannot leave
    alone = [group for group in groups if not group.notes and ties.count(group.tied) == 1]
    assert alone
    for group in alone:
        kept = torch.ones(group.size)
        kept[1 :: max(2, group.size // 2)] = 0
        with gates.gated(model, places, {each.name: torch.ones(each.size) for each in groups} | {group.name: kept}):
            found = outputs(model, batches[0])
        smaller = copy.deepcopy(model)
        carry_out(smaller, plan_of(smaller, subject.coupling, {group.name: kept.bool().numpy()}), None)
        torch.testing.assert_close(found, outputs(smaller, batches[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", ["params", "macs"])
def test_gates_cost_what_may_be_left_and_no_gradient_changes_that(tied, target):
    subject, asked, _, _ = placed(*SUBJECTS["words"](), 0.4, tied=tied, target=target)
    budget = gates.GateBudget.of(subject, subject.scope.groups, asked)
    torch.manual_seed(0)
    worths = torch.randn(int(budget.sizes.sum()), dtype=torch.float64).requires_grad_()
    for temperature in (2.0, 0.5, 0.1):
        found = budget.gates(worths, temperature, budget.goal)
        assert budget._cost(found.detach()) == pytest.approx(budget.goal, rel=1e-6)
        shares = budget._by_tie(found)
        assert torch.allclose(budget._by_group(found), shares[budget.tie_of], atol=1e-6)
        spent = (budget.prices(shares.detach()) * found).sum()
        (gradient,) = torch.autograd.grad(spent, worths, retain_graph=True)
        (any_,) = torch.autograd.grad(found[0], worths)
        assert gradient.abs().max() < 1e-6 * budget.whole < budget.whole * any_.abs().max()


@pytest.mark.long
def test_what_leaves_is_what_was_asked_and_the_same_for_the_same():
    model, calibration = trained(60), text(count=12, seed=5)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    done = shrink(first, calibration[0], 0.4, batches=calibration, choose="gates", repair=False)
    again = shrink(second, calibration[0], 0.4, batches=calibration, choose="gates", repair=False)
    assert {name: mask.tolist() for name, mask in done.kept.items()} == {
        name: mask.tolist() for name, mask in again.kept.items()
    }
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert done.got == pytest.approx(0.4, abs=0.02)
    assert done.gates["units"].steps == 30
    assert 0 < done.gates["units"].after <= done.gates["units"].before  # or they are those of the start
    local = shrink(copy.deepcopy(model), calibration[0], 0.4, batches=calibration, repair=False)
    assert not local.gates
    assert local.got == pytest.approx(done.got, abs=0.01)
    (row,) = tables_of(done.content())["gates"].json()
    assert list(row.values()) == ["units", 30, done.gates["units"].before, done.gates["units"].after, done.lost]
    assert done.lost == pytest.approx(done.gates["units"].after, rel=0.2)  # nothing is repaired, and counts are rounded
    assert "Gates of  Steps  Lost as they began  Lost by gates, before repair  Lost in the end" in str(done)
    assert "Gates of" not in str(local)
    repaired = shrink(copy.deepcopy(model), calibration[0], 0.4, batches=calibration, choose="gates")
    for name, mask in done.kept.items():  # as many, of which the walk takes those that others can replace
        assert mask.sum() == repaired.kept[name].sum()
    worths = done.gates["units"].worths
    for name in ("blocks.0.up.weight", "blocks.1.up.weight"):  # without repair the worst leave
        assert worths[name][done.kept[name]].min() >= worths[name][~done.kept[name]].max(initial=-9)
    assert loss_of(repaired.model, calibration) < loss_of(first, calibration)
    assert repaired.lost < done.lost


class Blind(nn.Module):
    """Two blocks whose last unit gives most of what they add to the stream, where nothing reads it; means of positions
    are returned, so that no slopes say that."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            for block in self.blocks:
                block[2].weight[3], block[2].weight[:, 5] = 0, torch.tensor([0, 0, 0, 1.0])
                block[0].weight[:, 3] = 0
            self.head.weight[:, 3] = 0

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).mean(1)


@pytest.mark.long
def test_gates_find_units_that_are_useless_to_the_model_and_not_to_the_next_matrix(monkeypatch):
    monkeypatch.setattr(gates, "STEPS", 100)
    torch.manual_seed(0)
    model, calibration = Blind(), [torch.randn(32, 5, 4) for _ in range(4)]
    lost, masks = {}, {}
    for choose in (None, "gates"):
        how = {"include": "blocks.*.0.bias", "round_to": 1, "target": "units", "repair": False, "choose": choose}
        done = shrink(copy.deepcopy(model), calibration[0], 2 / 12, batches=calibration, **how)
        with torch.no_grad():
            lost[choose] = float((done.model(calibration[0]) - model(calibration[0])).square().mean())
        masks[choose] = [mask.tolist() for mask in done.kept.values()]
        assert sum(map(sum, masks[choose])) == 10  # the budget, to the unit
    assert masks["gates"] == 2 * [[True] * 5 + [False]] != masks[None]
    assert lost["gates"] < 1e-12 < 1e-4 < lost[None]
    assert done.gates["units"].after < 1e-12 < 1e-4 < done.gates["units"].before


def test_the_time_of_groups_is_measured_where_gates_hold_it():
    """By prices that are linear in units it is exact, of layers that are alike at once; what is free costs a tenth of
    what its multiply-adds say, so that it does not leave for nothing."""
    model, calibration = words(), text(count=1)
    coupling = find_coupling(model, calibration[0])
    tied = [TiedGroups([group], 1, {}) for group in coupling.groups if "up" in group.name or "q.weight" in group.name]
    up = [at for at, each in enumerate(tied) if "up" in each.groups[0].name]
    whole = [each.parts for each in tied]

    runtime = parse(lambda operation, shapes: shapes[1][1] if operation == "linear" else 0.0)  # inputs of matrices
    amount = timed_amount(model, coupling, calibration[0], runtime, tied)
    time = cost_of(model, coupling, calibration[0], "latency", runtime)
    assert amount(whole) == pytest.approx(1)
    counts = {tied[at].groups[0].name: tied[at].parts // 4 for at in up}
    parts = [each.parts // 4 if at in up else each.parts for at, each in enumerate(tied)]
    assert amount(parts) == pytest.approx(time(counts))
    assert all(amount.changes(whole, at, [1])[0] < 0 for at in range(len(tied)))


def test_of_a_time_gates_learn_to_do_without_what_has_to_leave_and_not_without_that_share_of_the_multiply_adds():
    model, calibration = words(), text(count=3)

    def took(operation, shapes):  # half as much for a quarter of the numbers
        return sum(math.prod(each) ** 0.5 for each in shapes)

    how = {"batches": calibration, "choose": "gates", "repair": False, "target": "latency", "runtime": took}
    done = shrink(model, calibration[0], 0.3, **how)
    assert done.got == pytest.approx(0.3, abs=0.03)
    assert 1 - done.multiply_adds[1] / done.multiply_adds[0] > 0.35
    assert done.gates["units"].after > done.lost / 4  # a thirtieth, where 30 % of the multiply-adds left


@pytest.mark.long
def test_nothing_that_is_asked_changes_nothing_and_the_callers_mode_does_not_matter():
    model, calibration = pictures(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    state = state_of(model)
    done = shrink(model, calibration[0], 0.0, batches=calibration, choose="gates")
    assert is_unchanged(model, state)
    assert done.gates["units"].before == done.gates["units"].after == 0
    other = copy.deepcopy(model)
    with torch.inference_mode():
        mine = [each.clone() for each in calibration]  # and what is made in that mode
        there = shrink(other, mine[0], 0.4, batches=mine, choose="gates", repair=False).gates["units"]
    assert not any(each.is_inference() for each in other.parameters())
    here = shrink(model, calibration[0], 0.4, batches=calibration, choose="gates", repair=False).gates["units"]
    assert (here.before, here.after) == (there.before, there.after)


def again(place, how, monkeypatch, module, stops, learns, record):
    """A run that is stopped, and started again, comes to the same bytes, with gates that are in its journal."""

    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, stops, stopped)
        with pytest.raises(KeyboardInterrupt):
            shrink(place / "dense", out=place / "again", **how)
    monkeypatch.setattr(module, learns, stopped)
    shrink(place / "dense", out=place / "again", **how)
    for each in ("model.safetensors", "config.json", record):
        assert (place / "again" / each).read_bytes() == (place / "small" / each).read_bytes()


# ---- of experts and branches ----------------------------------------------------------------------------------------
def experts(count=6):
    """A mixture whose experts give as much as their numbers say: routers send tokens to all alike."""
    model = mixtral(count).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.mul_(8 * torch.arange(count).square()[:, None, None] / count**2)
            layer.mlp.gate.weight.div_(8)
    return model


def test_experts_leave_that_the_model_needs_least_and_what_is_told_is_what_it_loses_without_them():
    model, calibration = experts(), mixed(3)
    dense = [outputs(model, each).log_softmax(-1) for each in calibration]
    how = {"leave": Experts(2), "batches": calibration, "repair": False, "verify": False, "modes": [False]}
    local = shrink(copy.deepcopy(model), calibration[0], **how)
    done = shrink(copy.deepcopy(model), calibration[0], choose="gates", **how)
    assert not local.gates
    assert set(done.gates) == {"experts"}
    assert list(done.experts.values()) == [(6, 4), (6, 4)]
    found = [outputs(done.model, each).log_softmax(-1) for each in calibration]
    lost = torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(dense, found, strict=True)]).mean()
    gates = done.gates["experts"]
    assert 0 < gates.after <= gates.before
    assert float(lost) == pytest.approx(gates.after, rel=1e-3)  # with its routers, as it is
    assert done.lost == pytest.approx(gates.after, rel=1e-3)
    assert len(gates.losses) == gates.steps == 30
    for name, worths in gates.worths.items():
        (plan,) = (each.tensors[name][1][0] for each in done.plans if name in each.tensors)
        assert sorted(plan.tolist()) == sorted(worths.argsort()[2:].tolist())


class Deep(nn.Module):
    """Branches, of which two add next to nothing; what another adds is turned back by the one behind it, so that both
    leave at little cost, and one alone at a great one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(5))
        self.head = nn.Linear(6, 5)
        with torch.no_grad():
            for at in (1, 3):
                self.blocks[at][2].weight.mul_(0.01)
                self.blocks[at][2].bias.mul_(0.01)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_branches_leave_that_the_model_needs_least():
    torch.manual_seed(0)
    model, calibration = Deep(), [torch.randn(8, 6) for _ in range(3)]
    state = state_of(model)
    done = shrink(model, calibration[0], leave=Branches(2), batches=calibration, choose="gates", repair=False)
    gates = done.gates["branches"]
    assert set(done.gates) == {"branches"}
    assert sorted(gates.worths["branches"].argsort()[:2].tolist()) == [1, 3]
    assert [type(each).__name__ == "Removed" for each in model.blocks] == [False, True, False, True, False]
    assert not is_unchanged(model, state)
    assert 0 < gates.after <= gates.before < 0.01
    assert "branches     30" in str(done)
    assert done.asked.branches == 2


def test_where_there_is_nothing_to_choose_no_gates_are_learnt():
    torch.manual_seed(0)
    how = {"batches": [torch.randn(8, 6)], "choose": "gates", "repair": False}
    done = shrink(Deep(), torch.randn(2, 6), leave=Branches(1), include="blocks.2.*", **how)
    assert not done.gates
    assert len(done.stayed) == 4
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match="the model has no residual branch"):
        shrink(plain, torch.randn(2, 6), leave=Branches(1), **how)


def test_units_make_up_for_what_is_missing_and_each_kind_has_its_gates():
    calibration = mixed(2)
    leave = [Experts(1), Branches(1)]
    done = shrink(experts(4), calibration[0], 0.6, leave=leave, batches=calibration, choose="gates", repair=False)
    assert list(done.gates) == ["branches", "experts", "units"]
    assert done.got == pytest.approx(0.6, abs=0.03)
    (chart,) = tables_of(done.content())["gates"].charts
    assert len(chart.values) == 30
    assert list(dict.fromkeys(chart.series)) == ["branches", "experts", "units"]


def test_branches_that_are_named_have_no_gates():
    model, calibration = Deep(), [torch.randn(8, 6)]
    with pytest.raises(ValueError, match="gates learn which units leave, or experts, branches or blocks; say by"):
        shrink(model, calibration[0], leave=Branches("blocks.1"), batches=calibration, choose="gates")


def test_experts_of_a_directory_are_those_of_the_loaded_model_and_a_run_goes_on_with_them(tmp_path, monkeypatch):
    calibration = mixed(2)
    experts().save_pretrained(tmp_path / "dense")
    how = {"leave": Experts(2), "batches": calibration, "choose": "gates", "verify": False}
    done = shrink(tmp_path / "dense", out=tmp_path / "small", **how)
    mine = shrink(experts(), calibration[0], uniform=True, **how)
    assert done.gates["experts"].after == pytest.approx(mine.gates["experts"].after, rel=1e-2)
    assert done.lost == pytest.approx(mine.lost, rel=1e-2)
    for name, worths in mine.gates["experts"].worths.items():
        assert done.kept[name] == tuple(sorted(worths.argsort()[2:].tolist()))
    assert "Gates of" in str(done)

    again(tmp_path, how, monkeypatch, experts_directory, "_write", "learnt_experts", "experts.json")


def deep():
    """Four blocks, of which the third adds nothing."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[2].get_submodule(name).weight.mul_(1e-3)
    return model


def test_blocks_of_a_directory_leave_by_gates_and_a_run_goes_on_with_them(tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    calibration, model = [{"input_ids": torch.randint(0, 32, (2, 12), generator=draw)}], deep()
    model.save_pretrained(tmp_path / "dense")
    how = {"leave": Blocks(1), "batches": calibration, "choose": "gates", "verify": False, "repair": False}
    done = shrink(tmp_path / "dense", out=tmp_path / "small", **how)
    assert done.gone == ("model.layers.2",)
    found = done.gates["blocks"]
    assert found.worths["blocks"].argmin() == 2
    assert found.after <= found.before
    dense = outputs(model, calibration[0]).log_softmax(-1)
    small = outputs(LlamaForCausalLM.from_pretrained(tmp_path / "small").eval(), calibration[0]).log_softmax(-1)
    assert float((dense.exp() * (dense - small)).sum(-1).mean()) == pytest.approx(found.after, rel=1e-2, abs=1e-7)
    assert "Gates of" in str(done)
    assert shrink(tmp_path / "dense", **how).gone == done.gone  # only said
    again(tmp_path, how, monkeypatch, blocks_directory, "_publish", "learnt_blocks", "blocks.json")


def test_a_gate_of_a_block_is_1_bit_for_bit_and_0_without_it():
    model, batch = deep(), {"input_ids": torch.arange(12)[None]}
    names = [f"model.layers.{at}" for at in range(4)]

    def run(*values):
        def gate(name, args, kwargs, out):
            return passed_on(args, kwargs, out, torch.tensor(values[names.index(name)]))

        with passing(model, names, gate):
            return outputs(model, batch)

    assert torch.equal(run(1.0, 1.0, 1.0, 1.0), outputs(model, batch))
    with passing(model, [names[1]]):
        without = outputs(model, batch)
    assert torch.equal(run(1.0, 0.0, 1.0, 1.0), without)


@pytest.mark.parametrize("leave", [Experts(2), Branches(1)], ids=["experts", "branches"])
def test_experts_and_branches_are_chosen_the_same_where_blocks_are_computed_again(leave, monkeypatch):
    calibration, found, checkpoints = mixed(2), [], []
    checkpoint = distance.checkpoint
    monkeypatch.setattr(distance, "checkpoint", lambda *its, **how: checkpoints.append(1) or checkpoint(*its, **how))
    how = {"leave": leave, "batches": calibration, "choose": "gates", "verify": False, "repair": False}
    for room in (distance.ROOM, 0):
        monkeypatch.setattr(distance, "ROOM", room)
        (its,) = shrink(experts(4), calibration[0], **how).gates.values()
        found.append(its)
        assert bool(checkpoints) is (room == 0)
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-5)


# ---- what a backward pass holds -------------------------------------------------------------------------------------
def test_blocks_are_computed_once_more_where_a_backward_pass_would_hold_too_much_with_the_same_gates(monkeypatch):
    model, calibration = words(), text(count=3)
    how = {"batches": calibration, "choose": "gates", "repair": False}
    calls = []
    for module in model.blocks:
        module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    found = []
    for room in (distance.ROOM, 0):
        monkeypatch.setattr(distance, "ROOM", room)
        calls.clear()
        found.append((shrink(copy.deepcopy(model), calibration[0], 0.4, **how).gates["units"], sum(calls)))
    (one, seldom), (other, often) = found
    assert one.losses == other.losses
    assert all((one.worths[name] == other.worths[name]).all() for name in one.worths)
    assert "forward" not in {key for module in model.blocks for key in vars(module)}
    assert often >= seldom  # hooks of a block run outside of what is computed again


def test_what_a_backward_pass_holds_is_counted_by_the_first_block_that_runs():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
    x = torch.randn(5, 8, requires_grad=True)
    held = distance.held_by([*blocks], lambda: blocks(x))
    assert held == 3 * 4 * 5 * (8 + 16 + 16)  # what each product is given, and what the GELU is
    assert distance.held_by([*blocks], lambda: None) == 0
    assert all("forward" not in vars(each) for each in blocks)


# ---- what goes wrong ------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_call_that_fails_leaves_the_model_as_it_was():
    model, calibration = words(), text()
    state, calls = state_of(model), 0

    def forward(model, batch):
        nonlocal calls
        calls += torch.is_grad_enabled() and any(not each.is_leaf for each in model.parameters())
        if calls == 9:
            raise RuntimeError("out of luck")
        return model(batch)

    with pytest.raises(RuntimeError, match="out of luck"):
        shrink(model, calibration[0], 0.3, batches=calibration, choose="gates", forward=forward)
    assert calls == 9
    assert is_unchanged(model, state)
    with pytest.raises(ValueError, match="has no gradient along any gate"):
        shrink(
            model,
            calibration[0],
            0.3,
            batches=calibration,
            choose="gates",
            forward=lambda *its: its[0](its[1]).detach(),
        )
    assert is_unchanged(model, state)


def test_what_cannot_be_is_refused():
    model, calibration = words(), text()
    with pytest.raises(ValueError, match="gates need real inputs; pass batches="):
        shrink(model, calibration[0], 0.3, choose="gates")
    with pytest.raises(ValueError, match='choose must be "gates" or "swaps", or left out, not \'luck\''):
        shrink(model, calibration[0], 0.3, batches=calibration, choose="luck")
    with pytest.raises(ValueError, match="say by sparsity= or leave= how much that is"):
        shrink(model, calibration[0], batches=calibration, choose="gates")


def test_gates_of_other_groups_are_not_these():
    found = gates.Gated(1, 0.5, 0.25, worths={"up": torch.zeros(3).double().numpy()})
    subject = placed(*SUBJECTS["words"]())[0]
    named = {group.name: group for group in subject.scope.groups}
    assert found.misfit(named) == "has of up gates of 3 units, which the model has not"
    assert gates.Gated(1, 0.5, 0.25, worths={}).misfit(named) is None


# ---- of a directory -------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_of_a_directory_they_are_those_of_the_loaded_model_and_a_run_goes_on_with_them(tmp_path, monkeypatch):
    make("llama").save_pretrained(tmp_path / "dense")
    how = {"sparsity": 0.3, "batches": batches_of("llama"), "choose": "gates", "verify": False}
    done = shrink(tmp_path / "dense", out=tmp_path / "small", **how)
    model = type(make("llama")).from_pretrained(tmp_path / "dense").eval()
    example = {"input_ids": torch.tensor([[7, 6, 5, 4, 1]]), "use_cache": False}
    example["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0]])
    mine = shrink(model, example, uniform=True, **how)
    assert done.got == pytest.approx(mine.got, abs=0.02)
    assert done.gates["units"].before == pytest.approx(mine.gates["units"].before, rel=1e-2, abs=1e-9)
    assert "Gates of" in str(done)

    again(tmp_path, how, monkeypatch, calibrated, "Repairing", "learnt", "plan.json")
