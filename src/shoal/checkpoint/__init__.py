"""Checkpoints: safetensors and JSON, written atomically, verified before anything is believed."""

from shoal.checkpoint.state import weights_sha256

__all__ = ["weights_sha256"]
