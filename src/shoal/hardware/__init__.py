"""Hardware catalogue: devices, links and hosts, and clusters by name, from a file, or as measured on this machine."""

from shoal.hardware.catalogue import device, link
from shoal.hardware.resolve import cluster
from shoal.hardware.toml import dump, load

__all__ = ["cluster", "device", "dump", "link", "load"]
