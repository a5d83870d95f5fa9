"""The MLP on samples that are files in $TEST_DATA, which the first process writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

import shoal


class Files(torch.utils.data.Dataset[Any]):
    """A file for each vector."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["TEST_DATA"])
        for i, row in enumerate(zip(*tiny.vectors(64), strict=True)):
            if not (self.folder / f"{i}.pt").exists():
                aside = self.folder / f"{i}.{os.getpid()}"
                torch.save(row, aside)
                aside.rename(self.folder / f"{i}.pt")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        row: tuple[Tensor, ...] = torch.load(self.folder / f"{i}.pt")
        return row


def job() -> shoal.Job:
    """Sixteen steps."""
    return tiny.mlp(train_data=Files)
