"""Samplers of a torch DataLoader and their equivalents in shoal."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.data.order import Sampler
from shoal.data.samplers import Weighted
from shoal.jobs.job import Mistake

# Parts of names of samplers that depend on a process's own random numbers or rank, and what has their effect.
_SAMPLERS = {
    "Token": "shoal.TokenBudget(lengths, tokens)",
    "Length": "shoal.ByLength(lengths, window=50)",
    "Bucket": "shoal.ByLength(lengths, window=50)",
    "Weighted": "shoal.Weighted(weights)",
    "Balance": "shoal.Balanced(labels)",
    "Imbalance": "shoal.Balanced(labels)",
}


def is_torchs(value: Any, kind: type) -> bool:
    """Check for torch's or torchdata's own class, since a user's subclass may behave differently."""
    return isinstance(value, kind) and is_of_torch(type(value).__module__)


def is_of_torch(module: str) -> bool:
    """Return whether a module's name is of torch or torchdata."""
    return module.partition(".")[0] in ("torch", "torchdata")


def order_of_sampler(sampler: Any, dataset: Any, global_batch: int | None) -> tuple[Any, bool | Sampler] | Mistake:
    """Return the sampler's dataset and whether each epoch has a new order, or shoal's sampler; or a mistake."""
    if is_torchs(sampler, SequentialSampler) or is_torchs(sampler, RandomSampler):
        if len(sampler.data_source) != len(dataset):
            given = f"a sampler of {len(sampler.data_source)} of its {len(dataset)} samples"
            return given, "an epoch reads the whole dataset", "give the samples themselves: torch.utils.data.Subset"
        if isinstance(sampler, SequentialSampler):
            return dataset, False
        if sampler.replacement:
            return dataset, Weighted(np.ones(len(dataset)), num_samples=sampler.num_samples)
        if sampler.num_samples != len(dataset):
            given = f"RandomSampler(num_samples={sampler.num_samples})"
            return given, "an epoch reads every sample once", "write shuffle=True, and say how long in Job(length=...)"
        return dataset, True
    if is_torchs(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices)), True
    if isinstance(sampler, DistributedSampler):
        size = "" if global_batch is None else f"batch_size={global_batch}, "
        return (
            f"sampler=DistributedSampler(num_replicas={sampler.num_replicas}, ...)",
            "shoal itself divides each step among the ranks: every rank gives the whole dataset",
            f"write DataLoader(dataset, {size}shuffle={sampler.shuffle}), and seed={sampler.seed} in the job",
        )
    if is_torchs(sampler, WeightedRandomSampler):
        return dataset, Weighted(sampler.weights, sampler.replacement, sampler.num_samples)
    return (
        f"sampler={type(sampler).__name__}(...)",
        "the order of samples follows from the seed, the epoch and the step, whatever was read before",
        in_place_of(sampler),
    )


def in_place_of(sampler: Any) -> str:
    """Return what to write instead of a sampler of another library or of the user."""
    name = type(sampler).__name__
    known = next((write for part, write in _SAMPLERS.items() if part in name), None)
    fixed = "write shuffle=True or False; a fixed order is a dataset: torch.utils.data.Subset(dataset, list(sampler))"
    return fixed if known is None else f"leave it out of the DataLoader, and write sampler={known} in the job"
