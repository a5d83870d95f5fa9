"""Estimate of a run's step time on fewer devices, from the account of the run.

One part of computing grows with a rank's samples; another, starting operators, is the same on every rank. The model's
FLOPs on this device give the first part. The default is half.
"""

from __future__ import annotations

from shoal.doctor.run_times import RunTimes
from shoal.errors import HardwareError
from shoal.hardware.detect import here
from shoal.report.account import section

_FLOPS_PER_PARAMETER = 6.0  # a multiply-add forward, two backward
_REACHED = 0.4  # share of a device's peak that products of a small model reach
_AGREEMENT = 0.05  # share of the sums' time that remains on one device


def on_devices(times: RunTimes, devices: int, computing: float | None = None) -> float | None:
    """Return the estimated seconds of a step on `devices` devices of the data axis, or None if the layout allows none.

    `computing`: a rank's busy seconds, if they differ from the run's.
    """
    layout = times.section("layout")
    if devices < 1 or any(int(layout.get(axis) or 1) > 1 for axis in ("tensor", "pipeline", "context", "shard")):
        return None
    if times.section("server").get("mode", "none") != "none":
        return None
    crowd, then = _crowd(times, times.world_size), _crowd(times, devices)
    more = times.world_size / devices
    spans = times.spans
    if computing is None:
        busy = times.computing
        rest = sum(spans.get(name, 0.0) for name in ("optimizer", "other"))
        data = sum(spans.get(name, 0.0) for name in ("data_wait", "host_to_device"))
    else:  # a rank that is busy for `computing` seconds in total
        busy = computing * times.computing / max(times.step - spans.get("exposed_communication", 0.0), 1e-9)
        rest, data = computing - busy, 0.0
    scaled = _scaled(times, busy / crowd)
    computed = busy / crowd * (1 - scaled + scaled * more)
    exposed = times.ranks.get("exposed_communication")
    sums = exposed.least if exposed is not None else spans.get("exposed_communication", 0.0)
    left = (devices - 1) / (times.world_size - 1) if devices > 1 else _AGREEMENT
    return (computed + rest / crowd + data / crowd * more) * then + sums / crowd * left


def planned_ratio(times: RunTimes, devices: int) -> float | None:
    """Return the planned step time on `devices` devices relative to the run's own, from the run's prediction."""
    predicted = times.section("prediction")
    now, then = predicted.get("step_seconds"), section(predicted, "curve").get(str(devices))
    return then / now if now and then else None


def _crowd(times: RunTimes, devices: int) -> float:
    """Return the number of processes per core, at least 1."""
    if times.device != "cpu" or not times.cores:
        return 1.0
    return max(1.0, devices / times.cores)


def _scaled(times: RunTimes, busy: float) -> float:
    """Return the fraction of a rank's computing that grows with its samples."""
    told = times.section("prediction").get("flops_per_sample")
    per_sample = float(told) if isinstance(told, int | float) else _FLOPS_PER_PARAMETER * times.parameters
    flops, peak = per_sample * times.samples, _peak(times)
    if not flops or not peak or busy <= 0.0:
        return 0.5
    return min(1.0, flops / times.world_size / (peak * _REACHED) / busy)


def _peak(times: RunTimes) -> float:
    try:
        device = here().device
    except (HardwareError, OSError):
        return 0.0
    kinds = {"cpu": "cpu", "gpu": "gpu"}
    if device.kind != kinds[times.device]:
        return 0.0
    dtype = str(times.section("precision").get("compute") or "float32")
    return device.flops.get(dtype, device.flops.get("float32", 0.0)) * max(1, times.threads or 1)
