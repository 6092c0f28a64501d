"""Attention, in the ways that people write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, image, sequence, several, tokens


@hand(sequence(21))
class MultiheadSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(21, 24)
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.ff = nn.Sequential(nn.Linear(24, 44), nn.ReLU(), nn.Linear(44, 24))
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        x = self.proj(x)
        x = self.norm(x + self.attn(x, x, x, need_weights=False)[0])
        return self.out(x + self.ff(x))


@hand(several(sequence(24), sequence(15, 9)))
class MultiheadCross(nn.Module):
    """Keys and values of other widths; the weights are an output too."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(24, 28)
        self.attn = nn.MultiheadAttention(28, 4, kdim=15, vdim=15, batch_first=True)
        self.out = nn.Linear(28, 6)

    def forward(self, x, memory):
        out, weights = self.attn(self.query(x), memory, memory)
        return self.out(out), weights


@hand(tokens(), name="transformer_encoder")
@hand(tokens(), name="transformer_encoder_prenorm", norm_first=True, activation="gelu")
class TransformerEncoder(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.embedding = nn.Embedding(53, 24)
        self.position = nn.Parameter(torch.randn(1, 32, 24) * 0.1)
        layer = nn.TransformerEncoderLayer(24, 3, 44, batch_first=True, **arguments)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(24, 4)

    def forward(self, x):
        x = self.embedding(x) * math.sqrt(24) + self.position[:, : x.size(1)]
        return self.classifier(self.encoder(x).mean(dim=1))


@hand(several(tokens(53, 7), tokens(47, 5)))
class TransformerSeq2seq(nn.Module):
    """nn.Transformer with a causal mask and positions from a buffer."""

    def __init__(self, width=20):
        super().__init__()
        self.d_model = width
        self.source, self.target = nn.Embedding(53, width), nn.Embedding(47, width)
        position = torch.arange(16).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, 16, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.transformer = nn.Transformer(width, 4, 1, 1, dim_feedforward=36, batch_first=True)
        self.generator = nn.Linear(width, 47)

    def forward(self, source, target):
        source = self.source(source) * math.sqrt(self.d_model)
        target = self.target(target) * math.sqrt(self.d_model)
        source, target = source + self.pe[:, : source.size(1)], target + self.pe[:, : target.size(1)]
        mask = torch.triu(torch.full((target.size(1), target.size(1)), float("-inf"), dtype=source.dtype), diagonal=1)
        return self.generator(self.transformer(source, target, tgt_mask=mask))


class Attention(nn.Module):
    """Causal self-attention from one fused matrix, taken apart in one of the ways that people write."""

    def __init__(self, width, heads, head_dim=None, how="split", block=16):
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim or width // heads
        self.inner = self.heads * self.head_dim
        self.c_attn = nn.Linear(width, 3 * self.inner, bias=how != "einsum")
        self.c_proj = nn.Linear(self.inner, width)
        self.attn_dropout, self.scale = nn.Dropout(0.1), self.head_dim**-0.5
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))
        self.how = how

    def heads_of(self, x):
        B, T, _ = x.size()
        qkv = self.c_attn(x)
        if self.how == "split":  # minGPT
            q, k, v = qkv.split(self.inner, dim=2)
            return tuple(t.view(B, T, self.heads, t.size(2) // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.how == "chunk":
            q, k, v = qkv.chunk(3, dim=-1)
            return tuple(t.view(B, T, self.heads, self.head_dim).permute(0, 2, 1, 3) for t in (q, k, v))
        if self.how == "permute":  # timm
            return qkv.reshape(B, T, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "interleaved":  # NeoX: each head holds its query, key and value
            qkv = qkv.view(B, T, self.heads, 3 * self.head_dim).transpose(1, 2)
            return qkv.split(self.head_dim, dim=-1)
        if self.how == "slices":
            q, k, v = qkv[..., : self.inner], qkv[..., self.inner : 2 * self.inner], qkv[..., 2 * self.inner :]
            return tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        if self.how == "minus_one":
            return tuple(t.view(B, T, -1, self.head_dim).transpose(1, 2) for t in torch.tensor_split(qkv, 3, dim=-1))
        raise ValueError(self.how)

    def forward(self, x):
        B, T, _ = x.size()
        if self.how == "einsum":
            w = self.c_attn.weight.view(3, self.heads, self.head_dim, -1)
            q, k, v = torch.einsum("btc,nhdc->nbhtd", x, w)
            att = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
            y = torch.einsum("bhij,bhjd->bihd", att, v).flatten(2)
            return self.c_proj(y)
        q, k, v = self.heads_of(x)
        if self.how in ("chunk", "slices"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * self.scale
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, self.inner)
        return self.c_proj(y)


@hand(tokens(), name="gpt_split")
@hand(tokens(), name="gpt_chunk", how="chunk")
@hand(tokens(), name="gpt_permute", how="permute")
@hand(tokens(), name="gpt_interleaved", how="interleaved")
@hand(tokens(), name="gpt_slices", how="slices")
@hand(tokens(), name="gpt_minus_one", how="minus_one")
@hand(tokens(), name="gpt_einsum", how="einsum")
@hand(tokens(), name="gpt_wide_heads", how="permute", head_dim=10)
@hand(tokens(), name="gpt_tied", tied=True)
class Gpt(nn.Module):
    def __init__(self, how="split", head_dim=None, tied=False, width=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(53, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "attn": Attention(width, 3, head_dim, how),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 44), nn.GELU(approximate="tanh"), nn.Linear(44, width)),
                }
            )
            for _ in range(2)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 53, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return self.lm_head(self.ln_f(x))


class RmsNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half_chunk(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_slices(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class GroupedQueryAttention(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, repeat="interleave", rope="chunk", qk_norm=False):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.n_rep = heads // kv_heads
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = RmsNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(head_dim) if qk_norm else nn.Identity()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.repeat, self.rope = repeat, rope

    def rotate(self, x):
        t = torch.arange(x.shape[-2], device=x.device, dtype=self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        if self.rope == "complex":
            cis = torch.polar(torch.ones_like(freqs), freqs)
            x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(x_ * cis).flatten(3)
        if self.rope == "pairs":
            emb = freqs.repeat_interleave(2, dim=-1)
            return x * emb.cos() + rotate_pairs(x) * emb.sin()
        if self.rope == "partial":
            rot = self.head_dim // 2
            x, rest = x[..., :rot], x[..., rot:]
            emb = torch.cat((freqs[:, : rot // 2], freqs[:, : rot // 2]), dim=-1)
            return torch.cat((x * emb.cos() + rotate_half_slices(x) * emb.sin(), rest), dim=-1)
        emb = torch.cat((freqs, freqs), dim=-1)
        rotate = rotate_half_chunk if self.rope == "chunk" else rotate_half_slices
        return x * emb.cos() + rotate(x) * emb.sin()

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq = self.q_norm(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)).transpose(1, 2)
        xk = self.k_norm(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        xq, xk = self.rotate(xq), self.rotate(xk)
        if self.repeat == "interleave":
            xk, xv = xk.repeat_interleave(self.n_rep, dim=1), xv.repeat_interleave(self.n_rep, dim=1)
        elif self.repeat == "expand":
            xk, xv = (
                t[:, :, None, :, :]
                .expand(bsz, self.n_kv_heads, self.n_rep, seqlen, self.head_dim)
                .reshape(bsz, self.n_kv_heads * self.n_rep, seqlen, self.head_dim)
                for t in (xk, xv)
            )
        if self.repeat == "grouped":
            q = xq.view(bsz, self.n_kv_heads, self.n_rep, seqlen, self.head_dim)
            scores = torch.einsum("bgrqd,bgkd->bgrqk", q, xk) / math.sqrt(self.head_dim)
            mask = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
            out = torch.einsum("bgrqk,bgkd->bgrqd", scores.masked_fill(~mask, -1e9).softmax(-1), xv)
            out = out.reshape(bsz, self.n_heads, seqlen, self.head_dim)
        elif self.repeat == "sdpa":
            out = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class GatedMlp(nn.Module):
    def __init__(self, width, hidden, fused=False, act=F.silu):
        super().__init__()
        self.fused, self.act = fused, act
        if fused:
            self.w13 = nn.Linear(width, 2 * hidden, bias=False)
        else:
            self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        if self.fused:
            gate, up = self.w13(x).chunk(2, dim=-1)
            return self.w2(self.act(gate) * up)
        return self.w2(self.act(self.w1(x)) * self.w3(x))


@hand(tokens(), name="gqa_interleave")
@hand(tokens(), name="gqa_expand_fused_mlp", repeat="expand", rope="slices", fused=True)
@hand(tokens(), name="gqa_grouped_einsum", repeat="grouped", rope="pairs")
@hand(tokens(), name="gqa_sdpa_complex", repeat="sdpa", rope="complex")
@hand(tokens(), name="gqa_partial_rope", repeat="expand", rope="partial", act=F.gelu)
@hand(tokens(), name="mqa_qk_norm", kv_heads=1, qk_norm=True, fused=True)
class HandLlama(nn.Module):
    def __init__(self, kv_heads=2, fused=False, act=F.silu, **attention):
        super().__init__()
        self.tok_embeddings = nn.Embedding(53, 28)
        self.attention = nn.ModuleList([GroupedQueryAttention(28, 6, kv_heads, 8, **attention) for _ in range(2)])
        self.feed_forward = nn.ModuleList([GatedMlp(28, 46, fused, act) for _ in range(2)])
        self.attention_norm = nn.ModuleList([RmsNorm(28) for _ in range(2)])
        self.ffn_norm = nn.ModuleList([RmsNorm(28) for _ in range(2)])
        self.norm = RmsNorm(28)
        self.output = nn.Linear(28, 53, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        layers = zip(self.attention, self.feed_forward, self.attention_norm, self.ffn_norm, strict=True)
        for attention, feed_forward, attention_norm, ffn_norm in layers:
            h = h + attention(attention_norm(h))
            h = h + feed_forward(ffn_norm(h))
        return self.output(self.norm(h))


class VitBlock(nn.Module):
    def __init__(self, dim, heads, hidden, scale=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.num_heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim))
        self.gamma_1 = nn.Parameter(scale * torch.ones(dim)) if scale else 1.0
        self.gamma_2 = nn.Parameter(scale * torch.ones(dim)) if scale else 1.0

    def attention(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * (C // self.num_heads) ** -0.5
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    def forward(self, x):
        x = x + self.gamma_1 * self.attention(self.norm1(x))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


@hand(image(), name="vit_class_token")
@hand(image(), name="vit_mean_layer_scale", pool="mean", scale=0.5)
class HandVit(nn.Module):
    def __init__(self, dim=24, pool="cls", scale=None):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.2)
        self.blocks = nn.Sequential(VitBlock(dim, 3, 44, scale), VitBlock(dim, 3, 52, scale))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)
        self.pool = pool

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0] if self.pool == "cls" else x[:, 1:].mean(dim=1))


@hand(image())
class VitPatchesByView(nn.Module):
    """lucidrains: patches by rearranging pixels; a linear layer embeds them."""

    def __init__(self, patch=4, dim=20, heads=4, dim_head=6):
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed = nn.Sequential(
            nn.LayerNorm(3 * patch * patch), nn.Linear(3 * patch * patch, dim), nn.LayerNorm(dim)
        )
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))
        self.head = nn.Linear(dim, 10)

    def forward(self, img):
        b, c, h, w = img.shape
        p = self.patch
        x = img.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        x = self.embed(x)
        q, k, v = (t.reshape(b, t.shape[1], self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attn = torch.matmul(q, k.transpose(-1, -2)).div(math.sqrt(q.shape[-1])).softmax(-1)
        out = torch.matmul(attn, v).permute(0, 2, 1, 3).reshape(b, x.shape[1], -1)
        return self.head((x + self.to_out(out)).mean(1))


def window_partition(x, window):
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows, window, H, W):
    B = int(windows.shape[0] / (H * W / window / window))
    x = windows.view(B, H // window, W // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, window, shift):
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.3)
        coords = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])

    def attention(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = (attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    def forward(self, x):
        _, H, W, C = x.shape
        shortcut = x
        x = self.norm1(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, self.window).view(-1, self.window * self.window, C)
        windows = self.attention(windows).view(-1, self.window, self.window, C)
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, out, bias=False)

    def forward(self, x):
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


@hand(image())
class HandSwin(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 18, 2, 2)
        self.layer1 = nn.Sequential(SwinBlock(18, 3, 4, 0), SwinBlock(18, 3, 4, 2))
        self.merge = PatchMerging(18, 28)
        self.layer2 = SwinBlock(28, 4, 4, 0)
        self.norm, self.head = nn.LayerNorm(28), nn.Linear(28, 10)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        x = self.norm(self.layer2(self.merge(self.layer1(x))))
        return self.head(x.flatten(1, 2).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, dim, patches, token_hidden, channel_hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches))
        self.channel = nn.Sequential(nn.Linear(dim, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, dim))

    def forward(self, x):
        x = x + self.token(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.norm2(x))


@hand(image())
class MlpMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 22, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(22, 16, 14, 36), MixerBlock(22, 16, 18, 44))
        self.head = nn.Linear(22, 10)

    def forward(self, x):
        x = self.stem(x)
        b, c, _, _ = x.shape
        x = self.blocks(x.view(b, c, -1).permute(0, 2, 1))
        return self.head(x.mean(dim=1))


@hand(sequence(18))
class LinearAttention(nn.Module):
    """phi(q) (phi(k)ᵀ v) with phi = elu + 1: the features of a head are contracted twice."""

    def __init__(self, heads=3, head_dim=8):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(18, heads * head_dim) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, 14)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nshd,nshm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        y = torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z)
        return self.out(y.contiguous().view(b, n, -1))


