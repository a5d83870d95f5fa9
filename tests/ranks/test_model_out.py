"""The model out of a run: loaded, exported and evaluated, whatever layout trained it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.launching import EXAMPLES, JOBS, Ended, Run, newest_checkpoint, run, spoil, start_command
from tests.ranks.test_relayout import ONE_THREAD, plan
from tests.usual import SLOW, parametrize

import shoal
from shoal.errors import IntegrityError

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'layouts.py'}:stack"
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {"layout": {"data": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
    "ZeRO-3": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "tensor": {"layout": {"tensor": 2}},
    "pipeline": {"layout": {"pipeline": 2}},
    "servers": {"layout": {"data": 2}, "server": {"mode": "synchronous"}},
}


USUAL = ("ZeRO-3",)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name in USUAL else SLOW) for name in LAYOUTS])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Four steps of the language model on two processes, with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("run")
    arguments = (*plan(folder / "plan.toml", LAYOUTS[request.param]), "--checkpoint-every", "1")
    call = Run(JOB, folder / "run", None, arguments=arguments, settings={"steps": 4}, environment=ONE_THREAD)
    return run(call).expect(0)


def model() -> torch.nn.Module:
    """The model of the job, with other values than any run's."""
    import layouts

    torch.manual_seed(1)
    return layouts.Stack()


@pytest.fixture(autouse=True)
def _jobs_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOBS))


# -------------------------------------------------------------------------------------------------------------- load


def test_loads_into_a_model_and_as_a_mapping(trained: Ended) -> None:
    """Both have the weights that the run ended with, under the names of its state dict, in every layout."""
    wanted = trained.result["weights_sha256"]
    weights, filled = shoal.load(trained.out), shoal.load(trained.out, model())
    assert weights.step == 4
    assert shoal.weights_sha256(weights) == wanted
    assert shoal.weights_sha256(filled.state_dict()) == wanted
    assert list(weights["head.weight"].shape) == [16, 8]
    assert weights.keys() == filled.state_dict().keys()
    assert weights["head.weight"].equal(weights["embedding.weight"])
    earlier = shoal.load(trained.out, model(), step=3)
    assert shoal.weights_sha256(earlier.state_dict()) != wanted
    assert shoal.weights_sha256(shoal.load(newest_checkpoint(trained.out))) == wanted


def test_a_damaged_checkpoint_is_refused_by_name(trained: Ended, tmp_path: Path) -> None:
    """Nothing of it gets into the model, whichever file is damaged; the step before is named and can be had."""
    shutil.copytree(trained.out, tmp_path / "run")
    for file in sorted(newest_checkpoint(tmp_path / "run").glob("model*.safetensors")):
        whole = file.read_bytes()
        spoil(file, -9)
        before = model()
        target = model()
        with pytest.raises(IntegrityError, match=rf"step-00000004; it is damaged: {file.name} is not what was written"):
            shoal.load(tmp_path / "run", target)
        assert shoal.weights_sha256(target.state_dict()) == shoal.weights_sha256(before.state_dict())
        file.write_bytes(whole)
    spoil(newest_checkpoint(tmp_path / "run") / "manifest.json", 20)
    with pytest.raises(IntegrityError, match="step 3 has another"):
        shoal.load(tmp_path / "run")
    assert shoal.load(tmp_path / "run", step=3).step == 3


# ------------------------------------------------------------------------------------------------------------ export


def shoal_command(folder: Path, *arguments: str) -> Ended:
    """Another command than `run`."""
    command = [sys.executable, "-m", "shoal", *arguments]
    with start_command(command, folder / "command", ONE_THREAD, cwd=folder) as started:
        return started.wait()


