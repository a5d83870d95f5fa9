"""Hosts that `--on hosts` names, ssh's options for them, and a check of which hosts answer."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.base import Submission
from shoal.launch.supervise.child import Child

# Exit code of a failure of ssh itself, not of the remote command.
SSH_FAILED = 255
# Without password prompts; ssh notices after ten seconds that a host is silent.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", *_ALIVE, "-o", "ConnectTimeout=20")
# For the check whether a host answers: a new connection, since an existing one may be dead.
_ASK_SECONDS = 4.0
_ASK = (
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ControlPath=none",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "ConnectTimeout=2",
)
# Messages of ssh if nobody answers; a host that refuses a key, for example, does answer.
_NOBODY = re.compile("No route to host|timed out|is unreachable|Host is down|Connection refused", re.IGNORECASE)


@dataclass(frozen=True)
class SshHost:
    """Host name for ssh and the host's number of ranks; 0: an even share."""

    name: str
    slots: int = 0


@dataclass
class HostList:
    """Hosts of a run with their numbers of ranks, and ssh's own options.

    `least`: the fewest ranks with which the run may continue if hosts are lost; None: all ranks are needed.
    """

    hosts: list[SshHost]
    options: list[str]
    least: int | None = None
    silent: dict[str, str] = field(default_factory=dict)  # hosts that did not answer a moment ago, with the evidence
    lost: dict[str, str] = field(default_factory=dict)  # hosts that the newest start skips, with the reason

    @classmethod
    def of(cls, submission: Submission) -> HostList:
        """Parse the hosts after the colon. Raises: CommandError."""
        hosts, options = _given(submission)
        counts = _counts(hosts, submission)
        filled = [replace(host, slots=count) for host, count in zip(hosts, counts, strict=True)]
        return cls(filled, options, submission.least_processes)

    def for_a_start(self) -> list[SshHost]:
        """Return the hosts of the next start: those that answer, or all if `least` is None or too few answer."""
        if self.least is None:
            return self.hosts
        asked = [host.name for host in self.hosts if host.name not in self.silent]
        self.lost = self.silent | self.silent_among(asked)
        self.silent = {}  # the next start checks these hosts again
        left = [host for host in self.hosts if host.name not in self.lost]
        return left if sum(host.slots for host in left) >= self.least else self.hosts

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
        remote = f"exec {shlex.quote(sys.executable)} -m shoal.launch.supervise.host_process"
        return ["ssh", *SSH_OPTIONS, *self.options, "--", name, remote]


def _given(submission: Submission) -> tuple[list[SshHost], list[str]]:
    """Parse the hosts and ssh's own options after the colon. Raises: CommandError."""
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
    """Parse a host from "name", "name:2", "name 2" or "name slots=2"."""
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
    """Return the number of ranks of each host. Raises: CommandError if they do not add up to --devices."""
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


def address_of(host: str, options: Sequence[str]) -> str:
    """Return the address of a host in ssh's configuration. Raises: LaunchError."""
    words = ["ssh", "-G", *options, "--", host]
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise LaunchError(given=shlex.join(words), conflict=ended.stderr.strip(), remedy="mend ssh's configuration")
    pairs = dict(line.partition(" ")[::2] for line in ended.stdout.splitlines())
    return pairs.get("hostname", host)
