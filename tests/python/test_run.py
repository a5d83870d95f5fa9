"""shoal.run from programs, as users write them: the command's bits, its errors, its recovery and its stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Gate, Run, Started, run, start_command
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.launch.signals import BURST_SECONDS

TINY = JOBS / "tiny.py"
PATHS = {"PYTHONPATH": str(JOBS)}
# A script whose own functions make the job: no file that a rank could load by its name has it.
SCRIPT = """
import functools, json, signal, sys
import shoal, tiny

def own(lr: float = 0.1) -> shoal.Job:
    return tiny.mlp(samples=SAMPLES, batch=16, steps=STEPS, lr=lr, loss=loss)

def loss(model, batch):
    return shoal.cross_entropy(model(batch[0]), batch[1])

SAMPLES, STEPS = 203, 16
"""


def script(folder: Path, body: str, head: str = SCRIPT) -> Path:
    path = folder / "trains.py"
    path.write_text(head + 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(body).strip(), "    "))
    return path


def begin(
    folder: Path, body: str, environment: dict[str, str] | None = None, head: str = SCRIPT, *, fresh: bool = False
) -> Any:
    """A running program; its runs are in folders of its own."""
    command = [sys.executable, str(script(folder, body, head))]
    return start_command(command, folder / "run", {**PATHS, **(environment or {})}, cwd=folder, fresh=fresh)


def done(folder: Path, body: str, code: int = 0, **more: Any) -> Ended:
    with begin(folder, body, **more) as started:
        ended: Ended = started.wait().expect(code)
    return ended


def told(ended: Ended) -> Any:
    """What the program printed last, as JSON."""
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def undisturbed(shared: Shared) -> Ended:
    return shared.run(Run(TINY, Path(), 1, exact=True))


def test_jobs_of_every_kind_have_the_commands_bits(undisturbed: Ended, tmp_path: Path) -> None:
    body = f"""
    runs = [
        shoal.run(own, devices=2, exact=True),
        shoal.run(own(), devices=1, exact=True, out="object"),
        shoal.run(lambda lr=0.1, steps=3: own(lr), lr=0.1, devices=3, exact=True, out="lambda"),
        shoal.run(tiny.job, exact=True, devices=1, settings={{"lr": 0.1}}, out="imported"),
        shoal.run({str(TINY)!r}, exact=True, devices=2, samples=203, out="file"),
    ]
    assert shoal.weights_sha256(runs[-1].model().state_dict()) == runs[-1].result["weights_sha256"]
    print(json.dumps([[str(run.out), run.result["weights_sha256"], run.result["world_size"]] for run in runs]))
    """
    ended = done(tmp_path, body)
    outs, hashes, sizes = zip(*told(ended), strict=True)
    assert outs == ("runs/trains-own", "object", "lambda", "imported", "file")
    assert set(hashes) == {undisturbed.result["weights_sha256"]}
    assert sizes == (2, 1, 3, 1, 2)
    assert "step 16/16" in ended.stdout
    assert "trains.py:own -> runs/trains-own" in ended.stdout
    imported = json.loads((tmp_path / "imported" / "job.json").read_text())
    assert {name: imported[name] for name in ("file", "function", "given")} == {
        "file": str(TINY),
        "function": "job",
        "given": {"lr": {"value": 0.1}},
    }


def test_a_run_as_a_value(tmp_path: Path) -> None:
    body = """
    job = own(lr=0.1)
    run = shoal.run(job, out="out", exact=True, steps=4, checkpoint_every=2)
    weights = shoal.weights_sha256(run.model().state_dict()) == run.result["weights_sha256"]
    earlier = shoal.weights_sha256(shoal.Run("out", own).model(step=2).state_dict()) != run.result["weights_sha256"]
    try:
        shoal.Run("out").model()
    except shoal.ShoalError as error:
        print(error)
    print(run)
    print(run._repr_html_())
    print(json.dumps([weights, earlier, [record.step for record in run.records]]))
    """
    ended = done(tmp_path, body)
    assert told(ended) == [True, True, [1, 2, 3, 4]]
    assert (
        "its job was of trains.py, and a run directory is data: no code that it names is run; "
        "give the job: shoal.Run('out', 'file.py:job')" in ended.stdout
    )
    assert "<shoal.Run 'out': status='completed', steps=4" in ended.stdout
    assert "<th>status</th><td>completed</td>" in ended.stdout


def test_a_killed_rank_of_a_job_without_a_file(undisturbed: Ended, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 7)
    body = """
    run = shoal.run(own, devices=2, exact=True, checkpoint_every=4, out="out")
    print(json.dumps(run.result))
    """
    with begin(tmp_path, body, gate.environment) as started:
        started.until(lambda: gate.reached(2), "the gate")
        os.kill(started.workers()[1], signal.SIGKILL)
        gate.open()
        ended = started.wait().expect(0)
    result = told(ended)
    assert (result["restarts"], result["resumed_from"]) == (1, 4)
    assert result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert "was lost: it was killed by SIGKILL" in ended.stderr


STOPPED = """
try:
    shoal.run(own, devices=2, exact=True, checkpoint_every=4, out="out")
