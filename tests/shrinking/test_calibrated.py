"""Laws of `shrink` with data: what is chosen, what is repaired, and that a call that fails changes nothing."""

import copy
import functools
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur import fit, oneshot, shrink
from secateur.kinds import Branches
from secateur.models import InMemory
from secateur.shrinking import Memory, WithoutDataWarning, calibrated, remembering, verify_shrunken
from secateur.shrinking import measure as measuring
from secateur.shrinking import repair as repairing
from secateur.shrinking import request as subject
from secateur.solvers import eliminated
from support.fitting import blocks, inputs
from support.measured import Attending, Words, answers, apart, loss_of, text, trained, words
from support.stacks import Stack, data, stack
from support.unchanged import is_unchanged, state_of


@pytest.fixture(scope="module")
def batches():
    return text()


def counts(done):
    return {group.name: int(done.kept[group.name].sum()) for group in done.scope.groups if group.name in done.kept}


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, other):
    one, two = model.state_dict(), other if isinstance(other, dict) else other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# ---- swaps ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("repair", [True, False])
def test_swaps_leave_as_many_units_and_lose_no_more_in_any_group(repair, batches, monkeypatch):
    curves = []

    def spied(layers, keep, chunk=1, swaps=0):
        left, curve = eliminated(layers, keep, chunk, swaps)
        curves.append((swaps, curve))
        return left, curve

    monkeypatch.setattr(repairing, "eliminated", spied)
    how = {"batches": batches, "exclude": "embed*", "repair": repair}
    plain = shrink(words(), batches[0], 0.3, **how)
    assert {swaps for swaps, _ in curves} == {0}
    curves.clear()
    swapped = shrink(words(), batches[0], 0.3, **how, choose="swaps")
    assert counts(plain) == counts(swapped)
    assert swapped.gates == {}
    for swaps, curve in curves:
        assert swaps >= 1
        assert curve[-1][1] <= curve[-2][1] * (1 + 1e-6)
    assert same(shrink(words(), batches[0], 0.3, **how, choose="swaps").model, swapped.model)


def test_swaps_are_of_units_and_by_data(batches):
    model = words()
    with pytest.raises(ValueError, match="swaps need real inputs; pass batches="):
        shrink(model, batches[0], 0.3, choose="swaps")
    with pytest.raises(ValueError, match="swaps are of units; say by sparsity= how many leave"):
        shrink(model, batches[0], batches=batches, leave=Branches(1), choose="swaps")


# ---- nothing removed, and what costs nothing ------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_removed_changes_nothing(dtype, batches):
    model = words(dtype=dtype)
    state = state_of(model)
    done = shrink(model, batches[0], 0.0, batches=batches)
    assert is_unchanged(model, state)
    assert done.got == 0
    assert all(mask.all() for mask in done.kept.values())


def test_what_is_excluded_stays_bit_for_bit(batches):
    """Also what takes no part in what leaves: only consumers of the groups that lost units are repaired."""
    model = words()
    before = states(model)
    done = shrink(model, batches[0], 0.05, batches=batches, include="blocks.1.up.bias")
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    (group,) = [group for group in done.scope.groups if group.name in done.kept]
    kept = torch.from_numpy(done.kept[group.name])
    assert torch.equal(model.blocks[1].up.weight, before["blocks.1.up.weight"][kept])  # rows are sliced, not repaired
    state = state_of(model)
    with pytest.raises(ValueError, match="nothing of the model can leave"):
        shrink(model, batches[0], 0.05, batches=batches, exclude="*")
    assert is_unchanged(model, state)


@pytest.mark.parametrize("kind", ["copies", "combinations", "dead", "constant"])
def test_units_that_others_can_replace_leave_without_error(kind):
    """Half of each MLP's units are functions of the other half, and half is asked for."""
    model = stack(layers=2).double()
    calibration = [each.double() for each in data(count=6, size=40)]
    with torch.no_grad():
        for block in model.layers:
            if kind == "copies":
                block.up.weight[6:], block.up.bias[6:] = 3 * block.up.weight[:6], 3 * block.up.bias[:6]
            elif kind == "combinations":
                block.forward = functools.partial(lambda block, x: x + block.down(block.up(x)), block)
                mixing, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
                block.up.weight[6:], block.up.bias[6:] = mixing @ block.up.weight[:6], mixing @ block.up.bias[:6]
            else:  # a bias gives what a constant gives
                block.up.weight[6:], block.up.bias[6:] = 0, -1 if kind == "dead" else torch.rand(6)
    wanted = answers(model, calibration)
    half = sum(6 * (8 + 1 + 8) for _ in model.layers) / sum(each.numel() for each in model.parameters())
    done = shrink(model, calibration[0], half, batches=calibration, include="layers.*.up.bias", uniform=True)
    assert list(counts(done).values()) == [6, 6]
    assert apart(model, calibration, wanted) < 1e-6


