"""Several processes measure the groups of a model, and what `fit` tries, side by side, and all find what one finds, to
the bit."""

import pytest
import torch
from torch import distributed, nn

from secateur import fit, sensitivity
from secateur.search import Sensitivity, choosing, fitting
from secateur.search.space import Predicted
from secateur.support import alone
from support.fitting import blocks
from support.fitting import inputs as several
from support.forks import leave_group, on_ranks, prepared_by_accelerate

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed"),
]
SHARES = (0.25, 0.5)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)))


def inputs():
    return [torch.randn(32, 4, generator=torch.Generator().manual_seed(1))]


def failing(subject):
    """Of all models that are not whole the first process has no score."""
    whole = all(bool(each.abs().sum(1).all()) for each in subject.parameters() if each.dim() == 2)
    if not whole and distributed.get_rank() == 1:
        raise ValueError("no score here")
    return 1.0


def joined(rank, folder, meet="meet", ranks=2):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{meet}", rank=rank, world_size=ranks)
    fitting.PASSES = 8.0


def in_a_process(rank, folder, alone):
    joined(rank, folder)
    subject = model()
    before = {name: each.clone() for name, each in subject.state_dict().items()}
    found = sensitivity(subject, inputs(), shares=SHARES, store=folder / "store")
    assert dict(found.scores) == alone.scores
    assert found.levels.made.digest == alone.levels.made.digest
    assert all(torch.equal(each, before[name]) for name, each in subject.state_dict().items())
    distributed.barrier()
    assert dict(Sensitivity.load(folder / "store").scores) == alone.scores
    prepared = prepared_by_accelerate(rank, subject)
    assert dict(sensitivity(prepared, inputs(), shares=SHARES).scores) == alone.scores
    with pytest.raises(ValueError, match=r"^DistributedDataParallel sends gradients .* pass model\.module, .*\.$"):
        fit(prepared, inputs(), budget={"params": 0.6}, shares=SHARES)
    again = sensitivity(subject, inputs(), shares=SHARES, store=folder / "store")
    assert again.passes == found.passes  # nothing was measured again
    with pytest.raises(ValueError, match="no score here"):
        sensitivity(subject, inputs(), shares=SHARES, score=failing)
    with pytest.raises(ValueError, match="the processes hold other models, batches or arguments"):
        sensitivity(subject, [inputs()[0] + rank], shares=SHARES)
    for given in ({}, {"store": folder / "others"}):
        with pytest.raises(ValueError, match="the processes hold other models, batches or arguments"):
            fit(subject, inputs(), budget={"params": 0.6 + rank / 10}, shares=SHARES, **given)
    assert all(torch.equal(each, before[name]) for name, each in subject.state_dict().items())
    leave_group()


@pytest.mark.long
def test_groups_are_measured_side_by_side(tmp_path):
    on_ranks(in_a_process, tmp_path, sensitivity(model(), inputs(), shares=SHARES))


WAYS = {
    "params": {"budget": {"params": 0.6}, "finals": 5},
    "both": {"budget": {"macs": 0.7}, "over": ("shrink", "oneshot"), "shares": (0.3, 0.6), "finals": 2, "seed": 3},
    "keep": {"keep": 0.8, "finals": 6},
}


def fitted(**given):
    subject = blocks(3)
    return fit(subject, several(), **{"shares": (0.2, 0.4, 0.6, 0.8)} | given), subject.state_dict()


def assert_the_same(one, other):
    (done, state), (alike, its) = one, other
    assert {name: each.shape for name, each in state.items()} == {name: each.shape for name, each in its.items()}
    assert all(torch.equal(each, its[name]) for name, each in state.items())
    assert (done.choice, done.candidates, done.finals) == (alike.choice, alike.candidates, alike.finals)
    assert (done.loss, done.curve, done.passes) == (alike.loss, alike.curve, alike.passes)
    assert (done.got, done.finished) == (alike.got, alike.finished)


def timed_by_the_first(search):
    """What each level saves of two milliseconds; of the finished model a quarter."""
    assert not distributed.get_rank()
    search.timer = lambda model, _runtime: (2.0, 1.5)
    table = {name: [0.2 * at for at in range(len(its))] for name, its in search.levels.items()}
    return Predicted(2.0, table)


def fitted_in_a_process(rank, folder, ranks):
    joined(rank, folder, f"meet{ranks}", ranks)
    for way in WAYS if ranks == 2 else ["params"]:
        with alone():
            one = fitted(**WAYS[way])
        assert_the_same(fitted(**WAYS[way]), one)
    assert_the_same(fitted(**WAYS[way], store=folder / f"store{ranks}"), one)
    if ranks == 2:
        price = {"budget": {"latency": 0.9}, "finals": 1, "runtime": lambda _, shapes: float(shapes[-1][0])}
        with alone():
            one = fitted(**price)
        assert_the_same(fitted(**price), one)
        choosing.LevelSearch._predicted = timed_by_the_first
        choosing.LevelSearch._timed = lambda search, choice: 2.0 - 0.2 * sum(choice) + distributed.get_rank()
        done, _ = fitted(budget={"latency": 0.8}, finals=3)
        assert done.got["latency"] == 1.5
        said = [None, None]
        distributed.all_gather_object(said, (done.choice, done.got, done.dense))
        assert said[0] == said[1]
        with pytest.raises(ValueError, match="the params cannot come to"):
            fitted(budget={"params": 0.01}, finals=1)
    leave_group()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.long
def test_what_is_fitted_by_several_is_what_one_fits(tmp_path, ranks):
    on_ranks(fitted_in_a_process, tmp_path, ranks, ranks=ranks)
