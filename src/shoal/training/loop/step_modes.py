"""Switches of a live training between the modes of a trial's turns, with their seconds and the choice.

The trainer asks after each step whether a turn ends there. All ranks then derive the same next turn from the seconds of
the slowest one. Which steps ran in which mode is written before they run: `runs/step_trial.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.distributed.failures import as_shoal_error
from shoal.distributed.mesh import together
from shoal.numerics.outputs import microbatch_loss
from shoal.parallel.blocks.compiled import compile_blocks
from shoal.plans.legal import conflicts
from shoal.plans.plan import plan_text
from shoal.plans.resolve import CompletePlan
from shoal.runs.directory import Fence, unwritten
from shoal.runs.step_trial import StepMode, StepTrial, TrialKey, record_trial, trial_text
from shoal.training.loop.late_reads import LateReads
from shoal.training.microbatch.loss_pair import LossPair
from shoal.training.microbatch.step import FetchedStep, StepRunner

if TYPE_CHECKING:
    from shoal.training.loop.trainer import TrainingParts


# Classes of errors of a step that may come from its mode, and of no files, samples or lost ranks.
_OF_MODES = frozenset({"UserCodeError", "OutOfMemoryError", "LossError", "JobError", "PlanError", "InternalError"})


def seconds_now() -> float:
    """Return the time that turns are measured by."""
    return time.perf_counter()


@dataclass
class RunTrial:
    """Trial of a run, and its files on rank 0.

    Args:
        trial: the trial, whose turns may be known from an earlier start or run.
        key: of the record in the file of this machine; None if it is there, or if the turns were given.
        source: where the turns are known from, in words; empty if the run finds them itself.
        plan: path of plan.toml; None on other ranks than 0.
        path: path of trial.json; None on other ranks than 0.
    """

    trial: StepTrial
    key: TrialKey | None = None
    source: str = ""
    plan: Path | None = None
    path: Path | None = None
    fence: Fence = field(default_factory=Fence)

    def write(self, plan: CompletePlan | None = None) -> None:
        """Write the trial before its next turn, and the plan if it is chosen. Raises: StorageError."""
        if self.path is None or self.plan is None:
            return
        try:
            if plan is not None:
                self.fence.write(self.plan, plan_text(plan))
            self.fence.write(self.path, trial_text(self.trial))
        except OSError as error:
            raise unwritten(self.path, error) from error

    def record(self) -> str | None:
        """Store the trial for later runs on this machine. Return why that is not possible, or None."""
        if self.key is None or self.path is None:
            return None
        return record_trial(self.key, self.trial)


class StepModes:
    """Modes of a training's steps, after the turns of a trial."""

    def __init__(
        self, parts: TrainingParts, late: LateReads, runner: StepRunner, note: Callable[[str], None], run: RunTrial
    ) -> None:
        self._parts, self._late, self._runner, self._note, self._run = parts, late, runner, note, run
        self._mode = StepMode.of(parts.plan)
        self._times: list[float] = []
        self._before: float | None = None  # end of the last step
        self._nothing_compiles: str | None = None
        self.ends_at: int | None = None  # the last step of the current turn; None after the trial

    def go_to(self, step: int) -> None:
        """Compute the step after `step` finished ones in its turn's mode. Raises: PlanError; StorageError.

        Collective: all ranks.
        """
        trial = self._run.trial
        if trial.chosen is None and trial.ends_at <= step:  # an earlier start ended before it wrote what follows
            while trial.ends_at <= step:
                trial.decide(None)
            together(self._parts.mesh, self._run.write)
        self._apply(trial.mode_after(step))
        self.ends_at = trial.next_end(step)
        self._times, self._before = [], None

    def take(self, step: int) -> None:
        """Measure step number `step`, which has just ended."""
        before, self._before = self._before, seconds_now()
        if before is not None and self._run.trial.measures(step):
            self._times.append(self._before - before)

    def followed(self, step: int, fetched: FetchedStep | None) -> StepModes | None:
        """Begin the next turn, or end the trial, if a turn ends with `step`. Return None if no turn is left.

        `fetched`: the next step, if it is read.
        Raises: StorageError; PlanError if this machine cannot follow a known trial.
        Collective: all ranks.
        """
        if step != self.ends_at:
            return self
        trial, before, mesh = self._run.trial, self._mode, self._parts.mesh
        if trial.chosen is None and trial.ends_at == step:  # no earlier start of the run knows what follows
            is_measured = 2 * len(self._times) >= trial.steps_per_turn  # not after a restart late in the turn
            own = statistics.median(self._times) if is_measured else math.nan
            slowest = float(mesh.all_gather([own]).max())
            if before.compile != "none" and not self._parts.computer.regions.names:
                self._nothing_compiles = "torch compiles no part of the model"
            why_not = self._nothing_compiles if before.compile != "none" else None
            why_not = why_not or (self._late.why_no_graph if before.cuda_graph else None)
            refused = self._first_reason(why_not) if before.name != trial.best else None
            if refused is not None:
                trial.refuse(step, refused)
            else:
                trial.decide(None if math.isnan(slowest) else slowest)
            self._settle(step)
        self.go_to(step)
        if fetched is not None and before.channels_last != self._mode.channels_last:
            self._runner.transfer_again(fetched)
        if self.ends_at is None:
            self._conclude(step)
        return self.unless_over()

    def refuses(self, error: Exception, step: int) -> bool:
        """Return True if a candidate's failure in the step after `step` leaves it out, and the step is to be repeated.

        All ranks return the same if `error` is raised everywhere. Collective then: all ranks.
        """
        trial, shown = self._run.trial, as_shoal_error(error)
        is_candidate = trial.chosen is None and trial.turns[-1].mode == self._mode.name != trial.best
        is_shared = shown.everywhere or self._parts.mesh.world_size == 1
        of_modes = (shown.kinds or {type(shown).__name__}) <= _OF_MODES
        if not (is_candidate and is_shared and of_modes) or self._parts.sharded_model.divided:
            return False
        trial.refuse(step, shown.conflict)
        self._settle(step)
        self.go_to(step)
        if self.ends_at is None:
            self._conclude(step)
        return True

    @property
    def plan(self) -> CompletePlan:
        """The plan with the mode of the next step. It has a prediction only in the first plan's mode."""
        plan = self._parts.plan.with_choices(execution=asdict(self._mode))
        return plan if plan == self._parts.plan else plan.model_copy(update={"prediction": {}})

    def close(self) -> dict[str, Any]:
        """Return the entry `trial` of the result. Record an unfinished trial: the same command repeats its turns."""
        trial = self._run.trial
        if self.ends_at is not None and trial.chosen is None:
            self._run.record()
        chosen = trial.chosen or trial.best
        said = {name: asdict(verdict) for name, verdict in trial.verdicts.items()}
        is_compared = any(verdict.seconds is not None for verdict in trial.verdicts.values())
        reason = self._run.source or ("the fastest of those that were tried" if is_compared else "no candidate pays")
        if trial.chosen is None:
            reason = "the run ended before the trial did"
        turns = [asdict(turn) for turn in trial.turns]
        return {"chosen": chosen, "from_step": trial.ends_at + 1, "reason": reason, "candidates": said, "turns": turns}

    def unless_over(self) -> StepModes | None:
        """Return this object while a turn is left, else None."""
        return self if self.ends_at is not None else None

    def _settle(self, step: int) -> None:
        """Leave out candidates that cannot run, and write the trial before the step after `step`."""
        trial = self._run.trial
        while trial.chosen is None and trial.turns[-1].mode != trial.best:
            reason = self._first_reason(self._why_not(StepMode.named(trial.turns[-1].mode)))
            if reason is None:
                break
            trial.refuse(step, reason)
        together(self._parts.mesh, self._run.write)

    def _first_reason(self, own: str | None) -> str | None:
        """Return the first rank's reason, if any has one."""
        return next((reason for reason in self._parts.mesh.gather_json(own) if reason is not None), None)

    def _why_not(self, mode: StepMode) -> str | None:
        """Return why this rank cannot compute steps in a mode, or None."""
        refused = conflicts(self._parts.plan.with_choices(execution=asdict(mode)))
        if refused:
            return refused[0].conflict
        if mode.compile != "none" and self._nothing_compiles is not None:
            return self._nothing_compiles
        try:
            self._apply(mode)
        except Exception as error:
            return as_shoal_error(error).conflict
        return None

    def _conclude(self, step: int) -> None:
        """Write the chosen plan, and note it."""
        together(self._parts.mesh, lambda: self._run.write(self.plan))
        unwritten = self._run.record()
        self._note(
            f"step: {self._mode.name} from step {step + 1} on, {self._run.source or 'by a trial of its candidates'}"
        )
        if unwritten is not None:
            self._note(f"step: the trial could not be recorded for later runs, which may choose otherwise: {unwritten}")

    def _apply(self, mode: StepMode) -> None:
        """Switch the training to a mode. Raises: PlanError."""
        if mode == self._mode:
            return
        parts, computer = self._parts, self._parts.computer
        parts.clock.heartbeat.forget()  # the first step compiles or captures
        compiles = mode.compile != "none"
        if compiles and not computer.regions.names:
            plan = parts.plan.with_choices(execution=asdict(mode))
            computer.regions = compile_blocks(parts.model, plan, computer.precision, loss=computer.job.loss)
            computer.regions.notice = parts.clock.heartbeat.forget
        computer.regions.enabled = compiles
        if mode.channels_last != self._mode.channels_last:
            computer.precision = replace(computer.precision, channels_last=mode.channels_last)
            parts.evaluator.use(computer.precision)
        computer.pair = LossPair(computer.regions.whole or microbatch_loss(computer.job), computer.precision)
        if mode.cuda_graph != self._mode.cuda_graph:
            if mode.cuda_graph:
                self._late.capture()
            else:
                self._late.close()
        self._mode = mode
