"""One pass over a bracket, at its far end."""

import threading

import numpy as np
import torch

from secateur.selection import (
    bracket,
    sources,
)


def test_more_than_two_to_the_31_entries(monkeypatch):
    """Index arithmetic, on a tensor of stride 0 that occupies a few bytes, seen at its far end only."""
    rows = 2**31 // 1024 + 3
    huge = torch.tensor([[1.0, 3.0] * 512]).expand(rows, 1024)
    (source,), entries = sources.competitors({"huge": huge}, 0, None)
    assert entries == source.numel == rows * 1024
    sample = bracket.sample_of([source])
    assert set(sample.tolist()) == {1.0, 3.0}
    assert bracket.bracket_of(sample, 0.1) == (3.0, 3.0)
    far = 2**31 + 1024
    monkeypatch.setattr(sources, "segments_of", lambda tensor: iter([(far, huge[-2:].reshape(-1))]))
    source.mask = torch.from_numpy(np.empty(source.numel, dtype=np.bool_))  # pages are not touched until written
    ((at, segment),) = sources.segments_of(huge)
    found = bracket._classify(source, at, segment, 2.0, 4.0, collect=True, scratch=threading.local())
    assert (found.start, found.above, found.inside) == (far, 0, 1024)
    assert (found.offsets[0], found.offsets[-1]) == (1, 2047)
    assert far + 2047 == source.numel - 1
    assert set(found.values.tolist()) == {3.0}
    assert source.mask[far:].tolist() == [False, True] * 1024
    at = [at for at, _ in sources.pieces_of(source)]
    assert at[0] == far
