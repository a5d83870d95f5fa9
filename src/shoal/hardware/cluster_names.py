"""Cluster names: "8xH100", "4x8xA100-80-SXM", "2xDGX-1", "2xcpu", with "@pcie4", "@200Gb" or "@500W"."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from shoal.errors import HardwareError
from shoal.hardware.catalogue import (
    CAP,
    capped,
    device,
    devices,
    entry,
    find,
    host,
    hosts,
    link,
    links,
    names,
    unknown,
)
from shoal.hardware.values import Cluster, Curve, Device, Link

_NAME = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([^@]+)((?:@[^@]+)*)", re.IGNORECASE)
_SPEED = re.compile(r"(\d+(?:\.\d+)?)gb(?:ps|it|it/s)?", re.IGNORECASE)
_MARGIN = re.compile(r"margin=(\d+(?:\.\d+)?)%", re.IGNORECASE)
_PORTS = re.compile(r"(?:(\d+)x)?(.+)", re.IGNORECASE)
_SPEED_SHARE = 0.9  # reached share of a network's speed, if only the speed is known


def named_cluster(text: str) -> Cluster:
    """Return the cluster for a name.

    - NxDEVICE: N devices in hosts of the usual size; HxNxDEVICE: H hosts of N devices; HxHOST: H hosts.
    - "@LINK" replaces a link: a link within a host, P x a network link, or a network speed per host ("@200Gb").
    - "@500W" caps each device's power; "@margin=2%" sets the share of device memory that plans leave free.

    Raises: HardwareError if the catalogue has no such name, or the devices do not fill whole hosts.
    """
    parts = _NAME.fullmatch(text.strip())
    if parts is None:
        raise unknown("cluster", text, names(devices()))
    first, second, name, modifiers = parts.groups()
    of_device, of_host = find(name, devices()), find(name, hosts())
    if of_device is not None:
        where = replace(host(devices()[of_device]["host"]), device=of_device)  # the device's usual host
    elif of_host is not None:
        where = host(of_host)
    else:
        raise unknown("device", name, names(devices()) + names(hosts()))
    if any(count and not int(count) for count in (first, second)):
        raise HardwareError(
            given=f"cluster {text!r}",
            conflict="it has no device",
            remedy=f"write how many there are, from 1 on: 8x{name}",
        )
    one, number = device(where.device), int(first or 1)
    if first and second:
        num_hosts, per_host = int(first), int(second)
    elif of_device is None:
        num_hosts, per_host = number, where.devices
    elif number <= where.devices or one.kind == "cpu":
        num_hosts, per_host = 1, number
    else:
        num_hosts = -(-number // where.devices)
        per_host = number // num_hosts
        if number % num_hosts:
            raise HardwareError(
                given=text,
                conflict=f"{number} devices are no whole number of hosts of up to {where.devices} ({where.name})",
                remedy=f"write {num_hosts * where.devices}x{where.device}, or hosts x devices: "
                f"1x{number}x{where.device}",
            )
    # A host with a port per device has one for each of these devices.
    ports = min(where.ports, per_host) if where.ports == where.devices else where.ports
    cores = range(1, per_host) if one.kind == "cpu" else ()
    cluster = Cluster(
        name=text,
        device=one,
        devices_per_host=per_host,
        num_hosts=num_hosts,
        within=link(where.within) if where.within else None,
        between=_of_ports(link(where.between), ports) if where.between else None,
        mean_hours_between_failures=where.mean_hours_between_failures,
        alternatives={ranks: of_cores(one, per_host, ranks) for ranks in cores},
    )
    for modifier in filter(None, modifiers.split("@")):
        if cap := CAP.fullmatch(modifier):
            cluster = replace(cluster, device=capped(cluster.device, float(cap[1])))
            continue
        if margin := _MARGIN.fullmatch(modifier):
            percent = float(margin[1])
            if percent >= 100:
                raise HardwareError(
                    given=f"a memory margin of {percent:g} %",
                    conflict="it leaves no memory to plans",
                    remedy=f"write less, as {cluster.device.name}@margin=5%",
                )
            cluster = replace(cluster, memory_margin=percent / 100)
            continue
        port_parts = _PORTS.fullmatch(modifier)
        count, link_name = port_parts.groups() if port_parts else (None, modifier)
        num_ports = int(count or 1)
        if speed := _SPEED.fullmatch(link_name):
            cluster = with_network(cluster, float(speed[1]) * num_ports, "given")
            continue
        known = entry("link", link_name, links())
        other, is_within = _of_ports(link(known), num_ports), links()[known]["reach"] == "host"
        cluster = replace(cluster, within=other) if is_within else replace(cluster, between=other)
    return cluster


def with_network(cluster: Cluster, gigabits: float, source: str) -> Cluster:
    """Return the cluster with a network of `gigabits` Gbit/s a host."""
    like = cluster.between or link("InfiniBand-HDR")
    stated = f"{source}: {gigabits:g} Gbit/s a host; x {_SPEED_SHARE} (stated)"
    network = replace(
        like,
        name=f"{gigabits:g} Gbit/s",
        bytes_per_second=gigabits * 1e9 / 8 * _SPEED_SHARE,
        sources={**like.sources, "bytes_per_second": stated},
    )
    return replace(cluster, between=network)


def of_cores(core: Device, cores: int, ranks: int) -> Device:
    """Return the device of each of `ranks` ranks on a host of `cores` cores: an equal share of threads and memory."""
    threads = cores // ranks
    if threads == 1 and ranks == cores:
        return core

    def stretched(curves: Any) -> dict[str, Curve]:  # every thread has a part of the work
        return {name: Curve(tuple((x * threads, y) for x, y in curve.points)) for name, curve in curves.items()}

    return replace(
        core,
        name=f"{core.name} ({threads} threads)",
        memory_bytes=core.memory_bytes * cores // ranks,
        memory_bytes_per_second=core.memory_bytes_per_second * cores / ranks,
        flops={dtype: value * threads for dtype, value in core.flops.items()},
        matmul=stretched(core.matmul),
        memory=Curve(tuple((x * threads, y) for x, y in core.memory.points)),
        memory_alone=None,
    )


def _of_ports(one: Link, ports: int) -> Link:
    if ports == 1:
        return one
    sources = dict(one.sources)
    sources["bytes_per_second"] = f"{ports} ports: {sources.get('bytes_per_second', '')}"
    return replace(one, name=f"{ports}x{one.name}", bytes_per_second=one.bytes_per_second * ports, sources=sources)
