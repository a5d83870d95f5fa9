"""Claim: after a kill two ranks take 0.5 s to a new step, four 0.9 s; torchrun takes 4.3 s where it recovers.

Repeat with `python -m benchmarks.recovery --devices 2 --out benchmarks/results/recovery_2.json`, the same
for 4, and `python -m benchmarks.recovery --cost --out benchmarks/results/recovery_cost.json`. A small GPT
(examples/gpt.py) trains in exact mode with a checkpoint every 10 steps. A rank that is drawn with a seed gets SIGKILL
0.5 to 2 s after the first step of each start, until the run ends by itself; then its weights and samples are compared
with those of a run that nothing disturbed. There are as many runs as so many kills take. Seconds are from the signal:
`noticed` to the event in events.jsonl, `first` to the first step of the new ranks, `new` to the first step that no rank
had trained before. Runs of torchrun, whose ranks are a plain DDP loop with as many checkpoints (recovery_rank.py), take
turns with those of shoal. `--lost-hosts 5`: as often a cable is pulled between two hosts, which are network namespaces
with sshd (as root, after `scripts/engines ssh hosts`), and the run goes on with the other host. `--cost`: steps of
ranks that `shoal run` watches, and of ranks started by hand, by turns. `--table` prints the rows of the page from the
results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from tests.engines import sshd

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SETTINGS = {"layers": 2, "width": 64, "block": 64, "batch": 8}
EVERY = 10
SPACING_SECONDS = (0.5, 2.0)
SAME = ("weights_sha256", "sample_digest")
_LIMIT_SECONDS = 60.0
# Of a step there, and of a run without kills.
_TORCHRUN_STEPS, _COST_STEPS, _COST_TURNS = 2000, 120, 24


def job(**changes: int) -> list[str]:
    """Arguments of `shoal run` for the small GPT, with other settings."""
    chosen = [word for name, value in {**SETTINGS, **changes}.items() for word in ("--set", f"{name}={value}")]
    return ["run", "examples/gpt.py", "--exact", "--evaluate-every", "1000000", *chosen]


def shoal(*arguments: str) -> list[str]:
    """A command of shoal's."""
    return [sys.executable, "-m", "shoal", *arguments]


