"""Several processes measure the groups of a model side by side, and all find what one finds, to the bit."""

import pytest
import torch
from torch import distributed, nn

from secateur import fit, sensitivity
from secateur.search import Sensitivity
from support.forks import leave_group, on_ranks

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


def in_a_process(rank, folder, alone):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    subject = model()
    before = {name: each.clone() for name, each in subject.state_dict().items()}
    found = sensitivity(subject, inputs(), shares=SHARES, store=folder / "store")
    assert dict(found.scores) == alone.scores
    assert found.levels.made.digest == alone.levels.made.digest
    assert all(torch.equal(each, before[name]) for name, each in subject.state_dict().items())
    distributed.barrier()
    assert dict(Sensitivity.load(folder / "store").scores) == alone.scores
    again = sensitivity(subject, inputs(), shares=SHARES, store=folder / "store")
    assert again.passes == found.passes  # nothing was measured again
    with pytest.raises(ValueError, match="no score here"):
        sensitivity(subject, inputs(), shares=SHARES, score=failing)
    with pytest.raises(ValueError, match="the processes hold other models, batches or arguments"):
        sensitivity(subject, [inputs()[0] + rank], shares=SHARES)
    with pytest.raises(ValueError, match="fit runs in one process, and there are 2"):
        fit(subject, inputs(), budget={"params": 0.6})
    assert all(torch.equal(each, before[name]) for name, each in subject.state_dict().items())
    leave_group()


def test_groups_are_measured_side_by_side(tmp_path):
    on_ranks(in_a_process, tmp_path, sensitivity(model(), inputs(), shares=SHARES))