# ---- what data is worth ---------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_trained_model_keeps_more_of_what_it_learned():
    """Which of three words follow a word; so much is lost with repair, without, and by magnitude."""
    model, judged, calibration = trained(), text(seed=9, count=8), text(count=12, seed=5)
    whole = float(loss_of(model, judged))
    assert whole < 1.0  # of 16 words, chance is 2.8
    lost = {
        name: float(loss_of(shrink(copy.deepcopy(model), judged[0], 0.4, **how).model, judged)) - whole
        for name, how in {
            "repaired": {"batches": calibration},
            "chosen": {"batches": calibration, "repair": False},
            "magnitude": {},
        }.items()
    }
    assert lost["repaired"] < 0.7 * lost["chosen"]
    assert lost["repaired"] < 0.5 * lost["magnitude"]


# ---- the same for the same ------------------------------------------------------------------------------------------
def test_the_same_tokens_in_other_batches_come_to_the_same(batches, monkeypatch):
    """To the rounding of sums; slopes are of the first batches, and drawn."""
    monkeypatch.setattr(InMemory, "slopes", lambda *_: {})
    tokens = torch.cat(batches)
    model, other = words(dtype=torch.float64), words(dtype=torch.float64)
    first = shrink(model, batches[0], 0.2, batches=batches)
    second = shrink(other, batches[0], 0.2, batches=[*tokens.split(7)])
    assert counts(first) == counts(second)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_padding_does_not_count(batches):
    """Rows of other lengths, padded with a word that would change everything."""
    lengths = [12, 7, 9]
    masks = [torch.tensor([[at < length for at in range(12)] for length in lengths]).long() for _ in batches]
    one, two = (
        [
            {"input_ids": torch.where(mask.bool(), each, padding), "attention_mask": mask}
            for each, mask in zip(batches, masks, strict=True)
        ]
        for padding in (0, 13)
    )
    model, other = words(dtype=torch.float64), words(dtype=torch.float64)
    first = shrink(model, batches[0], 0.2, batches=one)
    second = shrink(other, batches[0], 0.2, batches=two)
    assert counts(first) == counts(second)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_are_solved_wide_and_rounded_once(dtype, batches):
    """What leaves is what leaves of the same weights in float32, and the repaired ones are no further off than the
    rounding of the inputs that they were solved on."""
    model = words(dtype=dtype)
    wide = copy.deepcopy(model).float()
    done = shrink(model, batches[0], 0.08, batches=batches, include="blocks.0.up.bias")
    exact = shrink(wide, batches[0], 0.08, batches=batches, include="blocks.0.up.bias")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert counts(done) == counts(exact)
    assert model.blocks[0].down.weight.isfinite().all()


