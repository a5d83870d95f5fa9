"""Launcher by mpirun of Open MPI or MPICH, whichever the command names."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CommandError, LaunchError, ShoalError
from shoal.launch.launchers.base import Submission, words_of
from shoal.launch.launchers.reports import RankStart, until_done
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import Child
from shoal.launch.supervise.recovery import verdict

_POLL_SECONDS, _PLACE_SECONDS = 0.05, 30.0
_LISTS = ("--host", "-host", "-H", "-hosts", "--hosts")
_FILES = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_FIRST_PORT, _NUM_PORTS = 15_000, 16_000


@dataclass(frozen=True)
class _Mpirun:
    """An mpirun: its options for ranks' variables, and those that let every rank end by itself.

    By default both kill the other ranks, even during a checkpoint, once one rank ends with a nonzero code.
    """

    path: str
    is_open_mpi: bool

    def words(self, num_processes: int, variables: Mapping[str, str], options: list[str]) -> list[str]:
        if self.is_open_mpi:
            given = [word for name, text in variables.items() for word in ("-x", f"{name}={text}")]
            # Without recovery Open MPI waits forever for a rank that a signal has killed.
            alone = ["--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"]
        else:
            given = [word for name, text in variables.items() for word in ("-genv", name, text)]
            alone = ["-disable-auto-cleanup"]
        return [self.path, "-n", str(num_processes), *alone, *given, *options]

    @property
    def stop(self) -> int:
        """The signal that mpirun forwards to the ranks. Open MPI kills them one second after SIGTERM."""
        return signal.SIGUSR1 if self.is_open_mpi else signal.SIGTERM


def render(submission: Submission) -> Mapping[str, str]:
    """Return the mpirun command. Raises: LaunchError without an mpirun."""
    mpirun, options = _chosen(submission)
    words = mpirun.words(submission.num_processes, _variables(submission, options), options)
    return {"mpirun": shlex.join([*words, *submission.command]) + "\n"}


def start(submission: Submission, signals: Signals) -> int:
    """Start mpirun and wait for it, and again if a rank is lost. Raises: LaunchError without an mpirun."""
    mpirun, options = _chosen(submission)
    rendezvous = _variables(submission, options)
    if "MASTER_ADDR" not in rendezvous and (host := _host_of_rank_0(mpirun, submission.num_processes, options)):
        rendezvous["MASTER_ADDR"] = host

    def once(attempt: RankStart) -> tuple[int, ShoalError | None]:
        variables = {**rendezvous, **attempt.variables()}
        words = [*mpirun.words(submission.num_processes, variables, options), *submission.command]
        child, handed_on = Child(words), 0
        try:
            while child.process.poll() is None:
                if len(signals.received) > handed_on:
                    handed_on = len(signals.received)
                    child.send(signal.SIGINT if signals.twice else mpirun.stop)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            child.send(signal.SIGTERM)
            raise
        finally:
            child.finish()
        return verdict(attempt.ends(socket.gethostname()), signals)

    return until_done(submission, signals, once)


def _chosen(submission: Submission) -> tuple[_Mpirun, list[str]]:
    """Return the mpirun that the options name first, or the one on PATH, and the remaining options."""
    options = words_of(submission.options)
    named = options[0] if options and not options[0].startswith("-") else None
    name = named or "mpirun"
    path = shutil.which(name)
    if path is None:
        raise LaunchError(
            given=f"--on mpi{':' + submission.options if submission.options else ''}",
            conflict=f"{name} is not on this host",
            remedy="install Open MPI or MPICH, or name another: --on mpi:/opt/mpi/bin/mpirun",
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    is_open_mpi = any(name in said for name in ("Open MPI", "OpenRTE", "open-mpi"))
    if not is_open_mpi and not any(name in said.upper() for name in ("HYDRA", "INTEL")):
        raise CommandError(
            given=f"--on mpi:{submission.options}",
            conflict=f"{path} is neither Open MPI's nor Hydra's: {said.strip()[:80]!r}",
            remedy="give the path of an mpirun of Open MPI, MPICH or Intel MPI",
        )
    return _Mpirun(path, is_open_mpi), options[1:] if named else options


def _variables(submission: Submission, options: list[str]) -> dict[str, str]:
    """Return the rendezvous: the port, and the first host that the options name, if any."""
    port = _FIRST_PORT + sum(byte * 31**n for n, byte in enumerate(str(submission.out).encode())) % _NUM_PORTS
    first = os.environ.get("MASTER_ADDR") or _first_host(options)
    return {"MASTER_PORT": os.environ.get("MASTER_PORT", str(port)), **({"MASTER_ADDR": first} if first else {})}


def _host_of_rank_0(mpirun: _Mpirun, number: int, options: list[str]) -> str | None:
    """Return the host where mpirun puts rank 0, from a probe run; None if all ranks are on one host.

    None also if mpirun fails: the start of the ranks will report the cause.
    """
    script = 'echo "shoal: ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} $(uname -n)"'
    words = [mpirun.path, "-n", str(number), *options, "sh", "-c", script]
    try:
        pipe = subprocess.PIPE
        ended = subprocess.run(words, stdout=pipe, stdin=subprocess.DEVNULL, text=True, timeout=_PLACE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("shoal: ")]
    hosts = {words[1]: words[2] for words in lines if len(words) == 3}
    return hosts.get("0") if len(set(hosts.values())) > 1 else None


def _first_host(options: list[str]) -> str | None:
    """Return the first host that mpirun's options name; None if they name none."""
    for number, word in enumerate(options):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(options[number + 1 : number + 2]), "")
        if name in _LISTS:
            return value.partition(",")[0].partition(":")[0] or None
        if name in _FILES:
            try:
                lines = [line.partition("#")[0].split() for line in Path(value).read_text("utf-8").splitlines()]
            except OSError as error:
                raise CommandError(
                    given=f"a host file {value}",
                    conflict=f"it cannot be read: {error}",
                    remedy="give the path of a readable host file",
                ) from None
            return next((words[0].partition(":")[0] for words in lines if words), None)
    return None
