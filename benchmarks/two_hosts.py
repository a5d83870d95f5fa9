"""Claim: over a link between two hosts of two ranks an all-reduce moves 2/3 of flat Gloo's bytes, as the formula says.

16 MB: 32.08 MB over the link in both directions (formula 32) against 48.11; 4 MB: 8.02 against 12.03; 1 MB: 2.01
against 6.02. 2 cores, a link of 1 Gbit/s, torch 2.13.0, medians of 5: 14 ms (11 to 16) against 33 (28 to 43) for 1 MB,
46 (41 to 52) against 46 (43 to 49) for 4 MB, 176 (170 to 197) against 190 (185 to 208) for 16 MB.
Compressed it moves what the schemes leave of that: 16.05 MB in bfloat16 and 8.17 in int8 of 16 MB; compressed Gloo
moves 24.06 and 12.23. On busy cores that took 105 (91 to 117) and 133 ms (129 to 161), against 179 uncompressed.
Repeat as root on an idle machine with
`python -m benchmarks.two_hosts`: two network namespaces stand for two hosts, joined by a pair of virtual interfaces
that are shaped to RATE; each has two ranks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.distributed.collectives.base import Collective, Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.collectives.compression.compressed_sum import Compression
from shoal.plans.plan import CompressionSection

RATE = "1gbit"
HOSTS, ADDRESSES, LINKS = ("shoal-a", "shoal-b"), ("10.77.0.1", "10.77.0.2"), ("shoal-va", "shoal-vb")
SIZES, REPEATS = (1_000_000, 4_000_000, 16_000_000), 5
SCHEMES = ("none", "bfloat16", "int8")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def build() -> None:
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
    for host, address, link in zip(HOSTS, ADDRESSES, LINKS, strict=True):
        ip("link", "set", link, "netns", host)
        ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", link, "up")
        shape = ["tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"]
        ip("netns", "exec", host, "tc", "qdisc", "add", "dev", link, "root", *shape)


def crossed() -> int:
    """Bytes in both directions over this host's link."""
    folder = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"
    return sum(int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


def summing(collective: Collective, scheme: str, tensor: torch.Tensor) -> Callable[[], object]:
    """The sum of a tensor over all ranks, in place: as it is, or compressed as a step's gradients are."""
    if scheme == "none":
        return lambda: collective.all_reduce(tensor)
    compression = Compression(collective, scheme, CompressionSection(feedback=False, guard_every=0))
    compression.add([0], [tuple(tensor.shape)], tensor.device)

    def call() -> None:
        compression.begin(1)
        compression.step_unit = 1.0
        compression.start(0, tensor)
        compression.drain()

    return call


def rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    cpu, timeout = torch.device("cpu"), timedelta(seconds=100)
    names = ("native", "ring", "hierarchical")
    opened = {name: open_collective(name, Team(), cpu, timeout) for name in names}
    ways = [(name, scheme) for scheme in SCHEMES for name in names if scheme == "none" or name != "ring"]
    for size in SIZES:
        seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        moved = dict.fromkeys(ways, 0)
        tensors = {name: collective.allocate(size // 4, torch.float32) for name, collective in opened.items()}
        sums = {way: summing(opened[way[0]], way[1], tensors[way[0]]) for way in ways}
        for _ in range(REPEATS):
            for way, call in sums.items():
                tensors[way[0]].normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
                dist.barrier()
                before, began = crossed(), time.perf_counter()
                call()
                seconds[way].append(time.perf_counter() - began)
                dist.barrier()
                moved[way] += crossed() - before
        for way in ways if dist.get_rank() == 0 else ():
            low, median, high = min(seconds[way]), statistics.median(seconds[way]), max(seconds[way])
            times = f"{median * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})"
            name = way[0] if way[1] == "none" else ", ".join(way)
            print(
                f"{size / 1e6:5.0f} MB  {name:24}{times:24}{moved[way] / REPEATS / 1e6:8.2f} MB over the link",
                flush=True,
            )
        del sums
        for name, collective in opened.items():
            collective.release(tensors.pop(name))
    dist.barrier()
    os._exit(0)


def main() -> None:
    if len(sys.argv) > 1:
        rank()
    ranks = []
    try:
        build()
        for number in range(4):
            host = number // 2
            variables = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29777", "WORLD_SIZE": "4", "RANK": str(number)}
            variables |= {"GLOO_SOCKET_IFNAME": LINKS[host], "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", HOSTS[host], sys.executable, "-W", "ignore", "-m", "benchmarks.two_hosts"]
            ranks.append(subprocess.Popen([*command, "rank"], env={**os.environ, **variables}))
        for process in ranks:
            process.wait(timeout=300)
    finally:
        for process in ranks:
            process.kill()
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


if __name__ == "__main__":
    main()
