"""Diagnosis of a training script as it is: the parts of its steps' time, causes and remedies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from shoal.distributed.process_setup import versions
from shoal.doctor.causes import LostTime, ms
from shoal.doctor.script_causes import notes, script_causes
from shoal.doctor.script_times import PARTS, ScriptTimes, script_times
from shoal.errors import CommandError, folded, say_labelled
from shoal.programs.command import Processes, Script
from shoal.report.quantities import several
from shoal.runs.chrome_trace import read
from shoal.runs.directory import write_file

_FEWEST, _BEST = 4, 3
_ALWAYS = 5  # parts that are shown even if they are empty
_CLOCK = str(Path(__file__).with_name("script_clock"))


def diagnose_script(script: Script, devices: int, steps: int, out: Path, *, as_json: bool) -> None:
    """Run a script's first steps under a clock and a profiler, and print and write where their time goes.

    Args:
        steps: updates of its optimizer.
        out: the directory of `doctor.json`, and of the output of each rank.
        as_json: print the document of `doctor.json` and nothing else.

    Raises: CommandError for a script that cannot run, or that makes too few updates.
    """
    folder = out / ".clocks"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if not as_json:
            say_labelled("examining", f"{script.command}: {several(steps, 'step')} on {several(devices, 'process')}")
        processes = Processes(script, folder, devices, script.batch, {"mode": "clock", "clock": _CLOCK, "steps": steps})
        processes.finish()
        records = [json.loads((path).read_text()) for path in sorted(folder.glob("rank-*.json"))]
        records.sort(key=lambda one: int(one["rank"]))
        processes.check([int(one["updates"]) for one in records], out)
        updates = min(int(one["updates"]) for one in records)
        if updates <= _FEWEST:
            raise CommandError(
                given=f"--script {script.command!r}",
                conflict=f"it made {several(updates, 'update')}, too few for a diagnosis",
                remedy="give it more data or epochs",
            )
        traces = [folder / f"trace-{rank}.json.gz" for rank in range(devices)]
        times = script_times(records, [read(path) if path.exists() else {} for path in traces])
        causes = script_causes(times, next(word for word in script.parts[1:] if word != "-m"))
        not_seen = notes(times, cpu=script.cpu, steps=updates)
        document = _document(script, devices, times, causes, not_seen)
        write_file(out / "doctor.json", json.dumps(document, indent=1) + "\n")
        if as_json:
            print(json.dumps(document, indent=2))
            return
        total, ranks = times.run.total, range(len(times.parts))
        seen = f"{several(times.steps, 'step')}{', under the profiler' * times.under_profiler}"
        lines = [f"{script.name}: {ms(total)} a step on {several(len(times.parts), 'process')} ({seen})"]
        shown = list(ranks) if len(ranks) <= 8 else [0, times.slowest]
        lines.append(" ".join([" " * 22, "  share", *(f"{f'rank {rank}':>10}" for rank in shown)]))
        for place, (part, name) in enumerate(PARTS.items()):
            seconds = mean(own[part] for own in times.parts)
            if seconds or place < _ALWAYS:
                own = [f"{ms(times.parts[rank][part]):>10}" for rank in shown]
                name = part if times.on_gpu and part == "kernels" else name
                lines.append(" ".join([f"{name:22}", f"{seconds / total:7.0%}", *own]))
        if len(ranks) > 1:
            often = times.run.ranks["busy_seconds"].how_often
            lines.append(f"slowest: rank {times.slowest}, in {often:.0%} of profiled steps")
        if not causes:
            lines.append("healthy: nothing that could be had back takes 3 % of the time")
        for number, loss in enumerate(causes[:_BEST], 1):
            lines.append(f"{number}. {loss.title}: {ms(loss.seconds)} a step, {loss.share:.0%} of the time")
            lines.append(f"   {loss.seen}")
            for remedy in loss.remedies:
                lines.append(f"   {-remedy.gain:+.0%} of the time, {ms(remedy.gain * total)} a step: {remedy.words}")
        lines += [f"not seen: {what}" for what in not_seen]
        for line in lines:
            print(folded(line), flush=True)
        say_labelled("written", f"{out}/doctor.json")
    finally:
        for path in folder.glob("output-*.txt"):
            shutil.copy(path, out / path.name)
        shutil.rmtree(folder, ignore_errors=True)


def _document(
    script: Script, devices: int, times: ScriptTimes, causes: Sequence[LostTime], not_seen: Sequence[str]
) -> dict[str, Any]:
    total = times.run.total
    best = sorted((r for loss in causes for r in loss.remedies), key=lambda remedy: -remedy.gain)[:_BEST]
    return {
        "script": {"command": script.command, "launcher": script.launcher, "batch": script.batch},
        "devices": devices,
        "cpu": script.cpu,
        "device": times.records[0]["device"],
        "versions": versions(),
        "steps": times.steps,
        "under_profiler": times.under_profiler,
        "step_seconds": total,
        "ranks": [dict(own) for own in times.parts],
        "slowest_rank": times.slowest,
        "healthy": not causes,
        "causes": [{**asdict(loss), "regained": loss.regained} for loss in causes],
        "remedies": [{"name": r.name, "words": r.words, "gain": r.gain, "seconds": r.gain * total} for r in best],
        "not_seen": list(not_seen),
    }
