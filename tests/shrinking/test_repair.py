"""What a walk over the model that becomes smaller does: columns leave, and the others take over what they gave."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.coupling import find_coupling
from secateur.models import InMemory, parts_of
from secateur.models.replay import SameRows
from secateur.shrinking import calibrated, repair
from secateur.shrinking.apply import carry_out
from secateur.shrinking.measure import Measuring, counts_of
from secateur.shrinking.plan import Plan
from secateur.shrinking.repair import Repairing, free_in, rescaled
from support.measured import TwoStage, answers, apart, text, words
from support.unchanged import is_unchanged, state_of


class Looking(Repairing):
    """Notes of each matrix what met it, what it was, and what it became; and how its bias moved."""

    seen = None

    def solve_stage(self, block, module, stage, found):
        solved, said = super().solve_stage(block, module, stage, found)
        self.seen = {} if self.seen is None else self.seen
        self.moved = {} if self.seen == {} else self.moved
        for piece, met in found.items():
            if met.bias is not None and met.bias.name in solved:
                old, new = (
                    met.bias.of(each) for each in (module.get_parameter(met.bias.name), solved[met.bias.name][0])
                )
                self.moved[f"{block}.{piece.name}"] = new.double() - old.double()
        for piece, met in found.items():
            if piece.name in solved:
                old, new = piece.of(stage[piece.name]).clone(), piece.of(solved[piece.name].values).clone()
                self.seen[f"{block}.{piece.name}"] = old, new, piece.of(solved[piece.name].mask), met
        return solved, said


def walked(model, batches, share=0.6, groups=lambda group: True, **options):
    """The job after both walks, with a share of the units of some groups chosen."""
    coupling = find_coupling(model, batches[0])
    chosen = [group for group in coupling.groups if groups(group)]
    measuring = Measuring(coupling, chosen)
    InMemory(model, batches).walk(measuring)
    measured = measuring.measured
    kept = {}
    for group in chosen:
        if group.name in measured.consumers:
            ranks = measured.scores[group.name].argsort(descending=True).numpy()
            kept[group.name] = np.zeros(group.size, dtype=bool)
            kept[group.name][ranks[: max(1, round(share * group.size))]] = True
    left = [group for group in chosen if group.name in kept]
    job = Looking(coupling, left, kept, measured, free_in(model, parts_of(model)), **options)
    InMemory(model, batches).walk(job)
    return job


WITH_BIASES = {f"blocks.{at}.{name}.weight" for at in range(2) for name in ("up", "down")}


def inner(group):
    """The units of MLPs, heads and what is within them; not the stream."""
    return len(group.members) < 6


def lost(old, new, met, aim, moved=None):
    """``‖X W'ᵀ + b' - b - T‖²`` but for what depends on T alone."""
    gram, wide = met.sums.gram.double(), new.double()
    towards = old.double() @ gram + (0 if met.residual_cross is None else aim * met.residual_cross.double())
    found = float((wide @ gram * wide).sum() - 2 * (wide * towards).sum())
    if moved is None:
        return found
    means = (wide - old.double()) @ met.sums.totals.double() - (
        0 if met.residual_sum is None else aim * met.residual_sum.double()
    )
    return found + float(2 * (moved * means).sum() + met.tokens * moved.square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_no_matrix_is_further_from_what_is_aimed_at_than_without_repair(dtype, share):
    """On the calibration, after rounding; most are much nearer."""
    job = walked(words(dtype=dtype), text(), share, inner)
    assert {name.split(".")[2] for name in job.seen} == {"q", "k", "v", "o", "up", "down"}
    nearer = 0
    for name, (old, new, mask, met) in job.seen.items():
        assert (new[~mask] == 0).all()
        plain = old * mask.to(old.dtype)
        before, after = lost(old, plain, met, job.aim), lost(old, new, met, job.aim, job.moved.get(name))
        assert after <= before + 1e-9 * abs(before)
        nearer += not torch.equal(new, plain)
    assert nearer >= 3
    assert set(job.moved) <= WITH_BIASES


def test_what_the_bias_can_give_it_gives():
    """No other bias is nearer to what is aimed at, but for what damping takes; without one more is lost."""
    job = walked(words(), text(), 0.5, inner)
    assert set(job.moved) == WITH_BIASES
    for name, moved in job.moved.items():
        old, new, _, met = job.seen[name]
        assert lost(old, new, met, job.aim, moved) < lost(old, new, met, job.aim)
        means = (old - new).double() @ met.sums.totals.double()
        best = (means + (0 if met.residual_sum is None else job.aim * met.residual_sum.double())) / met.tokens
        torch.testing.assert_close(moved, best, rtol=0.05, atol=0.05 * float(best.abs().max()))


def test_without_a_bias_none_is_made_and_one_of_several_products_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False)
            self.both = nn.Parameter(torch.randn(8))

        def forward(self, x):
            h = self.up(x).relu()
            one = nn.functional.linear(h, self.one.weight, self.both)
            return x + one + nn.functional.linear(h, self.two.weight, self.both).relu()

    torch.manual_seed(0)
    model = nn.Sequential(*(Twice() for _ in range(2)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [torch.randn(20, 8) for _ in range(3)]
    job = walked(model, batches, 0.5, lambda group: group.size == 12)
    assert set(job.moved) == {"1.up.weight"}  # what reaches the first one is as it was
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        *(f"{at}.{name}.weight" for at in range(2) for name in ("one", "two")),
        *("1.up.weight", "1.up.bias"),
    }


def test_without_repair_columns_are_zeros_and_nothing_else_moves():
    job = walked(words(), text(), 0.5, inner, repair=False)
    assert job.seen
    for old, new, mask, met in job.seen.values():
        assert torch.equal(new, old * mask)
        assert met.residual_cross is None  # so the dense model is not run beside


def test_matrices_that_lose_nothing_are_aimed_at_the_dense_stream_too():
    """Those of the first block meet what they always met, and stay to the last bit; without repair or an aim all do."""
    model = words()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = [f"blocks.{{}}.{name}.weight" for name in ("q", "k", "v", "up")]
    job = walked(model, text(), 0.5, inner)
    for name in whole:
        assert torch.equal(model.get_parameter(name.format(0)), before[name.format(0)]) == (name != whole[-1])
        old, new, mask, met = job.seen[name.format(1)]
        assert mask.all()
        assert lost(old, new, met, job.aim) < lost(old, old, met, job.aim)
    for options in ({"aim": 0.0}, {"repair": False}):
        assert {name.split(".")[2] for name in walked(words(), text(), 0.5, inner, **options).seen} == {"o", "down"}


def test_an_embedding_that_is_a_head_too_only_loses_columns():
    """What least squares made of the head would change what the model embeds."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.up, self.down = nn.Embedding(30, 16), nn.Linear(16, 24), nn.Linear(24, 16)
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            x = self.embedding(ids)
            return self.head(x + self.down(self.up(x).relu()))

    torch.manual_seed(0)
    model = Tied()
    before = model.embedding.weight.detach().clone()
    job = walked(model, [torch.randint(30, (8, 12)) for _ in range(4)], 0.5, lambda group: group.size == 16)
    kept = next(iter(job.kept.values()))
    assert 0 < kept.sum() < 16
    assert torch.equal(model.embedding.weight[:, torch.from_numpy(kept)], before[:, torch.from_numpy(kept)])
    assert not torch.equal(*job.seen[".up.weight"][:2])  # which lost no row, and reads fewer


