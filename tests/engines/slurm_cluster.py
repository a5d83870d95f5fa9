"""Cluster of Slurm with nodes in network namespaces, and files, ports and keys of its own: Debian's munged, slurmctld
and slurmd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.engines import namespaces
from tests.engines.namespaces import Hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_START_SECONDS = 30.0
_CPUS = 4  # of each node, whatever this machine has

_CONF = """\
ClusterName=shoal
SlurmctldHost=localhost({gateway})
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,defer_batch
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
InactiveLimit=0
SlurmdTimeout=300
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
"""


def unavailable() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)}: not installed; scripts/engines slurm does it"
    return namespaces.unavailable()


@dataclass(frozen=True)
class Slurm:
    """A running cluster; `variables` let the commands of Slurm find it."""

    folder: Path
    hosts: Hosts
    variables: dict[str, str]

    def command(self, *words: str) -> str:
        """What a command of Slurm prints. Raises: AssertionError where it fails."""
        ended = subprocess.run(words, env=self.variables, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.command("scontrol", "show", "job", "-o", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def idle(self) -> bool:
        """Whether every node that may be used waits for work."""
        return not set(self.command("sinfo", "-h", "-o", "%T").split()) - {"idle", "drained"}


@contextlib.contextmanager
def started(folder: Path, *names: str) -> Iterator[Slurm]:
    """A cluster with nodes of these names, for a context."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    with namespaces.made(*names) as hosts:
        try:
            variables = _configured(folder, hosts)
            _start_munge(folder, variables, processes)
            _start(["slurmctld", "-D", "-i"], folder / "slurmctld.out", variables, processes)
            for host in hosts.hosts:
                words = host.command(["slurmd", "-D", "-N", host.name])
                _start(words, folder / f"slurmd-{host.name}.out", variables, processes)
            cluster = Slurm(folder, hosts, variables)
            _until(lambda: _responds(cluster), "idle nodes", folder)
            yield cluster
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in reversed(processes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def _configured(folder: Path, hosts: Hosts) -> dict[str, str]:
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        controller, daemon = one.getsockname()[1], other.getsockname()[1]
    (folder / "state").mkdir()
    for host in hosts.hosts:
        (folder / f"spool-{host.name}").mkdir()
    nodes = "\n".join(f"NodeName={h.name} NodeAddr={h.address} CPUs={_CPUS} State=UNKNOWN" for h in hosts.hosts)
    text = _CONF.format(gateway=hosts.gateway, controller=controller, daemon=daemon, folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    return {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}


def _start_munge(folder: Path, variables: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = [
        f"--{n}={folder}/munge.{n.removesuffix('-file')}" for n in ("key-file", "pid-file", "log-file", "seed-file")
    ]
    words = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    _start(words, folder / "munged.out", variables, processes)
    _until((folder / "munge.socket").exists, "munged's socket", folder)


def _start(words: list[str], log: Path, variables: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> None:
    with log.open("wb") as file:
        processes.append(subprocess.Popen(words, env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL))


def _responds(cluster: Slurm) -> bool:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        return cluster.idle()
    return False


def _until(condition: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        said = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.out"))
        assert time.monotonic() < deadline, f"no {what} within {_START_SECONDS} s\n{said}"
        time.sleep(0.1)
