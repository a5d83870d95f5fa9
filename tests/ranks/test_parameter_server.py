"""Servers, workers and a conductor as processes: verified, counted, and within the bound."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which a first optimizer imports: once here, not in each forked rank
from tests.conformance.cases import adamw, classify, convolutions, images, vectors
from tests.conformance.cases import job as small
from tests.usual import parametrize

import shoal
from shoal.checkpoint import weights_sha256
from shoal.distributed.mesh import alone
from shoal.errors import NonFiniteError, UserCodeError
from shoal.launch.environment import Environment
from shoal.numerics.precision import Precision
from shoal.parallel.data.pushed import Push, ServerShard
from shoal.plans.accounting.collectives import pieces
from shoal.plans.grains import divide, share
from shoal.plans.plan import PrecisionSection
from shoal.training.observe.metering import array
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.parameter_server.channel import Channel
from shoal.training.parameter_server.conductor import Conductor
from shoal.training.parameter_server.members import Members, identity
from shoal.training.parameter_server.worker import take_part
from shoal.training.setup.engine import Options, build
from shoal.training.setup.job_model import build_model, with_grains
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked, trace_forked
from shoal.verification.judge import Verdict, judge_traces

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")


def planned(job: shoal.Job, mode: str, workers: int = 3, servers: int = 2, **sections: Any) -> shoal.Plan:
    staleness = sections.pop("staleness", 0)
    server = {"mode": mode, "num_servers": servers, "staleness": staleness}
    plan = shoal.Plan().with_sections(layout={"data": workers}, server=server, **sections)
    return judged(job, plan).plan


def normalised() -> shoal.Job:
    """Convolutions with batch statistics, which no server keeps."""
    return small(model=convolutions, train_data=lambda: images(100), eval_data=lambda: images(37, 2))


def verdict_on(job: shoal.Job, plan: shoal.Plan, folder: Path) -> Verdict:
    job = with_grains(job)
    trace_forked(lambda: job, plan, folder, 2)
    return judge_traces(job, plan, folder)


def trained(
    job: shoal.Job, plan: shoal.Plan, folder: Path, checkpoints: Path | None = None, steps: int = 0
) -> dict[str, Any]:
    """The report, final values and digest of a run, up to its end or so many steps; resumed where it can be."""
    job = with_grains(job)

    def rank(environment: Environment) -> None:
        if take_part(job, plan, environment):
            return
        with Members(environment, plan.server.num_servers, identity(job, plan)) as crew:
            engine = build(job, plan, alone(CPU), Options(checkpoints))
            around = Surroundings(print, lambda record, rank: None, lambda: False)
            state = engine.load()[0] or engine.first_state()
            last = steps or engine.order.num_steps
            conductor = Conductor(engine, around, state, last, RecordWriter(None), crew=crew)
            outcome = conductor.train()
            found = {**conductor.report(), "digest": outcome.state.digest, "metrics": outcome.metrics}
            found["skipped"] = outcome.state.skipped_steps
            found["weights"] = weights_sha256(engine.model.state_dict())
            (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
            engine.close()

    with forked(plan.num_processes, rank, folder) as wait:
        wait()
    found: dict[str, Any] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def by_one_process(
    job: shoal.Job, checkpoints: Path | None = None, steps: int = 0, *, exact: bool = False
) -> tuple[str, str]:
    """The digest and the final values of a run without servers; resumed where it can be."""
    plan = shoal.Plan().with_sections(execution={"exact": exact})
    engine = build(job, judged(job, plan).plan, alone(CPU), Options(checkpoints))
    around = Surroundings(print, lambda record, rank: None, lambda: False)
    try:
        state, last = engine.load()[0], steps or engine.order.num_steps
        outcome = engine.trainer(state, last, around, RecordWriter(None)).train()
        return outcome.state.digest, weights_sha256(engine.model.state_dict())
    finally:
        engine.close()


@parametrize("exact", [False, True], usual=["True"])
def test_synchronous_is_verified(exact: bool, tmp_path: Path) -> None:
    job = normalised()
    verdict = verdict_on(job, planned(job, "synchronous", execution={"exact": exact}), tmp_path / "traces")
    assert verdict.verified, verdict.render()
    assert not exact or any("are bit for bit those of the engine on one process" in note for note in verdict.notes)


def test_pushes_that_come_twice_and_late_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker sends each push twice, and the one before once more: the run is the same run."""
    job, original = small(), Channel.ask
    before: dict[int, tuple[Any, Any]] = {}

    def ask(self: Channel, header: dict[str, Any], tensors: Any = ()) -> Any:
        answer = original(self, header, tensors)
        if header["kind"] == "push":
            assert answer[0]["taken"]
            for again in ((header, tensors), before.get(id(self), (header, tensors))):
                assert not original(self, *again)[0]["taken"]
            before[id(self)] = header, [t.clone() for t in tensors]
        return answer

    monkeypatch.setattr(Channel, "ask", ask)
    verdict = verdict_on(job, planned(job, "synchronous"), tmp_path / "traces")
    assert verdict.verified, verdict.render()