@pytest.mark.parametrize("repair", [True, False])
def test_errors_are_of_each_matrix_with_the_values_that_it_has(repair):
    """Those of the first matrix, whose residual is zero yet, counted by hand."""
    job = walked(words(), text(), 0.5, inner, repair=repair)
    assert set(job.errors) == set(job.seen)
    assert all(0 <= error < 10 for error in job.errors.values())
    old, new, _, met = job.seen["blocks.0.o.weight"]
    change = (new - old).double()
    lost = (change @ met.sums.gram.double() * change).sum(1)  # it has no bias
    assert job.errors["blocks.0.o.weight"] == pytest.approx(float((lost * counts_of(old, met)).sum()), rel=1e-6)


# ---- Normalizations over a width that lost entries keep the scale of what stays. ----


WIDTH, LEAVES = 8, 2


class ByHand(nn.Module):
    """As transformers writes it; Gemma multiplies with 1 + weight."""

    def __init__(self, width, one=0.0):
        super().__init__()
        self.weight, self.one = nn.Parameter(torch.ones(width) - one), one

    def forward(self, x):
        return (self.one + self.weight) * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-12).rsqrt())


NORMS = {
    "rms": lambda width: nn.RMSNorm(width, eps=1e-12),
    "by hand": ByHand,
    "gemma": lambda width: ByHand(width, 1.0),
    "layer": nn.LayerNorm,
}


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stream(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.enter = nn.Linear(5, WIDTH, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(norm) for _ in range(2)), norm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stream(kind):
    """Of which two entries are zero, whatever comes."""
    torch.manual_seed(0)
    model = Stream(NORMS[kind]).double()
    with torch.no_grad():
        for weight in (model.enter.weight, *(block.down.weight for block in model.blocks)):
            weight[[1, 6]] = 0
        for module in model.modules():
            if hasattr(module, "weight") and module.weight.dim() == 1:
                module.weight += torch.rand(WIDTH) / 2
    return model


@pytest.mark.parametrize("kind", ["rms", "by hand", "gemma"])
def test_entries_that_were_always_zero_leave_and_nothing_else_changes(kind, monkeypatch):
    """The mean square of the others is larger by the share that left, and the weights make up for exactly that."""
    given = [torch.randn(30, 5).double() for _ in range(4)]
    model = stream(kind)
    dense = copy.deepcopy(model)
    wanted = answers(model, given)
    whole = {"target": "units", "include": "enter.weight", "batches": given, "round_to": 1}
    shrink(model, given[0], LEAVES / WIDTH, **whole)
    assert model.enter.out_features == WIDTH - LEAVES
    assert apart(model, given, wanted) < 1e-6
    monkeypatch.setattr(calibrated, "rescaled", lambda *_: {})
    shrink(dense, given[0], LEAVES / WIDTH, **whole)
    assert apart(dense, given, wanted) > 0.01


def rescale(model, plan, batches, **how):
    host = InMemory(model, batches, blocks={}, **how)
    host.change(rescaled(host, plan))


def cut(width, kept, *names, numbers=()):
    return Plan({name: ((width,), {0: np.array(kept)}) for name in names}, list(numbers))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_stays_is_nearer_to_what_it_was(kind, dtype):
    torch.manual_seed(0)
    norm = NORMS[kind](WIDTH).to(dtype)
    kept = [0, 2, 3, 5, 7]
    scale = torch.linspace(0.5, 2, WIDTH)
    scale[[1, 4, 6]] = 0.2  # what leaves is small
    given = [((torch.randn(50, WIDTH) + 0.3) * scale).to(dtype) for _ in range(3)]
    numbers = [(("it", "normalized_shape", 0), WIDTH, len(kept))] if kind in ("rms", "layer") else []
    names = [f"it.{name}" for name, _ in norm.named_parameters()]
    plan = cut(WIDTH, kept, *names, numbers=numbers)
    lost = []
    for moves in (False, True):
        holder = nn.Sequential()
        holder.add_module("it", copy.deepcopy(norm))
        with torch.no_grad():
            wanted = [holder(each)[:, kept].double() for each in given]
            if moves:
                rescale(holder, plan, given)
            carry_out(holder, plan, None)
            found = [holder(each[:, kept]).double() for each in given]
        lost.append(float(sum((one - two).square().sum() for one, two in zip(found, wanted, strict=True))))
    assert lost[1] < 0.6 * lost[0]


def test_padding_does_not_count():
    torch.manual_seed(0)
    kept, found = [0, 1, 2, 4], []
    plan = cut(6, kept, "0.weight", numbers=[(("0", "normalized_shape", 0), 6, 4)])
    tokens = torch.randn(2, 5, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    for padding in (0.0, 100.0):
        model = nn.Sequential(nn.RMSNorm(6))
        given = torch.where(mask.bool()[..., None], tokens, torch.tensor([padding, 0, 0, 1, 0, 0]))
        rescale(model, plan, [{"x": given, "attention_mask": mask}], forward=lambda model, batch: model(batch["x"]))
        found.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0][kept], torch.ones(4))
    assert torch.equal(found[0][[3, 5]], torch.ones(2))  # they leave


