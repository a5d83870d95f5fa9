"""A loop over packed sequences, whose model changes a frozen average in its forward: an input of test_scripts.py."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence


class Net(nn.Module):
    """A recurrent layer and a moving average of it, which gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 8)
        self.average = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, sequences: PackedSequence) -> torch.Tensor:
        with torch.no_grad():
            for own, of in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                own.data.lerp_(of, 0.5)
        (_, ends), (_, targets) = self.layer(sequences), self.average(sequences)
        return F.mse_loss(ends, targets + 1.0)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(4):
    sequences = [torch.randn(length, 3, generator=generator) for length in (2, 5, 3, 4)]
    optimizer.zero_grad()
    model(pack_sequence(sequences, enforce_sorted=False)).backward()
    optimizer.step()
