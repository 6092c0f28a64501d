"""Laws of masks that learn on the loss of the whole model: counts are those asked for, they are never worse than the
walk's on the batches that are held back, and nothing else changes."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from secateur import NM, Block, Rows, Unstructured
from secateur.checkpoints import CheckpointError, verify_checkpoint
from secateur.evidence import needs
from secateur.models import DenseOutputs, InMemory, MatrixJob, oneshot, solving
from secateur.models import in_directory as pruning
from secateur.models.bounds import Form
from secateur.models.distance import Descended
from secateur.models.solving import Chosen, LearntMasks
from secateur.models.walk import walk
from secateur.solvers import admm, alps, dsnot, from_criterion, sparsegpt, with_refit, with_rounding
from support.families import batches as batches_of
from support.families import make
from support.mixtures import batches as mixed
from support.mixtures import mixtral
from support.stacks import MAGNITUDE, WANDA, contents, data, stack
from support.told import tables_of
from support.unchanged import is_unchanged, state_of


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(solving, "STEPS", 20)


def half_read(large_is_read):
    """Eight hidden units of which the head reads four: those of large weights, or those of small ones."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.sign() + 0.1 * model[0].weight)
        model[0].weight[:4] *= 1.25
        model[1].weight[:, 4:] *= not large_is_read
        model[1].weight[:, :4] *= large_is_read
    return model, [torch.randn(16, 4) for _ in range(3)]


def zeros_of(model):
    return {name: each.eq(0) for name, each in model.named_parameters()}


# ---- what is chosen -------------------------------------------------------------------------------------------------


def test_where_magnitude_keeps_what_nothing_reads_gates_keep_what_is_read(monkeypatch):
    """Magnitude keeps large weights, without which nothing would be lost: gates find the mask that loses nothing."""
    monkeypatch.setattr(solving, "STEPS", 200)
    how = {"solver": "magnitude", "pattern": "unstructured", "include": "0.weight"}
    (model, batches), (local, _) = half_read(False), half_read(False)
    dense = DenseOutputs(copy.deepcopy(model), batches)
    oneshot(local, batches, 0.5, **how)
    done = oneshot(model, batches, 0.5, choose="gates", **how)
    assert local[0].weight[4:].eq(0).all()
    assert model[0].weight[:4].eq(0).all(), "the four that the head does not read"
    assert dense.of(model) == done.gates.after == 0 < 0.1 < dense.of(local)
    with dense.instead(local):
        assert dense([2]) == pytest.approx(done.gates.before, rel=1e-5), "the batch that is held back"
    assert done.gates.taken


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(), Rows(), Block(2, 1), NM(1, 2, axis=0)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_keeps_as_many_as_were_asked_for_and_what_is_kept_is_as_it_was(pattern, dtype, monkeypatch):
    monkeypatch.setattr(solving, "STEPS", 100)
    model, batches = stack(layers=2).to(dtype), [each.to(dtype) for each in data(count=8, size=64)]
    local, before = copy.deepcopy(model), copy.deepcopy(model)
    sparsity = None if pattern.density else 0.5
    oneshot(local, batches, sparsity, solver=WANDA, pattern=pattern)
    done = oneshot(model, batches, sparsity, solver=WANDA, pattern=pattern, choose="gates")
    assert done.gates.taken, "else this would show nothing"
    assert done.gates.after < done.gates.before
    assert done.sparsity == 0.5
    changed = 0
    for layer in done.layers:
        kept, asked, whole = (each.get_parameter(layer.name) for each in (model, local, before))
        counts = [(pattern.pool(each.ne(0).float()) > 0).sum(1) for each in (kept, asked)]
        assert torch.equal(*counts)
        assert torch.equal(kept, whole * kept.ne(0))
        changed += int((kept.eq(0) != asked.eq(0)).sum())
    assert changed


