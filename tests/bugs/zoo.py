"""The bug zoo: realistic bugs, nearly all of them shipped by some framework, planted into the ranks of a parallel run.

`plant` patches the engine in the process that forks the ranks; the references are computed without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.conformance import cases
from tests.conformance.cases import FP16, grouped, job, language, vectors
from tests.conformance.strategies import ONE_COPY
from tests.jobs import balanced_experts, experts
from tests.jobs.witness import is_look
from torch import Tensor, nn

import shoal
from shoal.data import loader
from shoal.data.order import Order
from shoal.distributed.mesh import Mesh
from shoal.jobs.job import Progress
from shoal.numerics import float8, grain_randomness
from shoal.numerics.batch_statistics import StepBuffers
from shoal.parallel.base import NUM_SUMS, WEIGHT, StepSums
from shoal.parallel.data.replicated import DataParallel, GradientBuckets
from shoal.parallel.experts.exchange import _Exchange, _RoutedExperts
from shoal.parallel.shard.one_copy import OneCopyUpdate, SharedParameters
from shoal.parallel.shard.update_division import ShardedOptimizer
from shoal.parallel.tensor import tensor_parallel
from shoal.training.microbatch.evaluation import Evaluator
from shoal.training.microbatch.step import LossComputer
from shoal.training.update import optimizer_step
from shoal.training.update.optimizer_step import Stepper, Updater


@dataclass(frozen=True)
class Bug:
    """What is planted, who shipped it (a report, where one is known), the job that shows it, what should be said."""

    plant: Callable[[pytest.MonkeyPatch], None]
    shipped: str
    phase: str
    name: str  # the first divergence's module or parameter, a regular expression
    job: Callable[[], shoal.Job] = job
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: int = 2


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Calls `then(result, *arguments)` after a method, and gives what it returns."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return then(original(*args, **kwargs), *args, **kwargs)

    patch.setattr(owner, name, replaced)


def on_gradients(change: Callable[[list[Tensor]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes the summed gradients, on every rank alike."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def then(result: Any, buckets: GradientBuckets, *args: Any) -> Any:
            with torch.no_grad():
                change([p.grad for p in buckets._parameters if p.grad is not None])
            return result

        after(patch, GradientBuckets, "finish", then)

    return plant


def scale_all(factor: float) -> Callable[[list[Tensor]], None]:
    def change(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(factor)

    return change


def through_bf16(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.copy_(gradient.bfloat16())


def last_layer_twice(gradients: list[Tensor]) -> None:
    gradients[-1].mul_(2)
    gradients[-2].mul_(2)


def lost_row(gradients: list[Tensor]) -> None:
    gradients[0][len(gradients[0]) // 2].zero_()


def last_microbatch_left_out(patch: pytest.MonkeyPatch) -> None:
    original = DataParallel.backward

    def backward(self: DataParallel, microbatch: Any, total: Tensor, sums: Tensor, last: bool) -> None:
        self._buckets._overlap = False
        kept = [None if p.grad is None else p.grad.clone() for p in self._buckets._parameters]
        original(self, microbatch, total, sums, last)
        if last:
            with torch.no_grad():
                for parameter, gradient in zip(self._buckets._parameters, kept, strict=True):
                    parameter.grad.copy_(gradient)  # type: ignore[union-attr,arg-type]

    patch.setattr(DataParallel, "backward", backward)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    original = DataParallel.backward

    def backward(self: DataParallel, microbatch: Any, total: Tensor, sums: Tensor, last: bool) -> None:
        whole = sums[WEIGHT].clone()
        dist.all_reduce(whole)
        original(self, microbatch, total * (whole / dist.get_world_size() / sums[WEIGHT]), sums, last)

    patch.setattr(DataParallel, "backward", backward)


def norm_of_a_shard(patch: pytest.MonkeyPatch) -> None:
    original = optimizer_step.global_norm
    patch.setattr(optimizer_step, "global_norm", lambda gradients: original(gradients[: len(gradients) // 2]))


def norm_before_unscaling(patch: pytest.MonkeyPatch) -> None:
    original = Updater.step

    def step(
        self: Updater, loss: float, weight: float, loss_scale: Any, progress: Progress, *norm: Any, **more: Any
    ) -> Any:
        factor = loss_scale.factor(self._job.global_batch)
        wide = optimizer_step.global_norm
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(optimizer_step, "global_norm", lambda gradients: wide(gradients) * factor)
            return original(self, loss, weight, loss_scale, progress, *norm, **more)

    patch.setattr(Updater, "step", step)


def clipped_one_by_one(patch: pytest.MonkeyPatch) -> None:
    original = torch._foreach_mul_

    def scaled(gradients: list[Tensor], scale: float) -> None:
        for gradient in gradients:
            original([gradient], scale * 0.02 / max(0.02, float(gradient.norm()) * scale))

    patch.setattr(torch, "_foreach_mul_", scaled)


def keeps_a_parameter(rank: int, which: int) -> Callable[[pytest.MonkeyPatch], None]:
    """One rank does not update one parameter."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Updater.step

        def step(self: Updater, *args: Any, **more: Any) -> Any:
            parameter = self._parameters[which][0]
            before = parameter.detach().clone()
            result = original(self, *args, **more)
            if dist.get_rank() == rank:
                with torch.no_grad():
                    parameter.copy_(before)
            return result

        patch.setattr(Updater, "step", step)

    return plant


