"""Launcher on hosts that ssh reaches, by the user's own configuration: one process on each, which starts its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, ExitCode, LaunchError, RankLostError, ShoalError, from_json
from shoal.launch.environment import Environment
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.reports import RankStart, until_done
from shoal.launch.signals import Signals
from shoal.runs.version import __version__

_POLL_SECONDS = 0.05
# Ranks on other hosts find out by themselves, where a connection was closed.
_GRACE_SECONDS = 5.0
_JOIN_SECONDS = 60.0
# No password is asked for; a host that says nothing any more is given up after ten seconds.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", *_ALIVE, "-o", "ConnectTimeout=20")
# Of this command's variables those that change how ranks train go along.
_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM")
_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "HF_", "WANDB_", "MLFLOW_", "SHOAL_")
# By these clients know who asks, where the run directory is at an address.
_OF_ADDRESSES = ("AWS_", "GOOGLE_", "FSSPEC_")
# Of this host, whatever others have.
_OWN = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SSH_FAILED = 255


@dataclass(frozen=True)
class SshHost:
    """A host as ssh is given it, and how many ranks it has; 0: its share."""

    name: str
    slots: int = 0


def render(submission: Submission) -> Mapping[str, str]:
    """A line for each host: the command, and the ranks that its process starts."""
    hosts, options = _given(submission)
    counts = _counts(hosts, submission)
    lines, first = [], 0
    for host, count in zip(hosts, counts, strict=True):
        lines.append(f"{shlex.join(_ssh(host.name, options))}  # ranks {first} to {first + count - 1}\n")
        first += count
    return {"hosts": "".join(lines), "on each": shlex.join(submission.command) + "\n"}


def start(submission: Submission, signals: Signals) -> int:
    """Starts a process on each host and waits for them, again where a rank was lost. Raises: LaunchError."""
    hosts, options = _given(submission)
    if shutil.which("ssh") is None:
        raise LaunchError(given="--on hosts", conflict="ssh is not on this host", remedy="install OpenSSH's client")
    counts = _counts(hosts, submission)
    address = address_of(hosts[0].name, options)
    for name in (name for name in _OWN if name in os.environ):
        print(f"note: {name} is of this host, and no other is told: set it where ssh logs in", file=sys.stderr)

    def once(attempt: RankStart) -> tuple[int, ShoalError | None]:
        processes = []
        try:
            for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
                place = Environment(
                    rank=sum(counts[:number]),
                    world_size=sum(counts),
                    local_world_size=count,
                    address=address,
                    restarts=attempt.number,
                    host=number,
                    num_hosts=len(hosts),
                    engine="hosts",
                    job=submission.name,
                )
                processes.append(HostProcess.started(_ssh(host.name, options), host.name, _asked(submission, place)))
            return _followed(processes, signals)
        finally:
            for process in processes:
                process.end()

    return until_done(submission, signals, once)


def _given(submission: Submission) -> tuple[list[SshHost], list[str]]:
    """Hosts and ssh's own options, of what follows the colon. Raises: CommandError."""
    words = submission.option_words()
    if not words or words[0].startswith("-"):
        raise CommandError(
            given=f"--on hosts:{submission.options}",
            conflict="it names no hosts",
            remedy="write --on hosts:first,second or --on hosts:FILE, and options of ssh after them",
        )
    path = Path(words[0])
    if path.is_file():
        texts = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        texts = words[0].split(",")
    hosts = [_host(text, words[0]) for text in texts if text.strip()]
    twice = {host.name for host in hosts if [h.name for h in hosts].count(host.name) > 1}
    if not hosts or twice:
        raise CommandError(
            given=f"--on hosts:{words[0]}",
            conflict=f"{', '.join(sorted(twice))} is named twice" if twice else "it names no hosts",
            remedy="name each host once; HOST:2 is two ranks there",
        )
    return hosts, words[1:]


def _host(text: str, given: str) -> SshHost:
    """A host of "name", "name:2", "name 2" or "name slots=2"."""
    name, _, slots = text.strip().replace(" slots=", ":").replace(" ", ":").partition(":")
    slots = slots.strip(": ")
    if not name or name.startswith("-") or (slots and not slots.isdecimal()):
        raise CommandError(
            given=f"--on hosts:{given}",
            conflict=f"{text.strip()!r} is no host",
            remedy="write a name as ssh takes it, and how many ranks it has: first:2,second:2",
        )
    return SshHost(name, int(slots or 0))


