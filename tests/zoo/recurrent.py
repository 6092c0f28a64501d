"""Recurrence and time: cells, and convolutions over steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from zoo.convolutional import ConvBnRelu
from zoo.registry import hand, sequence, signal, tokens


@hand(tokens(), name="lstm_classifier")
@hand(tokens(), name="lstm_two_layers", layers=2)
@hand(tokens(), name="lstm_bidirectional", layers=2, bidirectional=True)
@hand(tokens(), name="gru_classifier", cell=nn.GRU)
@hand(tokens(), name="gru_bidirectional", cell=nn.GRU, bidirectional=True)
@hand(tokens(), name="rnn_classifier", cell=nn.RNN)
class RecurrentClassifier(nn.Module):
    def __init__(self, cell=nn.LSTM, layers=1, bidirectional=False):
        super().__init__()
        self.embedding = nn.Embedding(53, 18, padding_idx=0)
        self.rnn = cell(18, 22, num_layers=layers, batch_first=True, bidirectional=bidirectional)
        self.fc1 = nn.Linear(22 * (1 + bidirectional), 14)
        self.fc2 = nn.Linear(14, 4)

    def forward(self, x):
        out, _ = self.rnn(self.embedding(x))
        return self.fc2(F.relu(self.fc1(out[:, -1, :])))


@hand(sequence(9))
class LstmLastHidden(nn.Module):
    """Time first, an initial state from zeros, the last hidden states of both directions concatenated."""

    def __init__(self, hidden=20):
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(9, hidden, bidirectional=True)
        self.norm = nn.LayerNorm(2 * hidden)
        self.fc = nn.Linear(2 * hidden, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        h0 = torch.zeros(2, x.size(1), self.hidden, dtype=x.dtype)
        c0 = torch.zeros(2, x.size(1), self.hidden, dtype=x.dtype)
        _, (hn, _) = self.lstm(x, (h0, c0))
        return self.fc(self.norm(torch.cat((hn[-2], hn[-1]), dim=1)))


@hand(sequence(11))
class LstmCellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(11, 22), nn.LSTMCell(22, 18)
        self.linear = nn.Linear(18, 1)

    def forward(self, x):
        outputs = []
        h1 = c1 = torch.zeros(x.size(0), 22, dtype=x.dtype)
        h2 = c2 = x.new_zeros(x.size(0), self.lstm2.hidden_size)
        for step in x.split(1, dim=1):
            h1, c1 = self.lstm1(step.squeeze(1), (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


@hand(sequence(10))
class GruByHand(nn.Module):
    """One matrix for all gates, chunked in three."""

    def __init__(self, hidden=18):
        super().__init__()
        self.hidden_size = hidden
        self.x2h, self.h2h = nn.Linear(10, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, 4)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.hidden_size, dtype=x.dtype)
        for t in range(x.shape[1]):
            i_r, i_i, i_n = self.x2h(x[:, t]).chunk(3, 1)
            h_r, h_i, h_n = self.h2h(h).chunk(3, 1)
            reset, update = torch.sigmoid(i_r + h_r), torch.sigmoid(i_i + h_i)
            new = torch.tanh(i_n + reset * h_n)
            h = new + update * (h - new)
        return self.out(h)


@hand(lambda: torch.randn(2, 1, 16, 24))
class Crnn(nn.Module):
    """Text recognition: channels and height are one feature of each column."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(ConvBnRelu(1, 10, 3), nn.MaxPool2d(2), ConvBnRelu(10, 14, 3), nn.MaxPool2d((4, 1)))
        self.rnn = nn.LSTM(14 * 2, 18, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(36, 11)

    def forward(self, x):
        x = self.cnn(x)
        b, c, h, w = x.shape
        x = x.permute(0, 3, 1, 2).reshape(b, w, c * h)
        return F.log_softmax(self.fc(self.rnn(x)[0]), dim=2)


@hand(tokens(length=9))
class TextCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(53, 18)
        self.convs = nn.ModuleList([nn.Conv2d(1, 10, (k, 18)) for k in (2, 3, 4)])
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(3 * 10, 5)

    def forward(self, x):
        x = self.embed(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in x]
        return self.fc1(self.dropout(torch.cat(x, 1)))


class Chomp1d(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inp, oup, dilation):
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(inp, oup, 3, padding=2 * dilation, dilation=dilation)),
            Chomp1d(2 * dilation),
            nn.ReLU(),
            nn.Dropout(0.2),
            parametrizations.weight_norm(nn.Conv1d(oup, oup, 3, padding=2 * dilation, dilation=dilation)),
            Chomp1d(2 * dilation),
            nn.ReLU(),
        )
        self.downsample = nn.Conv1d(inp, oup, 1) if inp != oup else None

    def forward(self, x):
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


