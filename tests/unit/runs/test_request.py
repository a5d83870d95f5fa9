"""A call of `shoal run` becomes one request; what contradicts itself is refused before torch is loaded."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal.hardware.detect
import shoal.runs.request
from shoal.cli.main import _parser
from shoal.cli.options import RunOptions
from shoal.cli.run.start import requested
from shoal.errors import CommandError, InUseError, PlanError, RunDirectoryError, SettingError, SettingWarning
from shoal.hardware.detect import visible_gpus
from shoal.plans import Plan
from shoal.plans.legal import ModelFacts, conflicts
from shoal.plans.plan import AXES, plan_text
from shoal.plans.resolve import CompletePlan, complete, judge
from shoal.runs.directory import RunDirectory, about
from shoal.runs.options import Origin, options_of
from shoal.runs.request import RunRequest, claim_directory, devices_here, dumped, loaded


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("net_job.py").write_text("")
    return "net_job.py"


def request(*arguments: str) -> RunRequest:
    return requested(replace(options_of(RunOptions, _parser().parse_args(["run", *arguments])), started_at=5.0))


def began(out: Path, job: dict[str, Any] | None = None, plan: Plan | None = None) -> None:
    out.mkdir(parents=True)
    RunDirectory(out).job.write_text(json.dumps(job or {}))
    if plan is not None:
        RunDirectory(out).plan.write_text(plan_text(plan))


def test_defaults(job: str) -> None:
    found = request(job)
    assert (found.what.plan, found.where.out, found.course.resume) == (Plan(), Path("runs/net_job"), False)
    assert (found.course.steps, found.course.checkpoint_every, found.started_at) == (None, None, 5.0)
    assert not found.course.no_telemetry
    assert found.what.job.settings == ()


def test_every_option(job: str) -> None:
    options = "--devices 2 --exact --precision bf16 --set lr=0.1 --set name=x --steps 7 --out o --checkpoint-every 3"
    found = request(f"{job}:other", *options.split(), *["--max-microbatch", "64", "--workers", "2", "--no-telemetry"])
    assert found.what.job.function == "other"
    assert found.what.job.settings == (("lr", "0.1"), ("name", "x"))
    assert found.what.plan.layout.data == found.what.plan.layout.world_size == 2
    assert found.what.plan.execution.exact
    assert found.what.plan.precision.compute == "bfloat16"
    assert found.what.plan.data.workers == 2
    assert (found.course.steps, found.where.out, found.course.checkpoint_every) == (7, Path("o"), 3)
    assert found.what.max_microbatch == 64
    assert found.course.no_telemetry
    assert found.what.threads_per_process == 1


@pytest.mark.parametrize(
    "option", ["--devices", "--steps", "--checkpoint-every", "--keep-checkpoints", "--max-microbatch"]
)
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", ""])
def test_counts_start_at_one(job: str, option: str, value: str) -> None:
    with pytest.raises(CommandError, match=f"{option} takes a whole number of at least 1"):
        request(job, f"{option}={value}")


def test_a_resumed_run_keeps_as_many_checkpoints_as_before(job: str) -> None:
    assert request(job).course.keep_checkpoints == 3
    assert request(job, "--keep-checkpoints", "all").course.keep_checkpoints == "all"
    for kept, found in (({"keep_checkpoints": "all"}, "all"), ({"keep_checkpoints": 5}, 5), ({}, 3)):
        out = f"o-{found}"
        began(Path(out), {"grains": 4, **kept})
        assert request(job, "--out", out, "--resume").course.keep_checkpoints == found
        assert request(job, "--out", out, "--resume", "--keep-checkpoints", "2").course.keep_checkpoints == 2


def test_a_resume_says_which_settings_of_a_file_the_run_overrides(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.toml").write_text("lr = 0.5\nwidth = 4\n")
    given = request(job, "--config", "small.toml", "--set", "lr=0.1").what.job
    config = [{"path": one.path, "sha256": one.sha256} for one in given.config]
    began(Path("o"), {"given": dict(given.settings), "config": config})
    resume = (job, "--out", "o", "--resume", "--config", "small.toml")
    assert dict(request(*resume).what.job.settings)["lr"] == "0.1"
    assert not capsys.readouterr().err, "the file is as it was"
    Path("small.toml").write_text("lr = 0.25\nwidth = 5\n")
    assert dict(request(*resume).what.job.settings)["lr"] == "0.1"
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("note: lr=0.25 in small.toml changes nothing: --set lr=0.1 of the run overrides files; ")
    assert "width" not in said
    assert dict(request(*resume, "--set", "lr=0.25").what.job.settings)["lr"] == "0.25"
    assert not capsys.readouterr().err
    began(Path("p"), {"given": {"depth": '{"of": 1}'}, "config": config})
    Path("small.toml").write_text("[depth]\nof = 2\n")
    request(job, "--out", "p", "--resume", "--config", "small.toml")
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("note: depth.of=2 in small.toml changes nothing: ")
    assert "write --set depth.of=VALUE" in said


def test_a_plan_file_says_the_devices(job: str) -> None:
    Path("plan.toml").write_text(plan_text(Plan().with_sections(layout={"data": 4})))
    assert request(job, "--plan", "plan.toml").with_devices(9).what.plan.layout.world_size == 4
    with pytest.raises(PlanError, match="--devices 3 with a plan"):
        request(job, "--plan", "plan.toml", "--devices", "3")
    with pytest.raises(PlanError, match="cannot be read"):
        request(job, "--plan", "nowhere.toml")


def test_what_is_not_executed_is_refused_at_once(job: str) -> None:
    plan = Plan().with_sections(execution={"exact": True}, collectives={"compression": "int8"})
    Path("plan.toml").write_text(plan_text(plan))
    with pytest.raises(PlanError, match=r"collectives\.compression = .int8"):
        request(job, "--plan", "plan.toml").check_plan()


def test_what_contradicts_itself_is_refused_with_the_nearest(job: str) -> None:
    plan = Plan().with_sections(layout={"tensor": 2}, execution={"exact": True})
    Path("plan.toml").write_text(plan_text(plan))
    with pytest.raises(PlanError, match=r"larger data or shard axis"):
        request(job, "--plan", "plan.toml").check_plan()


def test_a_job_is_looked_at_where_only_that_tells(job: str) -> None:
    assert request(job, "--devices", "2").what.needs_look  # the file does not say
    Path(job).write_text("import shoal\ndef job(): return shoal.Job()\n")
    assert not request(job).what.needs_look
    assert not request(job, "--devices", "8").what.needs_look
    assert request(job, "--devices", "9").what.needs_look
    Path(job).write_text("import shoal\ndef job(): return shoal.Job(grains=3)\n")
    assert not request(job, "--devices", "3").what.needs_look
    assert request(job, "--devices", "4").what.needs_look
    found = request(job)
    divided = found.what.plan.with_sections(layout={"pipeline": 2})
    assert replace(found.what, plan=divided).needs_look
    served = found.what.plan.with_sections(server={"mode": "synchronous"})
    assert replace(found.what, plan=served).needs_look


def test_ranks_read_the_request_that_a_launcher_wrote(job: str) -> None:
    options = "--devices 2 --exact --precision fp16 --set lr=0.1 --set name=x --steps 7 --max-microbatch 64"
    options += " --no-telemetry"
    asked = request(job, *options.split())
    assert loaded(RunRequest, dumped(asked)) == asked
    what = replace(asked.what, judged=judge(asked.what.plan, ModelFacts(8, 4)))
    looked_at = replace(asked, what=what, where=replace(asked.where, numbered="a"))
    found = loaded(RunRequest, dumped(looked_at))
    assert found == looked_at
    assert found.what.judged is not None
    assert type(found.what.judged.plan) is CompletePlan
    assert found.what.judged.plan.batch.grains_per_microbatch == 1


def test_a_prediction_is_handed_over_whatever_its_numbers_are(job: str) -> None:
    plan = Plan.from_mapping({"schema": 1, "prediction": {"step_seconds": math.inf, "about": ["a", 1]}}, source="p")
    asked = request(job)
    asked = replace(asked, what=replace(asked.what, plan=plan))
    assert loaded(RunRequest, dumped(asked)) == asked


def test_devices_are_counted_where_nobody_says(job: str) -> None:
    assert request(job).with_devices(3).what.plan.layout.world_size == 3
    assert request(job, "--devices", "2").with_devices(3).what.plan.layout.world_size == 2


def test_a_run_directory_is_checked(job: str) -> None:
    began(Path("runs/net_job"))
    request(job).check()  # takes runs/net_job-2
    with pytest.raises(RunDirectoryError, match="nothing is overwritten"):
        request(job, "--out", "runs/net_job").check()
    request(job, "--resume").check()
    with pytest.raises(RunDirectoryError, match=r"no job\.json"):
        request(job, "--resume", "--out", "elsewhere").check()


def test_two_starts_without_a_directory_choose_two(job: str) -> None:
    with claim_directory(request(job)) as first, claim_directory(request(job)) as second:
        assert (first.folder, second.folder) == (Path("runs/net_job"), Path("runs/net_job-2"))
        with pytest.raises(InUseError, match="it is in use by pid"):
            claim_directory(request(job, "--out", "runs/net_job"))
        with pytest.raises(InUseError, match="it is in use by pid"):
            claim_directory(request(job, "--resume", "--out", "runs/net_job"))
    assert not Path("runs").exists()
    late = request(job)
    began(Path("runs/net_job"))  # by another, in between
    with claim_directory(late) as lock:
        assert lock.folder == Path("runs/net_job-2")
    with pytest.raises(RunDirectoryError, match="nothing is overwritten"):
        claim_directory(request(job, "--out", "runs/net_job"))


def test_a_resume_takes_plan_settings_and_steps_of_the_run(job: str) -> None:
    plan = Plan().with_sections(layout={"data": 2}, execution={"exact": True})
    began(Path("runs/net_job"), {"given": {"lr": "0.5", "name": "a"}, "stop_after": 40}, plan)
    found = request(job, "--resume")
    assert found.what.plan == plan
    assert dict(found.what.job.settings) == {"lr": "0.5", "name": "a"}
    assert found.course.steps == 40
    assert found.with_devices(8).what.plan.layout.world_size == 2


def test_a_resume_may_change_devices_steps_and_settings(job: str) -> None:
    plan = Plan().with_sections(layout={"data": 2}, execution={"exact": True})
    began(Path("runs/net_job"), {"given": {"lr": "0.5", "name": "a"}, "stop_after": 40}, plan)
    found = request(job, "--resume", "--devices", "4", "--steps", "80", "--set", "lr=1")
    assert found.what.plan.layout.world_size == 4
    assert found.what.plan.execution.exact
    assert dict(found.what.job.settings) == {"lr": "1", "name": "a"}
    assert found.course.steps == 80
    Path("plan.toml").write_text(plan_text(Plan()))
    assert request(job, "--resume", "--plan", "plan.toml").what.plan == Plan()


def layouts() -> Iterator[dict[str, int]]:
    for degrees in itertools.product((1, 2), repeat=len(AXES)):
        yield dict(zip(AXES, degrees, strict=True))


@pytest.mark.parametrize("sections", [{}, {"execution": {"exact": True}}, {"server": {"mode": "synchronous"}}])
def test_of_what_nobody_wrote_nothing_is_said(job: str, sections: dict[str, Any]) -> None:
    """Each layout by itself and as the complete plan that a run of it keeps, used again; warnings are errors."""
    num = 0
    for layout in layouts():
        plan = Plan().with_sections(layout=layout, **sections)
        if conflicts(plan):
            continue
        found = request(job)
        found = replace(found, what=replace(found.what, plan=plan))
        if not found.what.plan.serves:
            found = found.with_own_sums()
        found.check_plan()
        kept = complete(found.what.plan, 8, 4)
        Path("plan.toml").write_text(plan_text(kept))
        again = request(job, "--plan", "plan.toml")
        again.with_devices(9).with_own_sums().check_plan()
        assert complete(again.what.plan, 8, 4) == kept
        num += 1
    assert num > 1


def test_a_resume_on_other_devices_says_nothing_of_what_the_run_chose(job: str) -> None:
    chosen = Plan().with_sections(
        layout={"data": 2}, collectives={"all_reduce": "shared_memory"}, batch={"grains_per_microbatch": 4}
    )
    began(Path("runs/net_job"), plan=chosen)
    request(job, "--resume", "--devices", "1").check_plan()
    complete(request(job, "--resume", "--exact").what.plan, 8, 4)
    Path("plan.toml").write_text(plan_text(chosen.with_sections(layout={"data": 1})))
    with pytest.warns(SettingWarning, match="all_reduce = .shared_memory.: no effect"):
        request(job, "--plan", "plan.toml").check_plan()


def test_a_setting_without_a_value_is_refused(job: str) -> None:
    with pytest.raises(SettingError):
        request(job, "--set", "lr")


def test_threads_share_the_cores(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.runs.request, "cores", lambda: 8)
    assert request(job, "--devices", "3").what.threads_per_process == 2
    assert request(job, "--devices", "16").what.threads_per_process == 1
    assert request(job, "--devices", "2", "--exact").what.threads_per_process == 1


@pytest.mark.parametrize(
    ("gpus", "visible", "found"),
    [(0, None, 0), (4, None, 4), (4, "0,2", 2), (4, "", 0), (4, "-1", 0), (2, "0,1,2,3", 2), (0, "0,1", 0)],
)
def test_devices_are_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, found: int
) -> None:
    folder = SimpleNamespace(iterdir=lambda: iter(range(gpus)), is_dir=lambda: gpus > 0)
    with monkeypatch.context() as patched:
        patched.setattr(shoal.hardware.detect, "GPU_FOLDER", folder)
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patched.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (visible_gpus(), devices_here()) == (found, max(1, found))


@pytest.mark.parametrize(("gpus", "devices", "fits"), [(2, 4, False), (2, 2, True), (0, 16, True)])
def test_another_number_of_processes_is_one_for_the_gpus_that_the_run_sees(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, devices: int, fits: bool
) -> None:
    monkeypatch.setattr("shoal.hardware.detect.gpus", lambda: ["NVIDIA H100"] * 8)
    monkeypatch.setattr("shoal.runs.request.visible_gpus", lambda: gpus)
    here = request(job, "--devices", "1")
    here = replace(here, where=replace(here.where, out=tmp_path, resizable=True))
    assert about(tmp_path, here.begun().where.generation)["gpus"] == gpus
    if fits:
        assert here.resized(devices, 0.0).what.plan.num_processes == devices
    else:
        with pytest.raises(PlanError, match=r"the run sees 2 GPU\(s\)"):
            here.resized(devices, 0.0)


def test_shared_memory_unless_it_cannot_be_and_then_why(
    job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shoal.hardware.detect.gpus", list)
    monkeypatch.setattr("shoal.hardware.detect.gpus", list)
    monkeypatch.setattr("shoal.hardware.detect.why_not_shared", lambda: None)
    two = request(job, "--devices", "2")
    assert two.with_own_sums().what.plan.collectives.all_reduce == "shared_memory"
    assert two.notes() == []
    monkeypatch.setattr("shoal.hardware.detect.why_not_shared", lambda: "there is no /proc")
    assert two.with_own_sums().what.plan.collectives.all_reduce == "native"
    assert two.notes() == ["gradients are summed over sockets (native): there is no /proc"]
    alone = request(job, "--devices", "1")
    assert alone.with_own_sums().what.plan.collectives.all_reduce == "native"
    assert alone.notes() == []


def test_one_copy_where_sums_go_through_shared_memory_and_no_file_says(
    job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fastest = ["shared_memory"]
    monkeypatch.setattr("shoal.hardware.detect.all_reduce_here", lambda ranks: fastest[0])
    for mode in ((), ("--exact",)):
        two = request(job, "--devices", "2", *mode).with_own_sums()
        assert two.what.plan.memory.shared
        assert two.origin("memory.shared") is Origin.CHOSEN
    assert two.with_own_sums() == two
    for name in ("native", "ring"):
        fastest[:] = [name]
        assert not request(job, "--devices", "2").with_own_sums().what.plan.memory.shared
    fastest[:] = ["shared_memory"]
    assert not request(job, "--devices", "1").with_own_sums().what.plan.memory.shared
    path = tmp_path / "plan.toml"
    for said in (True, False):
        path.write_text(
            f'[layout]\ndata = 2\n[memory]\nshared = {str(said).lower()}\n[collectives]\nall_reduce = "shared_memory"\n'
        )
        written = request(job, "--plan", str(path)).with_own_sums()
        assert written.what.plan.memory.shared is said
        assert written.origin("memory.shared") is Origin.FILE


@pytest.mark.parametrize(("fastest", "chosen"), [("shared_memory", "shared_memory"), ("ring", "native")])
def test_exact_sums_go_through_shared_memory_or_sockets(
    job: str, monkeypatch: pytest.MonkeyPatch, fastest: str, chosen: str
) -> None:
    monkeypatch.setattr("shoal.hardware.detect.all_reduce_here", lambda ranks: fastest)
    found = request(job, "--devices", "2", "--exact").with_own_sums()
    assert found.what.plan.collectives.all_reduce == chosen


def test_what_an_engine_starts_again_goes_on_where_a_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    found = request("job.py", "--out", "run", "--init-from", str(tmp_path))
    assert not found.restarted(1).course.resume, "nothing has begun"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{}")
    again = found.restarted(2)
    assert (again.course.resume, again.restarts, again.what.initial_weights) == (True, 2, found.what.initial_weights)
    assert not found.restarted(0).course.resume


@pytest.mark.parametrize(
    ("text", "by_file"),
    [
        ("", ()),
        ("[execution]\ncompile = 'none'\n", ("step",)),
        ("[execution]\nchannels_last = false\n", ("channels_last",)),
    ],
)
def test_a_plan_file_sets_the_step_where_it_has_its_keys(
    job: str, text: str, by_file: tuple[str, ...], tmp_path: Path
) -> None:
    names = ("channels_last", "step")
    assert all(request(job, "--out", "o").origin(f"execution.{name}") is Origin.DEFAULT for name in names)
    path = tmp_path / "plan.toml"
    path.write_text(f"[layout]\ndata = 2\n{text}")
    planned = request(job, "--plan", str(path))
    assert [name for name in names if planned.origin(f"execution.{name}") is Origin.FILE] == sorted(by_file)


def test_a_step_that_is_asked_for_is_in_the_plan(job: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[execution]\ncompile = "max-autotune"\n')
    assert request(job, "--step", "compiled").what.plan.execution.compile == "default"
    assert request(job, "--step", "compiled", "--plan", str(path)).what.plan.execution.compile == "max-autotune"
    for step in ("eager", "graph"):
        with pytest.raises(PlanError, match="the plan file has"):
            request(job, "--step", step, "--plan", str(path))
    both = request(job, "--step", "compiled-graph").what.plan.execution
    assert (both.cuda_graph, both.compile) == (True, "default")


@pytest.mark.parametrize("last", [True, False])
def test_a_run_that_goes_on_keeps_the_step_that_it_has_chosen(job: str, last: bool) -> None:
    found = request(job, "--devices", "2", "--out", "o")
    found = replace(found, what=replace(found.what, judged=judge(found.what.plan, ModelFacts(8, 4))))
    kind = "default" if last else "none"
    began(Path("o"), {"grains": 8}, Plan().with_sections(execution={"channels_last": last, "compile": kind}))
    for again in (found.again(1, 5.0), found.restarted(1)):
        assert again.what.plan.execution.channels_last is last
        assert again.what.plan.execution.compile == kind
        assert again.what.judged is not None
        assert again.what.judged.plan.execution.channels_last is last
        assert again.origin("execution.channels_last") is Origin.RUN
    assert request(job, "--resume", "--out", "o").origin("execution.channels_last") is Origin.RUN
    assert request(job, "--resume", "--out", "o").what.plan.execution.channels_last is last


def test_who_has_set_a_value(job: str, tmp_path: Path) -> None:
    assert request(job).origins == dict.fromkeys(request(job).origins, Origin.DEFAULT)
    found = request(job, "--steps", "3", "--workers", "0", "--devices", "2")
    names = ("steps", "data.workers", "layout", "checkpoint_every", "plan")
    option, default = Origin.OPTION, Origin.DEFAULT
    assert tuple(map(found.origin, names)) == (option, option, option, default, default)
    assert request(job).with_devices(2).origin("layout") is Origin.CHOSEN
    began(Path("o"), {"stop_after": 5, "bad_samples": 2}, Plan().with_sections(data={"workers": 1}))
    resumed = request(job, "--resume", "--out", "o", "--bad-samples", "3")
    assert tuple(map(resumed.origin, ("steps", "plan", "data.workers"))) == (Origin.RUN,) * 3
    assert resumed.origin("bad_samples") is Origin.OPTION
    assert (resumed.course.steps, resumed.course.bad_samples) == (5, 3)
    assert resumed.origin("layout") is Origin.RUN
    assert request(job, "--resume", "--out", "o", "--devices", "2").origin("layout") is Origin.OPTION
    path = tmp_path / "plan.toml"
    path.write_text("[layout]\ndata = 2\n")
    assert request(job, "--plan", str(path)).origin("layout") is Origin.FILE
    assert request(job, "--plan", str(path)).origin("data.workers") is Origin.DEFAULT


def test_a_private_run_closes_a_directory_that_is_there(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("there").mkdir(mode=0o755)
    with claim_directory(request(job, "--out", "there")):
        assert Path("there").stat().st_mode & 0o777 == 0o755
    with claim_directory(request(job, "--out", "there", "--private")):
        assert Path("there").stat().st_mode & 0o777 == 0o700

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(RunDirectoryError, match="others may read this directory"):
        claim_directory(request(job, "--out", "there", "--private"))
    assert not Path("there/lock.json").exists()
