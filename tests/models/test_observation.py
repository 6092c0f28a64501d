"""What meets a block's weights when batches run: every batch, all of it finite, and nothing computed in vain."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from secateur.models import Pruned, Solved, oneshot
from secateur.models.blocks import find_blocks
from secateur.models.hosts import InMemory
from secateur.models.observation import in_place
from secateur.solvers import sparsegpt
from support.stacks import MAGNITUDE, WANDA, Block2, Stack, data, stack


@pytest.mark.parametrize("solver", [sparsegpt, WANDA, MAGNITUDE])
def test_inputs_that_are_infinite_are_an_error_that_names_the_weight(solver):
    batches = [*data(), torch.full((2, 5), torch.inf)]

    class Enters(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x.repeat(1, 2)[:, :8])
            return x

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight: what it is multiplied with holds NaN or infinity"):
        oneshot(Enters(), batches, 0.5, solver=solver)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        if x.shape[0] > 2:
            x = self.layers[1](x)
        return self.layers[2](x)


def test_a_block_that_some_batches_do_not_run():
    with pytest.raises(ValueError, match=r"batch 1 does not run layers\.1"):
        oneshot(Sometimes(), [torch.randn(3, 4), torch.randn(2, 4)], 0.5)
    done = oneshot(Sometimes(), [torch.randn(2, 4)], 0.5)
    assert done.left_alone["in a block that the batches never ran"] == ("layers.1.0.weight",)


class Twice(Block2):
    """The last product is one that was there before, with another input."""

    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize("kind", [Block2, Twice])
def test_products_that_nothing_needs_are_not_computed(kind):
    torch.manual_seed(0)
    blocks, computed = nn.ModuleList(kind() for _ in range(2)), {}
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            computed[name] = 0
            module.register_forward_hook(lambda *_, name=name: computed.__setitem__(name, computed[name] + 1))
    model = nn.Sequential(*blocks)
    found = [torch.randn(3, 8) for _ in range(5)]
    inputs = [x.clone() for x in found]
    if kind is Twice:
        inputs += [blocks[0].down(blocks[0].up(x).relu()) + x for x in found]
    tokens = torch.cat(inputs)
    expected = tokens.T @ tokens
    computed |= dict.fromkeys(computed, 0)
    grams = []
    oneshot(
        model, found, 0.5, solver=lambda w, s, p, *, gram: grams.append(gram) or sparsegpt(w, s, p, gram=gram),
        stages=False,
    )  # fmt: skip
    torch.testing.assert_close(grams[0].cpu(), expected)
    if kind is Twice:
        assert computed == {"0.up": 22, "0.down": 22, "1.up": 12, "1.down": 12}
    else:  # one batch to see that no block runs twice; then each is seen and, before the last block, handed on
        assert computed == {"0.up": 11, "0.down": 7, "1.up": 6, "1.down": 2}


# ---- What blocks pass on, in memory or in files. ----


def test_activations_in_files_change_nothing(tmp_path):
    one, other = stack(), stack()
    oneshot(one, data(), 0.5)
    oneshot(other, data(), 0.5, activations=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not list(tmp_path.iterdir())


class Writing(nn.Module):
    """Writes to what its blocks return, or makes new tensors."""

    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.in_place = in_place

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            x = y.zero_().add_(x) if self.in_place == "overwrites" else y.add_(1) if self.in_place else y + 1
        return x


@pytest.mark.parametrize("inference", [False, True])
def test_a_model_may_write_to_what_its_blocks_return(inference):
    """What stands for the outputs of blocks behind serves all of them, and is made anew when it was written to."""
    one, other = Writing(in_place=False), Writing(in_place=True)
    batches = [torch.randn(12, 6) for _ in range(3)]
    with torch.inference_mode(inference):
        for model in (one, other):
            if inference:
                for name, parameter in list(model.named_parameters()):
                    owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                    setattr(owner, key, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            oneshot(model, batches, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert any((parameter == 0).any() for parameter in one.parameters())


def test_what_is_written_over_is_not_taken_for_what_was_lost():
    """Every block's output is overwritten with what reached it, so that nothing of it is needed."""
    model = Writing(in_place="overwrites")
    oneshot(model, [torch.randn(12, 6) for _ in range(2)], 0.5)
    assert all((block[0].weight == 0).float().mean() == 0.5 for block in model.blocks)


# ---- The seam: a job of one's own is given stages and what met them, and its values are what later stages see. ----


