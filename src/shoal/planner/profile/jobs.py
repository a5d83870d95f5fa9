"""Profiles of jobs, made from the Job itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.opened import training_data
from shoal.data.source import MapSource, small_batch
from shoal.errors import ShoalError, UserCodeError
from shoal.jobs.job import Job
from shoal.numerics.flat import is_strided
from shoal.numerics.isolation import generators_kept
from shoal.numerics.operators import replace_leaves, tensors_in
from shoal.parallel.model.deferred_init import deferred
from shoal.planner.profile.engine_pairs import outlined
from shoal.planner.profile.profiles import Tensors, is_small, profile
from shoal.planner.profile.values import Profile
from shoal.plans.plan import Plan
from shoal.training.setup.default_grains import with_grains
from shoal.training.setup.lazy_modules import lazy_names, whole


def profile_job(job: Job, plan: Plan | None = None, *, device: str = "cuda", tensor: Tensors | None = None) -> Profile:
    """Return the profile of a job in a plan's precision on one type of device.

    The function reads one grain of training data. All traced batches have the length of that grain's longest sample.
    Raises: UserCodeError if the job's model, loss or data raise an error, or cannot be traced.
    """
    plan = plan if plan is not None else Plan()
    try:
        return _profile(job, plan, device, tensor)
    except ShoalError:
        raise
    except Exception as error:
        raise UserCodeError(
            given="one grain of the job's samples, for a trace of its model and loss",
            conflict=f"{type(error).__name__}: {str(error).strip()}",
            remedy="train a step with `shoal run JOB --steps 1`; where that works, model or loss may compute other "
            "operators for other samples, which cannot be planned, or shoal's trace is at fault: please report it",
        ) from error


def _profile(job: Job, plan: Plan, device: str, tensor: Tensors | None) -> Profile:
    batch = Batches(with_grains(job))

    def made(model: Any) -> Profile:
        return profile(
            model,
            job.loss,
            batch,
            precision=plan.precision,
            device=device,
            by_grain=True,
            tensor=tensor,
            optimizer=job.optimizer,
        )

    sketch = outlined(job.model)
    if lazy_names(sketch):  # parameters whose shapes only a forward determines
        with generators_kept():
            return made(whole(job.model(), with_grains(job)))
    try:
        return made(job.model)
    except Exception as error:
        if not is_small(sketch):
            raise  # drawing its initial weights alone would take minutes
        try:
            model, _ = deferred(job.model, job.seed)  # for constructors that read tensor values
        except Exception:
            raise error from None
        return made(model)


class Batches:
    """Source of batches of any number of samples, built from one grain of a job."""

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
        """Return a batch of `samples` samples."""
        tensors = tensors_in(self._one)
        if tensors and all(is_strided(t) and t.ndim and t.shape[0] == self._rows for t in tensors):
            rows = torch.arange(samples) % self._rows
            return replace_leaves(self._one, Tensor, lambda leaf: leaf[rows])
        return self._fetch(samples)

    def _fetch(self, samples: int) -> Any:
        assert isinstance(self._source, MapSource)
        return self._source.fetch([np.arange(samples) % len(self._source)], [0])
