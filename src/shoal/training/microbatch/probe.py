"""Agreement of the ranks on the microbatch policy, from looks at the job before its first step and a few later ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.data.loader import Loader, MapLoader, Microbatch
from shoal.distributed.mesh import collectively
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.errors import OutOfMemoryError
from shoal.numerics.buffer_rules import LOOKED_GRAINS, in_words, no_rule
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.training.microbatch.look import LATER_STEPS, Look
from shoal.training.microbatch.policy import BufferLook, MicrobatchPolicy, ProbeResult, refuse_other_losses

if TYPE_CHECKING:
    from shoal.training.microbatch.step import FetchedStep, StepParts


class PolicyProbe:
    """Probe of a job for a safe microbatch policy, which all ranks adopt.

    `note`: takes a line for people. `fetch_again`: fetches a step again under the current policy.
    """

    def __init__(
        self,
        parts: StepParts,
        loader: Loader,
        note: Callable[[str], None],
        fetch_again: Callable[[int], FetchedStep],
    ) -> None:
        self._parts, self._loader, self._note, self._fetch_again = parts, loader, note, fetch_again
        self.is_done = False  # True once a first look was conclusive; a few later looks follow
        divided = parts.sharded_model.divided
        self._look = Look(parts.computer, (lambda value: any(parts.mesh.gather_json(value))) if divided else bool)

    def restore(self, computation: dict[str, Any]) -> None:
        """Restore the microbatch policy of a resumed run, except the number of grains that fit in memory."""
        computer = self._parts.computer
        here = computer.computation.grains_per_microbatch
        known = replace(MicrobatchPolicy.from_json(computation), grains_per_microbatch=here)
        computer.computation = computer.computation.with_care_of(known)

    def before_step(self, fetched: FetchedStep) -> FetchedStep:
        """Run the look that is due before a step, if any, and return the step, possibly in other microbatches.

        Raises: on every rank, if any rank raised.
        Collective: all ranks.
        """
        if not self.is_done:
            parts = self._parts
            while True:
                before = parts.computer.computation.effective_grains
                first = fetched.first.microbatch if fetched.first is not None else None
                if parts.strategy.syncs_every_microbatch:  # the same on all ranks, which meet in every forward
                    first = next(self._loader.fillers(fetched.step))
                result = collectively(parts.mesh, parts.sharded_model.divided, functools.partial(self._propose, first))
                if not parts.observer.has_hooks:  # a verification's observer compares what ranks compute itself
                    refuse_other_losses(parts.mesh.gather_json(result.seen))
                flags = parts.mesh.all_gather([float(result.too_large), float(not result.conclusive)])
                too_large, unclear = flags.max(axis=0) > 0
                agreed = self.agree_on(result.computation, None if too_large else fetched.step)
                if first is not None and parts.computer.job.batch_norm == "batch" and not parts.computer.has_normalised:
                    self._note('batch_norm = "batch": no effect, since the model computes no batch norm')
                # A non-finite batch is not conclusive: probe the next batch, too.
                self.is_done = not unclear and not self._without_rule(agreed)
                if agreed.effective_grains != before:
                    fetched = self._fetch_again(fetched.step)
                if not too_large:
                    return fetched
        computer = self._parts.computer
        if fetched.step + 1 in LATER_STEPS or computer.has_evaluated:
            computer.has_evaluated = False
            grains = self._loader.first_grains(fetched.step)
            look = functools.partial(self._look.state, grains) if grains is not None else (lambda: None)
            with self._own_collectives_refused():
                collectively(self._parts.mesh, self._parts.sharded_model.divided, look)
        return fetched

    def _own_collectives_refused(self) -> contextlib.AbstractContextManager[None]:
        several = self._parts.mesh.world_size > 1
        return own_collectives_refused("the model or loss") if several else contextlib.nullcontext()

    def _propose(self, first: Microbatch | None) -> ProbeResult:
        if first is None:
            return ProbeResult(self._parts.computer.computation)
        computer, divided = self._parts.computer, self._parts.sharded_model.divided
        whole = grains = self._loader.first_grains(first.step) or first
        # A step's forward in exact mode has one grain; the look takes several, to see whether samples mix.
        meets = divided or self._parts.strategy.syncs_every_microbatch
        if not computer.exact or meets or not computer.job.fuse:
            whole = first
        if computer.exact:
            self._loader.check_repeats(first.step)
        while True:
            try:
                with self._own_collectives_refused():
                    return self._look.policy(whole, grains, self._parts.buffers)
            except Exception as error:
                if not is_out_of_memory(error) or divided:
                    raise
                if whole is first:  # nothing is known of the model yet: probe again with fewer grains
                    return ProbeResult(self.fewer_grains(error), too_large=True)
            torch.cuda.empty_cache()  # after the error, whose frames hold tensors
            whole = grains = first

    def fewer_grains(self, error: Exception) -> MicrobatchPolicy:
        """Return the policy with half the grains per microbatch. Raises: OutOfMemoryError if there is only one."""
        computation, job = self._parts.computer.computation, self._parts.computer.job
        if job.batch_norm == "batch":
            raise OutOfMemoryError(
                given='the samples of a rank, with Job(batch_norm="batch")',
                conflict=f"they do not fit in memory together: {str(error).strip()[:200] or type(error).__name__}",
                remedy='use more devices, or write memory.recompute = "full", or batch_norm="grain"',
            ) from error
        if computation.effective_grains == 1:
            size = job.grain_size
            remedy = 'write memory.recompute = "full", or divide the model: shoal plan says how it fits'
            if size > 1:
                remedy = (
                    f"write Job(grains={-(-job.global_batch // -(-size // 2))}): half the samples, and so half the "
                    "activations, of a grain (it changes the run); shoal plan says what fits"
                )
            raise OutOfMemoryError(
                given=f"a microbatch of a single grain, of {size} sample{'s' if size > 1 else ''}",
                conflict=f"it does not fit in memory: {str(error).strip()[:200] or type(error).__name__}",
                remedy=remedy,
            ) from error
        torch.cuda.empty_cache()
        return replace(computation, grains_per_microbatch=computation.effective_grains // 2)

    def agree_on(
        self, proposal: MicrobatchPolicy | None, step: int | None, *, in_step: bool = False
    ) -> MicrobatchPolicy:
        """Adopt the most conservative of all ranks' proposals, with rules for buffers from `step` unless it is None.

        `in_step`: the proposals are from the step's own forwards, which have changed the newly watched buffers.
        Collective: all ranks, one JSON gather, and a second one if a buffer needs a rule.
        """
        computer, buffers = self._parts.computer, self._parts.buffers
        proposals = self._parts.mesh.gather_json(proposal.to_json() if proposal else None)
        agreed = computer.computation
        for document in filter(None, proposals):
            agreed = agreed.with_care_of(MicrobatchPolicy.from_json(document))
        before = computer.computation
        has_parted = before.fuse and not agreed.fuse and (agreed.grains_per_microbatch > 1 or computer.exact)
        if has_parted or (agreed.randomness == "opaque" and before.randomness != "opaque"):
            self._note(f"grain by grain: {computer.why_not_fused(agreed)}")
        computer.computation = agreed
        buffers.watch(agreed.buffers, dict(agreed.rules))
        if step is not None and ((agreed.buffers and self._without_rule(agreed)) or buffers.declared):
            self._find_rules(step, {*agreed.buffers} - {*before.buffers} if in_step else frozenset())
        return computer.computation

    def _without_rule(self, agreed: MicrobatchPolicy) -> list[str]:
        known = dict(agreed.rules)
        return [name for name in agreed.buffers if name not in known and name not in self._parts.buffers.settled]

    def _find_rules(self, step: int, moving: Collection[str]) -> None:
        """Find rules for buffers from the first grains of a step, and drop buffers that no grain changes.

        `moving`: buffers that the step has changed, for example a buffer that adopts the dtype of the computation.
        Raises: JobError on every rank, for a buffer that no rule explains.
        Collective: all ranks, one JSON gather.
        """
        parts, computer, buffers = self._parts, self._parts.computer, self._parts.buffers
        agreed, names = computer.computation, self._without_rule(computer.computation)
        rules = dict(agreed.rules) | {n: rule for n, rule in buffers.declared.items() if n in agreed.buffers}
        moved, looks, unexplained = set(agreed.buffers), list[BufferLook](), list[str]()
        if names:
            buffers.restore()
            divided = parts.sharded_model.divided

            def look_at_buffers() -> BufferLook | None:  # None without two grains to compare
                for count in (LOOKED_GRAINS, 2):
                    first = self._loader.first_grains(step, count)
                    if first is None or len(first.grains) < 2:
                        return None
                    try:
                        return self._look.buffers(first, names, widens=not moving)
                    except Exception as error:
                        if not is_out_of_memory(error) or divided or count == 2:
                            raise
                        torch.cuda.empty_cache()
                return None

            own = collectively(parts.mesh, divided, look_at_buffers)
            rows = parts.mesh.gather_json(asdict(own) if own is not None else None)
            looks = [BufferLook(**document) for document in filter(None, rows)]
            seen = {name for look in looks for name in look.rules}
            moved = {n for n in agreed.buffers if n not in names or n in seen or n in moving or not looks}
        mixes = agreed.randomness == "opaque" or not computer.job.fuse or any(look.mixes for look in looks)
        for name in (name for name in names if name in moved):
            candidates = [look.rules[name] for look in looks if name in look.rules]
            common = [
                rule for rule in (candidates[0] if candidates else ()) if all(rule in other for other in candidates)
            ]
            if common or mixes:
                rules[name] = common[0] if common else "mean"
            elif not looks and (parts.mesh.num_data_ranks == 1 or isinstance(self._loader, MapLoader)):
                rules[name] = "last"  # every step has a single grain
            elif all(look.conclusive for look in looks):
                unexplained.append(name)
        if unexplained:
            homes = dict(parts.sharded_model.model.named_modules())
            kinds = {name: _kind(homes.get(name.rpartition(".")[0])) for name in unexplained}
            ordered = any(not kinds.keys().isdisjoint(look.ordered) for look in looks)
            rarely = not any(kinds.keys() & look.rules.keys() for look in looks)
            raise no_rule(kinds, ordered=ordered, seen=bool(looks), rarely=bool(looks) and rarely)
        said = {name: rule for name, rule in rules.items() if rule != "mean" or (mixes and name in names)}
        if said and rules != dict(agreed.rules):
            self._note(f"buffers: {in_words(said)}")
        computer.computation = replace(
            agreed, buffers=tuple(sorted(moved)), rules=tuple(sorted((n, r) for n, r in rules.items() if n in moved))
        )
        buffers.watch(computer.computation.buffers, rules)


def _kind(module: nn.Module | None) -> str:
    """Return a module's class name, ignoring the classes that torch derives from it to cut parameters."""
    own = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
    return next(own).__name__ if module is not None else ""