def test_exports_one_copy_of_each_tensor(trained: Ended, tmp_path: Path) -> None:
    """In one file or in shards, in the dtype of the training or another; nothing is written over."""
    from safetensors.torch import load_file, load_model

    wanted = shoal.load(trained.out)
    shoal_command(tmp_path, "export", str(trained.out), "-o", "one").expect(0)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["model.safetensors"]
    filled = model()
    load_model(filled, tmp_path / "one" / "model.safetensors")
    assert shoal.weights_sha256(filled.state_dict()) == trained.result["weights_sha256"]

    shards = ("--max-shard-size", "1KB", "--dtype", "bfloat16", "--step", "3")
    shoal_command(tmp_path, "export", str(trained.out), "-o", "many", *shards).expect(0)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    placed = index["weight_map"]
    assert placed.keys() == wanted.keys() - {"head.weight"}
    assert len(set(placed.values())) > 2
    earlier, total = shoal.load(trained.out, step=3), 0
    for name in set(placed.values()):
        for key, tensor in load_file(tmp_path / "many" / name).items():
            assert placed[key] == name
            assert torch.equal(tensor, earlier[key].bfloat16()), key
            total += tensor.nbytes
    assert index["metadata"]["total_size"] == total
    again = shoal_command(tmp_path, "export", str(trained.out), "-o", "one").expect(2)
    assert "nothing is overwritten" in again.stderr


TINY = {"layers": 2, "width": 32, "heads": 2, "block": 16, "steps": 2, "batch": 8}