def _counts(hosts: Sequence[SshHost], submission: Submission) -> list[int]:
    """Ranks of each host. Raises: CommandError where they are not those of --devices."""
    wanted, known = submission.num_processes, sum(host.slots for host in hosts)
    open_hosts = [host for host in hosts if not host.slots]
    left = wanted - known
    if left < len(open_hosts) or (not open_hosts and left):
        raise CommandError(
            given=f"{wanted} processes on {len(hosts)} hosts",
            conflict=f"the hosts have {known} places" if not open_hosts else "each host has at least one",
            remedy=f"write --devices {max(known + len(open_hosts), 1)}, say, or other numbers behind the hosts",
        )
    shares = [left // len(open_hosts) + (n < left % len(open_hosts)) for n in range(len(open_hosts))]
    return [host.slots or shares.pop(0) for host in hosts]


def _ssh(host: str, options: Sequence[str]) -> list[str]:
    """The words that start a host's process; none of them is a secret, or the job's."""
    remote = f"exec {shlex.quote(sys.executable)} -m shoal.launch.host_process"
    return ["ssh", *SSH_OPTIONS, *options, "--", host, remote]


def address_of(host: str, options: Sequence[str]) -> str:
    """The address that ssh's configuration has for a host. Raises: LaunchError."""
    words = ["ssh", "-G", *options, "--", host]
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise LaunchError(given=shlex.join(words), conflict=ended.stderr.strip(), remedy="mend ssh's configuration")
    pairs = dict(line.partition(" ")[::2] for line in ended.stdout.splitlines())
    return pairs.get("hostname", host)


def _asked(submission: Submission, place: Environment) -> dict[str, Any]:
    """First line to a host's process."""
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
    """Process of a host as its launcher sees it, at the near end of ssh."""

    name: str
    ssh: subprocess.Popen[str]
    fit: bool = False  # whether it has what the others have
    port: int | None = None
    ended: dict[str, Any] | None = None
    said: list[str] = field(default_factory=list)  # its last lines on stderr
    _threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def started(cls, words: Sequence[str], name: str, asked: Mapping[str, Any]) -> HostProcess:
        """A process on its way, which is told what to start."""
        pipe = subprocess.PIPE
        ssh = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        found = cls(name, ssh)
        for work in (found._answers, found._complaints):
            thread = threading.Thread(target=work, name=f"shoal-{name}", daemon=True)
            thread.start()
            found._threads.append(thread)
        found.tell(asked)
        return found

    def tell(self, line: Any) -> None:
        """Sends a line of JSON; a host that is gone is found by others' means."""
        assert self.ssh.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError, ValueError):
            self.ssh.stdin.write(json.dumps(line) + "\n")
            self.ssh.stdin.flush()

    def is_over(self) -> bool:
        """Whether nothing comes from there any more."""
        return self.ssh.poll() is not None and not any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Lets the host end what still runs there, and ends ssh."""
        assert self.ssh.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self.ssh.stdin.close()
        try:
            self.ssh.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.ssh.kill()
            self.ssh.wait()
        for thread in self._threads:
            thread.join(1.0)

    def error(self) -> ShoalError | None:
        """The error that the host's process told, or what ssh's end says without one."""
        if self.ended is not None:
            return from_json(self.ended["error"]) if self.ended["error"] else None
        said = "\n".join(self.said[-5:]).strip()
        if self.ssh.returncode == _SSH_FAILED or (self.said and self.port is None):
            error: ShoalError = LaunchError(
                given=f"host {self.name}",
                conflict=said or "ssh ended without a word",
                remedy=f"let `ssh {self.name} {shlex.quote(sys.executable)} --version` work without a password first",
            )
            if self.port is not None or not said or "closed by" in said or "not responding" in said:
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


def _followed(processes: list[HostProcess], signals: Signals) -> tuple[int, ShoalError | None]:
    """Waits for all hosts; the exit code, and the error at the root. Once one has failed, the others end too."""
    told_port, handed_on, failed_at = False, 0, None
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
            return int(ExitCode.INTERRUPTED), None
        gone = [p for p in processes if p.is_over() and (p.ended is None or p.ended["error"] is not None)]
        if gone and failed_at is None:
            failed_at = time.monotonic()
        compared = all(process.fit or process.is_over() for process in processes)
        if failed_at is not None and ((not told_port and compared) or time.monotonic() - failed_at > _GRACE_SECONDS):
            break
        time.sleep(_POLL_SECONDS)
    code, error = _verdict(processes)
    lost = signals.twice and isinstance(error, RankLostError)
    return (int(ExitCode.INTERRUPTED), None) if lost else (code, error)  # as on one host


def _verdict(processes: list[HostProcess]) -> tuple[int, ShoalError | None]:
    errors = [error for p in processes if p.is_over() and (error := p.error()) is not None]
    order = {"PeerError": 2, "RankLostError": 1}  # what others only suffered from last
    if errors:
        error = min(errors, key=lambda found: order.get(type(found).__name__, 0))
        unfit = [found for found in errors if isinstance(found, LaunchError)]
        if error in unfit and len(unfit) > 1:
            error = _together(unfit)
        return int(error.exit_code), error
    return max(int(p.ended["code"]) for p in processes if p.ended), None


def _together(errors: Sequence[LaunchError]) -> LaunchError:
    """What several hosts lack, in one error."""
    said = list(dict.fromkeys(f"{error.given}: {error.conflict}" for error in errors))
    remedies = dict.fromkeys(error.remedy for error in errors)
    return LaunchError(given="several hosts", conflict="\n".join(said), remedy="; ".join(remedies))