# ---- what can be asked for beside it --------------------------------------------------------------------------------
class Shared(Words):
    """Two blocks that share one matrix; the others are their own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.blocks[1].down.weight = self.blocks[0].down.weight


def test_a_matrix_that_two_blocks_share_is_not_repaired_for_one_of_them(batches):
    """Nothing holds what reaches it in both; so its units leave last."""
    torch.manual_seed(0)
    model = Shared().eval()
    before = states(model)
    done = shrink(model, batches[0], 0.1, batches=batches)
    assert model.blocks[0].down.weight is model.blocks[1].down.weight
    found = counts(done)
    assert all(count == 20 for name, count in found.items() if "up.weight" in name)
    assert torch.equal(model.blocks[0].down.weight, before["blocks.0.down.weight"])
    assert done.got == pytest.approx(0.1, abs=0.03)


class Headed(Stack):
    """With a head of two layers, outside the blocks: nothing is known of its units."""

    def __init__(self):
        super().__init__()
        self.head = Head()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 10), nn.Linear(10, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_units_of_which_nothing_is_known_leave_last():
    torch.manual_seed(0)
    model, far = Headed(), Headed()
    found = counts(shrink(model, data()[0], 0.3, batches=data(), exclude="enter.*"))
    assert found["head.first.weight"] == 10
    assert min(found[f"layers.{at}.up.weight"] for at in range(3)) < 12
    # when nothing else is left to leave
    assert counts(shrink(far, data()[0], 0.8, batches=data(), exclude="enter.*"))["head.first.weight"] < 10


def test_branches_leave_first(batches):
    model = words()
    done = shrink(model, batches[0], 0.4, batches=batches, leave=Branches(0.25))
    assert len(done.plans) == 2
    assert done.got == pytest.approx(0.4, abs=0.05)
    assert model(batches[0]).isfinite().all()


# ---- the proof, and calls that fail ---------------------------------------------------------------------------------
def test_the_structure_is_proved_before_any_weight_changes(batches, monkeypatch):
    model = words()
    state, seen = state_of(model), []
    proof = subject.wrong_groups

    def spy(*arguments):
        seen.append(is_unchanged(model, state))
        return proof(*arguments)

    monkeypatch.setattr(subject, "wrong_groups", spy)
    shrink(model, batches[0], 0.3, batches=batches)
    assert seen
    assert all(seen)


def test_what_the_proof_objects_to_stays(batches, monkeypatch):
    model = words()
    objected = []

    def wrong(model, coupling, groups, kept, inputs):
        found = [group for group in groups if group.name == "blocks.0.up.weight"]
        objected.extend(found)
        return found

    monkeypatch.setattr(subject, "wrong_groups", wrong)
    before = states(model)
    done = shrink(model, batches[0], 0.2, batches=batches)
    assert objected
    assert "blocks.0.up.weight" not in counts(done)
    assert torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])
    assert torch.equal(model.blocks[0].down.weight, before["blocks.0.down.weight"])


def test_slices_are_those_of_a_model_whose_entries_are_zero(batches):
    """The plan is that of the units that stayed, whichever they are: the smaller model passes the proof again."""
    dense, model = words(), words()
    shrink(model, batches[0], 0.3, batches=batches)
    verify_shrunken(dense, model, batches[0])


class Failing:
    """Batches' `forward` that raises at its n-th call."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self, model, batch):
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("no more")
        return model(batch)


@pytest.mark.parametrize("share", [0.1, 0.45, 0.7, 0.99])
def test_a_call_that_fails_leaves_everything_as_it_was(share, batches):
    """Wherever it fails in the two walks."""
    count = Failing(-1)
    shrink(words(), batches[0], 0.3, batches=batches, forward=count)
    model = words()
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model)
    with pytest.raises(RuntimeError, match="no more"):
        forward = Failing(int(share * count.calls) + 1)
        shrink(model, batches[0], 0.3, batches=batches, forward=forward, optimizer=optimizer)
    assert is_unchanged(model, state)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model.training
    assert torch.equal(model(batches[0]), words()(batches[0]))


@pytest.mark.parametrize("more", [{}, {"leave": "branches:30%"}], ids=["units", "branches"])
def test_a_batch_of_another_shape_is_named(batches, more):
    model = words()
    state = state_of(model)
    wrong = [*batches, torch.zeros(3, dtype=torch.float32)]
    with pytest.raises(ValueError, match=rf"on batch {len(batches)} of {len(wrong)} \(shape \(3,\), float32\)"):
        shrink(model, batches[0], 0.3, batches=wrong, **more)
    assert is_unchanged(model, state)


# ---- what cannot be asked for, and what is said ---------------------------------------------------------------------
def test_no_batches(batches):
    model = words()
    state = state_of(model)
    with pytest.raises(ValueError, match="there are no batches"):
        shrink(model, batches[0], 0.3, batches=[])
    with pytest.raises(ValueError, match="the batches hold no token and no sample"):
        shrink(model, batches[0], 0.3, batches=[each[:0] for each in batches])
    assert is_unchanged(model, state)