@pytest.mark.parametrize("length", [6, 4])
def test_a_norm_over_channels_of_pictures_does_not_move_also_where_rows_are_as_long(length):
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(1, 6))
    state = state_of(model)
    numbers = [(("0", "num_channels"), 6, 4)]
    rescale(model, cut(6, [0, 1, 2, 5], "0.weight", "0.bias", numbers=numbers), [torch.randn(3, 6, 5, length)])
    assert is_unchanged(model, state)
    rescale(model, cut(6, [0, 1, 2, 5], "0.weight", "0.bias", numbers=numbers), [torch.randn(9, 6)])
    assert not is_unchanged(model, state)  # there it is one over rows


@pytest.mark.parametrize("module", [nn.PReLU(6), nn.BatchNorm1d(6), ByHand(6)], ids=["prelu", "batch", "whole"])
def test_where_nothing_else_is_counted_nothing_moves(module):
    model = nn.Sequential(module)
    names = [f"0.{name}" for name, _ in module.named_parameters()]
    numbers = [(("0", "num_parameters"), 6, 4)] if isinstance(module, nn.PReLU) else []
    plan = cut(6, [0, 1, 2, 5], *names, numbers=numbers) if not isinstance(module, ByHand) else Plan({}, [])
    state = state_of(model)
    rescale(model, plan, [torch.randn(9, 6)])
    assert is_unchanged(model, state)


