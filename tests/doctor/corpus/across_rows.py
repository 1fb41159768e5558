"""Modules in which rows of padding, of other items or of the whole call count: no operator of theirs is refused."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.corpus.cases import DIM, Base, case


def attend(x, qkv, mask=None):
    q, k, v = qkv(x)[None].unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)[0]


class Attention(Base):
    def __init__(self):
        super().__init__()
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
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


@case("proof")
class ConvolvesRows(Base):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, x):
        return self.conv(x.T[None])[0].T


@case("proof")
class FlipsRows(Base):
    def forward(self, x):
        return self.proj(x) + x.flip(0)


@case("proof")
class RollsRows(Base):
    def forward(self, x):
        return self.proj(x) + x.roll(1, 0)


@case("proof")
class SubtractsTheLastRow(Base):
    def forward(self, x):
        return self.proj(x) - x[-1]


@case("proof")
class SubtractsTheFirstRow(Base):
    def forward(self, x):
        return self.proj(x) - x[:1]


@case("proof")
class SubtractsTheMiddleRow(Base):
    def forward(self, x):
        return self.proj(x) - x[len(x) // 2]


@case("proof")
class BranchesOnOddRows(Base):
    """All budgets have an even number of rows."""

    def forward(self, x):
        return -x if len(x) % 2 else self.proj(x)


@case("proof")
class BranchesOnFewRows(Base):
    def forward(self, x):
        return self.proj(x) if len(x) > 4 else -x


@case("proof")
class LinspaceOverRows(Base):
    def forward(self, x):
        return self.proj(x) * torch.linspace(0, 1, len(x), device=x.device)[:, None]


@case("proof")
class TimesAQuarterOfTheRows(Base):
    def forward(self, x):
        return self.proj(x) * (x.shape[0] // 4)


@case("proof")
class DividesByTheRootOfTheRows(Base):
    def forward(self, x):
        return self.proj(x) / x.shape[0] ** 0.5


@case("proof", "lengths")
class TimesTheNumberOfItems(Base):
    def forward(self, x, lengths):
        return self.proj(x) * len(lengths)


@case("proof")
class BranchesOnRows(Base):
    def forward(self, x):
        return self.proj(x) * 2 if len(x) > 24 else self.proj(x)


@case("proof", "max_seqlen")
class DividesByTheBound(Base):
    """`MaxSeqlen` is the bound of the budget, not the longest of the call."""

    def forward(self, x, max_seqlen):
        return self.proj(x) / max_seqlen


@case("proof", "lengths")
class MeanOfLengths(Base):
    def forward(self, x, lengths):
        return self.proj(x) / lengths.float().mean()


@case("proof", "lengths")
class SmallestLength(Base):
    def forward(self, x, lengths):
        return self.proj(x) + lengths.min()


@case("proof", "lengths")
class LastLength(Base):
    def forward(self, x, lengths):
        return self.proj(x) + lengths[-1]


@case("proof")
class AdaptivePooling(Base):
    def forward(self, x):
        return self.proj(x) + F.adaptive_avg_pool1d(x.T[None], 4)[0].mean(1)


@case("proof")
class ViewsHalves(Base):
    def forward(self, x):
        first = x[: len(x) // 2 * 2].view(2, -1, DIM)
        return self.proj(x) + (first[1] - first[0]).mean(0)


@case("proof")
class MeanOfRows(Base):
    def forward(self, x):
        return self.proj(x) - x.mean(0)


@case("proof")
class MeanOfActiveRowsByNan(Base):
    def forward(self, x):
        return self.proj(x) - x.nanmean(0)


@case("proof")
class SoftmaxOverRows(Base):
    def forward(self, x):
        return self.proj(x) * x.softmax(0)


@case("proof")
class NormOverRows(Base):
    def forward(self, x):
        return self.proj(F.normalize(x, dim=0))


@case("proof")
class StandardizesRows(Base):
    def forward(self, x):
        return (self.proj(x) - x.mean()) / x.std()


@case("proof")
class ScalesByTheLargest(Base):
    def forward(self, x):
        return self.proj(x) / x.abs().amax()


@case("proof")
class GroupNormOverRows(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, DIM)

    def forward(self, x):
        return self.norm(x.T[None])[0].T


@case("proof")
class CumsumOverRows(Base):
    def forward(self, x):
        return self.proj(x) + x.cumsum(0)


@case("proof")
class CountsRows(Base):
    """No padding counts, but a row moves where the call is split."""

    def forward(self, x):
        return self.proj(x) + torch.arange(len(x), device=x.device)[:, None]


@case("proof", "item")
class CountsTheItemsOfACall(Base):
    def forward(self, x, item):
        return self.proj(x) + item[:, None]


@case("proof")
class DifferencesOfRows(Base):
    def forward(self, x):
        return self.proj(x) + x.diff(dim=0, prepend=x[:1])


@case("proof")
class SortsRows(Base):
    def forward(self, x):
        return self.proj(x) + x.sort(0).values


@case("proof")
class RanksRows(Base):
    def forward(self, x):
        return self.proj(x) * x.argsort(0).argsort(0)


@case("proof")
class TopkOverRows(Base):
    def forward(self, x):
        return self.proj(x) + x.topk(2, dim=0).values.sum(0)


@case("proof")
class MedianOfRows(Base):
    def forward(self, x):
        return self.proj(x) - x.median(0).values


@case("proof")
class GramMatrix(Base):
    def forward(self, x):
        return self.proj(x) @ (x.T @ x)


@case("proof")
class WeightsOfData(Base):
    """The weights of a layer made from all rows."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(DIM, DIM * DIM)

    def forward(self, x):
        return x @ self.make(x.amax(0)).view(DIM, DIM)


