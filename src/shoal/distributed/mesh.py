"""Device mesh of a run and this rank's coordinates, passed explicitly and never global, and agreements of its ranks.

Before each step ranks exchange what they know about data, errors and stop requests, so that all ranks end together.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import operator
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.joining import JOIN_TIMEOUT, choose_interface, connect, meet, refuse_loopback
from shoal.distributed.lost_hosts import HostWatch
from shoal.errors import LaunchError, PeerError, ShoalError, from_json, say_note
from shoal.launch.environment import Environment
from shoal.numerics.operators import raw_bytes
from shoal.plans.plan import AXES, Layout
from shoal.runs.records import SPANS, OwnSpreads, Spread
from shoal.runs.request import dumped, loaded

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Name of the group of the ranks that hold the same part of the model.
REPLICAS = "replicas"
# Names of the group that divides a stage's experts, and of the group of the ranks with the same experts.
EXPERT, EXPERT_COPIES = "expert", "expert copies"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Mesh:
    """View of the run from one rank: `layout`, `rank`, `device`, and collectives over all ranks.

    With one process no process group exists, and every collective is the identity.
    """

    layout: Layout
    rank: int
    device: torch.device
    host: str
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    store: Store | None = None  # of all ranks, for messages outside of collectives; None for one process
    through_host: bool = False  # whether tensors on GPUs travel through the host, over Gloo: ranks share the GPUs

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that differ from this rank along `axis` only; None means all ranks.

        Raises: KeyError for an axis of one rank.
        """
        return self.groups[axis] if axis in self.groups or self.layout.degree(axis) != self.world_size else None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group of the ranks with the same part of the model and different grains; None means all ranks."""
        return self.groups.get(REPLICAS)

    @functools.cached_property
    def counts_loss(self) -> bool:
        """True if this rank, among those with the same grains, counts the losses and samples."""
        place = self.layout.coordinate(self.rank)
        return place.tensor == 0 and place.context == 0 and place.pipeline == self.layout.pipeline - 1

    @functools.cached_property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def data_rank(self) -> int:
        """This rank's number among the ranks with different grains."""
        place = self.layout.coordinate(self.rank)
        return place.data * self.layout.shard + place.shard

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks with different grains."""
        return self.layout.divides_grains

    def all_gather(self, values: list[float]) -> npt.NDArray[np.float64]:
        """Return every rank's `values`, float64 [world_size, len(values)].

        Collective: all ranks, one all-gather of 8 * len(values) bytes a rank, over Gloo even if devices are GPUs.
        """
        row = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return row.numpy()[None]
        rows = torch.empty(self.world_size, len(values), dtype=torch.float64)
        dist.all_gather(list(rows.unbind()), row)
        return rows.numpy()

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order, on every rank. Collective: all ranks, two all-gathers."""
        text = json.dumps(value).encode()
        longest = int(self.all_gather([float(len(text))]).max())
        if self.world_size == 1:
            return [json.loads(text)]
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return [json.loads(bytes(r.numpy().tobytes()).rstrip(b"\0")) for r in rows]

    def send_to_first(self, content: bytes) -> Iterator[bytes]:
        """Yield every rank's bytes on rank 0, in rank order and one at a time; nothing on other ranks.

        Rank 0 must exhaust the iterator.
        Collective: all ranks, an all-gather of 8 bytes a rank and a message from each rank to rank 0.
        """
        lengths = [int(length) for length in self.all_gather([float(len(content))])[:, 0]]
        if self.rank != 0:
            if content:
                dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0)
            return
        yield content
        for rank, length in enumerate(lengths[1:], 1):
            row = torch.empty(length, dtype=torch.uint8)
            if length:
                dist.recv(row, src=rank)
            yield row.numpy().tobytes()

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Copy rank 0's values into every rank's tensors. Collective: all ranks, one broadcast a tensor."""
        if self.world_size > 1:
            for tensor in tensors:  # as bytes: Gloo supports neither complex numbers nor float8
                sent = tensor.contiguous()
                dist.broadcast(raw_bytes(sent), src=0)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def alone(device: torch.device) -> Mesh:
    """Return the mesh of a single process."""
    return Mesh(Layout(), 0, device, socket.gethostname())


@contextlib.contextmanager
def open_mesh(environment: Environment, layout: Layout) -> Iterator[Mesh]:
    """Provide the mesh of a run, with its process group for the duration of the context.

    Raises:
        LaunchError: the world size is not the layout's, a port is in use, or a rank does not come.
    """
    if environment.world_size != layout.world_size:
        raise LaunchError(
            given=f"a world of {environment.world_size} processes",
            conflict=f"the plan's layout needs {layout.world_size}",
            remedy=f"start {layout.world_size} processes, or use a plan for {environment.world_size}",
        )
    device, backend = choose_device(environment)
    if environment.shares_gpu and device.type == "cpu" and environment.rank == 0:
        say_note("--share-gpu: no effect, since torch sees no GPU here")
    through_host = device.type == "cuda" and backend == "gloo" and layout.world_size > 1
    mesh = Mesh(layout, environment.rank, device, socket.gethostname(), through_host=through_host)
    if layout.world_size == 1:
        yield mesh
        return
    if environment.single_host and environment.address in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a run on one host listens on loopback only
    elif not environment.single_host:
        choose_interface(environment)
    if (
        "expandable_segments:True"
        in f"{os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}{os.environ.get('PYTORCH_ALLOC_CONF')}"
    ):
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # pytorch issue 158029: captures register no such memory
    watch = HostWatch()
    with watch.opening():
        store = _open_store(environment)
        try:
            # An agent's store outlives groups and the keys of their ranks, so each opening has its own prefix.
            opened = store.add(f"shoal/{environment.restarts}/opened by {environment.rank}", 1)
            number = 1 if environment.agent_store else opened  # torchrun starts each rank once; any other store is new
            opened = opened if environment.agent_store else 1
            place = f"shoal/{environment.restarts}/{opened}"
            meet(PrefixStore(f"{place}/present", store), environment, mesh.host, number=number)
            dist.init_process_group(
                backend,
                store=PrefixStore(place, store),
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        except (dist.DistError, RuntimeError) as error:
            raise _not_assembled(environment, error) from error
    try:
        yield replace(mesh, groups=open_groups(layout), store=PrefixStore(f"{place}/hooks", store))
    finally:
        watch.close()
        dist.destroy_process_group()


def open_groups(layout: Layout) -> dict[str, dist.ProcessGroup]:
    """Open a group for each axis, and one for the replicas unless they are all ranks. Collective: all ranks.

    An axis that spans all ranks also gets its own group, so that messages of a forward never meet the engine's own.
    """
    wanted: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES if axis != "data" or layout.shard > 1}
    if layout.shares_grains > 1:
        wanted[REPLICAS] = ("data", "shard")
    parts = {name: list(layout.groups(*axes)) for name, axes in wanted.items()}
    if layout.expert > 1:
        parts |= {EXPERT: layout.expert_groups(), EXPERT_COPIES: layout.expert_copies()}
    groups = {name: new_group([r for r in of_name if len(r) > 1]) for name, of_name in parts.items()}
    return {name: group for name, group in groups.items() if group is not None}


def new_group(
    parts: Iterable[Sequence[int]], timeout: timedelta = COLLECTIVE_TIMEOUT, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Return the process group of this rank's part. Collective: all ranks of the run, with the same `parts`."""
    own = None
    for ranks in parts:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            own = group
    return own


