"""Hardware in TOML: devices, links and hosts of the catalogue in this folder, cluster files, and names of clusters.

A cluster file has exact keys. It gives devices and links in full, by name, or as differences from a named one. Names of
clusters are like "8xH100", "4x8xA100-80-SXM", "2xDGX-1" and "2xcpu", with "@pcie4", "@200Gb" or "@500W".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from shoal.errors import HardwareError, nearest
from shoal.hardware.values import Cluster, Curve, Device, Link, checked, to_table

_CATALOGUED = ("like", "aliases", "match", "host", "reach")  # keys of an entry that are not fields of the value


@dataclass(frozen=True)
class Host:
    """Host of the catalogue: its devices, joined by `within`, and `ports` of the network link `between`."""

    name: str
    device: str
    devices: int
    within: str | None = None
    between: str | None = None
    ports: int = 1
    aliases: Sequence[str] = ()
    mean_hours_between_failures: float | None = None
    source: str = ""


def plain(name: str) -> str:
    """Return a name in the form for comparisons: without case, hyphens and spaces."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@cache
def devices() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of all devices by name, with the values of `like` filled in."""
    return _tables("gpus.toml", "cpus.toml")


@cache
def links() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of all links, as `devices`."""
    return _tables("links.toml")


@cache
def hosts() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of all hosts, as `devices`."""
    return _tables("hosts.toml")


def find(name: str, table: Mapping[str, Any]) -> str | None:
    """Return the entry of `table` with this name or alias; None if there is none."""
    wanted = plain(name)
    return next((known for known in table if wanted in map(plain, names({known: table[known]}))), None)


def entry(what: str, name: str, table: Mapping[str, Any]) -> str:
    """Return the entry of `table` with this name or alias. Raises: HardwareError if there is none."""
    known = find(name, table)
    if known is None:
        raise unknown(what, name, names(table))
    return known


def names(table: Mapping[str, Any]) -> list[str]:
    """Return all names and aliases of a table."""
    return [name for known, entry in table.items() for name in (known, *entry.get("aliases", ()))]


def device(name: str) -> Device:
    """Return a device of the catalogue, capped if the name ends in "@500W". Raises: HardwareError if there is none."""
    name, _, cap = name.partition("@")
    known = checked(Device, described("device", name), f"device {name}")
    if not cap:
        return known
    watts = CAP.fullmatch(cap)
    if watts is None:
        raise HardwareError(
            given=f"device {name}@{cap}",
            conflict=f"{cap!r} is no power cap",
            remedy=f"write watts behind the @, as {name}@500W",
        )
    return capped(known, float(watts[1]))


def link(name: str) -> Link:
    """Return a link of the catalogue. Raises: HardwareError if there is none of this name."""
    return checked(Link, described("link", name), f"link {name}")


def host(known: str) -> Host:
    """Return the host of an entry."""
    return Host(**hosts()[known])


def unknown(what: str, name: str, known: list[str]) -> HardwareError:
    """Return the error for a name that the catalogue lacks."""
    near = nearest(name, known) or nearest(name.upper(), known)
    return HardwareError(
        given=f"{what} {name!r}",
        conflict=f"the catalogue has no {what} of that name{near}",
        remedy="give a name of the catalogue (8xH100, 4x8xA100-80-SXM, 2xcpu), a file ending in .toml, or here",
    )


def described(what: str, text: Any) -> Any:
    """Return the table of a "device" or "link", given by name or by table. Other values are returned unchanged.

    The function fills in the entry that `like` names, without the catalogue's own keys. A device's name may have a cap.
    """
    own = {"like": text} if isinstance(text, str) else text
    if not isinstance(own, dict) or "like" not in own:
        return own
    if what == "device" and "@" in str(own["like"]):
        return _joined({key: value for key, value in own.items() if key != "like"}, to_table(device(own["like"])))
    known = devices() if what == "device" else links()
    parent = entry(what, str(own["like"]), known)
    joined = {"name": parent, **_joined(own, known[parent])}
    return {key: value for key, value in joined.items() if key not in _CATALOGUED}


def _joined(own: Mapping[str, Any], parent: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `own` over `parent`. An overridden number needs its own source; "none" removes a value."""
    sources = {key: text for key, text in parent.get("sources", {}).items() if key not in own}
    joined = {**parent, **own, "sources": sources | own.get("sources", {})}
    return {key: value for key, value in joined.items() if value != "none"}


