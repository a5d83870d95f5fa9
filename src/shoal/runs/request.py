"""Request of `shoal run`: its arguments, checked as far as that goes without torch. Values only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.runs.certificate import Certificate
from shoal.runs.directory_lock import NAME, DirectoryLock, claim
from shoal.errors import CommandError, InUseError
from shoal.runs.job_file import JobRequest, parse_target
from shoal.runs.job_file_static import least_grains
from shoal.plans import Plan
from shoal.plans.legal import check, conflicts, refuse
from shoal.plans.resolve import Wishes, apply_wishes, refuse_unsupported
from shoal.plans.toml import read
from shoal.runs.directory import RunDirectory, default_directory, read_json


@dataclass(frozen=True)
class RunRequest:
    """One call of `shoal run`; `plan` contains every option but is not completed for the job yet.

    `says_workers`: whether the command or a plan file says how many data workers a rank has.
    `plan_resumed`: it is the one that the run directory keeps, of which this call says nothing.
    `numbered`: the name of `out` where nobody gave a directory, so that another number serves as well.
    """

    job: JobRequest
    plan: Plan
    wishes: Wishes
    out: Path
    resume: bool
    steps: int | None
    checkpoint_every: int | None
    telemetry: bool
    started_at: float
    plan_from_file: bool
    certificate: Path | None = None
    says_workers: bool = False
    plan_resumed: bool = False
    numbered: str | None = None

    @classmethod
    def from_options(cls, options: argparse.Namespace, started_at: float) -> RunRequest:
        """The request in parsed options. Raises: CommandError, JobFileError, SettingError, PlanError."""
        wishes = Wishes(
            devices=_integer("--devices", options.devices),
            exact=options.exact,
            precision=options.precision,
            workers=_integer("--workers", options.workers, least=0),
            max_microbatch=_integer("--max-microbatch", options.max_microbatch),
        )
        job = parse_target(options.job, options.set)
        out = Path(options.out) if options.out else default_directory(job.name, options.resume)
        steps = _integer("--steps", options.steps)
        if options.resume:
            job, steps = _resumed(RunDirectory(out), job, steps)
        resumed_plan = options.resume and not options.plan and RunDirectory(out).plan.exists()
        plan = (
            read(RunDirectory(out).plan if resumed_plan else Path(options.plan))
            if options.plan or resumed_plan
            else Plan()
        )
        says_workers = wishes.workers is not None or "workers" in plan.data.model_fields_set
        if resumed_plan and options.exact and not plan.execution.exact:
            plan = plan.with_sections(batch={"grains_per_microbatch": 0})  # the run's own number, which nobody wrote
        plan = apply_wishes(plan, wishes, from_file=bool(options.plan))
        refuse(conflicts(plan))
        refuse_unsupported(plan)
        return cls(
            job=job,
            plan=plan,
            wishes=wishes,
            out=out,
            resume=options.resume,
            steps=steps,
            checkpoint_every=_integer("--checkpoint-every", options.checkpoint_every),
            telemetry=not options.no_telemetry,
            started_at=started_at,
            plan_from_file=bool(options.plan) or resumed_plan,
            plan_resumed=resumed_plan,
            certificate=Path(options.require_certificate) if options.require_certificate else None,
            says_workers=says_workers,
            numbered=None if options.out or options.resume else job.name,
        )

    def check(self) -> None:
        """Raises: RunDirectoryError where the run directory cannot be used, CertificateError where there is none."""
        RunDirectory(self.out).check(self.resume)
        if self.certificate is not None:
            Certificate.read(self.certificate)

    def check_plan(self) -> None:
        """Warns of settings without effect, of a plan that this call gives. Raises: PlanError with every conflict.

        What a run keeps was completed by it: a resume on other devices would tell of choices that nobody wrote.
        """
        if self.plan_resumed:
            refuse(conflicts(self.plan))
        else:
            check(self.plan)

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

    def with_devices(self, count: Callable[[], int]) -> RunRequest:
        """The request with a number of devices, counted where neither plan nor option says."""
        if self.plan_from_file or self.wishes.devices is not None:
            return self
        wishes = replace(self.wishes, devices=count())
        return replace(self, wishes=wishes, plan=apply_wishes(self.plan, wishes, from_file=False))

    def with_own_sums(self) -> RunRequest:
        """The request with the fastest all-reduce between processes of this host, where no plan file says which.

        For runs whose ranks are all on this host.
        """
        from shoal.hardware.fastest_all_reduce import all_reduce_here  # tables that no worker needs

        if not self._chooses_sums:
            return self
        name = all_reduce_here(self.plan.degrees.divides_grains)
        if self.plan.execution.exact and name != "shared_memory":  # its tree goes that way or over sockets
            return self
        return replace(self, plan=self.plan.with_sections(collectives={"all_reduce": name}))

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

        To load it costs a launcher the import of torch, two of the three seconds of a first step.
        """
        layout = self.plan.degrees
        if layout.shares_grains > 1:
            return True
        ranks = layout.divides_grains
        return ranks > 1 and ranks > (least_grains(self.job.path) or 0)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.plan.degrees.world_size

    @property
    def num_processes(self) -> int:
        """Number of ranks and, where the plan has servers, of servers and their conductor."""
        return self.plan.num_processes

    @property
    def threads_per_process(self) -> int:
        """The host's cores divided among the processes; one in exact mode, since kernels depend on it."""
        return 1 if self.plan.execution.exact else max(1, cores_here() // self.world_size)


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_here() -> int:
    """All the GPUs that the driver shows and CUDA_VISIBLE_DEVICES leaves, or one process where there are none."""
    folder = Path("/proc/driver/nvidia/gpus")
    found = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = min(found, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
    return max(1, found)


def _resumed(directory: RunDirectory, job: JobRequest, steps: int | None) -> tuple[JobRequest, int | None]:
    """The settings and the last step of the run that is resumed, where this call does not say."""
    saved = read_json(directory.job)
    if not saved:
        return job, steps
    given = dict(job.settings)
    settings = {**saved.get("given", {}), **given}
    return replace(job, settings=tuple(settings.items())), steps if steps is not None else saved.get("stop_after")


def _integer(name: str, text: str | None, least: int = 1) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise CommandError(
            given=f"{name} {text}",
            conflict=f"{name} takes a whole number of at least {least}",
            remedy=f"write {name} 2, say",
        )
    return value
