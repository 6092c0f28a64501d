"""Of time series: nbeats-pytorch, pytorch-tcn, iTransformer."""

from __future__ import annotations

import torch
from torch import nn

from ..models import Wild


def models() -> list[Wild]:
    return [
        Wild("time_series", "nbeats_pytorch.NBeatsNet", _nbeats, lambda: torch.randn(8, 20)),
        Wild("time_series", "pytorch_tcn.TCN", _tcn, lambda: torch.randn(4, 6, 40)),
        Wild("time_series", "pytorch_tcn.TCN-causal", _tcn_gated, lambda: torch.randn(4, 6, 40)),
        Wild("time_series", "iTransformer.iTransformer", _itransformer, lambda: torch.randn(4, 20, 6)),
        Wild("time_series", "iTransformer.iTransformer2D", _itransformer_2d, lambda: torch.randn(4, 20, 6)),
        Wild("time_series", "iTransformer.iTransformerFFT", _itransformer_fft, lambda: torch.randn(4, 20, 6)),
    ]


def _nbeats() -> nn.Module:
    from nbeats_pytorch.model import NBeatsNet

    kinds = (NBeatsNet.GENERIC_BLOCK, NBeatsNet.GENERIC_BLOCK)
    return NBeatsNet(  # type: ignore[no-any-return]
        stack_types=kinds,
        nb_blocks_per_stack=2,
        forecast_length=5,
        backcast_length=20,
        thetas_dim=(8, 8),
        hidden_layer_units=32,
    )


def _tcn() -> nn.Module:
    from pytorch_tcn import TCN

    return TCN(6, [16, 24], kernel_size=3, causal=False, use_skip_connections=True)  # type: ignore[no-any-return]


def _tcn_gated() -> nn.Module:
    from pytorch_tcn import TCN

    return TCN(  # type: ignore[no-any-return]
        6, [16, 24], kernel_size=3, causal=True, use_norm="batch_norm", use_gate=True, output_projection=4
    )


def _sizes() -> dict[str, object]:
    return {
        "num_variates": 6, "lookback_len": 20, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "pred_length": (5, 8),
    }  # fmt: skip


def _itransformer() -> nn.Module:
    from iTransformer import iTransformer

    return iTransformer(**_sizes(), use_reversible_instance_norm=True)  # type: ignore[no-any-return]


def _itransformer_2d() -> nn.Module:
    from iTransformer import iTransformer2D

    return iTransformer2D(**_sizes(), num_time_tokens=4)  # type: ignore[no-any-return]


def _itransformer_fft() -> nn.Module:
    from iTransformer import iTransformerFFT

    return iTransformerFFT(**_sizes())  # type: ignore[no-any-return]
