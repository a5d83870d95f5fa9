"""Jobs from Hugging Face configurations, `hf:DIR`: models built from config.json, without weights or data."""

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
from shoal.jobs.job import Epochs, Job
from shoal.numerics.losses import cross_entropy

PREFIX = "hf:"
_PIXELS = "pixel_values"
_USUAL = 4096  # sequence length in tokens that error messages suggest
_IMAGE_SIZE = 224  # used if the configuration has no image_size: convolutions accept any size
_LEARNING_RATE = 3e-4
_BETAS = 0.9, 0.95  # the usual choice for language models


def configured_job(target: str, sequence: int | None, batch: int | None) -> Job:
    """Return a Job that trains the model in `hf:DIR` with AdamW on endless synthetic token sequences or images.

    Args:
        target: `hf:` and a folder with a config.json.
        sequence: Tokens in a sequence; required for language models, refused for image models.
        batch: Global batch in samples; required.

    Raises: CommandError if the configuration, a size or transformers is missing, or the architecture is unknown.
    """
    folder = Path(target.removeprefix(PREFIX))
    if not (folder / "config.json").is_file():
        raise _refusal(target, f"{folder} has no config.json", "give a folder that has one, as hf:models/llama")
    config, build = _model(target, folder)
    wants = getattr(getattr(build, "func", None), "main_input_name", "input_ids")
    if wants not in ("input_ids", _PIXELS):
        raise _refusal(
            target, f"its model takes {wants}: hf:DIR is for models of tokens and of images", "write a job file"
        )
    length, rows = _sizes(target, config, build, (sequence, batch), takes_images=wants == _PIXELS)
    data: Any
    if wants == _PIXELS:
        size = getattr(config, "image_size", None) or _IMAGE_SIZE
        channels = getattr(config, "num_channels", 3)
        if not isinstance(size, int) or not isinstance(channels, int):
            raise _refusal(
                target, f"its image_size {size} is no single number", "write a job file with the model's images"
            )
        shape = channels, size, size
        data, loss = partial(_Images, shape), _label
    else:
        config.use_cache = False
        data, loss = partial(_Tokens, config.get_text_config().vocab_size, length), _next_token
    return Job(
        model=build,
        loss=loss,
        optimizer=_adamw,
        train_data=data,
        global_batch=rows,
        length=Epochs(1),
    )


def _sizes(
    target: str, config: Any, build: Any, given: tuple[int | None, int | None], *, takes_images: bool
) -> tuple[int, int]:
    """Return the sequence length in tokens (0 for images) and the batch in samples.

    Raises: CommandError if a size is missing, or if the sequence is longer than the model's position table.
    """
    sequence, batch = given
    if takes_images:
        if sequence is not None:
            raise _refusal(
                f"{target} --seq {sequence}", "its model takes images, which have no length", "leave out --seq"
            )
        if batch is None:
            raise _refusal(target, "a configuration says no batch", "write --batch 512, say")
        return 0, batch
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    usual = min(longest or _USUAL, _USUAL)
    missing = {"length": f"--seq {usual}"} if sequence is None else {}
    missing |= {"batch": "--batch 512"} if batch is None else {}
    if sequence is None or batch is None:
        raise _refusal(
            target, f"a configuration says no {' and no '.join(missing)}", f"write {' '.join(missing.values())}, say"
        )
    has_table = False
    if longest and sequence > longest:  # a table of positions limits the length; rotary embeddings do not
        with torch.device("meta"):
            modules = build().named_modules()
        names = (name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Embedding))
        has_table = any("position" in name or name == "wpe" for name in names)
    if has_table:
        raise _refusal(
            f"{target} --seq {sequence}", f"its longest sequence is {longest}", f"write --seq {longest}, or less"
        )
    return sequence, batch


def _model(target: str, folder: Path) -> tuple[Any, Any]:
    """Return the configuration and a function that builds its model in float32."""
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
            build()  # raises if transformers has no such model
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
    """Return the summed cross entropy of the next tokens, and their number. Batch: inputs, targets, int64 [B, T]."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    if logits.shape[:-1] != targets.shape:
        raise JobError(
            given=f"a configuration of {type(model).__name__}",
            conflict=f"its logits of shape {list(logits.shape)} are not those of tokens",
            remedy="write a job file with the model's own loss",
        )
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _label(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of the labels, and their number. Batch: images [B, C, H, W], labels int64 [B]."""
    images, labels = batch
    logits = getattr(model(pixel_values=images), "logits", None)
    if logits is None or logits.ndim != 2:
        raise JobError(
            given=f"a configuration of {type(model).__name__}",
            conflict="it gives no logits of one label for each image",
            remedy="write a job file with the model's own loss",
        )
    return cross_entropy(logits, labels)


@dataclass(frozen=True)
class _Tokens(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless stream of synthetic token sequences, each as a pair of inputs and targets."""

    vocabulary: int
    length: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        tokens = torch.arange(self.length + 1) % self.vocabulary
        while True:
            yield tokens[:-1], tokens[1:]


@dataclass(frozen=True)
class _Images(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless stream of labelled blank images of one shape."""

    shape: tuple[int, int, int]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        image, label = torch.zeros(self.shape), torch.tensor(0)
        while True:
            yield image, label
