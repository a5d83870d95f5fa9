"""Reduction of benchmark samples, in seconds, to a Cluster. Values only: no torch, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.hardware.values import PROCESS_GROUP, SHARED_MEMORY, STREAM_BYTES, Curve, Device, Link, weight_bytes

# Largest part of a sample that is subtracted as the call's own cost; the remainder would be noise.
_MOST_OVERHEAD = 0.7
# FLOPs of a product whose tiles fill a GPU many times over.
_LARGE_FLOPS = 1e11


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of samples of seconds (least, lower quartile, median, ninth decile), and the number of samples."""

    least: float
    quartile: float
    median: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quantiles:
        """Return the quantiles of at least one sample."""
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
        """Combine the ranks' documents; samples of the same probe are pooled."""
        samples: dict[tuple[str, float], list[float]] = {}
        works: dict[tuple[str, float], float] = {}
        for row in (row for document in documents for row in document["rows"]):
            key = row["name"], float(row["size"])
            samples.setdefault(key, []).extend(row["seconds"])
            works[key] = row["work"]
        spreads = {key: Quantiles.of(seconds) for key, seconds in samples.items() if seconds}
        return cls(len(documents), documents[0]["facts"], spreads, works)

    def of_name(self, name: str) -> dict[float, float]:
        """Return median seconds by increasing size; the median, because a step is a sum of quick and slow calls."""
        return {size: self.spreads[known, size].median for known, size in sorted(self.spreads) if known == name}

    def one(self, name: str) -> float | None:
        """Return the seconds per unit of work of a probe with one size, or None if it was not measured."""
        return next((seconds / self.works[name, size] for size, seconds in self.of_name(name).items()), None)

    def names(self, prefix: str) -> list[str]:
        """Return the suffixes of all names with this prefix, sorted and unique."""
        return sorted({name.removeprefix(prefix) for name, _ in self.spreads if name.startswith(prefix)})

    def rates(self, name: str, overhead: float) -> dict[float, float]:
        """Return the work per second by size, without a call's own cost."""
        works = self.timed(name, overhead)
        return {size: work / seconds for size, (work, seconds) in zip(self.of_name(name), works, strict=True)}

    def timed(self, name: str, overhead: float) -> list[tuple[float, float]]:
        """Return pairs of work and seconds by increasing size, without a call's own cost."""
        return [
            (self.works[name, size], max(seconds - overhead, (1 - _MOST_OVERHEAD) * seconds))
            for size, seconds in self.of_name(name).items()
        ]


def device_of(measured: Measured, name: str, memory_bytes: int, source: str, *, known: Device | None = None) -> Device:
    """Return the device of one rank; `known` is its catalogue entry, which has the datasheet's peaks."""
    is_cpu = measured.facts["kind"] == "cpu"
    bare, product, dispatch = (measured.one(name) or 0.0 for name in ("overhead.stream", "overhead.matmul", "dispatch"))
    products = _rates(measured, "matmul.", product if is_cpu else 0.0)
    flops = {dtype: max(rates.values()) for dtype, rates in products.items()}
    flops |= {dtype: known.flops[dtype] for dtype in flops if known and dtype in known.flops}
    convolutions = _rates(measured, "convolution.", product if is_cpu else 0.0)
    stream = measured.rates("stream", bare if is_cpu else 0.0)
    # On a CPU, results too large for glibc to reuse cause page faults: they are on the curve but not its unit.
    memory = stream[max(work for work in stream if not is_cpu or work <= STREAM_BYTES or work == min(stream))]
    weights = _weights(measured, product)
    copy = measured.one("host_copy")
    alone = measured.rates("alone", bare)
    values: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "memory_bytes_per_second": memory,
        "flops": flops,
        # For a GPU, the planner itself computes the waste of tiles and waves in small products.
        "matmul": {
            dtype: _curve(
                {w: rate for w, rate in rates.items() if is_cpu or w >= min(max(rates), _LARGE_FLOPS)}, flops[dtype]
            )
            for dtype, rates in products.items()
        },
        "convolution": {
            kind: _curve(rates, flops[dtype])
            for kind, rates in convolutions.items()
            if (dtype := kind.partition("_")[0]) in flops
        },
        "windows": _windows(measured, product if is_cpu else 0.0, flops, weights),
        "window_weights": {kind: round(1 / each / memory, 4) for kind, each in weights.items() if each},
        "memory": _curve(stream, memory),
        # A single rank is never slower: if it seems so, the system reallocated the pages of large results.
        "memory_alone": _curve({size: max(rate, stream.get(size, 0.0)) for size, rate in alone.items()}, memory)
        if alone
        else None,
        "attention" if not is_cpu else "attention_lengths": _attention(measured, flops, by_length=is_cpu),
        # Speed on cached data, as fractions of the memory bandwidth.
        "operators": {
            name: round(next(iter(measured.rates(f"operator.{name}", bare).values())) / memory, 4)
            for name in (measured.names("operator.") if is_cpu else ())
        },
        # A CPU starts and computes an operator on the same core, so its launches do not overlap with computing.
        "launch_seconds": dispatch if is_cpu else measured.one("launch"),
        "dispatch_seconds": dispatch,
        "host_bytes_per_second": 1 / copy if copy else 0.0,
        **(_besides(measured, dispatch) if is_cpu else {}),
        "reserved_bytes": int(measured.facts["resident_bytes"]),
        "multiprocessors": int(measured.facts.get("multiprocessors", 0)),
    }
    values = {key: value for key, value in values.items() if value}
    sources = dict.fromkeys(values, source)
    if known is None:
        return Device(name=name, kind=measured.facts["kind"], sources=sources, **values)
    values["flops"], values["matmul"] = {**known.flops, **flops}, {**known.matmul, **values["matmul"]}
    sources["flops"] = known.sources["flops"]
    return replace(known, sources={**known.sources, **sources}, **values)


