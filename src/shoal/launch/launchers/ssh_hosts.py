"""Hosts that `--on hosts` names, ssh's options for them, and a check of which hosts answer."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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
        """Parse the hosts and ssh's own options after the colon.

        Raises: CommandError, also if the numbers of ranks do not add up to --devices.
        """
        words = submission.option_words()
        if not words or words[0].startswith("-"):
            raise CommandError(
                given=f"--on hosts:{submission.options}",
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
                    conflict=f"{text!r} is no host",
                    remedy="write a name as ssh takes it, and how many ranks it has: first:2,second:2",
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
        wanted, known = submission.num_processes, sum(slots_of.values())
        open_hosts = [name for name, slots in slots_of.items() if not slots]  # each has an even share of the rest
        left = wanted - known
        if left < len(open_hosts) or (not open_hosts and left):
            raise CommandError(
                given=f"{wanted} processes on {len(slots_of)} hosts",
                conflict=f"the hosts have {known} places" if not open_hosts else "each host has at least one",
                remedy=f"write --devices {max(known + len(open_hosts), 1)}, say, or other numbers behind the hosts",
            )
        for number, name in enumerate(open_hosts):
            slots_of[name] = left // len(open_hosts) + (number < left % len(open_hosts))
        hosts = [SshHost(name, slots) for name, slots in slots_of.items()]
        return cls(hosts, words[1:], submission.least_processes)

    def for_a_start(self) -> list[SshHost]:
        """Return the hosts of the next start: those that answer, or all if `least` is None or too few answer."""
        if self.least is None:
            return self.hosts
        self.lost = self.silent | self.silent_among([h.name for h in self.hosts if h.name not in self.silent])
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


def address_of(host: str, options: Sequence[str]) -> str:
    """Return the address of a host in ssh's configuration. Raises: LaunchError."""
    words = ["ssh", "-G", *options, "--", host]
    ended = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise LaunchError(given=shlex.join(words), conflict=ended.stderr.strip(), remedy="mend ssh's configuration")
    pairs = dict(line.partition(" ")[::2] for line in ended.stdout.splitlines())
    return pairs.get("hostname", host)
