"""Each engine's recorded variables make an Environment; where two engines disagree, both are named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.unit.launch.environments.recorded import (
    MPICH,
    OPEN_MPI,
    SLURM_SCRIPT,
    SLURM_TASK,
    TORCHRUN,
    TRAIN_JOB,
)

from shoal.errors import LaunchError
from shoal.launch.environment import ENGINE, LAUNCHER_PID, RESTARTS, Environment
from shoal.launch.environments.detect import detected, has_launcher, joined, restarts
from shoal.launch.environments.mpi import _proxy
from shoal.launch.environments.slurm import _first_host

LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OF_SLURM = Environment(2, 3, 0, 1, "gpu007", 15_680, host=1, num_hosts=2, engine="slurm", job="7")
OF_POD = Environment(1, 2, 0, 1, "train-node-0-0.train", 29500, host=1, num_hosts=2, engine="kubernetes")


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name not in names}


def test_torchrun() -> None:
    expected = Environment(
        3, 4, 1, 2, "10.0.0.1", 29500, agent_store=True, host=1, num_hosts=2, engine="torchrun", job="none"
    )
    assert joined(TORCHRUN) == expected
    assert joined({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}) == replace(expected, restarts=2)


def test_who_ends_a_rank_that_has_to_end_at_once() -> None:
    for variables in (TORCHRUN, SLURM_TASK, OPEN_MPI, MPICH, TRAIN_JOB, {**LEFT_OVER, LAUNCHER_PID: "7"}):
        assert has_launcher(variables)
    assert not has_launcher({})
    assert not has_launcher(LEFT_OVER), "a person may have set them in a terminal"
    assert not has_launcher(SLURM_SCRIPT)


def test_tasks_of_an_srun_step_are_one_world() -> None:
    assert joined(SLURM_TASK) == OF_SLURM
    one = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "2", "SLURM_STEP_NODELIST": "n1"}
    on_one = Environment(2, 3, 2, 3, "127.0.0.1", 15_680, engine="slurm", job="7")
    assert joined({**SLURM_TASK, **one}) == on_one
    other = {**SLURM_TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert joined(other) == replace(OF_SLURM, rank=0, local_world_size=2, host=0), "all know the same port"
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert joined({**SLURM_TASK, **told}) == replace(OF_SLURM, address="10.0.0.1", port=1234)
    assert joined({**SLURM_TASK, "SLURM_RESTART_COUNT": "1"}) == replace(OF_SLURM, restarts=1)
    assert joined({**SLURM_TASK, "SLURM_GPUS_PER_TASK": "1"}) == replace(OF_SLURM, own_gpu=True)


def test_a_batch_script_and_a_step_of_one_task_are_alone() -> None:
    assert joined(SLURM_SCRIPT) is None
    assert joined({**SLURM_SCRIPT, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}) is None
    assert joined({**SLURM_TASK, "SLURM_STEP_ID": str(0xFFFFFFFA)}) is None, "an interactive shell"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-009,012],x", "gpu007"),
        ("gpu[3,5-6]-ib,x", "gpu3-ib"),
        ("a-b.c[01]", "a-b.c01"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert _first_host(nodes) == first


def test_open_mpi() -> None:
    found = joined(OPEN_MPI)
    assert found is not None
    assert found == Environment(1, 2, 1, 2, port=found.port, engine="mpi", job="2144337921")
    other = joined({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert other == replace(found, rank=0, local_rank=0), "all know the same port"
    assert joined({**OPEN_MPI, "PMIX_NAMESPACE": "2144337922"}) != found


def test_mpich() -> None:
    found = joined(MPICH)
    assert found == Environment(1, 2, 1, 2, port=15_000 + _proxy() % 16_000, engine="mpi")


def test_a_pod_is_a_rank_or_stands_for_its_host() -> None:
    assert joined(TRAIN_JOB) == OF_POD
    assert joined(without(TRAIN_JOB, "PET_NODE_RANK")) == OF_POD, "an Indexed Job numbers its pods"
    assert joined({**TRAIN_JOB, RESTARTS: "3"}) == replace(OF_POD, restarts=3)
    four = {**TRAIN_JOB, "PET_NPROC_PER_NODE": "4"}
    assert detected(four) == replace(OF_POD, rank=4, world_size=8, local_world_size=4, num_to_start=4)
    with pytest.raises(LaunchError, match="torchrun"):
        joined(four)
    assert detected({**TRAIN_JOB, "PET_NNODES": "1", "JOB_COMPLETION_INDEX": "3"}) is None, "each is a run"


def test_a_pod_whose_number_of_pods_is_open_is_refused() -> None:
    with pytest.raises(LaunchError, match="PET_NNODES is not set"):
        joined({"JOB_COMPLETION_INDEX": "1"})
    elastic = {**TRAIN_JOB, "PET_NNODES": "1:3"}
    with pytest.raises(LaunchError, match=re.escape("torchrun -m shoal run")):
        joined(elastic)
    assert joined({**elastic, **TORCHRUN}) is not None


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_a_rank_of_shoals_own_launcher_on_an_engine(engine: str) -> None:
    own = Environment(1, 2, 0, 1, "10.0.0.1", 29500, host=1, num_hosts=2, engine=engine, job="j:1", restarts=1)
    assert joined(own.variables()) == own
    assert joined({**own.variables(), **SLURM_TASK}) == own, "an engine that Slurm has started"


MISSING = [
    (SLURM_TASK, ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")),
    (OPEN_MPI, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
    (MPICH, ("PMI_RANK",)),
    (MPICH, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    (TRAIN_JOB, ("PET_MASTER_ADDR",)),
    (TORCHRUN, ("WORLD_SIZE", "MASTER_PORT")),
]


@pytest.mark.parametrize(("variables", "names"), MISSING, ids=lambda value: str(value)[:20])
def test_all_that_is_missing_is_named(variables: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match=f"{', '.join(names)} is not set"):
        joined(without(variables, *names))


def test_mpi_on_several_hosts_asks_where_rank_0_is() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set.*-x MASTER_ADDR"):
        joined(several)
    found = joined({**several, "MASTER_ADDR": "h0"})
    assert found is not None
    assert (found.address, found.host, found.num_hosts) == ("h0", 1, 2)
    several = {**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(LaunchError, match=r"MASTER_ADDR, MASTER_PORT is not set.*-genv"):
        joined(several)


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        ({**SLURM_TASK, "SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
        ({**SLURM_TASK, "SLURM_PROCID": "3"}, "SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=3"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE=two"),
        ({**MPICH, "PMI_RANK": "2"}, "PMI_RANK=2, PMI_SIZE=2"),
        ({**TRAIN_JOB, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2, PET_NNODES=2"),
        ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many"),
    ],
)
def test_what_makes_no_sense_is_refused(variables: dict[str, str], wrong: str) -> None:
    with pytest.raises(LaunchError, match=wrong):
        joined(variables)


# Inner and outer variables, and what of both the message names.
DISAGREE = [
    (LEFT_OVER, SLURM_TASK, "RANK=0, WORLD_SIZE=1", "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3"),
    (LEFT_OVER, OPEN_MPI, "RANK=0, WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2"),
    (LEFT_OVER, MPICH, "RANK=0, WORLD_SIZE=1", "PMI_RANK=1, PMI_SIZE=2"),
    (LEFT_OVER, TRAIN_JOB, "RANK=0, WORLD_SIZE=1", "PET_NODE_RANK=1, PET_NNODES=2"),
    (OPEN_MPI, SLURM_TASK, "OMPI_COMM_WORLD_RANK=1", "SLURM_PROCID=2"),
    (MPICH, TRAIN_JOB, "PMI_RANK=0", "PET_NODE_RANK=1"),
    # Each task of srun has started a torchrun by itself, on its own host.
    ({**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, SLURM_TASK, "RANK=3, WORLD_SIZE=4", "SLURM_PROCID=2"),
]


@pytest.mark.parametrize(("inner", "outer", "one", "other"), DISAGREE)
def test_two_that_disagree_are_both_named(inner: dict[str, str], outer: dict[str, str], one: str, other: str) -> None:
    if inner is MPICH:
        inner = {**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    with pytest.raises(LaunchError, match="disagree") as caught:
        joined({**outer, **inner})
    assert one in caught.value.given
    assert other in caught.value.given
    for text in (one, other):
        assert text.partition("=")[0] in caught.value.remedy
    assert "unset" in caught.value.remedy


def test_two_that_say_the_same_are_one() -> None:
    same = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "gpu007", "MASTER_PORT": "1"}
    found = joined({**SLURM_TASK, **same})
    assert found is not None
    assert (found.rank, found.engine) == (2, "torchrun"), "exported from SLURM_PROCID, say"


def test_a_launcher_that_spans_the_hosts_of_another_is_within_it() -> None:
    step = {**SLURM_TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    found = joined({**step, **TORCHRUN})
    assert found is not None
    assert (found.rank, found.world_size) == (3, 4)
    pod = {**TRAIN_JOB, "PET_NPROC_PER_NODE": "2"}
    found = joined({**pod, **TORCHRUN})
    assert found is not None
    assert found.rank == 3


def test_ranks_of_the_local_launcher_are_its_own_whatever_is_around_them() -> None:
    own = {**Environment(1, 2, 1, 2, port=7).variables(), LAUNCHER_PID: "1"}
    found = joined({**SLURM_TASK, **own})
    assert found is not None
    assert (found.rank, found.world_size) == (1, 2)


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_alone_in_a_world_of_one_is_alone(size: str) -> None:
    assert joined({size: "1"}) is None


def test_an_engine_of_our_own_is_named_by_its_variable() -> None:
    assert Environment(0, 2, port=1, engine="ray").variables()[ENGINE] == "ray"


def test_new_starts_are_counted_also_where_a_process_is_alone() -> None:
    assert restarts({**SLURM_SCRIPT, "SLURM_RESTART_COUNT": "2", RESTARTS: "1"}) == 3
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "1"}) == 1
    assert restarts({}) == 0


@pytest.mark.parametrize(
    "left",
    [
        {"JOB_COMPLETION_INDEX": "1"},
        {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1"},
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
    ],
)
def test_words_that_are_left_of_what_has_started_torchrun_are_no_matter(left: dict[str, str]) -> None:
    assert joined({**TORCHRUN, **left}) == joined(TORCHRUN)
    with pytest.raises(LaunchError):
        joined({"JOB_COMPLETION_INDEX": "1"})
