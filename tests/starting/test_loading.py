"""What a process has loaded when it answers, and what it has of the one that started it: interpreters of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import forks
from tests.unit.test_house import ROOT, _values
from tests.usual import parametrize


def modules_after(arguments: list[str]) -> set[str]:
    code = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"try: code = main({arguments!r})\nexcept SystemExit as stop: code = stop.code or 0\n"
        "print('\\n', code, *(m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    code_text, *loaded = run.stdout.splitlines()[-1].split()
    assert code_text in ("0", "2")
    return set(loaded)


@parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join, usual=["run --help"])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert modules_after(arguments) == set()


def test_a_mistake_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a_job.py").write_text("")
    assert not {"torch", "numpy"} & modules_after(["run", str(tmp_path / "a_job.py"), "--precision", "fp8"])


def test_a_setting_without_effect_is_told_in_one_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[layout]\ndata = 2\n[server]\nmode = "asynchronous"\nstaleness = 3\n', encoding="utf-8")
    job = tmp_path / "job.py"
    job.write_text("def job():\n    raise SystemExit(3)\n", encoding="utf-8")
    command = [sys.executable, "-m", "shoal", "run", str(job), "--plan", str(plan), "--out", str(tmp_path / "out")]
    found = forks.run(command, timeout=60)
    assert "warning: server.staleness = 3: no effect" in found.stderr
    assert "SettingWarning" not in found.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "shoal", "run", "--help"]
        run = subprocess.run(command, check=False, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_values_load_without_torch() -> None:
    """The contract sees this package's imports; this also sees those of the packages it imports."""
    names = [*_values(), "shoal.plans.accounting.rank"]
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which other systems lack")
def test_memory_of_the_host_is_not_that_of_the_program_that_started_this_one() -> None:
    program = "import torch; from shoal.training.observer import peak_memory_bytes as p; print(p(torch.device('cpu')))"
    held = np.ones(2**27)  # 1 GiB
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert 2**26 < int(found.stdout) < held.nbytes


def test_a_call_from_python_needs_torch_for_nothing_but_its_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def job(lr: float = 0.1): ...\n", encoding="utf-8")
    code = (
        "import sys, shoal\nfor call in (shoal.run, shoal.plan):\n"
        f"    try: call({str(job)!r}, devcies=2)\n    except shoal.ShoalError as error: print(error)\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.count("devcies is no option of shoal.") == 2
    assert found.stdout.splitlines()[-1] == "[]"
