"""Reduction of benchmark samples, in seconds, to a Cluster. Values only: no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.hardware.values import PROCESS_GROUP, SHARED_MEMORY, STREAM_BYTES, Curve, Device, Link, weight_bytes

# A call's own cost is taken off a sample, but never more than this part of it: the rest would be noise.
_MOST_OVERHEAD = 0.7
# A product whose tiles fill a GPU many times over.
_LARGE_FLOPS = 1e11


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of samples of seconds (least, lower quartile, median, ninth decile), and their number."""

    least: float
    quartile: float
    median: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Of at least one sample."""
        ordered = sorted(samples)
        quartile, ninth = (ordered[int(part * (len(ordered) - 1))] for part in (0.25, 0.9))
        return cls(ordered[0], quartile, statistics.median(ordered), ninth, len(ordered))


@dataclass(frozen=True)
class Measured:
    """Measurements of all ranks: quantiles of seconds and the work of a call, by name and size."""

    ranks: int
    facts: Mapping[str, Any]
    spreads: Mapping[tuple[str, float], Quantiles]
    works: Mapping[tuple[str, float], float] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, Any]]) -> Measured:
        """Of the ranks' documents: samples of the same probe are pooled."""
        samples: dict[tuple[str, float], list[float]] = {}
        works: dict[tuple[str, float], float] = {}
        for row in (row for document in documents for row in document["rows"]):
            key = row["name"], float(row["size"])
            samples.setdefault(key, []).extend(row["seconds"])
            works[key] = row["work"]
        spreads = {key: Quantiles.of(found) for key, found in samples.items() if found}
        return cls(len(documents), documents[0]["facts"], spreads, works)

    def of_name(self, name: str) -> dict[float, float]:
        """Seconds by size, growing: the median, since a step is a sum of such calls, some quick and some slow."""
        return {size: self.spreads[known, size].median for known, size in sorted(self.spreads) if known == name}

    def one(self, name: str) -> float | None:
        """Seconds of a unit of work of a probe that has one size."""
        return next((seconds / self.works[name, size] for size, seconds in self.of_name(name).items()), None)

    def names(self, prefix: str) -> list[str]:
        """Suffixes of the names with that prefix, each once."""
        return sorted({name.removeprefix(prefix) for name, _ in self.spreads if name.startswith(prefix)})

    def rates(self, name: str, overhead: float) -> dict[float, float]:
        """Work a second by size, after a call's own cost."""
        works = self.timed(name, overhead)
        return {size: work / seconds for size, (work, seconds) in zip(self.of_name(name), works, strict=True)}

    def timed(self, name: str, overhead: float) -> list[tuple[float, float]]:
        """Work and seconds in order of size, after a call's own cost."""
        return [
            (self.works[name, size], max(seconds - overhead, (1 - _MOST_OVERHEAD) * seconds))
            for size, seconds in self.of_name(name).items()
        ]


def device_of(measured: Measured, name: str, memory_bytes: int, source: str, *, known: Device | None = None) -> Device:
    """The device that one rank had; `known` is the catalogue's entry for it, which has the datasheet's peaks."""
    is_cpu = measured.facts["kind"] == "cpu"
    bare, product, dispatch = (measured.one(name) or 0.0 for name in ("overhead.stream", "overhead.matmul", "dispatch"))
    products = _rates(measured, "matmul.", product if is_cpu else 0.0)
    flops = {dtype: max(rates.values()) for dtype, rates in products.items()}
    flops |= {dtype: known.flops[dtype] for dtype in flops if known and dtype in known.flops}
    convolutions = _rates(measured, "convolution.", product if is_cpu else 0.0)
    stream = measured.rates("stream", bare if is_cpu else 0.0)
    # On a CPU larger results than glibc keeps meet page faults every time: they are on the curve, not its unit.
    memory = stream[max(work for work in stream if not is_cpu or work <= STREAM_BYTES or work == min(stream))]
    weights = _weights(measured, product)
    copy = measured.one("host_copy")
    alone = measured.rates("alone", bare)
    found: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "memory_bytes_per_second": memory,
        "flops": flops,
        # What tiles and their waves waste of a small product, the planner computes for a GPU.
        "matmul": {
            dtype: _curve(rates if is_cpu else _large(rates), flops[dtype]) for dtype, rates in products.items()
        },
        "convolution": {
            kind: _curve(rates, flops[dtype])
            for kind, rates in convolutions.items()
            if (dtype := kind.partition("_")[0]) in flops
        },
        "windows": _windows(measured, product if is_cpu else 0.0, flops, weights),
        "window_weights": {kind: round(1 / each / memory, 4) for kind, each in weights.items() if each},
        "memory": _curve(stream, memory),
        # Alone no rank is slower: where it seems so the system gave out the pages of large results anew.
        "memory_alone": _curve({size: max(rate, stream.get(size, 0.0)) for size, rate in alone.items()}, memory)
        if alone
        else None,
        "attention" if not is_cpu else "attention_lengths": _attention(measured, flops, by_length=is_cpu),
        "operators": _operators(measured, memory, bare) if is_cpu else {},
        # A CPU starts an operator and computes it on the same core: what a GPU's host does meanwhile, it does first.
        "launch_seconds": dispatch if is_cpu else measured.one("launch"),
        "dispatch_seconds": dispatch,
        "host_bytes_per_second": 1 / copy if copy else 0.0,
        **(_besides(measured, dispatch) if is_cpu else {}),
        "reserved_bytes": int(measured.facts["resident_bytes"]),
        "multiprocessors": int(measured.facts.get("multiprocessors", 0)),
    }
    found = {key: value for key, value in found.items() if value}
    sources = dict.fromkeys(found, source)
    if known is None:
        return Device(name=name, kind=measured.facts["kind"], sources=sources, **found)
    found["flops"], found["matmul"] = {**known.flops, **flops}, {**known.matmul, **found["matmul"]}
    sources["flops"] = known.sources["flops"]
    return replace(known, sources={**known.sources, **sources}, **found)


