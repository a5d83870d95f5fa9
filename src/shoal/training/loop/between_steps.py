"""Work between two steps, with the model of exactly the finished step: evaluations, checkpoints and a run's end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.checkpoint.run_state import RunState
from shoal.checkpoint.whole_optimizer import evaluated_weights
from shoal.distributed.failures import as_shoal_error
from shoal.errors import StorageError
from shoal.training.callbacks.ema import PREFIX
from shoal.training.loop.training_parts import TrainingParts
from shoal.training.observe.step_records import StepRecords, Surroundings

# Bit of the ranks' requests for incidents that only one rank notices, next to the bits of callbacks.
NOTICED = 1 << 20


def share_incidents(parts: TrainingParts, around: Surroundings, state: RunState) -> None:
    """Share incidents of the ranks' loaders. All ranks then skip samples that any rank could not read.

    `state` stores these samples.
    Raises: DataError, on every rank, if there are more bad samples than allowed.
    Collective: all ranks, a JSON gather.
    """
    mesh, loader = parts.mesh, parts.loader
    own = [vars(incident) for incident in loader.incidents]
    loader.incidents.clear()
    for rank, row in enumerate(mesh.gather_json({"host": mesh.host, "incidents": own})):
        for incident in row["incidents"]:
            host = row["host"]
            bad = {int(i): said for i, said in incident.pop("bad").items()}  # JSON keys are strings
            state.bad_samples |= bad
            around.note(f"rank {rank} on {host}: {incident['what']}; {incident['done']}")
            about: dict[str, Any] = {"step": state.step, "rank": rank, "host": host, "noticed": "reading", **incident}
            about |= {"samples": sorted(bad)} if bad else {}
            kind = "samples" if bad else "workers"
            around.events.add(kind, **{name: value for name, value in about.items() if value is not None})
    loader.leave_out(state.bad_samples)


@dataclass
class Outcome:
    """Result of a training: completed or preempted, with the last state; `unsaved`: why the state was not saved.

    `ended_by`: the callback that requested the end, and its reason. `after`: seconds of the evaluation and the
    checkpoint after the last step.
    """

    status: str
    state: RunState
    metrics: dict[str, float]
    eval_samples: int
    step_seconds: list[float] = field(default_factory=list)
    unsaved: StorageError | None = None
    ended_by: dict[str, Any] | None = None
    after: dict[str, float] = field(default_factory=dict)


class BetweenSteps:
    """Evaluations and checkpoints of a training, those at its end and those that a signal or a callback requests.

    `fetch`: called before each of them, with whether the optimizer's state is needed; parameter servers keep the model.
    """

    ended_by: dict[str, Any] | None = None  # the callback that has requested the end, and its reason

    def __init__(
        self,
        parts: TrainingParts,
        around: Surroundings,
        records: StepRecords,
        num_steps: int,
        fetch: Callable[[bool], None] = lambda optimizer: None,
    ) -> None:
        self._parts, self._around, self._records, self._num_steps = parts, around, records, num_steps
        self._fetch = fetch
        # The step of the last evaluation, its metrics, and its number of samples.
        self._evaluated: tuple[int, dict[str, float], int] | None = None

    def evaluates_after(self, step: int) -> bool:
        """Return True if an evaluation follows step `step`, by `evaluate_every` or the end of a pass over the data."""
        every = self._around.evaluate_every
        return step % (every if every is not None else self._parts.order.steps_per_epoch) == 0

    def is_due(self, step: int) -> bool:
        """Return True if work that is due after `step` steps needs the model of exactly that step."""
        every = self._parts.keeper.every_steps
        saves = every is not None and step % every == 0
        return (
            step >= self._num_steps
            or self.evaluates_after(step)
            or self._parts.replicas.is_due(step, saves=False)
            or saves
        )

    def save(self, state: RunState, *, wait: bool = False, in_step: bool = False) -> None:
        """Save a checkpoint of a finished step, unless that step is saved.

        `wait`: until it is written. `in_step`: the clock of the coming step counts the time.
        Raises: StorageError.
        Collective: all ranks.
        """
        self._fetch(True)
        with contextlib.nullcontext() if in_step else self._records.timed("checkpoint"):
            self._records.saves(state.step)
            self._parts.keeper.save(state, wait=wait)

    def evaluate(self, state: RunState) -> None:
        """Evaluate the model and averaged weights, outside the step's time, and save the best. Collective: all ranks.

        Raises: errors of the metrics; StorageError.
        """
        parts, records = self._parts, self._records
        watched, average = parts.job.watched, parts.callbacks.average
        self._fetch(watched is not None)
        with records.timed("evaluation"):
            with evaluated_weights(parts.updater.optimizer):
                metrics, count = parts.evaluator.evaluate(parts.model)
                parts.strategy.rest()
            if average is not None and count:
                with average.in_place():
                    averaged, _ = parts.evaluator.evaluate(parts.model)
                    parts.strategy.rest()
                metrics |= {f"{PREFIX}{name}": value for name, value in averaged.items()}
        self._evaluated = state.step, metrics, count
        parts.computer.has_evaluated = count > 0
        for name, why in parts.evaluator.without_value.items():
            self._around.note(f"evaluation after step {state.step}: {name} has no value: {why}")
        is_best = watched is not None and state.improves(watched, metrics)
        if count:
            parts.callbacks.evaluated(state, metrics)  # the checkpoint includes their new state
        if is_best:
            with records.timed("checkpoint"):
                parts.keeper.save_best(state)
        if count:
            records.evaluated(metrics)

    def serve(self, state: RunState, requests: int, is_sound: Callable[[], bool] = lambda: True) -> None:
        """Serve the requests of any rank's callbacks: an evaluation, a checkpoint, the end.

        `is_sound`: called before an evaluation or a checkpoint; returns False after a rollback, which ends the call.
        Collective: all ranks.
        """
        settled = self._parts.callbacks.settle(self._parts.mesh, requests)
        if (settled.checkpoint or settled.evaluate) and not is_sound():
            return
        if settled.evaluate and state.step and not self._is_evaluated(state):
            self.evaluate(state)
        if settled.checkpoint and state.step:
            self.save(state)
        if settled.end is not None and self.ended_by is None:
            self.ended_by = settled.end
            self._around.note("{callback} ends the training after step {step}: {reason}".format(**settled.end))

    def forget(self) -> None:
        """Drop the last evaluation, after a rollback."""
        self._evaluated = None

    def conclude(self, state: RunState, status: str) -> Outcome:
        """Save the last state of a run that is "completed" or "preempted"; evaluate it if it is completed.

        Raises: errors of the evaluation, after the checkpoint.
        Collective: all ranks.
        """
        unsaved = self._save_last(state)
        if status == "completed" and not self._is_evaluated(state):
            try:
                self.evaluate(state)
                unsaved = unsaved or self._save_last(state)  # again, if it is the best
            except Exception as error:
                shown = as_shoal_error(error)
                if unsaved is None:
                    self._parts.keeper.rescue(shown, state)
                raise shown from error
        metrics, count = ({}, 0) if status != "completed" or self._evaluated is None else self._evaluated[1:]
        seconds, after = self._records.step_seconds, self._records.after
        return Outcome(status, state, metrics, count, seconds, unsaved, self.ended_by, after)

    def _save_last(self, state: RunState) -> StorageError | None:
        try:
            self.save(state, wait=True)
        except StorageError as error:
            return error
        return None

    def _is_evaluated(self, state: RunState) -> bool:
        return self._evaluated is not None and self._evaluated[0] == state.step