def test_where_gates_gain_nothing_the_result_is_what_it_is_without_them():
    """Before repair, where the walk's masks lose nothing already; and after, where a solver repairs what they keep."""
    (model, batches), (local, _) = half_read(True), half_read(True)
    how = {"solver": "magnitude", "pattern": "unstructured", "include": "0.weight"}
    oneshot(local, batches, 0.5, **how)
    done = oneshot(model, batches, 0.5, choose="gates", **how)
    assert done.gates.before == 0
    assert done.gates.solved_after is None
    assert not done.gates.taken
    assert torch.equal(model[0].weight, local[0].weight)
    assert "The masks are those of the walk: on batches held back the learnt ones lose no less" in str(done)


def better(dense, start, *_):
    """In place of `learnt`: masks that lose less, it is said; others, that keep as many."""
    return Descended(1, 1.0, 0.5), {name: mask.flip(1) for name, mask in start.items()}


@pytest.mark.parametrize("solved", [(0.25, 0.5), (0.5, 0.25)])
def test_what_loses_less_after_repair_is_taken(solved, monkeypatch):
    monkeypatch.setattr(pruning, "learnt", better)
    tried, lost = pruning._tried, iter(solved)
    monkeypatch.setattr(pruning, "_tried", lambda *its: (tried(*its)[0], next(lost)))
    model, local = stack(layers=2), stack(layers=2)
    oneshot(local, data(), 0.5)
    done = oneshot(model, data(), 0.5, choose="gates")
    assert (done.gates.solved_before, done.gates.solved_after) == solved
    assert done.gates.taken == (solved[1] < solved[0])
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), local.parameters(), strict=True)]
    assert all(same) != done.gates.taken
    assert done.sparsity == 0.5


def test_a_quarter_of_the_batches_is_held_back_and_not_learnt_from():
    runs = []

    def forward(model, batch):
        if torch.is_grad_enabled():
            runs.append(float(batch[0, 0]))
        return model(batch)

    for count, judged in ((1, []), (2, [1]), (4, [3]), (9, [3, 7])):
        batches = [torch.full((2, 5), float(at)) for at in range(count)]
        runs.clear()
        oneshot(stack(layers=2), batches, 0.5, solver="wanda", choose="gates", forward=forward)
        assert {*runs} == {*range(count)} - {*judged}


def test_the_same_call_gives_the_same_masks_whatever_was_drawn_before():
    found = []
    for seed in range(2):
        model = stack(layers=2)
        torch.manual_seed(seed)
        done = oneshot(model, data(), pattern="2:4", solver=WANDA, choose="gates")
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(seed)), "none are drawn of these"
        found.append((done.gates, *(each.detach() for each in model.parameters())))
    (one, *weights), (other, *others) = found
    assert one == other
    assert one.losses == other.losses
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_padding_says_nothing():
    model, batch = make("llama").eval(), batches_of("llama")[0]
    assert not batch["attention_mask"].all()
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 9)}
    found = [oneshot(copy.deepcopy(model), [each], 0.5, solver=WANDA, choose="gates").gates for each in (batch, other)]
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-4)


def test_what_gates_came_to_is_told(monkeypatch):
    monkeypatch.setattr(solving, "STEPS", 100)
    told = []
    done = oneshot(stack(layers=2), data(8, 64), 0.5, solver="wanda", choose="gates", on_layer=told.append)
    assert [layer.name for layer in told] == [layer.name for layer in done.layers], "each once"
    its = done.gates
    assert len(its.losses) == its.steps == 100
    assert "gates" in tables_of(done.content())
    assert f"lose {its.solved_after:.4g} on batches held back with the learnt ones" in str(done)
    assert its.solved_after == pytest.approx(its.after), "Wanda repairs nothing"
    assert oneshot(stack(layers=2), data(), 0.5).gates is None


# ---- what is solved on ----------------------------------------------------------------------------------------------

SUBJECTS = {
    "stack": lambda: (stack(layers=2), data(count=2)),
    "inputs first": lambda: (make("gpt2").eval(), batches_of("gpt2")[:1]),
    "fused experts": lambda: (mixtral().eval(), mixed(count=1)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)), [torch.randn(2, 2, 8, 8)]
    ),
}  # fmt: skip
SOLVERS = {
    "admm": admm, "alps": alps, "sparsegpt": sparsegpt, "wanda": WANDA, "magnitude": MAGNITUDE,
    "with_refit": with_refit(WANDA), "with_rounding": with_rounding(sparsegpt),
}  # fmt: skip


