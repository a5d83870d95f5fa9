"""Jobs and layouts whose shares cannot follow the ranks' speeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plans.plan import Plan
from shoal.training.loop.share_balance import ShareBalance


def test_closures_are_refused() -> None:
    """Ranks wait for each other between the evaluations of a step."""
    optimizer = torch.optim.LBFGS(nn.Linear(2, 1).parameters())
    parts: Any = SimpleNamespace(
        plan=Plan().with_sections(layout={"data": 2}),
        job=SimpleNamespace(outputs=None, batch_norm="grain", global_batch=8, num_grains=8),
        loader=SimpleNamespace(divides_anew=True),
        updater=SimpleNamespace(needs_closure=True, optimizer=optimizer),
    )
    around: Any = SimpleNamespace()
    with pytest.raises(PlanError, match="by-speed with LBFGS") as raised:
        ShareBalance(parts, around)
    assert "closures" in raised.value.conflict
    parts.updater.needs_closure = False
    assert ShareBalance(parts, around).shares == ()
