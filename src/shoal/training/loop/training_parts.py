"""All parts of a training, which its loop takes steps with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.checkpoint.keeper import Keeper
from shoal.data.loader import Loader
from shoal.data.order import Order
from shoal.jobs.job import Job
from shoal.plans.resolve import CompletePlan
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.loop.replicas import ReplicaCheck
from shoal.training.microbatch.evaluation import EvaluationSets
from shoal.training.microbatch.step import StepParts
from shoal.training.update.job_optimizer import Parameters
from shoal.training.update.optimizer_step import Updater


@dataclass(frozen=True, kw_only=True)
class TrainingParts(StepParts):
    """All parts of a training: the parts of its steps, the data, the optimizer, evaluation and checkpoints."""

    job: Job
    plan: CompletePlan
    model: nn.Module
    parameters: Parameters
    loader: Loader
    updater: Updater
    order: Order
    evaluator: EvaluationSets
    keeper: Keeper
    replicas: ReplicaCheck
    callbacks: CallbackCalls
