"""Launcher on hosts that ssh reaches with the user's configuration: one process per host, which starts its ranks.

Here are also the hosts that `--on hosts` names, ssh's options for them, and the check of which hosts answer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.errors import CommandError, ExitCode, LaunchError, RankLostError, ShoalError, from_json, say_note
from shoal.launch.environment import Environment
from shoal.launch.launchers.base import Submission, words_of
from shoal.launch.launchers.reports import RankStart, until_done
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import Child, rank_lost
from shoal.launch.supervise.heartbeat import OwnPauses
from shoal.runs.directory import CALL
from shoal.runs.version import __version__

_POLL_SECONDS = 0.05
# Ranks on other hosts notice a closed connection by themselves, and several hosts may lack the same.
_GRACE_SECONDS, _LAUNCH_GRACE_SECONDS = 2.5, 1.0
# A host's process answers each second, whatever its ranks do.
_SILENT_SECONDS = 5.0
# Variables of this command that change how ranks train and are sent to the hosts.
_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM")
_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "HF_", "WANDB_", "MLFLOW_", "SHOAL_")
# Prefixes of credentials, which clients of a run directory at an address read.
_OF_ADDRESSES = ("AWS_", "GOOGLE_", "FSSPEC_")
# Valid only on this host.
_OWN = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# Exit code of a failure of ssh itself, not of the remote command.
SSH_FAILED = 255
# Without password prompts; ssh notices after ten seconds that a host is silent.
SSH_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=2", "-oConnectTimeout=20")
# For the check whether a host answers: a new connection, since an existing one may be dead.
_ASK_SECONDS = 4.0
_ASK = ("-T", "-oBatchMode=yes", "-oControlPath=none", "-oClearAllForwardings=yes", "-oConnectTimeout=2")
# Messages of ssh if nobody answers; a host that refuses a key, for example, does answer.
_NOBODY = re.compile("No route to host|timed out|is unreachable|Host is down|Connection refused", re.IGNORECASE)


def render(submission: Submission) -> Mapping[str, str]:
    """Return a line for each host: the command, and the ranks that the host's process starts."""
    listed = HostList.of(submission)
    lines, first = [], 0
    for host, slots in listed.hosts.items():
        lines.append(f"{shlex.join(listed.words(host))}  # ranks {first} to {first + slots - 1}\n")
        first += slots
    return {"hosts": "".join(lines), "on each": shlex.join(submission.command) + "\n"}


def start(submission: Submission, signals: Signals) -> int:
    """Start a process on each host and wait for all, and again if a rank is lost. Raises: LaunchError."""
    listed = HostList.of(submission)
    if shutil.which("ssh") is None:
        raise LaunchError(given="--on hosts", conflict="ssh is not on this host", remedy="install OpenSSH's client")
    for name in (name for name in _OWN if name in os.environ):
        say_note(f"{name} is of this host, and no other is told: set it where ssh logs in")

    def once(attempt: RankStart) -> tuple[int, ShoalError | None]:
        processes: list[HostProcess] = []
        again = attempt.number > 0
        asked_to_stop = ExitCode.PREEMPTED if again else ExitCode.INTERRUPTED
        try:
            places = _places(listed, submission, attempt)
            if signals.received:
                return int(asked_to_stop), None
            for host, place in places:
                message = _message(submission, place)
                message["variables"][CALL] = listed.call
                processes.append(HostProcess(listed.words(host), host, message, again=again))
            return _followed(processes, listed, signals, asked_to_stop)
        finally:
            for process in processes:  # a host's process ends itself and its ranks when its input ends
                process.ssh.finish(_GRACE_SECONDS)

    return until_done(submission, signals, once)


def _places(listed: HostList, submission: Submission, attempt: RankStart) -> list[tuple[str, Environment]]:
    """Return the hosts of a start by name, with the environment of each host's first rank. Raises: LaunchError."""
    hosts = listed.for_a_start()
    counts = list(hosts.values())
    if len(hosts) < len(listed.hosts):
        of_all = f"{sum(counts)} of {sum(listed.hosts.values())} processes"
        for name, said in sorted(listed.lost.items()):
            say_note(f"{name} is skipped: {of_all} ({said})")
    address = address_of(next(iter(hosts)), listed.options)
    places = []
    for number, host in enumerate(hosts):
        place = Environment(sum(counts[:number]), sum(counts), 0, counts[number], address, restarts=attempt.number)
        place = replace(place, host=number, num_hosts=len(hosts), engine="hosts", job=submission.name)
        places.append((host, place))
    return places


