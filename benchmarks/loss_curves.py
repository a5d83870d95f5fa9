"""Claim: 100 steps of the GPT example give one loss curve, whatever the layout; deviations are those of rounding.

The picture and the table in results/loss_curves.md show each layout's largest deviation from one process, next to
the deviations of one process from itself, where it only adds up in another order (grain by grain, two grains at a time,
two threads). Repeat with `python -m benchmarks.loss_curves [--again]`; curves are kept in
benchmarks/results/loss_curves.json as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.matrix import ROOT, Sections, sections

RESULTS = ROOT / "benchmarks" / "results" / "loss_curves.json"
PICTURE = ROOT / "benchmarks" / "results" / "loss_curves.svg"
PAGE = ROOT / "benchmarks" / "results" / "loss_curves.md"

STEPS = 100
SETTINGS = (f"steps={STEPS}", "layers=2", "width=64", "heads=4", "block=32", "batch=16")
SAMPLES_PER_GRAIN = 2
TIME_LIMIT_SECONDS = 1800.0

ALONE = "one process"
# One process that computes the same in another order: what rounding alone does. Arguments and threads.
NOISE: dict[str, tuple[tuple[str, ...], int]] = {
    "one process, grain by grain": (("--max-microbatch", str(SAMPLES_PER_GRAIN)), 1),
    "one process, two grains at a time": (("--max-microbatch", str(2 * SAMPLES_PER_GRAIN)), 1),
    "one process, two threads": ((), 2),
}
LAYOUTS: dict[str, Sections] = {
    "data 2": sections({"data": 2}),
    "shard 2, ZeRO-1": sections({"shard": 2}, "optimizer"),
    "shard 2, ZeRO-2": sections({"shard": 2}, "gradients"),
    "shard 2, ZeRO-3": sections({"shard": 2}),
    "tensor 2": sections({"tensor": 2}),
    "pipeline 2": sections({"pipeline": 2}),
    "context 2": sections({"context": 2}),
    "shard 2 x tensor 2 x pipeline 2": sections({"shard": 2, "tensor": 2, "pipeline": 2}),
}
Curve = dict[str, Any]  # {"losses": [...]} or {"said": why there are none}


def train(plan: Sections, arguments: tuple[str, ...] = (), threads: int = 1) -> Curve:
    """The losses of one run, a step each, or the error that it ended with."""
    import tomli_w

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.toml").write_text(tomli_w.dumps({"schema": 1, **plan}))
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [sys.executable, "-m", "shoal", "run", "examples/gpt.py", "--plan", str(folder / "plan.toml")]
        command += [*settings, *arguments, "--out", str(folder / "run")]
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        ended = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False
        )
        if ended.returncode:
            return {"said": " ".join(_conflict(ended.stderr).split())}
        lines = (folder / "run" / "records.jsonl").read_text().splitlines()
        return {"losses": [json.loads(line)["loss"] for line in lines]}


def _conflict(printed: str) -> str:
    """What an error as the command prints it conflicts with."""
    _, found, rest = printed.partition("conflicts with:")
    return rest.partition("write instead:")[0] if found else printed[-200:]


def curves(again: bool) -> dict[str, Curve]:
    """All curves by name; those that are kept are not run again, but for those that were not possible."""
    kept: dict[str, Curve] = {}
    if RESULTS.exists() and not again:
        document = json.loads(RESULTS.read_text())
        kept = document["curves"] if document["settings"] == list(SETTINGS) else {}
    wanted: dict[str, Callable[[], Curve]] = {ALONE: lambda: train(sections({"data": 1}))}
    for name, (arguments, threads) in NOISE.items():
        wanted[name] = lambda a=arguments, t=threads: train(sections({"data": 1}), a, t)  # type: ignore[misc]
    for name, plan in LAYOUTS.items():
        wanted[name] = lambda p=plan: train(p)  # type: ignore[misc]
    found: dict[str, Curve] = {}
    for name, run in wanted.items():
        found[name] = kept[name] if "losses" in kept.get(name, {}) else run()
        said = (
            found[name].get("said") or f"loss {found[name]['losses'][-1]:.6f} after {len(found[name]['losses'])} steps"
        )
        print(f"{name}: {said}", flush=True)
        document = {"claim": (__doc__ or "").splitlines()[0], "settings": SETTINGS, "curves": {**kept, **found}}
        RESULTS.write_text(json.dumps(document) + "\n")
    return found


def deviations(curve: Curve, alone: Curve) -> list[float]:
    """|loss - loss of one process| / loss of one process, a step each."""
    return [abs(a - b) / b for a, b in zip(curve["losses"], alone["losses"], strict=True)]


# ------------------------------------------------------------------------------------------------------ the picture

WIDTH, HEIGHT, LEFT, GAP = 900, 300, 70, 60
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#000000")
NO_DEVIATION = 1e-9  # stands for 0 on the logarithmic axis


def picture(found: Mapping[str, Curve]) -> str:
    """Losses above, deviations from one process below on a logarithmic axis; the grey band is rounding alone."""
    losses = {name: curve["losses"] for name, curve in found.items() if name not in NOISE and "losses" in curve}
    alone = found[ALONE]
    noise = [max(column) for column in zip(*(deviations(found[name], alone) for name in NOISE), strict=True)]
    apart = {name: deviations(found[name], alone) for name in LAYOUTS if name in losses}
    top, bottom = math.ceil(max(map(max, losses.values()))), math.floor(min(map(min, losses.values())))
    most = max(1e-6, *noise, *(d for line in apart.values() for d in line))
    high = math.ceil(math.log10(most))
    low = round(math.log10(NO_DEVIATION))
    above = _Panel(30, bottom, top, STEPS)
    below = _Panel(30 + HEIGHT + GAP, low, high, STEPS)
    parts = above.frame("loss, nats a byte", [(value, str(value)) for value in range(bottom, top + 1)])
    parts += below.frame("|loss - loss of one process| / loss", [(e, f"1e{e}") for e in range(low, high + 1)])
    parts.append(below.area([_log(value) for value in noise]))
    colours = dict(zip(LAYOUTS, COLOURS, strict=True))
    # The widest first: curves that lie on each other all show.
    for place, (name, line) in enumerate(losses.items()):
        parts.append(above.line(line, colours.get(name, "#bbbbbb"), 1.2 * (len(losses) - place)))
    parts += [below.line([_log(value) for value in line], colours[name], 1.3) for name, line in apart.items()]
    legend = [(ALONE, "#bbbbbb"), *((name, colours[name]) for name in apart), ("rounding alone", "#dddddd")]
    for place, (name, colour) in enumerate(legend):
        y = 42 + 18 * place
        parts.append(f'<rect x="{LEFT + WIDTH + 14}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 32}" y="{y}">{name}</text>')
    size = f'width="{LEFT + WIDTH + 260}" height="{2 * HEIGHT + GAP + 80}"'
    style = 'font-family="sans-serif" font-size="13" fill="#222222"'
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *parts, "</svg>"]) + "\n"


def _log(value: float) -> float:
    return math.log10(max(value, NO_DEVIATION))


class _Panel:
    """Axes from step 1 to `steps` and from `low` to `high`, `y` pixels from the top."""

    def __init__(self, y: int, low: float, high: float, steps: int) -> None:
        self._y, self._low, self._high, self._steps = y, low, high, steps

    def _at(self, step: int, value: float) -> str:
        x = LEFT + WIDTH * step / (self._steps - 1)
        return f"{x:.1f},{self._height(value):.1f}"

    def _height(self, value: float) -> float:
        return self._y + HEIGHT * (self._high - value) / (self._high - self._low)

    def frame(self, title: str, marks: list[tuple[float, str]]) -> list[str]:
        parts = [f'<text x="{LEFT}" y="{self._y - 10}">{title}</text>']
        for value, text in marks:
            y = self._height(value)
            parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for step in (1, *range(20, self._steps + 1, 20)):
            x = LEFT + WIDTH * (step - 1) / (self._steps - 1)
            parts.append(f'<text x="{x:.1f}" y="{self._y + HEIGHT + 18}" text-anchor="middle">{step}</text>')
        return parts

    def line(self, values: list[float], colour: str, width: float) -> str:
        points = " ".join(self._at(step, value) for step, value in enumerate(values))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width:.1f}"/>'

    def area(self, values: list[float]) -> str:
        points = " ".join(self._at(step, value) for step, value in enumerate(values))
        corners = f"{self._at(self._steps - 1, self._low)} {self._at(0, self._low)}"
        return f'<polygon points="{points} {corners}" fill="#dddddd"/>'


# ---------------------------------------------------------------------------------------------------------- the page


def page(found: Mapping[str, Curve]) -> str:
    """The table as Markdown."""
    alone = found[ALONE]
    noise = max(max(deviations(found[name], alone)) for name in NOISE)
    lines = [
        "# One loss curve",
        "",
        "Generated by `python -m benchmarks.loss_curves`: "
        f"`examples/gpt.py` with `{' '.join(SETTINGS)}`, fast mode, float32, on CPU processes.",
        "",
        "![Losses and their deviations](loss_curves.svg)",
        "",
        "The deviation of a step is |loss - loss of one process| / loss of one process. Rounding alone is what one",
        "process deviates from itself by where it adds up in another order; training multiplies both as it goes on",
        "([why](../../docs/exactness.md)).",
        "",
        "| | Deviation in step 1 | Largest in 100 steps | Over rounding alone |",
        "|---|---|---|---|",
    ]
    for name, curve in found.items():
        if name == ALONE:
            continue
        if "losses" not in curve:
            lines.append(f"| {name} | not possible: {curve['said']} | | |")
            continue
        apart = deviations(curve, alone)
        ratio = f"{max(apart) / noise:.2f}" if noise and name in LAYOUTS else ""
        lines.append(f"| {name} | {apart[0]:.1e} | {max(apart):.1e} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Trains what is missing, draws and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="train all of it again")
    options = parser.parse_args()
    found = curves(options.again)
    PICTURE.write_text(picture(found))
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