def ranks(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher of shoal's or torchrun has started."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("shoal-rank-") or "benchmarks.recovery_rank" in process.cmdline()[-6:]:
                    found.append(process.pid)
    return found


# ------------------------------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class Tool:
    """A launcher: its command, and the steps that a run has trained, in order, with what tells starts apart."""

    name: str
    command: list[str]
    out: Path

    def steps(self) -> list[tuple[Any, int]]:
        """A mark of the start and the number of each step that is written down."""
        with contextlib.suppress(OSError):
            if self.name == "torchrun":
                lines = (self.out / "steps.txt").read_text().splitlines(keepends=True)
                return [(line.split()[0], int(line.split()[1])) for line in lines if line.endswith("\n")]
            path = self.out / "records.jsonl"  # each start writes another file
            mark, lines = path.stat().st_ino, path.read_text().splitlines(keepends=True)
            return [(mark, json.loads(line)["step"]) for line in lines[-200:] if line.endswith("\n")]
        return []


def shoals(devices: int, steps: int, folder: Path) -> Tool:
    """`shoal run`, with as many restarts as there are losses."""
    options = ["--steps", str(steps), "--out", str(folder / "run"), "--checkpoint-every", str(EVERY)]
    return Tool("shoal", shoal(*job(), "--devices", str(devices), "--max-restarts", "5", *options), folder / "run")


def torchruns(devices: int, folder: Path) -> Tool:
    """torchrun, with the plain loop as its ranks."""
    words = ["--standalone", "--nproc-per-node", str(devices), "--max-restarts", "100"]
    rank = ["-m", "benchmarks.recovery_rank", "--out", str(folder), "--steps", str(_TORCHRUN_STEPS)]
    return Tool("torchrun", [sys.executable, "-m", "torch.distributed.run", *words, *rank], folder)


@contextlib.contextmanager
def running(tool: Tool) -> Iterator[subprocess.Popen[bytes]]:
    """The command on its way, which is asked to stop where the context ends before it."""
    variables, quiet = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
    with subprocess.Popen(tool.command, cwd=ROOT, env=variables, stdout=quiet, stderr=quiet) as run:
        yield run
        if run.poll() is None:
            run.terminate()


def until(condition: Callable[[list[tuple[Any, int]]], bool], tool: Tool, run: subprocess.Popen[bytes]) -> bool:
    """Waits until the run's steps are so; False where it ends before, or nothing comes for a minute."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline and run.poll() is None:
        if condition(tool.steps()):
            return True
        time.sleep(0.004)
    return False


def killed(tool: Tool, kills: int, until_at: float, drawn: random.Random) -> dict[str, Any]:
    """One run with at most so many kills, none after an instant: seconds of each, and of shoal's what came of it."""
    found: dict[str, Any] = {"kills": 0, "noticed": [], "first": [], "new": []}
    with running(tool) as run:
        goes_on = until(bool, tool, run)
        while goes_on and found["kills"] < kills and time.monotonic() < until_at:
            time.sleep(drawn.uniform(*SPACING_SECONDS))
            here, before = ranks(run.pid), tool.steps()
            if run.poll() is not None or not here:
                break
            mark, last, at = before[-1][0], before[-1][1], time.time()
            os.kill(drawn.choice(here), signal.SIGKILL)
            goes_on = until(lambda steps, mark=mark: bool(steps) and steps[-1][0] != mark, tool, run)  # type: ignore[misc]
            first = time.time() - at
            new = goes_on and until(lambda steps, last=last: steps[-1][1] > last, tool, run)  # type: ignore[misc]
            if not goes_on and run.poll() == 0:
                break  # it had just trained its last step
            found["kills"] += 1
            found["first"] += [first] if goes_on else []
            found["new"] += [time.time() - at] if new else []
            if tool.name == "shoal":
                lines = (tool.out / "events.jsonl").read_text().splitlines()
                lost = [json.loads(line) for line in lines if '"lost"' in line]
                found["noticed"].append(datetime.fromisoformat(lost[-1]["at"]).timestamp() - at)
        if tool.name == "shoal":
            run.wait()
            result = json.loads((tool.out / "result.json").read_text())
            found |= {name: result.get(name) for name in ("status", "ettr", *SAME)}
    return found


def lost_host() -> dict[str, float]:
    """Seconds from a pulled cable to the first step, and to the first new one, on the host that is left."""
    with tempfile.TemporaryDirectory() as folder, sshd.started(Path(folder), "h1", "h2") as hosts:
        out = Path(folder) / "run"
        words = ["--devices", "1:2", "--on", f"hosts:h1,h2 -F {hosts.config}", "--checkpoint-every", str(EVERY)]
        tool = Tool("shoal", shoal(*job(), *words, "--steps", "100000", "--out", str(out)), out)
        with running(tool) as run:
            if not until(lambda steps: bool(steps) and steps[-1][1] > 2 * EVERY, tool, run):
                raise RuntimeError("the run did not begin")
            mark, last = tool.steps()[-1]
            at = time.monotonic()
            hosts.hosts[1].cut()
            found = {}
            for name, is_so in (("first", lambda s: s[-1][0] != mark), ("new", lambda s: s[-1][1] > last)):
                if not until(lambda steps, is_so=is_so: bool(steps) and is_so(steps), tool, run):  # type: ignore[misc]
                    raise RuntimeError("the run did not go on")
                found[name] = time.monotonic() - at
            print("host", json.dumps(found), flush=True)
            return found


def lost_hosts(number: int) -> dict[str, Any]:
    """Spreads of so many losses of a host."""
    told = [lost_host() for _ in range(number)]
    return {"cores": os.cpu_count()} | {name: spread([found[name] for found in told]) for name in ("first", "new")}


def spread(seconds: list[float]) -> dict[str, float]:
    """Count, median, 95th percentile and largest."""
    ordered = sorted(seconds)
    percentile = statistics.quantiles(ordered, n=20, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]
    values = (("median", statistics.median(ordered)), ("p95", percentile), ("most", ordered[-1]))
    return {"n": len(ordered)} | {name: round(value, 3) for name, value in values}


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results after each run; runs take turns until shoal's ranks were killed so often, or the time is over."""
    devices, steps = options.devices, options.steps
    drawn, end = random.Random(devices), time.monotonic() + options.seconds
    told: dict[str, list[dict[str, Any]]] = {"shoal": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as folder:
        tool = shoals(devices, steps, Path(folder))
        subprocess.run(tool.command, cwd=ROOT, check=True, capture_output=True)
        alone = json.loads((tool.out / "result.json").read_text())
    while (left := options.kills - sum(run["kills"] for run in told["shoal"])) > 0 and time.monotonic() < end:
        for name, most in (("shoal", min(left, options.of_shoal)), ("torchrun", options.of_torchrun)):
            with tempfile.TemporaryDirectory() as folder:
                tool = shoals(devices, steps, Path(folder)) if name == "shoal" else torchruns(devices, Path(folder))
                told[name].append(killed(tool, most, end, drawn))
                print(name, json.dumps(told[name][-1]), flush=True)
            yield summary(devices, told, alone)


def summary(devices: int, told: dict[str, list[dict[str, Any]]], alone: dict[str, Any]) -> dict[str, Any]:
    """Counts and spreads of the runs of each tool, and how many of shoal's ended as the undisturbed one."""
    results: dict[str, Any] = {"devices": devices, "cores": os.cpu_count(), "spacing_seconds": SPACING_SECONDS}
    for name, runs in told.items():
        went_on = sum(len(run["first"]) for run in runs)
        results[name] = {"runs": len(runs), "kills": sum(run["kills"] for run in runs), "went_on": went_on}
        results[name] |= {
            what: spread(times)
            for what in ("noticed", "first", "new")
            if len(times := [one for run in runs for one in run[what]]) > 1
        }
    same = [run for run in told["shoal"] if all(run[name] == alone[name] for name in SAME)]
    results["shoal"] |= {"same_bits": len(same), "ettr": [run["ettr"] for run in told["shoal"]]}
    return results


# -------------------------------------------------------------------------------------------------------------- cost


def step_seconds(out: Path) -> float:
    """The median of a run's steps, the first tenth left out."""
    found = [json.loads(line)["seconds"] for line in (out / "records.jsonl").read_text().splitlines()]
    return float(statistics.median(found[len(found) // 10 :]))


def by_hand(devices: int, words: list[str]) -> None:
    """Ranks that nobody watches, started as an engine starts them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(devices):
        own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **own}
        started.append(subprocess.Popen(shoal(*words), cwd=ROOT, env=variables, stdout=subprocess.DEVNULL))
    assert [process.wait() for process in started] == [0] * devices


def cost(devices: int) -> dict[str, Any]:
    """Seconds a step with the launcher's watch and without, by turns."""
    found: dict[str, list[float]] = {"watched": [], "by_hand": []}
    for _ in range(_COST_TURNS):
        for name, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                words = [*job(width=256), "--steps", str(_COST_STEPS), "--out", f"{folder}/run"]
                if name == "watched":
                    command = shoal(*words, "--devices", str(devices))
                    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
                    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
                else:
                    by_hand(devices, words)
                seconds.append(step_seconds(Path(folder) / "run"))
                print(name, seconds[-1], flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = round(medians["watched"] / medians["by_hand"], 4)
    return {"devices": devices, "cores": os.cpu_count(), "steps": _COST_STEPS, "ratio": ratio, **found}


# ------------------------------------------------------------------------------------------------------------- pages


def table() -> str:
    """Rows of the page, from the results that are there."""
    columns = ["ranks", "started by", "kills", "went on in 60 s"]
    columns += ["noticed", "first step", "first new step", "same bits"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for path in sorted(RESULTS.glob("recovery_[0-9].json")):
        found = json.loads(path.read_text())
        for tool in ("shoal", "torchrun"):
            own = found[tool]
            if not own["kills"]:
                continue
            times = [
                ", ".join(f"{own[name][key]:.2f}" for key in ("median", "p95", "most")) + " s" if name in own else ""
                for name in ("noticed", "first", "new")
            ]
            same = f"{own['same_bits']} of {own['runs']} runs" if "same_bits" in own else ""
            cells = [str(found["devices"]), tool, str(own["kills"]), str(own["went_on"]), *times, same]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def main() -> None:
    """Measures, prints, and writes the result where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--kills", type=int, default=52)
    parser.add_argument("--seconds", type=float, default=240.0, help="no kill after so long")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--of-shoal", type=int, default=18, help="kills of one of its runs at most")
    parser.add_argument("--of-torchrun", type=int, default=3, help="kills of one of its runs at most")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--lost-hosts", type=int, metavar="N")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    if options.lost_hosts:
        found = iter([lost_hosts(options.lost_hosts)])
    else:
        found = iter([cost(options.devices)]) if options.cost else measured(options)
    for results in found:
        print(json.dumps(results, indent=2), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
