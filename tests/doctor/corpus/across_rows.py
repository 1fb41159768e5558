"""Modules in which rows of padding, of other items or of the whole call count: no operator of theirs is refused."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.corpus.cases import DIM, Base, case, table


def attend(x, qkv, mask=None):
    q, k, v = qkv(x)[None].unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)[0]


class Attention(Base):
    def start(self):
        self.qkv = nn.Linear(DIM, 3 * DIM)


@case("proof")
class AttendsToAllRows(Attention):
    def forward(self, x):
        return x + attend(x, self.qkv)


@case("proof", "item")
class AttendsBehindAMask(Attention):
    """What is masked still counts if it is not a number."""

    def forward(self, x, item):
        return x + attend(x, self.qkv, item[:, None] == item)


@case("proof")
class EncodesAllRows(Base):
    def start(self):
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


@case("proof")
class ConvolvesRows(Base):
    def start(self):
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x):
        return self.conv(x.T[None])[0].T


@case("proof")
class BranchesOnOddRows(Base):
    """All budgets have an even number of rows."""

    def forward(self, x):
        return -x if len(x) % 2 else self.proj(x)


@case("proof", "max_seqlen")
class DividesByTheBound(Base):
    """`MaxSeqlen` is the bound of the budget, not the longest of the call."""

    def forward(self, x, max_seqlen):
        return self.proj(x) / max_seqlen


@case("proof")
class ViewsHalves(Base):
    def forward(self, x):
        first = x[: len(x) // 2 * 2].view(2, -1, DIM)
        return self.proj(x) + (first[1] - first[0]).mean(0)


@case("proof")
class GroupNormOverRows(Base):
    def start(self):
        self.norm = nn.GroupNorm(2, DIM)

    def forward(self, x):
        return self.norm(x.T[None])[0].T


@case("proof")
class CountsRows(Base):
    """No padding counts, but a row moves where the call is split."""

    def forward(self, x):
        return self.proj(x) + torch.arange(len(x), device=x.device)[:, None]


@case("proof")
class WeightsOfData(Base):
    """The weights of a layer made from all rows."""

    def start(self):
        self.make = nn.Linear(DIM, DIM * DIM)

    def forward(self, x):
        return x @ self.make(x.amax(0)).view(DIM, DIM)


@case("proof")
class RecursOverRows(Base):
    def start(self):
        self.lstm = nn.LSTM(DIM, DIM // 2, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


@case("proof", "item")
class MeanOfItemsByIndex(Base):
    """The item of a padding row is some item, and the row counts for it."""

    def forward(self, x, item):
        sums = x.new_zeros(64, DIM + 1).index_add(0, item, F.pad(x, (0, 1), value=1.0))
        return self.proj(x) - (sums[:, :-1] / sums[:, -1:].clamp(min=1))[item]


@case("fine", "lengths item")
class MeanOfItemsBySums(Base):
    """Sums of rows before the end of an item hold no padding."""

    def forward(self, x, lengths, item):
        ends = lengths.cumsum(0)
        before = F.pad(x.double().cumsum(0), (0, 0, 1, 0))
        sums = before[ends] - before[ends - lengths]
        return self.proj(x) - (sums / lengths.clamp(min=1)[:, None])[item].float()


@case("fine")
class ConvolvesChannels(Base):
    def start(self):
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None])[:, 0]


@case("fine")
class NormalizesChannels(Base):
    def start(self):
        self.norm, self.groups = nn.LayerNorm(DIM), nn.GroupNorm(2, DIM)

    def forward(self, x):
        return self.groups(self.norm(x)).softmax(1) + F.normalize(x, dim=1) - x.mean(1, keepdim=True)


@case("fine")
class GatesItself(Base):
    """Weights of a row made from the row."""

    def start(self):
        self.make = nn.Linear(DIM, DIM * DIM)

    def forward(self, x):
        return torch.einsum("nd,nde->ne", x, self.make(x).unflatten(1, (DIM, DIM)))


@case("fine")
class BatchNormOfEvaluation(Base):
    def start(self):
        self.norm = nn.BatchNorm1d(DIM)
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x):
        return self.norm(self.proj(x))


table(
    "proof",
    FlipsRows=lambda self, x: self.proj(x) + x.flip(0),
    RollsRows=lambda self, x: self.proj(x) + x.roll(1, 0),
    SubtractsTheLastRow=lambda self, x: self.proj(x) - x[-1],
    SubtractsTheFirstRow=lambda self, x: self.proj(x) - x[:1],
    SubtractsTheMiddleRow=lambda self, x: self.proj(x) - x[len(x) // 2],
    BranchesOnFewRows=lambda self, x: self.proj(x) if len(x) > 4 else -x,
    LinspaceOverRows=lambda self, x: self.proj(x) * torch.linspace(0, 1, len(x), device=x.device)[:, None],
    TimesAQuarterOfTheRows=lambda self, x: self.proj(x) * (x.shape[0] // 4),
    DividesByTheRootOfTheRows=lambda self, x: self.proj(x) / x.shape[0] ** 0.5,
    BranchesOnRows=lambda self, x: self.proj(x) * 2 if len(x) > 24 else self.proj(x),
    AdaptivePooling=lambda self, x: self.proj(x) + F.adaptive_avg_pool1d(x.T[None], 4)[0].mean(1),
    MeanOfRows=lambda self, x: self.proj(x) - x.mean(0),
    MeanOfActiveRowsByNan=lambda self, x: self.proj(x) - x.nanmean(0),
    SoftmaxOverRows=lambda self, x: self.proj(x) * x.softmax(0),
    NormOverRows=lambda self, x: self.proj(F.normalize(x, dim=0)),
    StandardizesRows=lambda self, x: (self.proj(x) - x.mean()) / x.std(),
    ScalesByTheLargest=lambda self, x: self.proj(x) / x.abs().amax(),
    CumsumOverRows=lambda self, x: self.proj(x) + x.cumsum(0),
    DifferencesOfRows=lambda self, x: self.proj(x) + x.diff(dim=0, prepend=x[:1]),
    SortsRows=lambda self, x: self.proj(x) + x.sort(0).values,
    RanksRows=lambda self, x: self.proj(x) * x.argsort(0).argsort(0),
    TopkOverRows=lambda self, x: self.proj(x) + x.topk(2, dim=0).values.sum(0),
    MedianOfRows=lambda self, x: self.proj(x) - x.median(0).values,
    GramMatrix=lambda self, x: self.proj(x) @ (x.T @ x),
    FourierOverRows=lambda self, x: self.proj(x) + torch.fft.fft(x, dim=0).real,
    StretchesRows=lambda self, x: self.proj(x) + F.interpolate(x[:4].T[None], size=len(x), mode="linear")[0].T,
)

table(
    "proof",
    "lengths",
    TimesTheNumberOfItems=lambda self, x, lengths: self.proj(x) * len(lengths),
    MeanOfLengths=lambda self, x, lengths: self.proj(x) / lengths.float().mean(),
    SmallestLength=lambda self, x, lengths: self.proj(x) + lengths.min(),
    LastLength=lambda self, x, lengths: self.proj(x) + lengths[-1],
)

table(
    "proof",
    "item",
    CountsTheItemsOfACall=lambda self, x, item: self.proj(x) + item[:, None],
)

table(
    "fine",
    FlipsChannels=lambda self, x: self.proj(x) + x.flip(1) - x[:, -1:],
    PoolsChannels=lambda self, x: self.proj(x) + F.adaptive_avg_pool1d(x[:, None], 4)[:, 0].mean(1, keepdim=True),
    ViewsChannels=lambda self, x: self.proj(x).view(-1, 2, DIM // 2).flip(1).reshape(-1, DIM),
    SortsChannels=lambda self, x: (
        self.proj(x) + x.sort(1).values + x.cumsum(1) + x.topk(2, dim=1).values.sum(1, keepdim=True)
    ),
    FourierOverChannels=lambda self, x: self.proj(x) + torch.fft.fft(x, dim=1).real,
)

table(
    "fine",
    "cu_seqlens item",
    CountsRowsOfItems=lambda self, x, cu_seqlens, item: (
        self.proj(x) + (torch.arange(len(x), device=x.device) - cu_seqlens[item])[:, None]
    ),
)