except KeyboardInterrupt as stop:
    print(stop)
    print(json.dumps(shoal.Run("out").result))
"""


def stopped(folder: Path, number: int, body: str, code: int) -> Ended:
    gate = Gate(folder / "gate", 5)
    with begin(folder, body, gate.environment) as started:
        started.until(lambda: gate.reached(2), "the gate")
        started.send(number)
        _handed_on(started)
        gate.open()
        ended: Ended = started.wait().expect(code)
    return ended


def _handed_on(started: Started) -> None:
    from tests.faults.test_preempted import wait_until_handed_on

    wait_until_handed_on(started)


def test_an_interrupt_saves_and_a_resume_goes_on(undisturbed: Ended, tmp_path: Path) -> None:
    ended = stopped(tmp_path, signal.SIGINT, STOPPED, 0)
    assert (told(ended)["status"], told(ended)["steps"]) == ("preempted", 6)
    assert "its checkpoint is of step 6: resume=True, out='out' goes on" in ended.stdout
    assert "resume with: shoal.run(own, resume=True, out='out')" in ended.stdout
    # Comments, the call and the length are no change of the job.
    body = 'print(json.dumps(shoal.run(own, devices=1, resume=True, out="out").result))  # goes on'
    result = told(done(tmp_path, body))
    assert result["resumed_from"] == 6
    assert result["weights_sha256"] == undisturbed.result["weights_sha256"]


def test_another_job_is_not_resumed(tmp_path: Path) -> None:
    done(tmp_path, 'shoal.run(own, steps=2, out="out")')
    changed = SCRIPT.replace("model(batch[0])", "2 * model(batch[0])")
    body = 'shoal.run(own, resume=True, out="out", steps=4)'
    ended = done(tmp_path, body, 1, head=changed)
    assert "shoal.errors.JobMismatchError: other code in the job file: loss;" in ended.stderr
    ended = done(tmp_path, 'shoal.run(own, resume=True, out="out", steps=4)', 1, head=SCRIPT.replace("203,", "204,"))
    assert "other code in the job file: own: SAMPLES" in ended.stderr
    done(tmp_path, 'shoal.run(own, resume=True, out="out", steps=4, accept_changes=True)', head=changed)


@pytest.mark.slow
def test_sigterm_ends_the_program_after_a_checkpoint(tmp_path: Path) -> None:
    ended = stopped(tmp_path, signal.SIGTERM, 'shoal.run(own, devices=2, out="out", exact=True)', 75)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "preempted"
    assert "its checkpoint is of step 6" in ended.stderr


def test_ranks_alone_are_told_to_stop(tmp_path: Path) -> None:
    """As a scheduler may that knows their processes: the run is not done, and does not return as if it were."""
    head = SCRIPT.replace("STEPS = 203, 16", "STEPS = 203, 1000").replace(
        "    return shoal.cross", "    import os; os.kill(os.getpid(), signal.SIGTERM)\n    return shoal.cross"
    )
    ended = done(tmp_path, 'shoal.run(own, out="out")\nprint("returned")', 75, head=head)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "preempted"
    assert "returned" not in ended.stdout
    assert "the run was stopped; no checkpoint" in ended.stderr


def test_sigterm_while_the_job_is_pickled(tmp_path: Path) -> None:
    """The pickle may be of a user's data, and is removed."""
    body = """
    import os

    class Tells:
        def __reduce__(self):
            print(os.listdir(os.environ["TMPDIR"]), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return int, ()

    tells = Tells()
    shoal.run(lambda: own(tells or 0.1), out="out")
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ended = done(tmp_path, body, 130, environment={"TMPDIR": str(temporary)}, fresh=True)
    assert "['shoal-job-" in ended.stdout
    assert "the run was stopped; no checkpoint" in ended.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """While a rank waits, so that no checkpoint could be written."""
    gate = Gate(tmp_path / "gate", 5)
    with begin(tmp_path, STOPPED, gate.environment) as started:
        started.until(lambda: gate.reached(2), "the gate")
        started.send(signal.SIGINT)
        time.sleep(2 * BURST_SECONDS)
        started.send(signal.SIGINT)
        ended = started.wait().expect(0)
    assert told(ended) == {}
    assert "the run was stopped; its checkpoint is of step 4" in ended.stdout


@pytest.mark.slow
def test_an_interrupt_while_the_job_is_looked_at(tmp_path: Path) -> None:
    head = SCRIPT.replace(
        "    return tiny",
        "    import pathlib, time\n    pathlib.Path('loading').touch(); time.sleep(600)\n    return tiny",
    )
    body = """
    try:
        shoal.run(own, devices=2, out="out")
    except KeyboardInterrupt as stop:
        print(stop)
    """
    with begin(tmp_path, body, head=head) as started:
        started.until((tmp_path / "loading").exists, "the job's loading")
        started.send(signal.SIGINT)
        ended = started.wait().expect(0)
    assert "the run was stopped; no checkpoint" in ended.stdout


@pytest.mark.slow
def test_from_another_thread(undisturbed: Ended, tmp_path: Path) -> None:
    """Where Python takes no signals; with worker processes for the data. A fork has only the thread that forked."""
    body = """
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(shoal.run, own, devices=2, exact=True, workers=1).result()
    print(json.dumps(run.result))
    """
    assert told(done(tmp_path, body, fresh=True))["weights_sha256"] == undisturbed.result["weights_sha256"]


def test_an_error_is_the_commands(tmp_path: Path) -> None:
    """Of a job that raises in a rank: the same class, the same three beats."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import shoal, tiny\ndef raising(model, batch):\n    raise ValueError('seven')\n"
        "def job() -> shoal.Job:\n    return tiny.mlp(loss=raising)\n"
    )
    command = run(Run(bad, tmp_path / "command", 2, environment=PATHS)).expect(2)
    body = """
    try:
        shoal.run("bad.py", devices=2, out="out")
    except shoal.ShoalError as error:
        beats = [error.given, error.conflict, error.remedy]
        print(json.dumps([type(error).__name__, error.exit_code, error.rank, *beats, *error.__notes__]))
    """
    kind, code, rank, given, conflict, remedy, note = told(done(tmp_path, body))
    assert (kind, code) == ("UserCodeError", 2)
    said = " ".join(command.stderr.replace(str(tmp_path) + "/", "").split())
    for beat in (kind, f"rank {rank}", given, conflict, remedy):
        assert " ".join(str(beat).replace(str(tmp_path) + "/", "").split()) in said
    assert note == "traceback of the rank: out/errors"