def test_a_server_that_counts_a_push_twice_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, original = small(), ServerShard.push

    def push(self: ServerShard, push: Push) -> bool:
        twice = tuple(flat * 2 for flat in push.flats) if push.part == 1 else push.flats
        return original(self, Push(push.step, push.part, push.ticket, push.nodes, push.used, twice))

    with monkeypatch.context() as patch:
        patch.setattr(ServerShard, "push", push)
        verdict = verdict_on(job, planned(job, "synchronous"), tmp_path / "traces")
    assert not verdict.verified
    assert verdict.failed[0].phase == "reduction", verdict.render()


@parametrize(("mode", "staleness"), [("asynchronous", 0), ("bounded", 1)], usual=["bounded-1"])
def test_ahead_of_each_other_every_sample_counts_once(mode: str, staleness: int, tmp_path: Path) -> None:
    job = normalised()
    found = trained(job, planned(job, mode, staleness=staleness), tmp_path / "run")
    assert found["digest"] == by_one_process(job)[0]
    assert (found["applied_steps"], found["applied_pushes"]) == (20, 20)
    assert sum(found["staleness"].values()) == 20
    if mode == "bounded":
        assert max(map(int, found["staleness"])) <= staleness
    assert found["metrics"]["accuracy"] > 0.5


def test_resumed_with_servers_and_without(tmp_path: Path) -> None:
    """To the bit, with the optimizer's state, which has been on two servers."""
    job = small(optimizer=adamw, length=shoal.Steps(6))
    plan = planned(job, "synchronous", 2, execution={"exact": True})
    whole = by_one_process(job, exact=True)
    trained(job, plan, tmp_path / "first", tmp_path / "a", steps=3)
    assert by_one_process(job, tmp_path / "a", exact=True) == whole
    by_one_process(job, tmp_path / "b", 3, exact=True)
    found = trained(job, plan, tmp_path / "then", tmp_path / "b")
    assert (found["digest"], found["weights"]) == whole
    assert found["applied_steps"] == 3


def spoilt() -> tuple[torch.Tensor, torch.Tensor]:
    """Sample 37, of grain 2 of step 2, is not finite."""
    inputs, labels = vectors(100)
    inputs[37] = float("nan")
    return inputs, labels


@parametrize("mode", ["synchronous", "asynchronous"], usual=["asynchronous"])
def test_a_step_that_is_not_finite_is_left_out_on_all_servers(mode: str, tmp_path: Path) -> None:
    job = small(train_data=spoilt, shuffle=False, on_nonfinite="skip", length=shoal.Steps(5))
    found = trained(job, planned(job, mode), tmp_path / "run")
    assert found["skipped"] == 1
    assert found["digest"] == by_one_process(job)[0]
    assert found["metrics"]["loss"] < 2.0
    stopping = small(train_data=spoilt, shuffle=False, length=shoal.Steps(5))
    with pytest.raises(NonFiniteError, match=r"step 2: rank [345] on .*, grains \[2\], samples \[37\]") as caught:
        trained(stopping, planned(stopping, mode), tmp_path / "stopped")
    assert ("less momentum and a lower rate" in caught.value.remedy) == (mode == "asynchronous")


