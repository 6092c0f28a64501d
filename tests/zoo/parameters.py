"""Parameters that are used by hand, shared, derived."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from zoo.registry import hand, image, several, vector


@hand(vector(14))
class FunctionalParameters(nn.Module):
    """Parameters without modules, through F.linear, matmul, addmm and einsum."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(26, 14) * 0.3), nn.Parameter(torch.zeros(26))
        self.w2 = nn.Parameter(torch.randn(26, 34) * 0.2)
        self.w3, self.b3 = nn.Parameter(torch.randn(34, 18) * 0.2), nn.Parameter(torch.zeros(18))
        self.w4 = nn.Parameter(torch.randn(5, 18) * 0.3)

    def forward(self, x):
        x = F.relu(F.linear(x, self.w1, self.b1))
        x = torch.tanh(x @ self.w2)
        x = torch.addmm(self.b3, x, self.w3).sigmoid()
        return torch.einsum("bi,oi->bo", x, self.w4)


@hand(image())
class FunctionalConvolutions(nn.Module):
    """F.conv2d and F.batch_norm with the tensors of modules and of a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.p = nn.ParameterDict(
            {
                "w1": torch.randn(14, 3, 3, 3) * 0.3, "w2": torch.randn(22, 14, 3, 3) * 0.1, "g": torch.ones(22),
                "b": torch.zeros(22),
            }
        )  # fmt: skip
        self.register_buffer("running_mean2", torch.randn(22) * 0.3)
        self.register_buffer("running_var2", torch.rand(22) + 0.5)
        self.fc = nn.Linear(22, 10)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.p["w1"], padding=1))
        x = F.conv2d(x, self.p["w2"], stride=2)
        x = F.batch_norm(x, self.running_mean2, self.running_var2, self.p["g"], self.p["b"], training=self.training)
        return F.linear(F.relu(x).mean((2, 3)), self.fc.weight, self.fc.bias)


@hand(vector(14))
def spectral_norm_mlp():
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(14, 26)), nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(26, 18)), nn.LeakyReLU(0.2), nn.Linear(18, 1),
    )  # fmt: skip


class LoraLinear(nn.Linear):
    def __init__(self, inp, out, rank):
        super().__init__(inp, out)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, inp) * 0.2), nn.Parameter(torch.zeros(out, rank))
        self.scaling = 2 / rank

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling


@hand(vector(14))
def lora_mlp():
    return nn.Sequential(LoraLinear(14, 30, 6), nn.ReLU(), LoraLinear(30, 22, 4), nn.ReLU(), nn.Linear(22, 3))


@hand(vector(14))
class WeightStandardized(nn.Module):
    """The weight is centred and scaled over its inputs before use, and mixed with another by a sigmoid."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(14, 26), nn.Linear(26, 22), nn.Linear(22, 4)
        self.mix = nn.Parameter(torch.randn(26, 14) * 0.3)

    def forward(self, x):
        w = self.fc1.weight
        w = (w - w.mean(dim=1, keepdim=True)) / (w.std(dim=1, keepdim=True) + 1e-5)
        x = F.relu(F.linear(x, w + torch.sigmoid(self.mix), self.fc1.bias))
        w = F.normalize(self.fc2.weight, dim=1)
        x = F.relu(F.linear(F.normalize(x), w))
        return self.fc3(x)


@hand(several(vector(9), vector(12)))
class HyperNetwork(nn.Module):
    """The condition writes weight and bias of a layer; batched matmul applies them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.hidden = nn.Linear(9, 22)
        self.to_weight, self.to_bias = nn.Linear(22, 16 * 10), nn.Linear(22, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, z, x):
        h = F.relu(self.hidden(z))
        weight = self.to_weight(h).view(-1, 10, 16)
        x = torch.bmm(weight, F.relu(self.body(x)).unsqueeze(-1)).squeeze(-1) + self.to_bias(h)
        return self.out(F.relu(x))


@hand(image())
class SharedConvolution(nn.Module):
    """One module runs three times in sequence, another at two resolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 18, 3, padding=1)
        self.step = nn.Conv2d(18, 18, 3, padding=1)
        self.mix = nn.Conv2d(18, 14, 1)
        self.fc = nn.Linear(28, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for _ in range(3):
            x = x + F.relu(self.step(x))
        a = self.mix(x)
        b = self.mix(F.avg_pool2d(x, 2))
        return self.fc(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))


@hand(several(vector(14), vector(22)))
class TwoTower(nn.Module):
    """Two towers meet in a scaled cosine: the shared width is contracted."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(14, 30), nn.ReLU(), nn.Linear(30, 18))
        self.right = nn.Sequential(nn.Linear(22, 26), nn.ReLU(), nn.Linear(26, 18))
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, a, b):
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        return logits, F.cosine_similarity(a, b)


@hand(several(vector(14), vector(11)))
class BilinearNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(14, 18), nn.Linear(11, 20)
        self.bilinear = nn.Bilinear(18, 20, 13)
        self.out = nn.Linear(13, 2)

    def forward(self, a, b):
        return self.out(F.relu(self.bilinear(F.relu(self.a(a)), F.relu(self.b(b)))))
