"""shoal run --on hosts, over a real sshd on two hosts: the run is the undisturbed one to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines import sshd
from tests.engines.choice import needs
from tests.engines.same_run import assert_same, result
from tests.engines.sshd import SshHosts
from tests.launching import JOBS, Ended, Gate, start_command

pytestmark = needs("ssh", sshd.unavailable)

JOB = str(JOBS / "tiny.py")
STEP = 6
LIMIT_SECONDS = 110.0


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with sshd.started(tmp_path_factory.mktemp("ssh"), "h1", "h2") as found:
        yield found


def run(
    hosts: SshHosts,
    out: Path,
    *words: str,
    gate: Gate | None = None,
    on: str = "h1,h2",
    devices: int | str = 2,
    job: str = JOB,
    cwd: Path | None = None,
) -> Any:
    """A context with the command on its way, as a `Started`."""
    shared = ("--exact", "--devices", str(devices), "--out", str(out), "--on", f"hosts:{on} -F {hosts.config}")
    variables = {"PYTHONPATH": f"{JOBS}:{sshd.SOURCE}", **(gate.environment if gate else {})}
    return start_command([sys.executable, "-m", "shoal", "run", job, *shared, *words], out, variables, cwd=cwd)


def test_two_hosts(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with run(hosts, out, devices=3) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert result(out)["world_size"] == 3
    assert ended.stdout.count("completed after step 16") == 1


def test_no_word_of_the_job_is_on_a_command_line(hosts: SshHosts, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, "--set", "lr=0.123", gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in started.processes()]
        of_ssh = [words for words in lines if words[0].endswith(b"ssh")]
        assert len(of_ssh) == 2
        assert not any(b"0.123" in word or b"KEY" in word for words in of_ssh for word in words)
        gate.open()
        started.wait(LIMIT_SECONDS).expect(0)


def test_asked_to_stop(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGINT)
        time.sleep(1.0)  # later, the run would only end without it
        gate.open()
        started.wait(LIMIT_SECONDS).expect(75)
    assert (result(out)["status"], result(out)["steps"]) == ("preempted", STEP + 1)
    with run(hosts, out, "--resume", on="h2,h1") as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)


def train_through_a_lost_rank(hosts: SshHosts, out: Path, gate: Gate, *words: str, **more: Any) -> None:
    """Trains to the end, while SIGKILL ends rank 1 in a step."""
    with run(hosts, out, *words, "--checkpoint-every", "2", gate=gate, **more) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "rank 1 on h2 was lost: it was killed by SIGKILL" in ended.stderr


def test_a_lost_rank_starts_all_again(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_through_a_lost_rank(hosts, out, Gate(tmp_path / "gate", STEP))
    assert_same(out, undisturbed)


def test_a_package_with_a_configuration(hosts: SshHosts, project: Path, project_alone: Ended, tmp_path: Path) -> None:
    """By path with a lost rank, by name, and a resume with another value."""
    config, by_path, by_name = ("--config", "configs/small.yaml"), project / "by-path", project / "by-name"
    gate = Gate(tmp_path / "gate", STEP)
    train_through_a_lost_rank(hosts, by_path, gate, *config, job="src/flowers/train.py", cwd=project)
    assert_same(by_path, project_alone)
    with run(hosts, by_name, *config, job="flowers.train:job", cwd=project) as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(by_name, project_alone)
    (project / "configs" / "small.yaml").write_text("lr: 0.3\nepochs: 2\n", encoding="utf-8")
    with run(hosts, by_name, *config, "--resume", job="flowers.train:job", cwd=project) as started:
        ended = started.wait(LIMIT_SECONDS).fails(2)
    assert "lr: 0.1 -> 0.3, from configs/small.yaml" in ended.message.given
    assert_same(by_name, project_alone)


def test_a_host_whose_cable_is_out_is_named(hosts: SshHosts, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, "--checkpoint-every", "2", "--max-restarts", "0", gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        hosts.hosts[1].crash()
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(69)
    assert "h2" in ended.stderr.split("error")[-1]


@pytest.mark.parametrize("lost", [0, 1])
def test_of_a_range_a_lost_host_is_left_out(lost: int, hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, "--checkpoint-every", "2", devices="1:2", gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        hosts.hosts[lost].cut()
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert f"note: h{lost + 1} is skipped: 1 of 2 processes" in ended.stderr
    assert result(out)["world_size"] == 1
    assert_same(out, undisturbed)


def test_hosts_of_a_range_that_do_not_answer_at_the_start(hosts: SshHosts, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    hosts.hosts[0].cut()
    with run(hosts, out, devices="1:2") as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "note: h1 is skipped: 1 of 2 processes (" in ended.stderr
    assert_same(out, undisturbed)
    with run(hosts, tmp_path / "other", on="nowhere,h2", devices="1:2") as started:
        assert "Could not resolve hostname nowhere" in started.wait(LIMIT_SECONDS).expect(2).stderr


HEAVY = """
import torch
import shoal

