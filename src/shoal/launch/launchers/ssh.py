"""Launcher on hosts that ssh reaches with the user's configuration: one process per host, which starts its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.errors import ExitCode, LaunchError, RankLostError, ShoalError, from_json
from shoal.launch.environment import Environment
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.reports import RankStart, until_done
from shoal.launch.launchers.ssh_hosts import SSH_FAILED, HostList, address_of
from shoal.launch.signals import Signals
from shoal.runs.version import __version__

_POLL_SECONDS = 0.05
# Ranks on other hosts notice a closed connection by themselves.
_GRACE_SECONDS = 5.0
_JOIN_SECONDS = 60.0
# Variables of this command that change how ranks train and are sent to the hosts.
_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM")
_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "HF_", "WANDB_", "MLFLOW_", "SHOAL_")
# Prefixes of credentials, which clients of a run directory at an address read.
_OF_ADDRESSES = ("AWS_", "GOOGLE_", "FSSPEC_")
# Valid only on this host.
_OWN = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def render(submission: Submission) -> Mapping[str, str]:
    """Return a line for each host: the command, and the ranks that the host's process starts."""
    listed = HostList.of(submission)
    lines, first = [], 0
    for host in listed.hosts:
        lines.append(f"{shlex.join(listed.words(host.name))}  # ranks {first} to {first + host.slots - 1}\n")
        first += host.slots
    return {"hosts": "".join(lines), "on each": shlex.join(submission.command) + "\n"}


def start(submission: Submission, signals: Signals) -> int:
    """Start a process on each host and wait for all, and again if a rank is lost. Raises: LaunchError."""
    listed = HostList.of(submission)
    if shutil.which("ssh") is None:
        raise LaunchError(given="--on hosts", conflict="ssh is not on this host", remedy="install OpenSSH's client")
    for name in (name for name in _OWN if name in os.environ):
        print(f"note: {name} is of this host, and no other is told: set it where ssh logs in", file=sys.stderr)

    def once(attempt: RankStart) -> tuple[int, ShoalError | None]:
        processes: list[HostProcess] = []
        again = attempt.number > 0
        asked_to_stop = ExitCode.PREEMPTED if again else ExitCode.INTERRUPTED
        try:
            places = _places(listed, submission, attempt)
            if signals.received:
                return int(asked_to_stop), None
            for host, place in places:
                asked = _asked(submission, place)
                processes.append(HostProcess.started(listed.words(host), host, asked, again=again))
            return _followed(processes, listed, signals, asked_to_stop)
        finally:
            for process in processes:
                process.end()

    return until_done(submission, signals, once)


def _places(listed: HostList, submission: Submission, attempt: RankStart) -> list[tuple[str, Environment]]:
    """Return the hosts of a start by name, with the environment of each host's first rank. Raises: LaunchError."""
    hosts = listed.for_a_start()
    counts = [host.slots for host in hosts]
    if len(hosts) < len(listed.hosts):
        of_all = f"{sum(counts)} of {sum(host.slots for host in listed.hosts)} processes"
        for name, said in sorted(listed.lost.items()):
            print(f"note: {name} does not answer: {of_all} ({said})", file=sys.stderr)
    address = address_of(hosts[0].name, listed.options)
    return [
        (
            host.name,
            Environment(
                rank=sum(counts[:number]),
                world_size=sum(counts),
                local_world_size=host.slots,
                address=address,
                restarts=attempt.number,
                host=number,
                num_hosts=len(hosts),
                engine="hosts",
                job=submission.name,
            ),
        )
        for number, host in enumerate(hosts)
    ]


def _asked(submission: Submission, place: Environment) -> dict[str, Any]:
    """Return the first message to a host's process."""
    prefixes = _PREFIXES + (_OF_ADDRESSES if submission.address is not None else ())
    kept = {n: v for n, v in os.environ.items() if (n in _VARIABLES or n.startswith(prefixes)) and n not in _OWN}
    return {
        "arguments": list(submission.arguments),
        "folder": str(submission.folder),
        "out": str(submission.out),
        "address": submission.address,
        "threads": submission.threads,
        "variables": kept,
        "version": __version__,
        "time": time.time(),
        "place": asdict(place),
    }


