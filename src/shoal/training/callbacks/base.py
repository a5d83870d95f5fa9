"""Callback: base class of hooks into a run; RunControl: a run as they see it, and the requests that they may make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.job import Job
from shoal.parallel.model.sharded_model import ShardedModel, local, whole_tensors
from shoal.plans.plan import Plan
from shoal.runs.events import Events
from shoal.runs.records import StepRecord
from shoal.training.callbacks.hook_barrier import HookBarrier

if TYPE_CHECKING:
    from shoal.checkpoint.run_state import RunState

# Bits of a request in the ranks' agreement.
EVALUATE, CHECKPOINT, END, FAILED = 1, 2, 4, 8


@dataclass(frozen=True)
class Ending:
    """End of a run: `completed`, `preempted` or `failed`; metrics of the last evaluation; why it ended early."""

    status: str
    step: int
    metrics: Mapping[str, float]
    reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that do not change: its job, plan, ranks, directory, settings and description."""

    job: Job
    plan: Plan
    rank: int
    world_size: int
    num_steps: int
    out: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limbs:
    """Parts of an engine that a RunControl reaches into."""

    sharded_model: ShardedModel
    build: Callable[[], nn.Module]
    gives: Callable[[str], None]
    note: Callable[[str], None]
    events: Events
    barrier: HookBarrier


class RunControl:
    """A run in the hands of a callback: facts, the model, and requests that all ranks follow together.

    A request counts at the step boundary at which it is made, on every rank, also where one rank alone has made it.
    """

    def __init__(self, facts: RunFacts, limbs: Limbs, state: Callable[[], RunState]) -> None:
        self._facts, self._limbs, self._state = facts, limbs, state
        self.asked, self.reasons = 0, dict[str, str]()
        self.caller: Callback | None = None  # whose hook is running
        self.late = False  # the next step is under way
        self.failed_alone = False  # an error ends this rank, and maybe no other: nothing can be gathered

    @property
    def job(self) -> Job:
        """The job that is trained."""
        return self._facts.job

    @property
    def plan(self) -> Plan:
        """The plan that it is trained by."""
        return self._facts.plan

    @property
    def rank(self) -> int:
        """This process's rank; files and networks are for rank 0."""
        return self._facts.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._facts.world_size

    @property
    def num_steps(self) -> int:
        """The step that the run goes up to."""
        return self._facts.num_steps

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._state().step

    @property
    def samples(self) -> int:
        """Samples of all finished steps."""
        return self._state().samples

    @property
    def out(self) -> Path | None:
        """The run directory; None where there is none."""
        return self._facts.out

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the job function was called with."""
        return self._facts.settings

    @property
    def description(self) -> Mapping[str, Any]:
        """The content of `job.json`."""
        return self._facts.description

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what an evaluation gives."""
        return self._facts.job.metric_names

    @property
    def model(self) -> nn.Module:
        """This rank's model, or its part of it; modes and buffers are put back after the hook. Not to be changed."""
        model = self._held().model
        self._limbs.gives("model")
        return model

    def _held(self) -> ShardedModel:
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
        return self._limbs.sharded_model

    @property
    def divided(self) -> bool:
        """Whether this rank lacks some of the model's parameters: under ZeRO-2 and 3, tensor, pipeline and others."""
        return self._limbs.sharded_model.divided

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's own memory of each parameter that it has, or of its slice. Not to be changed."""
        held = self._held()
        self._limbs.gives("parameters")
        return ((name, local(p)) for name, p in held.parameters())

    def trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `parameters`, of those that are trained."""
        self._limbs.gives("parameters")
        return self.unwatched_parameters()

    def unwatched_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `trained_parameters`, for callbacks of shoal: what they do with them is not looked for in later hooks."""
        return ((name, local(p)) for name, p in self._held().parameters() if p.requires_grad)

    def whole_model(self) -> nn.Module | None:
        """A copy of the model with all parameters, in eval mode, on rank 0's CPU; None on the other ranks.

        Collective: all ranks, so that every rank's hook has to call it. Rank 0 needs memory for the model.
        Raises: JobError, on the ranks that call it, where the model is divided and a rank's hook does not come to it.
        """
        held = self._held()
        if held.divides_state and self.world_size > 1:
            if self.failed_alone:
                raise JobError(
                    given="run.whole_model() in an on_end whose status is failed",
                    conflict="the model is divided over the ranks, and the others may wait elsewhere",
                    remedy='write `if ending.status != "failed":` before it; the last checkpoint has the whole model',
                )
            self._limbs.barrier.wait("run.whole_model()")
        found = dict(whole_tensors(held, held.tensors()))
        if self.rank != 0:
            return None
        model = self._limbs.build().cpu()
        named = dict([*model.named_parameters(), *model.named_buffers()])
        with torch.no_grad():
            for name, value in found.items():
                if value is not None:
                    named[name].copy_(value)
        return model.eval()

    def note(self, text: str) -> None:
        """A line for people, from rank 0."""
        if self.rank == 0:
            self._limbs.note(text)

    def incident(self, kind: str, what: str, done: str = "nothing") -> None:
        """A line of the run's event log, from rank 0: what happened, and what is done about it."""
        if self.rank == 0 and self.out is not None:
            key = self.caller.key if self.caller is not None else ""
            self._limbs.events.add(kind, step=self.step, what=what, noticed=f"the callback {key}", done=done)

    def request_evaluation(self) -> None:
        """Asks for an evaluation now, unless this step was evaluated."""
        self._ask(EVALUATE)

    def request_checkpoint(self) -> None:
        """Asks for a checkpoint now."""
        self._ask(CHECKPOINT)

    def request_end(self, reason: str = "") -> None:
        """Asks for the end of the training now: the last state is saved and evaluated, the run is completed."""
        if self.caller is not None:
            self.reasons.setdefault(self.caller.key, reason)
        self._ask(END)

    def _ask(self, bit: int) -> None:
        if self.caller is not None and self.caller.watches_only:
            raise JobError(
                given=f"a request by {self.caller.key}, which says watches_only = True",
                conflict="ranks do not ask each other after each step what such a callback wants",
                remedy="leave watches_only out",
            )
        self.asked |= bit


