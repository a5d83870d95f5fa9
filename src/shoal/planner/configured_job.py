"""Job of a Hugging Face configuration, `hf:DIR`: a model from a config.json, to plan it without weights or data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from shoal.errors import CommandError, JobError
from shoal.job import Epochs, Job
from shoal.numerics.losses import cross_entropy

PREFIX = "hf:"
_LEARNING_RATE = 3e-4
_BETAS = 0.9, 0.95  # as language models use them


def configured_job(target: str, sequence: int | None, batch: int | None) -> Job:
    """Job of the model that `hf:DIR` describes, with AdamW and a stream of sequences of tokens.

    Raises: CommandError where the configuration, a size or transformers is missing, or the architecture is unknown.
    """
    folder = Path(target.removeprefix(PREFIX))
    if not (folder / "config.json").is_file():
        raise _refusal(target, f"{folder} has no config.json", "give a folder that has one, as hf:models/llama")
    if sequence is None or batch is None:
        raise _refusal(target, "a configuration says neither length nor batch", "write --seq 4096 --batch 512, say")
    config, build = _model(target, folder)
    config.use_cache = False
    vocabulary = config.get_text_config().vocab_size
    return Job(
        model=build,
        loss=_next_token,
        optimizer=_adamw,
        train_data=partial(_Tokens, vocabulary, sequence),
        global_batch=batch,
        length=Epochs(1),
    )


def _model(target: str, folder: Path) -> tuple[Any, Any]:
    """The configuration, and what builds its model in float32."""
    try:
        import transformers
    except ImportError as error:
        raise _refusal(target, "transformers is not installed", "pip install 'shoal[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        named = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or [None]
        own = getattr(transformers, str(named[0]), None)
        if own is not None:
            return config, partial(own, config)
        build: Any = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.float32)
        with torch.device("meta"):
            build()  # raises where there is no such model
        return config, build
    except (ValueError, KeyError, TypeError, OSError) as error:
        text = next(iter(str(error).splitlines()), "")[:200]
        raise _refusal(
            target,
            f"transformers {transformers.__version__} makes no language model of its config.json: {text}",
            "name a model_type and architectures that it has, or write a job file that builds the model",
        ) from error


def _refusal(target: str, conflict: str, remedy: str) -> CommandError:
    return CommandError(given=f"shoal plan {target}", conflict=conflict, remedy=remedy)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=_LEARNING_RATE, betas=_BETAS, weight_decay=0.1)


def _next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The cross entropy of the next tokens, and their number. Batch: inputs and targets, int64 [B, T]."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    if logits.shape[:-1] != targets.shape:
        raise JobError(
            given=f"a configuration of {type(model).__name__}",
            conflict=f"its logits of shape {list(logits.shape)} are not those of tokens",
            remedy="write a job file with the model's own loss",
        )
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class _Tokens(IterableDataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens without end, inputs and targets."""

    vocabulary: int
    length: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens = torch.arange(self.length + 1) % self.vocabulary
        while True:
            yield tokens[:-1], tokens[1:]
