"""The GPT example on the paragraphs of this repository's LICENSE: a text that no version of Python changes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import gpt
import shoal
from datasets import Windows

BLOCK = 32


def job() -> shoal.Job:
    """Two layers of width 64, batches of 8 ragged windows."""
    paragraphs = (ROOT / "LICENSE").read_bytes().split(b"\n\n")
    small = gpt.job(batch=8, block=BLOCK, layers=2, width=64)
    return replace(small, train_data=Windows([p for p in paragraphs if len(p) > 1], BLOCK), eval_data=None)
