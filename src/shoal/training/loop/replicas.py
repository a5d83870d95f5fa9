"""Comparison of model replicas, which detects a flipped bit in one rank's memory and undoes it."""

from __future__ import annotations

import math
import sys
from collections import Counter

import torch
from torch import Tensor

from shoal.checkpoint.state import optimizer_state
from shoal.distributed.mesh import Mesh
from shoal.errors import IntegrityError
from shoal.hardware.detect import processor
from shoal.numerics.checksum import bits_checksum
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.plans.plan import Coordinate
from shoal.training.update.optimizer_step import Updater

_BITS = 22  # bits of an integer that a gather transfers exactly in float32
_PARTS = 3
# Replicas that differ again and again were not hit by chance.
_MOST_IN_A_ROW = 2
# Replicas are always compared after this many first steps of a process, and at the end.
_FIRST_STEPS = 2
_MOST_NAMED = 3


class ReplicaCheck:
    """Check that ranks with the same part of the model have the same values.

    The check runs after the first two steps and after the last step. With `every`, it also runs every `every` steps and
    before each checkpoint. A difference then rolls the run back to a checkpoint before it.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: ShardedModel,
        updater: Updater,
        every: int | None,
        *,
        repeats: bool = True,
        one_copy: bool = False,
        divides_experts: bool = False,
    ) -> None:
        """Set up the check.

        `repeats`: whether a repeated step gives the same result. `one_copy`: ranks share one copy, so that nothing can
        differ. `divides_experts`: whether ranks with the same experts divide the optimizer's state of these.
        """
        self._mesh, self._model, self._updater, self._repeats = mesh, model, updater, repeats
        self.compares = mesh.layout.data > 1 and not one_copy
        self._has_copies = len(mesh.layout.expert_copies()[0]) > 1  # of a rank's experts, if ranks divide them
        self._divides_experts = divides_experts
        self.every = every if self.compares else None
        self._checked, self._num_checks = -1, 0
        self._before: int | None = None  # the last step with a difference
        self._in_a_row = 0
        self._differed: int | None = None  # the step with a difference, until it is trained again
        self._differing: dict[int, Tensor] = {}  # this rank's tensors that differed at that step, by index
        self.flipped: list[int] = []  # ranks with a flipped bit, from the last check

    def is_due(self, step: int, *, saves: bool = False, last: bool = False) -> bool:
        """Return True if the state after `step` steps has to be checked now.

        `saves`: a checkpoint of this state follows. `last`: this is the last step.
        """
        if not self.compares or step == self._checked:
            return False
        if step <= _FIRST_STEPS or self._num_checks < _FIRST_STEPS or last:
            return True
        return self.every is not None and (saves or self._differed == step or step % self.every == 0)

    def differing(self, step: int) -> str | None:
        """Return a sentence about the ranks that differ, or None.

        If the replicas agree at a step at which they differed before, `flipped` names the ranks with the other state.
        Raises: IntegrityError, on every rank, if they differ repeatedly, or if the run cannot roll back.
        Collective: all ranks, one all-gather.
        """
        tensors, places = list(self._named().values()), self._places()
        own = bits_checksum(tensors)
        parts = [float(own >> (_BITS * place) & ((1 << _BITS) - 1)) for place in range(_PARTS)]
        rows = self._mesh.all_gather(parts).astype(int).tolist()
        sums = [sum(part << (_BITS * place) for place, part in enumerate(row)) for row in rows]
        # The ranks that differ from the majority with the same part, or all of them without a majority.
        wrong: list[int] = []
        sure = True
        for place in dict.fromkeys(places):
            group = [rank for rank, other in enumerate(places) if other == place]
            common, number = Counter(sums[rank] for rank in group).most_common(1)[0]
            is_majority = 2 * number > len(group)
            sure &= is_majority
            if number < len(group):
                wrong += [rank for rank in group if sums[rank] != common or not is_majority]
        self._num_checks += 1
        self._checked = step if not wrong else -1
        self.flipped = []
        if not wrong:
            if self._differed == step:
                self.flipped = self._farthest(tensors, places) if self._repeats else []
                self._differed, self._differing = None, {}
            if self._before is not None and step >= self._before:
                self._before, self._in_a_row = None, 0
            return None
        if self.every is None:
            device = self._mesh.device
            kind = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
            if len(set(self._mesh.gather_json(kind))) > 1:
                self.compares = False  # different processors may legitimately differ in the last bits
                return None
        named = f"{'ranks' if sure else 'one of ranks'} {', '.join(map(str, wrong))}"
        named = f"rank {wrong[0]}" if len(wrong) == 1 else named
        said = f"the parameters or the optimizer's state of {named} are not those of the other replicas"
        self._in_a_row += 1
        self._before = max(step, self._before or 0)
        if self.every is None or self._in_a_row > _MOST_IN_A_ROW:
            raise self._error(step, said)
        # Copies of this rank's tensors that differ from another replica.
        rank = self._mesh.rank
        by_tensor = self._mesh.gather_json([bits_checksum([tensor]) for tensor in tensors])
        group = [other for other, place in enumerate(places) if place == places[rank]]
        differ = [i for i in range(len(tensors)) if any(by_tensor[other][i] != by_tensor[rank][i] for other in group)]
        self._differed, self._differing = step, {i: tensors[i].detach().to("cpu", copy=True) for i in differ}
        return said

    def _error(self, step: int, said: str) -> IntegrityError:
        """Return the error that ends the run. Collective: all ranks, a JSON gather."""
        own = {name: bits_checksum([tensor]) for name, tensor in self._named().items()}
        gradients = [bits_checksum([local(p.grad)]) for _, p in self._model.parameters() if p.grad is not None]
        rows = self._mesh.gather_json({"tensors": own, "gradients": gradients})
        places = self._places()
        group = [rank for rank, place in enumerate(places) if place == places[self._mesh.rank]]
        first = rows[group[0]]
        differ = sorted({n for rank in group for n, s in rows[rank]["tensors"].items() if first["tensors"].get(n) != s})
        named = ", ".join(differ[:_MOST_NAMED]) + (
            f" and {len(differ) - _MOST_NAMED} more" * (len(differ) > _MOST_NAMED)
        )
        times = f", {self._in_a_row} times in a row" if self._in_a_row > 1 else ""
        given = f"step {step}: {said}{times}" + (f": {named}" if differ else "")
        if step > _FIRST_STEPS and self._in_a_row == 1:
            return IntegrityError(
                given=given,
                conflict="replicas compute the same from the same: a bit has flipped in one rank's memory, or the job "
                "does something on one rank alone",
                remedy="resume with --check-replicas 100, say, from a checkpoint from before: the run then finds the "
                "step at which they differ, and goes back to the last state in which they agree",
            )
        if any(rows[rank]["gradients"] != first["gradients"] for rank in group):
            return IntegrityError(
                given=given,
                conflict="the summed gradients differ as well: a hook on a gradient, or code of the job between the "
                "backward and the update, does not do on each rank the same",
                remedy="look for what a job does on one rank alone, as random numbers or files of its own",
            )
        return IntegrityError(
            given=given,
            conflict="the gradients are the same on all ranks: the update of the optimizer (or a hook of it), or the "
            "forward where it writes parameters, reads something that differs by rank, such as a statistic of the "
            "rank's own samples",
            remedy="let the update depend on gradients, parameters and the optimizer's state alone; keep a statistic "
            "of the samples in a buffer (register_buffer), which is the same on all ranks after each step",
        )

    def _farthest(self, tensors: list[Tensor], places: list[tuple[Coordinate, int]]) -> list[int]:
        """Return the ranks with the tensors farthest from the result of the repeated steps.

        A flipped bit reaches the other replicas through later gradients, but its own rank also has the bit itself. The
        result is empty if two ranks are equally far. Collective: a JSON gather.
        """
        own = 0.0
        for i, then in self._differing.items():
            apart = float((then.double() - tensors[i].detach().cpu().double()).abs().sum())
            own += apart if math.isfinite(apart) else sys.float_info.max
        far: list[float] = self._mesh.gather_json(own)
        farthest = []
        for place in dict.fromkeys(places):
            group = sorted((far[rank], rank) for rank, other in enumerate(places) if other == place)
            farthest += [group[-1][1]] if len(group) > 1 and group[-1][0] > group[-2][0] else []
        return farthest

    def _places(self) -> list[tuple[Coordinate, int]]:
        """Return what identifies each rank's part of the model: its coordinate but for data, and its experts' index."""
        layout, ranks = self._mesh.layout, range(self._mesh.world_size)
        experts = layout.expert if self._has_copies else 1
        return [(layout.coordinate(rank)._replace(data=0), rank % experts) for rank in ranks]

    def _named(self) -> dict[str, Tensor]:
        """Return this rank's parameters and optimizer state by name, in the same order on all ranks.

        Experts of which no other rank has a copy are left out, and states of experts that have one owner.
        """
        state, _ = optimizer_state(self._updater.optimizer, self._model.model, copy=False)
        named = {name: local(p) for name, p in self._model.parameters()} | {path: state[path] for path in sorted(state)}

        def is_unique(path: str) -> bool:
            name, _, is_state = path.partition("/")
            alone = bool(is_state) and self._divides_experts if self._has_copies else True
            return alone and name in self._model.division.experts

        return {path: tensor for path, tensor in named.items() if not is_unique(path)}
