"""Out of memory (simulated by a limit on rows): smaller microbatches and the same training, or a clear end."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, Run, run
from tests.ranks.test_fast import FAST_TOLERANCE, furthest
from tests.sharing import Shared
from tests.usual import parametrize

pytestmark = pytest.mark.faults

JOB = str(JOBS / "faulty.py")
MODELS = ("job", "dropout", "contrastive")


@pytest.fixture(scope="module")
def roomy(shared: Shared) -> dict[str, Ended]:
    return {m: shared.run(Run(f"{JOB}:{m}", Path(), 1)) for m in MODELS}


@parametrize(
    ("devices", "rows", "memory", "model"),
    [(*simulated, model) for simulated in [(2, 4, "host"), (1, 2, "device")] for model in MODELS],
    usual=["2-4-host-dropout"],
)
def test_goes_on_with_smaller_microbatches(
    devices: int, rows: int, model: str, memory: str, roomy: dict[str, Ended], tmp_path: Path
) -> None:
    """A rank's 8 or 16 rows do not fit, 4 or one grain's 2 do. The first batch fails already: no probe succeeds."""
    variables = {"TEST_MAX_ROWS": str(rows), "TEST_MEMORY_OF": memory}
    wanted = Run(f"{JOB}:{model}", tmp_path / "run", devices, environment=variables)
    ended = run(wanted).expect(0)
    assert furthest(roomy[model], ended) <= FAST_TOLERANCE
    assert ended.result["sample_digest"] == roomy[model].result["sample_digest"]


@parametrize(("devices", "memory"), product([1, 2], ["host", "device"]), usual=["2-host"])
def test_one_grain_does_not_fit(devices: int, memory: str, tmp_path: Path) -> None:
    variables = {"TEST_MAX_ROWS": "1", "TEST_MEMORY_OF": memory}
    ended = run(Run(JOB, tmp_path / "run", devices, environment=variables)).fails(2)
    for text in ("OutOfMemoryError", "you gave", "write instead", "grains"):
        assert text in ended.stderr, text
    assert "Traceback" not in ended.output
