"""Bad input: exit code 2, what was given, what it conflicts with, what to write instead; and nothing is overwritten."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.launching import JOBS, Run, run
from tests.sharing import Shared
from tests.usual import parametrize

from shoal.runs.directory import FOLDER as GENERATIONS

pytestmark = pytest.mark.faults

BAD = str(JOBS / "bad.py")
FILES = {
    "typo.toml": "[layout]\ndta = 2\n",
    "type.toml": '[layout]\ndata = "two"\n',
    "value.toml": '[collectives]\nall_reduce = "carrier pigeon"\n',
    "zero.toml": "[layout]\ndata = 0\n",
    "schema.toml": "schema = 99\n",
    "section.toml": "layout = 3\n",
    "broken.toml": "[layout\n",
    "compression.toml": '[collectives]\ncompression = "int8"\n[execution]\nexact = true\n',
    "stages.toml": '[layout]\npipeline = 2\n[pipeline]\nschedule = "interleaved_1f1b"\n',
    "two.toml": "[layout]\ndata = 2\n",
    "three.toml": "[layout]\ndata = 3\n",
    "syntax.py": "def job(:\n",
    "import.py": "import no_such_module_anywhere\n",
    "nothing.py": "x = 1\n",
    "required.py": "def job(lr: float):\n    return None\n",
    "job.txt": "def job(): ...\n",
    "notes.txt": "not a directory\n",
}


@dataclass(frozen=True)
class Case:
    """A command with one mistake, `{here}` being its working directory; `said` must be in the message."""

    name: str
    said: str
    job: str = BAD
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    out: str = "{here}/new"
    devices: int | None = None


def job(function: str, said: str, devices: int | None = None) -> Case:
    return Case(function, said, f"{BAD}:{function}", devices=devices)


def option(name: str, said: str, *arguments: str) -> Case:
    return Case(name, said, arguments=arguments)


def plan(name: str, said: str) -> Case:
    return Case(f"plan {name}", said, arguments=("--plan", f"{{here}}/{name}.toml"))


def resume(name: str, said: str, *arguments: str, function: str = "job") -> Case:
    return Case(f"resume {name}", said, f"{BAD}:{function}", ("--resume", *arguments), out="{here}/old")


CASES = [
    # The command line, a plan, a job file: judged before torch is loaded.
    plan("typo", "did you mean 'data'"),
    plan("type", "layout.data"),
    plan("value", "all_reduce"),
    plan("zero", "layout.data"),
    plan("schema", "schema"),
    plan("section", "layout"),
    plan("broken", "TOML"),
    plan("missing", "cannot be read"),
    plan("compression", "collectives.compression"),
    plan("stages", "stages_per_rank = 2"),
    Case("plan is a directory", "cannot be read", arguments=("--plan", "{here}")),
    Case("plan and other devices", "world of 2", arguments=("--plan", "{here}/two.toml"), devices=3),
    option("unknown option", "--device", "--device", "2"),
    option("zero devices", "--devices", "--devices", "0"),
    option("negative devices", "--devices", "--devices", "-2"),
    option("devices in words", "--devices", "--devices", "two"),
    option("unknown precision", "did you mean 'bf16'", "--precision", "bf17"),
    option("zero steps", "--steps", "--steps", "0"),
    option("steps in words", "--steps", "--steps", "all"),
    option("zero checkpoint interval", "--checkpoint-every", "--checkpoint-every", "0"),
    option("negative workers", "--workers", "--workers", "-1"),
    option("set without a value", "name=value", "--set", "lr"),
    option("set without a name", "name=value", "--set", "=3"),
    option("set an unknown name", "did you mean 'lr'", "--set", "lrr=0.2"),
    option("set a wrong type", "lr", "--set", "lr=fast"),
    Case("no job file", "no such file", "{here}/missing.py"),
    Case("job is a directory", "directory", "{here}"),
    Case("job file of another kind", ".py", "{here}/job.txt"),
    Case("syntax error", "SyntaxError", "{here}/syntax.py"),
    Case("import error", "no_such_module_anywhere", "{here}/import.py"),
    Case("no job function", "no function", "{here}/nothing.py"),
    Case("required parameter", "no default", "{here}/required.py"),
    Case("out is a file", "file", out="{here}/notes.txt"),
    Case("out holds a run", "--resume", out="{here}/old"),
    Case("out holds a run, two devices", "--resume", out="{here}/old", devices=2),
    Case("resume of nothing", "no run", arguments=("--resume",)),
    Case("RANK alone", "WORLD_SIZE", environment={"RANK": "0"}),
    Case(
        "RANK beyond WORLD_SIZE",
        "RANK=2",
        environment={"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
    ),
    Case(
        "RANK in words",
        "RANK",
        environment={"RANK": "first", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
    ),
    Case("MASTER_PORT in words", "MASTER_PORT", environment={"MASTER_PORT": "http"}, devices=2),
    Case("MASTER_PORT in use", "MASTER_PORT", environment={"MASTER_PORT": "{busy}"}, devices=2),
    Case(
        "a plan for 2 in a world of 1",
        "world",
        arguments=("--plan", "{here}/two.toml"),
        environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"},
    ),
    # The job: judged when its parts are built, or at the first step.
    job("no_such_function", "no function"),
    job("returns_nothing", "shoal.Job"),
    job("raises", "the job function fails"),
    job("no_batch", "global_batch=0"),
    job("wrong_fields", "clip_norm"),
    job("module_instead_of_function", "lambda"),
    job("empty_data", "0 samples"),
    job("empty_eval", "0 samples"),
    job("unequal_data", "first dims"),
    job("no_dataset", "int"),
    job("loader_of_rank_batches", "write batch_size=16"),
    job("data_function_raises", "no such disk"),
    job("data_raises", "lost disk"),
    job("data_ragged", "collat"),
    job("collate_raises", "label"),
    job("data_not_tensors", "collat"),
    job("wrong_shape", "mat1 and mat2"),
    job("wrong_dtype", "dtype"),
    job("wrong_labels", "IndexError"),
    job("bare_mean", "weight"),
    job("total_per_sample", "one floating-point number"),
    job("weight_per_sample", "weight"),
    job("weight_of_text", "weight"),
    job("without_gradient", "gradient"),
    job("integer_loss", "floating-point"),
    job("no_optimizer", "str"),
    job("optimizer_raises", "learning rate"),
    job("foreign_tensors", "1 tensors"),
    job("model_raises", "no such architecture"),
    job("no_module", "NoneType"),
    job("nothing_to_train", "nothing to train"),
    job("metric_of_one_number", "weight"),
    job("metric_raises", "accuracy"),
    job("schedule_nan", "nan"),
    job("schedule_raises", "ZeroDivisionError"),
    job("stream_of_epochs", "epochs"),
    job("three_grains", "1 to 3", devices=4),
    job("bare_mean", "weight", devices=2),
    job("data_raises", "lost disk", devices=2),
    # A resume of another run than the one that is there.
    resume("with another setting", "lr", "--set", "lr=0.2"),
    resume("with another model", "wide", "--set", "wide=true"),
    resume("with another job", "function", function="other_optimizer"),
    resume("with a bad plan", "did you mean 'data'", "--plan", "{here}/typo.toml"),
    resume("with zero devices", "--devices", "--devices", "0"),
    resume("with an unknown setting", "lrr", "--set", "lrr=1"),
]
NAMES = [f"{case.name}{f' on {case.devices}' if case.devices else ''}" for case in CASES]

# One of each kind of mistake; where only the value differs, what is said is tested without a process too.
USUAL = (
    "plan typo",
    "plan value",
    "plan broken",
    "plan missing",
    "plan stages",
    "plan and other devices on 3",
    "unknown option",
    "devices in words",
    "set an unknown name",
    "set a wrong type",
    "no job file",
    "syntax error",
    "no job function",
    "out holds a run",
    "out holds a run, two devices on 2",
    "resume of nothing",
    "RANK alone",
    "MASTER_PORT in use on 2",
    "a plan for 2 in a world of 1",
    "returns_nothing",
    "raises",
    "wrong_fields",
    "empty_data",
    "data_raises",
    "data_ragged",
    "wrong_shape",
    "total_per_sample",
    "without_gradient",
    "model_raises",
    "nothing_to_train",
    "metric_raises",
    "schedule_nan",
    "three_grains on 4",
    "bare_mean on 2",
    "resume with another model",
    "resume with a bad plan",
)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder; but for the logs of the command itself, which lie beside its --out.

    The number of a start of ranks is not looked at either: it is used once, whatever comes of the start.
    """
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix not in (".stdout", ".stderr")]
    files = [path for path in files if path.parent.name != GENERATIONS]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def old_run(shared: Shared) -> Path:
    return shared.run(Run(BAD, Path(), 1)).out


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@parametrize("name", NAMES, usual=USUAL)
def test_three_beats_and_exit_code_2(name: str, old_run: Path, busy_port: int, tmp_path: Path) -> None:
    case = CASES[NAMES.index(name)]
    here = tmp_path / "here"
    shutil.copytree(old_run, here / "old")
    for file, content in FILES.items():
        (here / file).write_text(content, encoding="utf-8")

    def fill(text: str) -> str:
        return text.format(here=here, busy=busy_port)

    wanted = Run(
        fill(case.job),
        Path(fill(case.out)),
        case.devices,
        arguments=tuple(map(fill, case.arguments)),
        environment={variable: fill(value) for variable, value in case.environment.items()},
        cwd=here,
    )
    before = digests(here)
    ended = run(wanted).fails(2)
    message = ended.message
    assert all(len(part) > 1 for part in (message.given, message.conflict, message.remedy)), ended.stderr
    assert "Traceback" not in ended.output
    assert "InternalError" not in ended.stderr
    assert case.said in ended.stderr, ended.stderr
    if name.startswith("metric_"):  # found before the first step, not after the first epoch
        assert "step 1" not in ended.output
    # New files may appear where a run had begun; what was there stays as it was.
    assert before.items() <= digests(here).items()


def test_the_cases_are_many_and_apart() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 30


def test_the_job_without_a_mistake_runs(old_run: Path) -> None:
    """What the cases above change is what makes them fail."""
    assert (old_run / "result.json").exists()
    assert len(digests(old_run)) >= 6


def test_a_refused_command_leaves_no_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(Run(f"{BAD}:no_optimizer", out, 1)).fails(2)
    assert not out.exists()


def test_after_a_failed_first_step_the_same_directory_serves(tmp_path: Path) -> None:
    """A mistake mended is not a run to overwrite."""
    out = tmp_path / "run"
    run(Run(f"{BAD}:bare_mean", out, 1)).fails(2)
    run(Run(BAD, out, 1)).expect(0)
