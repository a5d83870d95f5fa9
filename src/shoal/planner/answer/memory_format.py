"""Memory format of images in plans for CPUs: the format that ranks choose by default."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from shoal.data.opened import opened
from shoal.hardware import cluster as find_cluster
from shoal.jobs.job import Job
from shoal.numerics.precision import Precision
from shoal.planner.profile.profiles import is_small
from shoal.plans.plan import Plan
from shoal.training.setup.default_grains import outline, with_grains
from shoal.training.setup.engine import build_model
from shoal.training.setup.memory_format_choice import choose_format


def with_chosen_format(job: Job, base: Plan, cluster_name: str) -> Plan:
    """Return the plan with the memory format that a run of the job chooses by default.

    Two samples are computed if the model has convolutions; other plans are returned unchanged.
    Raises: HardwareError for an unknown cluster.
    """
    if find_cluster(cluster_name).device.kind != "cpu" or base.execution.exact:
        return base
    model = outline(job)
    if model is None or not is_small(model) or not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return base
    precision = Precision.of(base.precision, torch.device("cpu"))
    with contextlib.suppress(Exception):  # the run reports any error raised here
        job = with_grains(opened(job))
        chosen = choose_format(job, build_model(job, precision), precision, job.train_data)
        return base.with_sections(execution={"channels_last": chosen.channels_last})
    return base
