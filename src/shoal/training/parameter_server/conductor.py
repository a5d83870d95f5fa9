"""Conductor of a parameter-server run: hands out steps, decides updates, and writes records and checkpoints.

The conductor computes no gradient. It decides each step's update once for all servers, so that every shard has the same
versions. A worker that dies has changed nothing, and its task is handed out again.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.keeper import RunState
from shoal.data.loader import MapLoader
from shoal.distributed.mesh import raise_peer
from shoal.errors import InternalError, JobError, LaunchError, StorageError
from shoal.jobs.job import Progress
from shoal.parallel.base import Flags, StepSums
from shoal.parallel.data.pushed import combine
from shoal.plans.grains import share
from shoal.training.loop.trainer import BetweenSteps, Outcome
from shoal.training.microbatch.nonfinite import NonFiniteStep, find_nonfinite
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import no_gradient
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.parameter_server.members import Member, Members, WorkerEvent
from shoal.training.parameter_server.retreat import Retreat
from shoal.training.parameter_server.served_records import Arrived, PushCounts, ServedRecords, exactly_once
from shoal.training.parameter_server.server import Servers
from shoal.training.parameter_server.task_queue import TaskQueue
from shoal.training.parameter_server.worker import fixed_tensors, no_stream
from shoal.training.setup.engine import Engine
from shoal.training.update.optimizer_step import Update, clipping, judged

_TICK_SECONDS = 0.05
# A worker is stuck if a task takes longer than 60 s and longer than 20 times the longest task so far.
# The third limit applies before a first task has ended, and while a worker builds its model.
_STUCK_SECONDS, _STUCK_TIMES, _FIRST_SECONDS = 60.0, 20.0, 600.0
# A run without any worker ends after this time.
_ALONE_SECONDS = 120.0


class Conductor:
    """Training loop of one job with workers and servers. It replaces the trainer in the conductor's process."""

    def __init__(
        self,
        engine: Engine,
        around: Surroundings,
        state: RunState,
        num_steps: int,
        writer: RecordWriter,
        *,
        crew: Members,
    ) -> None:
        """Prepare the training from `state` up to `num_steps`."""
        if engine.job.on_nonfinite == "rollback":
            raise JobError(
                given='on_nonfinite="rollback" with servers',
                conflict="steps after the bad one may be applied before it is known, and none of them can be taken "
                "back",
                remedy='write on_nonfinite="skip" or "stop", or server.mode = "none"',
            )
        if not isinstance(engine.loader, MapLoader):
            raise no_stream()
        self._engine, self._around, self.state, self._num_steps, self._crew = engine, around, state, num_steps, crew
        self._clock, self._buffers = engine.clock, engine.buffers
        self.servers = Servers(engine.model, engine.updater.optimizer, engine.plan.server.num_servers, crew)
        self._retreat = Retreat(engine, around, state, self.servers)
        self._desk = TaskQueue(
            self._retreat.rules, state.step, lambda step, *part: bool(share(engine.order.grains(step), *part))
        )
        self._computation = MicrobatchPolicy.from_json(state.computation) if state.computation is not None else None
        self._initial = self._buffers.model.values()
        if self._computation is not None:
            self._buffers.watch(self._computation.buffers, dict(self._computation.rules))
        self._given: dict[
            int, tuple[Member, float, dict[str, Tensor] | None]
        ] = {}  # by ticket: worker, time, buffers at that time
        self._arrived: dict[int, dict[int, Arrived]] = {}  # by step and part
        self.tally = PushCounts()
        self._joined: set[int] = set()
        self._alone_since = time.monotonic()
        self._longest = 0.0
        self._records = ServedRecords(engine, around, writer, state)
        self._between = BetweenSteps(
            engine, around, self._records, num_steps, lambda optimizer: self.servers.fetch(optimizer=optimizer)
        )

    def train(self) -> Outcome:
        """Train to the end, or to the first step after a stop was requested.

        Raises: ShoalError from a server or from the policy on non-finite steps; PeerError.
        """
        callbacks = self._engine.callbacks
        self._engine.model.train()
        try:
            self._crew.assemble()
            self.servers.load(self.state.step)
            self._engine.introduce_callbacks(self._num_steps, self._around)
            callbacks.start(self.state)
            self._retreat.begin()
            self._clock.begin()
            status: str | None = None
            while self._desk.version != self._desk.limit or (status := self._pause()) is None:
                self._give_out()
                self._clock.mark("exposed_communication")
                event = self._crew.next(_TICK_SECONDS)
                self._clock.mark("other")
                if event is not None:
                    self._handle(event)
                self._look_after()
            assert status is not None
        except Exception as error:
            callbacks.end("failed", error=error)
            raise
        finally:
            self._records.write()
        outcome = self._between.conclude(self.state, status)
        callbacks.conclude(self._engine.mesh, outcome.status, outcome.metrics, outcome.ended_by)
        return outcome

    def _pause(self) -> str | None:
        """Evaluate, save and stop between two steps; return the final status, or set the next pause and return None.

        All earlier steps are applied, no later step is, and no task runs. A checkpoint is the same as under any other
        plan.
        """
        keeper, step = self._engine.keeper, self.state.step
        if self._retreat.due:
            self.tally.undone += self._retreat.go(self._records, self._desk)
            self._between.forget()
            step = self.state.step
        self._retreat.keep_if_best()
        if self.state.evaluation_due or (self._records.waiting and self._between.evaluates_after(step)):
            self._between.evaluate(self.state)
        while self._engine.callbacks.request_bits:
            self._between.serve(self.state, self._engine.callbacks.request_bits)
        self._clock.begin()  # exclude the evaluation from the step's time
        self._records.write()
        if self._between.ended_by is not None or step >= self._num_steps:
            return "completed"
        if self._around.stop_requested():
            return "preempted"
        if keeper.due(step):
            self._clock.mark("checkpoint")
            self._between.save(self.state, in_step=True)
            self._clock.mark("other")
        order, every = self._engine.order, self._engine.keeper.every_steps
        epoch = order.first_step(order.epoch(step) + 1)
        planned = [(step // n + 1) * n for n in (every, self._around.evaluate_every) if n is not None]
        self._desk.limit = min(self._num_steps, epoch, *planned)
        return None

    def _give_out(self) -> None:
        busy = {id(member) for member, _, _ in self._given.values()}
        for member in [m for m in self._crew.members if id(m) not in busy]:
            task = self._desk.take()
            if task is None:
                return
            start = self._buffers.model.values() if self._computation is not None else None
            self._given[task.ticket] = member, time.monotonic(), start
            self._tell(member, {"kind": "task", **vars(task)})

    def _tell(self, member: Member, message: dict[str, Any]) -> None:
        """Send a message to a worker, with the microbatch policy and the buffers that it covers."""
        known, named = self._computation, dict(self._engine.model.named_buffers())
        buffers = [named[name] for name in known.buffers] if known is not None else []
        computation = known.to_json() if known is not None else None
        self._crew.tell(member, {**message, "computation": computation, "era": self._retreat.era}, buffers)

    def show(self) -> None:
        """Let every worker pull the servers' parameters, and wait for that, after `train`."""
        waiting = set(map(id, self._crew.members))
        for member in self._crew.members:
            self._tell(member, {"kind": "show", "version": self._desk.version})
        while waiting:
            event = self._crew.next(_TICK_SECONDS)
            if event is not None and event.message["kind"] in ("shown", "lost"):
                waiting.discard(id(event.member))
            self._look_after()

    def _handle(self, event: WorkerEvent) -> None:
        kind, member = event.message["kind"], event.member
        if kind == "ready":
            welcome = {"kind": "welcome", "names": self.servers.names, "ports": self._crew.ports}
            self._crew.tell(member, welcome, fixed_tensors(self._engine.model))
            if member.number in self._joined:
                self._incident(member, "replaced", f"{member} has come in its place")
            self._joined.add(member.number)
        elif kind == "lost":
            again = [task for task in self._desk.out if self._given[task.ticket][0] is member]
            for task in again:
                self._desk.put_back(task)
                del self._given[task.ticket]
            self.tally.again += len(again)
            what = ", ".join(f"part {task.part} of step {task.step}" for task in again) or "nothing"
            self._incident(member, "lost", f"{member} is gone; it was computing {what}")
        elif kind == "failed":
            raise_peer([event.message["error"]])
        elif kind == "done":
            message = event.message
            done = self._desk.done(message["ticket"])
            self.tally.moved(member.number, message["pushed_bytes"], message["pulled_bytes"])
            if done is None:
                self.tally.late += 1
                return
            _, since, start = self._given.pop(done.ticket)
            self._longest = max(self._longest, time.monotonic() - since)
            # Adopt the more conservative policy. Parts under another one are computed again.
            known, reported = self._computation, MicrobatchPolicy.from_json(message["computation"])
            agreed = reported if known is None else known.with_care_of(reported)
            if known is not None and _care(agreed) != _care(known):
                for part in [part for step in self._arrived.values() for part in step.values()]:
                    self._desk.put_back(part.task)
                self._arrived.clear()
            if known is None or _care(agreed) != _care(known):
                self._buffers.watch(agreed.buffers, dict(agreed.rules))
            self._computation = self._engine.computer.computation = agreed
            if _care(agreed) != _care(reported):
                self._desk.put_back(done)
                return
            nodes = [(int(lo), int(hi)) for lo, hi in message["nodes"]]
            sums = dict(zip(nodes, event.tensors, strict=True))
            arrived = self._arrived.setdefault(done.step, {})
            arrived[done.part] = Arrived(done, member, message["version"], sums, message["row"])
            if len(arrived) == self._desk.parts(done.step):
                self._apply(done.step, self._arrived.pop(done.step), start)

    def _incident(self, member: Member, kind: str, text: str) -> None:
        worker = {"worker": member.number, "rank": member.rank}
        self.tally.incidents.append({"kind": kind, **worker, "step": self.state.step, "said": text})
        self._around.note(f"step {self.state.step}: {text}")

    def _look_after(self) -> None:
        """End workers that are stopped or stuck, and decide whether to pause."""
        now = time.monotonic()
        limit = max(_STUCK_SECONDS, _STUCK_TIMES * self._longest) if self._longest else _FIRST_SECONDS
        late = [member for member, since, _ in self._given.values() if now - since > limit]
        late = [member for member in late if member in self._crew.members]
        unready = [member for member in self._crew.coming if now - member.came > _FIRST_SECONDS]
        for member, text in (
            *((member, f"has said nothing for {now - member.heard:.0f} s") for member in self._crew.silent()),
            *((member, f"has not been done with its part of a step for {limit:.0f} s") for member in late),
            *((member, f"has not been ready for {_FIRST_SECONDS:.0f} s") for member in unready),
        ):
            if not member.ended:
                self._incident(member, "stopped", f"{member} {text}: ended")
                self._crew.end(member)
        if self._crew.members or self._crew.coming:
            self._alone_since = now
        elif now - self._alone_since > _ALONE_SECONDS:
            raise LaunchError(
                given=f"a run of {self._engine.plan.layout.data} worker(s)",
                conflict=f"none has been there for {_ALONE_SECONDS:.0f} s",
                remedy="look at what they say in logs/ of the run directory",
            )
        keeper = self._engine.keeper
        is_due = keeper.every_steps is None and keeper.due(self.state.step)
        if self._around.stop_requested() or is_due or self._retreat.due or self._engine.callbacks.request_bits:
            self._desk.limit = min(self._desk.limit, self._desk.frontier)

    def _apply(self, step: int, arrived: dict[int, Arrived], start: dict[str, Tensor] | None) -> None:
        """Decide on a step's update, the same for all servers."""
        observer, order = self._engine.observer, self._engine.order
        self._clock.mark("optimizer")
        observer.begin(step, 1.0)
        if not exactly_once(arrived.values(), len(order.grains(step))):
            raise InternalError(
                given=f"step {step}",
                conflict=f"its parts hold the grains {sorted(n for a in arrived.values() for n in a.sums)}",
                remedy="please report it: the parts must hold every grain once",
            )
        rows = {node: row for part in arrived.values() for node, row in part.sums.items()}
        total = combine(rows, order.num_grains, torch.add, exact=self._engine.plan.execution.exact)
        assert total is not None, "a step has a part"
        sums = StepSums(total.numpy(), Flags())
        if sums.is_constant:
            raise no_gradient(sums.weight)
        progress = Progress(step, order.num_steps, order.samples_before(step))
        rate = self._engine.updater.stepper.set_rates(progress)
        norm, scale = 0.0, math.nan
        skipped: str | None = "weightless"
        if sums.weight:
            scale = 1.0 / sums.weight
            norm = self.servers.combine(step, {part: a.task.ticket for part, a in arrived.items()}) * abs(scale)
            observer.reduced(sums.loss, sums.weight, scale)
            skipped = judged(sums.loss, norm, scale, self.state.loss_scale)
        if skipped is None:
            scale *= clipping(self._engine.job.clip_norm, norm)
            observer.clipped(norm)
        repeated = self.servers.apply(self._desk.version + 1, None if skipped else scale, progress)
        self.tally.repeated = max(self.tally.repeated, repeated)
        update, culprits = Update(norm, rate, skipped), None
        if skipped == "nonfinite":
            culprits = self._nonfinite(step, sums, arrived)
        elif skipped is None:
            began = (start or self._initial) if self._retreat.ahead else None
            self._buffers.assign(sums.buffers, sums.num_samples, began)
        observer.updated(skipped)
        staleness = self._desk.version - min(part.version for part in arrived.values())
        self.tally.applied(arrived.values(), order.grains(step), staleness)
        self.state.computation = self._computation.to_json() if self._computation is not None else None
        self._records.count(sums, update, culprits, arrived)
        self._retreat.count()
        self._desk.applied()

    def _nonfinite(self, step: int, sums: StepSums, arrived: dict[int, Arrived]) -> dict[str, Any]:
        """Apply the job's policy, and return the culprits of a skipped step. Raises: NonFiniteError."""
        engine, state = self._engine, self.state
        self.servers.fetch(optimizer=False)
        self._buffers.begin()
        engine.loader.seek(step, engine.computer.computation.effective_grains)
        data = engine.loader.step(step)
        microbatches = list(data.microbatches) if data is not None else []
        culprits = find_nonfinite(engine.computer, engine.precision, engine.parameters, engine.mesh, microbatches)
        self._buffers.restore()
        first = next(iter(culprits["grains"]), None)
        for part, came in arrived.items():
            own = share(engine.order.grains(step), part, came.task.num_parts)
            if first in [grain.index for grain in own]:
                culprits |= {"rank": came.member.rank, "host": came.member.host}
        state.bad_streak += 1
        bad = NonFiniteStep(step, sums.loss, culprits, state.bad_streak, engine.job.on_nonfinite)
        self._around.note(str(bad))
        if not bad.ends:
            return culprits
        if self._desk.version == step and not self._desk.out:  # all earlier steps are applied, and no later step is
            with contextlib.suppress(StorageError):  # already reported; the non-finite step is the reason to end
                self.servers.fetch(optimizer=True)
                engine.keeper.save(state, wait=True)
        calmer = "; or less momentum and a lower rate for what is stale" if self._retreat.ahead else ""
        raise bad.error("it was not applied", f'Job(on_nonfinite="skip") and --resume{calmer}')

    def report(self) -> dict[str, Any]:
        """Return the block `server` of the result, as JSON values."""
        section = self._engine.plan.server
        about = {"mode": section.mode, "num_servers": section.num_servers, "num_workers": self._engine.plan.layout.data}
        bound = {"bound": section.staleness} if section.mode == "bounded" else {}
        return {**about, **bound, **self._retreat.to_json(), **self.tally.to_json()}


def _care(computation: MicrobatchPolicy) -> tuple[object, ...]:
    """Return the parts of a policy that have to be the same in all parts of a step."""
    return computation.randomness, computation.fuse, computation.buffers, computation.rules