@hand(signal(5, 24))
class Tcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(TemporalBlock(5, 14, 1), TemporalBlock(14, 22, 2), TemporalBlock(22, 22, 4))
        self.linear = nn.Linear(22, 3)

    def forward(self, x):
        return self.linear(self.network(x)[:, :, -1])


@hand(signal(1, 40), name="wavenet_fused")
class WaveNet(nn.Module):
    """Dilated gated convolutions; each layer adds to the residual stream and to the skips."""

    def __init__(self, residual=14, skip=22):
        super().__init__()
        self.start = nn.Conv1d(1, residual, 1)
        self.gates = nn.ModuleList([nn.Conv1d(residual, 36, 2, dilation=2**i) for i in range(3)])
        self.residuals = nn.ModuleList([nn.Conv1d(18, residual, 1) for _ in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(18, skip, 1) for _ in range(3)])
        self.end1, self.end2 = nn.Conv1d(skip, 26, 1), nn.Conv1d(26, 8, 1)

    def forward(self, x):
        x = self.start(x)
        skip = None
        for i in range(3):
            a, b = self.gates[i](x).chunk(2, dim=1)
            out = torch.tanh(a) * torch.sigmoid(b)
            s = self.skips[i](out)
            skip = s if skip is None else s + skip[:, :, -s.size(2) :]
            x = self.residuals[i](out) + x[:, :, -out.size(2) :]
        return self.end2(F.relu(self.end1(F.relu(skip))))


@hand(sequence(20, 11))
class ConformerConvolution(nn.Module):
    """Pointwise convolution into nn.GLU, a depthwise one, BatchNorm, SiLU; half-step feed-forward around."""

    def __init__(self, width=20, inner=26):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 44), nn.SiLU(), nn.Dropout(0.1), nn.Linear(44, width))
        self.pointwise1 = nn.Conv1d(width, 2 * inner, 1)
        self.depthwise = nn.Conv1d(inner, inner, 5, padding=2, groups=inner)
        self.bn = nn.BatchNorm1d(inner)
        self.pointwise2 = nn.Conv1d(inner, width, 1)

    def forward(self, x):
        x = x + 0.5 * self.ff(self.norm1(x))
        y = self.norm2(x).transpose(1, 2)
        y = F.glu(self.pointwise1(y), dim=1)
        y = self.pointwise2(F.silu(self.bn(self.depthwise(y)))).transpose(1, 2)
        return x + y


@hand(lambda: torch.randn(6, 3, 8, 8).view(2, 3, 3, 8, 8))
class TemporalShift(nn.Module):
    """Frames lend slices of channels to their neighbours, by assignment in place."""

    def __init__(self, n_segment=3, fold_div=4):
        super().__init__()
        self.n_segment, self.fold_div = n_segment, fold_div
        self.conv1, self.conv2 = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 14, 3, padding=1)
        self.fc = nn.Linear(14, 5)

    def shift(self, x):
        nt, c, h, w = x.size()
        x = x.view(nt // self.n_segment, self.n_segment, c, h, w)
        fold = c // self.fold_div
        out = torch.zeros_like(x)
        out[:, :-1, :fold] = x[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = x[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = x[:, :, 2 * fold :]
        return out.view(nt, c, h, w)

    def forward(self, x):
        b, t = x.shape[:2]
        x = x.flatten(0, 1)
        x = F.relu(self.conv2(self.shift(F.relu(self.conv1(x)))))
        return self.fc(x.mean((2, 3))).view(b, t, -1).mean(1)
