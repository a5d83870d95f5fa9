"""Jobs of configurations alone: what they build, what they refuse, and that a plan comes of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.options import PlanOptions
from shoal.cli.plan import plan
from shoal.errors import CommandError, ExitCode, JobFileError
from shoal.jobs.configured_job import configured_job
from shoal.jobs.job_file import parse_target

pytestmark = pytest.mark.usefixtures("no_other_test")

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'shoal[hf]'")

SIZES = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def written(folder: Path, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SIZES, **more}))
    return f"hf:{folder}"


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None])
def test_a_configuration_is_a_job(tmp_path: Path, architectures: list[str] | None) -> None:
    """In float32, whose copy autocast makes; with as many tokens as asked for."""
    job = configured_job(written(tmp_path, architectures=architectures), 24, 16)
    model = job.model()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    inputs, targets = next(iter(job.train_data()))
    assert len(inputs) == len(targets) == 24
    total, weight = job.loss(model, (inputs[None], targets[None]))
    assert (total.ndim, int(weight)) == (0, 24)
    assert isinstance(job.optimizer(model.parameters()), torch.optim.AdamW)
    assert job.global_batch == 16


REFUSED: dict[str, tuple[dict[str, Any], tuple[int | None, int | None], str]] = {
    "an unknown architecture": ({"model_type": "unheard_of"}, (24, 16), "makes no language model"),
    "no model type": ({"model_type": None}, (24, 16), "makes no language model"),
    "no length": ({}, (None, 16), "says no length;.*write --seq 2048, say"),
    "no batch": ({}, (24, None), "says no batch;.*write --batch 512, say"),
    "neither": ({}, (None, None), "no length and no batch;.*write --seq 2048 --batch 512"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_job_is_refused(tmp_path: Path, name: str) -> None:
    more, (sequence, batch), why = REFUSED[name]
    with pytest.raises(CommandError, match=why):
        configured_job(written(tmp_path, **more), sequence, batch)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"has no config\.json"):
        configured_job(f"hf:{tmp_path}", 24, 16)


def test_without_transformers_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(CommandError, match="transformers is not installed"):
        configured_job(written(tmp_path), 24, 16)


def test_a_configuration_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, output = written(tmp_path), str(tmp_path / "plan.toml")
    options = PlanOptions(job=target, cluster="2xH100", seq=24, batch=16, output=output)
    assert plan(options) is ExitCode.DONE
    assert 'compute = "bfloat16"' in Path(output).read_text()
    assert "shoal run JOBFILE --plan" in capsys.readouterr().out


def test_a_sequence_longer_than_the_table_of_positions_is_refused(tmp_path: Path) -> None:
    """Before anything is traced."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**gpt2, "vocab_size": 96}))
    options = PlanOptions(job=f"hf:{tmp_path}", cluster="2xH100", seq=17, batch=16)
    with pytest.raises(CommandError, match=r"its longest sequence is 16"):
        plan(options)


def test_options_of_the_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no job function"):
        plan(PlanOptions(job=written(tmp_path), cluster="2xH100", seq=24, batch=16, set=("lr=1",)))
    with pytest.raises(CommandError, match="a job file says its own"):
        plan(PlanOptions(job="job.py", cluster="2xH100", seq=24))
    with pytest.raises(JobFileError, match="no data to train on"):
        parse_target(written(tmp_path), [])


VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8}


def test_a_model_of_images_is_planned(tmp_path: Path) -> None:
    target, output = written(tmp_path, **VIT), str(tmp_path / "plan.toml")
    image, _ = next(iter(configured_job(target, None, 16).train_data()))
    assert image.shape == (3, 32, 32)
    assert plan(PlanOptions(job=target, cluster="2xH100", batch=16, output=output)) is ExitCode.DONE
    with pytest.raises(CommandError, match="takes images, which have no length"):
        configured_job(target, 24, 16)
    with pytest.raises(CommandError, match="says no batch"):
        configured_job(target, None, None)


def test_a_model_of_sound_is_refused(tmp_path: Path) -> None:
    sound = written(tmp_path, model_type="wav2vec2", architectures=["Wav2Vec2ForCTC"])
    with pytest.raises(CommandError, match="takes input_values: hf:DIR is for models of tokens and of images"):
        configured_job(sound, None, 16)
