"""Summary lines of a run: its settings at the start, its result and prediction at the end."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.cli.progress import Reporter
from shoal.hardware.detect import cores
from shoal.planner.calibrate.comparison import told
from shoal.plans.words import described
from shoal.runs.job_file import LoadedJob
from shoal.runs.records import RunRecord
from shoal.runs.request import RunRequest
from shoal.runs.version import __version__
from shoal.training.engine import Engine


def introduce(reporter: Reporter, engine: Engine, loaded: LoadedJob, request: RunRequest, resumed: int | None) -> None:
    """Prints the settings of a run, and why they were chosen."""
    job, plan, mesh = loaded.job, engine.plan, engine.mesh
    share = -(-job.grains // plan.divides_step)
    per = plan.batch.grains_per_microbatch
    device = "cuda" if plan.serves and torch.cuda.is_available() else mesh.device.type  # here a conductor's: a CPU
    only = ", the workers" if plan.serves and device != mesh.device.type else ""
    where = f"{plan.num_processes} process{'es' if plan.num_processes > 1 else ''}{only} on {device}"
    threads = f", {torch.get_num_threads()} thread(s) each of {cores()} cores" if device == "cpu" else ""
    reporter.note(f"shoal {__version__}: {request.job.path}:{loaded.function} -> {request.out}")
    asked = "as asked" if request.wishes.devices or request.plan_from_file else "all GPUs, or one process without"
    reporter.note(f"  devices     {where}{threads} ({asked})")
    reporter.note(f"  layout      {described(plan)}")
    reporter.note(
        f"  batch       {job.global_batch} samples a step = {job.grains} grains of {job.grain_size}; "
        f"a rank computes up to {share} grains, {per} at a time ({-(-share // per)} microbatch(es))"
    )
    mode = (
        "exact: grain by grain, one thread, fixed tree"
        if plan.execution.exact
        else "fast: fused grains, added up on the servers"
        if plan.serves
        else f"fast: fused grains, overlapped sums, {plan.collectives.all_reduce} all-reduce"
    )
    reporter.note(f"  summation   {mode}{_compressed(engine)}")
    if plan.serves:
        servers = f"{plan.layout.data} worker(s), {plan.server.num_servers} server(s) and a conductor"
        reporter.note(f"  servers     {servers}; no prediction: the planner knows no servers")
    scale = f", loss scale {plan.precision.loss_scale}" if plan.precision.loss_scale != "none" else ""
    reporter.note(f"  precision   parameters {plan.precision.parameters}, compute {plan.precision.compute}{scale}")
    samples = f"{engine.num_train_samples:,} samples" if engine.num_train_samples else "a stream"
    reporter.note(
        f"  data        {samples}, {plan.data.workers} worker process(es) a rank; "
        f"model of {engine.num_parameters:,} parameters"
    )
    for note in (*engine.notes, *engine.sharded_model.division.notes):
        reporter.note(f"  {note}")
    if request.steps is not None and request.steps > engine.order.num_steps:
        reporter.note(
            f"  length      {request.steps} steps, beyond the job's own {engine.order.num_steps}: "
            "the schedule stays at its end"
        )
    if request.resume:
        reporter.note(
            "  resumed     " + (f"after step {resumed}" if resumed is not None else "from the start: no checkpoint yet")
        )
    if request.steps is not None and request.steps <= (resumed or 0) < engine.order.num_steps:
        reporter.note(
            f"  length      nothing is left to do: the run was told to end after step {request.steps}; "
            f"--steps {engine.order.num_steps} goes on to the job's own end"
        )


def conclude(reporter: Reporter, result: RunRecord, job: str, out: Path) -> None:
    """Prints the result of a run beside its prediction, and how to go on."""
    values = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    evaluated = f"  {values}  ({result.eval_samples} samples evaluated)" if values else ""
    early = result.ended_early
    of = f" of {early['wanted_steps']}" if early is not None else ""
    reporter.note(f"{result.status} after step {result.steps}{of}, {result.wall_seconds:.1f} s{evaluated}")
    if early is not None:
        reporter.note(
            f"warning: train_data ended after {early['samples']} of {early['wanted_samples']} samples; its items are "
            "taken for single samples: a stream of batches is to give them one by one"
        )
    if result.prediction is not None and result.prediction["step_seconds"]["measured"]:
        reporter.note(f"  {told(result.prediction)}")
    if result.server is not None and result.server.get("warning"):
        reporter.note(f"warning: {result.server['warning']}")
    if result.status == "preempted":
        reporter.note(f"resume with: shoal run {job} --resume --out {out}")


def _compressed(engine: Engine) -> str:
    compression = engine.strategy.compression
    if compression is None:
        return ""
    if compression.fell_back is not None:
        return f"; {compression.scheme} fell back to uncompressed sums at step {compression.fell_back['step']}"
    held = " with error feedback" if compression.feedback else ""
    return f", compressed to {compression.scheme}{held}"
