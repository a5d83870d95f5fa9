"""Cluster of the hosts that `--on hosts:` names, as the hosts themselves describe it to the planner."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.errors import HardwareError, LaunchError
from shoal.hardware.catalogue import with_network
from shoal.hardware.values import Cluster, checked
from shoal.launch.launchers.base import words_of
from shoal.launch.launchers.ssh import HostProbe, named_hosts, together
from shoal.runs.version import __version__


@dataclass(frozen=True)
class HostsCluster:
    """Hosts that ssh reaches, as one cluster. Every host has as many processes as the smallest one can take."""

    hosts: tuple[str, ...]
    options: tuple[str, ...]  # of ssh
    cluster: Cluster

    def for_devices(self, number: int) -> str:
        """Return the engine and its options for `number` processes: on the first hosts, each with its number."""
        each = min(number, self.cluster.devices_per_host)
        hosts = ",".join(f"{host}:{each}" for host in self.hosts[: number // each])
        return f"hosts:{shlex.join((hosts, *self.options))}"


def ask_hosts(options: str) -> HostsCluster:
    """Ask all hosts in the text after `hosts:` over ssh for their devices, links, memory and network.

    Raises: CommandError without hosts; LaunchError of hosts that do not answer or have another version of shoal;
    HardwareError if their devices differ.
    """
    words = words_of(options)
    slots = named_hosts(words)
    probes: dict[str, HostProbe] = {}
    known: dict[str, Cluster] = {}
    errors, speeds = list[LaunchError](), list[float | None]()
    try:
        for host in slots:
            probes[host] = HostProbe(host, words[1:], "cluster")
        for host, probe in probes.items():
            try:
                version, table, gigabits = probe.answer()
            except LaunchError as error:
                errors.append(error)
                continue
            if version != __version__:
                has = f"it has shoal {version}, where the command has {__version__}"
                errors.append(LaunchError(given=f"host {host}", conflict=has, remedy="give every host one version"))
                continue
            known[host] = checked(Cluster, table, f"host {host}")
            speeds.append(gigabits)
    finally:
        for probe in probes.values():
            probe.close()
    if errors:
        raise errors[0] if len(errors) == 1 else together(errors)
    return HostsCluster(tuple(slots), tuple(words[1:]), _joined(known, slots, speeds))


def _joined(known: dict[str, Cluster], slots: dict[str, int], speeds: Sequence[float | None]) -> Cluster:
    """Return one cluster of the hosts: the least of their devices, memory and networks. Raises: HardwareError."""
    kinds = {one.device.name if one.device.kind == "gpu" else "cores of CPUs" for one in known.values()}
    if len(kinds) > 1:
        raise HardwareError(
            given=", ".join(f"{host}: {one.devices_per_host} {one.device.name}" for host, one in known.items()),
            conflict="a plan for named hosts has equal ranks, as the slowest host allows",
            remedy="name hosts of one kind with --on hosts:, or plan for --cluster with + between the kinds, and run "
            "its plan file on these hosts",
        )
    slowest = min(known.values(), key=lambda one: max(one.device.flops.values()))
    per_host = min(min(one.devices_per_host, slots[host] or one.devices_per_host) for host, one in known.items())
    memory = min(one.device.memory_bytes for one in known.values())
    cluster = replace(
        slowest,
        name="-".join(known),
        device=replace(slowest.device, memory_bytes=memory),
        devices_per_host=per_host,
        num_hosts=len(known),
        alternatives={ranks: one for ranks, one in slowest.alternatives.items() if ranks <= per_host},
    )
    if cluster.num_hosts == 1:
        return cluster
    if None in speeds:
        network = cluster.between.name if cluster.between is not None else "one"
        note = f"a host does not say how fast its network is: planned for {network}"
        return replace(cluster, notes=(*cluster.notes, note))
    return with_network(cluster, min(speed for speed in speeds if speed is not None), "the hosts' network cards")
