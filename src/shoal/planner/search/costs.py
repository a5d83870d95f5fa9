"""Cost functions of a search: predictions of plans on a cluster, and lower bounds of many plans at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

from shoal.hardware.values import Cluster, Device
from shoal.planner.calibrate.lessons import Correction
from shoal.planner.predict.lower_bounds import Blocks, BlockSize, BlockStates, Floors, Turn
from shoal.planner.predict.pipeline_ranks import CutModel, Ranks
from shoal.planner.predict.step_time import Predictor
from shoal.planner.predict.workload import Prediction, Program, Workload
from shoal.planner.search.space import Degrees, ModelDegrees
from shoal.plans.plan import Plan


class MicrobatchSeconds(NamedTuple):
    """Seconds of one microbatch on a rank with all stages, and of each of its blocks."""

    seconds: float
    blocks: Blocks


class Costs:
    """Corrected predictions and their lower bounds, for ranks with one device.

    Each number of devices has one Costs object. Several numbers may share an object.
    """

    def __init__(self, predictor: Predictor, device: Device, correction: Correction | None = None) -> None:
        self._predictor, self._device, self._correction = predictor, device, correction or Correction()
        self._staging, self._program = predictor.staging, predictor.program
        self.memory_bytes = predictor.cluster.usable_bytes(device)
        self.memory_margin = predictor.cluster.memory_margin
        # The smallest correction factor, which keeps bounds of the whole step valid.
        self._least = min([1.0, *self._correction.factors.values()])
        self._shared: tuple[Ranks, dict[str, float]] | None = None
        self._turns: dict[tuple[CutModel, int, bool], Turn] = {}

    def with_more_memory(self, num_bytes: int) -> Costs:
        """Return the costs of the device with more memory."""
        other, device = copy(self), self._device
        larger = replace(device, memory_bytes=device.memory_bytes + num_bytes)
        other.memory_bytes = self._predictor.cluster.usable_bytes(larger)
        return other

    def predict(self, plan: Plan) -> Prediction:
        """Return the corrected prediction of a plan."""
        found = self._predictor.predict(plan)
        missing = max(0.0, found.peak_bytes - self.memory_bytes)
        if missing != found.missing_bytes:  # `with_more_memory`
            found = replace(found, fits=missing == 0, missing_bytes=missing)
        if not self._correction:
            return found
        terms = self._correction.terms(found.terms)
        seconds = sum(terms.values())
        ratio = found.step_seconds / seconds if seconds else 1.0
        return replace(
            found,
            step_seconds=seconds,
            terms=terms,
            bubble=terms["bubble"] / seconds if seconds else 0.0,
            mfu=found.mfu * ratio if found.mfu is not None else None,
        )

    @cached_property
    def _floors(self) -> Floors:
        staging = self._staging
        computer = staging.computer(self._device.in_faster_format())
        return Floors(computer, self._predictor.network, self._program, staging.parts)

    def floor(self, samples: float, degrees: ModelDegrees) -> float:
        """Return a lower bound for plans whose replicas compute `samples` samples on ranks with these degrees."""
        return self._floors.seconds(samples, *degrees) * self._least

    def beside(self, place: Degrees) -> float:
        """Return the seconds of a place that only `nearly` includes: agreements and launches.

        They do not shrink with more replicas.
        """
        device, is_divided = self._device, place.cut.ranks > 1
        launches = self._predictor.work.profile.optimizer_launches * max(device.launch_seconds, device.dispatch_seconds)
        agreed = self._predictor.exchanged.agreed(place.devices, is_divided, apart=is_divided)
        return (agreed + launches + device.step_seconds) * self._least

    def microbatch(self, plan: Plan) -> MicrobatchSeconds:
        """Return lower bounds of the seconds of a microbatch, given a plan with one microbatch and no pipeline."""
        blocks, of = self._predictor.blocks(plan), self._least
        seconds = self._staging.ranks(plan).busiest.seconds * of
        longest, last, through = blocks.longest * of, blocks.last * of, blocks.through * of
        return MicrobatchSeconds(seconds, Blocks(blocks.number, blocks.seconds * of, longest, last, through))

    def block_size(self, plan: Plan) -> BlockSize:
        """Return the activation bytes of a block, for all plans of a family and any length of the pipeline."""
        return self._predictor.block_size(plan)

    def block_states(self, plans: Sequence[Plan]) -> tuple[BlockStates, ...]:
        """Return the bytes of blocks without activations for each plan."""
        return tuple(self._predictor.block_states(plan, self._beside_states(plan)) for plan in plans)

    def staged(self, plan: Plan) -> float:
        """Return a lower bound from the plan's stages, for all plans that differ only in replicas and their level."""
        ranks = self._staging.ranks(plan)
        return max(ranks.busiest.seconds * ranks.microbatches, self._turn(ranks).filled(ranks.shape)) * self._least

    def at(self, plan: Plan) -> float:
        """Return a lower bound for all plans that differ only in the division of replicas into data and shard."""
        ranks = self._staging.ranks(plan)
        seconds = ranks.busiest.seconds * ranks.microbatches
        if plan.layout.pipeline > 1:
            seconds = max(seconds, self._turn(ranks).filled(ranks.shape, self._predictor.message(plan, ranks)))
        if ranks.device.kind != "cpu":  # large messages leave the caches, so one large message is no bound
            seconds += self._predictor.least_summed(plan, ranks)
        return seconds * self._least

    def nearly(self, plan: Plan) -> float:
        """Return a lower bound of the step that uses the whole plan but does not simulate its pipeline."""
        ranks, predictor = self._staging.ranks(plan), self._predictor
        if self._shared is None or self._shared[0] is not ranks:  # plans of a family are consecutive
            makespan = 0.0
            if plan.layout.pipeline > 1:
                makespan = self._turn(ranks).filled(ranks.shape, predictor.message(plan, ranks))
            self._shared = ranks, predictor.shared_seconds(plan, ranks, makespan)
        return sum(predictor.with_shared(plan, ranks, self._shared[1], bound=True).values()) * self._least

    def _turn(self, ranks: Ranks) -> Turn:
        key = ranks.model, ranks.shape.pipeline, ranks.adds
        if key not in self._turns:
            self._turns[key] = Turn.of(ranks.passes, ranks.shape.pipeline)
        return self._turns[key]

    def least_bytes(self, plan: Plan) -> float:
        """Return a lower bound of the peak bytes. It grows with the microbatch and shrinks with the shard degree.

        With several replicas it is the same for every data degree and all_reduce algorithm. Buckets of other ranks in
        shared memory grow with the ranks and are not counted. The exception is one copy of the parameters for all
        ranks: each rank's part shrinks with the number of ranks.
        """
        return self._predictor.least_bytes(plan, self._beside_states(plan))

    def _beside_states(self, plan: Plan) -> float:
        """Return the bytes of buckets per element."""
        buckets = plan.layout.data * plan.layout.shard > 1 and not plan.shards_model
        return self._program.bucket_bytes if buckets else 0.0


def costs_of(
    work: Workload, cluster: Cluster, program: Program | None = None, correction: Correction | None = None
) -> Callable[[int], Costs]:
    """Return the function from a number of devices to the costs of plans on them."""
    predictor = Predictor(work, cluster, program)
    by_device: dict[int, Costs] = {}

    @cache  # called repeatedly for every place
    def on(num_devices: int) -> Costs:
        device = cluster.device_for(min(cluster.devices_per_host, num_devices))
        if id(device) not in by_device:
            by_device[id(device)] = Costs(predictor, device, correction)
        return by_device[id(device)]

    return on
