"""Verification of a training script as it is: its processes with the observer, the replay, the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.distributed.process_setup import versions
from shoal.errors import CommandError, ExitCode, folded, nearest_file, say_labelled
from shoal.launch.supervise.child import Child
from shoal.programs.apart import by_sample, differences, divided_by_hand
from shoal.programs.check import Coverage, Evidence, Finding, compare_rerun, findings_of, in_order
from shoal.programs.observer import STALLED
from shoal.programs.replay import read_records
from shoal.report.quantities import several
from shoal.runs.certificate import SCHEMA
from shoal.runs.directory import write_file

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python")
_SITE = str(Path(__file__).parent / "site")
# Words that start a launcher of their own; the script and its arguments are wanted alone.
_STARTERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")
_UNREAD = {
    "DeepSpeedEngine": "it has experts, a pipeline, an offloaded optimizer or float16, which are not compared yet",
    "PipelineStage": "each rank has other modules, whose forwards and gradients are not compared yet",
}
_POLL_SECONDS = 0.05
# Time of the others after the first process has failed or ended: they may wait for it in a collective call.
_GRACE_SECONDS, _PATIENCE_SECONDS = 10.0, 120.0
_LEAST_SECONDS = 1.0  # of computing by all processes in that time; less means that they wait for each other
_LAST_LINES = 12
_LOST = re.compile(r"Connection (closed|reset)|Broken pipe|remote process exited|NCCL communicator was aborted")
# Bytes of all ranks' records, after which a rank records no further step.
_MOST_BYTES = 8 << 30


@dataclass(frozen=True)
class Script:
    """A script's command with placeholders: `{batch}` for the batch of a process, `{devices}` for their number."""

    command: str
    launcher: str
    batch: int
    cpu: bool = False

    @property
    def name(self) -> str:
        """The file's name without its suffix, for directories."""
        return Path(next(word for word in self.parts[1:] if word != "-m")).stem

    @property
    def parts(self) -> list[str]:
        """The words of the command, the interpreter first: this one, if the command does not begin with another."""
        words = shlex.split(self.command)
        return words if words and Path(words[0]).name.startswith("python") else [sys.executable, *words]

    def words(self, devices: int, batch: int) -> list[str]:
        """Return the words of the command for a number of processes."""
        own = self.parts
        return [word.replace("{batch}", str(batch)).replace("{devices}", str(devices)) for word in own]

    def check(self) -> None:
        """Check that the command is a Python script with arguments. Raises: CommandError."""
        given = f"--script {self.command!r}"
        try:
            interpreter, *words = self.parts
        except ValueError as error:
            conflict, remedy = f"a shell could not read it: {error}", "close its quotes"
            raise CommandError(given=given, conflict=conflict, remedy=remedy) from None
        if not words:
            conflict, remedy = "it is empty", 'write --script "train.py --lr 0.1", say'
        elif Path(words[0]).name in _STARTERS:
            conflict = f"{words[0]} starts the script, and shoal starts it itself"
            remedy = f"write the script and its arguments alone, and --launcher {'|'.join(LAUNCHERS)}"
        elif shutil.which(interpreter) is None:
            conflict, remedy = f"there is no program {interpreter}", "give its path"
        elif words[0] != "-m" and not Path(words[0]).is_file():
            conflict = f"there is no file {words[0]} in {Path.cwd()}"
            remedy = f'write the path of a Python script, or "-m module"{nearest_file(words[0])}'
        else:
            return
        raise CommandError(given=given, conflict=conflict, remedy=remedy)


