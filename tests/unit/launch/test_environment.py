"""A launcher's variables make an Environment, or are refused."""

import pytest

from shoal.errors import LaunchError
from shoal.launch.environment import LISTEN_FD, Environment, _first_host
from shoal.launch.environments.detect import joined

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_variables_this_process_is_alone() -> None:
    assert joined({"PATH": "x", "MASTER_PORT": "1"}) is None
    assert Environment().single_host


def test_what_torchrun_sets_is_read() -> None:
    found = joined({**WHOLE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == Environment(1, 4, 1, 4, "10.0.0.1", 29500, None, True)
    assert found.single_host


def test_local_numbers_are_not_guessed_from_the_world() -> None:
    found = joined(WHOLE)
    assert found == Environment(1, 4, 0, 1, "10.0.0.1", 29500)
    assert found is not None
    assert not found.single_host


def test_a_listening_socket_is_handed_on() -> None:
    found = joined({**WHOLE, LISTEN_FD: "7"})
    assert found is not None
    assert found.listen_fd == 7


def test_everything_missing_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        joined({"RANK": "0", "MASTER_ADDR": "a"})
    assert caught.value.conflict == "WORLD_SIZE, MASTER_PORT is not set"
    assert caught.value.given == "RANK=0, MASTER_ADDR=a"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "two", "-1", "1.0"])
def test_what_is_no_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(LaunchError, match=f"{name}={text}"):
        joined({**WHOLE, name: text})


def test_every_wrong_number_is_told() -> None:
    with pytest.raises(LaunchError) as caught:
        joined({**WHOLE, "RANK": "a", "MASTER_PORT": "b"})
    assert "RANK=a" in caught.value.given
    assert "MASTER_PORT=b" in caught.value.given


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="RANK=4, WORLD_SIZE=4"):
        joined({**WHOLE, "RANK": "4"})


# As Slurm 22.05 sets them: a task of `srun -n 3` on two nodes, and the batch script of `sbatch --ntasks=4 --nodes=2`.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def test_tasks_of_an_srun_step_are_one_world() -> None:
    assert joined(STEP) == Environment(2, 3, 0, 1, "gpu007", 15_680)
    one = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "2", "SLURM_STEP_NODELIST": "n1"}
    assert joined({**STEP, **one}) == Environment(2, 3, 2, 3, "127.0.0.1", 15_680)
    other = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert joined(other) == Environment(0, 3, 0, 2, "gpu007", 15_680), "all know the same port"
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert joined({**STEP, **told}) == Environment(2, 3, 0, 1, "10.0.0.1", 1234)
    assert joined({**STEP, **WHOLE}) == Environment(1, 4, 0, 1, "10.0.0.1", 29500), "torchrun within a step"


def test_a_batch_script_and_a_step_of_one_task_are_alone() -> None:
    assert joined(BATCH) is None
    assert joined({**BATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}) is None
    assert joined({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}) is None, "an interactive shell"


def test_a_step_that_does_not_say_enough_is_refused() -> None:
    with pytest.raises(LaunchError, match="SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE is not set"):
        joined({k: v for k, v in STEP.items() if k not in ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")})


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


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI has started several"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "an MPI launcher has started several"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, "MVAPICH has started several"),
        ({"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE are not set"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are not set"),
    ],
)
def test_one_of_several_of_another_launcher_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        joined({**BATCH, **variables})
    assert "torchrun" in caught.value.remedy
    assert joined({**variables, **WHOLE}) is not None


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_alone_in_a_world_of_one_is_alone(size: str) -> None:
    assert joined({size: "1"}) is None
