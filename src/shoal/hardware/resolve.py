"""Resolution of a cluster from a name, the path of a TOML file, or "here"."""

from __future__ import annotations

from shoal.hardware.cluster_names import named_cluster
from shoal.hardware.detect import here
from shoal.hardware.toml import load
from shoal.hardware.values import Cluster


def cluster(text: str) -> Cluster:
    """The cluster that is meant. Raises: HardwareError, as `named_cluster` and `load`."""
    if text == "here":
        return here()
    return load(text) if text.endswith(".toml") else named_cluster(text)