@parametrize(
    ("name", "layout"), [("gpt2", "ZeRO-3"), ("llama", "tensor"), ("bert", "pipeline")], usual=["llama-tensor"]
)
def test_transformers_reads_the_folder(name: str, layout: str, tmp_path: Path) -> None:
    """From the run's directory alone, with configuration and tokenizer, to the logits of the trained weights."""
    transformers = pytest.importorskip("transformers")
    arguments = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    settings: dict[str, Any] = {**TINY, **({"kv_heads": 2} if name == "llama" else {})}
    job = f"{EXAMPLES / 'hugging_face.py'}:{name}"
    run(Run(job, tmp_path / "run", None, arguments=arguments, settings=settings, environment=ONE_THREAD)).expect(0)
    words = {"[UNK]": 0, **{chr(97 + letter): letter + 1 for letter in range(26)}}
    from tokenizers import Tokenizer, models

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")))
    fast.save_pretrained(tmp_path / "tokenizer")
    call = ("export", "run", "-o", "out", "--max-shard-size", "40KB", "--tokenizer", "tokenizer")
    assert "from_pretrained" in shoal_command(tmp_path, *call).expect(0).stdout

    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    read, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    filled = shoal.load(tmp_path / "run", kind.from_config(read.config))
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits = [one.eval()(input_ids=tokens).logits for one in (read, filled)]
    assert torch.equal(*logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("c") == 3
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert shoal.weights_sha256(read.state_dict()) == result["weights_sha256"]


# ---------------------------------------------------------------------------------------------------------- evaluate


def test_evaluates_what_the_run_has_evaluated(trained: Ended, tmp_path: Path) -> None:
    """On one process and on two, whatever layout trained it: the run's own metrics, but for rounding."""
    for devices in ("1", "2"):
        call = ("evaluate", JOB, str(trained.out), "--devices", devices, "--json")
        found = json.loads(shoal_command(tmp_path, *call).expect(0).stdout)
        assert (found["step"], found["samples"]) == (4, trained.result["eval_samples"])
        assert found["metrics"] == pytest.approx(trained.result["metrics"], rel=1e-5)
    other = json.loads(shoal_command(tmp_path, *call, "--step", "2").expect(0).stdout)
    assert other["metrics"]["loss"] != pytest.approx(trained.result["metrics"]["loss"], rel=1e-4)


@pytest.mark.parametrize("trained", ["ZeRO-3"], indirect=True)
def test_predicts_the_same_rows_on_any_number_of_processes(trained: Ended, tmp_path: Path) -> None:
    """As many chunks as are no multiple of the ranks, and the last one shorter: bit for bit, and in order."""
    found = {}
    for devices in ("1", "3"):
        output = tmp_path / f"by-{devices}.safetensors"
        call = ("predict", JOB, str(trained.out), "--devices", devices, "--data", "train")
        shoal_command(tmp_path, *call, "-o", str(output)).expect(0)
        found[devices] = safetensors.torch.load_file(output)
    assert torch.equal(found["1"]["ids"], torch.arange(len(found["1"]["ids"])))
    for name, rows in found["1"].items():
        assert torch.equal(rows, found["3"][name]), name
    assert not list(tmp_path.glob(".by-*")), "nothing is left beside it"


# --------------------------------------------------------------------------------------------------- another number


@parametrize(
    ("layout", "devices"),
    [("ZeRO-3", 1), ("ZeRO-3", 3), ("tensor", 1), ("pipeline", 1)],
    usual=["ZeRO-3-3"],
)
def test_resumes_on_another_number_of_devices(layout: str, devices: int, tmp_path: Path) -> None:
    """With --devices alone; the run says how its layout changes, and its steps are those of an undisturbed run."""
    arguments = plan(tmp_path / "plan.toml", LAYOUTS[layout])
    settings = {"steps": 6}
    whole = Run(JOB, tmp_path / "whole", None, arguments=arguments, settings=settings, environment=ONE_THREAD)
    undisturbed = run(whole).expect(0)
    whole.out, whole.arguments = tmp_path / "run", (*arguments, "--steps", "3")
    run(whole).expect(0)
    whole.arguments, whole.devices = ("--resume", "--steps", "6"), devices
    ended = run(whole).expect(0)
    assert "note: the run's layout, " in ended.stderr
    assert ended.result["world_size"] == devices
    assert ended.result["sample_digest"] == undisturbed.result["sample_digest"]
    losses = [[record["loss"] for record in one.records] for one in (ended, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -------------------------------------------------------------------------------------------------------------- best

WATCHED = f"{JOBS / 'layouts.py'}:watched"
EVERY = ("--checkpoint-every", "2")


@parametrize("layout", ["data", "ZeRO-3", "pipeline", "servers"], usual=["data"])
def test_the_best_checkpoint_stays(layout: str, tmp_path: Path) -> None:
    """Beyond the three newest and across a resume; its weights are those of a run that ends at its step."""
    arguments = (*plan(tmp_path / "plan.toml", LAYOUTS[layout]), *EVERY)
    call = Run(WATCHED, tmp_path / "run", None, arguments=(*arguments, "--steps", "20"), environment=ONE_THREAD)
    run(call).expect(0)
    call.arguments = ("--resume", "--steps", "40", *EVERY)
    ended = run(call).expect(0)
    values = {record["step"]: record["metrics"]["loss"] for record in ended.records if record["metrics"]}
    best = max(values, key=lambda step: values[step])
    assert best < 20, "an early one, or nothing is seen of the resume"
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert f"step-{best:08d}" not in kept
    assert ended.result["best"] == {"step": best, "metric": "loss", "largest": True, "value": values[best]}

    call.arguments, call.out = (*arguments, "--steps", str(best)), tmp_path / "short"
    short = run(call).expect(0)
    found = shoal.load(tmp_path / "run", step="best")
    assert found.step == best
    assert shoal.weights_sha256(found) == short.result["weights_sha256"]
    assert shoal.load(tmp_path / "run" / "checkpoints" / "best").step == best


def test_the_best_is_one_on_any_number_of_processes(tmp_path: Path) -> None:
    """In exact mode, bit by bit; where the last evaluation is the best, what was saved before it is."""
    hashes = []
    for devices in (1, 2):
        out = tmp_path / str(devices)
        settings = {"watch": "loss:min", "epochs": 2}
        ended = run(Run(WATCHED, out, devices, exact=True, settings=settings, environment=ONE_THREAD)).expect(0)
        found = shoal.load(out, step="best")
        assert found.step == ended.result["best"]["step"]
        hashes.append((found.step, shoal.weights_sha256(found), ended.result["best"]["value"]))
    assert hashes[0] == hashes[1]
