"""What verbs return is written as a page by one call, and the page says what is printed."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur import Pruner, oneshot, pack, recover, save_compressed, sensitivity, shrink, sparsify
from secateur.checkpoints import inspect_checkpoint
from secateur.coupling import find_coupling
from secateur.report import Reported
from support.reports import Page


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 6, 16) for _ in range(3)]


VERBS = {
    "Masks": lambda model, dense, batches, folder: sparsify(model, 0.5),
    "OneShot": lambda model, dense, batches, folder: oneshot(model, batches, 0.5),
    "Shrunk": lambda model, dense, batches, folder: shrink(model, batches[0], 0.3, batches=batches),
    "Sensitivity": lambda model, dense, batches, folder: sensitivity(model, batches, shares=(0.5,)),
    "Recovered": lambda model, dense, batches, folder: (
        sparsify(model, 0.5),
        recover(model, dense, batches, steps=4, local=1, loss="mse"),
    )[1],
    "Pruner": lambda model, dense, batches, folder: Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda step: 0.5, verbose=False
    ),
    "Packing": lambda model, dense, batches, folder: pack(model, batches[0]),
    "Compression": lambda model, dense, batches, folder: save_compressed(model, folder / "small.safetensors"),
}


@pytest.mark.parametrize("kind", VERBS)
def test_a_result_is_written_as_a_page(kind, dense, batches, tmp_path):
    done = VERBS[kind](copy.deepcopy(dense), dense, batches, tmp_path)
    assert isinstance(done, Reported)
    assert type(done).__name__ == kind
    page = done.report(tmp_path / "page.html", title="Mine <b>")
    text = Page(page.read_text(encoding="utf-8")).text
    shown = "".join(text.split())
    # where it is printed, groups of layers share a row
    others = {"whole,", "such", "as", "Dimensions"} if kind == "Shrunk" else set()
    missing = [word for word in str(done).split() if "*" not in word and word not in others and word not in shown]
    assert missing == []
    assert "Mine <b>" in text
    assert "Measured:" not in text  # nobody did
    assert "What was asked" not in text  # which only the command knows
    assert "layers.1.linear1" in text.replace("\u200b", "") or kind == "Recovered"
    assert "<table" in done._repr_html_()


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    masks = sparsify(nn.Linear(4, 4), 0.5)
    with pytest.raises(ValueError, match="a report is one HTML page"):
        masks.report(tmp_path / "masks.txt")
    with pytest.raises(FileNotFoundError, match="create it first"):
        masks.report(tmp_path / "none" / "masks.html")
    assert list(tmp_path.iterdir()) == []


def test_what_was_only_looked_at_is_a_table_too(dense, batches, tmp_path):
    save_file({name: each.detach() for name, each in dense.state_dict().items()}, tmp_path / "model.safetensors")
    seen = inspect_checkpoint(tmp_path)
    assert "layers.*.linear*.weight (x2)" in str(seen)  # printed, groups of layers share a row
    assert "layers.0.linear1.weight" in seen.report(tmp_path / "page.html").read_text("utf-8").replace("&#8203;", "")
    found = find_coupling(dense, batches[0])
    assert str(found).startswith("Group")
    assert "layers.0.linear1.weight" in str(found)
    assert "stays whole, because" in str(found)
    for each in (seen, found):
        assert "<table" in each._repr_html_()
