"""Shares of grains by the measured speed of the ranks: which rank computes which grains is no part of the maths."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.distributed.mesh import Agreement, together
from shoal.errors import PlanError
from shoal.plans.grains import divide, share_sizes
from shoal.plans.plan import described, plan_text
from shoal.plans.resolve import CompletePlan
from shoal.runs.directory import RunDirectory, unwritten
from shoal.training.observe.step_records import Surroundings

if TYPE_CHECKING:
    from shoal.training.loop.step_modes import StepModes
    from shoal.training.loop.trainer import TrainingParts

# Steps that are compared, of which so many must gain; steps after a change that are not compared (they may compile).
WINDOW, _MOST_OF_THEM, _WARM_UP = 20, 16, 3
# The least expected gain, relative to a step's time.
_LEAST_GAIN = 0.03


class ShareBalance:
    """Watch over the ranks' seconds per grain, which changes their shares where steps gain by it.

    All ranks see the same agreements, and therefore propose the same shares after the same step.
    """

    def __init__(self, parts: TrainingParts, around: Surroundings) -> None:
        """Begin with the plan's shares. Raises: PlanError for a layout or data whose shares cannot change."""
        layout = parts.plan.layout
        given, fixed = f"--shares by-speed with {described(parts.plan)}", ""
        if layout.pipeline > 1:
            fixed = "a stage waits for its neighbours, so that the time of a rank does not show its speed"
        elif (
            parts.plan.shards_model
            or layout.expert > 1
            or parts.job.outputs is not None
            or parts.job.batch_norm == "batch"
        ):
            fixed = (
                "ranks wait for each other within a forward or backward, so that their times do not show their speed"
            )
        elif parts.updater.needs_closure:
            given = f"--shares by-speed with {type(parts.updater.optimizer).__name__}"
            fixed = "its closures make ranks wait for each other in a step, so that their times do not show their speed"
        elif not parts.loader.divides_anew:
            given = "--shares by-speed with a stream that has shard()"
            fixed = "a rank reads the shards of its first share to their end"
        if fixed:
            raise PlanError(given=given, conflict=fixed, remedy="leave --shares out, or write numbers: --shares 2,1")
        self._parts, self._around = parts, around
        batch = parts.job.global_batch
        self._num_grains = len(divide(batch, batch, parts.job.num_grains))  # of a whole step; some may be empty
        places = [layout.coordinate(rank) for rank in range(layout.world_size)]
        self._part_of_rank = np.array([place.data * layout.shard + place.shard for place in places])
        self._measure(layout.shares)

    def _measure(self, shares: tuple[int, ...]) -> None:
        self.shares, self.proposed = shares, None
        self._sizes = share_sizes(self._num_grains, self._parts.plan.layout.divides_grains, shares)
        self._busy: deque[npt.NDArray[np.float64]] = deque(maxlen=WINDOW)
        self._num_warm_up = _WARM_UP

    proposed: tuple[int, ...] | None  # shares with which steps would take less time, if others than the present ones

    def take(self, num_samples: int, agreement: Agreement) -> None:
        """Add the ranks' times of a step with `num_samples` samples, without the time for which they waited."""
        if num_samples != self._parts.job.global_batch:  # a short step has other shares
            return
        if self._num_warm_up:
            self._num_warm_up -= 1
            return
        slowest = np.zeros(len(self._sizes))
        np.maximum.at(slowest, self._part_of_rank, agreement.busy_seconds)
        self._busy.append(slowest)
        if len(self._busy) == WINDOW:
            self.proposed = self._faster()

    def _faster(self) -> tuple[int, ...] | None:
        """Return shares with which most of the last steps would have taken less time, or None."""
        busy, sizes = np.maximum(np.array(self._busy), 1e-9), np.maximum(1, self._sizes)
        per_grain = np.median(busy, axis=0) / sizes
        speeds = tuple(max(1, round(1e6 * float(per_grain.min() / one))) for one in per_grain)
        wanted = list(share_sizes(self._num_grains, len(speeds), speeds))
        while 0 in wanted:  # a rank without grains could not be measured again
            wanted[wanted.index(max(wanted))] -= 1
            wanted[wanted.index(0)] += 1
        gains = 1 - (busy * (wanted / sizes)).max(axis=1) / busy.max(axis=1)
        gain = float(np.median(gains))
        spread = float(np.median(np.abs(gains - gain)))
        if int((gains > _LEAST_GAIN).sum()) < _MOST_OF_THEM or gain <= 2 * spread:
            return None
        return tuple(wanted) if len(set(wanted)) > 1 else ()

    def planned(self, plan: CompletePlan) -> CompletePlan:
        """Return a plan of this run with the present shares. A plan has a prediction only for its first shares."""
        if self.shares == plan.layout.shares:
            return plan
        return plan.with_shares(self.shares, self._parts.job.num_grains).model_copy(update={"prediction": {}})

    def changes(self, step: int, modes: StepModes | None) -> bool:
        """Divide the grains of the steps after `step` as proposed, write the plan, and return whether that was due.

        The next step then has to be read anew. `modes`: which may have changed the plan.
        Raises: StorageError. Collective: all ranks.
        """
        if self.proposed is None:
            return False
        parts, around, sizes = self._parts, self._around, self._sizes
        plan = modes.plan if modes is not None else parts.plan
        before = self.planned(plan)
        per_grain = np.median(np.array(self._busy), axis=0) / np.maximum(1, sizes)
        self._measure(self.proposed)
        after, computer = self.planned(plan), parts.computer
        if computer.computation.grains_per_microbatch == before.batch.grains_per_microbatch:  # memory never ran out
            per = after.batch.grains_per_microbatch
            computer.computation = replace(computer.computation, grains_per_microbatch=per)
        parts.loader.seek(step, computer.computation.effective_grains, self.shares)
        parts.clock.heartbeat.forget()  # a compiled step of another shape is compiled again

        def write() -> None:
            if parts.mesh.rank == 0 and around.out is not None:
                path = RunDirectory(around.out).plan
                try:
                    around.events.fence.write(path, plan_text(after))
                except OSError as error:
                    raise unwritten(path, error) from error

        together(parts.mesh, write)
        seconds = [round(float(one), 6) for one in per_grain]
        shown = ", ".join(f"{1e3 * one:.3g}" for one in seconds)
        what = f"the ranks take {shown} ms for a grain: {_in_words(sizes)} grains become {_in_words(self._sizes)}"
        around.note(f"step {step}: {what}")
        around.events.add(
            "rebalanced",
            step=step,
            what=what,
            noticed=f"the times of {WINDOW} steps",
            done="the next steps have these shares",
            before=list(sizes),
            after=list(self._sizes),
            seconds_per_grain=seconds,
        )
        return True


def balance_of(parts: TrainingParts, around: Surroundings) -> ShareBalance | None:
    """Return the balance of a run that asked for it, or None. Raises: as `ShareBalance`."""
    if around.rebalances and parts.mesh.num_data_ranks == 1 and parts.plan.layout.pipeline == 1:
        around.note("--shares by-speed: no effect, since one rank computes all grains")
        return None
    return ShareBalance(parts, around) if around.rebalances else None


def _in_words(sizes: tuple[int, ...]) -> str:
    return ":".join(map(str, sizes))
