"""The command: verdicts, explanations, certificates, and runs that demand one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import job as small
from tests.conformance.cases import mlp
from tests.launching import JOBS, Ended, Gate, Run, run, start_command
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import SettingWarning
from shoal.training.microbatch.coupling import PADS, UNPADDED
from shoal.verification import judge

pytestmark = pytest.mark.ranks


def verify(job: str, out: Path, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "shoal", "verify", str(JOBS / job), "--out", str(out), *arguments]
    with start_command(command, out) as started:
        return started.wait()


def test_a_certificate_opens_the_way_for_its_own_run_only(tmp_path: Path) -> None:
    ended = verify("tiny.py:gpt", tmp_path / "verify", "--devices", "2").expect(0)
    assert "verdict            verified" in ended.stdout
    assert "cost " in ended.stdout
    path = tmp_path / "verify" / "certificate.json"
    certificate = json.loads(path.read_text())
    assert certificate["verdict"] == "verified"
    assert certificate["plan"]["layout"]["data"] == 2
    assert {name.partition("/")[0] for name in certificate["worst"]} >= {"forward", "reduction", "update"}
    assert max(certificate["worst"].values()) <= 1.0
    assert not (tmp_path / "verify" / ".traces").exists()
    demand = ("--require-certificate", str(path), "--steps", "2")
    job = f"{JOBS / 'tiny.py'}:gpt"
    trained = run(Run(job, tmp_path / "run", 2, arguments=demand)).expect(0)
    assert len(trained.result["certificate"]) == 64
    refused = run(Run(job, tmp_path / "other", 3, arguments=demand)).expect(2)
    assert "it speaks of another run: plan.layout" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_exact_mode_is_held_to_the_bit(tmp_path: Path) -> None:
    ended = verify("tiny.py:convnet", tmp_path / "verify", "--devices", "3", "--exact").expect(0)
    assert "exact" in ended.stdout


@parametrize(
    ("job", "code", "said"),
    [
        ("ragged", 1, "a mean over tokens or samples taken for a sum"),
        ("bare", 2, "without its weight a mean cannot be put together over grains"),
        ("seeded", 1, "randomness by rank or by place in the batch"),
        ("tied_late", 2, "tensors that are not trainable parameters of the model"),
        ("unseeded", 2, "module last came out differently"),
        ("outside", 1, "do not follow from Job(seed): construct the module inside model()"),
    ],
    ids=["ragged", "bare", "seeded", "tied late", "unseeded", "outside"],
    usual=["ragged", "seeded", "unseeded"],
)
def test_mistakes_in_the_users_own_code(job: str, code: int, said: str, tmp_path: Path) -> None:
    ended = verify(f"planted.py:{job}", tmp_path / "verify", "--devices", "2")
    assert ended.code == code, ended.output
    assert said in ended.output
    assert "Traceback" not in ended.output


def test_a_setting_without_effect_is_told_of() -> None:
    plan = shoal.Plan().with_sections(layout={"data": 2}, precision={"loss_scale": "dynamic"})
    with pytest.warns(SettingWarning, match=r"precision\.loss_scale = 'dynamic' has no effect") as told:
        assert shoal.verify(small(), plan, steps=1).verified
    assert [warning.filename for warning in told] == [__file__]


def test_a_launcher_is_refused(tmp_path: Path) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [sys.executable, "-m", "shoal", "verify", str(JOBS / "tiny.py"), "--out", str(tmp_path / "verify")]
    with start_command(command, tmp_path / "verify", launcher) as started:
        ended = started.wait().expect(2)
    assert "a verification under a launcher (RANK=0, WORLD_SIZE=2)" in ended.stderr
    assert "for 2 devices" in ended.stderr


@parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], usual=["15", "9"], ids=lambda n: str(n.value))
def test_a_signal_ends_it_and_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    out, gate = tmp_path / "verify", Gate(tmp_path / "gate", 1)
    command = [sys.executable, "-m", "shoal", "verify", str(JOBS / "tiny.py"), "--devices", "2", "--out", str(out)]
    with start_command(command, out, gate.environment) as started:
        started.until(lambda: gate.reached(2), "both ranks at the gate")
        started.send(number)
        ended = started.wait()
    assert ended.code == (-number if number == signal.SIGKILL else 130)
    assert "Traceback" not in ended.output
    # After a SIGKILL the next verification removes them.
    assert (out / ".traces").exists() == (number == signal.SIGKILL)


def test_a_rank_that_dies_without_a_word_is_named_with_its_last_ones(tmp_path: Path) -> None:
    ended = verify("planted.py:dying", tmp_path / "verify", "--devices", "3")
    assert ended.code == 2
    assert "rank 1 of the run to verify" in ended.stderr
    assert "it ended with code -9 and without a word\n" in ended.stderr
    assert "these are my last" in ended.stderr
    assert "these are my last" not in ended.stdout  # only rank 0 speaks


class CenteredByHand(nn.Sequential):
    """Subtracts the mean of the samples that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        out: Tensor = self[2](torch.tanh(hidden - hidden.mean(0)))
        return out


def to_the_longest(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pads a sample, whose first number decides its length, to the longest of the batch."""
    rows = [x[:, None][: 3 + int(x[0] > 0) * 3] for x, _ in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack([y for _, y in samples])


class MeanOverPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.layer(x)).mean(1)
        return out


@pytest.mark.parametrize(
    ("changes", "place", "remedy"),
    [
        (
            {"model": lambda: CenteredByHand(*mlp())},
            "the model mixes samples of a batch, in the forward of CenteredByHand itself",
            "write Job(grains=1) for the whole batch, on one data rank, or Job(fuse=False) where grains are meant",
        ),
        ({"model": MeanOverPadding, "collate": to_the_longest}, PADS, f"where the dependence is not meant, {UNPADDED}"),
    ],
)
def test_a_forward_that_mixes_samples_is_verified_by_grain(changes: dict[str, Any], place: str, remedy: str) -> None:
    verdict = shoal.verify(small(**changes), shoal.Plan().with_sections(layout={"data": 2}), steps=2)
    assert verdict.verified, verdict.render()
    grains = "the numbers are those of grains of 2 samples, not of the whole batch of 16"
    assert f"{grains}, since {place}: {remedy}" in verdict.notes


def test_a_module_that_model_returns_again_and_again_is_verified_and_left_as_it_was() -> None:
    made = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    verdict = shoal.verify(small(model=lambda: made), shoal.Plan().with_sections(layout={"data": 2}), steps=2)
    assert verdict.verified, verdict.render()
    for name, value in made.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_where_a_float64_copy_does_not_fit_some_layers_are_computed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_fits", lambda *sizes: False)
    for precision in ("float32", "bfloat16"):
        plan = shoal.Plan().with_sections(layout={"data": 2}, precision={"compute": precision})
        verdict = shoal.verify(small(), plan)
        assert verdict.verified, verdict.render()
        (note,) = [note for note in verdict.notes if "float64" in note]
        assert "2 layers: 0, 2; the farthest is" in note
