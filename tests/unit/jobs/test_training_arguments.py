"""Which TrainingArguments become a job, and which are refused, and what their losses count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.jobs.job import Epochs, Steps
from shoal.jobs.training_arguments import LabelsLoss, ModelLook, from_training_arguments


def arguments(**changes: Any) -> Any:
    from transformers import TrainingArguments

    fields = {"output_dir": "out", "use_cpu": True, "report_to": [], **changes}
    return TrainingArguments(**fields)


def job(devices: int | None = 2, **changes: Any) -> Any:
    more = {name: changes.pop(name) for name in ("compute_metrics", "eval_dataset", "metrics") if name in changes}
    return from_training_arguments(
        arguments(**changes), model=dict, train_dataset=list(range(100)), devices=devices, **more
    )


@pytest.mark.slow
def test_numbers() -> None:
    found = job(per_device_train_batch_size=4, gradient_accumulation_steps=3, seed=7, max_grad_norm=0.0)
    assert (found.global_batch, found.seed, found.clip_norm, found.shuffle) == (24, 7, None, True)
    assert found.length == Epochs(3)
    assert job(num_train_epochs=0.5, per_device_train_batch_size=7).length == Steps(4)  # of eight, half
    assert job(num_train_epochs=0.3, per_device_train_batch_size=7).length == Steps(3)  # 2.4
    assert job(max_steps=11).length == Steps(11)
    best = job(load_best_model_at_end=True, eval_strategy="steps", eval_dataset=[1], save_strategy="steps")
    assert best.watch == "loss:min"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": None}, "devices=1 makes global_batch=8, devices=8 64"),
        ({"neftune_noise_alpha": 5.0, "dataloader_drop_last": True}, "add the noise in model()"),
        ({"neftune_noise_alpha": 5.0, "dataloader_drop_last": True}, "every sample of an epoch is trained"),
        ({"train_sampling_strategy": "group_by_length"}, "sampler=shoal.ByLength(lengths)"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "no function of the step alone",
        ),
        ({"optim": "galore_adamw", "optim_target_modules": ["x"]}, "give optimizer=..."),
        ({"compute_metrics": len}, "a metric here is a sum over samples"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "f1"}, "what is evaluated is loss"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    if "load_best_model_at_end" in changes:
        changes = {**changes, "eval_strategy": "steps", "save_strategy": "steps", "eval_dataset": [1]}
    with pytest.raises(JobError) as caught:
        job(**changes)
    assert words in str(caught.value)


@pytest.mark.slow
def test_what_is_told() -> None:
    (told,) = job(bf16=True, activation_checkpointing=True, logging_steps=5, learning_rate=0.1).without_effect()
    in_job, elsewhere, without = told.split("; ", 2)
    assert in_job == "TrainingArguments in the job: learning_rate"
    assert "bf16 (--precision bf16)" in elsewhere
    assert 'activation_checkpointing ([memory] recompute = "full" in the plan)' in elsewhere
    assert "logging_steps" in without


@pytest.mark.slow
def test_an_argument_of_a_later_version_is_refused() -> None:
    from transformers import TrainingArguments

    @dataclass
    class Later(TrainingArguments):
        twist: float = field(default=0.0)

    with pytest.raises(JobError, match=r"twist=1\.0"):
        from_training_arguments(
            Later(output_dir="out", use_cpu=True, twist=1.0), model=dict, train_dataset=[1], devices=1
        )


class Source:
    def __init__(self, task: str | None, problem: str | None = None, num_labels: int = 3) -> None:
        self.look = ModelLook(task, frozenset({"x", "labels"}), frozenset(), problem, num_labels)


class Fixed(nn.Module):
    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.answer = logits

    def forward(self, x: Any) -> Any:
        return type("Output", (), {"logits": self.answer})


def test_what_a_loss_counts() -> None:
    labels = torch.tensor([[1, 2, -100], [0, -100, -100]])
    tokens = Fixed(torch.zeros(2, 3, 4)), {"x": 0, "labels": labels}
    total, weight = LabelsLoss(Source("ForMaskedLM"))(*tokens)  # type: ignore[arg-type]
    assert (float(total), int(weight)) == (pytest.approx(3 * torch.log(torch.tensor(4.0)).item()), 3)
    _, weight = LabelsLoss(Source("ForCausalLM"))(*tokens)  # type: ignore[arg-type]
    assert int(weight) == 1  # nothing is before the first
    with pytest.raises(JobError, match="ForObjectDetection"):
        LabelsLoss(Source("ForObjectDetection"))(*tokens)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="without labels"):
        LabelsLoss(Source("ForCausalLM"))(tokens[0], {"x": 0})  # type: ignore[arg-type]
