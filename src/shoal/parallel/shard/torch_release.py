"""The release of torch that ZeRO stages 2 and 3 need."""

from __future__ import annotations

import torch

OLDEST = (2, 13)
OLDEST_TEXT = "2.13"


def missing() -> str:
    """Return why this process's torch cannot divide gradients and parameters; empty if it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST:
        return ""
    return f"before {OLDEST_TEXT} its fully_shard adds other parameters' gradients to those that a rank has none of"