def test_repair_takes_one_pass_of_the_calibration_beyond_the_walk(monkeypatch):
    """It is watched, and gives what the next block needs; beside it slopes are of a few batches."""
    monkeypatch.setattr(measuring, "_TOKENS", 1)
    batches, run = text(count=12), Counter()
    forward = Attending.forward

    def counting(self, x, mask=None):
        if x.shape == (3, 12, 12):
            run[id(self)] += 1
        return forward(self, x, mask)

    monkeypatch.setattr(Attending, "forward", counting)
    whole, less = words(layers=3), words(layers=3)
    oneshot(whole, batches, 0.5)
    walk = [run[id(block)] for block in whole.blocks]
    shrink(less, batches[0][:1], 0.2, batches=batches)
    slopes, once = 4, 2
    for block, count in zip(less.blocks, walk, strict=True):
        assert run[id(block)] <= count + len(batches) + slopes + once


def test_a_model_without_blocks_is_walked_layer_by_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        model[0].weight[3:].copy_(model[0].weight[:3])  # copies
    x = torch.randn(16, 1, 6, 6)
    wanted = model(x)
    done = shrink(model, x[:1], 0.5, batches=[x, torch.randn(16, 1, 6, 6)], target="units", include="0.weight")
    assert model[0].out_channels == 3
    assert done.got == 0.5
    torch.testing.assert_close(model(x), wanted, rtol=1e-3, atol=1e-3)


