"""`shoal verify --script`: loops without shoal, right and with one fault each, on two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forks

import shoal
from shoal.programs import command, pytest_plugin

HERE = Path(__file__).parent
CHANGED = "../../benchmarks/planted_scripts/changed.py --batch-size 8"
shoal_script = pytest_plugin.shoal_script  # also where the package is installed without it
pytestmark = pytest.mark.ranks


def verified(folder: Path, script: str, *words: str, fresh: bool = False) -> tuple[int, dict[str, Any], str]:
    """The exit code, script.json and all output of a verification of two steps; `fresh` takes real interpreters."""
    command = [sys.executable, "-m", "shoal", "verify", "--script", f"{HERE}/{script}", *words]
    command += [] if "--steps" in words else ["--steps", "2"]
    command += [] if "--devices" in words else ["--devices", "2"]
    variables = os.environ | ({"SHOAL_TESTS_FRESH": "1"} if fresh else {})
    ended = forks.run([*command, "--out", "out"], cwd=folder, env=variables, timeout=110)
    path = folder / "out/script.json"
    return ended.returncode, json.loads(path.read_text()) if path.exists() else {}, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "script",
    [
        "ddp.py --batch {batch}",
        "ddp.py --batch 3 --fault scaled",
        "ddp.py --batch 8 --fault recomputed",
        "ddp.py --batch 8 --fault zero",
        "fsdp2.py",
        "fsdp2.py 16-bit",
        "fsdp2.py two-forwards",
        "sequences.py",
    ],
)
def test_right_scripts_are_verified(script: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, script, fresh="{batch}" in script)
    assert (code, document["verdict"], document["findings"]) == (0, "verified", []), output
    coverage = document["coverage"]
    assert min(coverage["forwards"], coverage["gradients"], coverage["updates"], coverage["samples"]) >= 4
    assert script != "sequences.py" or coverage["samples"] == 16  # sequences, not their elements
    assert not (tmp_path / "out/tensors").exists()


def test_layers_of_keras_are_verified(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    code, document, output = verified(tmp_path, "layers.py")
    assert (code, document["findings"], document["coverage"]["unchecked"]) == (0, [], []), output
    code, document, output = verified(tmp_path, "layers.py inner")
    assert (code, document["findings"][0]["phase"]) == (1, "reduction"), output


@pytest.mark.parametrize("words", ["--low", "--original"])
def test_flat_parameters_are_verified(words: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"fsdp1.py {words}")
    assert (code, document["findings"], document["coverage"]["unchecked"]) == (0, [], []), output
    assert document["coverage"]["gradients"] >= 16


ENGINE = ("--launcher", "deepspeed", "--steps", "4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *("--stage 3", "--stage 3 --accumulate 2 --clip 0.1", "--stage 3 --groups --low"),
        *("--stage 0", "--stage 1", "--stage 2 --accumulate 2 --clip 0.1", "--stage 2 --low"),
        *(
            "--stage 1 --groups --accumulate 2",
            "--stage 2 --groups --low --clip 0.1",
            "--stage 1 --inner --accumulate 2",
        ),
    ],
)
def test_an_engine_of_deepspeed_is_verified(words: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    code, document, output = verified(tmp_path, f"zero.py {words}", *ENGINE)
    assert (code, [one for one in document["findings"] if one["fails"]]) == (0, []), output
    assert {one["phase"] for one in document["findings"]} == ({"clipping"} if "--clip" in words else set()), output
    coverage = document["coverage"]
    assert coverage["forwards"] >= 8
    assert min(coverage["gradients"], coverage["updates"]) >= 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "phase", "fails"),
    [
        ("--stage 2 --fault data", "data", True),
        ("--stage 2 --fault weights", "forward", True),
        ("--stage 3 --fault data", "data", True),
        ("--stage 3 --fault rate", "schedule", True),
        ("--stage 3 --accumulate 2 --fault twice", "loss", False),
        ("--stage 2 --fault rate", "schedule", True),
        ("--stage 1 --fault world", "loss", False),
        ("--stage 2 --accumulate 2 --fault twice", "loss", False),
    ],
)
def test_faults_in_an_engine_of_deepspeed_are_placed(words: str, phase: str, fails: bool, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    code, document, output = verified(tmp_path, f"zero.py {words}", *ENGINE)
    first = document["findings"][0]
    assert (code, first["phase"], first["fails"]) == (int(fails), phase, fails), output


@pytest.mark.slow
def test_an_offloaded_optimizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    code, document, output = verified(tmp_path, "zero.py --stage 2 --offload", *ENGINE)
    assert (code, document) == (2, {})
    assert "it has experts, a pipeline, an offloaded optimizer" in " ".join(output.split())


@pytest.mark.parametrize("words", ["--sequence", "--logits --low --devices 4"])
def test_tensor_parallelism_is_verified(words: str, tmp_path: Path) -> None:
    own, _, devices = words.partition(" --devices ")
    code, document, output = verified(tmp_path, f"tensor.py {own}", "--devices", devices or "2")
    assert (code, document["findings"], document["coverage"]["unchecked"]) == (0, [], []), output
    assert document["coverage"]["gradients"] >= 32


@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ("mixup", "loss", "losses of 8 elements each weigh up to"),
        ("perturbed", "loss", "the weights of all elements sum to 2"),
        ("clipped", "clipping", "times the mean over 2 ranks"),
    ],
)
def test_habits_of_right_scripts_are_notes(fault: str, phase: str, said: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"ddp.py --batch 8 --fault {fault}")
    assert (code, document["verdict"]) == (0, "verified"), output
    assert any(one["phase"] == phase and said in one["said"] for one in document["findings"]), output


@pytest.mark.parametrize(
    ("way", "phase", "unchecked"),
    [
        ("decay", "clipping", None),
        ("late_hook", "backward", None),
        ("zeroed", None, None),
        ("lbfgs", None, "computes the loss several times"),
        ("langevin", None, None),
        ("second", None, "the update of 2 parameters, such as 4.bias: an optimizer that is none of torch's"),
        pytest.param("mask", "clipping", None, marks=pytest.mark.slow),
        pytest.param("adaptive", "clipping", None, marks=pytest.mark.slow),
        pytest.param("tenth", "clipping", None, marks=pytest.mark.slow),
        pytest.param("noise", "clipping", None, marks=pytest.mark.slow),
        pytest.param("join", None, "steps after one rank has no more samples", marks=pytest.mark.slow),
    ],
)
def test_what_a_script_does_to_gradients_on_all_ranks_is_no_fault(
    way: str, phase: str | None, unchecked: str | None, tmp_path: Path
) -> None:
    words = ("--steps", "10" if way == "join" else "4")
    code, document, output = verified(tmp_path, f"{CHANGED} --fault {way}_ok", *words)
    assert (code, document["verdict"]) == (0, "verified"), output
    assert {one["phase"] for one in document["findings"]} == ({phase} if phase else set()), output
    assert any((unchecked or "") in words for words in document["coverage"]["unchecked"]), output
    assert document["coverage"]["gradients"] >= 48


def test_a_full_record_has_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MOST_BYTES", 1 << 16)
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)
    script = command.Script(f"{HERE}/ddp.py --batch 8", "torchrun", 8)
    assert command.verify_script(script, 2, 5, tmp_path) == 0
    document = json.loads((tmp_path / "script.json").read_text())
    assert 1 <= document["steps"] < 5
    said = f"what follows step {document['steps']}: the record of a rank has reached its largest size"
    assert said in document["coverage"]["unchecked"]


@pytest.mark.parametrize("how", ["columns", "experts", "experts-alike", "stages"])
def test_a_model_divided_by_hand_is_refused(how: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"by_hand.py {how}")
    assert (code, document, "parts of a model that a script makes by hand" in output) == (2, {}, True), output


@pytest.mark.parametrize("fault", ["exchanges", "gathered"])
def test_a_forward_that_exchanges_values_is_not_replayed(fault: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"ddp.py --batch 8 --fault {fault}")
    coverage = document["coverage"]
    assert (code, document["findings"], coverage["forwards"], coverage["exchanging"]) == (0, [], 0, 4), output
    assert min(coverage["gradients"], coverage["updates"]) >= 4
    assert any("exchange values between ranks" in words for words in coverage["unchecked"])


def test_equal_noise_is_a_note(tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, "ddp.py --batch 8 --fault noisy", "--steps", "1")
    (note,) = document["findings"]
    assert (code, note["phase"], note["fails"]) == (0, "forward", False), output
    assert "the same random numbers" in note["said"]


# A plan of the script that spawns its ranks is in every run: test_a_script_is_planned.
@pytest.mark.parametrize("words", [(), pytest.param(("--spawn", "--launcher", "python"), marks=pytest.mark.slow)])
def test_a_script_for_gpus_is_verified_without(words: tuple[str, ...], tmp_path: Path) -> None:
    script = " ".join(["gpus.py", *words[:1]])
    code, document, output = verified(tmp_path, script, "--cpu", *words[1:])
    assert (code, document["verdict"], document["findings"], document["cpu"]) == (0, "verified", [], True), output
    coverage = document["coverage"]
    assert min(coverage["forwards"], coverage["gradients"], coverage["updates"]) >= 4
    unchecked = next(one for one in coverage["unchecked"] if one.startswith("kernels, streams, memory"))
    names = (
        "init_process_group: nccl 2",
        "Tensor.cuda 4",
        "torch.compile 2",
        "capturable=True 2",
        "torch.cuda.stream 4",
    )
    assert all(name in unchecked for name in names), unchecked


@pytest.mark.parametrize("fault", ["kernels", "graph"])
def test_what_has_no_cpu_is_named(fault: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"gpus.py --fault {fault}", "--cpu")
    assert (code, document) == (2, {})
    assert {"kernels": "'flash_attn': its kernels need a GPU", "graph": "torch.cuda.CUDAGraph needs a GPU"}[
        fault
    ] in " ".join(output.split())


@pytest.mark.parametrize(
    ("script", "phase", "said"),
    [
        ("ddp.py --batch 8 --fault seed", "initial weights", "different weights"),
        ("ddp.py --batch 8 --fault noise", "reduction", "from the mean over 2 ranks"),
        ("ddp.py --batch 8 --fault rate", "schedule", "0.01, 0.02"),
        ("fsdp2.py own-norm", "clipping", "one factor for each rank"),
        ("fsdp1.py --fault own-norm", "clipping", "ranks clip by"),
        ("fsdp1.py --fault sum --original", "reduction", "2 times the mean"),
        ("tensor.py --fault samples", "data", "compute parts of one forward"),
        ("tensor.py --fault twice", "reduction", "2 times the mean"),
        ("gpus.py --fault inner", "reduction", "the rank's own gradient"),
        (f"{CHANGED} --fault noise_by_rank", "reduction", "from the mean over 2 ranks"),
        (f"{CHANGED} --fault langevin_by_rank", "replicas", "different weights after the update"),
    ],
)
def test_a_fault_is_found_at_its_place(script: str, phase: str, said: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, script, *(["--cpu"] if script.startswith("gpus") else []))
    first = document["findings"][0]
    assert (code, document["verdict"], first["phase"], first["fails"]) == (1, "diverged", phase, True), output
    assert said in first["said"]
    assert f"first divergence   step {first['step']}, {phase}: {first['name']}" in output
    certificate = json.loads((tmp_path / "out/certificate.json").read_text())
    assert (certificate["kind"], certificate["first_divergence"]) == ("script", first)


def test_weights_that_change_outside_of_the_optimizer_are_a_note(tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, "ddp.py --batch 8 --fault weights")
    (note,) = document["findings"]
    assert (code, note["phase"], note["name"], note["step"], note["fails"]) == (0, "update", "4.bias", 2, False), output


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("ddp.py --batch 8 --fault raises", "there is no data"),
        ("ddp.py --batch 8 --fault untrained", "no optimizer of torch made a step"),
        ("pipeline.py", "each rank has other modules"),
    ],
)
def test_nothing_seen_is_an_error(script: str, said: str, tmp_path: Path) -> None:
    # A fork has torch's pipelining loaded, with functions that no observer has seen.
    code, document, output = verified(tmp_path, script, fresh=script == "pipeline.py")
    assert (code, document) == (2, {})
    assert said in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ("none", "", ""),
        ("linear", "schedule", "one process with the same samples has 0.1"),
        ("warmed-twice", "schedule", "one process with the same samples has"),
        ("teacher", "initial weights", "no optimizer trains it"),
        ("temperature", "reduction", "the rank's own gradient"),
        ("own-mean", "loss", "as in one process with the same ones"),
        ("divided", "loss", "is 0.5 times that of one process"),
    ],
)
def test_what_is_outside_of_the_wrapped_model_is_verified(fault: str, phase: str, said: str, tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, f"outside.py {{batch}} {fault}")
    failing = [one for one in document["findings"] if one["fails"]]
    assert (code, bool(failing)) == (int(bool(said) and fault not in ("linear", "teacher")), code == 1), output
    assert not said or (document["findings"][0]["phase"], said in document["findings"][0]["said"]) == (phase, True)
    assert fault != "divided" or "divided by the number of processes" in failing[0]["cause"]
    assert fault != "none" or (document["findings"], document["coverage"]["updates"]) == ([], 6), output


@pytest.mark.slow
def test_a_rank_that_fails_after_recorded_steps_is_no_success(tmp_path: Path) -> None:
    code, document, output = verified(tmp_path, "outside.py 8 raises", "--steps", "4")
    assert (code, document["verdict"], document["steps"]) == (2, "failed", 2), output
    assert document["ended"][0].startswith("rank 1 ended with exit code 1")
    assert "ValueError: a bad sample" in " ".join(output.split())


@pytest.mark.slow
def test_ranks_that_hang_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PATIENCE_SECONDS", 10.0)
    script = command.Script(f"{HERE}/outside.py 8 waits", "torchrun", 8)
    assert command.verify_script(script, 2, 4, tmp_path) == 2
    document = json.loads((tmp_path / "script.json").read_text())
    assert (document["verdict"], document["steps"]) == ("failed", 2)
    assert any("rank 1 hung in recv, outside.py line" in words for words in document["ended"]), document["ended"]


@pytest.mark.parametrize(
    ("script", "words", "rows"),
    [
        (
            "ddp.py --batch {batch}",
            (),
            [
                "Net, 195 parameters, called with float32 [16, 6]",
                "cross_entropy; AdamW; fp32",
                "16 samples a step, in 1",
                "batch statistics (1)",
            ],
        ),
        ("fsdp2.py", (), ["Sequential, 173 parameters", "cross_entropy; SGD; fp32", "8 samples a step, in 2 forwards"]),
        ("gpus.py --batch {batch} --spawn", ("--cpu", "--launcher", "python"), ["bf16", "16 samples", "AdamW"]),
    ],
)
def test_a_script_is_planned(script: str, words: tuple[str, ...], rows: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "plan", "--script", f"{HERE}/{script}", "--batch", "16", *words]
    command += ["--cluster", "8xH100", "--emit", "deepspeed=ds.json", "-o", "plan.toml", "--more"]
    ended = forks.run(command, cwd=tmp_path, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert all(row in ended.stdout for row in rows), ended.stdout
    assert json.loads((tmp_path / "ds.json").read_text())["train_batch_size"] in (8, 16)
    assert (tmp_path / "plan.toml").exists()


def test_a_script_without_an_update_is_not_planned(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "plan", "--script", f"{HERE}/ddp.py --batch 8 --fault raises"]
    ended = forks.run(command, cwd=tmp_path, timeout=110)
    assert (ended.returncode, "there is no data" in ended.stderr) == (2, True), ended.stderr


def test_the_fixture_fails_with_the_first_divergence(shoal_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)
    with pytest.raises(pytest.fail.Exception, match=r"step 1, schedule: learning rate of group 0"):
        shoal_script(f"{HERE}/ddp.py --batch 8 --fault rate", devices=2, steps=1)
    assert shoal_script(f"{HERE}/ddp.py --batch 8", devices=2, steps=1)["verdict"] == "verified"
    with pytest.raises(pytest.fail.Exception, match="there is no file train"):
        shoal_script("train.py")


def test_a_process_that_is_not_reached_observes_itself(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(
        "import os, socket, subprocess, sys\n"
        "sock = socket.create_server(('127.0.0.1', 0))\n"
        "env = os.environ | {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(sock.getsockname()[1])}\n"
        f"env |= {{'PYTHONPATH': {str(Path(shoal.__file__).parents[1])!r}, 'WORLD_SIZE': sys.argv[1]}}\n"
        "sock.close()\n"
        "ranks = [subprocess.Popen([sys.executable, 'train.py'], env=env | {'RANK': str(rank)})"
        " for rank in range(int(sys.argv[1]))]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    (tmp_path / "train.py").write_text(
        "import shoal\nshoal.observe()\nimport runpy, sys\nsys.argv[1:] = ['--batch', '8']\n"
        f"runpy.run_path('{HERE}/ddp.py', run_name='__main__')\n"
    )
    words = [sys.executable, "-m", "shoal", "verify", "--script", "launch.py {devices}", "--launcher", "python"]
    ended = forks.run([*words, "--devices", "2", "--steps", "1"], cwd=tmp_path, timeout=110)
    assert (ended.returncode, "no divergence" in ended.stdout) == (0, True), ended.stdout + ended.stderr


def test_without_a_verification_nothing_is_observed() -> None:
    code = "import shoal, sys; assert 'torch' not in sys.modules; assert not shoal.observe()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, "no shoal verify --script is under way" in ended.stderr) == (0, True), ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "job.py", "--script", "train.py"], "a job and a script"),
        (["plan", "--script", "train.py", "--seq", "8"], "--script with --seq"),
        (["verify"], "no job and no script"),
        (["verify", "job.py", "--script", "train.py"], "a job and a script"),
        (["verify", "--script", "train.py"], "there is no file train.py"),
        (["verify", "--script", "torchrun train.py"], "shoal starts it itself"),
        (["verify", "--script", "train.py", "--exact"], "--script with --exact"),
        (["verify", "job.py", "--keep"], "--keep and the job job.py"),
        (["verify", "job.py", "--cpu"], "--cpu and the job job.py"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path) -> None:
    ended = forks.run([sys.executable, "-m", "shoal", *words], cwd=tmp_path, timeout=110)
    assert (ended.returncode, said in " ".join(ended.stderr.split())) == (2, True), ended.stderr
    assert not (tmp_path / "runs").exists()