def _filled(name: str, all_tables: Mapping[str, Any]) -> Mapping[str, Any]:
    table = {"name": name, **all_tables[name]}
    like = table.pop("like", None)
    if like is None:
        return table
    parent = {key: value for key, value in _filled(like, all_tables).items() if key not in ("aliases", "match")}
    return _joined(table, parent)


def _tables(*names: str) -> Mapping[str, Mapping[str, Any]]:
    entries: dict[str, Any] = {}
    for name in names:
        entries |= tomllib.loads(files("shoal.hardware").joinpath(name).read_text(encoding="utf-8"))
    return {name: _filled(name, entries) for name in entries}


# ------------------------------------------------------------------------------------------------------- power caps

CAP: Final = re.compile(r"(\d+(?:\.\d+)?)\s?W", re.IGNORECASE)
# Share of the limit that leakage, memory and links draw at any clock.
_IDLE: Final = 0.2
# Dynamic power is f V^2 (f the clock, V the voltage). At boost clocks V grows a little slower than f: with V ~ f^(2/3),
# power grows with f^(7/3), and the clock with the power to 3/7.
_CLOCK: Final = 3 / 7
_LEAST: Final = 0.3  # of the limit: no driver for a device of the catalogue accepts less


def capped(device: Device, watts: float) -> Device:
    """Return the device with its power limit set to `watts`. Tensor cores slow down with the clock; memory does not.

    The model assumes that whole steps draw the full limit as sold, as the steps to which `sustained` was fitted do.
    Raises: HardwareError if the device's limit is unknown, or the cap is above the limit or below a driver's minimum.
    """
    limit = device.watts
    if limit is None:
        raise HardwareError(
            given=f"{device.name} at {watts:g} W",
            conflict="the catalogue does not know what this device draws without a cap",
            remedy=f"write it without a cap, or a file with [device] like = {device.name!r} and its watts",
        )
    if not _LEAST * limit <= watts <= limit:
        raise HardwareError(
            given=f"{device.name} at {watts:g} W",
            conflict=f"its own limit is {limit:g} W, and drivers set no less than {_LEAST * limit:g} W",
            remedy=f"write between {_LEAST * limit:g} and {limit:g} W, as {device.name}@{0.75 * limit:.0f}W",
        )
    if watts == limit:
        return device
    clock = ((watts / limit - _IDLE) / (1 - _IDLE)) ** _CLOCK
    how = f"capped at {watts:g} of {limit:g} W: x {clock:.2f} ((P - 0.2 P0) / 0.8 P0) ^ (3/7) (stated)"
    sources = {key: f"{device.sources.get(key, '')}; {how}" for key in ("sustained", "attention")}
    return replace(
        device,
        name=f"{device.name}@{watts:g}W",
        watts=watts,
        sustained=device.sustained * clock,
        sustained_dtypes={dtype: share * clock for dtype, share in device.sustained_dtypes.items()},
        attention={kernel: share * clock for kernel, share in device.attention.items()},
        sources={**device.sources, **sources, "watts": f"given: a cap of {watts:g} W"},
    )


# ---------------------------------------------------------------------------------------------------- cluster files

SCHEMA = 1
# Keys that are not the cluster's: `shoal bench` adds the spread of its measurements, and where and when it ran.
_BESIDE = ("schema", "measurements", "machine")
_DESCRIBED = {"device": "device", "within": "link", "between": "link"}
_DESCRIBED_BY_NAME = {"alternatives": "device", "algorithms": "link"}


