"""LoRA adapters on a base that bitsandbytes has quantized, trained under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.ranks.test_lora import LAYOUTS, TOLERANCE
from tests.ranks.test_relayout import ONE_THREAD, plan
from tests.usual import parametrize

import shoal

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'shoal[qlora]'")


def trained(
    out: Path, *arguments: str, devices: int | None = 1, exact: bool = False, **settings: bool | float | str
) -> Run:
    call = Run(f"{JOBS / 'qlora.py'}:job", out, devices, exact, arguments, environment=ONE_THREAD)
    call.settings = settings
    return call


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(trained(tmp_path_factory.mktemp("alone") / "run", targets="q_proj")).expect(0)


@parametrize("layout", ["ZeRO-2", "ZeRO-3", "tensor", "pipeline", "context"])
def test_a_layout(layout: str, alone: Ended, tmp_path: Path) -> None:
    """It computes what one process does. The quantized base is divided, and stays as it was."""
    arguments = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    ended = run(trained(tmp_path / "run", *arguments, devices=None, targets="q_proj")).expect(0)
    for ours, theirs in zip(ended.records, alone.records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    weights, before = shoal.load(ended.out), shoal.load(alone.out)
    assert set(weights) == set(before)
    packed = [name for name in weights if weights[name].dtype == torch.uint8]
    assert packed
    for name in (n for n in weights if "lora_" not in n):
        assert torch.equal(weights[name], before[name]), name
    if layout == "tensor":
        assert "mlp.down_proj: cut along its inputs" in " ".join(ended.output.split())


def test_one_hash_on_one_and_three(tmp_path: Path) -> None:
    ended = run_all([trained(tmp_path / str(n), devices=n, exact=True, nested=True) for n in (1, 3)])
    assert len({one.expect(0).result["weights_sha256"] for one in ended}) == 1
    assert "double quantization is undone" in " ".join(ended[0].output.split())
