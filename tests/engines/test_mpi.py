"""shoal run --on mpi, and mpirun by itself, with Open MPI's and MPICH's: the run is the undisturbed one to the bit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines import sshd
from tests.engines.choice import needs
from tests.engines.same_run import assert_same, result
from tests.launching import JOBS, Ended, Gate, Started, start_command

PROGRAMS = ("mpirun.openmpi", "mpirun.mpich")


def unavailable() -> str | None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)}: not installed; scripts/engines mpi does it" if missing else None


pytestmark = needs("mpi", unavailable)

JOB = str(JOBS / "tiny.py")
STEP = 6
SETTLING_SECONDS = 1.0  # until mpirun has handed a signal on; later, the run would only end without it
LIMIT_SECONDS = 120.0
VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(JOBS)}
# More ranks than cores.
MORE = {"mpirun.openmpi": ("--oversubscribe",), "mpirun.mpich": ()}


def shoal(out: Path, ranks: int, *words: str) -> list[str]:
    shared = ("--exact", "--devices", str(ranks), "--out", str(out))
    return [sys.executable, "-m", "shoal", "run", JOB, *shared, *words]


def on(program: str, out: Path, ranks: int, *words: str) -> list[str]:
    return shoal(out, ranks, "--on", " ".join([f"mpi:{program}", *MORE[program]]), *words)


def ranks_of(started: Started) -> dict[int, int]:
    """Process ids by rank, of processes of Python."""
    found = {}
    for pid, variables in started.processes().items():
        number = variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK"))
        if number is not None and b"shoal" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            found[int(number)] = pid
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_hosts_that_no_option_names(program: str, undisturbed: Ended, tmp_path: Path) -> None:
    """By ssh to two namespaces; mpirun has the hosts from a file of its own, as in a scheduler's allocation."""
    out = tmp_path / "run"
    with over_ssh(program, tmp_path) as own, start_command(on(program, out, 2), out, VARIABLES | own) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert ended.stdout.count("completed after step 16") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_hosts_without_a_common_temporary_folder(program: str, undisturbed: Ended, tmp_path: Path) -> None:
    """At an address, to which ranks also send how they ended; an error too, and once."""
    out, own_of = tmp_path / "run", tmp_path / "own"
    own_of.mkdir()
    at = f"file://{out}"
    with over_ssh(program, tmp_path, hides={"h2": own_of}) as own:
        variables = {**VARIABLES, **own, "SHOAL_TMP": str(own_of)}
        command = [word if word != str(out) else at for word in on(program, out, 2)]
        aside = ["sh", "-c", 'TMPDIR="$SHOAL_TMP" exec "$@"', "sh"]
        with start_command([*aside, *command], out, variables) as started:
            started.wait(LIMIT_SECONDS).expect(0)
        assert_same(out, undisturbed)
        with start_command([*aside, *command, "--resume", "--set", "batch=0"], out, variables) as started:
            said = started.wait(LIMIT_SECONDS).expect(2).output
    assert said.count("JobError") == 1, said
    assert not list(out.glob(".reports-*/*"))


@contextlib.contextmanager
def over_ssh(program: str, tmp_path: Path, **more: Any) -> Iterator[dict[str, str]]:
    """Variables by which an mpirun reaches two namespaces, for a context."""
    if (missing := sshd.unavailable()) is not None:
        pytest.skip(missing)
    file = tmp_path / "hosts"
    with sshd.started(tmp_path / "ssh", "h1", "h2", **more) as hosts:
        file.write_text("".join(f"{host.name}\n" for host in hosts.hosts.hosts))
        agent = tmp_path / "agent"
        agent.write_text(f'#!/bin/sh\nexec ssh -F {hosts.config} "$@"\n')
        agent.chmod(0o755)
        network = f"{hosts.hosts.gateway.rpartition('.')[0]}.0/24"
        own = {"OMPI_MCA_orte_default_hostfile": str(file), "OMPI_MCA_plm_rsh_agent": str(agent)}
        own |= {"OMPI_MCA_oob_tcp_if_include": network, "HYDRA_HOST_FILE": str(file)}
        yield own | {"HYDRA_LAUNCHER_EXEC": str(agent), "HYDRA_IFACE": hosts.hosts.bridge}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_launcher(program: str, ranks: int, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with start_command(on(program, out, ranks), out, VARIABLES) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)
    assert result(out)["world_size"] == ranks
    assert ended.stdout.count("completed after step 16") == 1
    assert not list(out.glob(".reports-*"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_mpirun_by_itself(program: str, undisturbed: Ended, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [shutil.which(program) or "", "-n", "2", *MORE[program], *shoal(out, 2)]
    with start_command(command, out, VARIABLES, fresh=True) as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_asked_to_stop(program: str, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    with start_command(on(program, out, 2), out, {**VARIABLES, **gate.environment}) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGTERM)
        time.sleep(SETTLING_SECONDS)
        gate.open()
        started.wait(LIMIT_SECONDS).expect(75)
    assert result(out)["status"] == "preempted"
    with start_command(on(program, out, 2, "--resume"), out, VARIABLES) as started:
        started.wait(LIMIT_SECONDS).expect(0)
    assert_same(out, undisturbed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_lost_rank_starts_again(program: str, undisturbed: Ended, tmp_path: Path) -> None:
    out, gate = tmp_path / "run", Gate(tmp_path / "gate", STEP)
    command = on(program, out, 2, "--checkpoint-every", "2")
    with start_command(command, out, {**VARIABLES, **gate.environment}) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        os.kill(ranks_of(started)[1], signal.SIGKILL)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "all ranks start again" in ended.stderr
    assert_same(out, undisturbed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_of_the_job_is_told_once(program: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with start_command(on(program, out, 2, "--set", "batch=0"), out, VARIABLES) as started:
        ended = started.wait(LIMIT_SECONDS).expect(2)
    assert ended.output.count("JobError") == 1, ended.output


def test_a_range_is_refused(tmp_path: Path) -> None:
    command = shoal(tmp_path / "run", 2, "--on", f"mpi:{PROGRAMS[0]}")
    command[command.index("--devices") + 1] = "1:2"
    with start_command(command, tmp_path / "run", VARIABLES) as started:
        said = started.wait(LIMIT_SECONDS).expect(2).stderr
    assert "mpi is asked for one number of processes, and gives it" in said
    assert "a range is for local, torchrun, hosts, slurm, ray, spark" in said