class Features(nn.Module):
    """What goes in is multiplied by a matrix that is a buffer, such as a filter bank."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(8, 2)
        self.register_buffer("bank", torch.randn(16, 8))

    def forward(self, x):
        return self.down(self.up(x).relu() @ self.bank)


@pytest.mark.parametrize("verb", ["shrink", "fit"])
def test_a_matrix_that_is_a_buffer_loses_units_and_is_not_repaired(verb):
    torch.manual_seed(0)
    model, given = Features().eval(), [torch.randn(32, 6) for _ in range(3)]
    bank = model.bank.clone()
    if verb == "fit":
        fit(model, given, budget={"params": 0.6}, example_inputs=given[0])
    else:
        shrink(model, given[0], 0.4, batches=given)
    rows, columns = model.bank.shape
    assert (rows, columns) == (model.up.out_features, model.down.in_features)
    assert rows * columns < bank.numel()
    places = (bank.flatten() == model.bank.reshape(-1, 1)).nonzero()[:, 1].view(rows, columns)
    assert (places // 8 == places[:, :1] // 8).all()
    assert (places % 8 == places[:1] % 8).all()


def test_what_a_recurrent_layer_gives_is_made_up_for_by_what_reads_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LSTM(16, 8), Last(), nn.Linear(8, 3))
    dense = copy.deepcopy(model)
    batches = [torch.randn(5, 8, 4) for _ in range(4)]
    shrink(model, batches[0], 0.3, batches=batches)
    plain = copy.deepcopy(dense)
    shrink(plain, batches[0], 0.3)
    losses = [sum((each(x) - dense(x)).square().mean() for x in batches) for each in (model, plain)]
    assert losses[0] < losses[1]


class Last(nn.Module):
    def forward(self, found):
        return found[0]


def test_batches_that_run_no_block(batches):
    model = words()
    state = state_of(model)
    with pytest.raises(ValueError, match="data says nothing of what may leave Words: the batches ran none"):
        shrink(model, batches[0], 0.3, batches=batches, forward=lambda model, batch: model.embed(batch))
    assert is_unchanged(model, state)


def test_a_bias_that_several_blocks_hold_stays():
    model = stack(layers=2)
    model.layers[1].down.bias = model.layers[0].down.bias
    before = model.layers[0].down.bias.clone()
    shrink(model, data()[0], 0.3, batches=data(size=30), include="layers.*.up.bias")
    assert model.layers[1].down.bias is model.layers[0].down.bias
    assert torch.equal(model.layers[0].down.bias, before)


def test_a_weight_outside_the_blocks_that_is_infinite_is_named(batches):
    """The walk never multiplies with it; slopes would all be NaN."""
    model = words()
    with torch.no_grad():
        model.head.weight[3, 1] = torch.inf
    state = state_of(model)
    with pytest.raises(ValueError, match=r"head\.weight: the weight of shape \(16, 12\) has entries that are NaN"):
        shrink(model, batches[0], 0.3, batches=batches, verify=False)
    assert is_unchanged(model, state)


def test_slopes_that_overflow_are_told_of(batches, monkeypatch):
    """And losses are what they are without any."""

    def overflowing(*arguments, **keywords):
        return {piece: torch.full_like(each, torch.nan) for piece, each in slopes(*arguments, **keywords).items()}

    slopes = InMemory.slopes
    one, two = words(), words()
    monkeypatch.setattr(InMemory, "slopes", overflowing)
    with pytest.warns(RuntimeWarning, match=r"slopes .* along those of \S+ hold NaN .* wider dtype") as said:
        shrink(one, batches[0], 0.3, batches=batches)
    assert [Path(each.filename).name for each in said] == [Path(__file__).name]
    monkeypatch.setattr(InMemory, "slopes", lambda *_: {})
    shrink(two, batches[0], 0.3, batches=batches)
    assert same(one, two)


def test_a_glob_that_matches_nothing_is_an_error_before_any_batch_is_run(batches):
    def never(model, batch):
        raise AssertionError

    model = words()
    for globs in ({"include": "blocks.9.*"}, {"exclude": "blocks.9.*"}):
        with pytest.raises(ValueError, match=r"blocks\.9\.\*"):
            shrink(model, batches[0], 0.3, batches=batches, forward=never, **globs)


def is_warned(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [Path(each.filename).name for each in said if each.category is WithoutDataWarning]


def test_a_model_of_blocks_says_what_it_costs_to_have_no_data(batches):
    with pytest.warns(WithoutDataWarning, match=r"perplexity is 325 000, and was 15\. Pass batches="):
        shrink(words(), batches[0], 0.3)
    assert is_warned(lambda: shrink(words(), batches[0], 0.3)) == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = words()
        state = state_of(model)
        with pytest.raises(WithoutDataWarning):
            shrink(model, batches[0], 0.3)
        assert is_unchanged(model, state)  # before anything is done


# ---- What was measured once is what is measured again, to the last bit; all else is measured anew. ----


@pytest.fixture
def walks(monkeypatch):
    """The walks over a dense model that were made."""
    found, plain = [], calibrated.Measuring

    def counted(*args, **kwargs):
        found.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(calibrated, "Measuring", counted)
    return found


def shrunk(model, share, batches=None, **more):
    batches = inputs() if batches is None else batches
    return shrink(copy.deepcopy(model), batches[0], share, batches=batches, verify=False, **more).model


def alike(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("allocate", [None, "uniform"])
def test_copies_of_a_model_are_measured_once_and_come_out_as_if_each_were(walks, allocate):
    model, shares = blocks(3), (0.2, 0.4)
    alone = [shrunk(model, share, allocate=allocate) for share in shares]
    before = len(walks)
    assert before >= 2
    with remembering(Memory()):
        together = [shrunk(model, share, allocate=allocate) for share in shares]
    assert len(walks) - before == before // 2
    assert all(map(alike, alone, together))


def test_what_is_tried_and_what_is_not_are_two_things():
    """Where no slopes are known, losses are tried if they are asked for."""
    model, memory = blocks(3), Memory()
    alone = [shrunk(model, 0.3, allocate=allocate) for allocate in ("uniform", None)]
    for order in ((0, 1), (1, 0)):
        with remembering(memory):
            found = {at: shrunk(model, 0.3, allocate=("uniform", None)[at]) for at in order}
        assert all(alike(alone[at], each) for at, each in found.items())


@pytest.mark.parametrize("what", ["weights", "batches", "groups"])
def test_whatever_differs_is_measured_anew(walks, what):
    model, other, batches, more = blocks(3), blocks(3), inputs(), {}
    if what == "weights":
        with torch.no_grad():
            next(other.parameters()).view(-1)[0] += 1e-3
    elif what == "batches":
        batches = [each + 1e-3 for each in batches]
    else:
        more = {"exclude": "1.*"}
    with remembering(Memory()):
        shrunk(model, 0.2)
        before = len(walks)
        found = shrunk(other, 0.2, batches, **more)
        assert len(walks) > before
    assert alike(found, shrunk(other, 0.2, batches, **more))
