"""What ends in a residual stream is found by structure, and its residual is the stream's."""

import pytest
import torch
from torch import nn

from secateur.models import observation, oneshot
from secateur.models.pairs import PairedStats
from secateur.models.products import Tokens
from secateur.solvers import sparsegpt
from support.families import Encoder, batches, make

ENDS = {
    "llama": {"o_proj": 1, "down_proj": 1},
    "gpt2": {"attn.c_proj": 1, "mlp.c_proj": 1},
    "gpt_neox": {"attention.dense": 2, "dense_4h_to_h": 2},
    "falcon": {"self_attention.dense": 2, "dense_4h_to_h": 2},
    "bloom": {"self_attention.dense": 1, "dense_4h_to_h": 1},
    "bert": {"attention.output.dense": 1, "output.dense": 1},
    "t5": {"SelfAttention.o": 1, "EncDecAttention.o": 1, "DenseReluDense.wo": 1},
    "gemma3": {},  # a normalization lies between
    "mixtral": {"o_proj": 1},  # experts are weighted first
    "mamba": {"out_proj": 1},
}


@pytest.fixture
def ends(monkeypatch):
    """``{name of a product that ends in a sum: how many share that}``, as a walk finds them."""
    found = {}

    class Noting(PairedStats):
        def end_batch(self):
            super().end_batch()
            found.update({piece.name: shared for piece, shared in self.expected.items()})

    monkeypatch.setattr(observation, "PairedStats", Noting)
    return found


@pytest.mark.parametrize("family", ENDS)
def test_what_is_added_to_the_stream(family, ends):
    oneshot(make(family), batches(family, count=2), 0.5, solver=sparsegpt)
    expected, seen = ENDS[family], set()
    for name, shared in ends.items():
        short = max((each for each in expected if name.endswith(f"{each}.weight")), key=len)
        assert shared == expected[short], name
        seen.add(short)
    assert seen == expected.keys()


def test_the_output_of_pytorchs_attention_is_followed_turned(ends):
    torch.manual_seed(0)
    oneshot(Encoder().eval(), [torch.randint(64, (2, 7)) for _ in range(2)], 0.5, solver=sparsegpt)
    assert ends == {"self_attn.out_proj.weight": 1, "linear2.weight": 1}


@torch.no_grad()
def test_an_activation_that_adds_to_its_input_is_no_stream():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    with pairs.beside(Tokens(), None, 5, dense=False), pairs.learning():
        y = layer(x)
        _ = y + 0.04 * y.pow(3)
    pairs.end_batch()
    assert pairs.expected == {}
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    with pairs.beside(Tokens(), None, 5, dense=False), pairs.learning():
        _ = layer(x) + x.pow(3)
    pairs.end_batch()
    assert list(pairs.expected.values()) == [1]


class Halves(nn.Module):
    """Two products added up, as attention and MLP side by side are, and both to the stream."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) + self.two(x) + x


@torch.no_grad()
def test_products_that_are_added_up_share_what_the_sum_lacks():
    torch.manual_seed(0)
    block, wanted, x = Halves(), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    pairs = PairedStats({"one": block.one.weight, "two": block.two.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(), None, 10, dense=dense), pairs.learning():
            block(given)
    pairs.end_batch()
    rows = x.reshape(-1, 4)
    residual_cross = (block(wanted) - block(x)).reshape(-1, 4).T @ rows / 2
    for met in pairs.found().values():
        torch.testing.assert_close(met.residual_cross, residual_cross)


@torch.no_grad()
def test_padding_lacks_nothing_and_tokens_that_went_elsewhere_are_not_compared():
    torch.manual_seed(0)
    layer, wanted, x = nn.Linear(4, 3), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(mask), None, 10, dense=dense):
            layer(given)
    pairs.end_batch()
    (met,) = pairs.found().values()
    torch.testing.assert_close(met.residual_cross, layer.weight @ ((wanted - x)[mask].T @ x[mask]))
    pairs = PairedStats({"weight": layer.weight}, frozenset(["gram"]))
    for given, dense in ((wanted, True), (x, False)):
        with pairs.beside(Tokens(), None, 10, dense=dense):
            layer(given[0])  # five of ten
    pairs.end_batch()
    (met,) = pairs.found().values()
    assert met.residual_cross is None
    assert met.tokens == 5