def _message(submission: Submission, place: Environment) -> dict[str, Any]:
    """Return the first message to a host's process."""
    prefixes = _PREFIXES + (_OF_ADDRESSES if submission.address is not None else ())
    variables = {n: v for n, v in os.environ.items() if (n in _VARIABLES or n.startswith(prefixes)) and n not in _OWN}
    return {
        "arguments": list(submission.arguments),
        "folder": str(submission.folder),
        "out": str(submission.out),
        "address": submission.address,
        "threads": submission.threads,
        "variables": variables,
        "version": __version__,
        "time": time.time(),
        "place": asdict(place),
    }


class HostProcess:
    """Process of a host, seen by its launcher through ssh. `again`: a restart, before which the host may vanish."""

    def __init__(self, words: Sequence[str], name: str, message: Mapping[str, Any], *, again: bool = False) -> None:
        self.name, self._again = name, again
        self.fit = False  # whether the host has passed the checks of version, folders and clock
        self.port: int | None = None
        self.ended: dict[str, Any] | None = None
        self.silent = ""  # why the host is skipped by the next start, if that may be smaller
        # When its newest line came, by the monotonic clock. Infinite while the host may be silent: before its first
        # line, while it is paused, and while an earlier line's output is not written.
        self.heard_at = math.inf
        self._said: list[str] = []  # the lines that are no answers

        def complain(line: str) -> None:
            self._said.append(line)
            print(f"[{name}] {line}", file=sys.stderr, flush=True)

        self.ssh = Child(words, listens=True, output=self._take, errors=complain)
        self.ssh.tell(message)

    def _take(self, line: str) -> None:
        try:
            answer = json.loads(line)
        except ValueError:  # a greeting of the host's shell
            self._said.append(line)
            return
        self.heard_at = math.inf
        if "output" in answer:
            sys.stdout.write(answer["output"])
            sys.stdout.flush()
        elif "port" in answer:
            self.port = int(answer["port"])
        elif "fit" in answer:
            self.fit = True
        elif "code" in answer:
            self.ended = answer
        if not answer.get("paused"):
            self.heard_at = time.monotonic()

    @property
    def kind(self) -> str:
        """Class of the error that the host's process reported; empty if it reported none."""
        return str(((self.ended or {}).get("error") or {}).get("kind", ""))

    def error(self) -> ShoalError | None:
        """Return the error that the host's process reported, or an error made from ssh's own output."""
        if self.ended is not None:
            return from_json(self.ended["error"]) if self.ended["error"] else None
        code, said = self.ssh.process.returncode, "\n".join(self._said[-5:]).strip()
        vanished = not said or "closed by" in said or "not responding" in said
        if not (self.silent or self._again or vanished) and self.port is None:  # not even the first answer has come
            command = f"ssh {self.name} {shlex.quote(sys.executable)} --version"
            remedy = f"let `{command}` work without a password first"
            return LaunchError(given=f"host {self.name}", conflict=said, remedy=remedy)
        if self.silent:
            said = f"it does not answer any more ({self.silent})"
        return rank_lost(
            f"host {self.name}",
            "it was lost: " + (said.splitlines()[-1] if said else f"ssh ended with {code}"),
            host=self.name,
            remedy="--resume goes on from the newest checkpoint, on the hosts that are left",
        )


