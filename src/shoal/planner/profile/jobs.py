"""Profiles of jobs: everything is taken from the Job itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.data.opened import training_data
from shoal.data.source import MapSource, small_batch
from shoal.job import Job
from shoal.parallel.model.deferred_init import deferred
from shoal.planner.profile.engine_pairs import as_engine
from shoal.planner.profile.profiles import Tensors, profile
from shoal.planner.profile.values import Profile
from shoal.plans.plan import Plan


def profile_job(job: Job, plan: Plan | None = None, *, device: str = "cuda", tensor: Tensors | None = None) -> Profile:
    """The profile of a job in the precision of a plan, on devices of a type.

    Reads one grain of the training data; every batch is as long as that one's longest sample.
    Raises: what the job's model, loss or data raise.
    """
    plan = plan if plan is not None else Plan()
    batch = Batches(job)

    def cut(outline: nn.Module) -> Any:
        return tensor(outline) if tensor is not None else as_engine(outline, job.loss, batch(2))

    def made(model: Any) -> Profile:
        return profile(
            model,
            job.loss,
            batch,
            precision=plan.precision,
            device=device,
            by_grain=True,
            tensor=cut,
            optimizer=job.optimizer,
        )

    try:
        return made(job.model)
    except Exception as error:
        try:
            outlined, _ = deferred(job.model, job.seed)  # constructors that compute with values
        except Exception:
            raise error from None
        return made(outlined)


class Batches:
    """Batches of any number of samples like those of one grain of a job."""

    def __init__(self, job: Job) -> None:
        data = training_data(job)
        self._source = data.source
        if isinstance(self._source, MapSource):
            self._rows = min(len(self._source), job.grain_size)
            self._one = self._fetch(self._rows)
        else:
            self._one = small_batch(data.source, data.collate)
            self._rows = 2

    def __call__(self, samples: int) -> Any:
        """`samples` samples."""
        tensors = [leaf for leaf in tree_leaves(self._one) if isinstance(leaf, Tensor)]
        if tensors and all(t.ndim and t.shape[0] == self._rows for t in tensors):
            rows = torch.arange(samples) % self._rows
            return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, self._one)
        return self._fetch(samples)

    def _fetch(self, samples: int) -> Any:
        assert isinstance(self._source, MapSource)
        return self._source.fetch([np.arange(samples) % len(self._source)], [0])
