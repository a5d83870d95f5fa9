"""The page of a report: its numbers are the run's, its curves are honest, and no text of a run becomes a part of it."""

import hashlib
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import STORIES, RunFolder, divided, failed, long, one_process, resumed_twice, served

from shoal.report.account import account
from shoal.report.curves import at_groups, buckets, thinned
from shoal.report.openmetrics import openmetrics
from shoal.report.page import embedded, render_report
from shoal.report.run_page import ReportPage, run_page
from shoal.report.several_runs import named, several_page
from shoal.report.terminal import lines as lines_of
from shoal.report.waits import waits
from shoal.runs.records import RankTimes
from shoal.runs.run_files import read_run

UPLOT = Path(__file__).resolve().parents[3] / "src" / "shoal" / "report" / "uplot"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&\u2028{{ 7 * 7 }}"


def page_of(run: RunFolder) -> ReportPage:
    files = read_run(run.written())
    return run_page(account(files), files.records)


def several(*runs: RunFolder) -> ReportPage:
    files = [read_run(run.written()) for run in runs]
    return several_page(named([(account(one), one.records) for one in files]))


class Elements(HTMLParser):
    """Names of all elements and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("story", [name for name in STORIES if name != "long"])
def test_each_run_has_a_page(tmp_path: Path, story: str) -> None:
    text = render_report(page_of(STORIES[story](tmp_path / "run")))
    assert text.count("<script") == 2
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    charts = json.loads(re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)[0])
    assert {f"chart-{chart['key']}" for chart in charts} == set(re.findall(r'id="(chart-[\w-]+)"', text))
    for chart in charts:  # each with its table behind it
        assert all(len(curve["values"]) == len(chart["x"]) for curve in chart["curves"])
        assert f"<summary>Table of {chart['title']}</summary>" in text


def test_a_page_stays_small(tmp_path: Path) -> None:
    """Charts have no more points for ten times the steps."""
    sizes = [len(render_report(page_of(long(tmp_path / str(steps), steps)))) for steps in (1300, 2600)]
    assert sizes[1] < 1.05 * sizes[0] < 500_000


def test_hostile_names_and_errors_are_text(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ranks=2, name=HOSTILE)
    run.begins()
    run.steps(10)
    run.evaluates(**{HOSTILE: 1.0, "loss": 2.0})
    run.steps(5)
    run.evaluates(**{HOSTILE: 1.5, "loss": 1.0})
    run.ends("failed", error={"given": HOSTILE, "conflict": HOSTILE, "remedy": HOSTILE}, versions={HOSTILE: HOSTILE})
    for page in (page_of(run), several(run, one_process(tmp_path / "other"))):
        text = render_report(page)
        plain = render_report(page_of(divided(tmp_path / str(len(text)))))
        found = Elements(text)
        assert set(found.names) <= set(Elements(plain).names)
        assert found.names.count("script") == 2
        assert not [name for name in found.attributes if name.startswith("on")]
        assert "49" not in re.findall(r"<h1>(.*?)</h1>", text)[0]
        assert any(HOSTILE in told for told in found.texts)  # as it was written


ODD: list[Any] = [None, "x", -1, 1e308, [], {}, [1, "a"], {"a": 1}, True, 0]


def spoilt(value: Any, draw: random.Random, share: float) -> Any:
    """A JSON value in which some parts are of another kind."""
    if draw.random() < share:
        return draw.choice(ODD)
    if isinstance(value, dict):
        return {key: spoilt(inner, draw, share) for key, inner in value.items() if draw.random() > share / 2}
    return [spoilt(inner, draw, share) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(12))
def test_values_of_another_kind_are_left_out(tmp_path: Path, seed: int) -> None:
    """Whatever a directory's files say, there is an account of it, and all that is made of one."""
    draw = random.Random(seed)
    made = [resumed_twice, failed, served, divided][seed % 4](tmp_path / "run").written()
    for path in made.glob("*.json*"):
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        path.write_text("".join(json.dumps(spoilt(json.loads(line), draw, 0.02)) + "\n" for line in lines))
    files = read_run(made)
    found = account(files)
    json.dumps(found.to_json(), allow_nan=False)
    assert render_report(run_page(found, files.records)).count("<script") == 2
    assert openmetrics(found).endswith("# EOF\n")
    assert max(map(len, lines_of(found, files.records, 40))) <= 40


