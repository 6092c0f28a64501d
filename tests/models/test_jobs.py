"""The seam: a job of one's own is given stages and what met them, and its values are what later stages see."""

from dataclasses import dataclass, field

import pytest
import torch

from secateur.models import Pruned, Solved
from secateur.models.blocks import find_blocks
from secateur.models.hosts import InMemory
from secateur.models.observation import in_place
from support.stacks import Block2, data, stack


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