def _rates(measured: Measured, prefix: str, overhead: float) -> dict[str, dict[float, float]]:
    return {dtype: measured.rates(f"{prefix}{dtype}", overhead) for dtype in measured.names(prefix)}


def _large(rates: Mapping[float, float]) -> dict[float, float]:
    largest = max(rates)
    return {work: rate for work, rate in rates.items() if work >= min(largest, _LARGE_FLOPS)}


def _curve(rates: Mapping[float, float], peak: float) -> Curve:
    return Curve(tuple((round(size, 3), round(rate / peak, 4)) for size, rate in rates.items()))


def _windows(
    measured: Measured, overhead: float, flops: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Fractions of the peak, by kind and window, without what the `weights` take, in seconds a byte."""
    found: dict[str, dict[str, float]] = {}
    for name in measured.names("window."):
        kind, _, window = name.partition(":")
        ((work, seconds),) = measured.timed(f"window.{name}", overhead)
        seconds = max(seconds - weights.get(kind, 0.0) * weight_bytes(window), (1 - _MOST_OVERHEAD) * seconds)
        found.setdefault(kind, {})[window] = round(work / seconds / flops[kind.partition("_")[0]], 4)
    return found


def _weights(measured: Measured, overhead: float) -> dict[str, float]:
    """Seconds a byte of a convolution's weights by kind, from the line through many images and few."""
    found: dict[str, float] = {}
    for name in measured.names("weights."):
        kind, _, window = name.partition(":")
        ((few, quick),) = measured.timed(f"weights.{name}", overhead)
        ((many, slow),) = measured.timed(f"window.{name}", overhead)
        found[kind] = max(0.0, (quick * many - slow * few) / (many - few)) / weight_bytes(window)
    return found


def _attention(measured: Measured, flops: Mapping[str, float], *, by_length: bool) -> dict[str, Any]:
    """Fractions of the peak, forward and backward (which is the rest of both), of one length or as curves over it."""
    found: dict[str, Any] = {}
    for dtype in sorted({name.partition(".")[0] for name in measured.names("attention.")}):
        forward, both = (f"attention.{dtype}.{part}" for part in ("forward", "both"))
        shares: dict[str, dict[float, float]] = {"flash2_forward": {}, "flash2_backward": {}}
        for size, seconds in measured.of_name(forward).items():
            work = measured.works[forward, size]
            shares["flash2_forward"][size] = work / seconds / flops[dtype]
            more, rest = measured.works.get((both, size), 0.0), measured.of_name(both).get(size, 0.0)
            if rest > seconds:
                shares["flash2_backward"][size] = (more - work) / (rest - seconds) / flops[dtype]
        for phase, share in shares.items():
            if share:
                found[phase] = _curve(share, 1.0) if by_length else round(next(iter(share.values())), 4)
    return found


def _operators(measured: Measured, memory: float, bare: float) -> dict[str, float]:
    """Fractions of the memory's rate at which operators work on what is in the caches."""
    found = {}
    for name in measured.names("operator."):
        (rate,) = measured.rates(f"operator.{name}", bare).values()
        found[name] = round(rate / memory, 4)
    return found


def _besides(measured: Measured, dispatch: float) -> dict[str, float]:
    """The engine's own seconds of a step, and of each parameter in it: what a step of next to nothing took.

    Its sums are left out where several ranks exchanged them: they are counted as sums.
    """
    seconds = sorted(measured.of_name("step").items())
    if len(seconds) < 2:
        return {}
    (few, quick), (many, slow) = (
        (size, whole - measured.works["step", size] * dispatch) for size, whole in (seconds[0], seconds[-1])
    )
    each = max(0.0, (slow - quick) / (many - few))
    sums = next(iter(measured.of_name(f"algorithm.{SHARED_MEMORY}").values()), 0.0)
    return {"step_seconds": max(0.0, quick - few * each - sums), "tensor_seconds": each}


# Exchanges of a measured step that predictions count by themselves: of each parameter (a block of four is gathered
# twice and scattered, or summed in each direction), and once, beside the step's two small sums and its norm.
_EXCHANGES = {"shard": (3 / 4, 0), "tensor": (2 / 4, 0), "pipeline": (0.0, 4)}


def divided_of(
    measured: Measured, axis: str, dispatch: float, host: Link | None, group: Link | None
) -> dict[str, float]:
    """Costs that the engine adds to a step on an axis that divides the model, and memory that its process holds.

    `host`: the link of a step's own sums; `group`: that of the model's.
    """
    if host is None or group is None:
        return {}
    found, (of_tensor, of_step) = _besides(measured, dispatch), _EXCHANGES[axis]
    once = 3 * (host.call_seconds + 2 * (measured.ranks - 1) * host.latency_seconds)
    once += of_step * (host.call_seconds + host.latency_seconds)
    each = of_tensor * (group.call_seconds + (measured.ranks - 1) * group.latency_seconds)
    return {
        "step_seconds": max(0.0, found["step_seconds"] - once),
        "tensor_seconds": max(0.0, found["tensor_seconds"] - each),
        "reserved_bytes": float(measured.facts["resident_bytes"]),
    }


def algorithms_of(measured: Measured, source: str) -> dict[str, Link]:
    """The links that shoal's own all_reduces are as fast as: the smallest of each is its call; and a process group."""
    found, n = {}, measured.ranks
    for name in measured.names("algorithm."):
        seconds = measured.of_name(f"algorithm.{name}")
        call = min(seconds.values())
        rates = {
            size: 2 * (n - 1) / n * size / max(whole - call, (1 - _MOST_OVERHEAD) * whole)
            for size, whole in _sizeable(seconds)
        }
        peak = max(rates.values())
        keys = ("bytes_per_second", "call_seconds", "bandwidth")
        words = f"{name} between {n} processes of one host"
        found[name] = Link(words, peak, 0.0, call, _curve(rates, peak), sources=dict.fromkeys(keys, source))
    group = link_of(measured, f"a process group in shared memory of {n} processes", source, "group")
    return {**found, PROCESS_GROUP: group} if group is not None else found


def link_of(measured: Measured, name: str, source: str, probes: str = "exchange") -> Link | None:
    """The link between the ranks of a measurement; None where it exchanged nothing by probes of that name.

    Latency is that of the smallest send, and what the smallest all_reduce takes beyond its 2 (n-1) hops is the call.
    The bandwidth is the best of all_reduce; each kind's curve is what makes the whole of its time come out right.
    """
    reduced = measured.of_name(f"{probes}.all_reduce")
    if not reduced:
        return None
    n = measured.ranks
    sent = {work: seconds / 2 for work, seconds in measured.of_name(f"{probes}.send").items()}  # there and back
    smallest = min(reduced.values())
    latency = min(sent.values(), default=smallest / 2) if sent else smallest / 2
    latency = min(latency, smallest / (2 * (n - 1)))
    call = smallest - 2 * (n - 1) * latency
    hops = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1, "send": 1}
    moved = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "send": 1.0}
    rates = {
        kind: {
            work: moved[kind] * work / max(seconds - call - hops[kind] * latency, (1 - _MOST_OVERHEAD) * seconds)
            for work, seconds in _sizeable(sent if kind == "send" else measured.of_name(f"{probes}.{kind}"))
        }
        for kind in hops
    }
    peak = max(rates["all_reduce"].values())
    curves = {kind: _curve(found, peak) for kind, found in rates.items() if found}
    keys = ("bytes_per_second", "latency_seconds", "call_seconds", "bandwidth", "collectives")
    return Link(
        name=name,
        bytes_per_second=peak,
        latency_seconds=latency,
        call_seconds=max(0.0, call),
        bandwidth=curves.pop("all_reduce"),
        collectives=curves,
        sources=dict.fromkeys(keys, source),
    )


def _sizeable(seconds: Mapping[float, float]) -> Iterable[tuple[float, float]]:
    """Sizes of which bandwidth says something: not the smallest."""
    return list(seconds.items())[1:] or list(seconds.items())


def table(measured: Measured) -> dict[str, list[float]]:
    """For people: least, quartile, median, ninth decile in seconds and the number of samples, by name and size."""
    return {
        f"{name} {size:g}": [
            float(f"{value:.4g}") for value in (spread.least, spread.quartile, spread.median, spread.p90)
        ]
        + [spread.count]
        for (name, size), spread in sorted(measured.spreads.items())
    }
