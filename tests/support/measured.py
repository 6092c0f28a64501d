"""Small models of blocks for shrinking by data, text-like batches for them, and how far outputs are apart."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


class Attending(nn.Module):
    """Attention and an MLP, each added to the stream; a bias where asked for."""

    def __init__(self, width=12, heads=3, hidden=20):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, mask=None):
        h = self.first(x)
        q, k, v = (each(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = None if mask is None else mask[:, None, None, :].bool()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class TwoStage(nn.Module):
    """Selects rows by a score, as RT-DETR its queries, and goes on with these; or with those that it is given."""

    def __init__(self, most=5):
        super().__init__()
        self.most = most
        self.first, self.features, self.score = nn.Linear(6, 24), nn.Linear(24, 10), nn.Linear(10, 1)
        self.head = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4))

    def select(self, x):
        features = self.features(self.first(x).relu())
        return features, self.score(features).squeeze(-1).topk(self.most, dim=1).indices

    def forward(self, x, rows=None):
        features, own = self.select(x)
        rows = own if rows is None else rows
        return self.head(features.gather(1, rows[..., None].expand(-1, -1, features.shape[-1])))


class Picking(nn.Module):
    """Adds what it makes of the rows with the highest scores."""

    def __init__(self, width=6, hidden=8):
        super().__init__()
        self.up, self.score, self.down = nn.Linear(width, hidden), nn.Linear(hidden, 1), nn.Linear(hidden, width)

    def forward(self, x):
        hidden = self.up(x).relu()
        rows = self.score(hidden).squeeze(-1).topk(5, dim=1).indices
        return x + self.down(hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))).mean(1, keepdim=True)


class Words(nn.Module):
    """A model of words, with a head that is tied to the embedding where asked for."""

    def __init__(self, layers=2, width=12, words=16, tied=False, **sizes):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attending(width, **sizes) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x))


def words(seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    return Words(**settings).to(dtype).eval()


def text(count=6, rows=3, length=12, seed=0, words=16):
    """Batches of tokens in which some words follow others."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (count, rows, length), generator=generator)
    return list((steps.cumsum(-1) * 3 % words).unbind())


def answers(model, batches):
    with torch.no_grad():
        return torch.cat([model(each).double().flatten() for each in batches])


def apart(model, batches, wanted):
    """How far the model's answers are from those wanted, as a share of these."""
    return float((answers(model, batches) - wanted).norm() / wanted.norm())


def trained(steps=120):
    """A model of words that has learned which words follow."""
    model = words(width=16, hidden=32, heads=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in text(count=steps, rows=8, seed=1):
        optimizer.zero_grad()
        loss_of(model, [tokens], graph=True).backward()
        optimizer.step()
    return model.eval()


def loss_of(model, batches, *, graph=False):
    """The mean cross entropy of each next word."""
    with torch.set_grad_enabled(graph):
        losses = [
            functional.cross_entropy(model(each)[:, :-1].flatten(0, 1), each[:, 1:].flatten()) for each in batches
        ]
    return torch.stack(losses).mean()


@dataclass(eq=False)
class ByParameters:
    """A runtime in which a pass takes a second for each parameter, and one where there are none: no test reads a
    clock."""

    now: float = 0.0

    def __call__(self, model, example_inputs, *, traced=False):
        size = max(1, sum(each.numel() for each in model.parameters()))

        def call():
            self.now += size

        return call

    @property
    def clock(self):
        return lambda: self.now
