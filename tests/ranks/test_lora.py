"""LoRA adapters of the real package peft, trained under every layout, and exported alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.launching import JOBS, Ended, Run, run, run_all, start_command
from tests.ranks.test_relayout import ONE_THREAD, plan
from tests.usual import parametrize

import shoal

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYOUTS = {
    "data": {"layout": {"data": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "ZeRO-2": {"layout": {"shard": 2}, "shard": {"level": "gradients"}},
    "ZeRO-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "tensor": {"layout": {"tensor": 2}},
    "pipeline": {"layout": {"pipeline": 2}},
    "context": {"layout": {"context": 2}},
}
STEPS, TOKENS = 4, 192
# Relative: a step's loss rounds sums over its tokens in two orders; a weight moves by AdamW's rate of 0.01 a step.
TOLERANCE = STEPS * TOKENS**0.5 * 2.0**-22


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(trained(tmp_path_factory.mktemp("alone") / "run")).expect(0)


def trained(out: Path, *arguments: str, devices: int | None = 1, head: bool = False, exact: bool = False) -> Run:
    call = Run(f"{JOBS / 'lora.py'}:job", out, devices, exact, arguments, environment=ONE_THREAD)
    call.settings = {"head": head}
    return call


READ = """
import sys
sys.path.insert(0, {folder!r})
import lora, torch
from peft import PeftModel

model = PeftModel.from_pretrained(lora.base(), "exported")
torch.save(model.state_dict(), "read.pt")
"""


def exported(ended: Ended, folder: Path) -> dict[str, torch.Tensor]:
    """The state of the model that plain peft makes of the base and the exported adapter."""
    command = [sys.executable, "-m", "shoal", "export", str(ended.out), "-o", "exported"]
    with start_command(command, folder / "none", cwd=folder) as started:
        assert "PeftModel.from_pretrained" in started.wait(60.0).expect(0).stdout
    (folder / "read.py").write_text(READ.format(folder=str(JOBS)), encoding="utf-8")
    with start_command([sys.executable, "read.py"], folder / "none", ONE_THREAD, cwd=folder, fresh=True) as started:
        started.wait(60.0).expect(0)
    found: dict[str, torch.Tensor] = torch.load(folder / "read.pt", weights_only=True)
    return found


@parametrize("layout", LAYOUTS)
def test_a_layout_and_plain_peft(layout: str, alone: Ended, tmp_path: Path) -> None:
    """It computes what one process does, and peft reads bit for bit what was trained."""
    arguments = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    ended = run(trained(tmp_path / "run", *arguments, devices=None)).expect(0)
    for ours, theirs in zip(ended.records, alone.records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    weights, before = shoal.load(ended.out), shoal.load(alone.out)
    read = exported(ended, tmp_path)
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    for name, value in read.items():
        assert torch.equal(value, weights[name]), name
        if "lora_" not in name:
            assert torch.equal(value, before[name]), f"{name} is frozen"


def test_adapters_are_one_hash_on_one_and_three(tmp_path: Path) -> None:
    ended = run_all([trained(tmp_path / str(n), devices=n, exact=True) for n in (1, 3)])
    assert len({one.expect(0).result["weights_sha256"] for one in ended}) == 1


def test_a_head_that_is_trained_too(tmp_path: Path) -> None:
    """`modules_to_save` is in the adapter's file."""
    ended = run(trained(tmp_path / "run", head=True)).expect(0)
    read = exported(ended, tmp_path)
    weights = shoal.load(ended.out)
    (name,) = [name for name in read if "lm_head.modules_to_save" in name]
    assert torch.equal(read[name], weights[name])
    names = json.loads((ended.out / "model" / "adapter_names.json").read_text())
    assert "base_model.model.lm_head.weight" in names


@parametrize("layout", ["data", "ZeRO-3", "tensor"])
def test_an_adapter_that_was_exported_is_gone_on_from(layout: str, tmp_path: Path) -> None:
    """In any layout, with a head that is trained whole; the base is what the model's code makes it."""
    first = run(trained(tmp_path / "run", head=True)).expect(0)
    exported(first, tmp_path)
    sections = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    arguments = (*sections, "--init-from", str(tmp_path / "exported"))
    ended = run(trained(tmp_path / "more", *arguments, devices=None, head=True)).expect(0)
    assert "tensors of the adapter" in ended.output
    begun, wanted = shoal.load(ended.out, step=0), shoal.load(first.out)
    for name in wanted:
        assert torch.equal(begun[name], wanted[name]), name
