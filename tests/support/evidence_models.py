"""Networks and batches that tests of evidence go through."""

import torch
from torch import nn
from torch.nn import functional

from secateur.targets import find_targets

cross_entropy = functional.cross_entropy


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def pairs(count=3, size=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def close(found, expected, **tolerances):
    torch.testing.assert_close(found, expected, check_dtype=False, **tolerances)


def by_hand(model, batches, power=1):
    total = {name: torch.zeros_like(weight) for name, weight in find_targets(model).items()}
    for x, y in batches:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        for name, weight in find_targets(model).items():
            total[name] += weight.grad**power / len(batches)
    model.zero_grad()
    return total


class Language(nn.Module):
    """Token ids and a mask in, as transformers' models; tokens are flattened in the middle."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.flat, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.flat(self.embed(input_ids).reshape(-1, 4)).reshape(*input_ids.shape, 4)
        logits = self.head(hidden)
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}
