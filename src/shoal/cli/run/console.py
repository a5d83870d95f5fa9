"""Console output of a run: settings, progress (a live line in a terminal, else log lines) and result."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass

import torch

from shoal.cli.notebook_progress import record_line
from shoal.errors import folded, terminal_width
from shoal.hardware.detect import cores
from shoal.jobs.job_file import LoadedJob
from shoal.planner.calibrate.comparison import as_line
from shoal.plans.grains import share_sizes
from shoal.plans.plan import Plan, described
from shoal.report.quantities import several
from shoal.runs.directory import RunDirectory
from shoal.runs.options import Origin
from shoal.runs.records import RunRecord, StepRecord, sample_rate
from shoal.runs.request import RunRequest
from shoal.runs.version import __version__
from shoal.training.setup.engine import Engine

_AMPERE = 8  # first compute capability with TF32 and bfloat16
_BAR, _LEAST_BAR = 20, 5  # characters


class Reporter:
    """Display of a run's progress. This base class, for all ranks but the first, prints nothing."""

    def note(self, text: str) -> None:
        """Print one permanent line."""

    def step(self, record: StepRecord, slowest_rank: int) -> None:
        """Count a finished step."""

    def close(self) -> None:
        """Restore the terminal."""


@dataclass
class Pace:
    """Throughput of this call: steps, samples and seconds. `first` and `last` are step numbers."""

    first: int
    last: int
    world_size: int
    began: float = 0.0
    samples: int = 0
    peak_bytes: int = 0  # maximum over the shown records, which have the peak so far

    def count(self, record: StepRecord) -> float:
        """Count a finished step. Return the current time."""
        now = time.monotonic()
        self.began = self.began or now - record.seconds
        self.samples += record.num_samples
        return now

    def bar(self, record: StepRecord, room: int) -> str:
        """Return a progress bar of at most 20 characters with the percentage, or "" without enough room."""
        share, size = min(1.0, record.step / max(1, self.last)), min(_BAR, room - len(" 100%  "))
        full = int(share * size)
        return f"{'━' * full}{'─' * (size - full)} {int(share * 100):3d}%  " if size >= _LEAST_BAR else ""

    def line(self, record: StepRecord, slowest_rank: int) -> str:
        """Return a line with step, loss, rate of samples, remaining time, peak memory and the slowest rank.

        The last two are left out where the terminal has no room.
        """
        elapsed = max(1e-9, time.monotonic() - self.began)
        done = record.step - self.first
        left = (self.last - record.step) * elapsed / max(1, done)
        minutes, rest = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
        loss = "-" if record.loss is None else f"{record.loss:.4f}"
        text = f"step {record.step}/{self.last}  loss {loss}  {sample_rate(self.samples, elapsed)}  eta {clock}"
        text += f"  skipped: {record.skipped}" if record.skipped else ""
        memory = record.ranks.get("memory_bytes")
        self.peak_bytes = max(self.peak_bytes, record.memory_bytes, int(memory.max) if memory is not None else 0)
        peak = f"  peak {self.peak_bytes / 2**30:.2f} GiB" if self.peak_bytes else ""
        slowest = f"  slowest rank {slowest_rank}" if self.world_size > 1 else ""
        for part in (peak, slowest):
            text += part if len(text + part) <= terminal_width() else ""
        return text


class Plain(Reporter):
    """Progress display for logs: the first step, a line every two seconds, evaluations and the last step."""

    every_seconds = 2.0

    def __init__(self, pace: Pace) -> None:
        self._pace, self._next = pace, 0.0

    def note(self, text: str) -> None:
        print(folded(text), flush=True)

    def step(self, record: StepRecord, slowest_rank: int) -> None:
        now = self._pace.count(record)
        if now >= self._next or record.step == self._pace.last:
            self._show(record, slowest_rank)
            self._next = now + self.every_seconds
        if record.metrics:
            values = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
            self.note(f"step {record.step}  evaluation: {values}")

    def _show(self, record: StepRecord, slowest_rank: int) -> None:
        self.note(self._pace.line(record, slowest_rank))


