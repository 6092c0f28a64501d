"""Diffusion, autoencoders, flows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image, vector


class DiffusionBlock(nn.Module):
    def __init__(self, inp, oup, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inp), nn.Conv2d(inp, oup, 3, padding=1)
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time, oup * 2))
        self.norm2, self.conv2 = nn.GroupNorm(2, oup), nn.Conv2d(oup, oup, 3, padding=1)
        self.res_conv = nn.Conv2d(inp, oup, 1) if inp != oup else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.mlp(t)[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (scale + 1) + shift))
        return h + self.res_conv(x)


class DiffusionAttention(nn.Module):
    def __init__(self, dim, heads=2, dim_head=6):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.GroupNorm(1, dim)
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in qkv)
        sim = torch.einsum("bhdi,bhdj->bhij", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("bhij,bhdj->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 1, 3, 2).reshape(b, -1, h, w)) + x


@hand(lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 40])))
class DiffusionUnet(nn.Module):
    def __init__(self, dim=12, time=28):
        super().__init__()
        self.dim = dim
        self.time_mlp = nn.Sequential(nn.Linear(dim, time), nn.SiLU(), nn.Linear(time, time))
        self.init_conv = nn.Conv2d(3, 12, 3, padding=1)
        self.down1, self.attn1, self.downsample = (
            DiffusionBlock(12, 12, time),
            DiffusionAttention(12),
            nn.Conv2d(12, 20, 4, 2, 1),
        )
        self.mid1, self.mid_attn, self.mid2 = (
            DiffusionBlock(20, 26, time),
            DiffusionAttention(26, 3),
            DiffusionBlock(26, 20, time),
        )
        self.upsample = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(20, 14, 3, padding=1))
        self.up1 = DiffusionBlock(26, 12, time)
        self.final_conv = nn.Conv2d(24, 3, 1)

    def embed(self, t, dtype):
        half_dim = self.dim // 2
        emb = torch.exp(torch.arange(half_dim, device=t.device, dtype=dtype) * -(math.log(10000) / (half_dim - 1)))
        emb = t[:, None].to(dtype) * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)

    def forward(self, x, time):
        t = self.time_mlp(self.embed(time, x.dtype))
        x = self.init_conv(x)
        r = x.clone()
        h = self.attn1(self.down1(x, t))
        x = self.mid2(self.mid_attn(self.mid1(self.downsample(h), t)), t)
        x = self.up1(torch.cat((self.upsample(x), h), dim=1), t)
        return self.final_conv(torch.cat((x, r), dim=1))


@hand(image(1, 12))
class VariationalAutoencoder(nn.Module):
    """The decoder views a vector as channels and positions; mean and variance are two heads."""

    def __init__(self, latent=10):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 20, 3, 2, 1), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(20 * 9, latent), nn.Linear(20 * 9, latent)
        self.decoder_input = nn.Linear(latent, 22 * 9)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(22, 14, 4, 2, 1), nn.BatchNorm2d(14), nn.LeakyReLU(), nn.ConvTranspose2d(14, 1, 4, 2, 1)
        )

    def reparameterize(self, mu, logvar):
        if self.training:
            return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return mu

    def forward(self, x):
        h = torch.flatten(self.enc(x), start_dim=1)
        mu, logvar = self.fc_mu(h), self.fc_var(h)
        z = self.reparameterize(mu, logvar)
        out = self.decoder_input(z).view(-1, 22, 3, 3)
        return torch.sigmoid(self.dec(out)), mu, logvar


@hand(vector(30))
class TiedAutoencoder(nn.Module):
    """The decoder uses the transposed weights of the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder1, self.encoder2 = nn.Linear(30, 22), nn.Linear(22, 14)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(22)), nn.Parameter(torch.zeros(30))

    def forward(self, x):
        h = torch.relu(self.encoder2(torch.relu(self.encoder1(x))))
        h = torch.relu(F.linear(h, self.encoder2.weight.t(), self.bias1))
        return F.linear(h, self.encoder1.weight.t(), self.bias2)


@hand(vector(20))
class MaskedAutoregressive(nn.Module):
    """MADE: buffers as large as the weights mask them in forward."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(20, 36), nn.Linear(36, 20)
        self.register_buffer("mask1", (torch.rand(36, 20) > 0.4).float())
        self.register_buffer("mask2", (torch.rand(20, 36) > 0.4).float())

    def forward(self, x):
        h = F.relu(F.linear(x, self.fc1.weight * self.mask1, self.fc1.bias))
        return F.linear(h, self.fc2.weight * self.mask2, self.fc2.bias)


@hand(image(6, 8))
class GlowCoupling(nn.Module):
    """Invertible: half of the channels give scale and shift of the others, then a fixed permutation."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 18, 3, padding=1), nn.ReLU(), nn.Conv2d(18, 14, 1), nn.ReLU(),
                nn.Conv2d(14, 6, 3, padding=1),
            )
            for _ in range(2)
        )  # fmt: skip
        self.actnorm = nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5)
        self.register_buffer("order", torch.tensor([3, 5, 0, 2, 4, 1]))

    def forward(self, x):
        logdet = 0
        for net in self.nets:
            x = x * self.actnorm
            a, b = x.chunk(2, 1)
            log_scale, shift = net(a).chunk(2, 1)
            scale = torch.sigmoid(log_scale + 2)
            logdet = logdet + scale.log().flatten(1).sum(-1)
            x = torch.cat([a, (b + shift) * scale], 1)[:, self.order]
        return x, logdet


@hand(image())
class ReversibleBlocks(nn.Module):
    """Two streams that feed each other: y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 28, 3, padding=1)
        self.f = nn.Sequential(ConvBnRelu(14, 18, 3), nn.Conv2d(18, 14, 1))
        self.g = nn.Sequential(ConvBnRelu(14, 22, 3), nn.Conv2d(22, 14, 1))
        self.fc = nn.Linear(28, 10)

    def forward(self, x):
        x1, x2 = torch.chunk(self.stem(x), 2, dim=1)
        y1 = x1 + self.f(x2)
        y2 = x2 + self.g(y1)
        return self.fc(torch.cat([y1, y2], 1).mean((2, 3)))


@hand(image())
class VectorQuantized(nn.Module):
    """Distances to a codebook decide: the code's width is summed in a square."""

    def __init__(self, codes=11, width=14):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 18, 4, 2, 1), nn.ReLU(), nn.Conv2d(18, width, 3, padding=1))
        self.codebook = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(width, 20, 4, 2, 1), nn.ReLU(), nn.Conv2d(20, 3, 1))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, self.codebook.embedding_dim)
        distances = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.weight.t() + self.codebook.weight.pow(2).sum(1)
        )
        index = distances.argmin(dim=1)
        quantized = self.codebook(index).view(z.shape)
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized.permute(0, 3, 1, 2)), index.view(z.shape[0], -1)
