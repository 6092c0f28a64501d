"""What evidence takes is known by shapes before anything runs, and what is too large is summed in blocks, and named."""

import contextlib
import math

import pytest
import torch
from torch import nn

from secateur import NM, Block, Channels, Rows, Unstructured, oneshot, sensitivity, shrink
from secateur.evidence import collect
from secateur.models import InMemory, Pruned, bounds
from secateur.models.blocks import parts_of
from secateur.models.bounds import Demand, demands_of, form_of
from secateur.search import Sensitivity
from secateur.solvers import SolverWarning, from_criterion, sparsegpt
from support.families import batches as llama
from support.families import make

MB = 1_000_000


class Convolutions(nn.Module):
    """Of 8, 2 × 36, 512 and 384 inputs."""

    def __init__(self):
        super().__init__()
        self.enter, self.grouped = nn.Conv1d(1, 8, 8, padding=4), nn.Conv1d(8, 32, 9, padding=4, groups=2)
        self.wide, self.head = nn.Conv1d(32, 12, 16, stride=2), nn.Linear(384, 5)

    def forward(self, x):
        x = self.grouped(self.enter(x[:, None]).relu()).relu()
        return self.head(self.wide(x).relu().flatten(1)[:, :384])


def network(seed=0):
    torch.manual_seed(seed)
    return Convolutions().eval()


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 79, generator=generator) for _ in range(count)]


class Probe:
    """A job that keeps what it is given."""

    words, in_stages, beside_dense, around, changes = ("gram", "input_mean"), False, False, True, False

    def __init__(self, model):
        self.targets = {name for name, each in model.named_parameters() if each.dim() > 1}
        self.found = {}

    def solve_stage(self, block, module, stage, found):
        self.found.update(found)
        return {}, Pruned(block)

    def summed(self):
        return sum(met.sums.gram.nbytes for met in self.found.values())


def summed_in(model, monkeypatch, memory):
    """What a walk sums where so much is free; None: nothing says how much."""
    job = Probe(model)
    monkeypatch.setattr(bounds, "LEAST", 64)
    free(monkeypatch, memory)
    with contextlib.nullcontext() if memory is None else pytest.warns(SolverWarning, match="blocks of"):
        InMemory(model, batches()).walk(job)
    return job


@pytest.mark.parametrize("memory", [None, 30 * MB, 10 * MB, 7 * MB])
def test_what_shapes_say_is_what_is_summed(memory, monkeypatch):
    model = network()
    job = summed_in(model, monkeypatch, memory)
    demands, form = demands_of(model, parts_of(model), job)[""], form_of(model, parts_of(model), job)
    said = sum(each.entries(form.widths.get(name, each.inputs)) for name, each in demands.items())
    assert 4 * said == job.summed()
    assert (memory is None) == all(met.whole is None for met in job.found.values())


def test_a_weight_without_entries_asks_for_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[1].weight = nn.Parameter(torch.empty(4, 0))
    assert [*demands_of(model, parts_of(model), Probe(model))[""]] == ["0.weight"]
    assert form_of(model, parts_of(model), Probe(model)).widths == {}


def test_blocks_are_those_on_the_diagonal_of_the_whole_matrix(monkeypatch):
    model = network()
    whole, parts = summed_in(model, monkeypatch, None), summed_in(model, monkeypatch, 10 * MB)
    for piece, met in parts.found.items():
        of = met.whole or piece
        start = piece.offset - of.offset
        gram = whole.found[of].sums.gram[start : start + piece.shape[1], start : start + piece.shape[1]]
        torch.testing.assert_close(met.sums.gram, gram, rtol=1e-4, atol=1e-3)
        assert met.bias == whole.found[of].bias
        assert met.tokens == whole.found[of].tokens


