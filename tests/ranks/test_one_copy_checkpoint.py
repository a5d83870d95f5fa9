"""Checkpoints of one copy: a snapshot that all ranks take is written by a thread of the first, beside the training."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import job as small
from tests.launching import JOBS, Run, newest_checkpoint, run

import shoal
from shoal.checkpoint import host_memory
from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.store import Snapshot, Store, open_folder
from shoal.distributed.mesh import open_mesh
from shoal.errors import ExitCode, LaunchError, ShoalError
from shoal.launch.environment import Environment
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

ADAM = partial(small, optimizer=partial(torch.optim.AdamW, lr=0.01))
ONE_COPY: dict[str, Any] = {"memory": {"shared": True}, "collectives": {"all_reduce": "shared_memory"}}
HALFWAY = f"{JOBS / 'halfway.py'}:gpt"
Before = Callable[[Engine], None]
Look = Callable[[Engine], Any]


def in_ranks(
    folder: Path, look: Look, before: Before = lambda engine: None, *, steps: int = 3, **how: Any
) -> list[Any]:
    """Trains two forked ranks of `how`: `shared`, or a copy each; what `look` finds of each rank's engine then.

    Checkpoints are in `folder`; `on_step` is told of each step.
    """
    sections = ONE_COPY | {"memory": {"shared": how.get("shared", True)}}

    def work(environment: Environment) -> None:
        made = ADAM()
        wanted = judged(made, shoal.Plan().with_sections(layout={"data": 2}, **sections)).plan
        around = Surroundings(lambda line: None, how.get("on_step", lambda record, rank: None), lambda: False)
        options = Options(telemetry=False, checkpoints=folder / "checkpoints", checkpoint_every=how.get("every"))
        with open_mesh(environment, wanted.layout) as mesh:
            engine = build(made, wanted, mesh, options)
            try:
                before(engine)
                engine.trainer(None, steps, around, RecordWriter(None)).train()
                told = look(engine)
            finally:
                engine.close()
            (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))

    folder.mkdir(exist_ok=True)
    with forked(2, work, folder / "ranks") as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


def together(engine: Engine) -> None:
    """All ranks write, as where no memory can be opened."""

    def refused(*_: Any) -> Any:
        raise LaunchError(given="memory", conflict="none here", remedy="have some")

    host_memory.open_region = refused  # type: ignore[assignment]  # in a child of this process


# --------------------------------------------------------------------------------- beside the steps


def test_steps_go_on_while_a_thread_of_the_first_rank_writes(tmp_path: Path) -> None:
    """The checkpoint of step 2 cannot be committed before step 3 has ended, which the training does not wait for."""
    events, gate = list[str](), threading.Event()
    commit = Store.commit

    def waits(self: Store, aside: str, step: int, *rest: Any, **named: Any) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        events.append(f"{step} begins {'in a thread' if beside else 'in the step'}")
        if step == 2 and beside:
            assert gate.wait(60)
        commit(self, aside, step, *rest, **named)
        events.append(f"{step} committed")

    def on_step(record: Any, rank: int) -> None:
        events.append(f"step {record.step}")
        if record.step >= 3:
            gate.set()

    def before(engine: Engine) -> None:
        Store.commit = waits  # type: ignore[method-assign]  # in a child of this process

    first, second = in_ranks(tmp_path / "run", lambda engine: events, before, steps=5, every=2, on_step=on_step)
    assert first.index("2 begins in a thread") < first.index("2 committed")
    assert first.index("step 3") < first.index("2 committed")
    assert not [event for event in (*first, *second) if "in the step" in event]
    assert not [event for event in second if "committed" in event]


def test_the_writer_is_given_copies_that_later_steps_leave(tmp_path: Path) -> None:
    """And the next snapshot has the memory of this one."""

    def look(engine: Engine) -> Any:
        given, keeper = list[Snapshot](), engine.keeper
        writer = keeper.writer
        if writer is not None:
            writer.write = given.append  # type: ignore[assignment]
        found = []
        for step in (7, 8):
            keeper.save(RunState(step=step))
            engine.mesh.gather_json(None)
            values = tensors(given[-1].tensors) if given else {}
            with torch.no_grad():
                for p in engine.parameters:
                    p.add_(1.0)
            for state in engine.updater.optimizer.state.values():
                state["exp_avg"].add_(1.0)
            engine.mesh.gather_json(None)
            kept = values == (tensors(given[-1].tensors) if given else {})
            places = sorted(t.data_ptr() for of in given[-1].tensors.values() for t in of.values()) if given else []
            found.append([kept, places, values])
        return found

    (one, two), nothing = in_ranks(tmp_path / "run", look)
    assert one[0]
    assert two[0]
    assert one[1] == two[1]
    assert one[2] != two[2]
    assert nothing == [[True, [], {}]] * 2


# --------------------------------------------------------------------------------- the content


def tensors(content: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        f"{name}/{path}": t.contiguous().view(-1).view(torch.uint8).tolist()
        for name, of in content.items()
        for path, t in of.items()
    }


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_those_that_all_ranks_write_to_the_byte(tmp_path: Path) -> None:
    names = ("mapped", "together")
    for name, before in zip(names, (lambda engine: None, together), strict=True):
        in_ranks(tmp_path / name, lambda engine: None, before)
    first, second = (files(newest_checkpoint(tmp_path / name)) for name in names)
    assert first == second
    assert "optimizer-00001-of-00002.0.safetensors" in first


def test_tensors_and_document_are_those_of_a_copy_each(tmp_path: Path) -> None:
    for shared in (True, False):
        in_ranks(tmp_path / str(shared), lambda engine: None, shared=shared)
    found = []
    for shared in (True, False):
        saved = open_folder(newest_checkpoint(tmp_path / str(shared)))
        content = {name: saved.read(name) for name in saved.names}
        values = {path.partition("/")[2]: value for path, value in tensors(content).items()}
        document = dict(saved.document)
        written = document.pop("tensors")
        found.append([values, {group: own.keys() for group, own in written.items()}, document])
    assert found[0] == found[1]


def test_the_memory_is_opened_anew_where_there_is_more_to_copy(tmp_path: Path) -> None:
    regions = list[Any]()

    def before(engine: Engine) -> None:
        engine.keeper.save(RunState(step=1), wait=True)  # the optimizer has no state yet
        regions.append(engine.keeper._snapshots._host_memory._region)

    def look(engine: Engine) -> Any:
        memory = engine.keeper._snapshots._host_memory
        regions.append(memory._region)
        engine.keeper.save(RunState(step=9), wait=True)
        return [regions[1] is regions[0], memory._region is regions[1]]

    assert in_ranks(tmp_path / "run", look, before) == [[False, True]] * 2
    assert open_folder(newest_checkpoint(tmp_path / "run")).read("optimizer-00001-of-00002.0")


def test_nobody_copies_while_the_snapshot_before_is_read(tmp_path: Path) -> None:
    gate, add = threading.Event(), Store.add

    def waits(*of: Any) -> Any:
        assert gate.wait(60)
        return add(*of)

    def look(engine: Engine) -> Any:
        Store.add = waits  # type: ignore[method-assign]  # in a child of this process
        state = [values["exp_avg"] for values in engine.updater.optimizer.state.values()]
        for step in (8, 9):
            for values in state:
                values.fill_(step)
            if step == 9:
                threading.Timer(0.3, gate.set).start()
            engine.keeper.save(RunState(step=step), wait=step == 9)
        return len(state)

    assert min(in_ranks(tmp_path / "run", look)) > 0
    for step in (8, 9):
        saved = open_folder(tmp_path / "run" / "checkpoints" / f"step-{step:08}")
        parts = [of for name in saved.names if name.startswith("optimizer") for of in saved.read(name).items()]
        assert {value for path, t in parts if path.endswith("exp_avg") for value in t.flatten().tolist()} == {step}


# --------------------------------------------------------------------------------- what fails


def test_a_rank_that_cannot_copy_commits_nothing(tmp_path: Path) -> None:
    def look(engine: Engine) -> Any:
        copy = host_memory.HostMemory._copy

        def fails(*of: Any) -> Any:
            raise MemoryError("no more")

        if engine.mesh.rank == 1:
            host_memory.HostMemory._copy = fails  # type: ignore[method-assign]  # in a child of this process
        told = raised(lambda: engine.keeper.save(RunState(step=9)))
        host_memory.HostMemory._copy = copy  # type: ignore[method-assign]
        engine.keeper.close()
        return [told, sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())]

    first, second = in_ranks(tmp_path / "run", look)
    assert first[0] == "PeerError"
    assert second[0] == "OutOfMemoryError"
    assert first[1] == ["step-00000003"]


def raised(work: Callable[[], None]) -> str | None:
    try:
        work()
    except ShoalError as error:
        return type(error).__name__
    return None


def test_a_full_disk_is_told_by_the_next_that_waits(tmp_path: Path) -> None:
    def look(engine: Engine) -> Any:
        def full(*of: Any, **named: Any) -> Any:
            raise OSError(28, "No space left on device")

        Store.add = full  # type: ignore[method-assign]  # in a child of this process
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.keeper.save(RunState(step=8))
            return raised(lambda: engine.keeper.save(RunState(step=9), wait=True))

    assert in_ranks(tmp_path / "run", look) == ["StorageError", "StorageError"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("where", ["copy", "commit"])
def test_killed_in(where: str, tmp_path: Path) -> None:
    """The run goes on from the older checkpoint, under another layout, and from nothing half done."""
    out, plan = tmp_path / "run", tmp_path / "plan.toml"
    sections = {"layout": {"data": 2}, "execution": {"exact": True}, **ONE_COPY}
    lines = [f"[{name}]\n{key} = {json.dumps(value)}\n" for name, own in sections.items() for key, value in own.items()]
    plan.write_text("".join(lines), encoding="utf-8")
    before = set(Path("/dev/shm").iterdir())
    arguments = ("--plan", str(plan), "--checkpoint-every", "2")
    run(Run(HALFWAY, out, None, arguments=arguments, environment={"TEST_KILLED_IN": where})).fails(ExitCode.RANK_LOST)
    assert newest_checkpoint(out).name == "step-00000004"
    assert bool(list((out / "checkpoints").glob(".tmp-*"))) is (where == "commit")
    ended = run(Run(HALFWAY, out, 1, exact=True, arguments=("--resume",))).expect(0)
    wanted = run(Run(HALFWAY, tmp_path / "alone", 1, exact=True)).expect(0)
    assert ended.result["weights_sha256"] == wanted.result["weights_sha256"]
    assert not list((out / "checkpoints").glob(".tmp-*"))
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "shoal" in path.name}