def _rates(measured: Measured, prefix: str, overhead: float) -> dict[str, dict[float, float]]:
    return {dtype: measured.rates(f"{prefix}{dtype}", overhead) for dtype in measured.names(prefix)}


def _curve(rates: Mapping[float, float], peak: float) -> Curve:
    return Curve(tuple((round(size, 3), round(rate / peak, 4)) for size, rate in rates.items()))


def _windows(
    measured: Measured, overhead: float, flops: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return fractions of the peak by kind and window, without the time of `weights` (seconds per byte)."""
    windows: dict[str, dict[str, float]] = {}
    for name in measured.names("window."):
        kind, _, window = name.partition(":")
        ((work, seconds),) = measured.timed(f"window.{name}", overhead)
        seconds = max(seconds - weights.get(kind, 0.0) * weight_bytes(window), (1 - _MOST_OVERHEAD) * seconds)
        windows.setdefault(kind, {})[window] = round(work / seconds / flops[kind.partition("_")[0]], 4)
    return windows


def _weights(measured: Measured, overhead: float) -> dict[str, float]:
    """Return the seconds per byte of convolution weights by kind, from the line through many and few images."""
    weights: dict[str, float] = {}
    for name in measured.names("weights."):
        kind, _, window = name.partition(":")
        ((few, quick),) = measured.timed(f"weights.{name}", overhead)
        ((many, slow),) = measured.timed(f"window.{name}", overhead)
        weights[kind] = max(0.0, (quick * many - slow * few) / (many - few)) / weight_bytes(window)
    return weights


def _attention(measured: Measured, flops: Mapping[str, float], *, by_length: bool) -> dict[str, Any]:
    """Return attention's fractions of the peak, forward and backward, at one length or as curves over the length.

    The backward's time is the time of both passes minus the forward's.
    """
    fractions: dict[str, Any] = {}
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
                fractions[phase] = _curve(share, 1.0) if by_length else round(next(iter(share.values())), 4)
    return fractions


def _besides(measured: Measured, dispatch: float) -> dict[str, float]:
    """Return the engine's own seconds per step and per parameter, from steps of nearly empty models.

    The all_reduce of several ranks is subtracted, because predictions count it separately.
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


# Exchanges of a measured step that predictions count separately: per parameter (a block of four is gathered twice and
# scattered, or summed in each direction), and per step, in addition to its two small sums and its norm.
_EXCHANGES = {"shard": (3 / 4, 0), "tensor": (2 / 4, 0), "pipeline": (0.0, 4)}


def divided_of(
    measured: Measured, axis: str, dispatch: float, host: Link | None, group: Link | None
) -> dict[str, float]:
    """Return the costs that the engine adds to a step on a model-dividing axis, and its process' memory.

    `host`: link of the step's own sums. `group`: link of the model's exchanges.
    """
    if host is None or group is None:
        return {}
    costs, (of_tensor, of_step) = _besides(measured, dispatch), _EXCHANGES[axis]
    once = 3 * (host.call_seconds + 2 * (measured.ranks - 1) * host.latency_seconds)
    once += of_step * (host.call_seconds + host.latency_seconds)
    each = of_tensor * (group.call_seconds + (measured.ranks - 1) * group.latency_seconds)
    return {
        "step_seconds": max(0.0, costs["step_seconds"] - once),
        "tensor_seconds": max(0.0, costs["tensor_seconds"] - each),
        "reserved_bytes": float(measured.facts["resident_bytes"]),
    }


def algorithms_of(measured: Measured, source: str) -> dict[str, Link]:
    """Return links that model shoal's own all_reduces, and the link of a process group.

    The smallest all_reduce of each algorithm gives its call cost.
    """
    links, n = {}, measured.ranks
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
        links[name] = Link(words, peak, 0.0, call, _curve(rates, peak), sources=dict.fromkeys(keys, source))
    group = link_of(measured, f"a process group in shared memory of {n} processes", source, "group")
    return {**links, PROCESS_GROUP: group} if group is not None else links


def link_of(measured: Measured, name: str, source: str, probes: str = "exchange") -> Link | None:
    """Return the link between the measured ranks, or None if no exchange was measured by probes of that name.

    The latency is that of the smallest send. The call cost is the rest of the smallest all_reduce after 2 (n-1) hops.
    The bandwidth is the best of all_reduce; a curve for each kind makes its total time match.
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
    curves = {kind: _curve(by_size, peak) for kind, by_size in rates.items() if by_size}
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
    """Return the sizes that measure bandwidth: all but the smallest."""
    return list(seconds.items())[1:] or list(seconds.items())


def table(measured: Measured) -> dict[str, list[float]]:
    """Return a readable table by name and size: least, quartile, median, ninth decile (seconds), number of samples."""
    return {
        f"{name} {size:g}": [
            float(f"{value:.4g}") for value in (spread.least, spread.quartile, spread.median, spread.p90)
        ]
        + [spread.count]
        for (name, size), spread in sorted(measured.spreads.items())
    }
