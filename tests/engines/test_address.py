"""Run directories at an address of an S3 server, of hosts that share no file system: the undisturbed run to the bit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engines import sshd
from tests.engines.choice import needs
from tests.engines.same_run import SAME
from tests.engines.sshd import SshHosts
from tests.launching import JOBS, Ended, Gate, Started, start_command, unlaunched

JOB = str(JOBS / "tiny.py")
STEP = 6
LIMIT_SECONDS = 110.0
BUCKET = "shoal-test"
SHARDED = '[layout]\ndata = 1\nshard = 2\n[shard]\nlevel = "optimizer"\n[execution]\nexact = true\n'


def unavailable() -> str | None:
    missing = [name for name in ("s3fs", "moto", "flask_cors") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)}: not installed; scripts/engines s3 does it" if missing else sshd.unavailable()


pytestmark = needs("s3", unavailable)


@dataclass(frozen=True)
class S3:
    """A server of S3's interface at an address that all hosts reach, and hosts that share no file system with it."""

    hosts: SshHosts
    variables: dict[str, str]

    def result(self, run: str) -> dict[str, object]:
        """`result.json` of a run there."""
        code = f"import fsspec; print(fsspec.open('s3://{BUCKET}/{run}/result.json').open().read().decode())"
        variables = {**os.environ, **self.variables}
        said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True).stdout
        found: dict[str, object] = json.loads(said)
        return found


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    folder = tmp_path_factory.mktemp("s3")
    with contextlib.ExitStack() as opened:
        hosts = opened.enter_context(sshd.started(folder / "ssh", "h1", "h2"))
        with socket.socket() as free:
            free.bind((hosts.hosts.gateway, 0))
            port = free.getsockname()[1]
        words = ["-m", "moto.server", "-H", hosts.hosts.gateway, "-p", str(port)]
        log = opened.enter_context((folder / "server.log").open("wb"))
        server = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)
        opened.callback(server.wait)
        opened.callback(server.kill)
        url = f"http://{hosts.hosts.gateway}:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.1)
        keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        yield S3(hosts, {**keys, "AWS_DEFAULT_REGION": "us-east-1"})


def assert_same(s3: S3, run: str, undisturbed: Ended) -> None:
    found = s3.result(run)
    assert found["status"] == "completed"
    assert {name: found[name] for name in SAME} == {name: undisturbed.result[name] for name in SAME}


@contextlib.contextmanager
def over_ssh(s3: S3, here: Path, *words: str, gate: Gate | None = None, on: str = "h1,h2") -> Iterator[Started]:
    out = f"s3://{BUCKET}/run"
    command = [sys.executable, "-m", "shoal", "run", JOB, "--exact", "--checkpoint-every", "2", "--out", out, *words]
    command += ["--on", f"hosts:{on} -F {s3.hosts.config}"]
    variables = {"PYTHONPATH": str(JOBS), **s3.variables, **(gate.environment if gate else {})}
    with start_command(command, here, variables, fresh=True) as started:
        yield started


