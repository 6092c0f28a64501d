"""What stays of a tensor is what index_select leaves, whatever the dtype and the piece, and bytes tell."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from secateur.checkpoints import (
    Compared,
    nbytes_of_cut,
    open_checkpoint,
    pieces_of_cut,
    shape_of_cut,
    sliced_files,
    slicing,
)
from secateur.checkpoints import write_bytes as write


@settings(max_examples=25)
@given(st.data(), st.integers(1, 40))
def test_pieces_are_those_of_index_select(tmp_path_factory, data, piece):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float64, torch.int8]))
    folder = tmp_path_factory.mktemp("slices")
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    save_file({"it": tensor}, folder / "model.safetensors")
    cuts = {}
    for at, size in enumerate(shape):
        if data.draw(st.booleans()):
            cuts[at] = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
            tensor = tensor.index_select(at, torch.from_numpy(cuts[at]))
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries["it"]
    assert shape_of_cut(entry, cuts) == tuple(tensor.shape)
    assert nbytes_of_cut(entry, tuple(tensor.shape)) == tensor.nbytes
    expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "PIECE", piece)
        file = io.BytesIO()
        for each in pieces_of_cut(checkpoint, entry, cuts):
            write(file, each)
        assert file.getvalue() == expected
        save_file({"it": tensor.contiguous()}, folder / "model.safetensors")
        again = open_checkpoint(folder)
        for wrong in (False, True):
            compared = Compared(again, "it")
            changed = bytes([expected[0] ^ 1]) + expected[1:] if wrong else expected
            write(compared, torch.frombuffer(bytearray(changed), dtype=torch.uint8))
            assert compared.all_of_it is not wrong
        shorter = Compared(again, "it")
        write(shorter, torch.frombuffer(bytearray(expected), dtype=torch.uint8)[:-1])
        assert shorter.same
        assert not shorter.all_of_it


def test_files_are_those_of_the_source_with_what_stays(tmp_path):
    (tmp_path / "in/part").mkdir(parents=True)
    tensors = {"one": torch.arange(12.0).reshape(4, 3), "two": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "in/model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "in")
    cuts = {"one": {0: np.array([1, 3])}}

    def written(file, entry):
        for piece in pieces_of_cut(checkpoint, entry, cuts.get(entry.name, {})):
            write(file, piece)

    assert list(sliced_files(checkpoint, tmp_path / "out", cuts, written)) == ["one", "two"]
    made = open_checkpoint(tmp_path / "out")
    assert list(made) == list(checkpoint)
    assert made.metadata[made.files[0]] == {"format": "pt"}
    assert torch.equal(made["one"], tensors["one"][[1, 3]])
    assert torch.equal(made["two"], tensors["two"])
