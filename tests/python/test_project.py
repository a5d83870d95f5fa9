"""A copy of the project template: by path, by name, its own test, and resumes over another configuration and module."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launching import EXAMPLES, Run, run, start_command


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES / "project", tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))


def test_by_path_by_name_and_with_other_code(project: Path) -> None:
    by_path = Run("src/flowers/train.py", project / "by-path", 1, True, settings={"epochs": 1}, cwd=project)
    config = ("--config", "configs/small.yaml")
    by_name = Run("flowers.train:job", project / "by-name", 2, True, arguments=config, cwd=project)
    hashes = [run(one).expect(0).result["weights_sha256"] for one in (by_path, by_name)]
    assert hashes[0] == hashes[1]
    (project / "configs" / "small.yaml").write_text("epochs: 1\nlr: 0.3\n", encoding="utf-8")
    resumed = Run("flowers.train", project / "by-name", 2, arguments=("--resume", *config), cwd=project)
    assert "lr: 0.1 -> 0.3, from configs/small.yaml" in run(resumed).fails(2).message.given
    (project / "src" / "flowers" / "unused.py").write_text("VALUE = 1\n", encoding="utf-8")
    nets = project / "src" / "flowers" / "nets.py"
    nets.write_text(nets.read_text(encoding="utf-8").replace("ReLU", "GELU"), encoding="utf-8")
    resumed = Run("flowers.train", project / "by-path", 2, arguments=("--resume",), cwd=project)
    assert run(resumed).fails(2).message.given == "other code in flowers/nets.py: net"


def test_a_module_that_python_loads_before_shoal(project: Path) -> None:
    (project / "sitecustomize.py").write_text("import patches\n", encoding="utf-8")
    (project / "patches.py").write_text("VALUE = 1\n", encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))
    first = Run("src/flowers/train.py", project / "run", cwd=project, environment={"PYTHONPATH": path}, fresh=True)
    run(first).expect(0)
    (project / "patches.py").write_text("VALUE = 2\n", encoding="utf-8")
    resumed = run(replace(first, arguments=("--resume",)))
    assert resumed.fails(2).message.given == "other code in patches.py: (other lines)"


@pytest.mark.slow
def test_its_own_test(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with start_command(command, project / "run", cwd=project, fresh=True) as started:
        assert "1 passed" in started.wait().expect(0).stdout