def job():
    data = torch.utils.data.TensorDataset(torch.randn(1024, 1000), torch.zeros(1024, dtype=torch.long))
    return shoal.Job(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(4))),
        loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=data,
        global_batch=512,
        length=shoal.Steps(2),
    )
"""


def test_the_hosts_are_asked_what_they_have_and_planned_for(hosts: SshHosts, tmp_path: Path) -> None:
    """A small step pays on one process of the first host; a large one on all cores of both. A lost host is an error."""
    on, out = f"hosts:h1,h2 -F {hosts.config}", tmp_path / "run"
    words = ("--plan", "auto", "--on", on, "--out")
    with start_command([sys.executable, "-m", "shoal", "run", JOB, *words, str(out)], out) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    notes = [line for line in ended.stderr.splitlines() if line.startswith("note: --plan auto")]
    cores = 2 * len(os.sched_getaffinity(0))
    assert f"one device on h1, h2 ({cores} cores): " in notes[0]
    heavy = tmp_path / "heavy.py"
    heavy.write_text(HEAVY, encoding="utf-8")
    out = tmp_path / "heavy"
    with start_command([sys.executable, "-m", "shoal", "run", str(heavy), *words, str(out)], out) as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert result(out)["world_size"] == cores
    hosts.hosts[1].crash()
    lost = str(tmp_path / "lost")
    with start_command([sys.executable, "-m", "shoal", "run", JOB, *words, lost], tmp_path / "l") as started:
        assert "host h2" in started.wait(LIMIT_SECONDS).expect(2).stderr
    assert not list(tmp_path.glob("lost*"))


def test_the_command_is_killed_and_no_rank_is_left(hosts: SshHosts, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with run(hosts, out, gate=gate) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        os.kill(started.pid, signal.SIGKILL)
        started.process.wait()
        started.wait_until_gone()


def doctor(hosts: SshHosts, out: Path, on: str = "h1,h2") -> Any:
    """A context with `shoal doctor --hosts` on its way."""
    words = ("doctor", "--json", "--folder", str(out), "--hosts", f"{on} -F {hosts.config}")
    return start_command([sys.executable, "-m", "shoal", *words], out / "doctor")


def ports_between(ended: Ended) -> dict[str, tuple[str, str]]:
    """Severity and words of each pair of hosts."""
    told = json.loads(ended.stdout)["checks"]
    return {check["subject"]: (check["severity"], check["seen"]) for check in told if " to " in check["subject"]}


def test_the_doctor_finds_what_keeps_hosts_apart(hosts: SshHosts, tmp_path: Path) -> None:
    first, second = hosts.hosts.hosts
    with doctor(hosts, tmp_path) as started:
        told = ports_between(started.wait(LIMIT_SECONDS).expect(0))
    assert {pair: severity for pair, (severity, _) in told.items()} == {"h1 to h2": "ok", "h2 to h1": "ok"}
    assert f"{second.address} is reached at ports " in told["h1 to h2"][1]
    # What h1 sends to h2 is refused on the way; ssh comes from a third host.
    route = ["ip", "route", "add", "prohibit", second.address]
    subprocess.run(first.command(route), check=True)
    try:
        with doctor(hosts, tmp_path) as started:
            told = ports_between(started.wait(LIMIT_SECONDS).expect(1))
    finally:
        subprocess.run(first.command([*route[:2], "del", *route[3:]]), check=True)
    assert told["h1 to h2"][0] == "error"
    assert f"{second.address} is not reached at ports " in told["h1 to h2"][1]
    with doctor(hosts, tmp_path, on="h1,nowhere") as started:
        assert "host nowhere" in started.wait(LIMIT_SECONDS).expect(2).stderr
