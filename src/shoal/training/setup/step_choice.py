"""Start of a trial of step modes, with its candidates or with turns that are known already."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.whole_optimizer import parts
from shoal.data.source import MapSource, small_batch
from shoal.distributed.mesh import decided_by_rank_0, together
from shoal.distributed.process_setup import versions
from shoal.errors import CommandError, PlanError
from shoal.hardware.detect import cores, processor
from shoal.numerics.generators import generators_kept
from shoal.numerics.operators import tensors_in
from shoal.parallel.blocks.compiled import require_compiler
from shoal.parallel.data.sparse_rows import sparse_parameters
from shoal.plans.legal import conflicts
from shoal.runs.directory import Fence, RunDirectory
from shoal.runs.step_trial import (
    CHANNELS_LAST,
    COMPILE_AGAIN_SECONDS,
    COMPILE_SECONDS,
    GRAPH_SECONDS,
    StepMode,
    StepTrial,
    TrialCandidate,
    TrialKey,
    TrialVerdict,
    has_compiled,
    is_too_short,
    read_trial,
    recorded_trial,
)
from shoal.training.loop.captured_step import RECORDERS
from shoal.training.loop.step_modes import RunTrial
from shoal.training.setup.engine import Engine
from shoal.training.setup.memory_format_choice import NO_IMAGES, why_not_channels_last


@dataclass(frozen=True)
class TrialRequest:
    """Request of a call for the mode of steps.

    Args:
        step: the option: "auto", the path of a trial.json, or another mode.
        sets_step: whether a plan file sets the mode of steps.
        sets_format: whether a plan file, or the run that is resumed, sets the memory format.
        covered: whether a certificate has to cover the plan.
    """

    step: str
    sets_step: bool = False
    sets_format: bool = False
    covered: bool = False


@dataclass(frozen=True)
class _Known:
    trial: StepTrial | None = None
    source: str = ""
    is_given: bool = False  # the trial needs no record in the file of this machine


def open_trial(
    engine: Engine,
    request: TrialRequest,
    description: Mapping[str, Any],
    *,
    directory: RunDirectory,
    fence: Fence,
    first: int | None,
    num_steps: int,
) -> RunTrial | str:
    """Return the trial of a run, or why it has none.

    Args:
        engine: the engine of the run.
        request: what the call says.
        description: content of job.json.
        directory: the run directory.
        fence: right of the ranks' generation to write.
        first: number of steps of a run that is resumed, None for a new run.
        num_steps: number of steps at the end of the run.

    Raises: CommandError for a damaged trial.json, or one that this run cannot follow. Collective: all ranks.
    """
    plan, mesh = engine.plan, engine.mesh
    own = directory.trial if mesh.rank == 0 else None
    given = Path(request.step) if request.step.endswith(".json") else None
    never = _why_never(engine)
    if never is not None and given is not None and first is None:
        raise CommandError(
            given=f"--step {given}",
            conflict=f"this run takes no turns: {never}",
            remedy="leave --step out, or give the plan of the run that the file is from",
        )
    reason = never or (_why_none(request, num_steps) if given is None else None)
    if reason is not None:
        return reason
    key = decided_by_rank_0(mesh, TrialKey, lambda: TrialKey.of(_facts(engine, description), num_steps))

    def known() -> _Known:
        if first is not None:
            trial = read_trial(directory.trial)
            return _Known(trial, "as the run began")
        if given is not None:
            return _Known(read_trial(given.resolve()), f"as {given} says", is_given=True)
        trial = recorded_trial(key)
        return _Known(trial, "as recorded on this machine", is_given=trial is not None and trial.chosen is not None)

    start = decided_by_rank_0(mesh, _Known, known)
    trial, source = start.trial, start.source
    if trial is None and first is not None:
        return "the run began without a trial"
    if trial is None and given is not None:
        return f"{given} is not there"
    is_own = trial is None
    if trial is not None:
        if trial.chosen is None and given is not None and first is None:
            trial.end(trial.ends_at, "the given turns end there")
        elif trial.chosen is None and trial.net != key.net:
            trial.end(first or 0, "the run goes on with another layout, job or machine")
        refused = _first_refusal(engine, trial, first or 0)
        if refused is not None and first is None and given is None:
            is_own = True
        elif refused is not None:
            raise CommandError(
                given=f"--step {given}" if first is None else "--resume of a run whose steps have had several modes",
                conflict=f"this machine cannot compute the steps that follow so, {refused}",
                remedy="write --step eager and another --out, or go on where the modes were tried",
            )
    if is_own or trial is None:
        start, trial, source = _Known(), _new_trial(engine, request, key), ""
    trial.num_steps = num_steps
    if not trial.turns and trial.chosen == StepMode.of(plan).name:
        return "; ".join(f"{name}: {verdict.reason}" for name, verdict in trial.verdicts.items()) or "nothing to try"
    if trial.chosen is None:
        source = ""
    run = RunTrial(trial, None if start.is_given else key, source, directory.plan if own else None, own, fence)
    together(mesh, run.write)
    return run


def _why_never(engine: Engine) -> str | None:
    """Return why no run with this plan has a trial, in words."""
    plan = engine.plan
    if plan.execution.exact:
        return "exact mode has one way to compute a step"
    if plan.serves:
        return "parameter servers compute steps in parts"
    if plan.divides_model:
        return "each rank has a part of the model"
    if sparse_parameters(engine.model):
        return "sparse gradients are computed in eager steps"
    if engine.job.outputs is not None:
        return "a loss over the global batch is computed in eager steps"
    if engine.updater.needs_closure:
        return "the optimizer computes the loss another number of times in each step"
    if engine.job.batch_norm == "batch":
        return "batch norms over the global batch are computed in eager steps"
    return None if isinstance(engine.job.train_data.source, MapSource) else "the length of a stream is not known"


def _why_none(request: TrialRequest, num_steps: int) -> str | None:
    """Return why a call asks for no trial, in words."""
    if request.step != "auto":
        return f"--step {request.step}"
    if request.sets_step:
        return "the plan file sets it"
    if request.covered:
        return "the certificate covers one plan"
    return f"{num_steps} steps are too few for a trial" if is_too_short(num_steps) else None


def _why_not(engine: Engine, mode: StepMode) -> str | None:
    """Return why this rank cannot compute steps in a mode, in words, or None."""
    plan, precision = engine.plan, engine.precision
    refused = conflicts(plan.with_choices(execution=asdict(mode)))
    if refused:
        return refused[0].conflict
    if mode.cuda_graph and precision.device.type not in RECORDERS:
        return f"no step is captured on {precision.device.type}"
    if mode.compile != "none" and not isinstance(precision.products(), contextlib.nullcontext):
        return f"this processor computes {precision.compute} in float32"
    return None


def _first_refusal(engine: Engine, trial: StepTrial, step: int) -> str | None:
    """Return why the steps after `step` cannot follow a trial here, with the mode, or None. Collective: all ranks."""
    names = [turn.mode for turn in trial.turns if turn.until > step] + [trial.chosen or trial.best]
    for mode in map(StepMode.named, dict.fromkeys(names)):
        why = _why_not(engine, mode)
        if why is None and mode.compile != "none":
            try:
                require_compiler(engine.precision.device)
            except PlanError as error:
                why = error.conflict
        if why is None and mode.channels_last and not engine.plan.execution.channels_last:
            why = why_not_channels_last(engine.job, engine.model, engine.precision, engine.job.train_data)
        reason = _first(engine.mesh.gather_json(why))
        if reason is not None:
            return f"{mode.name}: {reason}"
    return None


def _first(reasons: Sequence[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _new_trial(engine: Engine, request: TrialRequest, key: TrialKey) -> StepTrial:
    """Return the trial of a run that nothing is known of. Collective: all ranks."""
    precision, mesh = engine.precision, engine.mesh
    base = StepMode.of(engine.plan)
    candidates: list[TrialCandidate] = []
    verdicts: dict[str, TrialVerdict] = {}
    on_gpu, has_graphs = precision.device.type == "cuda", precision.device.type in RECORDERS
    # Where channels last saves time: all kernels of CPUs that have it are for float32, tensor cores are for 16 bits.
    if not (request.sets_format or base.channels_last) and precision.is_wide != on_gpu:
        own = why_not_channels_last(engine.job, engine.model, precision, engine.job.train_data)
        reason = _first(mesh.gather_json(own))
        if reason is None:
            candidates.append(TrialCandidate(CHANNELS_LAST))
        elif reason != NO_IMAGES:
            verdicts[CHANNELS_LAST] = TrialVerdict(f"left out: {reason}")
    compiling = COMPILE_AGAIN_SECONDS if decided_by_rank_0(mesh, bool, lambda: has_compiled(key)) else COMPILE_SECONDS
    candidates += [TrialCandidate("graph", GRAPH_SECONDS)] if has_graphs else []
    candidates.append(TrialCandidate("compiled", compiling))
    candidates += [TrialCandidate("compiled-graph", compiling + GRAPH_SECONDS)] if has_graphs else []
    left = []
    for candidate in candidates:
        reason = _first(mesh.gather_json(_why_not(engine, candidate.added_to(base))))
        if reason is None:
            left.append(candidate)
        else:
            verdicts[candidate.name] = TrialVerdict(f"left out: {reason}")
    trial = StepTrial(base.name, key.net, key.num_steps, left)
    trial.verdicts |= verdicts
    return trial


def _facts(engine: Engine, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the time of a step depends on."""
    plan, device = engine.plan, engine.mesh.device
    data, shapes = engine.job.train_data, list[Any]()
    with generators_kept(), contextlib.suppress(Exception):  # a step reports any error
        batch = small_batch(data.source, data.collate, data.bad_samples)
        shapes = [(list(leaf.shape[1:]), str(leaf.dtype)) for leaf in tensors_in(batch) if isinstance(leaf, Tensor)]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    job = {name: value for name, value in engine.job.describe().items() if name not in ("seed", "length", "shuffle")}
    document = plan.to_mapping()
    del document["prediction"]
    return {
        "code": description.get("code"),
        "parameters": description.get("shapes_sha256"),
        "job": job,
        "settings": description.get("settings"),
        "optimizer": [type(part).__qualname__ for part in parts(engine.updater.optimizer).values()],
        "batch": shapes,
        "plan": document,
        "versions": versions(),
        "device": [device.type, gpu, processor(), cores(), torch.get_num_threads()],
    }
