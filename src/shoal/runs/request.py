"""Request of `shoal run`: its arguments, checked as far as possible without torch, and passed between processes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal.errors import IntegrityError, InUseError, LaunchError, PlanError, RunDirectoryError, say_note
from shoal.hardware.detect import cores, visible_gpus
from shoal.jobs.job_file import JobRequest
from shoal.plans import Plan
from shoal.plans.legal import ModelFacts, conflicts, idle, on_shared_gpu, refuse
from shoal.plans.plan import read_plan
from shoal.plans.resolve import Judged, Wishes, apply_wishes, relaid, warn_of
from shoal.runs.certificate import Certificate
from shoal.runs.directory import NAME, DirectoryLock, Fence, RunDirectory, claim, default_directory, read_json
from shoal.runs.options import Course, InitialWeights, Origin
from shoal.runs.sound_values import RUNNING, adapter

T = TypeVar("T")


@dataclass(frozen=True)
class What:
    """Training of a request. `plan` includes every option but is not yet completed for the job."""

    job: JobRequest
    plan: Plan
    max_microbatch: int | None = None  # samples
    initial_weights: InitialWeights | None = None  # replace the weights from the job's model()
    recorded_grains: int | None = None  # number of grains of the run to resume
    judged: Judged | None = None  # the completed plan, if a launcher loaded the job

    @property
    def needs_look(self) -> bool:
        """True if only the loaded job shows if its grains and model allow the layout.

        Loading the job costs a launcher the import of torch, two of the three seconds of a first step. With servers,
        rank 0 has no mesh to distribute the completed plan.
        """
        layout = self.plan.layout
        if layout.shares_grains > 1 or layout.expert > 1 or self.plan.serves:
            return True
        ranks = layout.divides_grains
        return ranks > 1 and ranks > (self.job.least_grains or 0)

    @property
    def threads_per_process(self) -> int:
        """The host's cores divided among the processes.

        One in exact mode, since kernels depend on the number of threads.
        """
        return 1 if self.plan.execution.exact else max(1, cores() // self.plan.layout.world_size)


@dataclass(frozen=True)
class Where:
    """Run directory of a request, the generation of ranks that writes there, and whether ranks share GPUs."""

    out: Path
    address: str | None = None  # of the run directory; `out` is then a working copy
    numbered: str | None = None  # name of a default `out`, which may get another number
    generation: int = 0  # of the ranks; 0 before the directory is taken
    resizable: bool = False  # whether the launcher can change the number of ranks
    shares_gpu: bool = False  # whether ranks of a host may share its GPUs

    @property
    def shown(self) -> str:
        """The run directory as the user gave it."""
        return self.address or str(self.out)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs on this host if that limits the number of processes, else 0."""
        return 0 if self.shares_gpu else visible_gpus()

    @property
    def fence(self) -> Fence:
        """The fence of these ranks' generation."""
        return Fence(self.out, self.generation) if self.generation else Fence()


@dataclass(frozen=True)
class CallClock:
    """Clock of a call on one host, in seconds since the epoch. Nobody sets it: it reads the monotonic clock.

    `zero`: the instant at which the monotonic clock was zero, as read when the call began.
    """

    zero: float = field(default_factory=lambda: time.time() - time.monotonic())

    def now(self) -> float:
        """Return the current instant."""
        return self.zero + time.monotonic()