def kept_by(model, batches, solver, masks=None, widths=None):
    """The masks that a walk chose, and the model's weights are those that it gave."""
    host = InMemory(model, batches)
    named = dict(host.model.named_parameters())
    targets = dict.fromkeys(pruning.choose_targets(host.model, host.blocks, None, None)[0], 0.5)
    job = MatrixJob(solver, Unstructured(), targets, tuple(needs(solver)), masks=masks or {})
    found = {}

    def commit(pruned, new):
        found.update({f"{pruned.block}.{name}".lstrip("."): each.mask for name, each in new.items()})
        host.put(pruned.block, {name: each.values for name, each in new.items()})

    with host.replaying() as replay:
        for _ in walk(replay, job, commit, form=Form(widths or {})):
            pass
    assert found.keys() <= named.keys()
    return found


@pytest.mark.parametrize(
    ("subject", "solver"),
    [*itertools.product(["stack"], SOLVERS), *itertools.product(list(SUBJECTS)[1:], ["admm", "sparsegpt", "wanda"])],
    ids=" ".join,
)
def test_a_solver_keeps_the_mask_that_was_chosen(subject, solver):
    model, batches = SUBJECTS[subject]()
    other = copy.deepcopy(model)
    asked = kept_by(copy.deepcopy(model), batches, from_criterion(lambda weight: -weight.abs()))
    assert asked
    given = kept_by(other, batches, SOLVERS[solver], asked)
    assert given.keys() == asked.keys()
    for name, mask in asked.items():
        assert torch.equal(given[name], mask), name
        assert not other.get_parameter(name)[~mask].any()
        assert other.get_parameter(name)[mask].any()


def test_a_matrix_that_is_solved_in_blocks_of_inputs_keeps_it_too():
    model, batches = SUBJECTS["convolutions"]()
    batches = [batches[0][:, :2]]
    asked = kept_by(copy.deepcopy(model), batches, from_criterion(lambda weight: -weight.abs()))
    given = kept_by(model, batches, admm, asked, widths={"0.weight": 9})
    assert all(torch.equal(given[name], mask) for name, mask in asked.items())


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["learning", "the second walk"])
def test_a_call_that_fails_before_the_last_walk_changes_nothing(moment, monkeypatch):
    model, calls = stack(layers=2), itertools.count(1)
    state = state_of(model)
    if moment == "learning":

        def forward(model, batch):
            if torch.is_grad_enabled() and next(calls) == 9:
                raise RuntimeError("out of luck")
            return model(batch)

        how = {"forward": forward}
    else:
        monkeypatch.setattr(pruning, "learnt", better)

        def solve(*its):
            if next(calls) == 9:  # of four matrices each, and one that is tried
                raise RuntimeError("out of luck")
            return MAGNITUDE(*its)

        how = {"solver": solve}
    with pytest.raises(RuntimeError, match="out of luck"):
        oneshot(model, data(), 0.5, **{"choose": "gates", "solver": "wanda", **how})
    assert is_unchanged(model, state)


def broken(weight, sparsity, pattern):
    new, mask = MAGNITUDE(weight, sparsity, pattern)
    return (new, mask) if isinstance(pattern, Rows | Unstructured) else (new, ~mask)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"choose": "luck"}, "choose must be \"gates\", or left out, not 'luck'"),
        ({"solver": dsnot}, r"dsnot does not keep a mask that it is given, as choose=.* \(layers.0.up.weight: dsnot|"),
        ({"solver": broken}, r"broken does not keep a mask that it is given, .* \(it changes it\)"),
        ({"forward": lambda *its: its[0](its[1]).detach()}, "has no gradient along any mask: leave out choose="),
        (
            {"pattern": Block(2, 1, reduce=lambda tiles: tiles.abs().amax(1))},
            r"layers.0.up.weight: gates learn what a unit is worth by its sum; Block\(.* adds up something else",
        ),
    ],
)
def test_what_cannot_be_is_refused(keywords, message):
    model = stack(layers=2)
    state = state_of(model)
    with pytest.raises(ValueError, match=message):
        oneshot(model, data(), 0.5, **{"choose": "gates", "solver": "wanda", **keywords})
    assert is_unchanged(model, state)