class RankDevice(NamedTuple):
    """A rank's device, and torch's name for the backends of its collectives."""

    device: torch.device
    backend: str


# NCCL's own variable for two ranks on a GPU, and the first release that has it.
_SEVERAL_RANKS, _SEVERAL_SINCE, _MOST_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30), 2


def choose_device(environment: Environment) -> RankDevice:
    """Return this rank's device, and let CUDA use it. Raises: as `device_of`."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    several = num_gpus > 0 and os.environ.get(_SEVERAL_RANKS) == "1"
    chosen = device_of(environment, num_gpus, torch.cuda.nccl.version() if several else None)
    if chosen.device.type == "cuda":
        torch.cuda.set_device(chosen.device)
    return chosen


def device_of(environment: Environment, num_gpus: int, several_by: Sequence[int] | None = None) -> RankDevice:
    """Return the device and the backend of a rank on a host where torch sees `num_gpus` GPUs.

    With GPUs, a rank has its own GPU and NCCL. Ranks that may share GPUs use Gloo, which copies through the host: NCCL
    refuses two ranks on one GPU unless its own variable allows them.

    Args:
        environment: the rank's environment.
        num_gpus: number of GPUs that this process sees.
        several_by: NCCL's version if its variable allows two ranks on a GPU, else None.

    Raises:
        LaunchError: too few GPUs, or an NCCL that is too old for its variable.
    """
    if num_gpus == 0:
        return RankDevice(torch.device("cpu"), "gloo")
    ranks, given = environment.local_world_size, f"{environment.local_world_size} processes on this host"
    own = environment.own_gpu and num_gpus == 1
    over_nccl = "cpu:gloo,cuda:nccl"
    if not environment.shares_gpu:
        if ranks > num_gpus and not own:
            raise LaunchError(
                given=given,
                conflict=f"it has {num_gpus} GPU(s), and a GPU serves one process",
                remedy=f"use --devices {num_gpus} at most, CUDA_VISIBLE_DEVICES= for CPU processes, or --share-gpu for "
                "a test in which several processes share a GPU",
            )
        return RankDevice(torch.device("cuda", 0 if own else environment.local_rank), over_nccl)
    device = torch.device("cuda", environment.local_rank % num_gpus)
    if several_by is None:
        return RankDevice(device, "gloo")
    conflict = None
    if tuple(several_by[:2]) < _SEVERAL_SINCE:
        conflict = f"NCCL {'.'.join(map(str, several_by))} takes one process a GPU; {_SEVERAL_RANKS} is of NCCL 2.30"
    elif ranks > _MOST_RANKS * num_gpus and not own:
        conflict = f"it has {num_gpus} GPU(s), and NCCL takes {_MOST_RANKS} processes a GPU"
    if conflict is not None:
        raise LaunchError(
            given=f"{given}, with --share-gpu and {_SEVERAL_RANKS}=1",
            conflict=conflict,
            remedy=f"unset {_SEVERAL_RANKS}: then they share a GPU over Gloo",
        )
    return RankDevice(device, over_nccl)


def _open_store(environment: Environment) -> Store:
    serve = environment.rank == 0 and not environment.agent_store
    if serve and environment.listen_fd is None:
        refuse_loopback(environment)
    try:
        listen_fd = (environment.listen_fd or _listen(environment.address, environment.port)) if serve else None
        if serve:
            return _store(environment, JOIN_TIMEOUT, listen_fd)
        store = connect(environment, lambda timeout: _store(environment, timeout, None))
        store.set_timeout(JOIN_TIMEOUT)
        return store
    except (dist.DistError, RuntimeError, OSError) as error:
        raise _not_assembled(environment, error) from error


def _store(environment: Environment, timeout: timedelta, listen_fd: int | None) -> Store:
    """Connect to rank 0's store, or serve it if there is a listening socket."""
    return TCPStore(
        environment.address,
        environment.port,
        environment.world_size,
        is_master=listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _listen(address: str, port: int) -> int:
    """Listen on that address only, and return the socket. A TCPStore by itself listens on every interface."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        return listener.detach()


def _not_assembled(environment: Environment, error: Exception) -> LaunchError:
    place = f"{environment.address}:{environment.port}"
    if getattr(error, "errno", 0) == errno.EADDRINUSE or "EADDRINUSE" in str(error):
        import psutil

        holder = ""
        with contextlib.suppress(psutil.Error, OSError):
            for connection in psutil.net_connections("tcp"):
                listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == environment.port
                if listens and connection.pid and not holder:
                    holder = f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
        return LaunchError(
            given=f"MASTER_PORT={environment.port} for rank 0's store at {place}",
            conflict=f"that port is in use{holder}",
            remedy="choose another MASTER_PORT, or leave it out: shoal's own launcher takes a free one",
        )
    return LaunchError(
        given=f"rank {environment.rank} of {environment.world_size} at {place}",
        conflict=f"the ranks did not find each other within {JOIN_TIMEOUT.total_seconds():.0f} s: "
        + str(error).strip().splitlines()[0][:200],
        remedy="check that every rank was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    )


T = TypeVar("T")
_FLAGS = ("has_data", "error", "stop", "checkpoint", "requests")
_of_spans = operator.itemgetter(*SPANS)  # one call for all spans
_MEASURES = (*SPANS, "step_seconds", "memory_bytes")
_SPREADS = (*_MEASURES, "busy_seconds")
_ALONE = np.zeros(1)  # of one rank: no other rank waits for it
_STEP, _EXPOSED = _MEASURES.index("step_seconds"), _MEASURES.index("exposed_communication")


@dataclass  # made in every step
class Report:
    """One rank's contribution at the start of a step; `measures` are those of the previous step.

    `requests`: bits of the requests that the rank's callbacks have made, below 2^24.
    """

    has_data: bool = False
    error: bool = False
    stop: bool = False
    checkpoint: bool = False
    requests: int = 0
    measures: tuple[float, ...] = (0.0,) * len(_MEASURES)


@dataclass  # made in every step
class Agreement:
    """Common state of all ranks: whether any has data, an error or a stop request. Only rank 0 requests checkpoints.

    `requests`: the bits that any rank's callbacks have set.
    """

    any_data: bool
    any_error: bool
    stop: bool
    checkpoint: bool
    requests: int
    spreads: Mapping[str, Spread]
    busy_seconds: npt.NDArray[np.float64]  # of each rank in the previous step; zero with one rank
    slowest_rank: int = 0  # the rank that computed longest in the previous step


def measures(spans: dict[str, float], step_seconds: float, memory_bytes: int) -> tuple[float, ...]:
    """Return the measures of a report."""
    return (*_of_spans(spans), step_seconds, float(memory_bytes))


def to_row(report: Report) -> list[float]:
    """Return the report as 15 numbers, small enough for float32 (memory in bytes is rounded)."""
    return [*(float(getattr(report, name)) for name in _FLAGS), *report.measures]


# The row of a step whose sums take no rows along, in the length that buckets have room for.
NO_ROW = to_row(Report())


def agree(mesh: Mesh, report: Report) -> Agreement:
    """Exchange the reports of all ranks. Collective: all ranks, one all-gather of 15 numbers a rank."""
    if mesh.world_size > 1:
        return from_rows(mesh.all_gather(to_row(report)))
    own = report.measures  # the same as `from_rows` of one row
    spreads = OwnSpreads(_SPREADS, (*own, own[_STEP] - own[_EXPOSED]))
    return Agreement(report.has_data, report.error, report.stop, report.checkpoint, report.requests, spreads, _ALONE)


def from_rows(table: npt.NDArray[np.float64]) -> Agreement:
    """Compute the agreement from the rows of all ranks, [world_size, 15]."""
    has_data, error, stop, *_ = np.any(table[:, : len(_FLAGS)] > 0, axis=0).tolist()
    requests = int(np.bitwise_or.reduce(table[:, _FLAGS.index("requests")].astype(np.int64)))
    measured = table[:, len(_FLAGS) :]
    # The rank that computes longest waits least: slowness shows in its own work, and in others' communication.
    busy = measured[:, _STEP] - measured[:, _EXPOSED]
    measured = np.column_stack([measured, busy])
    columns = zip(measured.min(0).tolist(), measured.max(0).tolist(), measured.argmax(0).tolist(), strict=True)
    spreads = {name: Spread(*column) for name, column in zip(_SPREADS, columns, strict=True)}
    return Agreement(
        has_data,
        error,
        stop,
        bool(table[0, _FLAGS.index("checkpoint")]),
        requests,
        spreads,
        busy,
        spreads["busy_seconds"].rank_of_max,
    )


def interrupts(rows: Tensor) -> Tensor:
    """Compute whether anything comes between a step and the previous one, from the ranks' rows on a device: bool []."""
    has_data, *others = rows[:, : len(_FLAGS)].unbind(1)
    return (torch.stack(others) > 0).any() | (has_data <= 0).all()


def raise_together(mesh: Mesh, error: ShoalError | None) -> None:
    """Raise on every rank if any rank has an error: the rank's own error, else a PeerError that names the culprit.

    Collective: all ranks, one JSON gather.
    """
    reports = mesh.gather_json(to_json(error, mesh.rank, mesh.host) if error else None)
    kinds = frozenset(report["kind"] for report in reports if report)
    if error is not None:
        error.rank, error.host, error.everywhere, error.kinds = mesh.rank, mesh.host, True, kinds
        raise error
    try:
        raise_peer(reports)
    except PeerError as peer:
        peer.everywhere, peer.kinds = True, kinds
        raise


def raise_peer(reports: list[dict[str, Any] | None]) -> None:
    """Raise PeerError if another rank reported an error."""
    culprit = next((t for t in reports if t), None)
    if culprit is not None:
        peer = PeerError(
            given=f"rank {culprit['rank']} on {culprit['host']}: {culprit['given']}",
            conflict=culprit["conflict"],
            remedy=culprit["remedy"],
        )
        peer.exit_code = from_json(culprit).exit_code  # an engine may report the exit code of any rank
        raise peer


def together(mesh: Mesh, work: Callable[[], T]) -> T:
    """Return the result of `work`. If it raises on any rank, every rank raises. Collective: all ranks."""
    result: T
    error: ShoalError | None = None
    try:
        result = work()
    except Exception as caught:
        error = as_shoal_error(caught)
    raise_together(mesh, error)
    return result


def decided_by_rank_0(mesh: Mesh, kind: type[T], work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only, and return its result, of type `kind`, on every rank.

    Raises: the error of rank 0, on every rank. Collective: all ranks, one JSON gather; none with one rank.
    """
    if mesh.world_size == 1:
        return work()
    decision: dict[str, Any] = {}
    error: ShoalError | None = None
    if mesh.rank == 0:
        try:
            decision = {"value": dumped(work())}
        except Exception as caught:
            error = as_shoal_error(caught)
            decision = {"error": to_json(error, mesh.rank, mesh.host)}
    decision = mesh.gather_json(decision)[0]
    if "error" in decision:
        error = error or from_json(decision["error"])
        error.rank, error.host, error.everywhere = 0, decision["error"]["host"], True
        raise error
    return loaded(kind, decision["value"])


def collectively(mesh: Mesh, divided: bool, work: Callable[[], T]) -> T:
    """Return the result of `work`. An exception is raised on every rank, as in `together`.

    In a divided model only the failing rank raises. The other ranks wait inside `work` and notice only that this rank
    ends, so no collective may come before that.
    """
    if not divided:
        return together(mesh, work)
    try:
        return work()
    except Exception as error:
        raise as_shoal_error(error) from error
