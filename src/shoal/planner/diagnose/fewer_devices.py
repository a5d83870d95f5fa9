"""Seconds of a run's step on fewer devices, as they follow from the account of the run as it was.

Computing has a part that grows with a rank's samples and one that each rank has anyway: starting operators. How large
the first is, the model's FLOPs on this device tell; without them half is taken.
"""

from __future__ import annotations

from shoal.errors import HardwareError
from shoal.hardware.detect import here
from shoal.planner.diagnose.run_times import RunTimes
from shoal.report.json_values import section

_FLOPS_PER_PARAMETER = 6.0  # a multiply-add forward, two backward
_REACHED = 0.4  # of a device's peak, by products of a small model
_AGREEMENT = 0.05  # of the sums' time: what is left of it on one device


def on_devices(times: RunTimes, devices: int, computing: float | None = None) -> float | None:
    """Seconds of a step on so many devices, along the data axis; None where there is no such layout.

    `computing`: of each rank, where that of the run is not what it would be.
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
    else:  # of a rank that is busy for so long in all
        busy = computing * times.computing / max(times.step - spans.get("exposed_communication", 0.0), 1e-9)
        rest, data = computing - busy, 0.0
    scaled = _scaled(times, busy / crowd)
    computed = busy / crowd * (1 - scaled + scaled * more)
    exposed = times.ranks.get("exposed_communication")
    sums = exposed.least if exposed is not None else spans.get("exposed_communication", 0.0)
    left = (devices - 1) / (times.world_size - 1) if devices > 1 else _AGREEMENT
    return (computed + rest / crowd + data / crowd * more) * then + sums / crowd * left


def planned_ratio(times: RunTimes, devices: int) -> float | None:
    """Seconds of the fastest plan on so many devices over those of the run's, as the planner took them to be."""
    predicted = times.section("prediction")
    now, then = predicted.get("step_seconds"), section(predicted, "curve").get(str(devices))
    return then / now if now and then else None


def _crowd(times: RunTimes, devices: int) -> float:
    """How many processes share a core."""
    if times.device != "cpu" or not times.cores:
        return 1.0
    return max(1.0, devices / times.cores)


def _scaled(times: RunTimes, busy: float) -> float:
    """Fraction of a rank's computing that grows with its samples."""
    flops, peak = _flops(times), _peak(times)
    if not flops or not peak or busy <= 0.0:
        return 0.5
    return min(1.0, flops / times.world_size / (peak * _REACHED) / busy)


def _flops(times: RunTimes) -> float:
    """FLOPs of a step: as the planner counted them, else by the parameters, one use of each a sample."""
    told = times.section("prediction").get("flops_per_sample")
    per_sample = float(told) if isinstance(told, int | float) else _FLOPS_PER_PARAMETER * times.parameters
    return per_sample * times.samples


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