def test_a_lost_rank_and_fewer_hosts(s3: S3, undisturbed: Ended, tmp_path: Path) -> None:
    """All ranks start again from the address, and the run goes on from there on one host."""
    gate = Gate(tmp_path / "gate", STEP)
    with over_ssh(s3, tmp_path / "here", "--devices", "2", "--steps", "10", gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "rank 1 on h2 was lost: it was killed by SIGKILL" in ended.stderr
    assert "resumed     after step" in ended.stdout
    with over_ssh(s3, tmp_path / "here", "--devices", "1", "--resume", "--steps", "16", on="h2") as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(s3, "run", undisturbed)


def test_ranks_that_each_have_a_part_of_the_model(s3: S3, undisturbed: Ended, tmp_path: Path) -> None:
    """Each on a host with a disk of its own, as torchrun starts them; stopped, and resumed with the parts exchanged."""
    plan = tmp_path / "plan.toml"
    plan.write_text(SHARDED)
    by_hand(s3, tmp_path, [0, 1], "--plan", str(plan), "--steps", "7", "--checkpoint-every", "2")
    by_hand(s3, tmp_path, [1, 0], "--resume", "--steps", "16")
    assert_same(s3, "run", undisturbed)


def by_hand(s3: S3, here: Path, hosts: list[int], *words: str) -> None:
    """A rank on each host; what a host writes to its temporary folder no other sees."""
    own = here / "own"
    own.mkdir(exist_ok=True)
    first = s3.hosts.hosts[hosts[0]].address
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": first, "MASTER_PORT": "29531", "PYTHONPATH": str(JOBS)}
    shared |= {"TMPDIR": str(own), **s3.variables}
    processes = []
    for rank, number in enumerate(hosts):
        alone = ["sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$@"', "sh"]
        command = [*alone, sys.executable, "-m", "shoal", "run", JOB, "--out", f"s3://{BUCKET}/run", *words]
        variables = {**unlaunched(os.environ), **shared, "RANK": str(rank)}
        with (here / f"said-{rank}").open("wb") as file:
            started = subprocess.Popen(s3.hosts.hosts[number].command(command), env=variables, stdout=file, stderr=file)
        processes.append(started)
    try:
        codes = [process.wait(LIMIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "".join((here / f"said-{rank}").read_text() for rank in range(2))
    assert list(own.iterdir()) == []


def test_a_bucket_that_is_not_there(s3: S3, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "run", JOB, "--devices", "1", "--out", "s3://nowhere/run"]
    with start_command(command, tmp_path, s3.variables, fresh=True) as started:
        ended = started.wait(LIMIT_SECONDS)
    assert ended.code != 0
    assert "s3://nowhere/run" in ended.stderr.split("error")[-1], ended.stderr


def test_commands_that_read_a_run_there(s3: S3, undisturbed: Ended, tmp_path: Path) -> None:
    """Trained from Python; then each command, which writes in its own folder and leaves the address as it is."""
    at, program = f"s3://{BUCKET}/run", tmp_path / "program.py"
    program.write_text(
        "import fsspec, hashlib, shoal, subprocess, sys\n"
        "def there():\n"
        "    files = fsspec.filesystem('s3', skip_instance_cache=True)\n"
        f"    return {{path: files.cat_file(path) for path in files.find('{BUCKET}/run')}}\n"
        f"run = shoal.run({JOB!r}, exact=True, devices=2, out={at!r})\n"
        f"assert run.out == {at!r} and run.result['status'] == 'completed', run\n"
        "before = there()\n"
        "assert before\n"
        "def shoal_(*words):\n"
        "    ended = subprocess.run([sys.executable, '-m', 'shoal', *words], capture_output=True, text=True)\n"
        "    assert ended.returncode == 0, (words, ended)\n"
        "    print(ended.stdout)\n"
        f"for words in ('report', 'watch', 'doctor', 'export'): shoal_(words, {at!r})\n"
        f"for words in ('evaluate', 'predict'): shoal_(words, {JOB!r}, {at!r})\n"
        f"weights = shoal.weights_sha256(shoal.load({at!r}))\n"
        "assert weights == shoal.weights_sha256(shoal.load('export')) == run.result['weights_sha256']\n"
        "assert there() == before\n"
        f"shoal_('verify', {JOB!r}, '--devices', '2', '--steps', '1', '--out', 's3://{BUCKET}/verified')\n"
    )
    variables = {"PYTHONPATH": str(JOBS), **s3.variables}
    with start_command([sys.executable, str(program)], tmp_path, variables, cwd=tmp_path, fresh=True) as started:
        said = started.wait(LIMIT_SECONDS).expect(0).stdout
    assert f"{at}: completed after step 16" in said
    assert f"written            s3://{BUCKET}/verified/certificate.json" in said
    assert all((tmp_path / name).exists() for name in ("report.html", "export", "predictions.npz"))
    assert_same(s3, "run", undisturbed)