def test_the_outputs_that_blocks_add_up_to_are_the_whole_products(monkeypatch):
    model = network()
    job, seen = summed_in(model, monkeypatch, 10 * MB), []
    model.wide.register_forward_hook(lambda *given: seen.append(given[-1]))
    with torch.no_grad():
        for batch in batches():
            model(batch)
    outputs = torch.cat(seen).movedim(1, -1).flatten(0, 1).double()
    around = next(met.around for piece, met in job.found.items() if piece.name == "wide.weight")
    torch.testing.assert_close(around.totals, outputs.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(around.squares, outputs.square().sum(0), rtol=1e-4, atol=1e-4)


def free(monkeypatch, count):
    monkeypatch.setattr(bounds, "free_memory", lambda _=None: count)


def masks_of(model):
    return {name: each != 0 for name, each in model.named_parameters() if each.dim() > 1}


@pytest.mark.parametrize(
    ("pattern", "sparsity"),
    [(Unstructured(), 0.37), (Rows(), 0.37), (NM(2, 4), None), (Block(4, 1), 0.5), (Unstructured(), 0.9)],
)
@pytest.mark.parametrize("solver", ["admm", "sparsegpt"])
def test_in_blocks_as_many_leave_as_of_the_whole(pattern, sparsity, solver, monkeypatch):
    whole, parts = network(), network()
    given = {"solver": solver, "pattern": pattern, "include": ["wide.weight", "head.weight"]}
    assert not oneshot(whole, batches(), sparsity, **given).warnings
    free(monkeypatch, 4 * MB)
    monkeypatch.setattr(bounds, "LEAST", 64)
    done = oneshot(parts, batches(), sparsity, **given)
    assert next(text.startswith("wide.weight: Gram matrix in 4 blocks of 128 inputs") for text in done.warnings)
    assert "wide.weight: Gram matrix in 4 blocks of 128 inputs" in str(done)
    ours, theirs = masks_of(parts), masks_of(whole)
    for name in ("wide.weight", "head.weight"):
        kept, wanted = (pattern.pool(each[name].float()) > 0 for each in (ours, theirs))
        assert torch.equal(kept.sum(1), wanted.sum(1))
    assert all(bool(each.isfinite().all()) for each in parts.parameters())


def distance(model, dense):
    with torch.no_grad():
        wanted = torch.cat([dense(batch) for batch in batches()])
        return float((torch.cat([model(batch) for batch in batches()]) - wanted).square().mean())


def test_blocks_repair_what_no_repair_leaves(monkeypatch):
    parts, plain, dense = network(), network(), network()
    oneshot(plain, batches(), 0.6, solver="wanda", pattern=Unstructured())
    free(monkeypatch, 4 * MB)
    monkeypatch.setattr(bounds, "LEAST", 64)
    assert oneshot(parts, batches(), 0.6).warnings
    assert distance(parts, dense) < 0.5 * distance(plain, dense)


def test_units_leave_and_are_repaired_in_blocks(monkeypatch):
    parts, plain, dense = network(), network(), network()
    free(monkeypatch, 8 * MB)
    monkeypatch.setattr(bounds, "LEAST", 64)
    given = {"batches": batches(), "include": "grouped.*"}
    with pytest.warns(SolverWarning, match=r"wide\.weight: Gram matrix in 4 blocks of 128 inputs"):
        done = shrink(parts, (batches()[0],), 0.2, **given)
    assert "wide.weight" in done.in_blocks
    assert "wide.weight: Gram matrix in 4 blocks of 128 inputs" in str(done)
    with pytest.warns(SolverWarning):
        shrink(plain, (batches()[0],), 0.2, repair=False, **given)
    assert parts.wide.in_channels == plain.wide.in_channels < dense.wide.in_channels
    assert distance(parts, dense) < distance(plain, dense)


def test_levels_and_directories_say_what_was_summed_in_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, "LEAST", 16)
    free(monkeypatch, 8 * MB)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8)) for _ in range(2)))
    with pytest.warns(SolverWarning, match=r"2\.weight: Gram matrix in \d+ blocks"):
        found = sensitivity(model, [torch.randn(64, 8)], shares=(0.5,), store=tmp_path / "levels")
    assert list(found.in_blocks) == ["0.2.weight", "1.2.weight"]
    assert f"0.2.weight: {found.in_blocks['0.2.weight']}" in str(found)
    assert found.in_blocks == Sensitivity.load(tmp_path / "levels").in_blocks

    make("llama", intermediate_size=512).save_pretrained(tmp_path / "dense")
    with pytest.warns(SolverWarning, match="Gram matrix in"):
        done = shrink(tmp_path / "dense", sparsity=0.3, out=tmp_path / "small", batches=llama("llama"), verify=False)
    assert any(name.endswith("down_proj.weight") for name in done.in_blocks)
    assert "Gram matrix in" in str(done)


@pytest.mark.parametrize("pattern", [Unstructured(), Channels(dim=0)])
def test_where_nothing_helps_it_says_so_and_nothing_changes(pattern, monkeypatch):
    model, before = network(), network()
    free(monkeypatch, 50_000)
    with pytest.raises(ValueError, match=r"^wide\.weight: its Gram matrix takes 1\.05 MB, .*50 kB.*exclude="):
        oneshot(model, batches(), 0.5, pattern=pattern)
    with pytest.raises(ValueError, match="exclude="):
        shrink(model, (batches()[0],), 0.2, batches=batches())
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_asks_for_no_gram_matrix_has_no_bounds(monkeypatch):
    free(monkeypatch, 1)
    assert not oneshot(network(), batches(), 0.5, solver=from_criterion("wanda")).warnings


def test_what_fits_stays_whole(monkeypatch):
    one, other = network(), network()
    oneshot(one, batches(), 0.5, solver=sparsegpt)
    free(monkeypatch, None)
    assert not oneshot(other, batches(), 0.5, solver=sparsegpt).warnings
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_convolutions_whose_time_grows_beyond_their_size_are_in_blocks(monkeypatch):
    free(monkeypatch, 10**15)
    wide = [nn.Conv1d(128, 16, 64), nn.Conv1d(512, 512, 9), nn.Conv2d(1280, 1280, 3), nn.Linear(8192, 16)]
    for module in wide:
        model = nn.Sequential(nn.Conv1d(1, 1, 1), module).to("meta")
        form = form_of(model, {"": model}, Probe(model))
        assert form.widths == ({"1.weight": 2048} if module is wide[0] else {})


@pytest.mark.parametrize("demand", [Demand(1, 16, 8192, 64), Demand(4, 2, 900, 9), Demand(1, 3, 1000, 1)])
@pytest.mark.parametrize("most", [128, 300, 2048])
def test_a_block_is_of_whole_units_and_no_wider_than_it_may_be(demand, most):
    width = demand.width(most)
    assert width == demand.inputs or (width % demand.unit == 0 and width >= 2 * demand.unit)
    assert width <= max(most, 2 * max(demand.unit, 64)) or math.isclose(width, most, rel_tol=0.5)
    assert demand.entries(width) <= demand.number * demand.inputs**2


def test_a_criterion_of_gram_matrices_says_what_they_take(monkeypatch):
    model = nn.Sequential(nn.Linear(400, 4))
    monkeypatch.setattr("secateur.evidence.collection.free_memory", lambda _=None: MB)
    with pytest.raises(ValueError, match=r"^0\.weight: its Gram matrix takes 640 kB, .*1 MB.*exclude="):
        collect(model, [torch.randn(4, 400)], ["gram"])
    assert set(collect(model, [torch.randn(4, 400)], ["input_norm"])["0.weight"]) == {"input_norm"}
