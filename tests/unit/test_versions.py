"""The versions of torch that scripts/test-versions would install are those that pyproject.toml promises."""

import subprocess
import tomllib

from tests.unit.test_house import ROOT


def test_oldest_and_newest() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (bound,) = [need.removeprefix("torch>=") for need in needs if need.startswith("torch>=")]
    command = ["bash", str(ROOT / "scripts" / "test-versions"), "--dry-run"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"oldest: torch=={bound}.*\n" in said
    assert f"newest: torch>={bound}\n" in said