def test_embedded_json_ends_no_script() -> None:
    value = [{"a": HOSTILE, "b": [1.5, None, "<!--"]}]
    text = embedded(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


def test_thinned_curves_keep_each_extreme() -> None:
    values = [float(number % 7) for number in range(10_000)]
    values[4321], values[8765] = 99.0, -99.0
    groups = buckets(len(values))
    found = thinned(values, groups)
    assert len(found) == len(at_groups(list(map(float, range(10_000))), groups)) <= 1200
    assert max(v for v in found if v is not None) == 99.0
    assert min(v for v in found if v is not None) == -99.0
    assert thinned([1.0, 3.0, 2.0], buckets(3)) == [1.0, 3.0, 2.0]
    assert thinned([None, 1.0, float("nan"), 5.0, 2.0], [range(5)]) == [1.0, 5.0]
    assert thinned([5.0, 1.0], [range(2)]) == [5.0, 1.0]  # in the order in which they came
    assert sum(len(group) for group in buckets(10_007)) == 10_007


def test_the_rank_that_others_wait_for_is_full(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ranks=4)
    run.begins()
    run.steps(200)
    told = waits(run.records, 4)
    assert told is not None
    assert sum(told.mean(rank) for rank in range(4)) == pytest.approx(0.2)  # of each step, for one rank or another
    assert len(told.of_rank[0]) == 20  # ten steps have one sum
    for rank, row in told.pairs.items():
        assert set(row) == {0, 1, 2, 3} - {rank}
        assert sum(row.values()) == pytest.approx(sum(told.mean(other) for other in row), rel=0.05)
    assert waits(run.records, 1) is None
    resized = [*run.records, replace(run.records[-1], by_rank=RankTimes(10, [1.0] * 8, {7: [9.0] * 8}))]
    assert waits(resized, 4) == told  # what is of another number of ranks is left out


def test_of_records_with_extremes_alone_the_slowest_rank_is_known(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ranks=4)
    run.begins()
    run.steps(200)
    told = waits([replace(record, by_rank=None) for record in run.records], 4)
    assert told is not None
    assert sum(told.mean(rank) for rank in range(4)) == pytest.approx(0.2)  # busy from 0.7 to 0.9 of a step
    assert told.pairs == {}


def test_facts_of_a_run(tmp_path: Path) -> None:
    told = dict(page_of(resumed_twice(tmp_path / "run")).facts)
    assert told["trained"] == "job.py:job; 1,000,000 parameters, 6,400 samples"
    assert told["on"] == "4 processes on NVIDIA H100; data 4"
    assert told["ended"] == "completed after step 100 of 100: all of its length"
    assert told["time"].startswith("60.5 min, 60.0 min of it between calls")
    assert told["cost"] == "$0.09: 4 devices at $3.00 an hour"
    assert "step 22: the loss is nan" in dict(page_of(failed(tmp_path / "failed")).facts)["ended"]


def test_several_runs_say_what_differs_and_how_they_scale(tmp_path: Path) -> None:
    runs = []
    for ranks in (1, 2, 4):
        run = RunFolder(tmp_path / f"on-{ranks}", ranks=ranks)
        run.begins()
        run.steps(40, 0.4 / ranks * (1.0 + 0.1 * (ranks - 1)))
        run.ends()
        runs.append(run)
    page = several(*runs)
    parts = {part.key: part for part in page.parts}
    assert parts["differences"].tables[0][1].rows == [["layout.data", "1", "2", "4"]]
    efficiencies = [row[4] for row in parts["scaling"].tables[0][1].rows]
    assert efficiencies[0] == "100%"
    assert [int(e[:-1]) for e in efficiencies[1:]] == pytest.approx([91, 77], abs=1)
    chart = parts["scaling"].charts[0]
    assert list(chart.x) == [1, 2, 4, 8]  # not 64, which no run is near
    curves = {curve.name: curve.values for curve in chart.curves}
    assert curves["the planner's curve"] == pytest.approx([64 / 0.4, 64 / 0.22, 64 / 0.12, 64 / 0.08])
    assert curves["measured"][3] is None
    assert [row[2] for row in parts["scaling"].tables[1][1].rows] == ["100%", "91%", "83%", "62%", "12%"]
    assert page.summary.startswith("on-4 has the most samples a second in its steps: 3.")


def test_the_chart_library_is_the_one_that_its_page_names() -> None:
    sums = re.findall(r"\| `(\S+)` \| `\S+` \| `([0-9a-f]{64})` \|", (UPLOT / "README.md").read_text())
    assert len(sums) == 2
    for name, told in sums:
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == told
    assert "v1.6.32" in (UPLOT / "uPlot.iife.min.js").read_text()[:80]
    assert "MIT License" in (UPLOT / "LICENSE").read_text()