@dataclass(frozen=True)
class RunRequest:
    """One call of `shoal run`: what is trained, where, and how long.

    `origins`: by name, of options and of settings of the plan ("data.workers", or "layout" for the section), who has
        set the value. Names that are not there have defaults.
    """

    what: What
    where: Where
    course: Course
    started_at: float
    origins: dict[str, Origin] = field(default_factory=dict)
    restarts: int = 0  # number of restarts in this call so far
    lost_at: float | None = None  # last loss of ranks, in seconds since the epoch
    shown_elsewhere: bool = False  # whether another process shows rank 0's progress
    clock: CallClock = field(default_factory=CallClock)

    def origin(self, name: str) -> Origin:
        """Return who has set a value."""
        return self.origins.get(name, Origin.DEFAULT)

    def check(self) -> None:
        """Check the directory, its job and the certificate.

        Raises: RunDirectoryError, IntegrityError, CertificateError.
        """
        directory = RunDirectory(self.where.out, self.where.address)
        directory.check(self.course.resume)
        if self.course.resume and not self.course.accept_changes and read_json(directory.job) is None:
            raise IntegrityError(
                given=f"--resume of {directory.shown}",
                conflict=f"{directory.job.name} is damaged: nothing tells whether this is the job that was trained",
                remedy="restore it from a copy, or add --accept-changes to go on with the job as it is now",
            )
        if self.course.require_certificate:
            Certificate.read(Path(self.course.require_certificate))

    def check_plan(self) -> None:
        """Warn of settings without effect. Raises: PlanError with every conflict of the plan."""
        refuse([*conflicts(self.what.plan), *(on_shared_gpu(self.what.plan) if self.where.shares_gpu else ())])
        if self.origin("plan") is not Origin.RUN:  # such a plan also has settings that the user did not write
            warn_of(idle(self.what.plan))

    def restarted(self, restarts: int) -> RunRequest:
        """Return the request after an engine restarted the ranks: it resumes the run if one has begun."""
        begun = restarts > 0 and RunDirectory(self.where.out).holds_run()
        return self._resuming(restarts=restarts) if begun else self

    def again(self, restarts: int, lost_at: float) -> RunRequest:
        """Return the request that continues after lost ranks, from the newest checkpoint if there is one.

        The run's number of grains is reused, since computing it again may need an outline of the model.
        """
        job = RunDirectory(self.where.out).job
        grains = self.what.recorded_grains or (read_json(job) or {}).get("grains")
        resume = self.course.resume or job.exists()
        what = replace(self.what, recorded_grains=grains)
        return self._resuming(resume, what=what, restarts=restarts, lost_at=lost_at)

    def begun(self, reason: str = "") -> RunRequest:
        """Return the request for ranks that are about to start, in a new generation. Raises: as `Fence.next`."""
        reason = reason or ("resumed" if self.course.resume else "begun")
        where, size = self.where, self.what.plan.num_processes
        after, gpus = where.fence if where.generation else None, where.num_gpus if where.resizable else 0
        fence = Fence.next(where.out, size, reason, after, resizable=where.resizable, gpus=gpus)
        return replace(self, where=replace(where, generation=fence.generation))

    def resized(self, devices: int, at: float) -> RunRequest:
        """Return the request that continues with `devices` processes. `at`: end of the previous ones.

        Raises: PlanError.
        """
        job = read_json(RunDirectory(self.where.out).job) or {}
        plan = with_processes(self.what.plan, devices, job, self.where.num_gpus)
        what = replace(self.what, plan=plan, judged=None, recorded_grains=job.get("grains"))
        origins = {**self.origins, "layout": Origin.OPTION}
        return replace(self, what=what, origins=origins).with_own_sums()._resuming(lost_at=at)

    def _resuming(self, resume: bool = True, **changes: Any) -> RunRequest:
        """Return the request that continues this call's run, with the step that the run has chosen."""
        following = replace(self, course=replace(self.course, resume=resume), **changes)
        plan_file, section = RunDirectory(self.where.out).plan, "execution."
        keys = {"channels_last": ("channels_last",), "step": ("cuda_graph", "compile")}
        names = [name for name in keys if self.origin(section + name) is Origin.DEFAULT]
        if not names or not plan_file.exists():
            return following
        of_run = read_plan(plan_file).execution
        chosen = {key: getattr(of_run, key) for name in names for key in keys[name]}
        plan = following.what.plan.with_sections(execution=chosen)
        judged = following.what.judged
        if judged is not None:
            judged = replace(judged, plan=judged.plan.with_choices(execution=chosen))
        what = replace(following.what, plan=plan, judged=judged)
        return replace(following, what=what, origins={**self.origins, **{section + n: Origin.RUN for n in names}})

    def with_devices(self, devices: int, origin: Origin = Origin.CHOSEN) -> RunRequest:
        """Return the request with a number of devices, if neither plan nor option sets it."""
        if self.origin("layout") is not Origin.DEFAULT:
            return self
        plan = apply_wishes(self.what.plan, Wishes(devices), from_file=False)
        return replace(self, what=replace(self.what, plan=plan), origins={**self.origins, "layout": origin})

    def with_own_sums(self) -> RunRequest:
        """Return the request, for ranks on this host only, with the fastest all-reduce unless a plan file sets it.

        With the all-reduce in shared memory, ranks also share one copy of the parameters if the job allows that.
        """
        from shoal.hardware.detect import all_reduce_here  # imported late: workers do not need its tables

        if not self._chooses_sums():
            return self
        plan = self.what.plan
        name = all_reduce_here(plan.layout.divides_grains)
        if plan.execution.exact and name != "shared_memory":  # exact needs shared memory or sockets
            name = plan.collectives.all_reduce
        alike = plan.layout.data == plan.layout.world_size and plan.layout.expert == 1
        memory = {"shared": alike and name == "shared_memory"}
        plan = plan.with_sections(collectives={"all_reduce": name}, memory=memory)
        origins = {**self.origins, "collectives.all_reduce": Origin.CHOSEN, "memory.shared": Origin.CHOSEN}
        return replace(self, what=replace(self.what, plan=plan), origins=origins)

    def notes(self) -> list[str]:
        """Return notes on chosen defaults and the reasons, for runs whose ranks are all on this host."""
        from shoal.hardware.detect import gpus, why_not_shared

        why = why_not_shared() if self._chooses_sums() and not gpus() else None
        return [f"gradients are summed over sockets (native): {why}"] if why else []

    def _chooses_sums(self) -> bool:
        origin, ranks = self.origin("collectives.all_reduce"), self.what.plan.layout.divides_grains
        return origin in (Origin.DEFAULT, Origin.CHOSEN) and ranks > 1


