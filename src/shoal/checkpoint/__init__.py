"""Checkpoints: safetensors and JSON, written atomically and verified before they are loaded."""

from shoal.checkpoint.state import weights_sha256

__all__ = ["weights_sha256"]
