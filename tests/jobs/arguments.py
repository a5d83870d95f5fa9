"""Jobs from `transformers.TrainingArguments`, and the same for a Trainer: tiny models with random weights."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainingArguments

import shoal

VOCABULARY, BATCH, STEPS = 32, 4, 6


def written(**changes: Any) -> TrainingArguments:
    """Most of what a user writes: warm-up, decay, clipping, accumulation."""
    fields: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.25,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**fields, **changes})


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            pad_token_id=None,
        )
    )


def bert(problem: str = "single_label_classification") -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=1 if problem == "regression" else 3,
            problem_type=problem,
        )
    )


def texts(count: int = 20) -> list[dict[str, Any]]:
    """Ragged rows with a column that no model takes; the last step of an epoch is short."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        length = 5 + i % 7
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "title": f"text {i}", "label": i % 3})
    return rows


def tokens(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right; labels are the tokens, of padding none."""
    width = max(len(s["input_ids"]) for s in samples)
    pad = [width - len(s["input_ids"]) for s in samples]
    ids = torch.tensor([s["input_ids"] + [0] * p for s, p in zip(samples, pad, strict=True)])
    there = torch.tensor([s["attention_mask"] + [0] * p for s, p in zip(samples, pad, strict=True)])
    return {"input_ids": ids, "attention_mask": there, "labels": ids.masked_fill(there == 0, -100)}


def classes(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {**tokens(samples), "labels": torch.tensor([s["label"] for s in samples])}


def numbers(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {**tokens(samples), "labels": torch.tensor([float(s["label"]) for s in samples])}


def several(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    labels = [[float(k != s["label"]) for k in range(3)] for s in samples]
    return {**tokens(samples), "labels": torch.tensor(labels)}


# Of models whose loss is a mean in itself: the Trainer adds up such means of accumulated batches, and never divides.
WHOLE = {"per_device_train_batch_size": 2 * BATCH, "gradient_accumulation_steps": 1}
# What there is to compare: the model, the collator, and further arguments.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "next token": (llama, tokens, {}),
    "smoothed": (llama, tokens, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2}),
    "classes": (bert, classes, {**WHOLE, "optim": "sgd", "learning_rate": 0.1}),
    "numbers": (lambda: bert("regression"), numbers, {**WHOLE, "optim": "adamw_torch", "max_grad_norm": 0.0}),
    "several labels": (
        lambda: bert("multi_label_classification"),
        several,
        {**WHOLE, "optim": "adafactor", "lr_scheduler_type": "constant_with_warmup"},
    ),
}


def job(case: str = "next token", devices: int = 1, epochs: int = 2) -> shoal.Job:
    """One of the cases."""
    model, collate, changes = CASES[case]
    arguments = written(num_train_epochs=epochs, **changes)
    return shoal.from_training_arguments(
        arguments,
        model=model,
        train_dataset=texts(),
        data_collator=collate,
        devices=devices,
        eval_dataset=texts(9),
    )


def of_datasets(devices: int = 1) -> shoal.Job:
    """Rows of a `datasets.Dataset`, tokenized and padded by a collator of Transformers."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    from datasets import Dataset

    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"{i}": i + 2 for i in range(VOCABULARY - 2)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    lines = [" ".join(str((i * k) % 29) for k in range(3 + i % 9)) for i in range(20)]
    rows = Dataset.from_dict({"text": lines}).map(lambda row: dict(tokenizer(row["text"])), batched=True)
    return shoal.from_training_arguments(
        written(),
        model=llama,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        devices=devices,
    )
