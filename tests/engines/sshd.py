"""Hosts that ssh reaches: an sshd in each of some network namespaces, with keys and configuration of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.engines import namespaces
from tests.engines.namespaces import Hosts

import shoal

# Where this shoal is, which hosts have in place of one that is installed.
SOURCE = Path(shoal.__file__).parents[1]
_START_SECONDS = 10.0
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
AcceptEnv TEST_*
SetEnv PYTHONPATH={source}
"""
_CLIENT = """\
Host {name}
    HostName {address}
    User root
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    SendEnv TEST_*
"""


def unavailable() -> str | None:
    """Why there can be no such hosts; None where there can."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)}: not installed; scripts/engines ssh does it"
    return namespaces.unavailable()


@dataclass(frozen=True)
class SshHosts:
    """Hosts, and the ssh configuration of a user who knows them by name."""

    hosts: Hosts
    config: Path


@contextlib.contextmanager
def started(folder: Path, *names: str, hides: Mapping[str, Path] | None = None) -> Iterator[SshHosts]:
    """Hosts of these names with sshd, for a context. `hides`: of a host a folder that is empty there."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, capture_output=True)
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder, source=SOURCE), encoding="utf-8")
    Path("/run/sshd").mkdir(exist_ok=True)  # where it confines itself before a login
    processes = []
    with namespaces.made(*names) as hosts:
        key = (folder / "host_key.pub").read_text(encoding="utf-8")
        (folder / "known_hosts").write_text("".join(f"{h.address} {key}" for h in hosts.hosts), encoding="utf-8")
        texts = [_CLIENT.format(name=h.name, address=h.address, folder=folder) for h in hosts.hosts]
        (folder / "config").write_text("".join(texts), encoding="utf-8")
        try:
            for host in hosts.hosts:
                words = [shutil.which("sshd", path=_PATH) or "sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
                if (hidden := (hides or {}).get(host.name)) is not None:
                    words = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden), *words]
                with (folder / f"sshd-{host.name}.log").open("wb") as log:
                    processes.append(subprocess.Popen(host.command(words), stdout=log, stderr=log))
            for host in hosts.hosts:
                _until_open(host.address)
            yield SshHosts(hosts, folder / "config")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _until_open(address: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((address, 22), timeout=1.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"no sshd at {address}"
            time.sleep(0.05)
