"""Hardware catalogue: devices, links and hosts; clusters by name, from a file, or as measured on this machine."""

from shoal.hardware.catalogue import device, dump, link, load
from shoal.hardware.detect import cluster

__all__ = ["cluster", "device", "dump", "link", "load"]