def test_a_worker_that_nobody_listens_to_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last worker comes so late that the conductor ends before it has read its words, and resets it."""
    listen_to = Members._listen_to

    def late(self: Members, wire: Channel) -> None:
        told = wire._socket.recv(1000, socket.MSG_PEEK)
        if b'"kind": "worker", "number": 2' in told:
            time.sleep(60)
        listen_to(self, wire)

    monkeypatch.setattr(Members, "_listen_to", late)
    job = small(length=shoal.Steps(3))
    assert trained(job, planned(job, "synchronous"), tmp_path / "run")["applied_steps"] == 3


def test_a_worker_that_raises_is_named(tmp_path: Path) -> None:
    def raising(model: torch.nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("no loss here")
        return classify(model, batch)

    job = small(loss=raising)
    with pytest.raises(UserCodeError, match="no loss here") as caught:
        trained(job, planned(job, "synchronous"), tmp_path / "run")
    assert caught.value.rank in (3, 4, 5), "conductor and two servers come before"


@parametrize("exact", [False, True], usual=["True"])
def test_a_worker_sends_and_gets_what_the_formula_says(exact: bool, tmp_path: Path) -> None:
    """In steps of eight grains; parts are given to whoever asks, so that the sum over workers is what is known."""
    job = small(length=shoal.Steps(6))
    plan = planned(job, "synchronous", execution={"exact": exact})
    found = trained(job, plan, tmp_path / "run")
    model = build_model(job, Precision.of(PrecisionSection(), CPU))
    arrays = [array(p) for p in model.parameters()]
    grains = divide(16, 16, 8)
    of = [[g.index for g in share(grains, part, 3)] for part in range(3)]
    # A gradient of every parameter once, in exact mode once for each node of the tree that a part's grains fill; and
    # the parameters once, whenever a newer version is there.
    whole = sum(a.bytes for a in arrays)
    nodes = [len(pieces(held, 8)) if exact else 1 for held in of]
    pushed = sum(worker["pushed_bytes"] for worker in found["workers"].values())
    pulled = sum(worker["pulled_bytes"] for worker in found["workers"].values())
    assert sum(worker["tasks"] for worker in found["workers"].values()) == 18
    assert pushed == 6 * sum(nodes) * whole
    # Who computes two parts of a step has its parameters already.
    assert pulled <= 6 * len(of) * whole
    assert pulled % whole == 0


class Treacherous(torch.optim.SGD):
    """Climbs instead of descending from update 21 on: until the run has gone back from there, or always.

    As momentum does on parameters that are out of date, and always at the same update. The climb is without momentum,
    which would go on down for as many updates as the timing of the workers has it.
    """

    def __init__(self, parameters: Any, always: bool) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.param_groups[0] |= {"count": 0, "turned": False}
        seen = [0]  # in no attribute, which a retreat would take back too
        self._always, self._note, self._last = always, seen.append, lambda: seen[-1]

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["turned"] = group["turned"] or group["count"] < self._last()
        group["count"] += 1
        self._note(group["count"])
        climbs = group["count"] > 20 and (self._always or not group["turned"])
        group.update(maximize=climbs, momentum=0.0 if climbs else 0.9, lr=0.5 if climbs else 0.05)
        super().step(closure)


def treacherous(always: bool) -> shoal.Job:
    return small(optimizer=lambda p: Treacherous(p, always), schedule=None, length=shoal.Steps(90))


def test_what_was_lost_to_staleness_is_won_back_in_step(tmp_path: Path) -> None:
    """Stopped after it fell back, it is resumed in step."""
    job = treacherous(always=False)
    plan = planned(job, "asynchronous", workers=2, servers=1)
    found = trained(job, plan, tmp_path / "first", tmp_path / "kept", steps=80)
    fell_back = found["fell_back"]
    assert fell_back["to"] == "synchronous"
    assert fell_back["from_step"] <= 28 < fell_back["step"], "back to where the loss was lowest at a pause"
    assert fell_back["lowest"] < fell_back["beginning"] <= fell_back["loss"]
    assert found["applied_steps"] - found["undone"] == 80
    assert found["warning"] is None
    then = trained(job, plan, tmp_path / "then", tmp_path / "kept")
    assert then["fell_back"] == fell_back
    assert then["staleness"] == {"0": 10}
    assert then["metrics"]["accuracy"] > 0.5
    plain = small(length=shoal.Steps(90))
    assert then["digest"] == by_one_process(plain)[0], "no sample twice and none left out"


def test_where_nothing_was_learnt_the_result_says_so(tmp_path: Path) -> None:
    job = treacherous(always=True)
    found = trained(job, planned(job, "asynchronous", workers=2, servers=1), tmp_path / "run")
    assert found["fell_back"] is not None
    assert "nothing was learnt" in found["warning"]