@parametrize(
    "command",
    [["bare.py"], ["-m", "shoal", "run", "bare.py"], ["-m", "shoal", "plan", "bare.py"]],
    ids=["script", "run", "plan"],
    usual=["script"],
)
def test_a_script_without_its_guard(command: list[str], tmp_path: Path) -> None:
    """Each rank would run it anew."""
    (tmp_path / "bare.py").write_text("import shoal\nfrom tiny import job\nshoal.run('bare.py', devices=2)\n")
    started = start_command([sys.executable, *command], tmp_path / "run", PATHS, cwd=tmp_path)
    with started as process:
        ended = process.wait()
    assert ended.code
    assert "shoal.run inside of a running job" in ended.stderr
    assert '`if __name__ == "__main__":`' in " ".join(ended.stderr.split())


@pytest.mark.slow
def test_under_torchrun(undisturbed: Ended, tmp_path: Path) -> None:
    """Each process of the program has its main block, and starts one rank, of a job that no file has."""
    body = """
    run = shoal.run(own(), exact=True, workers=1)
    print(json.dumps([str(run.out), run.result["world_size"], run.result["weights_sha256"]]))
    """
    (tmp_path / "runs" / "trains").mkdir(parents=True)
    (tmp_path / "runs" / "trains" / "job.json").write_text("{}")  # of an earlier run: the ranks take the next number
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script(tmp_path, body))]
    with start_command(command, tmp_path / "run", PATHS, cwd=tmp_path) as started:
        ended = started.wait().expect(0)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert [json.loads(line) for line in lines] == [["runs/trains-2", 2, undisturbed.result["weights_sha256"]]] * 2
    assert ended.stdout.count("step 16/16") == 1


@pytest.mark.slow
def test_an_interpreter_that_is_fed(undisturbed: Ended, tmp_path: Path) -> None:
    """`python -i`: jobs of functions that have no file at all, after torch has used its threads here."""
    text = """
import torch, tiny, shoal, json
_ = (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).exp().sum()
def own(lr: float = 0.1):
    return tiny.mlp(lr=lr, loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]))

found = shoal.run(own, devices=2, exact=True)
found
print(json.dumps(found.result))
quit()
"""
    (tmp_path / "typed").write_text(text)
    command = ["bash", "-c", f"exec {sys.executable} -i < typed"]
    with start_command(command, tmp_path / "run", PATHS, cwd=tmp_path, fresh=True) as started:
        ended = started.wait().expect(0)
    assert told(ended)["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert "<shoal.Run 'runs/interpreter-own': status='completed'" in ended.stdout
    assert "Traceback" not in ended.stderr