@case("proof")
class FourierOverRows(Base):
    def forward(self, x):
        return self.proj(x) + torch.fft.fft(x, dim=0).real


@case("proof")
class RecursOverRows(Base):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM // 2, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


@case("proof")
class StretchesRows(Base):
    def forward(self, x):
        return self.proj(x) + F.interpolate(x[:4].T[None], size=len(x), mode="linear")[0].T


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
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None])[:, 0]


@case("fine")
class FlipsChannels(Base):
    def forward(self, x):
        return self.proj(x) + x.flip(1) - x[:, -1:]


@case("fine", "cu_seqlens item")
class CountsRowsOfItems(Base):
    def forward(self, x, cu_seqlens, item):
        return self.proj(x) + (torch.arange(len(x), device=x.device) - cu_seqlens[item])[:, None]


@case("fine")
class PoolsChannels(Base):
    def forward(self, x):
        return self.proj(x) + F.adaptive_avg_pool1d(x[:, None], 4)[:, 0].mean(1, keepdim=True)


@case("fine")
class ViewsChannels(Base):
    def forward(self, x):
        return self.proj(x).view(-1, 2, DIM // 2).flip(1).reshape(-1, DIM)


@case("fine")
class NormalizesChannels(Base):
    def __init__(self):
        super().__init__()
        self.norm, self.groups = nn.LayerNorm(DIM), nn.GroupNorm(2, DIM)

    def forward(self, x):
        return self.groups(self.norm(x)).softmax(1) + F.normalize(x, dim=1) - x.mean(1, keepdim=True)


@case("fine")
class SortsChannels(Base):
    def forward(self, x):
        return self.proj(x) + x.sort(1).values + x.cumsum(1) + x.topk(2, dim=1).values.sum(1, keepdim=True)


@case("fine")
class GatesItself(Base):
    """Weights of a row made from the row."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(DIM, DIM * DIM)

    def forward(self, x):
        return torch.einsum("nd,nde->ne", x, self.make(x).unflatten(1, (DIM, DIM)))


@case("fine")
class FourierOverChannels(Base):
    def forward(self, x):
        return self.proj(x) + torch.fft.fft(x, dim=1).real


@case("fine")
class BatchNormOfEvaluation(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x):
        return self.norm(self.proj(x))
