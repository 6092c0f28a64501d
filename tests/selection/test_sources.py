"""Entries in pieces: row-major, all of them, of the sizes that `sizes` says."""

import pytest
import torch

from secateur.selection import sizes, sources

TENSORS = {
    "contiguous": torch.arange(600.0).view(20, 30),
    "transposed": torch.arange(600.0).view(30, 20).t(),
    "long rows": torch.arange(1200.0).view(2, 600)[:, ::2],
    "channels last": torch.arange(2 * 3 * 10 * 10.0).view(2, 3, 10, 10).to(memory_format=torch.channels_last),
    "one number": torch.tensor(3.0),
    "nothing": torch.zeros(0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_pieces_are_all_entries_in_row_major_order(name, path):
    (source,), entries = sources.competitors({name: TENSORS[name]}, 0, None)
    pieces = list(sources.pieces_of(source))
    assert entries == TENSORS[name].numel()
    assert [at for at, _ in pieces] == [sum(part.numel() for _, part in pieces[:index]) for index in range(len(pieces))]
    assert torch.equal(torch.cat([torch.zeros(0), *(part for _, part in pieces)]), TENSORS[name].reshape(-1))
    most = max([part.numel() for _, part in pieces], default=0)
    assert most <= sizes.PIECE
    assert path == "plain" or entries <= sizes.PIECE or len(pieces) > 1  # what a fixture sets is what is read


def test_segments_on_an_accelerator_have_a_size_of_their_own(monkeypatch):
    monkeypatch.setattr(sizes, "DEVICE_SEGMENT", 128)
    table = torch.empty(50, 6, device="meta")  # no values, but the way of every device that is not the processor
    assert [(at, len(part)) for at, part in sources.segments_of(table)] == [(0, 128), (128, 128), (256, 44)]
    parts = [(at, len(part)) for at, part in sources.segments_of(table.t())]
    assert [at for at, _ in parts] == [sum(size for _, size in parts[:number]) for number in range(len(parts))]
    assert sum(size for _, size in parts) == 300
    assert max(size for _, size in parts) <= 128


def test_what_cannot_be_ranked_is_refused_by_name():
    for tensor, message in (
        (torch.zeros(2, dtype=torch.complex64), "w: complex scores have no order"),
        (torch.zeros(2, device="meta"), "w: on the meta device there are no values"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.competitors({"w": tensor}, 1, None)
    with pytest.raises(ValueError, match=r"w: a mask of shape \(3,\) for shape \(2,\)"):
        sources.competitors({"w": torch.zeros(2)}, 1, {"w": torch.ones(3)})