class Processes:
    """Processes of one execution of a script, with the observer in each."""

    def __init__(self, script: Script, folder: Path, devices: int, batch: int, options: Mapping[str, Any]) -> None:
        self.script, self.folder, self.devices = script, folder, devices
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        world, first = options.get("ranks", devices), options.get("rank", 0)
        words = script.words(world, batch)
        path = os.pathsep.join(p for p in (_SITE, os.environ.get("PYTHONPATH")) if p)
        about: dict[str, Any] = {"world": devices, "spawns": script.launcher == "python", "cpu": script.cpu}
        about["room"] = min(_MOST_BYTES, shutil.disk_usage(folder).free // 2) // devices
        about |= {"folder": str(folder.absolute()), **options}
        common = {"PYTHONPATH": path, "SHOAL_OBSERVER": json.dumps(about)}
        if "asserts" in options:
            common["PYTHONOPTIMIZE"] = "1"
        if options["mode"] != "clock":
            common["TORCH_COMPILE_DISABLE"] = "1"
        if options["mode"] != "clock" or devices > 1:  # as launchers do
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if script.cpu:
            common |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        own = 1 if script.launcher == "python" else devices
        self.children: list[Child] = []
        self.killed: list[Child] = []
        for rank in range(own):
            variables = dict(common)
            if script.launcher != "python" or devices == 1:
                variables |= _rank_variables(first + rank, world, port, script)
            extra = [f"--local_rank={rank}"] if script.launcher == "deepspeed" else []
            log = (folder / f"output-{rank}.txt").open("w")
            self.children.append(Child([*words, *extra], variables=variables, output=log, errors=log))
            log.close()

    def finish(self) -> None:
        """Wait for the end of all processes. Those that hang say where, and are killed."""
        end, used, since, has_failed = float("inf"), dict[int, float](), time.monotonic(), False
        try:
            while any(child.process.poll() is None for child in self.children):
                now = time.monotonic()
                codes = [child.process.poll() for child in self.children]
                if end == float("inf") and any(code is not None for code in codes):
                    end = now + _PATIENCE_SECONDS
                if any(codes) and not has_failed:
                    has_failed, end = True, min(end, now + _GRACE_SECONDS)
                if now > since + _PATIENCE_SECONDS:
                    before, since, used = used, now, self._seconds_used()
                    worked = sum(max(0.0, seconds - before.get(pid, 0.0)) for pid, seconds in used.items())
                    end = min(end, now) if worked < _LEAST_SECONDS else end
                if now > end:
                    if (self.folder / STALLED).exists():
                        break
                    (self.folder / STALLED).touch()
                    end = now + _GRACE_SECONDS
                time.sleep(_POLL_SECONDS)
        finally:
            self.kill()
        for child in self.children:
            child.process.wait()

    def _seconds_used(self) -> dict[int, float]:
        """Return the processor time of each process of the script, with that of its children that have ended."""
        used: dict[int, float] = {}
        for child in self.children:
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(child.process.pid)
                for one in (own, *own.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        used[one.pid] = sum(one.cpu_times()[:4])
        return used

    def ends(self) -> list[tuple[int, str]]:
        """Return the ranks that failed or hung, and in words how, with the error or the place of the wait.

        Errors come first, then waits, then those that have only lost the connection to another rank.
        """
        ends = []
        for path in self.folder.glob(f"rank-*.{STALLED}"):
            ends.append((int(path.stem.partition("-")[2]), f"{path.stem.replace('-', ' ')} hung in {path.read_text()}"))
        hung = {rank for rank, _ in ends}
        for rank, child in enumerate(self.children):
            who = "the script" if self.script.launcher == "python" else f"rank {rank}"
            if child.process.returncode and rank not in hung and not (hung and who == "the script"):
                error = "; ".join(self.last_lines(rank, 1)) or "it printed nothing"
                how = "was killed when the ranks hung" if child in self.killed else "ended with exit code "
                how += "" if child in self.killed else str(child.process.returncode)
                ends.append((rank, f"{who} {how}: {error}"))
        hung |= {rank for rank, child in enumerate(self.children) if child in self.killed}
        return sorted(ends, key=lambda end: (bool(_LOST.search(end[1])), end[0] in hung, end))

    def kill(self) -> None:
        """Kill what still runs."""
        self.killed = [child for child in self.children if child.process.poll() is None]
        for child in self.children:
            child.kill()

    def check(self, recorded: Sequence[int], out: Path) -> None:
        """Check that each rank has recorded steps: their numbers by rank. Raises: CommandError."""
        given = f"--script {self.script.command!r} on {several(self.devices, 'process')}"
        ends = self.ends()
        if ends and (len(recorded) < self.devices or not any(recorded)):
            said = "\n  ".join([ends[0][1], *self.last_lines(ends[0][0])])
            conflict = f"a rank has ended without a record of its steps: {said}"
            remedy = f"run it by itself first; the output of each rank is in {out}/"
        elif len(recorded) not in (0, self.devices):
            conflict = f"{several(len(recorded), 'process')} of it trained"
            remedy = "give the launcher that starts its processes, or {devices} as the script's own argument"
        elif not any(recorded):
            said = "; ".join(self.last_lines(0, 2)) or "it printed nothing"
            conflict = f"no optimizer of torch made a step in it: {said}"
            remedy = "give a command that trains, and more of --steps or data if it ends before"
        else:
            return
        raise CommandError(given=given, conflict=conflict, remedy=remedy)

    def last_lines(self, rank: int, count: int = _LAST_LINES) -> list[str]:
        """Return the last lines that a rank has printed, of which the first is its error if later ones pushed it out.

        Threads of torch's process groups may print many lines after the error that ended the script.
        """
        text = (self.folder / f"output-{rank}.txt").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        last = lines[-count:]
        return last if not errors or errors[-1] in last else [errors[-1], *last[1:]]


def verify_script(script: Script, devices: int, steps: int, out: Path, *, keep: bool = False) -> ExitCode:
    """Observe a script's first steps on several processes, replay them on one, and print and write the verdict.

    Raises: CommandError for a command that cannot run, or of which nothing was seen.
    """
    script.check()
    if keep and (out / "tensors").exists() and not (out / "script.json").exists():
        raise CommandError(
            given=f"--keep --out {out}",
            conflict="it has a folder tensors of another program",
            remedy="give another directory",
        )
    began = time.monotonic()
    folder = out / ".observed"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        say_labelled("verifying", f"{script.command}: {several(steps, 'step')} on {several(devices, 'process')}")
        if devices == 1:
            say_labelled("note", "one process is compared with itself: say --devices N for a parallel run")
        record = Processes(script, folder, devices, script.batch, {"mode": "record", "steps": steps})
        record.finish()
        records = read_records(str(folder))
        for name in sorted({name for one in records for name in one["unread"]}):
            raise CommandError(
                given=f"--script {script.command!r}, which uses {name}",
                conflict=_UNREAD[name],
                remedy="verify it with DistributedDataParallel or fully_shard, if it has such an argument",
            )
        if how := divided_by_hand(records):
            raise CommandError(
                given=f"--script {script.command!r}: {how}",
                conflict="parts of a model that a script makes by hand are not compared, so that nothing is concluded",
                remedy="verify it without that division, or divide it by torch's parallelize_module",
            )
        recorded = [len(one["steps"]) for one in records]
        record.check(recorded, out)
        say_labelled("recorded", f"{several(min(recorded), 'step')} of {several(len(records), 'rank')}")
        replay = _replayed(script, folder, len(records), records[0]["libraries"])
        evidence = Evidence(records, replay)
        # A rank that waits in Join loses those that leave.
        ends = [words for _, words in record.ends() if not (evidence.joins and _LOST.search(words))]
        if ends:
            evidence.coverage.leave_out(f"what follows step {evidence.num_steps}, after which a rank has ended")
        if script.launcher == "accelerate":
            evidence.coverage.leave_out("the configuration file of accelerate launch, which is not read")
        findings = in_order([*findings_of(evidence), *differences(evidence)])
        if "{batch}" in script.command and len(records) > 1 and not ends and not any(one.fails for one in findings):
            say_labelled("rerun", f"one process with batches of {script.batch * devices}")
            findings = in_order([*findings, *_rerun(script, out / ".rerun", devices, evidence)])
        coverage = evidence.coverage
        report = report_of(findings, coverage, evidence, time.monotonic() - began, ends)
        for line in report:
            print(folded(line, 19), flush=True)
        verdict = verdict_of(findings, coverage, ends)
        document = {
            "schema": SCHEMA,
            "kind": "script",
            "verdict": verdict,
            "script": {"command": script.command, "launcher": script.launcher, "batch": script.batch},
            "devices": devices,
            "cpu": script.cpu,
            "steps": evidence.num_steps,
            "versions": versions(),
            "libraries": records[0]["libraries"],
            "seconds": round(time.monotonic() - began, 2),
            "coverage": asdict(coverage),
            "ended": ends,
            "findings": [{**asdict(one), "step": one.step + 1} for one in findings],
        }
        write_file(out / "script.json", json.dumps(document, indent=1) + "\n")
        certificate = {name: value for name, value in document.items() if name != "findings"}
        certificate["first_divergence"] = next((one for one in document["findings"] if one["fails"]), None)
        write_file(out / "certificate.json", json.dumps(certificate, indent=1) + "\n")
        say_labelled("written", f"{out}/script.json and certificate.json")
        return {"verified": ExitCode.DONE, "diverged": ExitCode.FAILED}.get(verdict, ExitCode.USER)
    finally:
        if keep:
            shutil.rmtree(out / "tensors", ignore_errors=True)
            if folder.exists():
                folder.rename(out / "tensors")
        else:
            for path in folder.glob("output-*.txt"):
                shutil.copy(path, out / path.name)
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(out / ".rerun", ignore_errors=True)


def job_answer(script: Script, then: str, request: dict[str, Any]) -> str:
    """Return what a function, `MODULE:NAME`, prints of the Job that one process of a script trains.

    Values are left out; a script that cannot do without them runs its first forwards again with values.
    Raises: ShoalError of the function; CommandError if the script reaches no update.
    """
    for fake in (True, False):
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            options = {"mode": "job", "fake": fake, "then": then, "request": request}
            process = Processes(script, Path(folder), 1, script.batch, options)
            process.finish()
            path = Path(folder) / "answer.json"
            if path.exists():
                answer: dict[str, str] = json.loads(path.read_text())
                if "text" in answer:
                    return answer["text"]
                raise CommandError(**answer)
            said = process.last_lines(0)
    raise CommandError(
        given=f"--script {script.command!r} on one process",
        conflict="it ended before an optimizer of torch made an update:\n  " + "\n  ".join(said),
        remedy="run it by itself first, on one process",
    )


def _replayed(script: Script, folder: Path, devices: int, libraries: Mapping[str, str]) -> dict[str, Any] | None:
    """Replay the records in one process of the script. Return None, with a line for people, if that fails."""
    options: dict[str, Any] = {"mode": "replay", "steps": 0, "of": str(folder), "libraries": libraries}
    if script.launcher != "python":  # scripts may insist on a GPU for each rank
        options["world"] = devices
    results: list[dict[str, Any]] = []
    # Alone, and then, if that does not do, as one of all ranks, whose collective calls change nothing.
    attempts: list[dict[str, Any]] = [{}]
    if script.launcher != "python" and devices > 1:
        attempts.append({"rank": 0, "ranks": devices})
    for others in attempts:
        process = Processes(script, folder / f"replay-{len(results)}", 1, script.batch, options | others)
        process.finish()
        path = process.folder / "replay.pt"
        said = "; ".join(process.last_lines(0, 2)) or "it ended before its first forward"
        failed = {"error": f"one process of the script does not reach a forward: {said}"}
        results.append(torch.load(path, weights_only=True) if path.exists() else failed)
        if "assert" in said.lower() and "asserts" not in others:
            attempts.append({**others, "asserts": 0})  # of shards that one process has not
        if not results[-1].get("failures", ["error"]):
            return results[-1]
    best = min(results, key=lambda result: len(result.get("failures", range(1000))))
    if "error" not in best:
        return best
    say_labelled("note", f"no replay: {best['error']}")
    return None


def _rerun(script: Script, folder: Path, devices: int, evidence: Evidence) -> Sequence[Finding]:
    """Run the script on one process with the global batch, and compare the schedule where the samples agree."""
    shutil.rmtree(folder, ignore_errors=True)
    Processes(script, folder, 1, script.batch * devices, {"mode": "record", "steps": evidence.num_steps}).finish()
    if records := read_records(str(folder)):
        return [*compare_rerun(evidence, records[0]), *by_sample(evidence, records[0])]
    evidence.coverage.leave_out("the schedule's length: the script does not run on one process with the global batch")
    return []


def verdict_of(findings: Sequence[Finding], coverage: Coverage, ends: Sequence[str]) -> str:
    """Return "diverged", "failed" if a rank did, "verified", or "nothing seen" if too little was compared."""
    if any(one.fails for one in findings):
        return "diverged"
    if ends:
        return "failed"
    forwards, updates = coverage.forwards or coverage.exchanging, coverage.updates or coverage.unrepeated
    return "verified" if forwards and coverage.gradients and updates else "nothing seen"


def report_of(
    findings: Sequence[Finding], coverage: Coverage, evidence: Evidence, seconds: float, ends: Sequence[str]
) -> list[str]:
    """Return the lines for people: the first divergence, notes, coverage, verdict."""
    lines: list[str] = []
    failing = [one for one in findings if one.fails]
    for one in failing[:1]:
        where = f"step {one.step + 1}, {one.phase}: {one.name}"
        lines.append(f"first divergence   {where}" + (f", rank {one.rank}" if one.rank is not None else ""))
        lines.append(f"                   {one.said}")
        lines += [f"looks like         {one.cause}"] if one.cause else []
        lines += [f"remedy             {one.remedy}"] if one.remedy else []
    others = {(one.phase, one.name) for one in failing[1:]} - {(one.phase, one.name) for one in failing[:1]}
    if others:
        shown = ", ".join(sorted({phase for phase, _ in others}))
        lines.append(f"                   {len(others)} later checks diverge as well, as they may after it: {shown}")
    reported: set[tuple[str, str]] = set()
    for one in findings:
        if not one.fails and (one.phase, one.name) not in reported:
            reported.add((one.phase, one.name))
            lines.append(f"note               step {one.step + 1}, {one.phase}: {one.name}: {one.said}")
            lines += [f"                   {one.cause}"] if one.cause else []
    lines.append(
        f"seen               {several(evidence.num_steps, 'step')}: {several(coverage.samples, 'sample')}, "
        f"{several(coverage.forwards, 'forward')} replayed, {several(coverage.gradients, 'gradient')} compared, "
        f"{several(coverage.updates, 'update')} of a parameter repeated, {several(coverage.losses, 'loss')} weighed"
    )
    lines += [f"not checked        {what}" for what in coverage.unchecked]
    lines += [f"ended              {words}" for words in ends]
    lines.append(f"cost               {seconds:.1f} s")
    said = {"verified": "no divergence", "diverged": "DIVERGED", "nothing seen": "NOTHING SEEN: see not checked"}
    said["failed"] = (
        f"FAILED: no divergence in {several(evidence.num_steps, 'step')}, and then a rank failed, see ended"
    )
    lines.append(f"verdict            {said[verdict_of(findings, coverage, ends)]}")
    return lines


def _rank_variables(rank: int, devices: int, port: int, script: Script) -> dict[str, str]:
    """Return the environment that a launcher gives a rank."""
    own: dict[str, Any] = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), devices)
    own |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own |= {"TORCHELASTIC_RUN_ID": "shoal", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    if not (torch.cuda.is_available() or script.cpu):
        own["ACCELERATE_USE_CPU"] = "true"
    if script.launcher == "deepspeed" and not script.cpu:
        own["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: str(value) for name, value in own.items()}


def _free_port() -> int:
    """Return a free port below those that the system gives to other programs' connections."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