def load(path: Path | str) -> Cluster:
    """Load the cluster from a TOML file. Raises: HardwareError, with all mistakes, if it is missing or invalid."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(
            given=str(path),
            conflict=f"the file cannot be read: {error.strerror}",
            remedy="give the path of a cluster file, or a name such as 8xH100",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(
            given=str(path), conflict=f"it is not TOML: {error}", remedy="mend the file at that place"
        ) from None
    if document.get("schema", SCHEMA) != SCHEMA:
        raise HardwareError(
            given=str(path),
            conflict=f"schema = {document['schema']!r} is not {SCHEMA}",
            remedy=f"measure the machine again with shoal bench -o {path}, or read it with the version that wrote it",
        )
    table = {"name": Path(path).stem} | {key: value for key, value in document.items() if key not in _BESIDE}
    kinds = table.pop("kinds", None)
    if kinds is None:
        return _from_table(table, str(path))
    beside = sorted(table.keys() - {"name", "within"})
    if not isinstance(kinds, list) or len(kinds) < 2 or not all(isinstance(kind, dict) for kind in kinds) or beside:
        raise HardwareError(
            given=f"{path}: kinds" + (f" with {', '.join(beside)}" if beside else ""),
            conflict="a file of several kinds has two or more tables [[kinds]] and, if one host has them, [within]",
            remedy="write each kind's devices and links in its own table, as docs/hardware.md describes the format",
        )
    parts = [
        _from_table({"name": f"kinds[{place}]"} | kind, f"{path}: kinds[{place}]") for place, kind in enumerate(kinds)
    ]
    within = checked(Link, described("link", table["within"]), f"{path}: within") if "within" in table else None
    return joined(parts, str(table["name"]), within)


def _from_table(table: Mapping[str, Any], source: str) -> Cluster:
    """Return the cluster of a table. Raises: HardwareError with all mistakes."""
    table = {**table, **{key: described(what, table[key]) for key, what in _DESCRIBED.items() if key in table}}
    for key, what in _DESCRIBED_BY_NAME.items():
        if isinstance(table.get(key), dict):
            table[key] = {name: described(what, value) for name, value in table[key].items()}
    return checked(Cluster, table, source)


def joined(kinds: Sequence[Cluster], name: str, within: Link | None = None) -> Cluster:
    """Return one cluster of several kinds of devices, in the order of its ranks.

    Args:
        kinds: clusters of one kind each.
        name: of the cluster.
        within: link between the devices, if one host has all kinds; None if each host has devices of one kind.

    Raises: HardwareError if one kind is CPUs and another GPUs, or the network of a kind is unknown.
    """
    first = kinds[0]
    if any(kind.kinds for kind in kinds):
        raise HardwareError(
            given=f"cluster {name!r}",
            conflict="one of its kinds is itself a cluster of several kinds",
            remedy="write all kinds side by side, as 4xA100-80+4xV100-32, or in one file",
        )
    if len({kind.device.kind for kind in kinds}) > 1:
        raise HardwareError(
            given=f"cluster {name!r}",
            conflict="some of its devices are GPUs and others cores of CPUs, which do not train together",
            remedy="write a cluster of GPUs or one of CPUs",
        )
    if repeated := next((kind for kind in kinds if sum(kind.name == other.name for other in kinds) > 1), None):
        raise HardwareError(
            given=f"cluster {name!r}",
            conflict=f"two of its kinds have the name {repeated.name}",
            remedy="write devices of one kind together, as 2x2xH100; or give each a name of its own, in a file",
        )
    several = next((place for place, kind in enumerate(kinds) if kind.num_hosts > 1), None)
    if within is not None and several is not None:
        raise HardwareError(
            given=f"cluster {name!r} with [within] and kinds[{several}].num_hosts = {kinds[several].num_hosts}",
            conflict="[within] says that one host has all kinds",
            remedy="write num_hosts = 1, or leave [within] out",
        )
    if within is not None:
        return replace(
            first, name=name, devices_per_host=sum(kind.num_devices for kind in kinds), num_hosts=1, within=within,
            between=None, alternatives={}, algorithms={}, notes=(), kinds=tuple(kinds),
        )  # fmt: skip
    for kind in kinds:
        if kind.between is None:
            raise HardwareError(
                given=f"cluster {name!r}",
                conflict=f"the network of the hosts with {kind.device.name} is unknown",
                remedy="write its speed in Gbit/s behind a name, as 4xA100-80@100Gb, or [between] in a file",
            )
    slowest = min((kind.between for kind in kinds if kind.between is not None), key=lambda one: one.bytes_per_second)
    hosts = sum(kind.num_hosts for kind in kinds)
    return replace(
        first, name=name, num_hosts=hosts, between=slowest, alternatives={}, algorithms={}, notes=(), kinds=tuple(kinds)
    )


def dump(cluster: Cluster, beside: Mapping[str, Any] | None = None) -> str:
    """Return the cluster as TOML text for `load`; `beside` has additional tables, which `load` ignores."""
    import tomli_w

    table = to_table(cluster)
    if cluster.kinds:
        table = {key: table[key] for key in ("name", "kinds", *(("within",) if cluster.num_hosts == 1 else ()))}
    return tomli_w.dumps({"schema": SCHEMA, **table, **(beside or {})})


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
