from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.options import RunOptions
from shoal.cli.run import choose_plan
from shoal.cli.run.choose_plan import with_layout, with_plan
from shoal.cli.run.start import requested, verification_of
from shoal.cli.run.submit import submission_of
from shoal.errors import CommandError, PlanError
from shoal.hardware import cluster
from shoal.launch.environment import Environment
from shoal.launch.launchers.ssh_cluster import HostsCluster
from shoal.plans import Plan
from shoal.plans.plan import plan_text, read_plan
from shoal.runs.options import Origin


def options(**more: Any) -> RunOptions:
    return RunOptions(job="job.py", **more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layout": "data=2", "plan": "plan.toml"}, "each of them is a plan"),
        ({"layout": "data=2", "plan": "auto"}, "each of them is a plan"),
        ({"layout": "data=2", "devices": "auto"}, "a plan has its number of devices"),
        ({"plan": "plan.toml", "devices": "auto"}, "a plan has its number of devices"),
        ({"cluster": "8xH100"}, "only the planner asks for it"),
        ({"plan": "auto", "on": "slurm"}, "the devices that slurm will give are not known here"),
        ({"devices": "auto", "on": "ray"}, "the devices that ray will give are not known here"),
    ],
)
def test_options_that_exclude_each_other(more: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        with_plan(options(**more), None)


def test_started_processes_cannot_be_planned() -> None:
    with pytest.raises(CommandError, match="they run already"):
        with_plan(options(plan="auto"), Environment(world_size=2, engine="torchrun"))


@pytest.mark.parametrize(
    ("layout", "devices", "said"),
    [
        ("dta=2", None, "no axis is called dta; did you mean 'data'"),
        ("data=2,data=2", None, "data is there twice"),
        ("data=0", None, "data takes a whole number of at least 1"),
        ("data", None, "data takes a whole number of at least 1"),
        ("data=2", 3, "make a world of 2"),
    ],
)
def test_wrong_layouts(layout: str, devices: int | None, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        with_layout(Plan(), layout, devices)


def test_a_layout_replaces_all_degrees_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = Plan().with_sections(layout={"pipeline": 2}, data={"workers": 3})
    plan = with_layout(before, "data=2, tensor=3", 6)
    assert (plan.layout.data, plan.layout.tensor, plan.layout.pipeline, plan.data.workers) == (2, 3, 1, 3)
    (tmp_path / "job.py").write_text("")
    request = requested(options(layout="data=2"))
    assert request.origin("layout") is Origin.OPTION
    assert request.origin("collectives.all_reduce") is Origin.DEFAULT


def test_a_resume_goes_on_with_its_own_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text(plan_text(Plan()))
    resumed = with_plan(options(plan="auto", resume=True, out=str(tmp_path)), None)
    assert (resumed.plan, resumed.devices) == (None, None)
    assert "goes on with its own plan" in capsys.readouterr().err
    resumed = with_plan(options(plan="auto", resume=True, out=str(tmp_path), devices=2), None)
    assert (resumed.plan, resumed.devices) == (None, 2), "it is resized, as without --plan auto"
    assert "goes on with its own plan, on 2 devices" in capsys.readouterr().err
    assert with_plan(options(devices="auto", resume=True, out=str(tmp_path)), None).devices is None


def test_a_range_is_planned_as_without_auto() -> None:
    assert with_plan(options(plan="auto", devices="2:4"), None).plan is None


def test_the_planned_file_is_what_an_engine_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner itself is tried on a real machine and cluster, in tests/ranks/test_first_day.py."""
    monkeypatch.chdir(tmp_path)
    plan = Plan().with_sections(layout={"data": 4})
    choice = {"plan": choose_plan.dumped(plan), "lines": ["chosen"]}
    monkeypatch.setattr(choose_plan, "in_child", lambda work: choice)
    chosen = with_plan(options(plan="auto", cluster="8xH100", on="slurm", out="runs/a"), None)
    assert chosen.plan == str(tmp_path / "runs" / "a.plan.toml")
    assert read_plan(Path(chosen.plan)).layout.data == 4
    assert "note: chosen" in capsys.readouterr().err
    exact = with_plan(options(plan="auto", exact=True), None)
    assert isinstance(exact.plan, Plan)
    assert exact.plan.layout.data == 4
    assert not exact.plan.prediction


def test_help_names_the_three_plans(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("--plan FILE|auto", "--layout AXIS=N,...", "--cluster C", "--verify"))


def test_the_layout_is_what_is_verified() -> None:
    assert verification_of(options(out="runs/mine/")).out == "runs/mine-verify"
    assert verification_of(options()).out is None
    wanted = verification_of(options(layout="data=2", devices=2, precision="bf16"))
    assert isinstance(wanted.plan, Plan)
    assert (wanted.plan.layout.data, wanted.devices, wanted.precision, wanted.steps) == (2, None, "bf16", 2)


def test_an_engine_starts_no_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    asked = options(verify=True, devices=2, on="slurm")
    assert "--verify" not in submission_of(asked, requested(asked)).arguments


def test_a_cluster_takes_no_range() -> None:
    with pytest.raises(CommandError, match="one number of devices"):
        with_plan(options(plan="auto", devices="2:4", cluster="8xH100"), None)


def test_a_cluster_that_is_not_here_is_not_trained_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --on the run is of this machine: another kind or number of devices needs --dry-run, or its engine."""
    monkeypatch.setattr(choose_plan, "visible_gpus", lambda: 0)
    monkeypatch.setattr(choose_plan, "cores", lambda: 4)
    monkeypatch.setattr(choose_plan, "in_child", lambda work: {"plan": choose_plan.dumped(Plan()), "lines": ["chosen"]})
    for other in ("2xH100", "8xcpu"):
        with pytest.raises(CommandError, match="without --on the run trains on this machine, which has 4 cores"):
            with_plan(options(plan="auto", cluster=other), None)
    for more in ({"cluster": "4xcpu"}, {"cluster": "8xcpu", "devices": 2}):
        with_plan(options(plan="auto", **more), None)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].endswith("trains on this machine, which has 4 cores")
        assert lines[1] == "note: chosen"


def test_hosts_are_asked_for_their_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose_plan, "visible_gpus", lambda: 0)
    hosts = HostsCluster(("a", "b", "c"), ("-p", "2222"), cluster("3x2xcpu"))
    monkeypatch.setattr(choose_plan, "ask_hosts", {"a,b,c -p 2222": hosts}.__getitem__)
    for number, on in ((1, "hosts:a:1 -p 2222"), (2, "hosts:a:2 -p 2222"), (4, "hosts:a:2,b:2 -p 2222")):
        plan = Plan().with_sections(layout={"data": number})
        monkeypatch.setattr(
            choose_plan, "in_child", lambda work, plan=plan: {"plan": choose_plan.dumped(plan), "lines": []}
        )
        chosen = with_plan(options(plan="auto", on="hosts:a,b,c -p 2222", out="runs/x"), None)
        assert chosen.on == on
        assert read_plan(Path(str(chosen.plan))).layout.data == number
    assert cluster("runs/x.cluster.toml") == hosts.cluster