def _followed(
    processes: list[HostProcess], listed: HostList, signals: Signals, asked_to_stop: ExitCode
) -> tuple[int, ShoalError | None]:
    """Wait for all hosts and return the exit code and root error. If one host fails, the others end too."""
    sent_port, handed_on, failed_at, pauses = False, 0, math.inf, OwnPauses()

    while not all(process.ssh.is_over() for process in processes):
        if not sent_port and processes[0].port is not None:
            sent_port = True
            for process in processes[1:]:
                process.ssh.tell(processes[0].port)
        if sent_port and len(signals.received) > handed_on:
            for number in signals.received[handed_on:]:
                for process in processes:
                    process.ssh.tell(number)
            handed_on = len(signals.received)
        if not sent_port and signals.received:
            return int(asked_to_stop), None
        pauses.look()
        for process in (p for p in processes if not p.ssh.is_over()):
            if pauses.now - max(process.heard_at, pauses.since) > _SILENT_SECONDS:
                process.silent = f"no sign of life for {_SILENT_SECONDS:.0f} s"
                process.ssh.finish(0.0)
        gone = [p for p in processes if p.ssh.is_over() and (p.ended is None or p.kind)]
        failed_at = min(failed_at, pauses.now) if gone else failed_at
        compared = all(process.fit or process.ssh.is_over() for process in processes)
        # Ranks do not notice that a host is frozen, or that another host's ranks do not come.
        apart = [process for process in gone if process.kind == "LaunchError"]
        is_clear = any(process.silent for process in gone) or (apart and len(apart) >= len(processes) - 1)
        grace = 0.0 if is_clear else _LAUNCH_GRACE_SECONDS if apart else _GRACE_SECONDS
        if (gone and not sent_port and compared) or pauses.now - failed_at >= grace:
            break
        time.sleep(_POLL_SECONDS)
    apart = [process for process in processes if process.kind == "LaunchError"]
    of_first = len(apart) == len(processes) - 1 > 1  # then nobody reaches the host of rank 0
    for process in apart:
        (processes[0] if of_first else process).silent = process.ended["error"]["conflict"] if process.ended else ""
    listed.silent = {p.name: p.silent for p in processes if p.silent}
    by_word = sorted(processes, key=lambda p: bool(p.silent))
    errors = [error for p in by_word if p.ssh.is_over() and (error := p.error()) is not None]
    if not errors:
        return max(int(p.ended["code"]) for p in processes if p.ended), None
    order = {"PeerError": 2, "RankLostError": 1}  # errors of ranks that only suffered from another failure come last
    error = min(errors, key=lambda one: order.get(type(one).__name__, 0))
    if signals.twice and isinstance(error, RankLostError):
        return int(ExitCode.INTERRUPTED), None  # the same rule as on one host
    unfit = [one for one in errors if isinstance(one, LaunchError)]
    if error in unfit and len(unfit) > 1:
        error = together(unfit)
    return int(error.exit_code), error


def together(errors: Sequence[LaunchError]) -> LaunchError:
    """Join the errors of several hosts into one."""
    said = list(dict.fromkeys(f"{error.given}: {error.conflict}" for error in errors))
    remedies = dict.fromkeys(error.remedy for error in errors)
    return LaunchError(given="several hosts", conflict="\n".join(said), remedy="; ".join(remedies))


# ---------------------------------------------------------------------------------------------------------- hosts


def named_hosts(words: Sequence[str]) -> dict[str, int]:
    """Return the hosts in the words after `hosts:`, with the number of ranks of each; 0: an even share.

    Raises: CommandError.
    """
    if not words or words[0].startswith("-"):
        raise CommandError(
            given=f"--on hosts:{' '.join(words)}",
            conflict="it names no hosts",
            remedy="write --on hosts:first,second or --on hosts:FILE, and options of ssh after them",
        )
    path, given = Path(words[0]), f"--on hosts:{words[0]}"
    if path.is_file():
        texts = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        texts = words[0].split(",")
    slots_of: dict[str, int] = {}
    twice = set()
    for text in (text.strip() for text in texts if text.strip()):  # "name", "name:2", "name 2" or "name slots=2"
        name, _, slots = text.replace(" slots=", ":").replace(" ", ":").partition(":")
        slots = slots.strip(": ")
        if not name or name.startswith("-") or (slots and not slots.isdecimal()):
            raise CommandError(
                given=given,
                conflict=f"{text!r} is not a host",
                remedy="write a name that ssh accepts and its number of ranks: first:2,second:2",
            )
        if name in slots_of:
            twice.add(name)
        slots_of[name] = int(slots or 0)
    if not slots_of or twice:
        raise CommandError(
            given=given,
            conflict=f"{', '.join(sorted(twice))} is named twice" if twice else "it names no hosts",
            remedy="name each host once; HOST:2 is two ranks there",
        )
    return slots_of


