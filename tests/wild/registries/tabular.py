"""Of tables: pytorch-tabnet, rtdl_revisiting_models, rtdl_num_embeddings, tabm, tab-transformer-pytorch."""

from __future__ import annotations

import torch
from torch import nn

from ..models import Wild


class WithNumbers(nn.Sequential):
    """What rtdl_num_embeddings is for: embedded numbers, flat, before an MLP."""


def _numbers() -> torch.Tensor:
    return torch.randn(16, 6)


def _both() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 6), torch.stack([torch.arange(16) % 3, torch.arange(16) % 5], dim=1)


def _categories_first() -> tuple[torch.Tensor, torch.Tensor]:
    numbers, categories = _both()
    return categories, numbers


def models() -> list[Wild]:
    return [
        Wild("tabular", "pytorch_tabnet.TabNet", _tabnet, _numbers),
        Wild("tabular", "pytorch_tabnet.TabNetPretraining", _tabnet_pretraining, _numbers),
        Wild("tabular", "rtdl_revisiting_models.MLP", _mlp, _numbers),
        Wild("tabular", "rtdl_revisiting_models.ResNet", _resnet, _numbers),
        Wild("tabular", "rtdl_revisiting_models.FTTransformer", _ft_transformer, _both),
        Wild("tabular", "rtdl_num_embeddings.PeriodicEmbeddings", _periodic, _numbers),
        Wild("tabular", "rtdl_num_embeddings.PiecewiseLinearEmbeddings", _piecewise, _numbers),
        Wild("tabular", "tabm.TabM", _tabm, _numbers),
        Wild("tabular", "tab_transformer_pytorch.TabTransformer", _tab_transformer, _categories_first),
        Wild("tabular", "tab_transformer_pytorch.FTTransformer", _ft_transformer_of_lucidrains, _categories_first),
    ]


def _tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(6, 3, n_d=16, n_a=16, n_steps=2, group_attention_matrix=torch.eye(6).double())  # type: ignore[no-any-return]


def _tabnet_pretraining() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNetPretraining

    return TabNetPretraining(  # type: ignore[no-any-return]
        6, n_d=16, n_a=16, n_steps=2, group_attention_matrix=torch.eye(6).double()
    )


def _mlp() -> nn.Module:
    from rtdl_revisiting_models import MLP

    return MLP(d_in=6, d_out=3, n_blocks=2, d_block=48, dropout=0.1)  # type: ignore[no-any-return]


def _resnet() -> nn.Module:
    from rtdl_revisiting_models import ResNet

    return ResNet(  # type: ignore[no-any-return]
        d_in=6, d_out=3, n_blocks=2, d_block=48, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.1
    )


def _ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(  # type: ignore[no-any-return]
        n_cont_features=6,
        cat_cardinalities=[3, 5],
        d_out=3,
        n_blocks=2,
        d_block=32,
        attention_n_heads=4,
        attention_dropout=0.1,
        ffn_d_hidden_multiplier=4 / 3,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )


def _periodic() -> nn.Module:
    from rtdl_num_embeddings import PeriodicEmbeddings

    return WithNumbers(
        PeriodicEmbeddings(6, 12, lite=False), nn.Flatten(), nn.Linear(72, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def _piecewise() -> nn.Module:
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins

    generator = torch.Generator().manual_seed(0)
    bins = compute_bins(torch.randn(100, 6, generator=generator), n_bins=8)
    embeddings = PiecewiseLinearEmbeddings(bins, 12, activation=True, version="B")
    return WithNumbers(embeddings, nn.Flatten(), nn.Linear(72, 40), nn.ReLU(), nn.Linear(40, 3))


def _tabm() -> nn.Module:
    from tabm import TabM

    return TabM.make(n_num_features=6, d_out=3, n_blocks=2, d_block=48, k=4)  # type: ignore[no-any-return]


def _tab_transformer() -> nn.Module:
    from tab_transformer_pytorch import TabTransformer

    return TabTransformer(  # type: ignore[no-any-return]
        categories=(3, 5), num_continuous=6, dim=32, dim_out=3, depth=2, heads=4, dim_head=8, mlp_act=nn.ReLU()
    )


def _ft_transformer_of_lucidrains() -> nn.Module:
    from tab_transformer_pytorch import FTTransformer

    return FTTransformer(  # type: ignore[no-any-return]
        categories=(3, 5), num_continuous=6, dim=32, dim_out=3, depth=2, heads=4, dim_head=8
    )
