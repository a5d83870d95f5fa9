"""Request of `shoal run`: arguments, checked as far as that goes without torch, and handed over between processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal.errors import InUseError, LaunchError
from shoal.hardware.detect import cores, visible_gpus
from shoal.plans import Plan
from shoal.plans.conflicts import idle
from shoal.plans.legal import conflicts, refuse
from shoal.plans.plan import read_plan
from shoal.plans.resolve import Judged, Wishes, apply_wishes, warn_of
from shoal.runs.certificate import Certificate
from shoal.runs.directory import RunDirectory, default_directory, read_json
from shoal.runs.directory_lock import NAME, DirectoryLock, claim
from shoal.runs.generation import Fence
from shoal.runs.initial_weights import InitialWeights
from shoal.runs.job_file import JobRequest
from shoal.runs.resize import resized
from shoal.runs.sound_values import adapter
from shoal.runs.trace_steps import TraceSteps
from shoal.runs.tracking import TrackerName

T = TypeVar("T")


@dataclass(frozen=True)
class RunRequest:
    """One call of `shoal run`; `plan` contains every option but is not completed for the job yet."""

    job: JobRequest
    plan: Plan
    wishes: Wishes
    out: Path
    started_at: float
    plan_from_file: bool
    resume: bool = False
    accept_changes: bool = False  # whether a resume goes on with another job than the run's
    steps: int | None = None
    max_restarts: int = 0  # in a row, none of which got further than those before
    restarts: int = 0  # of this call's ranks so far
    lost_at: float | None = None  # when they were lost last, in seconds since the epoch
    generation: int = 0  # of the ranks; 0: nothing has taken the directory for them yet
    resizable: bool = False  # whether who has started the ranks can start another number of them
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = 3  # of the newest; None: all
    telemetry: bool = True
    shown_elsewhere: bool = False  # whether another process draws the progress of what rank 0 prints
    certificate: Path | None = None
    says_workers: bool = False  # whether the command or a plan file says how many data workers a rank has
    plan_resumed: bool = False  # whether the plan is the run directory's own, of which this call says nothing
    numbered: str | None = None  # the name of `out` where nobody gave a directory, so that another number serves too
    judged: Judged | None = None  # the plan completed, where a launcher has looked at the job; else rank 0 judges it
    initial_weights: InitialWeights | None = None  # in place of those that the job's model() makes
    recorded_grains: int | None = None  # those of the run that this call resumes
    trackers: tuple[TrackerName, ...] = ()
    trace: TraceSteps | None = None
    evaluate_every: int | None = None
    bad_samples: int = 0  # that are left out
    check_replicas: int | None = None  # steps between comparisons of the replicas
    address: str | None = None  # of the run directory, whose working copy `out` is then
    keeps_format: bool = False  # whether the plan has the memory format that a run which goes on has chosen

    @property
    def place(self) -> str:
        """The run directory, as the command was given it."""
        return self.address or str(self.out)

    def check(self) -> None:
        """Raises: RunDirectoryError, IntegrityError, CertificateError of the directory, its job, the certificate."""
        directory = RunDirectory(self.out, self.address)
        directory.check(self.resume)
        if self.resume and not self.accept_changes:
            directory.check_job()
        if self.certificate is not None:
            Certificate.read(self.certificate)

    def check_plan(self) -> None:
        """Warns of settings without effect. Raises: PlanError with every conflict that the plan has by itself."""
        refuse(conflicts(self.plan))
        warn_of(self.without_effect())

    def without_effect(self) -> Iterator[str]:
        """Settings of a plan that this call gives and that have no effect, a sentence each.

        What a run keeps was completed by it: a resume on other devices would tell of choices that nobody wrote.
        """
        return iter(()) if self.plan_resumed else idle(self.plan)

    def restarted(self, restarts: int) -> RunRequest:
        """The request where an engine has started the ranks anew so often: it goes on with the run that began."""
        begun = restarts > 0 and RunDirectory(self.out).holds_run()
        return replace(self, resume=True, restarts=restarts).with_kept_format() if begun else self

    def again(self, restarts: int, lost_at: float) -> RunRequest:
        """The request that goes on where ranks were lost, from the newest checkpoint if there is one.

        The number of grains is that of the run: to find it anew may take an outline of the model.
        """
        job = RunDirectory(self.out).job
        grains = self.recorded_grains or (read_json(job) or {}).get("grains")
        resume = self.resume or job.exists()
        found = replace(self, resume=resume, restarts=restarts, lost_at=lost_at, recorded_grains=grains)
        return found.with_kept_format()

    @property
    def fence(self) -> Fence:
        """The fence of these ranks' generation."""
        return Fence(self.out, self.generation) if self.generation else Fence()

    def begun(self, reason: str = "") -> RunRequest:
        """The request of ranks that are about to be started, a generation of their own. Raises: as `Fence.next`."""
        reason = reason or ("resumed" if self.resume else "begun")
        after = self.fence if self.generation else None
        size, gpus = self.plan.num_processes, visible_gpus() if self.resizable else 0
        found = Fence.next(self.out, size, reason, after, resizable=self.resizable, gpus=gpus)
        return replace(self, generation=found.generation)

    def resized(self, devices: int, at: float) -> RunRequest:
        """The request that goes on with so many processes. Raises: PlanError. `at`: the end of those before."""
        job = read_json(RunDirectory(self.out).job) or {}
        plan = resized(self.plan, devices, job, visible_gpus())
        grains, wishes = job.get("grains"), replace(self.wishes, devices=devices)
        found = replace(self, plan=plan, wishes=wishes, judged=None, recorded_grains=grains, resume=True, lost_at=at)
        return found.with_own_sums().with_kept_format()

    def claim(self) -> DirectoryLock:
        """The directory for this process alone, until it is released: `out`, or of another number.

        Raises: InUseError where another run has it, and as `check`.
        """
        in_use: set[Path] = set()
        request = self
        while True:
            try:
                return request._claim()
            except InUseError:
                if self.numbered is None:
                    raise
            in_use.add(request.out)
            request = replace(request, out=default_directory(str(self.numbered), False, in_use))

    def _claim(self) -> DirectoryLock:
        if not (self.out / NAME).exists():  # who has it is the better answer to what it holds
            self._check_again()
        lock = claim(self.out, lambda text: print(f"note: {text}", file=sys.stderr))
        try:
            self._check_again()
        except BaseException:
            lock.release()
            raise
        return lock

    def _check_again(self) -> None:
        """Raises: as `check`; InUseError where another number serves as well."""
        if self.numbered is not None and RunDirectory(self.out).holds_run():
            raise InUseError(given=str(self.out), conflict="another has trained there since", remedy="take the next")
        self.check()

    def with_devices(self, devices: int) -> RunRequest:
        """The request with a number of devices, where neither plan nor option says."""
        if self.plan_from_file or self.wishes.devices is not None:
            return self
        wishes = replace(self.wishes, devices=devices)
        return replace(self, wishes=wishes, plan=apply_wishes(self.plan, wishes, from_file=False))

    def with_own_sums(self) -> RunRequest:
        """The request, for ranks of this host alone, with the fastest all-reduce between them, where no file says.

        With that in shared memory they have one copy of the parameters too, unless the job turns out to need its own.
        """
        from shoal.hardware.fastest_all_reduce import all_reduce_here  # tables that no worker needs

        if not self._chooses_sums:
            return self
        name = all_reduce_here(self.plan.degrees.divides_grains)
        if self.plan.execution.exact and name != "shared_memory":  # its tree goes that way or over sockets
            name = self.plan.collectives.all_reduce
        alike = self.plan.layout.data == self.plan.layout.world_size
        memory = {"shared": alike and name == "shared_memory"}
        return replace(self, plan=self.plan.with_sections(collectives={"all_reduce": name}, memory=memory))

    def with_kept_format(self) -> RunRequest:
        """The request of a run that goes on: images lie in memory as they did, where no plan file says another."""
        kept = RunDirectory(self.out).plan
        if self.plan_from_file or not kept.exists():
            return self
        channels_last = read_plan(kept).execution.channels_last
        plan = self.plan.with_sections(execution={"channels_last": channels_last})
        judged = self.judged
        if judged is not None:
            judged = replace(judged, plan=judged.plan.with_format(channels_last=channels_last))
        return replace(self, plan=plan, judged=judged, keeps_format=True)

    @property
    def chooses_format(self) -> bool:
        """Whether ranks choose execution.channels_last: no plan file says it, and no run that goes on has done."""
        return not (self.plan_from_file or self.keeps_format)

    @property
    def may_copy(self) -> bool:
        """Whether memory.shared = true is no wish of a plan file, but was chosen, or kept from a run that chose."""
        return self.plan_resumed or not self.plan_from_file

    def notes(self) -> list[str]:
        """Defaults that were chosen, and why; for runs whose ranks are all on this host."""
        from shoal.hardware.detect import gpus
        from shoal.hardware.fastest_all_reduce import why_not_shared

        why = why_not_shared() if self._chooses_sums and not gpus() else None
        return [f"gradients are summed over sockets (native): {why}"] if why else []

    @property
    def _chooses_sums(self) -> bool:
        return not self.plan_from_file and self.plan.degrees.divides_grains > 1

    @property
    def needs_look(self) -> bool:
        """Whether only the loaded job can tell if its grains, or its model, allow the layout of several ranks.

        To load it costs a launcher the import of torch, two of the three seconds of a first step. With servers the
        processes have no mesh over which rank 0 could hand on what it has judged.
        """
        layout = self.plan.degrees
        if layout.shares_grains > 1 or self.plan.serves:
            return True
        ranks = layout.divides_grains
        return ranks > 1 and ranks > (self.job.least_grains or 0)

    @property
    def threads_per_process(self) -> int:
        """The host's cores divided among the processes; one in exact mode, since kernels depend on it."""
        return 1 if self.plan.execution.exact else max(1, cores() // self.plan.layout.world_size)


def devices_here() -> int:
    """All the GPUs that are visible, or one process where there are none."""
    return max(1, visible_gpus())


def dumped(value: object) -> str:
    """A frozen value as JSON."""
    # Not pydantic's own writer: it has null for the numbers that JSON lacks, which a plan's [prediction] may have.
    return json.dumps(adapter(cast(Any, type(value))).dump_python(value, by_alias=True), default=str)


def loaded(kind: type[T], text: str) -> T:
    """The value of that kind that `dumped` was given."""
    try:
        found: T = adapter(cast(Any, kind)).validate_python(json.loads(text))
        return found
    except ValueError as error:
        raise LaunchError(
            given=f"a {kind.__name__} that another process of this run wrote",
            conflict=f"it cannot be read: {error}",
            remedy="start every process with the same version of shoal",
        ) from error
