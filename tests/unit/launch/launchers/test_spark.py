"""What would be asked of Spark, and the Java that it needs; on real Spark: tests/engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import CommandError, LaunchError
from shoal.launch.launchers.base import Submission
from shoal.launch.launchers.spark import _refuse_without_java, render


def submission(options: str = "") -> Submission:
    return Submission(("run", "job.py", "--out", "/runs/a"), "job", Path("/runs/a"), Path("/job"), 2, options)


def test_a_dry_run_names_master_stage_and_command() -> None:
    text = render(submission("master=local-cluster[2,1,1024],threads=2"))["spark"]
    assert "master:        local-cluster[2,1,1024]" in text
    assert "2 tasks, 2 thread(s) each" in text
    assert "shoal run job.py --out /runs/a" in text
    with pytest.raises(CommandError, match="did you mean 'master'"):
        render(submission("mastr=yarn"))


def java(folder: Path, version: str) -> None:
    (folder / "bin").mkdir()
    program = folder / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)


def test_no_java(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="there is no Java here") as caught:
        _refuse_without_java({"PATH": str(tmp_path)})
    assert "version 17 or newer" in caught.value.remedy
    with pytest.raises(LaunchError, match="JAVA_HOME="):
        _refuse_without_java({"JAVA_HOME": str(tmp_path)})


@pytest.mark.parametrize(("version", "old"), [("1.8.0_402", True), ("11.0.2", True), ("17.0.15", False), ("21", False)])
def test_an_old_java(version: str, old: bool, tmp_path: Path) -> None:
    java(tmp_path, version)
    if not old:
        _refuse_without_java({"JAVA_HOME": str(tmp_path)})
        return
    with pytest.raises(LaunchError, match="Spark 4 does not support this version"):
        _refuse_without_java({"JAVA_HOME": str(tmp_path)})