@dataclass
class Columns:
    """The inputs of ``down`` that say least leave, with the rows that make them, and the rest solves least squares."""

    targets: frozenset[str]
    leave: int
    words: tuple[str, ...] = ("gram",)
    in_stages: bool = True
    around: bool = False
    changes: bool = True
    beside_dense: bool = True
    seen: list[tuple[str, list[str], bool]] = field(default_factory=list)

    def solve_stage(self, block, module, stage, found):
        self.seen.append((block, list(stage), any(met.residual_cross is not None for met in found.values())))
        if "up.weight" in stage:
            return {}, Pruned(block)
        ((piece, met),) = found.items()
        weight, gram = piece.of(module.down.weight), met.evidence(["gram"])["gram"]
        kept = (gram.diagonal() * weight.square().sum(0)).argsort(descending=True)[self.leave :].sort().values
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask[:, kept] = True
        wanted = weight @ gram + (0 if met.residual_cross is None else met.residual_cross)
        values = torch.zeros_like(weight)
        values[:, kept] = torch.linalg.lstsq(
            gram[kept][:, kept].double(), wanted[:, kept].T.double()
        ).solution.T.float()
        row = mask[0]
        new = {"down.weight": Solved(values, mask)}
        for name in ("up.weight", "up.bias"):
            dense = module.get_parameter(name).detach()
            rows = row if dense.dim() == 1 else row[:, None].expand_as(dense)
            new[name] = Solved(dense * rows, rows)
        return new, Pruned(block)


def walked(model, job):
    return InMemory(model, data(), blocks=find_blocks(model)).walk(job)


def job_for(model, leave, **settings):
    names = {n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers.")}
    return Columns(frozenset(names), leave, **settings)


def test_a_job_of_ones_own_takes_units_out_with_what_makes_them():
    model = stack().eval()
    job = job_for(model, 4)
    said = walked(model, job)
    assert [each.block for each in said] == [f"layers.{number}" for number in range(3)]
    assert [names for _, names, _ in job.seen] == [["up.weight"], ["down.weight"]] * 3
    assert [residuals for _, _, residuals in job.seen] == [False, False, True, True, True, True]
    for layer in model.layers:
        gone = ~layer.down.weight.ne(0).any(0)
        assert int(gone.sum()) == 4
        assert not layer.up.weight[gone].any()
        assert not layer.up.bias[gone].any()


@pytest.mark.parametrize("beside", [True, False])
def test_at_once_a_job_is_given_all_of_a_block(beside):
    model = stack().eval()
    job = job_for(model, 0, in_stages=False, beside_dense=beside)
    job.solve_stage = lambda block, module, stage, found: (job.seen.append((list(stage), min(found).name)),
                                                           ({}, Pruned(block)))[1]  # fmt: skip
    walked(model, job)
    assert [names for names, _ in job.seen] == [["up.weight", "down.weight"]] * 3


@pytest.mark.parametrize("around", [False, True])
def test_where_nothing_changes_a_block_is_run_once_and_shows_the_same(around):
    runs, sums = {}, {}
    for changes in (True, False):
        model = stack().eval()
        job = job_for(model, 0, in_stages=False, beside_dense=False, around=around, changes=changes)
        job.solve_stage = lambda block, module, stage, found, changes=changes: (
            sums.update({(changes, block, piece.name): met.sums.gram for piece, met in found.items()}),
            ({}, Pruned(block)),
        )[1]
        counted = runs.setdefault(changes, [])
        model.layers[1].down.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        walked(model, job)
    assert len(runs[False]) < len(runs[True])
    assert len(runs[False]) == len(data())
    for (changes, *where), gram in sums.items():
        assert torch.equal(gram, sums[(not changes, *where)])


@torch.no_grad()
def test_values_in_place_are_gone_afterwards():
    block, x = Block2(), torch.randn(3, 8)
    before, weight = block(x), block.up.weight
    with in_place(block, {"up.weight": torch.zeros_like(weight)}):
        assert not torch.equal(block(x), before)
    assert block.up.weight is weight
    assert torch.equal(block(x), before)
    recurrent, x = torch.nn.LSTM(3, 4), torch.randn(2, 1, 3)
    before = recurrent(x)[0]
    with in_place(recurrent, {"weight_hh_l0": torch.zeros_like(recurrent.weight_hh_l0)}):
        assert not torch.equal(recurrent(x)[0], before)
    assert torch.equal(recurrent(x)[0], before)