def claim_directory(request: RunRequest) -> DirectoryLock:
    """Lock the run directory for this process: the request's, or a default directory of another number.

    Raises: InUseError if another run uses the directory, and as `RunRequest.check`.
    """
    numbered, in_use = request.where.numbered, set[Path]()

    def check() -> None:
        if numbered is not None and RunDirectory(out).holds_run():
            raise InUseError(given=str(out), conflict="another has trained there since", remedy="take the next")
        replace(request, where=replace(request.where, out=out)).check()

    out = request.where.out
    while True:
        try:
            if not (out / NAME).exists():  # if locked, naming the holder is the better error
                check()
            lock = claim(out, say_note)
            try:
                check()
                if request.course.private:
                    try:
                        out.chmod(0o700)
                    except OSError as error:
                        why = f"its mode cannot be changed: {error.strerror or error}"
                        raise RunDirectoryError(
                            given=f"--private --out {out}",
                            conflict=f"others may read this directory, and {why}",
                            remedy="give a new directory, or leave --private out",
                        ) from None
                if request.course.resume and (read_json(RunDirectory(out).result) or {}).get("status") == RUNNING:
                    say_note(f"{out}: the last process of this run was killed: it left no result")
            except BaseException:
                lock.release()
                raise
            return lock
        except InUseError:
            if numbered is None:
                raise
        in_use.add(out)
        out = default_directory(numbered, False, in_use)


def with_processes(plan: Plan, devices: int, job: Mapping[str, Any], gpus: int) -> Plan:
    """Return the plan with another degree of the data axis, for `devices` processes in total.

    `job`: content of job.json.
    `gpus`: number of GPUs that the run sees, 0 if it uses none.
    Raises: PlanError with the conflicts.
    """
    rest, given = plan.layout.world_size // plan.layout.data, f"{devices} processes"
    conflict = None
    if plan.serves:
        conflict = "a run with parameter servers keeps its number of workers"
    elif devices % rest:
        conflict = f"a replica of the model takes {rest}, and only whole replicas join or leave during a run"
    elif 0 < gpus < devices:
        conflict = f"the run sees {gpus} GPU(s), and a GPU serves one process"
    if conflict is not None:
        remedy = "stop the run, and go on with another plan: shoal run ... --resume --plan"
        raise PlanError(given=given, conflict=conflict, remedy=remedy)
    new_plan, grains = relaid(plan, devices), job.get("grains")
    if isinstance(grains, int) and grains > 0 and new_plan.layout.divides_grains > grains:
        facts = ModelFacts(grains, -(-int(job.get("global_batch", grains)) // grains))
        refuse(conflicts(new_plan, facts))
    refuse(conflicts(new_plan))
    return new_plan


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
        value: T = adapter(cast(Any, kind)).validate_python(json.loads(text))
        return value
    except ValueError as error:
        raise LaunchError(
            given=f"a {kind.__name__} that another process of this run wrote",
            conflict=f"it cannot be read: {error}",
            remedy="start every process with the same version of shoal",
        ) from error