def test_a_loss_that_is_not_finite_and_a_model_of_inference_mode_are_refused():
    class Overflowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = stack(layers=2)

        def forward(self, x):
            its = self.inner(x)
            return its / its.new_zeros(()) if torch.is_grad_enabled() else its

    with pytest.raises(ValueError, match="from the dense ones is not finite: leave out choose"):
        oneshot(Overflowing(), data(), 0.5, choose="gates", solver="wanda")
    with torch.inference_mode():
        model = stack(layers=2)
        with pytest.raises(
            ValueError, match=r"Stack was made in torch.inference_mode, where nothing learns; make or load"
        ):
            oneshot(model, data(), 0.5, choose="gates")


def test_a_solver_that_gives_another_mask_than_the_one_that_was_chosen_is_named():
    model, batches = SUBJECTS["stack"]()
    asked = kept_by(copy.deepcopy(model), batches, MAGNITUDE)
    with pytest.raises(ValueError, match=r"layers.0.up.weight: broken gave another mask than the one that was chosen"):
        kept_by(model, batches, broken, asked)
    assert Chosen(asked["layers.0.up.weight"]).density == 1


# ---- of a directory -------------------------------------------------------------------------------------------------


class StopError(Exception):
    """Stands for a kill."""


def stopping(_):
    raise StopError


def test_of_a_directory_a_run_goes_on_with_the_masks_to_the_same_bytes(tmp_path, monkeypatch):
    make("llama").save_pretrained(tmp_path / "dense")
    how = {"pattern": "2:4", "solver": "wanda", "choose": "gates"}
    monkeypatch.setattr(LearntMasks, "taken", True)  # also where they gain nothing in so few steps
    done = oneshot(tmp_path / "dense", batches_of("llama"), out=tmp_path / "whole", **how)
    with pytest.raises(StopError):
        oneshot(tmp_path / "dense", batches_of("llama"), out=tmp_path / "out", on_layer=stopping, **how)
    place = tmp_path / "out.unfinished"
    assert "gates" in json.loads((place / "journal.json").read_text())["facts"]
    with pytest.raises(CheckpointError, match="choose"):
        oneshot(tmp_path / "dense", batches_of("llama"), out=tmp_path / "out", pattern="2:4", solver="wanda")
    with monkeypatch.context() as context:
        context.delattr(pruning, "_learn")  # they are there
        again = oneshot(tmp_path / "dense", batches_of("llama"), out=tmp_path / "out", **how)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not place.exists()
    assert again.gates == done.gates
    assert json.loads((tmp_path / "out/secateur.json").read_text())["choose"] == "gates"
    assert not verify_checkpoint(tmp_path / "out", tmp_path / "dense").problems
    model = LlamaForCausalLM.from_pretrained(tmp_path / "dense").eval()
    mine = oneshot(model, batches_of("llama"), **how)
    assert mine.gates.losses == pytest.approx(done.gates.losses)
    written = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(zeros, zeros_of(written)[name]) for name, zeros in zeros_of(model).items())


def test_masks_that_were_damaged_meanwhile_are_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(LearntMasks, "taken", True)
    make("llama").save_pretrained(tmp_path / "dense")
    how = {"pattern": "2:4", "solver": "wanda", "choose": "gates", "out": tmp_path / "out"}
    with pytest.raises(StopError):
        oneshot(tmp_path / "dense", batches_of("llama"), on_layer=stopping, **how)
    state = tmp_path / "out.unfinished/state.safetensors"
    for damage in (lambda: state.write_bytes(b"nothing"), state.unlink):
        damage()
        with pytest.raises(CheckpointError, match=r"state.safetensors: is not what was written there. Remove .* over"):
            oneshot(tmp_path / "dense", batches_of("llama"), **how)


def test_what_is_said_of_masks_is_whole():
    its = LearntMasks(1, 0.5, 0.25, (0.5,), solved_before=0.125, solved_after=0.0625)
    assert its.taken
    assert its.in_words().startswith("The masks are those that were learnt: in the end the outputs lose 0.0625 on")
