"""Hardware catalogue: devices, links and hosts; clusters by name, from a file, or as measured on this machine."""

from dataclasses import replace

from shoal.hardware.catalogue import device, dump, link, load
from shoal.hardware.cluster_names import named_cluster
from shoal.hardware.detect import here
from shoal.hardware.values import Cluster

__all__ = ["cluster", "device", "dump", "link", "load"]


def cluster(text: str) -> Cluster:
    """Return the cluster for a name, the path of a TOML file, or "here". Its notes list guessed numbers of its device.

    Raises: HardwareError if there is no such cluster.
    """
    if text == "here":
        return here()
    known = load(text) if text.endswith(".toml") else named_cluster(text)
    guesses = (f"{known.device.name}: a guess: {guess}" for guess in known.device.guesses)
    return replace(known, notes=tuple(dict.fromkeys((*known.notes, *guesses))))
