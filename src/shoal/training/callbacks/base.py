"""Callback, the base class of hooks into a run, and RunControl, their view of the run with its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.jobs.job import Job
from shoal.parallel.model.sharded_model import ShardedModel, local, whole_tensors
from shoal.plans.plan import Plan
from shoal.runs.attempts import Events
from shoal.runs.records import StepRecord

if TYPE_CHECKING:
    from shoal.checkpoint.keeper import RunState
    from shoal.training.callbacks.calls import HookBarrier

# Bits of a request in the ranks' agreement.
EVALUATE, CHECKPOINT, END, FAILED = 1, 2, 4, 8


@dataclass(frozen=True)
class Ending:
    """End of a run: `completed`, `preempted` or `failed`, with the last evaluation's metrics.

    `reason`: why the run ended early, if it did. `error`: the error of a failed run.
    """

    status: str
    step: int
    metrics: Mapping[str, float]
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """Constant facts about a run: its job, plan, ranks, directory, settings and description.

    `own_loop`: the training is a Session, and the user's loop evaluates.
    """

    job: Job
    plan: Plan
    rank: int
    world_size: int
    num_steps: int
    out: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)
    own_loop: bool = False


class RunControl:
    """A run as a callback sees it: facts, the model, and requests that all ranks follow together.

    All ranks follow a request at the step boundary at which it is made, even if only one rank makes it.

    Attributes:
        job: the job that is trained. A Session's job has its numbers, and no functions.
        plan: the plan of the run.
        rank: this process's rank. Use rank 0 for files and networks.
        world_size: number of ranks.
        num_steps: number of steps of the whole run.
        out: the run directory, or None.
        settings: the arguments of the job function.
        description: the content of `job.json`.
        metric_names: names of the metrics of an evaluation; empty in a Session, whose loop chooses them.
        divided: True if this rank lacks some of the model's parameters, as under ZeRO-2, ZeRO-3 or tensor parallelism.
    """

    def __init__(
        self,
        facts: RunFacts,
        model: ShardedModel,
        build: Callable[[], nn.Module],
        *,
        gives: Callable[[str], None],
        print_line: Callable[[str], None],
        events: Events,
        barrier: HookBarrier,
        state: Callable[[], RunState],
    ) -> None:
        """Take the facts and the parts. `gives`: called before a hook gets the "model" or its "parameters"."""
        self.job, self.plan, self.rank, self.world_size = facts.job, facts.plan, facts.rank, facts.world_size
        self.num_steps, self.out, self.settings = facts.num_steps, facts.out, facts.settings
        self.description, self.divided, self._own_loop = facts.description, model.divided, facts.own_loop
        self.metric_names = () if facts.own_loop else facts.job.metric_names
        self._model, self._build, self._gives, self._print_line = model, build, gives, print_line
        self._events, self._barrier, self._state = events, barrier, state
        self.request_bits, self.reasons = 0, dict[str, str]()
        self.caller: Callback | None = None  # the callback of the running hook
        self.late = False  # the next step is already queued
        self.failed_alone = False  # an error ends this rank, and maybe no other rank: nothing can be gathered

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._state().step

    @property
    def samples(self) -> int:
        """Number of samples in all finished steps."""
        return self._state().samples

    @property
    def model(self) -> nn.Module:
        """This rank's model, or its part. Do not change it; modes and buffers are restored after the hook."""
        model = self._readable_model().model
        self._gives("model")
        return model

    def _readable_model(self) -> ShardedModel:
        if self.plan.serves:
            raise JobError(
                given=f"a callback that asks for the model, with server.mode = {self.plan.server.mode!r}",
                conflict="the parameters are on the servers, and this process has those of the last pause",
                remedy="use a plan without servers, or leave the callback out",
            )
        if self.late:
            raise JobError(
                given="a callback whose at_once says no, and which asks for the model in on_step",
                conflict="the next step is under way on the device: the model is not that of this step any more",
                remedy="return True in at_once(step) for the steps whose model it wants",
            )
        return self._model

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of the name and local memory of each parameter, or slice of one. Do not change them."""
        model = self._readable_model()
        self._gives("parameters")
        return ((name, local(p)) for name, p in model.parameters())

    def trained_parameters(self, *, watched: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return `parameters` that require a gradient.

        `watched`: False for shoal's own callbacks, whose hooks are then not checked for changes.
        """
        if watched:
            self._gives("parameters")
        return ((name, local(p)) for name, p in self._readable_model().parameters() if p.requires_grad)

    def whole_model(self) -> nn.Module | None:
        """Return a copy of the model with all parameters, in eval mode, on rank 0's CPU; None on other ranks.

        Every rank's hook has to call this method. Rank 0 needs memory for the model.
        Raises: JobError on the calling ranks, if the model is divided and another rank's hook does not call it.
        Collective: all ranks.
        """
        sharded = self._readable_model()
        if sharded.divides_state and self.world_size > 1:
            if self.failed_alone:
                raise JobError(
                    given="run.whole_model() in an on_end whose status is failed",
                    conflict="the model is divided over the ranks, and the others may wait elsewhere",
                    remedy='write `if ending.status != "failed":` before it; the last checkpoint has the whole model',
                )
            self._barrier.wait("run.whole_model()")
        values = dict(whole_tensors(sharded, sharded.tensors()))
        if self.rank != 0:
            return None
        model = self._build().cpu()
        named = dict([*model.named_parameters(), *model.named_buffers()])
        with torch.no_grad():
            for name, value in values.items():
                if value is not None:
                    named[name].copy_(value)
        return model.eval()

    def note(self, text: str) -> None:
        """Print a line for people on rank 0."""
        if self.rank == 0:
            self._print_line(text)

    def incident(self, kind: str, what: str, done: str = "nothing") -> None:
        """Add a line to the run's event log on rank 0: what happened, and what was `done` about it."""
        if self.rank == 0 and self.out is not None:
            key = self.caller.key if self.caller is not None else ""
            self._events.add(kind, step=self.step, what=what, noticed=f"the callback {key}", done=done)

    def request_evaluation(self) -> None:
        """Request an evaluation now, unless this step was evaluated. Raises: JobError in a Session."""
        if self._own_loop:
            raise JobError(
                given="run.request_evaluation() in a Session",
                conflict="a loop of your own evaluates, with the data and metrics that it chooses",
                remedy="write session.evaluate(dataset, metrics) in the loop; its result comes to on_evaluation",
            )
        self.request_bits |= _permitted(self.caller, EVALUATE)

    def request_checkpoint(self) -> None:
        """Request a checkpoint now."""
        self.request_bits |= _permitted(self.caller, CHECKPOINT)

    def request_end(self, reason: str = "") -> None:
        """Request the end of the training now. The last state is saved and evaluated, and the run is completed."""
        if self.caller is not None:
            self.reasons.setdefault(self.caller.key, reason)
        self.request_bits |= _permitted(self.caller, END)