def test_a_stream_that_narrows_is_nearer_to_what_it_was(monkeypatch):
    """Of a model of words with layer normalizations; on other text of the same kind."""
    other, error = text(seed=7), []
    wanted = answers(words(), other)
    for without in (False, True):
        if without:
            monkeypatch.setattr(calibrated, "rescaled", lambda *_: {})
        model = words()
        shrink(model, text()[0], 0.25, target="units", include="embed.weight", batches=text(), round_to=1)
        error.append(apart(model, other, wanted))
    assert error[0] < error[1]


def test_outside_of_blocks_a_module_is_tried_once(monkeypatch):
    """To try it runs it: what watches it must not begin to try again."""
    norm, kept, tried = nn.Sequential(nn.LayerNorm(WIDTH)), [0, 2, 3, 5, 7], []
    smaller = repair._smaller
    monkeypatch.setattr(repair, "_smaller", lambda *given: tried.append(given[1]) or smaller(*given))
    plan = cut(WIDTH, kept, "0.weight", "0.bias", numbers=[(("0", "normalized_shape", 0), WIDTH, len(kept))])
    rescale(norm, plan, [torch.randn(9, WIDTH)])
    assert tried == ["0"]


def test_rows_that_the_model_selects_are_compared_with_those_that_the_dense_one_selects():
    torch.manual_seed(0)
    model, batches = TwoStage(), [{"x": torch.randn(9, 17, 6)} for _ in range(4)]
    given = [{**batch, "rows": model.select(**batch)[1]} for batch in batches]
    found, wanted = (
        shrink(copy.deepcopy(model), each[0], 0.7, include="first.*", target="units", round_to=1, batches=each).model
        for each in (batches, given)
    )
    assert found.first.out_features < 24
    assert not torch.equal(found.select(**batches[0])[1], given[0]["rows"])
    torch.testing.assert_close(found.state_dict(), wanted.state_dict())


def test_an_axis_that_is_as_long_as_one_of_a_parameter_is_none_of_rows():
    def places(rows, length):
        known, place = {}, lambda: None
        scores, empty = torch.randn(2, length), (torch.empty(0), torch.empty(0).long())
        with SameRows({7}, known, records=True, place=place):
            dense = scores.topk(rows)
        with SameRows({7}, known, records=False, place=place):
            return dense, torch.topk(-scores, rows), torch.topk(scores, rows, out=empty)

    dense, again, plain = places(3, 8)
    assert torch.equal(again.indices, dense.indices)
    assert torch.equal(again.values, -dense.values)
    assert torch.equal(plain.indices, dense.indices)
    dense, again, _ = places(3, 7)
    assert bool((again.values[:, 0] > -dense.values[:, 0]).all())


def test_what_is_selected_from_is_found_beside_the_rows():
    known, place, scores, boxes = {}, lambda: None, torch.randn(2, 8), torch.rand(8, 4)
    theirs, ours, given = {}, {}, scores.clone()
    with SameRows({7}, known, records=True, place=place, scores=theirs):
        given.topk(3)
        given.zero_()  # as a loop that selects the best again and again does
        torch.randn(2, 7).topk(3)
        torch.arange(8).topk(3)
        torch.ops.laws.nms(boxes, scores[0], 0.0)
    with SameRows({7}, known, records=False, place=place, scores=ours):
        (-scores).topk(3)
        torch.randn(2, 9).topk(3)
    assert len(known) == 3
    ((key, found),) = theirs.items()
    assert torch.equal(found, scores)
    assert torch.equal(ours.pop(key), -scores)
    assert not ours.keys() & known.keys()


@torch.library.custom_op("laws::nms", mutates_args=())
def suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """As that of torchvision, which need not be there: any number of rows, the best first."""
    order = scores.argsort(descending=True)
    return order[scores[order] > threshold].clone()


def test_boxes_that_suppression_leaves_are_those_of_the_dense_model():
    known, place, boxes, scores = {}, lambda: None, torch.rand(8, 4), torch.rand(8)
    with SameRows({8}, known, records=True, place=place):
        dense = torch.ops.laws.nms(boxes, scores, 0.5)
    with SameRows({8}, known, records=False, place=place):
        assert torch.equal(torch.ops.laws.nms(boxes, 1 - scores, 0.5), dense)
        fewer = torch.ops.laws.nms(boxes[:3], 1 - scores[:3], 0.5)
    assert torch.equal(fewer, suppressed(boxes[:3], 1 - scores[:3], 0.5))
