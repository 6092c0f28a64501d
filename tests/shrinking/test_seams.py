"""Laws of seams: a place is the last before a branch that is linear and used once; what is read there is exact."""

import pytest
import torch
from torch import nn

from secateur.coupling import find_coupling
from secateur.models import running
from secateur.shrinking.kinds.patching import Stream
from support.deep import WIDTH, Block, Parallel, PostNorm, batches, deep


def stream_of(model, *gone, held=None):
    held = batches() if held is None else held
    branches = find_coupling(model, held[0]).branches
    chosen = [each for each in branches if any(name in each.parameters for name in gone)]
    assert len(chosen) == len(gone)
    with running(model):
        return Stream(model, chosen, held[0])


def weights(stream):
    return [(seam.place.weight, len(seam.names)) for seam in stream.seams]


def test_the_matrix_before_a_branch_is_its_place():
    assert weights(stream_of(deep(), "3.down.weight")) == [("2.down.weight", 1)]
    assert weights(stream_of(deep(), "3.down.weight", "5.down.weight")) == [("2.down.weight", 1), ("4.down.weight", 1)]


def test_branches_in_a_row_share_a_place():
    assert weights(stream_of(deep(), "3.down.weight", "4.down.weight")) == [("2.down.weight", 2)]


def test_before_the_first_branch_is_what_gives_the_stream():
    assert weights(stream_of(deep(), "1.down.weight")) == [("0.weight", 1)]
    bare = nn.Sequential(nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU()), *deep()[1:])
    assert weights(stream_of(bare, "1.down.weight")) == []


def test_a_parallel_branch_is_beside_its_place():
    assert weights(stream_of(deep(Parallel), "2.f.2.weight")) == [("2.g.2.weight", 1)]


def test_a_normalized_stream_is_scaled():
    ((weight, _),) = weights(stream_of(deep(PostNorm), "3.down.weight"))
    assert weight == "2.norm.weight"


@pytest.mark.parametrize("how", ["tied", "shared memory", "used twice"])
def test_what_is_used_elsewhere_is_no_place(how):
    model = deep()
    if how == "tied":
        model[4].down.weight = model[2].down.weight
    elif how == "shared memory":
        memory = torch.randn(2, WIDTH, 10)
        model[2].down.weight, model[5].down.weight = (nn.Parameter(each) for each in memory)
    else:
        model = nn.Sequential(model[0], model[2], model[3], model[2], model[-1])
    gone, before = ("2.down.weight", "0.weight") if how == "used twice" else ("3.down.weight", "1.down.weight")
    assert weights(stream_of(model, gone)) == [(before, 1)]


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + self.gamma * self.down(self.up(self.norm(x)).relu())


class Activated(Block):
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()).relu_()


class Minus(Block):
    def forward(self, x):
        return x - self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("make", [Scaled, Activated, Minus])
def test_what_is_changed_on_its_way_to_the_sum_is_no_place(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), make(), Block(), nn.Linear(WIDTH, 3))
    assert weights(stream_of(model, "3.down.weight")) == []


def test_what_is_met_is_what_the_model_without_has():
    model, held = deep(), batches()
    stream = stream_of(model, "3.down.weight")
    (seam,) = stream.seams
    with running(model):
        dense = stream.dense(held[1])[seam.final]
        inputs, rows, index = stream.met(held[1], seam)
        (inputs,) = inputs
        before = model[:3](held[1])
        assert torch.equal(dense, model[3](before))
        assert torch.equal(rows, before)
        assert index is None
        x = model[:2](held[1])
        assert torch.equal(inputs, model[2].up(model[2].norm(x)).relu())


def test_padding_is_left_out():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers)

        def forward(self, x, attention_mask):
            for each in self.blocks:
                x = x + each.linear2(each.linear1(each.norm2(x)).relu()) * 1.0
                x = x + each.self_attn.out_proj(x)
            return x

    model = Model()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    batch = {"x": torch.randn(2, 4, 8), "attention_mask": mask}
    branches = find_coupling(model, batch, modes=[False]).branches
    gone = [each for each in branches if "blocks.1.linear2.weight" in each.parameters]
    with running(model):
        stream = Stream(model, gone, batch)
        (seam,) = stream.seams
        inputs, rows, index = stream.met(batch, seam)
        assert seam.place.weight == "blocks.0.self_attn.out_proj.weight"
        assert sum(map(len, inputs)) == 4
        assert len(rows) == 8
        assert index.tolist() == mask.flatten().bool().tolist()


def test_another_way_through_the_model_is_an_error():
    class Longer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep()

        def forward(self, x):
            out = self.inner(x)
            return out + 1.0 if len(x) > 64 else out

    model = Longer()
    stream = stream_of(model, "inner.3.down.weight")
    with running(model):
        stream.dense(torch.randn(8, 4))
        with pytest.raises(ValueError, match="another way through the model"):
            stream.dense(torch.randn(65, 4))


def test_makers_are_the_matrices_that_give_the_terms():
    model, held = deep(), batches()
    stream = stream_of(model, "3.down.weight")
    with running(model):
        makers = stream.makers(held[0])
    assert [place.weight for place in makers.values()] == [f"{at}.down.weight" for at in range(1, 6)]
    assert {place.bias for place in makers.values()} == {f"{at}.down.bias" for at in range(1, 6)}