def schedule_per_process(patch: pytest.MonkeyPatch) -> None:
    original = Stepper.set_rates

    def rates(self: Stepper, progress: Progress) -> float:
        return original(self, Progress(progress.step * dist.get_world_size(), progress.num_steps, progress.samples))

    patch.setattr(Stepper, "set_rates", rates)


def no_set_epoch(patch: pytest.MonkeyPatch) -> None:
    original = Order.ids

    def ids(self: Order, step: int, grains: Any) -> Any:
        first = step % (self.num_steps // 2)  # the same place of the first epoch
        return original(self, first, grains)

    patch.setattr(Order, "ids", ids)


def mask_by_place(patch: pytest.MonkeyPatch) -> None:
    """Dropout keyed by the place in the microbatch: every rank draws the same masks."""
    original = grain_randomness.GrainScope.__init__

    def init(self: Any, seed: int, step: int, grains: Any, *names: Any, **named: Any) -> None:
        first = grains[0].start
        original(self, seed, step, [replace(grain, start=grain.start - first) for grain in grains], *names, **named)

    patch.setattr(grain_randomness.GrainScope, "__init__", init)


def mask_by_rank(patch: pytest.MonkeyPatch) -> None:
    original = grain_randomness.GrainScope.__init__

    def init(self: Any, seed: int, step: int, grains: Any, *names: Any, **named: Any) -> None:
        original(self, seed + (dist.get_rank() if dist.is_initialized() else 0), step, grains, *names, **named)

    patch.setattr(grain_randomness.GrainScope, "__init__", init)


SHARDED: dict[str, dict[str, Any]] = {"shard": {"level": "optimizer"}}


def kept_by_their_owner(patch: pytest.MonkeyPatch) -> None:
    """The last piece of the exchange is left out."""
    original = ShardedOptimizer._pieces
    patch.setattr(ShardedOptimizer, "_pieces", lambda self, updated: list(original(self, updated))[:-1])


def loses_state(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 forgets the state of what it updates, after it was updated and before anybody asks."""
    original = Updater.step

    def step(self: Updater, *args: Any, **more: Any) -> Any:
        update = original(self, *args, **more)
        if dist.get_rank() == 1:
            self.optimizer.state.clear()
        return update

    patch.setattr(Updater, "step", step)


def stale_parameter(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 computes with the first layer's values from before the last update."""
    original, kept = LossComputer.loss, []

    def loss(self: LossComputer, batch: Any) -> Any:
        parameter = next(self.model.parameters())
        kept.append(parameter.detach().clone())
        if dist.get_rank() != 1 or len(kept) < 2:
            return original(self, batch)
        old, now = kept[0], parameter.data
        parameter.data = old.clone()
        try:
            return original(self, batch)
        finally:
            parameter.data = now

    patch.setattr(LossComputer, "loss", loss)


def evaluating_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    original = LossComputer.loss

    def loss(self: LossComputer, batch: Any) -> Any:
        self.model.train(dist.get_rank() != 1)
        return original(self, batch)

    patch.setattr(LossComputer, "loss", loss)


def buffers_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    original = DataParallel.finish

    def finish(self: DataParallel, flags: Any, num_sums: int, row: list[float]) -> StepSums:
        mine = self._sums.clone() if self._sums is not None else torch.zeros(num_sums, dtype=torch.float64)
        found = original(self, flags, num_sums, row)
        dist.broadcast(mine, src=0)
        sums = found.sums.copy()
        sums[NUM_SUMS:] = mine[NUM_SUMS:].numpy() * (sums[2] / max(1.0, float(mine[2])))
        return StepSums(sums, found.flags, found.rows)

    patch.setattr(DataParallel, "finish", finish)


def buffers_on_rank_0(patch: pytest.MonkeyPatch) -> None:
    original = StepBuffers.assign

    def assign(self: StepBuffers, weighted: Any, num_samples: int) -> None:
        if dist.get_rank() == 0:
            original(self, weighted, num_samples)

    patch.setattr(StepBuffers, "assign", assign)


def statistics_of_the_microbatch(patch: pytest.MonkeyPatch) -> None:
    original = grain_randomness._HANDLERS[F.batch_norm]

    def whole(scope: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if is_look():  # where the engine learns how the model computes
            return original(scope, func, args, kwargs)
        sizes, scope.sizes = scope.sizes, (scope._rows,)
        try:
            return original(scope, func, args, kwargs)
        finally:
            scope.sizes = sizes

    patch.setitem(grain_randomness._HANDLERS, F.batch_norm, whole)


def not_reduced(patch: pytest.MonkeyPatch) -> None:
    """One parameter keeps this rank's own gradient."""
    original = GradientBuckets.finish

    def finish(self: GradientBuckets, flags: Any, extras: Tensor) -> Any:
        self._overlap = False
        parameter = self._parameters[0]
        own = parameter.grad.clone() if parameter.grad is not None else torch.zeros_like(parameter)
        found = original(self, flags, extras)
        parameter.grad = own
        return found

    patch.setattr(GradientBuckets, "finish", finish)


def not_cleared(patch: pytest.MonkeyPatch) -> None:
    held: dict[int, Tensor] = {}

    def then(result: Any, buckets: GradientBuckets, *args: Any) -> Any:
        with torch.no_grad():
            for number, parameter in enumerate(buckets._parameters):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad + held.get(number, torch.zeros_like(parameter))
                    held[number] = parameter.grad.clone()
        return result

    after(patch, GradientBuckets, "finish", then)


def updated_in_private(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedParameters, "writable", lambda self, parameters: contextlib.nullcontext())


def norm_of_own_part(patch: pytest.MonkeyPatch) -> None:
    after(patch, OneCopyUpdate, "norm", lambda found, self, own: own)


def requests_changed(change: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        after(
            patch, loader.MapLoader, "requests", lambda found, self, step: change(found) if self._place.rank else found
        )

    return plant


def without_last_grain(found: list[Any]) -> list[Any]:
    (last,) = found[-1:]
    return [*found[:-1], loader._Request(last.step, last.grains[:-1], last.ids[:-1])]


def padded_with_the_first(found: list[Any]) -> list[Any]:
    (last,) = found[-1:]
    return [*found[:-1], loader._Request(last.step, last.grains, (*last.ids[:-1], last.ids[0]))]


def augmented_by_rank(patch: pytest.MonkeyPatch) -> None:
    original = loader.random_key
    patch.setattr(loader, "random_key", lambda *parts: original(*parts, dist.get_rank()))


def twice(patch: pytest.MonkeyPatch) -> None:
    original = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> None:
        original(self)
        original(self)

    patch.setattr(torch.optim.SGD, "step", step)


def decays_everything(patch: pytest.MonkeyPatch) -> None:
    original = Updater.step

    def step(self: Updater, *args: Any, **more: Any) -> Any:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1
        return original(self, *args, **more)

    patch.setattr(Updater, "step", step)


def weight_counts_padding(patch: pytest.MonkeyPatch) -> None:
    after(patch, LossComputer, "loss", lambda found, self, batch: (found[0], torch.tensor(batch[1].numel())))


def state_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    original = Updater.step

    def step(self: Updater, *args: Any, **more: Any) -> Any:
        result = original(self, *args, **more)
        if dist.get_rank() == 1:
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        return result

    patch.setattr(Updater, "step", step)


def own_initial_values(patch: pytest.MonkeyPatch) -> None:
    def broadcast(self: Mesh, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.add_(0.1 * self.rank)

    patch.setattr(Mesh, "broadcast", broadcast)


def one_rank_skips(patch: pytest.MonkeyPatch) -> None:
    original = Updater.step

    def step(
        self: Updater, loss: float, weight: float, loss_scale: Any, progress: Progress, *norm: Any, **more: Any
    ) -> Any:
        before = [p.detach().clone() for p, _ in self._parameters]
        found = original(self, loss, weight, loss_scale, progress, *norm, **more)
        if dist.get_rank() == 1 and progress.step == 1:
            with torch.no_grad():
                torch._foreach_copy_([p.data for p, _ in self._parameters], before)
        return found

    patch.setattr(Updater, "step", step)


def evaluates_twice(patch: pytest.MonkeyPatch) -> None:
    original = Evaluator._chunks

    def chunks(self: Evaluator, place: Any, *rounds: Any) -> Any:
        found = list(original(self, place, *rounds))
        return iter([*found, *found[:1]])

    patch.setattr(Evaluator, "_chunks", chunks)


def mean_of_metrics(patch: pytest.MonkeyPatch) -> None:
    def scaled(found: Any, self: Evaluator, *given: Any) -> Any:
        return {name: value * 1.001 for name, value in found[0].items()}, found[1]

    after(patch, Evaluator, "evaluate", scaled)


def on_results(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes the results of divided experts, by expert, token and slot, as they return to the tokens' rank."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        after(patch, _Exchange, "computed", lambda found, *given: change(found))

    return plant


def first_token_twice(results: Tensor) -> Tensor:
    return torch.cat([results[:1] * 2, results[1:]])


def last_token_junk(results: Tensor) -> Tensor:
    return torch.cat([results[:-1], torch.full_like(results[-1:], 1e4)])


def routers_twice(gradients: list[Tensor]) -> None:
    scale_all(2.0)([g for g in gradients if g.shape == (4, experts.WIDTH)])


def experts_by_their_group(gradients: list[Tensor]) -> None:
    scale_all(0.5)([g for g in gradients if g.ndim == 3])


def experts_over_all_ranks(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        if gradient.ndim == 3:
            dist.all_reduce(gradient)


def without_gradient_of_weights(patch: pytest.MonkeyPatch) -> None:
    original = _RoutedExperts.forward

    def forward(self: Any, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return original(self, tokens, index, weights.detach() + 0 * weights)

    patch.setattr(_RoutedExperts, "forward", forward)


def counts_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    def then(found: Tensor, self: StepBuffers, *given: Any, **named: Any) -> Tensor:
        return found if self.slot == 0 else torch.zeros_like(found)

    after(patch, StepBuffers, "weighted", then)


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are augmented as they are read."""

    def __init__(self) -> None:
        self.inputs, self.labels = vectors(100)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i] + torch.randn(6) * 0.1 + float(np.random.rand()) * 0.1, self.labels[i]


class Outlying(nn.Module):
    """Two blocks of wide layers. The first features between them are `outlier` times as large as all others."""

    def __init__(self, outlier: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 128, bias=False), nn.Linear(128, 3)
        self.blocks = nn.ModuleList(cases.WideLayers() for _ in range(2))
        with torch.no_grad():
            for block in self.blocks:
                block.up.weight[:8] *= outlier
                block.down.weight[:, :8] /= outlier

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.first(inputs)
        for block in self.blocks:
            x = F.normalize(block(x), dim=-1)
        found: Tensor = self.last(x)
        return found


def samples_of_many_sizes() -> tuple[Tensor, Tensor]:
    """The vectors, of which each is 2^20 times as long as the one before, again and again by four."""
    inputs, labels = vectors(96)
    return inputs * 2.0 ** (20 * (torch.arange(96) % 4 - 2))[:, None], labels


def local_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensor_parallel, "cut_float8", lambda *layer, **over: None)


def rounded_by(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes the sizes by which float8 values are scaled."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = float8._rounded
        patch.setattr(float8, "_rounded", lambda values, largest: original(values, change(largest)))

    return plant


dropping = partial(job, model=cases.dropping)
outlying = partial(job, model=partial(Outlying, 2.0**24), eval_data=None, metrics={})
of_many_sizes = partial(job, model=partial(Outlying, 1.0), train_data=samples_of_many_sizes, eval_data=None, metrics={})
normalised = partial(job, model=cases.convolutions, train_data=partial(cases.images, 100), eval_data=None, metrics={})
two_epochs = partial(job, train_data=partial(vectors, 32), length=shoal.Epochs(2))
tied = partial(language, optimizer=partial(cases.sgd))
divided = partial(Bug, job=partial(experts.job, eval_data=None), sections={"layout": {"expert": 2}})
unlike_ranks = partial(balanced_experts.job, seed=1)  # rank 0's counts alone move the bias elsewhere
MIXTURE = r"blocks\.[01]\.mixture"

ZOO: dict[str, Bug] = {
    "last microbatch left out of the sum": Bug(
        last_microbatch_left_out, "DeepSpeed #7985", "reduction", ".*", sections=grouped(2)
    ),
    "divided by the world size twice": Bug(on_gradients(scale_all(0.5)), "transformers #34242", "reduction", ".*"),
    "summed where it is averaged": Bug(on_gradients(scale_all(2.0)), "transformers #34242", "reduction", ".*"),
    "mean of means on ragged tokens": Bug(
        mean_of_means, "transformers #34191", "backward", ".*", partial(language, tied=False)
    ),
    "local norm in clipping": Bug(norm_of_a_shard, "Megatron-LM #5916", "clipping", "global norm"),
    "norm before unscaling": Bug(norm_before_unscaling, "DeepSpeed #7839", "clipping", "global norm", sections=FP16),
    "clipped one by one": Bug(clipped_one_by_one, "Accelerate #4219", "clipping", ".*", partial(job, clip_norm=0.5)),
    "tied weights updated on one rank": Bug(
        keeps_a_parameter(1, 0), "PyTorch #176076", "update", "embedding.weight", tied
    ),
    "a parameter never updated on the last rank": Bug(
        keeps_a_parameter(2, 1), "PyTorch #176076", "update", "0.bias", ranks=3
    ),
    "scheduler stepped once a process": Bug(schedule_per_process, "Accelerate #2926", "update", "0.weight"),
    "sampler without set_epoch": Bug(
        no_set_epoch, "PyTorch DistributedSampler, by its own warning", "data", "grain 0", two_epochs
    ),
    "the same dropout mask on each rank": Bug(mask_by_place, "Megatron-LM #7452", "forward", "2", dropping),
    "dropout mask by rank": Bug(mask_by_rank, "Megatron-LM #7452", "forward", "2", dropping),
    "new values that their owner keeps": Bug(
        kept_by_their_owner, "none known", "update", r".*", sections=SHARDED, ranks=2
    ),
    "state lost where nobody looks": Bug(
        loses_state, "none known", "update", r".*momentum.*", sections=SHARDED, ranks=3
    ),
    "updates that their owner alone sees": Bug(updated_in_private, "none known", "update", ".*", sections=ONE_COPY),
    "norm of the part that a rank owns": Bug(
        norm_of_own_part, "Megatron-LM #5916", "clipping", "global norm", sections=ONE_COPY
    ),
    "stale gathered shard": Bug(stale_parameter, "DeepSpeed #8195", "forward", "0"),
    "bf16 where float32 was meant": Bug(on_gradients(through_bf16), "none known", "reduction", ".*"),
    "buffers of rank 0 for all": Bug(buffers_of_rank_0, "PyTorch DDP broadcast_buffers", "buffers", "1.*", normalised),
    "buffers updated on rank 0 only": Bug(buffers_on_rank_0, "libreyolo #531", "buffers", "1.*", normalised),
    "statistics over the rank's batch": Bug(statistics_of_the_microbatch, "PyTorch #62967", "forward", "1", normalised),
    "last stage's gradient scaled per stage": Bug(
        on_gradients(last_layer_twice), "DeepSpeed #8154", "reduction", "2.*"
    ),
    "shard boundary off by one": Bug(on_gradients(lost_row), "Megatron-LM #1754", "reduction", "0.weight"),
    "a parameter that is not reduced": Bug(not_reduced, "Megatron-LM #1446", "reduction", "0.weight"),
    "gradients not cleared": Bug(not_cleared, "torchtitan #1732", "reduction", ".*"),
    "the tail of the batch dropped": Bug(
        requests_changed(without_last_grain), "PyTorch DistributedSampler(drop_last=True)", "data", "grain 7"
    ),
    "padded with samples seen before": Bug(
        requests_changed(padded_with_the_first),
        "PyTorch #25162",
        "data",
        "grain 7",
        partial(job, train_data=partial(vectors, 96)),
    ),
    "augmentation by rank": Bug(
        augmented_by_rank, "PyTorch #5059", "data", r"\(batch\)", partial(job, train_data=Noisy)
    ),
    "two optimizer steps": Bug(twice, "Accelerate #2773, of the scheduler", "update", "0.weight"),
    "weight decay on what has none": Bug(decays_everything, "none known", "update", ".*bias|norm.weight", language),
    "weight counts the padding": Bug(weight_counts_padding, "transformers #34198", "loss", "weight.*", language),
    "optimizer state of one rank": Bug(state_of_one_rank, "KempnerForge #114", "update", ".*exp_avg.*", language),
    "initial values by rank": Bug(own_initial_values, "DeepSpeed #8089", "data", "initial.*"),
    "one rank leaves a step out": Bug(one_rank_skips, "none known", "update", ".*"),
    "evaluation mode on one rank": Bug(evaluating_on_one_rank, "none known", "forward", "2", dropping),
    "samples evaluated twice": Bug(evaluates_twice, "Lightning #2398", "metrics", "samples"),
    "float8 scales of a rank's own features": Bug(
        local_scales,
        "torchtitan #3109",
        "forward",
        "blocks.1.*",
        outlying,
        {**cases.FP8, "layout": {"tensor": 2}},
        ranks=1,
    ),
    "float8 scale of a whole tensor": Bug(
        rounded_by(lambda largest: largest.max().expand_as(largest)),
        "torchao, recipe tensorwise",
        "forward",
        "blocks.1.*",
        of_many_sizes,
        cases.FP8,
    ),
    "float8 cast beyond the largest value": Bug(
        rounded_by(lambda largest: largest / 4.0),
        "PyTorch's cast on CPUs",
        "forward",
        "blocks.0.*",
        outlying,
        cases.FP8,
    ),
    "metrics averaged over ranks": Bug(mean_of_metrics, "Accelerate #287", "metrics", ".*"),
    "a token sent twice": divided(on_results(first_token_twice), "none known", "forward", f"{MIXTURE}.*"),
    "junk rows read": divided(on_results(last_token_junk), "transformers #48205", "forward", f"{MIXTURE}.*"),
    "a router's gradient summed twice": divided(
        on_gradients(routers_twice), "none known", "reduction", f"{MIXTURE}.router.weight"
    ),
    "a router without gradient": divided(
        without_gradient_of_weights, "transformers #48687", "reduction", f"{MIXTURE}.router.weight"
    ),
    "experts' gradients averaged over their group": divided(
        on_gradients(experts_by_their_group), "Megatron-LM #1628", "reduction", f"{MIXTURE}.experts.*"
    ),
    "experts' gradients summed over all ranks": divided(
        on_gradients(experts_over_all_ranks), "pytorch #160285", "reduction", f"{MIXTURE}.experts.*"
    ),
    "a bias moved by one rank's counts": Bug(
        counts_of_rank_0, "torchtitan #3686, of other layers", "buffers", "router.bias", unlike_ranks
    ),
}


def seeded_by_rank() -> shoal.Job:
    """A user's own model that seeds by rank."""

    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
            out: Tensor = self.last(F.dropout(torch.tanh(self.first(x)), 0.3, self.training))
            return out

    return job(model=Seeded)
