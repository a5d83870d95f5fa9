"""Jobs of questions.py: public models at their real size on samples of zeros, whose values nobody looks at."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import shoal
from models import LeNet

FOLDER = Path(__file__).resolve().parent / "configurations"
STEPS = 1000
SAMPLES = 1 << 20


class Equal(Dataset[tuple[Tensor, Tensor]]):
    """The same pair of tensors as every sample."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._pair = inputs, targets

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self._pair


def _transformers(name: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(FOLDER / name)
    model: nn.Module = getattr(transformers, config.architectures[0])(config)
    return model


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _together(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Equal samples as one batch without a copy: how fast they are read is no part of a question."""
    return tuple(tensor.expand(len(samples), *tensor.shape) for tensor in samples[0])


def _job(model: Any, loss: Any, data: Any, batch: int, **more: Any) -> shoal.Job:
    settings = {"optimizer": _adamw, "global_batch": batch, "length": shoal.Steps(STEPS), "collate": _together}
    return shoal.Job(model=model, loss=loss, train_data=data, **{**settings, **more})


def _tokens(length: int) -> Equal:
    return Equal(torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64))


def _next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch[0], use_cache=False).logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _hidden_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten())


def text(config: str = "gpt2-124m", length: int = 1024, batch: int = 512) -> shoal.Job:
    """A language model of Transformers that continues text, or with `BertForMaskedLM` fills it in."""
    loss = _hidden_token if config.startswith("bert") else _next_token
    return _job(partial(_transformers, config), loss, partial(_tokens, length), batch, clip_norm=1.0)


def _images(side: int, channels: int) -> Equal:
    return Equal(torch.zeros(channels, side, side), torch.tensor(0))


def _class(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    found = model(batch[0])
    return shoal.cross_entropy(found if isinstance(found, Tensor) else found.logits, batch[1])


def images(config: str = "vit-large", batch: int = 4096) -> shoal.Job:
    """A classifier of Transformers on images of 224 pixels a side."""
    return _job(partial(_transformers, config), _class, partial(_images, 224, 3), batch)


def lenet(batch: int = 256) -> shoal.Job:
    """LeNet on images of 28 pixels a side."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return _job(LeNet, _class, partial(_images, 28, 1), batch, optimizer=optimizer)


class Recurrent(nn.Module):
    """The large LSTM of Zaremba et al. (arXiv:1409.2329): two layers of 1,500, 66 M parameters; tokens -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 1500)
        self.lstm = nn.LSTM(1500, 1500, num_layers=2, dropout=0.65, batch_first=True)
        self.head = nn.Linear(1500, 10_000)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


def _recurrent_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def recurrent(batch: int = 2048, length: int = 35) -> shoal.Job:
    """An LSTM that continues text."""
    return _job(Recurrent, _recurrent_loss, partial(_tokens, length), batch, clip_norm=10.0)


def _spoken(seconds: int) -> Equal:
    return Equal(torch.zeros(16_000 * seconds), torch.ones(50 * seconds - 1, dtype=torch.int64))


def _frames(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_values=batch[0]).logits
    return shoal.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def speech(config: str = "wav2vec2-large", seconds: int = 15, batch: int = 512) -> shoal.Job:
    """A speech model of Transformers that names each frame of 20 ms of so many seconds of sound."""
    return _job(partial(_transformers, config), _frames, partial(_spoken, seconds), batch)
