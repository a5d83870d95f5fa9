"""Error bars of predictions, from the errors of similar published rows (docs/planner.md).

`python -m benchmarks.published errors` writes `published_errors.toml` from predictions of published rows. These
predictions use only the catalogue.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from shoal.plans.plan import LayoutSection

FEWEST_ROWS: Final = 8  # fewest rows for a quantile
BEYOND: Final = 2.0  # ratio of measured to predicted seconds above which a row is not in the quantiles
ANY: Final = "any"
_APART: Final = 3.0  # largest ratio of parameters to the nearest published model that counts as similar
_SIZES: Final = ((1e9, "below 1 B parameters"), (1e10, "1 to 10 B parameters"))


class Likeness(NamedTuple):
    """Group of rows by the device's family, the model's size and the layout's kind. Each may be `ANY`."""

    family: str
    size: str
    layout: str

    def wider(self) -> Iterable[Likeness]:
        """Yield this group and its supersets, the narrowest first. The device matters most, the size least."""
        yield self
        yield self._replace(size=ANY)
        yield self._replace(size=ANY, layout=ANY)
        yield self._replace(family=ANY, size=ANY)
        yield Likeness(ANY, ANY, ANY)


class ErrorBar(NamedTuple):
    """Range of factors of the predicted seconds that contains four of five published steps of language models.

    `num_rows`: number of rows in the group `like`. `parameters`: sizes of its smallest and largest model. `num_beyond`:
    further rows that took over twice the predicted time, through stalls that no prediction covers.
    """

    low: float
    high: float
    num_rows: int
    num_beyond: int
    like: Likeness
    parameters: tuple[float, float]


def likeness(device: str, parameters: float, layout: LayoutSection) -> Likeness:
    """Return the group of a prediction for a model with this many parameters on a device of the catalogue."""
    family = re.split(r"[-_@ ]", device)[0].upper()
    size = next((name for most, name in _SIZES if parameters < most), "over 10 B parameters")
    if layout.pipeline > 1:
        kind = "pipeline"
    elif layout.tensor * layout.context > 1:
        kind = "tensor or context"
    elif layout.shard > 1:
        kind = "sharded"
    else:
        kind = "replicas"
    return Likeness(family, size, kind)


def error_bar(like: Likeness, parameters: float) -> ErrorBar | None:
    """Return the error bar of the narrowest group of the device with enough rows and similar model sizes.

    Returns None if no published row is similar.
    """
    known = (_bar(group) for group in like.wider() if group.family != ANY and group in _groups())
    return next((bar for bar in known if bar.parameters[0] / _APART <= parameters <= bar.parameters[1] * _APART), None)


def of_device(like: Likeness) -> ErrorBar | None:
    """Return the error bar of all rows of the device, or None if there are none."""
    group = Likeness(like.family, ANY, ANY)
    return _bar(group) if group in _groups() else None


def _bar(group: Likeness) -> ErrorBar:
    found = _groups()[group]
    sizes = found["least_parameters"], found["most_parameters"]
    return ErrorBar(found["low"], found["high"], found["rows"], found["beyond"], group, sizes)


@cache
def _groups() -> Mapping[Likeness, Mapping[str, Any]]:
    text = files("shoal.planner.predict").joinpath("published_errors.toml").read_text(encoding="utf-8")
    return {Likeness(one["family"], one["size"], one["layout"]): one for one in tomllib.loads(text)["group"]}
