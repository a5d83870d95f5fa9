"""Request of `shoal run`: its arguments, checked as far as possible without torch, and passed between processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal.errors import InUseError, LaunchError
from shoal.hardware.detect import cores, visible_gpus
from shoal.jobs.job_file import JobRequest
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
from shoal.runs.resize import resized
from shoal.runs.sound_values import adapter
from shoal.runs.trace_steps import TraceSteps
from shoal.runs.tracking import TrackerName

T = TypeVar("T")


@dataclass(frozen=True)
class RunRequest:
    """One call of `shoal run`. `plan` includes every option but is not yet completed for the job."""

    job: JobRequest
    plan: Plan
    wishes: Wishes
    out: Path
    started_at: float
    plan_from_file: bool
    resume: bool = False
    accept_changes: bool = False  # whether a resume may use a changed job
    steps: int | None = None
    max_restarts: int = 0  # limit of consecutive restarts without progress
    restarts: int = 0  # number of restarts in this call so far
    lost_at: float | None = None  # last loss of ranks, in seconds since the epoch
    generation: int = 0  # of the ranks; 0 before the directory is taken
    resizable: bool = False  # whether the launcher can change the number of ranks
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = 3  # number of newest ones to keep; None: all
    telemetry: bool = True
    shown_elsewhere: bool = False  # whether another process shows rank 0's progress
    certificate: Path | None = None
    says_workers: bool = False  # whether the user set the number of data workers
    plan_resumed: bool = False  # whether the plan comes from the run directory
    numbered: str | None = None  # name of a default `out`, which may get another number
    judged: Judged | None = None  # the completed plan, if a launcher loaded the job
    initial_weights: InitialWeights | None = None  # replace the weights from the job's model()
    recorded_grains: int | None = None  # number of grains of the run to resume
    trackers: tuple[TrackerName, ...] = ()
    trace: TraceSteps | None = None
    evaluate_every: int | None = None
    bad_samples: int = 0  # maximum number of samples to skip
    check_replicas: int | None = None  # steps between comparisons of replicas
    address: str | None = None  # of the run directory; `out` is then a working copy
    keeps_format: bool = False  # whether a resumed run set the memory format

    @property
    def place(self) -> str:
        """The run directory as the user gave it."""
        return self.address or str(self.out)

    def check(self) -> None:
        """Check the directory, its job and the certificate.

        Raises: RunDirectoryError, IntegrityError, CertificateError.
        """
        directory = RunDirectory(self.out, self.address)
        directory.check(self.resume)
        if self.resume and not self.accept_changes:
            directory.check_job()
        if self.certificate is not None:
            Certificate.read(self.certificate)

    def check_plan(self) -> None:
        """Warn of settings without effect. Raises: PlanError with every conflict inside the plan."""
        refuse(conflicts(self.plan))
        warn_of(self.without_effect())

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting of this call's plan that has no effect.

        A plan from the run directory is skipped, since it also has settings that the user did not write.
        """
        return iter(()) if self.plan_resumed else idle(self.plan)

    def restarted(self, restarts: int) -> RunRequest:
        """Return the request after an engine restarted the ranks: it resumes the run if one has begun."""
        begun = restarts > 0 and RunDirectory(self.out).holds_run()
        return replace(self, resume=True, restarts=restarts).with_kept_format() if begun else self

    def again(self, restarts: int, lost_at: float) -> RunRequest:
        """Return the request that continues after lost ranks, from the newest checkpoint if there is one.

        The run's number of grains is reused, since computing it again may need an outline of the model.
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
        """Return the request for ranks that are about to start, in a new generation. Raises: as `Fence.next`."""
        reason = reason or ("resumed" if self.resume else "begun")
        after = self.fence if self.generation else None
        size, gpus = self.plan.num_processes, visible_gpus() if self.resizable else 0
        found = Fence.next(self.out, size, reason, after, resizable=self.resizable, gpus=gpus)
        return replace(self, generation=found.generation)

    def resized(self, devices: int, at: float) -> RunRequest:
        """Return the request that continues with `devices` processes. `at`: end of the previous ones.

        Raises: PlanError.
        """
        job = read_json(RunDirectory(self.out).job) or {}
        plan = resized(self.plan, devices, job, visible_gpus())
        grains, wishes = job.get("grains"), replace(self.wishes, devices=devices)
        found = replace(self, plan=plan, wishes=wishes, judged=None, recorded_grains=grains, resume=True, lost_at=at)
        return found.with_own_sums().with_kept_format()

    def claim(self) -> DirectoryLock:
        """Lock the directory for this process: `out`, or a default directory of another number.

        Raises: InUseError if another run uses the directory, and as `check`.
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
        if not (self.out / NAME).exists():  # if locked, naming the holder is the better error
            self._check_again()
        lock = claim(self.out, lambda text: print(f"note: {text}", file=sys.stderr))
        try:
            self._check_again()
        except BaseException:
            lock.release()
            raise
        return lock

    def _check_again(self) -> None:
        """Check as `check`. Raises: InUseError if a run appeared in a default directory."""
        if self.numbered is not None and RunDirectory(self.out).holds_run():
            raise InUseError(given=str(self.out), conflict="another has trained there since", remedy="take the next")
        self.check()

    def with_devices(self, devices: int) -> RunRequest:
        """Return the request with a number of devices, if neither plan nor option sets it."""
        if self.plan_from_file or self.wishes.devices is not None:
            return self
        wishes = replace(self.wishes, devices=devices)
        return replace(self, wishes=wishes, plan=apply_wishes(self.plan, wishes, from_file=False))

    def with_own_sums(self) -> RunRequest:
        """Return the request, for ranks on this host only, with the fastest all-reduce unless a plan file sets it.

        With the all-reduce in shared memory, ranks also share one copy of the parameters if the job allows that.
        """
        from shoal.hardware.fastest_all_reduce import all_reduce_here  # imported late: workers do not need its tables

        if not self._chooses_sums:
            return self
        name = all_reduce_here(self.plan.degrees.divides_grains)
        if self.plan.execution.exact and name != "shared_memory":  # exact needs shared memory or sockets
            name = self.plan.collectives.all_reduce
        alike = self.plan.layout.data == self.plan.layout.world_size
        memory = {"shared": alike and name == "shared_memory"}
        return replace(self, plan=self.plan.with_sections(collectives={"all_reduce": name}, memory=memory))

    def with_kept_format(self) -> RunRequest:
        """Return the request with the memory format that the resumed run chose, unless a plan file sets it."""
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
        """Whether ranks choose execution.channels_last, since neither a plan file nor a resumed run sets it."""
        return not (self.plan_from_file or self.keeps_format)

    @property
    def may_copy(self) -> bool:
        """Whether memory.shared = true was chosen automatically, not in a plan file."""
        return self.plan_resumed or not self.plan_from_file

    def notes(self) -> list[str]:
        """Return notes on chosen defaults and the reasons, for runs whose ranks are all on this host."""
        from shoal.hardware.detect import gpus
        from shoal.hardware.fastest_all_reduce import why_not_shared

        why = why_not_shared() if self._chooses_sums and not gpus() else None
        return [f"gradients are summed over sockets (native): {why}"] if why else []

    @property
    def _chooses_sums(self) -> bool:
        return not self.plan_from_file and self.plan.degrees.divides_grains > 1

    @property
    def needs_look(self) -> bool:
        """Whether only the loaded job shows if its grains and model allow the layout.

        Loading the job costs a launcher the import of torch, two of the three seconds of a first step. With servers,
        rank 0 has no mesh to distribute the completed plan.
        """
        layout = self.plan.degrees
        if layout.shares_grains > 1 or self.plan.serves:
            return True
        ranks = layout.divides_grains
        return ranks > 1 and ranks > (self.job.least_grains or 0)

    @property
    def threads_per_process(self) -> int:
        """The host's cores divided among the processes.

        One in exact mode, since kernels depend on the number of threads.
        """
        return 1 if self.plan.execution.exact else max(1, cores() // self.plan.layout.world_size)


def devices_here() -> int:
    """Return the number of visible GPUs, at least 1."""
    return max(1, visible_gpus())


def dumped(value: object) -> str:
    """Serialize a frozen value as JSON."""
    # Not pydantic's own writer: it writes null for infinity and NaN, which a plan's [prediction] may have.
    return json.dumps(adapter(cast(Any, type(value))).dump_python(value, by_alias=True), default=str)


def loaded(kind: type[T], text: str) -> T:
    """Parse a value that `dumped` wrote. Raises: LaunchError."""
    try:
        found: T = adapter(cast(Any, kind)).validate_python(json.loads(text))
        return found
    except ValueError as error:
        raise LaunchError(
            given=f"a {kind.__name__} that another process of this run wrote",
            conflict=f"it cannot be read: {error}",
            remedy="start every process with the same version of shoal",
        ) from error
