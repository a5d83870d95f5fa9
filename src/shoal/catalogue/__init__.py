"""Catalogue: known devices, links and hosts, and clusters by name, from a file, or as measured on this machine."""

from shoal.catalogue.named import cluster, device, link
from shoal.catalogue.text import dump, load

__all__ = ["cluster", "device", "dump", "link", "load"]