@hand(image(size=12))
class UnfoldAttention(nn.Module):
    """Local attention over 3x3 neighbourhoods that F.unfold collects: channels times nine in one dimension."""

    def __init__(self, channels=18):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.out = nn.Conv2d(channels, 5, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        q = self.q(x).view(b, c, 1, h * w)
        k = F.unfold(self.k(x), 3, padding=1).view(b, c, 9, h * w)
        v = F.unfold(self.v(x), kernel_size=3, padding=1).view(b, c, 9, h * w)
        attn = ((q * k).sum(1, keepdim=True) / c**0.5).softmax(dim=2)
        return self.out((attn * v).sum(2).view(b, c, h, w))


@hand(sequence(13, 11))
class Perceiver(nn.Module):
    """Learned latents read the input by cross-attention."""

    def __init__(self, latents=5, width=18, heads=3, inner=24):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_kv = nn.Linear(width, inner, bias=False), nn.Linear(13, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, width)
        self.logits = nn.Linear(width, 6)

    def forward(self, data):
        b = data.shape[0]
        x = self.latents.unsqueeze(0).repeat(b, 1, 1)
        q = self.to_q(self.norm(x))
        k, v = self.to_kv(data).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.logits(x).mean(1)


@hand(image())
class Detr(nn.Module):
    """The demonstration of the paper, time first: queries as parameters, positions joined from columns and rows."""

    def __init__(self, hidden=20):
        super().__init__()
        self.backbone = nn.Sequential(ConvBnRelu(3, 14, 3, 2), ConvBnRelu(14, 26, 3, 2))
        self.conv = nn.Conv2d(26, hidden, 1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(hidden, 4, 34), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(hidden, 4, 38), 1)
        self.linear_class, self.linear_bbox = nn.Linear(hidden, 6), nn.Linear(hidden, 4)
        self.query_pos = nn.Parameter(torch.rand(9, hidden))
        self.row_embed = nn.Parameter(torch.rand(8, hidden // 2))
        self.col_embed = nn.Parameter(torch.rand(8, hidden // 2))

    def forward(self, inputs):
        h = self.conv(self.backbone(inputs))
        H, W = h.shape[-2:]
        col = self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1)
        row = self.row_embed[:H].unsqueeze(1).repeat(1, W, 1)
        pos = torch.cat([col, row], dim=-1).flatten(0, 1).unsqueeze(1)
        source = pos + 0.1 * h.flatten(2).permute(2, 0, 1)
        target = self.query_pos.unsqueeze(1).repeat(1, h.shape[0], 1)
        h = self.decoder(target, self.encoder(source)).transpose(0, 1)
        return {"pred_logits": self.linear_class(h), "pred_boxes": self.linear_bbox(h).sigmoid()}


class StreamHeads(nn.Module):
    """The width of a head is that of the stream over the number of heads, and attention divides by its root."""

    def __init__(self, width=24, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.made, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        count, length, width = x.shape
        parts = self.made(self.norm(x)).split(width, 2)
        q, k, v = (each.view(count, length, self.heads, width // self.heads).transpose(1, 2) for each in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.project(mixed.reshape(count, length, width))


@hand(sequence(9))
def stream_heads():
    return nn.Sequential(nn.Linear(9, 24), StreamHeads(), StreamHeads(), nn.Linear(24, 5))


@hand(sequence(9))
class LayersShareAttention(nn.Module):
    """One block, used three times: what makes up for its width does so once."""

    def __init__(self, width=24):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(9, width), StreamHeads(width), nn.Linear(width, 5)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


@hand(sequence(9))
class QueriesAreKeys(nn.Module):
    """Scaling the queries would scale the keys."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.heads, self.shared, self.value = heads, nn.Linear(9, heads * width), nn.Linear(9, heads * width)
        self.last = nn.Linear(heads * width, 5)

    def forward(self, x):
        q, v = (each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.shared, self.value))
        return self.last(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))


@hand(sequence(9))
class RotatedQueries(nn.Module):
    """Rotary positions between the weights of queries and attention that divides by the root of their width."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(9, heads * width) for _ in range(3))
        self.last = nn.Linear(heads * width, 5)
        self.register_buffer("frequencies", 10.0 ** -torch.linspace(0, 1, width // 2))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)

        def turned(t):
            first, second = t.chunk(2, -1)
            return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.last(mixed.transpose(1, 2).flatten(2))


@hand(image(3, 8))
class WindowsAndGrid(nn.Module):
    """As in MaxViT: attention within windows, then over a grid of the same places."""

    def __init__(self, width=16, window=4):
        super().__init__()
        self.stem, self.window = nn.Conv2d(3, width, 3, padding=1), window
        self.local, self.grid, self.last = StreamHeads(width, 4), StreamHeads(width, 4), nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x)
        b, c, h, w = x.shape
        size = self.window
        t = x.view(b, c, h // size, size, w // size, size).permute(0, 2, 4, 3, 5, 1).reshape(-1, size * size, c)
        t = self.local(t).view(b, h // size, w // size, size, size, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
        t = t.view(b, c, size, h // size, size, w // size).permute(0, 3, 5, 2, 4, 1).reshape(-1, size * size, c)
        return self.last(self.grid(t).reshape(b, -1, c).mean(1))


@hand(tokens())
class RowsReplaced(nn.Module):
    """As images among words: rows that a mask chooses are those of another tensor."""

    def __init__(self, width=12):
        super().__init__()
        self.words, self.places = nn.Embedding(53, width), nn.Parameter(torch.randn(14, 6))
        self.project, self.hidden, self.last = nn.Linear(6, width), nn.Linear(width, 24), nn.Linear(24, 5)

    def forward(self, tokens):
        x = self.words(tokens)
        chosen = (tokens < 20).unsqueeze(-1).expand_as(x)
        return self.last(self.hidden(x.masked_scatter(chosen, self.project(self.places))).relu())