class Callback:
    """Base class of hooks into a run. Every rank has its own object and calls it at the same step boundaries.

    Hooks run without gradients and with their own generators, so that they do not change the training. If a hook
    raises, the callback is switched off on all ranks and reported. If `required` is True, the error ends the run
    instead.
    `watches_only`: True for a callback without requests. Its `on_step` then needs no agreement of the ranks.
    """

    required: bool = False
    watches_only: bool = False
    key: str = ""  # the callback's name in checkpoints and messages, set when a run begins

    def on_start(self, run: RunControl) -> None:
        """Handle the start of this call of the run, before its first step and after any `load_state_dict`."""

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        """Handle the end of a step.

        The record's seconds, spans and memory are this rank's; the rest of it is the same on all ranks.
        """

    def at_once(self, step: int) -> bool:
        """Return True if `on_step` has to run after step `step`, counted from 1, before the next step begins.

        If this method returns False and `watches_only` is True, a GPU may already compute the next step. The hook then
        gets the record, and access to the model is refused. Return the same value on all ranks.
        """
        return True

    def on_evaluation(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        """Handle the metrics of an evaluation, which are the same on all ranks."""

    def on_checkpoint(self, run: RunControl, folder: Path) -> None:
        """Handle a checkpoint of the current state; `folder` appears once the checkpoint is written."""

    def on_end(self, run: RunControl, ending: Ending) -> None:
        """Handle the end of the run, after the last evaluation or after a failure."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for checkpoints, which store rank 0's.

        It consists of tensors, numbers, texts, and lists, tuples and dicts of these.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the value of `state_dict`, on every rank."""

    def parameter_tensors(self) -> Mapping[str, Tensor]:
        """Return a tensor for each of `run.parameters()`, by name; checkpoints store and cut them like these."""
        return {}

    def load_parameter_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `parameter_tensors`, cut for this rank."""

    def metric_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics that this callback adds to an evaluation of the metrics `names`."""
        return ()

    def mistakes(self, job: Job) -> Iterable[tuple[str, str, str]]:
        """Return the mistakes in a job with this callback: what was given, what it conflicts with, what to write."""
        return ()


def _permitted(caller: Callback | None, bit: int) -> int:
    """Return the bit of a request. Raises: JobError if the calling callback only watches."""
    if caller is not None and caller.watches_only:
        raise JobError(
            given=f"a request by {caller.key}, which says watches_only = True",
            conflict="ranks do not exchange the requests of such a callback after a step",
            remedy="leave watches_only out",
        )
    return bit


def overrides(callback: Callback, hook: str) -> bool:
    """Return True if a callback's class overrides a hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def refuse_own(callback: Callback) -> None:
    """Raise JobError for a hook on the object, not its class: only a class's hooks are the same on all ranks."""
    for name in vars(Callback):
        if name in vars(callback) and (name == "watches_only" or callable(getattr(Callback, name))):
            raise JobError(
                given=f"{name} of one {type(callback).__name__}",
                conflict="all ranks must have the same hooks, so shoal reads those of the class",
                remedy=f"define {name} in the class, with `if run.rank == 0:` around code for one rank",
            )