class Callback:
    """Base class of hooks into a run. Every rank has its own and calls it at the same step boundaries.

    Hooks run without gradients and with generators of their own: what they draw or compute changes nothing in the
    training. One that raises is switched off on all ranks and named, or ends the run where `required` is true.
    `watches_only`: makes no requests, so that its on_step costs no agreement of the ranks.
    """

    required: bool = False
    watches_only: bool = False
    key: str = ""  # its name in checkpoints and messages, set when a run begins

    def on_start(self, run: RunControl) -> None:
        """Before the first step of this call; after `load_state_dict` where the run goes on from a checkpoint."""

    def on_step(self, run: RunControl, record: StepRecord) -> None:
        """After a step; the record's seconds, spans and memory are this rank's, all else is the same on all ranks."""

    def at_once(self, step: int) -> bool:
        """Whether `on_step` has to come before the next step begins: after step `step`, counted from 1.

        Where it is False, and `watches_only` true, a GPU may be at the next step by then, and the hook has the record
        alone: what it asks of the model is refused. The same on all ranks.
        """
        return True

    def on_evaluation(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        """After an evaluation; the metrics are the same on all ranks."""

    def on_checkpoint(self, run: RunControl, folder: Path) -> None:
        """After a checkpoint was taken; the folder appears once it is written."""

    def on_end(self, run: RunControl, ending: Ending) -> None:
        """After the last step and its evaluation, or where the run failed."""

    def state_dict(self) -> Mapping[str, Any]:
        """State for checkpoints: tensors, numbers, texts, and lists, tuples and dicts of them; rank 0's is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave, on every rank."""

    def parameter_tensors(self) -> Mapping[str, Tensor]:
        """Further state: a tensor for each of `run.parameters()`, by name; saved and cut as the parameters are."""
        return {}

    def load_parameter_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up `parameter_tensors`, cut for this rank."""

    def metric_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the metrics that this callback adds to an evaluation of those."""
        return ()

    def mistakes(self, job: Job) -> Iterable[tuple[str, str, str]]:
        """Mistakes in a job with this callback: what was given, what it conflicts with, what to write."""
        return ()


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback's class has a hook of its own."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def refuse_own(callback: Callback) -> None:
    """Raises: JobError where an object has what its class says for all ranks: by it they know when to agree."""
    for name in vars(Callback):
        if name in vars(callback) and (name == "watches_only" or callable(getattr(Callback, name))):
            raise JobError(
                given=f"{name} of one {type(callback).__name__}",
                conflict="the ranks agree by the hooks of a callback's class, which are the same on all of them",
                remedy=f"define {name} in the class; what is for one rank stands there under `if run.rank == 0:`",
            )
