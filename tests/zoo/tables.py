"""Tables, graphs, points, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.attention import GatedMlp
from zoo.registry import hand, sequence, several


@hand(lambda: (torch.randn(2, 7), torch.randint(0, 19, (2, 3))))
class Dlrm(nn.Module):
    """Dense features and embeddings of one width; the dot products of all pairs go on."""

    def __init__(self, width=14):
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, width, mode="sum") for n in (19, 23, 29)])
        self.bot_l = nn.Sequential(nn.Linear(7, 22), nn.ReLU(), nn.Linear(22, width), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(width + 6, 26), nn.ReLU(), nn.Linear(26, 1), nn.Sigmoid())

    def forward(self, dense, sparse):
        x = self.bot_l(dense)
        ly = [emb(sparse[:, i : i + 1]) for i, emb in enumerate(self.emb_l)]
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        R = torch.cat([x, Z[:, li, lj]], dim=1)
        return self.top_l(R)


@hand(lambda: torch.randint(0, 17, (2, 5)))
class DeepFm(nn.Module):
    """Sum of squares against square of sums, a linear part, and an MLP on the flattened embeddings."""

    def __init__(self, fields=5, width=8):
        super().__init__()
        self.register_buffer("offsets", torch.arange(0, 17 * fields, 17))
        self.embedding, self.linear = nn.Embedding(17 * fields, width), nn.Embedding(17 * fields, 1)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(fields * width, 26), nn.BatchNorm1d(26), nn.ReLU(), nn.Linear(26, 1))
        self.embed_output_dim = fields * width

    def forward(self, x):
        x = x + self.offsets
        e = self.embedding(x)
        fm = 0.5 * (e.sum(dim=1) ** 2 - (e**2).sum(dim=1)).sum(dim=1, keepdim=True)
        x = self.linear(x).sum(dim=1) + fm + self.mlp(e.view(-1, self.embed_output_dim))
        return torch.sigmoid(x.squeeze(1))


@hand(several(sequence(12, 9), lambda: (torch.rand(2, 9, 9) > 0.5).float()))
class GraphAttention(nn.Module):
    """Dense adjacency; the attention is a sum of two projections to a scalar, masked where there is no edge."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(12, 22) * 0.3), nn.Parameter(torch.randn(22, 14) * 0.3)
        self.bias = nn.Parameter(torch.zeros(22))
        self.a_src, self.a_dst = nn.Parameter(torch.randn(22, 1) * 0.3), nn.Parameter(torch.randn(22, 1) * 0.3)
        self.readout = nn.Linear(14, 3)

    def forward(self, x, adjacency):
        adjacency = adjacency + torch.eye(x.size(1), dtype=x.dtype)
        h = torch.matmul(x, self.w1) + self.bias
        e = F.leaky_relu(h @ self.a_src + (h @ self.a_dst).transpose(1, 2), 0.2)
        a = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e)).softmax(dim=-1)
        h = F.elu(torch.bmm(a, h))
        return self.readout(torch.bmm(a, h @ self.w2).mean(1))


@hand(sequence(16))
class SoftMoe(nn.Module):
    """All experts run in one einsum over stacked weights; softmax gates weigh them."""

    def __init__(self, experts=3, hidden=26):
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.w1 = nn.Parameter(torch.randn(experts, 16, hidden) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(experts, hidden))
        self.w2 = nn.Parameter(torch.randn(experts, hidden, 16) * 0.2)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        gates = self.gate(x).softmax(dim=-1)
        h = F.gelu(torch.einsum("bsd,edh->bseh", x, self.w1) + self.b1)
        y = torch.einsum("bseh,ehd->bsed", h, self.w2)
        return self.out(x + (gates.unsqueeze(-1) * y).sum(2))


@hand(sequence(16))
class TopkMoe(nn.Module):
    """Mixtral: each expert takes the tokens that chose it, by index, in a loop."""

    def __init__(self, experts=4, k=2):
        super().__init__()
        self.top_k = k
        self.inp = nn.Linear(16, 20)
        self.gate = nn.Linear(20, experts, bias=False)
        self.experts = nn.ModuleList([GatedMlp(20, 22 + 4 * i) for i in range(experts)])
        self.out = nn.Linear(20, 5)

    def forward(self, x):
        x = self.inp(x)
        b, s, d = x.shape
        flat = x.view(-1, d)
        weights, selected = torch.topk(self.gate(flat).softmax(dim=1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((b * s, d), dtype=x.dtype, device=x.device)
        mask = F.one_hot(selected, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[i])
            current = expert(flat[top_x]) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return self.out(final.reshape(b, s, d) + x)


@hand(sequence(16))
class DenseTopkMoe(nn.Module):
    """Every expert runs on every token; a scattered gate is zero where it was not chosen."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, h), nn.ReLU(), nn.Linear(h, 16)) for h in (18, 22, 26)]
        )
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        logits = self.gate(x)
        top, index = logits.topk(2, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return self.out((gates.unsqueeze(-1) * outputs).sum(dim=-2))
