"""Error bar of a prediction, from the errors of published rows like it (docs/planner.md).

`published_errors.toml` is written by `python -m benchmarks.published errors` from predictions of published rows, which
are made from the catalogue alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

from shoal.plans.plan import LayoutSection

FEWEST_ROWS: Final = 8  # of which quantiles are taken
BEYOND: Final = 2.0  # times the predicted seconds
ANY: Final = "any"
_APART: Final = 3.0  # A model with more times the parameters of the largest published one, or fewer, is unlike them.
_SIZES: Final = ((1e9, "below 1 B parameters"), (1e10, "1 to 10 B parameters"))


class Likeness(NamedTuple):
    """Group of rows by the device's family, the model's size and the layout's kind; each may be `ANY`."""

    family: str
    size: str
    layout: str

    def wider(self) -> Iterable[Likeness]:
        """This group and those that contain it, the narrowest first: a device's rows tell most, a size's least."""
        yield self
        yield self._replace(size=ANY)
        yield self._replace(size=ANY, layout=ANY)
        yield self._replace(family=ANY, size=ANY)
        yield Likeness(ANY, ANY, ANY)


class ErrorBar(NamedTuple):
    """Factors of predicted seconds between which four of five published steps were, all of language models.

    `num_rows`: how many rows `like` it that is of, and `parameters` of their smallest and their largest model. Apart
    from them `num_beyond` took over twice what was predicted: stalls of a network or a program, which no prediction
    has.
    """

    low: float
    high: float
    num_rows: int
    num_beyond: int
    like: Likeness
    parameters: tuple[float, float]


def likeness(device: str, parameters: float, layout: LayoutSection) -> Likeness:
    """The group of a prediction for a model of so many parameters on a device of the catalogue."""
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
    """The error bar of the narrowest group of a device's rows that has enough, of models of about so many parameters.

    None where no published row is like it.
    """
    known = (_bar(group) for group in like.wider() if group.family != ANY and group in _groups())
    return next((bar for bar in known if bar.parameters[0] / _APART <= parameters <= bar.parameters[1] * _APART), None)


def of_device(like: Likeness) -> ErrorBar | None:
    """The error bar of all rows of the device; None where there are none."""
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
