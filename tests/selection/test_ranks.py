"""Without ranks nothing is sent: plain tensors are whole. Shards are tested in tests/pipeline/test_distributed.py."""

import torch

from secateur.selection import ranks, sources


def test_plain_tensors_are_here_and_count_here():
    tensor = torch.ones(2, 3)
    (source,), _ = sources.competitors({"w": tensor}, 1, None)
    assert ranks.as_dtensor(tensor) is None
    assert ranks.local_of(tensor) is tensor
    assert ranks.mesh_of([source]) is None
    assert ranks.counts_here(source, None) == 1
    assert ranks.totals([source], [5]) == [5]


def test_counts_are_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        assert ranks.integers([1, 2]).tolist() == [1, 2]
