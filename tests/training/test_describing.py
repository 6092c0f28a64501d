"""What a Pruner says of itself."""

import torch
from torch import nn

from secateur import Pruner
from support.training import SGD, quiet


def test_defaults_leave_embeddings_recurrence_and_bare_parameters_alone(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.randn(4, 4))
            self.embedding = nn.Embedding(5, 4)
            self.recurrent = nn.LSTM(4, 4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.convolution = nn.Conv1d(4, 4, 3)
            self.norm = nn.LayerNorm(4)

    model = Model()
    pruner = Pruner(model, SGD(model.parameters()), 0.5, total_steps=10)
    assert list(pruner.masks) == ["attention.in_proj_weight", "attention.out_proj.weight", "convolution.weight"]
    printed = capsys.readouterr().out
    assert printed == f"{pruner}\n"
    assert "112 weights in 3 tensors of " in printed
    assert "step        6  sparsity 0.5000" in printed
    assert "an update every 1 step; then recovery until step 10" in printed
    for reason in (
        "vectors and scalars",
        "1 × embeddings",
        "2 × normalizations",
        "2 × neither linear nor convolution (LSTM)",
        "1 × not named *.weight",
    ):
        assert reason in printed
    names = list(quiet(model, SGD(model.parameters()), 0.5, total_steps=10, include="recurrent.weight*").masks)
    assert names == ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]
