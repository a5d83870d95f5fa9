"""Replay of a record in one process of the script, which takes the script's modules and optimizers over.

Each recorded forward is computed again from the recorded weights, inputs and random states, and its backward from the
recorded gradients of its outputs. Then the script's own optimizer makes each recorded update from the gradients that it
got. No sampler has to agree, and each step is judged from its own weights. Like the observer, this needs torch alone.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING or "_shoal_observer" not in sys.modules:
    from shoal.programs import hooks, observer, parts
else:  # within a script, whose environment may be without shoal
    observer, parts, hooks = (sys.modules[f"_shoal_{name}"] for name in ("observer", "parts", "hooks"))


class ScriptReplay:
    """Replay of a record in one process, which takes the script's modules and optimizers over."""

    def __init__(self, options: dict[str, Any], recorder: observer.ScriptRecorder) -> None:
        self._records, self.folder, self._recorder = options["of"], options["folder"], recorder
        self._options = options
        self.failures: list[str] = []

    def install(self) -> None:
        """Wait for the script's first forward with gradients, and take over there."""
        leave_whole()
        if "ranks" in self._options:
            stand_alone(self._options["rank"], self._options["ranks"])
        if "deepspeed" in self._options["libraries"]:
            leave_engine_whole()

        def before_forward(module: nn.Module, args: Any) -> None:
            if not observer.is_passed_by(module) and observer.is_trained(module, args):
                handle.remove()
                self.take_over(module)

        handle = nn.modules.module.register_module_forward_pre_hook(before_forward)

    def take_over(self, module: nn.Module) -> None:
        """Replay every recorded step, write the results, and end the process."""
        code = 0
        try:
            with torch.autocast("cpu", enabled=False):
                result = self._replayed(module)
        except Exception as error:
            traceback.print_exc()
            result, code = {"error": f"{type(error).__name__}: {error}"}, 1
        path = os.path.join(self.folder, "replay.pt")
        torch.save(result, path + ".new")  # noqa: TID251  (read with weights_only: data, no code)
        os.replace(path + ".new", path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _replayed(self, module: nn.Module) -> dict[str, Any]:
        records = read_records(self._records)
        first = records[0]
        modules = self._modules(first["modules"], module)
        keys: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for number, one in enumerate(modules):
            if one is not None:
                for name, own in one.named_modules():
                    cast_around(own, *first["modules"][number]["casts"].get(parts.plain_name(name), (None, None)))
                keys |= {f"{number}:{parts.plain_name(n)}": p for n, p in one.named_parameters()}
                buffers |= {f"{number}:{parts.plain_name(n)}": b for n, b in one.named_buffers()}
        by_id: dict[int, set[str]] = {}  # modules may share parameters
        for key, p in keys.items():
            by_id.setdefault(id(p), set()).add(key)
        optimizers = self._optimizers(first, by_id)
        results: list[dict[str, Any]] = []
        for number in range(min(len(record["steps"]) for record in records)):
            steps = [record["steps"][number] for record in records]
            places = [step["places"] for step in steps]
            self._load(keys, [step["weights"] for step in steps], places)
            result: dict[str, Any] = {"outputs": {}, "local": {}, "left_out": []}
            join_gradients(steps, [record["modules"] for record in records])
            frozen = [(p, p.detach().clone()) for p in keys.values() if not p.requires_grad]
            for rank, step in enumerate(steps):
                with torch.no_grad():
                    for p, value in frozen:  # which a forward may have changed
                        p.copy_(value)
                own, left_out, outputs = self._gradients(modules, keys, buffers, step, first["modules"])
                result["local"][rank], result["outputs"][rank] = own, outputs
                result["left_out"] += left_out
            result["unrepeated"] = ""
            if steps[0]["evaluations"] > 1:
                result["unrepeated"] = "the optimizer computes the loss several times in one; the first is compared"
            elif steps[0]["random"] and any(places):
                result["unrepeated"] = "the optimizer draws random numbers for each rank's parts"
            result["updated"] = None if result["unrepeated"] else self._updated(optimizers, keys, steps, places)
            results.append(result)
            self._load(keys, [step["after"] for step in steps], places)
        return {"steps": results, "failures": self.failures, "modules": [m is not None for m in modules]}

    def _modules(self, recorded: list[dict[str, Any]], called: nn.Module) -> list[nn.Module | None]:
        """Return the script's own module for each recorded one, by class, parameter names and shapes."""
        candidates = [called] + [m for m in gc.get_objects() if isinstance(m, nn.Module) and m is not called]
        modules: list[nn.Module | None] = []
        for about in recorded:
            if about["loose"]:
                container, optimizers = nn.Module(), dict(enumerate(self._recorder.known.optimizers))
                for name, number, group, index in about["loose"]:
                    own = optimizers[number].param_groups if number in optimizers else []
                    if group < len(own) and index < len(own[group]["params"]):
                        container._parameters[name] = own[group]["params"][index]
                modules.append(container)
                continue
            same = [
                m
                for m in candidates
                if type(m).__name__.removeprefix("FSDP") == about["class"].removeprefix("FSDP")
                and not any(m is own for own in modules)
                and {parts.plain_name(n): tuple(p.shape) for n, p in m.named_parameters()} == about["shapes"]
            ]
            if not same:
                self.failures.append(f"{about['class']} is not there again in one process")
            modules.append(same[0] if same else None)
        return modules

    def _optimizers(self, record: dict[str, Any], by_id: dict[int, set[str]]) -> dict[int, Any]:
        """Return the script's own optimizer for each recorded one, by its class and parameters."""
        optimizers: dict[int, Any] = {}
        for place, name in enumerate(record["optimizers"]):
            groups = next((s["groups"] for s in record["steps"] if s.get("optimizer") == place), None)
            if groups is None:
                continue
            wanted = [set(own["names"]) for own in groups]
            for optimizer in self._recorder.known.optimizers:
                own = [{key for p in g["params"] for key in by_id.get(id(p), {""})} for g in optimizer.param_groups]
                if type(optimizer).__name__ == name and own == wanted:
                    optimizers[place] = optimizer
                    break
            else:
                self.failures.append(f"no {name} of the same parameters is there in one process")
        return optimizers

    @staticmethod
    def _load(
        keys: dict[str, torch.Tensor], ranks: list[dict[str, torch.Tensor]], places: list[dict[str, Any]]
    ) -> None:
        """Set parameters from the ranks' whole tensors or parts."""
        with torch.no_grad():
            for rank, own in enumerate(ranks):
                for key, value in own.items():
                    if key in keys:
                        part(parts.local(keys[key]), places[rank].get(key)).copy_(value)

    def _gradients(
        self,
        modules: list[nn.Module | None],
        keys: dict[str, Any],
        buffers: dict[str, Any],
        step: dict[str, Any],
        about: list[dict[str, Any]],
    ) -> tuple[dict[str, torch.Tensor], list[str], list[Any]]:
        """Compute one rank's forwards and backwards of a step again. Return gradients, what was left out, outputs."""
        totals: dict[str, torch.Tensor] = {}
        left_out, compared = [], []
        lacking = set[int]()  # modules of which not all gradients are computed again
        with torch.no_grad():
            for key, value in step["buffers"].items():
                if key in buffers and buffers[key].shape == value.shape:
                    buffers[key].copy_(value)
        for call in step["calls"]:
            module = modules[call["module"]]
            if call["exchanges"]:
                lacking.add(call["module"])
                continue
            is_changed = call["digest"] != step["states"][call["module"]]
            if module is None or call["args"] is None or is_changed:
                why = ": the script changes its weights between it and the update" if is_changed else ""
                left_out.append(f"call {call['number']}{why}")
                lacking.add(call["module"])
                continue
            module.train(call["training"])
            by_name = dict(module.named_modules())
            for name in call["unlike"]:
                by_name[name].training = not call["training"]
            for name, p in module.named_parameters():  # a script may freeze one model while it trains another
                key = f"{call['module']}:{parts.plain_name(name)}"
                p.requires_grad_((p.is_floating_point() or p.is_complex()) and key not in call["frozen"])
            observer.restore_random(call["random"])
            kind = next((p.device.type for p in module.parameters()), "cpu")
            place = next((p.device for p in module.parameters()), torch.device("cpu"))

            def move(own: Any, place: Any = place) -> Any:
                return own.to(place) if observer.is_packed(own) else own.to(place, copy=True)

            recorded_args, kinds = (call["args"], call["kwargs"]), (torch.Tensor, PackedSequence)
            args, kwargs = tree_map_only(kinds, move, recorded_args, is_leaf=observer.is_packed)
            dtype = getattr(torch, call["autocast"].removeprefix("torch.")) if call["autocast"] else None
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                torch.clear_autocast_cache()
                output = self._called(module, call, args, kwargs)
            outputs = [t for t in observer.tensors_of(output) if t.requires_grad]
            recorded = [one["place"] for one in call["outputs"]] + [None] * len(outputs)
            sketches = [observer.sketch_of(part(t, place)) for t, place in zip(outputs, recorded, strict=False)]
            why = ""
            if len(outputs) != len(call["outputs"]):
                why = f"{len(outputs)} outputs, not {len(call['outputs'])}"
            elif len(about[call["module"]]["beside"]) > 1:
                errors = [distance(a["values"], b["values"]) for a, b in zip(call["outputs"], sketches, strict=True)]
                if any(map(math.isinf, errors)):
                    why = "a rank has a part of its output"
                elif call["draws"] and max(errors, default=0.0) > 1e-3:
                    why = "each rank draws random numbers for its part of the model"
                elif max(errors, default=0.0) > 3e-2:
                    lacking.add(call["module"])
            if why:
                left_out.append(f"call {call['number']}: {why}")
                lacking.add(call["module"])
                continue
            compared.append({"call": call["number"], "outputs": sketches})
            if call["module"] in lacking:
                continue
            wanted = [key for key, p in keys.items() if p.requires_grad and key.startswith(f"{call['module']}:")]
            passes = sorted(call["passes"])
            for number, of_pass in enumerate(passes):
                given = self._own_gradients(outputs, call["passes"][of_pass])
                chosen = [(t, g) for t, g in zip(outputs, given, strict=True) if g is not None]
                if not chosen:
                    continue
                gradients = torch.autograd.grad(
                    [t for t, _ in chosen],
                    [keys[key] for key in wanted],
                    [g for _, g in chosen],
                    retain_graph=number + 1 < len(passes),
                    allow_unused=True,
                )
                for key, gradient in zip(wanted, gradients, strict=True):
                    counted = step["passes"].get(key)
                    if gradient is None or (counted is not None and of_pass not in counted):
                        continue
                    value = parts.host_copy(gradient)
                    totals[key] = totals[key] + value if key in totals else value
        complete = {key: total for key, total in totals.items() if int(key.partition(":")[0]) not in lacking}
        return complete, left_out, compared

    @staticmethod
    def _called(module: nn.Module, call: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Call a module with its parameters in the types in which they were computed."""
        if not call["dtypes"]:
            return module(*args, **kwargs)
        cast = {}
        for name, p in module.named_parameters():
            dtype = call["dtypes"].get(f"{call['module']}:{parts.plain_name(name)}")
            cast[name] = p if dtype is None else p.to(getattr(torch, dtype.removeprefix("torch.")))
        return torch.func.functional_call(module, cast, args, kwargs)

    @staticmethod
    def _own_gradients(outputs: list[torch.Tensor], recorded: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return what each output receives from outside of the forward.

        The hook on an output also sees what flows to it through later outputs of the same forward, such as a loss.
        """
        given: list[torch.Tensor | None] = [None] * len(outputs)
        for place, gradient in recorded.items():
            given[place] = gradient.to(outputs[place].device, outputs[place].dtype)
        order = [n for n, g in enumerate(given) if g is not None]
        order.sort(key=lambda n: -getattr(outputs[n].grad_fn, "_sequence_nr", lambda: 0)())
        for place, later in enumerate(order):
            earlier = order[place + 1 :]
            if not earlier:
                break
            through = torch.autograd.grad(
                outputs[later], [outputs[n] for n in earlier], given[later], retain_graph=True, allow_unused=True
            )
            for n, flow in zip(earlier, through, strict=True):
                own = given[n]
                if flow is not None and own is not None:
                    given[n] = own - flow
        return given

    @staticmethod
    def _updated(
        optimizers: dict[int, Any], keys: dict[str, Any], steps: list[dict[str, Any]], places: list[dict[str, Any]]
    ) -> dict[str, torch.Tensor] | None:
        """Make a recorded update with the script's own optimizer; return the new weights of its parameters."""
        optimizer = optimizers.get(steps[0]["optimizer"])
        if optimizer is None:
            return None
        for group, recorded in zip(optimizer.param_groups, steps[0]["groups"], strict=True):
            for name, value in recorded["values"].items():
                if name in group and not isinstance(group[name], torch.Tensor):
                    group[name] = value
                elif name in group:
                    group[name].fill_(value)
        names = [key for group in steps[0]["groups"] for key in group["names"]]
        for key in names:
            keys[key].grad = None
        for rank, step in enumerate(steps):
            for key in step["gradients"]:
                gradient, place = summed_gradient(steps, rank, key), places[rank].get(key)
                if rank and place is None:
                    continue
                if keys[key].grad is None:
                    keys[key].grad = torch.zeros_like(keys[key])
                part(parts.local(keys[key].grad), place).copy_(gradient)
        if steps[0]["random"]:
            observer.restore_random(steps[0]["random"])
        optimizer.step()
        return {key: parts.host_copy(keys[key]) for key in names}


def read_records(folder: str) -> list[dict[str, Any]]:
    """Return the records that the ranks of an observed script wrote, in the order of ranks."""
    names = [name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".pt")]
    with torch.serialization.safe_globals([PackedSequence]):
        records = [torch.load(os.path.join(folder, name), weights_only=True) for name in names]
    return sorted(records, key=lambda record: int(record["rank"]))


def part(whole: torch.Tensor, place: dict[str, Any] | None) -> torch.Tensor:
    """Return the view of a whole tensor that a rank has."""
    if place is None:
        return whole
    if len(place["offset"]) != len(place["shape"]):  # elements of the flattened tensor
        whole = whole.view(-1)
    for dim, (offset, size) in enumerate(zip(place["offset"], place["size"], strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    return whole


def summed_gradient(steps: list[dict[str, Any]], rank: int, key: str, name: str = "gradients") -> Any:
    """Return the gradient that a rank's optimizer gets. DTensor sums partial ones over ranks when they are used."""
    own = [steps[one][name].get(key) for one in steps[rank]["summed"].get(key) or [rank]]
    if any(gradient is None for gradient in own):
        return None
    whole, place = torch.stack(own).sum(0), steps[rank]["places"].get(key)
    return part(whole, place) if place is not None and tuple(whole.shape) == place["shape"] else whole


def join_gradients(steps: list[dict[str, Any]], modules: list[list[dict[str, Any]]]) -> None:
    """Join the gradients of outputs that are DTensors from those of all ranks that compute parts of them."""
    joined = []
    for rank, step in enumerate(steps):
        for number, call in enumerate(step["calls"]):
            for of_pass, received in call["passes"].items():
                for output in received:
                    place = call["gradient_places"][output]
                    if place is None:
                        continue
                    whole = received[output].new_zeros(place["shape"])
                    for beside in modules[rank][call["module"]]["beside"]:
                        peer = steps[beside]["calls"][number]
                        own = part(whole, peer["gradient_places"][output])
                        own.copy_(peer["passes"][of_pass][output] + (own if place["summed"] else 0.0))
                    joined.append((received, output, whole))
    for received, output, whole in joined:
        received[output] = whole


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two tensors, relative to the larger norm; infinite for other shapes or finite places."""
    if one.shape != other.shape:
        return math.inf
    one, other, finite = one.double(), other.double(), torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return math.inf
    if not finite.all():
        one, other = one[finite], other[finite]
    size = max(one.norm().item(), other.norm().item())
    return ((one - other).norm().item() / size) if size > 1e-12 else 0.0


def cast_around(module: nn.Module, inside: str | None, outside: str | None) -> None:
    """Let a module cast its inputs and outputs to the types of these names."""

    def cast(tree: Any, name: str) -> Any:
        dtype = getattr(torch, name.removeprefix("torch."))
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    if inside is not None:
        module.register_forward_pre_hook(lambda m, a, k: (cast(a, inside), cast(k, inside)), with_kwargs=True)
    if outside is not None:
        module.register_forward_hook(lambda m, a, output: cast(output, outside))


def leave_whole() -> None:
    """Let what shards modules return them as they are: one process has them whole, and needs no `checkpoint`."""
    import torch.utils.checkpoint as checkpoint

    def plain(function: Any, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
        own = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
        return function(*args, **{name: value for name, value in kwargs.items() if name not in own})

    checkpoint.checkpoint = plain  # before others import it
    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor as tensor
    from torch.distributed import device_mesh
    from torch.distributed.tensor import parallel

    methods = (
        *("set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward", "reshard", "unshard"),
        *("set_reshard_after_forward", "set_requires_all_reduce", "set_modules_to_forward_prefetch"),
        *("set_modules_to_backward_prefetch", "set_gradient_divide_factor", "set_unshard_in_backward"),
    )

    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        for own in module if isinstance(module, (list, tuple)) else [module]:
            for name in methods:
                if not hasattr(own, name):
                    setattr(type(own), name, lambda self, *a, **k: None)
        return module

    def same(*args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs.get("module", kwargs.get("tensor"))

    fsdp.fully_shard = fully_shard

    def wrap(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module
        self._handle = self.training_state = None

    whole: Any = fsdp.FullyShardedDataParallel
    whole.__init__ = wrap
    whole.forward = lambda self, *args, **kwargs: self._fsdp_wrapped_module(*args, **kwargs)
    whole.no_sync = lambda self: contextlib.nullcontext()
    owners: list[Any] = [device_mesh, tensor, torch.distributed, parallel]
    for owner in owners:
        owner.parallelize_module = owner.distribute_tensor = owner.distribute_module = same
    make_mesh = device_mesh.init_device_mesh

    def small_mesh(kind: str, shape: tuple[int, ...], **kwargs: Any) -> Any:
        return make_mesh(kind, (1,) * len(shape), **kwargs)

    for owner in owners:
        owner.init_device_mesh = small_mesh


def leave_engine_whole() -> None:
    """Let DeepSpeed's engine leave parameters and optimizer as they are, in the types that the script gave them."""

    def changed(read: Any, own: Any, given: dict[str, Any]) -> None:
        divides = ("zero_optimization", "bf16", "fp16", "gradient_clipping", "data_types")
        read(own, {name: value for name, value in given.items() if name not in divides})

    def joined(join: Any, *args: Any, **kwargs: Any) -> None:  # which the engine does before it reads its configuration
        hooks.around(sys.modules["deepspeed.runtime.config"].DeepSpeedConfig, "_initialize_params", changed)
        join(*args, **kwargs)

    hooks.around(torch.distributed, "init_process_group", joined)


def stand_alone(rank: int, ranks: int) -> None:
    """Let this process be one of several whose others are not there: collective calls change nothing."""
    from torch.distributed import device_mesh, distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    join, make_group = distributed_c10d.init_process_group, distributed_c10d.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        join("fake", store=FakeStore(), rank=rank, world_size=ranks)

    def new_group(members: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make_group(kwargs.get("ranks", members))

    owners: list[Any] = [torch.distributed, distributed_c10d, device_mesh]
    for owner in owners:
        owner.init_process_group, owner.new_group = init_process_group, new_group
