"""torch_geometric: the graph networks that it names models, on a small graph."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..models import Wild

_SIZES = {"in_channels": 12, "hidden_channels": 32, "num_layers": 3, "out_channels": 5}
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("GCN", "GCN", {**_SIZES, "norm": "batch_norm"}),
    ("GCN-jumping", "GCN", {**_SIZES, "jk": "cat"}),
    ("GraphSAGE", "GraphSAGE", _SIZES),
    ("GAT", "GAT", {**_SIZES, "heads": 4}),
    ("GATv2", "GAT", {**_SIZES, "heads": 4, "v2": True}),
    ("GIN", "GIN", _SIZES),
    ("PNA", "PNA", {**_SIZES, "aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}),
    ("EdgeCNN", "EdgeCNN", _SIZES),
    ("GraphUNet", "GraphUNet", {"in_channels": 12, "hidden_channels": 32, "out_channels": 5, "depth": 2}),
    ("DeepGCN", "", {}),
    ("Transformer", "", {}),
]


def models() -> list[Wild]:
    return [
        Wild("torch_geometric", name, functools.partial(_built, name, kind, config), _graph)
        for name, kind, config in MODELS
    ]


def _built(name: str, kind: str, config: dict[str, Any]) -> nn.Module:
    import torch_geometric.nn as graphs

    if name == "PNA":
        config = {**config, "deg": torch.tensor([0, 4, 8, 8])}
    if name == "DeepGCN":
        return _Deep()
    if name == "Transformer":
        layers = [
            (graphs.TransformerConv(12, 8, heads=4), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            (graphs.TransformerConv(32, 5), "x, edge_index -> x"),
        ]
        return graphs.Sequential("x, edge_index", layers)  # type: ignore[no-any-return]
    return getattr(graphs, kind)(**config)  # type: ignore[no-any-return]


class _Deep(nn.Module):
    """Residual layers of a generalized aggregation, as in DeeperGCN."""

    def __init__(self) -> None:
        from torch_geometric.nn import DeepGCNLayer, GENConv

        super().__init__()
        self.encoder, self.head = nn.Linear(12, 24), nn.Linear(24, 5)
        self.layers = nn.ModuleList(
            DeepGCNLayer(
                GENConv(24, 24, aggr="softmax", learn_t=True, num_layers=2), nn.LayerNorm(24), nn.ReLU(), dropout=0.1
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.head(x)  # type: ignore[no-any-return]


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    """20 nodes in a ring, with some chords."""
    ring = torch.arange(20)
    edges = torch.cat([torch.stack([ring, (ring + 1) % 20]), torch.stack([ring[::2], (ring[::2] + 5) % 20])], dim=1)
    return torch.randn(20, 12), torch.cat([edges, edges.flip(0)], dim=1)