@dataclass
class HostList:
    """Hosts of a run with their numbers of ranks, and ssh's own options.

    `least`: the fewest ranks with which the run may continue if hosts are lost; None: all ranks are needed.
    """

    hosts: dict[str, int]
    options: list[str]
    least: int | None = None
    call: str = field(default_factory=lambda: uuid.uuid4().hex)
    silent: dict[str, str] = field(default_factory=dict)  # hosts that did not answer a moment ago, with the evidence
    lost: dict[str, str] = field(default_factory=dict)  # hosts that the newest start skips, with the reason

    @classmethod
    def of(cls, submission: Submission) -> HostList:
        """Parse the hosts and ssh's own options after the colon.

        Raises: CommandError, also if the numbers of ranks do not add up to --devices.
        """
        words = words_of(submission.options)
        slots_of = named_hosts(words)
        wanted, known = submission.num_processes, sum(slots_of.values())
        open_hosts = [name for name, slots in slots_of.items() if not slots]  # each has an even share of the rest
        left = wanted - known
        if left < len(open_hosts) or (not open_hosts and left):
            raise CommandError(
                given=f"{wanted} processes on {len(slots_of)} hosts",
                conflict=f"the hosts take {known} processes" if not open_hosts else "each host has at least one",
                remedy=f"write --devices {max(known + len(open_hosts), 1)}, or other numbers after the hosts",
            )
        for number, name in enumerate(open_hosts):
            slots_of[name] = left // len(open_hosts) + (number < left % len(open_hosts))
        return cls(slots_of, words[1:], submission.least_processes)

    def for_a_start(self) -> dict[str, int]:
        """Return the hosts of the next start: those that answer, or all if `least` is None or too few answer."""
        if self.least is None:
            return self.hosts
        self.lost = self.silent | self.silent_among([name for name in self.hosts if name not in self.silent])
        self.silent = {}  # the next start checks these hosts again
        left = {name: slots for name, slots in self.hosts.items() if name not in self.lost}
        return left if sum(left.values()) >= self.least else self.hosts

    def silent_among(self, names: Collection[str]) -> dict[str, str]:
        """Return the hosts that do not answer ssh within some seconds, with ssh's message for each."""
        said: dict[str, list[str]] = {name: [] for name in names}
        quiet, until = subprocess.DEVNULL, time.monotonic() + _ASK_SECONDS
        children = {
            name: Child(["ssh", *_ASK, *self.options, "--", name, "true"], output=quiet, errors=said[name].append)
            for name in names
        }
        silent: dict[str, str] = {}
        for name, child in children.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
            is_late = child.process.poll() is None
            code = child.finish(0.0)
            if is_late:
                silent[name] = f"no answer within {_ASK_SECONDS:.0f} s"
            elif code == SSH_FAILED and _NOBODY.search("\n".join(said[name])):
                silent[name] = "\n".join(said[name]).strip().splitlines()[-1]
        return silent

    def words(self, name: str) -> list[str]:
        """Return the command that starts a host's process. It contains no secret and nothing of the job."""
        return _host_process(name, self.options)


def _host_process(host: str, options: Sequence[str], *what: str) -> list[str]:
    remote = " ".join(("exec", shlex.quote(sys.executable), "-m shoal.launch.supervise.host_process", *what))
    return ["ssh", *SSH_OPTIONS, *options, "--", host, remote]


class HostProbe:
    """Process on a host that answers questions about the host in lines of JSON lists. `what`: the kind of questions."""

    def __init__(self, host: str, options: Sequence[str], what: str) -> None:
        self._host, self._complaints = host, list[str]()
        words = _host_process(host, options, what)
        self.child = Child(words, listens=True, output=subprocess.PIPE, errors=self._complaints.append)

    def answer(self) -> list[Any]:
        """Return the next answer. Raises: LaunchError if there is none."""
        assert self.child.process.stdout is not None, "it is a pipe"
        for line in self.child.process.stdout:
            if line.startswith("["):  # skips a greeting of the host's shell
                answer: list[Any] = json.loads(line)
                return answer
        self.close()
        raise LaunchError(
            given=f"host {self._host}",
            conflict="\n".join(self._complaints).strip()[-300:] or "ssh ended without a word",
            remedy=f"let `ssh {self._host} {shlex.quote(sys.executable)} -m shoal --version` work without a password "
            "first",
        )

    def close(self) -> None:
        """End the process."""
        self.child.finish(_GRACE_SECONDS)


def address_of(host: str, options: Sequence[str]) -> str:
    """Return the address of a host in ssh's configuration. Raises: LaunchError."""
    words = ["ssh", "-G", *options, "--", host]
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise LaunchError(given=shlex.join(words), conflict=ended.stderr.strip(), remedy="correct ssh's configuration")
    pairs = dict(line.partition(" ")[::2] for line in ended.stdout.splitlines())
    return pairs.get("hostname", host)
