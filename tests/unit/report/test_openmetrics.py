"""OpenMetrics text, as Prometheus' own parser reads it."""

from pathlib import Path

import pytest
from tests.run_folders import STORIES, RunFolder, long, resumed_twice

from shoal.report.account import account
from shoal.report.openmetrics import openmetrics
from shoal.runs.run_files import read_run


def parsed(text: str) -> dict[tuple[str, ...], float]:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    families = list(parser.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(v for k, v in sorted(s.labels.items()) if k != "run")): s.value for s in samples}


@pytest.mark.parametrize("story", [name for name in STORIES if name != "long"])
def test_the_parser_of_prometheus_reads_it(tmp_path: Path, story: str) -> None:
    found = account(read_run(STORIES[story](tmp_path / "run").written()))
    told = parsed(openmetrics(found))
    assert told["shoal_step",] == found.steps
    assert told["shoal_samples_total",] == found.samples.trained
    assert sum(v for k, v in told.items() if k[0] == "shoal_wall_seconds") == pytest.approx(found.wall.seconds)


def test_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    found = account(read_run(resumed_twice(tmp_path / "run").written()))
    told = parsed(openmetrics(found))
    assert told["shoal_metric", "accuracy"] == found.evaluations[-1].metrics["accuracy"]
    assert told["shoal_incidents", "resumed"] == 2.0
    assert "# HELP shoal_step_time_seconds Median of a step; of blocks of steps an estimate.\n" in openmetrics(found)
    assert found.cost is not None
    assert told["shoal_cost_dollars",] == found.cost.dollars


def test_names_of_any_kind_are_labels(tmp_path: Path) -> None:
    run: RunFolder = long(tmp_path / 'run "of" a\\b', 20)
    run.evaluates(**{'a"}\n# EOF\nx{"\\': 0.5})
    told = parsed(openmetrics(account(read_run(run.written()))))
    assert told["shoal_metric", 'a"}\n# EOF\nx{"\\'] == 0.5
