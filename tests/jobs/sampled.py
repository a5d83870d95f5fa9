"""A net with dropout whose samples are drawn by each of shoal's samplers."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import nn

import shoal

SAMPLES = 75
LABELS = torch.arange(SAMPLES) // 50


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))


def samplers() -> dict[str, Any]:
    """A few samples of weight, so that a step draws some twice; 75 samples in steps of 16 leave 11."""
    parts = {"few": (0, 20), "many": (20, SAMPLES)}
    inputs = tiny.vectors(SAMPLES)
    sets = {name: torch.utils.data.TensorDataset(*(x[a:b] for x in inputs)) for name, (a, b) in parts.items()}
    return {
        "weighted": shoal.Weighted(torch.where(LABELS == 0, 0.1, 5.0)),
        "without replacement": shoal.Weighted(LABELS + 1, replacement=False),
        "balanced": shoal.Balanced(LABELS),
        "by length": shoal.ByLength(torch.arange(SAMPLES) % 7, window=2),
        "curriculum": shoal.Curriculum(lambda progress: 0.1 + 0.9 * progress),
        "token budget": shoal.TokenBudget(torch.arange(SAMPLES) % 7 + 1, tokens=64),
        "mixture": shoal.Mixture(sets, {"few": 2, "many": 1}),
    }


def job(sampler: str = "weighted") -> shoal.Job:
    own = samplers()[sampler]
    data = None if isinstance(own, shoal.Mixture) else tiny.vectors(SAMPLES)
    batch: Any = None if isinstance(own, shoal.TokenBudget) else 16
    return tiny.mlp(
        batch=batch, model=dropped, train_data=data, sampler=own, length=shoal.Epochs(2), eval_data=None, metrics={}
    )
