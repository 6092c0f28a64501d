"""Tables, graphs, points, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.attention import GatedMlp
from zoo.registry import hand, sequence, several, signal, vector


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


@hand(vector(18))
class CrossNetwork(nn.Module):
    """x0 (w·x) + b + x beside a deep part: the inputs are part of the residual stream."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(18, 22)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(22, 1) * 0.2) for _ in range(2)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(22)) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(22, 34), nn.ReLU(), nn.Linear(34, 14), nn.ReLU())
        self.out = nn.Linear(36, 1)

    def forward(self, x):
        x0 = x = self.inp(x)
        for w, b in zip(self.w, self.b, strict=True):
            x = x0 * (x @ w) + b + x
        return self.out(torch.cat([x, self.deep(x0)], dim=1))


@hand(lambda: (torch.randint(0, 31, (2,)), torch.randint(0, 37, (2,))))
class NeuralCollaborativeFiltering(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(31, 10), nn.Embedding(37, 10)
        self.user_mlp, self.item_mlp = nn.Embedding(31, 14), nn.Embedding(37, 18)
        self.mlp = nn.Sequential(nn.Linear(32, 22), nn.ReLU(), nn.Linear(22, 12), nn.ReLU())
        self.predict = nn.Linear(22, 1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((gmf, mlp), -1)).view(-1)


@hand(several(sequence(12, 9), lambda: (torch.rand(2, 9, 9) > 0.5).float()), name="graph_convolution")
@hand(several(sequence(12, 9), lambda: (torch.rand(2, 9, 9) > 0.5).float()), name="graph_attention", attention=True)
class GraphNetwork(nn.Module):
    """Dense adjacency; the attention is a sum of two projections to a scalar, masked where there is no edge."""

    def __init__(self, attention=False):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(12, 22) * 0.3), nn.Parameter(torch.randn(22, 14) * 0.3)
        self.bias = nn.Parameter(torch.zeros(22))
        self.attention = attention
        if attention:
            self.a_src, self.a_dst = nn.Parameter(torch.randn(22, 1) * 0.3), nn.Parameter(torch.randn(22, 1) * 0.3)
        self.readout = nn.Linear(14, 3)

    def forward(self, x, adjacency):
        adjacency = adjacency + torch.eye(x.size(1), dtype=x.dtype)
        h = torch.matmul(x, self.w1) + self.bias
        if self.attention:
            e = F.leaky_relu(h @ self.a_src + (h @ self.a_dst).transpose(1, 2), 0.2)
            a = torch.where(adjacency > 0, e, -9e15 * torch.ones_like(e)).softmax(dim=-1)
        else:
            a = adjacency / adjacency.sum(-1, keepdim=True)
        h = F.elu(torch.bmm(a, h))
        return self.readout(torch.bmm(a, h @ self.w2).mean(1))


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 14, 1), nn.Conv1d(14, 22, 1)
        self.fc1, self.fc2 = nn.Linear(22, 18), nn.Linear(18, k * k)
        self.bn1 = nn.BatchNorm1d(14)

    def forward(self, x):
        batch = x.size(0)
        x = F.relu(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 22)
        x = self.fc2(F.relu(self.fc1(x)))
        return x.view(-1, self.k, self.k) + torch.eye(self.k, dtype=x.dtype).unsqueeze(0).repeat(batch, 1, 1)


@hand(signal(3, 25))
class PointNet(nn.Module):
    """Predicted square matrices turn points, then features of width 10."""

    def __init__(self):
        super().__init__()
        self.input_transform, self.feature_transform = TNet(3), TNet(10)
        self.conv1, self.conv2 = nn.Conv1d(3, 10, 1), nn.Conv1d(10, 34, 1)
        self.fc = nn.Linear(44, 4)

    def forward(self, x):
        n_pts = x.size(2)
        x = torch.bmm(self.input_transform(x).transpose(2, 1), x)
        x = F.relu(self.conv1(x))
        x = torch.bmm(x.transpose(2, 1), self.feature_transform(x)).transpose(2, 1)
        g = self.conv2(x).max(dim=2, keepdim=True).values
        g = g.view(-1, 34, 1).repeat(1, 1, n_pts)
        return self.fc(torch.cat([g, x], 1).transpose(2, 1))


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
