"""shoal run --on spark, on real Spark: the run is the undisturbed one to the bit, and data come from a DataFrame."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.engines import spark_session
from tests.engines.choice import needs
from tests.engines.same_run import assert_same
from tests.engines.spark_session import FRAME_JOB, MASTER, QUIET, SESSION
from tests.engines.wrong_table import note
from tests.launching import JOBS, Ended, Gate, Run, Started, run, start, start_command

pytestmark = [*needs("spark", spark_session.unavailable), pytest.mark.timeout(400)]

JOB = JOBS / "tiny.py"
LIMIT_SECONDS = 200.0


def on_spark(out: Path, master: str = MASTER, **environment: str) -> Run:
    words = ("--on", f"spark:master={master}", "--checkpoint-every", "3")
    return Run(JOB, out, 2, True, words, environment={**QUIET, **environment}, fresh=True, restarts=5)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def executor(started: Started) -> int:
    """The Java process above rank 1: its worker's daemon's parent."""
    pid = started.workers()[1]
    while b"java" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
        pid = parent(pid)
    return pid


@pytest.mark.parametrize("which", ["rank", "executor"])
def test_a_lost_rank(which: str, undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_spark(tmp_path / "run", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        os.kill(started.workers()[1] if which == "rank" else executor(started), signal.SIGKILL)
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(ended.out, undisturbed)
    assert ended.result["resumed_from"] >= 3
    assert ended.result["restarts"] >= 1


def test_a_signal_saves_and_ends_and_another_start_goes_on(undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_spark(tmp_path / "run", "local[2]", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGTERM)
        time.sleep(2.0)  # the tasks are told by the driver
        gate.open()
        ended = started.wait(LIMIT_SECONDS).expect(75)
    run(Run(JOB, ended.out, 2, True, ("--resume",))).expect(0)
    assert_same(ended.out, undisturbed)


def test_nothing_is_left_of_a_killed_driver(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    with start(on_spark(tmp_path / "run", "local[2]", **gate.environment)) as started:
        started.until(lambda: gate.reached(2), "the gate", LIMIT_SECONDS)
        started.send(signal.SIGKILL)
        started.process.wait()
        deadline = time.monotonic() + 30
        while started.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not started.processes()


def test_a_range_takes_what_there_is(undisturbed: Ended, tmp_path: Path) -> None:
    words = ("--devices", "1:4", "--on", "spark:master=local[2]")
    with start(Run(JOB, tmp_path / "run", None, True, words, environment=QUIET, fresh=True)) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert_same(ended.out, undisturbed)
    assert ended.result["world_size"] == 2


def test_no_room_for_all_ranks(tmp_path: Path) -> None:
    with start(on_spark(tmp_path / "run", "local[1]")) as started:
        said = started.wait(LIMIT_SECONDS).expect(2).stderr
    assert "2 ranks on Spark (local[1])" in said
    assert "there is room for 1" in said


def test_without_java(tmp_path: Path) -> None:
    began = time.monotonic()
    with start(on_spark(tmp_path / "run", JAVA_HOME=str(tmp_path))) as started:
        said = started.wait(LIMIT_SECONDS).expect(2).stderr
    note("no Java", began, said)
    assert "there is no Java here" in said
    assert f"JAVA_HOME={tmp_path}" in said


def test_training_from_a_data_frame_in_a_session_of_the_users_own(tmp_path: Path) -> None:
    """100,000 rows written once; two ranks read them by sample id, and train what they train from memory."""
    (tmp_path / "frame_job.py").write_text(FRAME_JOB)
    rows, out = str(tmp_path / "rows"), tmp_path / "run"
    program = tmp_path / "session.py"
    program.write_text(
        SESSION + "import shoal, pyspark.sql.functions as F\n"
        "columns = [F.sin(F.col('id') * k + k).cast('float') for k in range(1, 5)]\n"
        "frame = spark.range(0, 100_000, 1, 3).select('id', F.array(*columns).alias('x'))\n"
        "y = (F.col('x')[0] + F.col('x')[1] > F.col('x')[2]).cast('long').alias('y')\n"
        f"data = shoal.from_spark(frame.select('id', 'x', y), {rows!r})\n"
        f"assert len(shoal.from_spark(frame.select('id', 'x', y), {rows!r})) == len(data) == 100_000\n"
        f"run = shoal.run('frame_job.py', devices=2, out={str(out)!r}, on='spark', folder={rows!r}, exact=True)\n"
        "print('accuracy', run.result['metrics']['accuracy'], spark.range(3).count())\n"
        "try:\n"
        f"    shoal.from_spark(frame, {rows!r})\n"
        "except shoal.ShoalError as error:\n"
        "    print(error.conflict)\n"
        "spark.stop()\n"
    )
    with start_command([sys.executable, str(program)], out, QUIET, cwd=tmp_path, fresh=True) as started:
        ended = started.wait(LIMIT_SECONDS).expect(0)
    assert "holds 100000 rows with columns id, x, y" in ended.stdout
    ids = [sample["id"] for sample in __import__("shoal").Parquet(rows).__getitems__(range(100_000))]
    assert ids == list(range(100_000))
    memory = run(Run(tmp_path / "frame_job.py", tmp_path / "memory", 2, exact=True))
    assert ended.result["metrics"] == memory.expect(0).result["metrics"]
    assert ended.result["sample_digest"] == memory.result["sample_digest"]
    assert ended.result["metrics"]["accuracy"] > 0.9


def test_spark_submit(undisturbed: Ended, tmp_path: Path) -> None:
    program = tmp_path / "submitted.py"
    program.write_text(
        f"import shoal\nout = {str(tmp_path / 'run')!r}\n"
        f"run = shoal.run({str(JOB)!r}, devices=2, exact=True, out=out, on='spark')\n"
        "print('ended', run.result['status'])\n"
    )
    submit = Path(sys.executable).with_name("spark-submit")
    command = [str(submit), "--master", "local[2]", "--conf", "spark.ui.enabled=false", str(program)]
    variables = {**QUIET, "PYSPARK_PYTHON": sys.executable}
    with start_command(command, tmp_path / "run", variables, cwd=tmp_path, fresh=True) as started:
        assert "ended completed" in started.wait(LIMIT_SECONDS).expect(0).stdout
    assert_same(tmp_path / "run", undisturbed)