@dataclass
class HostProcess:
    """Process of a host, seen by its launcher through ssh."""

    name: str
    ssh: subprocess.Popen[str]
    fit: bool = False  # whether the host has passed the checks of version, folders and clock
    port: int | None = None
    ended: dict[str, Any] | None = None
    said: list[str] = field(default_factory=list)  # the last lines of its stderr
    again: bool = False  # whether this is a restart, before which the host may have vanished
    silent: str = ""  # the evidence that the host does not answer, after another host had failed
    _threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def started(cls, words: Sequence[str], name: str, asked: Mapping[str, Any], *, again: bool = False) -> HostProcess:
        """Start ssh to a host and send the host's process its first message."""
        pipe = subprocess.PIPE
        ssh = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        found = cls(name, ssh, again=again)
        for work in (found._answers, found._complaints):
            thread = threading.Thread(target=work, name=f"shoal-{name}", daemon=True)
            thread.start()
            found._threads.append(thread)
        found.tell(asked)
        return found

    def tell(self, line: Any) -> None:
        """Send a line of JSON. A lost host is noticed elsewhere."""
        assert self.ssh.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError, ValueError):
            self.ssh.stdin.write(json.dumps(line) + "\n")
            self.ssh.stdin.flush()

    def is_over(self) -> bool:
        """Check whether ssh has ended and all its output has been read."""
        return self.ssh.poll() is not None and not any(thread.is_alive() for thread in self._threads)

    def give_up(self, why: str) -> None:
        """Kill ssh to a host that does not answer."""
        self.silent = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.ssh.pid, signal.SIGKILL)
        self.ssh.wait()
        for thread in self._threads:
            thread.join(1.0)

    def end(self) -> None:
        """Close the input, whereupon the host's process ends itself and its ranks, and end ssh."""
        assert self.ssh.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self.ssh.stdin.close()
        try:
            self.ssh.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.ssh.kill()
            self.ssh.wait()
        for thread, pipe in zip(self._threads, (self.ssh.stdout, self.ssh.stderr), strict=True):
            thread.join(1.0)
            if pipe is not None and not thread.is_alive():
                pipe.close()

    def error(self) -> ShoalError | None:
        """Return the error that the host's process reported, or an error made from ssh's own output."""
        if self.ended is not None:
            return from_json(self.ended["error"]) if self.ended["error"] else None
        if self.silent:
            return self._lost(f"it does not answer any more ({self.silent})")
        said = "\n".join(self.said[-5:]).strip()
        if self.ssh.returncode == SSH_FAILED or (self.said and self.port is None):
            error: ShoalError = LaunchError(
                given=f"host {self.name}",
                conflict=said or "ssh ended without a word",
                remedy=f"let `ssh {self.name} {shlex.quote(sys.executable)} --version` work without a password first",
            )
            if self.again or self.port is not None or not said or "closed by" in said or "not responding" in said:
                error = self._lost(said)
            return error
        return self._lost(said)

    def _lost(self, said: str) -> RankLostError:
        error = RankLostError(
            given=f"host {self.name}",
            conflict="it was lost: " + (said.splitlines()[-1] if said else f"ssh ended with {self.ssh.returncode}"),
            remedy="--resume goes on from the newest checkpoint, on the hosts that are left",
        )
        error.host = self.name
        return error

    def _answers(self) -> None:
        assert self.ssh.stdout is not None, "it is a pipe"
        for line in self.ssh.stdout:
            try:
                answer = json.loads(line)
            except ValueError:  # a greeting of the host's shell
                self.said.append(line.rstrip())
                continue
            if "output" in answer:
                sys.stdout.write(answer["output"])
                sys.stdout.flush()
            elif "port" in answer:
                self.port = int(answer["port"])
            elif "fit" in answer:
                self.fit = True
            else:
                self.ended = answer

    def _complaints(self) -> None:
        assert self.ssh.stderr is not None, "it is a pipe"
        for line in self.ssh.stderr:
            self.said.append(line.rstrip())
            print(f"[{self.name}] {line.rstrip()}", file=sys.stderr, flush=True)


def _followed(
    processes: list[HostProcess], listed: HostList, signals: Signals, asked_to_stop: ExitCode
) -> tuple[int, ShoalError | None]:
    """Wait for all hosts and return the exit code and root error. If one host fails, the others end too."""
    told_port, handed_on, failed_at = False, 0, None
    asking = threading.Thread(target=_give_up_silent, args=(processes, listed), daemon=True)
    while not all(process.is_over() for process in processes):
        if not told_port and processes[0].port is not None:
            told_port = True
            for process in processes[1:]:
                process.tell(processes[0].port)
        if told_port and len(signals.received) > handed_on:
            for number in signals.received[handed_on:]:
                for process in processes:
                    process.tell(number)
            handed_on = len(signals.received)
        if not told_port and signals.received:
            return int(asked_to_stop), None
        gone = [p for p in processes if p.is_over() and (p.ended is None or p.ended["error"] is not None)]
        if gone and failed_at is None:
            failed_at = time.monotonic()
            if told_port:
                asking.start()
        compared = all(process.fit or process.is_over() for process in processes)
        if failed_at is not None and ((not told_port and compared) or time.monotonic() - failed_at > _GRACE_SECONDS):
            break
        time.sleep(_POLL_SECONDS)
    if asking.ident is not None:
        asking.join()
    listed.silent = {p.name: p.silent for p in processes if p.silent}
    code, error = _verdict(processes)
    lost = signals.twice and isinstance(error, RankLostError)
    return (int(ExitCode.INTERRUPTED), None) if lost else (code, error)  # the same rule as on one host


def _give_up_silent(processes: Sequence[HostProcess], listed: HostList) -> None:
    """Give up hosts that do not answer. Their ssh would notice later, and the others can continue without them."""
    left = [process for process in processes if not process.is_over()]
    silent = listed.silent_among([process.name for process in left])
    for process in left:
        if process.name in silent and not process.is_over():
            process.give_up(silent[process.name])


def _verdict(processes: list[HostProcess]) -> tuple[int, ShoalError | None]:
    by_word = sorted(processes, key=lambda p: bool(p.silent))  # a slow login may look like silence
    errors = [error for p in by_word if p.is_over() and (error := p.error()) is not None]
    order = {"PeerError": 2, "RankLostError": 1}  # errors of ranks that only suffered from another failure come last
    if errors:
        error = min(errors, key=lambda found: order.get(type(found).__name__, 0))
        unfit = [found for found in errors if isinstance(found, LaunchError)]
        if error in unfit and len(unfit) > 1:
            error = _together(unfit)
        return int(error.exit_code), error
    return max(int(p.ended["code"]) for p in processes if p.ended), None


def _together(errors: Sequence[LaunchError]) -> LaunchError:
    """Join the errors of several hosts into one."""
    said = list(dict.fromkeys(f"{error.given}: {error.conflict}" for error in errors))
    remedies = dict.fromkeys(error.remedy for error in errors)
    return LaunchError(given="several hosts", conflict="\n".join(said), remedy="; ".join(remedies))
