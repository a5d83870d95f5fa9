"""The model that an engine is built on: its initial values and its dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import shoal
from shoal.distributed.mesh import alone
from shoal.errors import JobError
from shoal.numerics.precision import Precision
from shoal.parallel.assemble import assemble
from shoal.parallel.model.deferred_init import deferred
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.setup.job_model import build_model, make_model
from shoal.training.update.job_optimizer import Parameters

CPU = torch.device("cpu")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def factorised() -> nn.Module:
    model = nn.Linear(120, 120, bias=False)
    nn.init.orthogonal_(model.weight)
    return model


def job(model: object) -> shoal.Job:
    return shoal.Job(model=model, loss=print, optimizer=print, train_data=[0], global_batch=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("threads")
def test_initial_values_do_not_depend_on_threads() -> None:
    made = job(factorised)
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(build_model(made, Precision(torch.float32, torch.float32, torch.float32, CPU)).weight)
        _, values = deferred(functools.partial(make_model, made), 7)
        found.append(values.whole("weight"))
        assert torch.get_num_threads() == count
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.usefixtures("threads")
def test_a_model_may_choose_threads() -> None:
    torch.set_num_threads(1)
    build_model(job(lambda: (torch.set_num_threads(2), factorised())[1]), Precision.of(shoal.Plan().precision, CPU))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_model_that_wraps_itself_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(JobError, match=wrap.__name__):  # type: ignore[attr-defined]
        make_model(job(lambda: nn.Sequential(wrap(nn.Linear(2, 2)))))


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Sparse invariant:UserWarning")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))), "scripted or traced: 1"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), "scripted or traced: itself"),
        (lambda: nn.Sequential(Sparse()), "buffer 0.adjacency, whose layout is torch.sparse_coo"),
    ],
)
def test_a_model_of_what_no_layout_can_read_is_refused(model: Callable[[], nn.Module], said: str) -> None:
    for make in (make_model, lambda made: deferred(functools.partial(make_model, made), 7)):
        with pytest.raises(JobError) as caught:
            make(job(model))
        assert said in caught.value.given


def with_table() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4).float()))
    model.register_buffer("count", torch.tensor(3))
    return model


@pytest.mark.parametrize(
    ("kind", "weight", "table"),
    [
        ("float32", torch.float32, torch.complex64),
        ("bfloat16", torch.bfloat16, torch.complex64),
        ("float64", torch.float64, torch.complex128),  # the reference's
    ],
)
def test_what_is_complex_stays_so(kind: str, weight: torch.dtype, table: torch.dtype) -> None:
    wanted = getattr(torch, kind)
    model = build_model(job(with_table), Precision(wanted, wanted, wanted, CPU))
    assert model.weight.dtype == weight
    assert model.table.dtype == table
    assert model.count.dtype == torch.int64
    torch.testing.assert_close(model.table.to(torch.complex64), with_table().table)


def test_compression_refuses_float64() -> None:
    model = nn.Linear(3, 2).double()
    plan = shoal.Plan().with_sections(layout={"data": 2}, collectives={"compression": "bfloat16"})
    with pytest.raises(JobError, match="compression begins with gradients in float32"):
        assemble(plan, ShardedModel(alone(CPU), model), Parameters(model), 8, lambda span: None)
