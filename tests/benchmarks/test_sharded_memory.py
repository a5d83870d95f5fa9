"""What a transformer block keeps for its backward, by the formula of the benchmark and by count."""

from __future__ import annotations

import pytest
import torch
from benchmarks.sharded_memory import transformer_block
from tests.unit.planner.worlds import Block
from tests.unit.plans.accounting.test_collectives_memory import saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.plans.schedule import in_flight


@pytest.mark.parametrize(("samples", "length", "width", "heads"), [(2, 8, 12, 2), (3, 5, 32, 4)])
def test_a_transformer_block(samples: int, length: int, width: int, heads: int) -> None:
    block = Block(width, heads)
    x = torch.randn(samples, length, width, requires_grad=True)
    assert saved(block, lambda: block(x).sum().backward()) == transformer_block(samples, length, width, heads)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_blocks_in_flight_and_recomputed(recompute: str, microbatches: int) -> None:
    """Forwards first, as in gpipe; hooks of a region that recomputes hide what it has back."""
    blocks = nn.ModuleList(Block(12, 2) for _ in range(4))

    def forward() -> Tensor:
        x = torch.randn(2, 8, 12, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)
        return x.sum()

    kept = 4 * 2 * 8 * 12 if recompute == "full" else transformer_block(2, 8, 12, 2)
    peak = saved(blocks, lambda: [loss.backward() for loss in [forward() for _ in range(microbatches)]])
    assert peak == in_flight("gpipe", 1, 1, microbatches)[0] * 4 * kept
