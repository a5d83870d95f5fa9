"""Layout that would fit, for a run whose memory does not suffice: the planner names it in the error's advice."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from shoal.errors import OutOfMemoryError, RankLostError, ShoalError, say_note
from shoal.hardware import link
from shoal.hardware.detect import usable_memory_bytes, visible_gpus
from shoal.launch.environment import INSIDE
from shoal.launch.supervise.child import Child
from shoal.plans.plan import DEGREES, Plan
from shoal.runs.request import RunRequest, dumped, loaded

_PROGRAM = "import sys, shoal.cli.run.way_out; shoal.cli.run.way_out.main(sys.argv[1])"
_PATIENCE_SECONDS = 120.0
# Share of the peak, as predicted for a plan that did not fit, that another plan may have.
_LESS = 0.9


def with_way_out(error: ShoalError, request: RunRequest, *, killed: bool = False) -> ShoalError:
    """Return the error, with the layout that would fit if memory ran out and the planner knows one.

    `killed`: True if the kernel has killed a process of this host for memory since the run began. The lost rank on a
    CPU was then probably that process.
    A new interpreter loads the job and searches, since the memory of this process may be exhausted.
    """
    guess = ""
    if isinstance(error, RankLostError) and killed and "was killed by SIGKILL" in error.conflict and not visible_gpus():
        guess = "probably the kernel killed it, for memory"
    if not (guess or isinstance(error, OutOfMemoryError)) or request.what.plan.serves:
        return error
    say_note(f"{guess or 'memory does not suffice'}; the planner looks for a layout that fits")
    with tempfile.TemporaryDirectory(prefix="shoal-fits-") as folder:
        (Path(folder) / "request.json").write_text(dumped(request), encoding="utf-8")
        words, quiet = [sys.executable, "-c", _PROGRAM, folder], subprocess.DEVNULL
        Child(words, variables={INSIDE: "1"}, output=quiet, errors=quiet).finish(_PATIENCE_SECONDS)
        try:
            advice = json.loads((Path(folder) / "advice.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return error
    if advice:
        error.remedy = f"{guess and f'{guess}: '}{advice}; or {error.remedy}"
    return error


def main(folder: str) -> None:
    """Write the advice for the request in a folder."""
    request = loaded(RunRequest, (Path(folder) / "request.json").read_text(encoding="utf-8"))
    (Path(folder) / "advice.json").write_text(json.dumps(advice_for(request)), encoding="utf-8")
    os._exit(0)  # do not wait for threads that the job's code started


def advice_for(request: RunRequest) -> str:
    """Return what to write so that the request's job fits, or an empty text if no number of devices is known to do."""
    from shoal.jobs.job_file import load
    from shoal.planner.answer.answer import question, with_way_out
    from shoal.planner.answer.outlook import Case
    from shoal.planner.search.search import NothingFitsError, Wanted, gib
    from shoal.planner.search.space import counts
    from shoal.training.setup.preflight import judged_for

    job, devices = load(request.what.job).job, request.what.plan.num_processes
    failed = judged_for(request, job).plan
    case = question(job, Plan(precision=failed.precision), "here", None).case
    # As many processes as were asked for may be more than there are cores.
    most, between = max(devices, case.cluster.devices_per_host), case.cluster.between or link("Ethernet-10")
    cluster = replace(case.cluster, devices_per_host=most, between=between)
    device, peak = cluster.device_for(devices), case.predictor.predict(failed).peak_bytes
    of_process, _ = resource.getrlimit(resource.RLIMIT_AS)
    each = device.kind == "gpu" or of_process != resource.RLIM_INFINITY
    memory = float(device.memory_bytes)
    if device.kind == "cpu":
        memory = min(memory, usable_memory_bytes() / devices)
    if of_process != resource.RLIM_INFINITY:  # it counts what is mapped of Python and torch, too
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        memory = min(memory, max(0, of_process - mapped))
    if peak <= memory * (1.0 - cluster.memory_margin):  # the planner expected it to fit
        memory = _LESS * peak / (1.0 - cluster.memory_margin)

    def limited(number: int) -> Case:
        """Return the case with the memory that each of `number` processes on this host has."""
        own = int(memory if each else memory * devices / number)
        one = replace(cluster.device_for(number), memory_bytes=own)
        here = replace(cluster, devices_per_host=number, device=one, alternatives={})
        return replace(case, cluster=here, space=replace(case.space, counts=(number,)))

    for number in (devices, *(count for count in counts(cluster) if count > devices)):
        case_of_number = limited(number)
        fitting = case_of_number.search().take(Wanted())
        if not fitting:
            continue
        best = fitting[0].plan
        plain = Plan(precision=failed.precision, layout=best.layout)
        by_layout = judged_for(replace(request, what=replace(request.what, plan=plain, judged=None)), job).plan
        prediction = case_of_number.predictor.predict(by_layout)
        degrees = {axis: getattr(best.layout, axis) for axis in DEGREES if getattr(best.layout, axis) > 1}
        if prediction.fits and degrees:
            written = f"--layout {','.join(f'{axis}={degree}' for axis, degree in degrees.items())}"
        else:
            prediction = fitting[0].prediction
            sections, defaults = best.to_mapping(), failed.to_mapping()
            lines = [
                f"{section}.{name} = {json.dumps(value)}"
                for section in ("layout", "shard", "pipeline", "memory", "batch")
                for name, value in sections.get(section, {}).items()
                if value != defaults.get(section, {}).get(name)
            ]
            written = f"a --plan with {', '.join(lines)}"
        return f"write {written}: {gib(prediction.peak_bytes)} a device are predicted"
    nothing = with_way_out(NothingFitsError(given="", conflict="", remedy=""), limited(cluster.devices_per_host))
    return nothing.remedy.removesuffix("; or ")
