"""A launcher's variables make an Environment, or are refused."""

import pytest

from shoal.errors import LaunchError
from shoal.launch.environment import LISTEN_FD, Environment, defaults
from shoal.launch.environments.detect import joined

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_variables_this_process_is_alone() -> None:
    assert joined({"PATH": "x", "MASTER_PORT": "1"}) is None
    assert Environment().single_host


def test_what_torchrun_sets_is_read() -> None:
    found = joined({**WHOLE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == Environment(1, 4, 1, 4, "10.0.0.1", 29500, None, True, engine="torchrun")
    assert found.single_host


def test_local_numbers_are_not_guessed_from_the_world() -> None:
    found = joined(WHOLE)
    assert found == Environment(1, 4, 0, 1, "10.0.0.1", 29500, num_hosts=0, engine="torchrun")
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
    assert "unset RANK MASTER_ADDR" in caught.value.remedy


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


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, "MVAPICH has started several"),
        ({"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE are not set"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are not set"),
    ],
)
def test_one_of_several_that_nobody_has_numbered_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        joined(variables)
    assert "torchrun" in caught.value.remedy
    assert joined({**variables, **WHOLE}) is not None


def test_a_value_is_read_from_its_own_variables() -> None:
    value = Environment(
        5, 8, 1, 4, "h0", 29501, key="k", own_gpu=True, restarts=2, host=1, num_hosts=2, engine="hosts", job="a:7"
    )
    assert joined(value.variables()) == value


def test_defaults_are_there_for_a_context_alone() -> None:
    variables = {"A": "chosen"}
    with defaults(variables, {"A": "1", "B": "2"}):
        assert variables == {"A": "chosen", "B": "2"}
    assert variables == {"A": "chosen"}
