"""Models in other trainers' wrappers are refused by type, wherever in the model they are."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.errors import JobError
from shoal.parallel.model.structure import refuse_wrapped, unwrapped


class DeepSpeedEngine(nn.Module):
    pass


class FSDPModule:
    """As fully_shard puts it under a module's class."""


class FSDPLinear(FSDPModule, nn.Linear):
    pass


def prepared() -> nn.Module:
    found = nn.Linear(2, 2)
    found._is_accelerate_prepared = True  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("make", "said", "write"),
    [
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "DataParallel as 0", "give the bare module"),
        (DeepSpeedEngine, "DeepSpeedEngine as 0", "give the bare module"),
        (lambda: FSDPLinear(2, 2), "fully_shard as 0", "give the bare module"),
        (prepared, "a module that Accelerate has prepared as 0", "give the bare module"),
        (lambda: nn.SyncBatchNorm(2), "SyncBatchNorm as 0", "torch.nn.BatchNorm1d"),
    ],
)
def test_is_refused(make: type[nn.Module], said: str, write: str) -> None:
    with pytest.raises(JobError) as caught:
        refuse_wrapped(nn.Sequential(make(), nn.Linear(2, 2)))
    assert said in caught.value.given
    assert write in caught.value.remedy


def test_a_constructor_that_would_meet_other_ranks_is_refused_first() -> None:
    class Derived(nn.parallel.DistributedDataParallel):
        pass

    made = nn.parallel.DistributedDataParallel.__init__
    with unwrapped(), pytest.raises(JobError, match="wraps a module in DistributedDataParallel"):
        Derived(nn.Linear(2, 2))
    assert nn.parallel.DistributedDataParallel.__init__ is made


def test_a_bare_model_passes() -> None:
    refuse_wrapped(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