class Live(Plain):
    """Progress display for a terminal: one line with a bar that changes a few times per second."""

    every_seconds = 0.2

    def __init__(self, pace: Pace) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive
        from rich.text import Text

        super().__init__(pace)
        self._console, self._make = Console(highlight=False), Text
        self._live = RichLive(Text(""), console=self._console, auto_refresh=False)
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(folded(text), markup=False, soft_wrap=True)

    def _show(self, record: StepRecord, slowest_rank: int) -> None:
        line = self._pace.line(record, slowest_rank)
        line = self._pace.bar(record, self._console.width - len(line)) + line
        self._live.update(self._make(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self._live.stop()


class Records(Plain):
    """Progress lines for a `ProgressDisplay` in another process."""

    every_seconds = 0.5

    def _show(self, record: StepRecord, slowest_rank: int) -> None:
        print(record_line(record.step, self._pace.last, self._pace.line(record, slowest_rank)), flush=True)


def choose_reporter(rank: int, pace: Pace, *, shown_elsewhere: bool = False) -> Reporter:
    """Choose the display: live in a terminal, plain elsewhere (or with CI, NO_COLOR, TERM=dumb), none on rank > 0."""
    if rank != 0:
        return Reporter()
    if shown_elsewhere:
        return Records(pace)
    plain = any(os.environ.get(name) for name in ("CI", "NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Plain(pace) if plain or not sys.stdout.isatty() else Live(pace)


def introduce(
    reporter: Reporter,
    engine: Engine,
    loaded: LoadedJob,
    request: RunRequest,
    resumed: int | None,
    *,
    why_grains: str = "as the job says",
) -> None:
    """Print the settings of a run and the reasons for them."""
    job, plan, mesh = loaded.job, engine.plan, engine.mesh
    device = "cuda" if plan.serves and torch.cuda.is_available() else mesh.device.type  # conductor's: CPU
    only = ", the workers" if plan.serves and device != mesh.device.type else ""
    where = f"{several(plan.num_processes, 'process')}{only} on {device}"
    threads = f", {several(torch.get_num_threads(), 'thread')} each of {several(cores(), 'core')}"
    reporter.note(f"shoal {__version__}: {request.what.job.target}:{loaded.function} -> {request.where.shown}")
    by = {Origin.OPTION: "as asked", Origin.FILE: "as the plan says", Origin.RUN: "as the run was"}
    chosen_by = by.get(request.origin("layout"), "default: all GPUs, or 1 process")
    reporter.note(f"  devices     {where}{threads if device == 'cpu' else ''} ({chosen_by})")
    reporter.note(f"  layout      {described(plan)}")
    share = max(share_sizes(job.num_grains, plan.divides_step, plan.layout.shares))
    per = plan.batch.grains_per_microbatch
    each = f"{job.grain_size} sample{'s' if job.grain_size > 1 else ''} each"
    microbatches = several(-(-share // per), "microbatch")
    reporter.note(f"  grains      {job.num_grains} ({each}; {why_grains})")
    computes = f"a rank computes up to {share} grains, {per} at a time ({microbatches})"
    average = " on average" if job.sampler is not None and job.sampler.unequal else ""
    reporter.note(f"  batch       {job.global_batch} samples a step{average}; {computes}")
    sums = f"overlapped sums, {plan.collectives.all_reduce} all-reduce"
    mode = f"fast: fused grains, {'added up on the servers' if plan.serves else sums}"
    mode = "exact: grain by grain, one thread, fixed tree" if plan.execution.exact else mode
    compression, compressed = engine.strategy.compression, ""
    if compression is not None and compression.fell_back is not None:
        fell_back = f"fell back to uncompressed sums at step {compression.fell_back['step']}"
        compressed = f"; {compression.scheme} {fell_back}"
    elif compression is not None:
        feedback = " with error feedback" if compression.feedback else ""
        compressed = f", compressed to {compression.scheme}{feedback}"
    reporter.note(f"  summation   {mode}{compressed}")
    if plan.serves:
        servers = f"{several(plan.layout.data, 'worker')}, {several(plan.server.num_servers, 'server')} and a conductor"
        reporter.note(f"  servers     {servers}; no prediction: the planner knows no servers")
    scale = f", loss scale {plan.precision.loss_scale}" if plan.precision.loss_scale != "none" else ""
    products = f", products {plan.precision.products}" if plan.precision.products != "same" else ""
    kinds = f"parameters {plan.precision.parameters}, compute {plan.precision.compute}"
    reporter.note(f"  precision   {kinds}{products}{scale}")
    is_asked = plan.precision.compute != "float32" or request.origin("precision") is Origin.OPTION
    if mesh.device.type == "cuda" and not is_asked and (line := tensor_cores(plan)):
        reporter.note(f"  tensor      {line}")
    samples = f"{engine.num_train_samples:,} samples" if engine.num_train_samples else "a stream"
    reporter.note(
        f"  data        {samples}, {several(plan.data.workers, 'worker process')} a rank; "
        f"model of {engine.num_parameters:,} parameters"
    )
    if job.sampler is not None and job.sampler.unequal:
        reporter.note(f"              {job.sampler.spread(engine.order)}")
    for note in (*engine.notes, *engine.sharded_model.division.notes):
        reporter.note(f"  {note}")
    if request.course.steps is not None and request.course.steps > engine.order.num_steps:
        reporter.note(
            f"  length      {request.course.steps} steps, beyond the job's own {engine.order.num_steps}: "
            "the schedule stays at its end"
        )
    if request.course.resume:
        reporter.note(
            "  resumed     " + (f"after step {resumed}" if resumed is not None else "from the start: no checkpoint yet")
        )
    if resumed is not None and resumed >= max(engine.order.num_steps, request.course.steps or 0):
        longer = "give the job a larger length: Job(length=...)"
        known = [name for name in loaded.settings if name.endswith(("epochs", "steps", "samples"))]
        value = loaded.settings[known[0]] if known else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            longer = f"add --set {known[0]}={2 * value:g} (from Python: {known[0]}={2 * value:g}), say"
        reporter.note(f"  length      nothing is left to do: all steps are trained; to go on, {longer}")
    if request.course.steps is not None and request.course.steps <= (resumed or 0) < engine.order.num_steps:
        reporter.note(
            f"  length      nothing is left to do: the run was told to end after step {request.course.steps}; "
            f"--steps {engine.order.num_steps} goes on to the job's own end"
        )


def tensor_cores(plan: Plan) -> str:
    """Return a line on what TF32 and bfloat16 would bring to a float32 run on this GPU, or "" if it has neither."""
    if torch.cuda.get_device_capability()[0] < _AMPERE:
        return ""
    step, others = plan.prediction.get("step_seconds"), plan.prediction.get("precisions", {})

    def gain(name: str) -> str:
        return f" ({step / others[name] - 1:+.0%} samples a second, as predicted)" if others.get(name) else ""

    ways = [f"--precision bf16{gain('bf16')}"]
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        ways.insert(0, f'torch.backends.cuda.matmul.fp32_precision = "tf32" in the job{gain("tf32")}')
    is_fast = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    matmuls = (
        f"{'convolutions are TF32, as torch sets them; ' if is_fast else ''}tensor cores would compute matmuls with "
    )
    return f"{matmuls}{' or '.join(ways)}, which changes numbers{'' if others else '; shoal plan predicts the gain'}"


def conclude(
    reporter: Reporter, result: RunRecord, request: RunRequest, function: str, *, told_to_stop: bool = False
) -> None:
    """Print the result of a run next to its prediction, and how to continue.

    `told_to_stop`: whether a signal stopped the run, so that it ignores resize requests.
    """
    values = "  ".join(f"{name} {math.nan if value is None else value:.4f}" for name, value in result.metrics.items())
    evaluated = f"  {values}  ({result.eval_samples} samples evaluated)" if values else ""
    early = result.ended_early
    of = f" of {early['wanted_steps']}" if early is not None else ""
    reporter.note(f"{result.status} after step {result.steps}{of}, {result.wall_seconds:.1f} s{evaluated}")
    if early is not None:
        reporter.note(
            f"warning: train_data ended after {early['samples']} of {early['wanted_samples']} samples; each item "
            "counts as one sample: let a stream of batches yield its samples one by one"
        )
    if result.compile_seconds:
        reporter.note(f"  {result.compile_seconds:.1f} s in torch's compiler, most of it in the first step")
        if result.compile_cuts:
            reporter.note(f"  uncompiled between parts of a region: {', '.join(result.compile_cuts)}")
    if result.prediction is not None and result.prediction["step_seconds"]["measured"]:
        reporter.note(f"  {as_line(result.prediction)}")
    if result.server is not None and result.server.get("warning"):
        reporter.note(f"warning: {result.server['warning']}")
    goes_on = request.where.resizable and not told_to_stop and RunDirectory(request.where.out).requested_devices()
    if result.status == "preempted" and goes_on:
        reporter.note("a checkpoint was written; the run continues with another number of processes")
    elif result.status == "preempted":
        command = f"shoal run {request.what.job.target}:{function} --resume --out {request.where.shown}"
        call = f"shoal.run({function}, resume=True, out={request.where.shown!r})"
        reporter.note(f"resume with: {command if request.what.job.handed is None else call}")
