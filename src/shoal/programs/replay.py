"""Replay of a record in one process of the script, which takes the script's modules and optimizers over.

Each recorded forward is computed again from the recorded weights, inputs and random states, and its backward from the
recorded gradients of its outputs. Then the script's own optimizer makes each recorded update from the gradients that it
got. No sampler has to agree, and each step is judged from its own weights. Like the observer, this needs torch alone.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING or "_shoal_observer" not in sys.modules:
    from shoal.programs import observer
else:  # within a script, whose environment may be without shoal
    observer = sys.modules["_shoal_observer"]


class ScriptReplay:
    """Replay of a record in one process, which takes the script's modules and optimizers over."""

    def __init__(self, records: str, folder: str, recorder: observer.ScriptRecorder) -> None:
        self._records, self.folder, self._recorder = records, folder, recorder
        self.failures: list[str] = []

    def install(self) -> None:
        """Wait for the script's first forward with gradients, and take over there."""
        leave_whole()

        def before_forward(module: nn.Module, args: Any) -> None:
            if not observer.is_passed_by(module) and observer.is_trained(module):
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
        names = sorted(n for n in os.listdir(self._records) if n.startswith("rank-") and n.endswith(".pt"))
        records = [torch.load(os.path.join(self._records, n), weights_only=True) for n in names]
        records.sort(key=lambda record: record["rank"])
        first = records[0]
        modules = self._modules(first["modules"], module)
        keys: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for number, one in enumerate(modules):
            if one is not None:
                keys |= {f"{number}:{observer.plain_name(n)}": p for n, p in one.named_parameters()}
                buffers |= {f"{number}:{observer.plain_name(n)}": b for n, b in one.named_buffers()}
        by_id = {id(p): key for key, p in keys.items()}
        optimizers = self._optimizers(first, by_id)
        results: list[dict[str, Any]] = []
        for number in range(min(len(record["steps"]) for record in records)):
            steps = [record["steps"][number] for record in records]
            places = [step["places"] for step in steps]
            self._load(keys, [step["weights"] for step in steps], places)
            result: dict[str, Any] = {"outputs": {}, "local": {}, "left_out": []}
            for rank, step in enumerate(steps):
                own, left_out, outputs = self._gradients(modules, keys, buffers, step)
                result["local"][rank], result["outputs"][rank] = own, outputs
                result["left_out"] += left_out
            result["updated"] = self._updated(optimizers, keys, steps, places)
            results.append(result)
            self._load(keys, [step["after"] for step in steps], places)
        return {"steps": results, "failures": self.failures, "modules": [m is not None for m in modules]}

    def _modules(self, recorded: list[dict[str, Any]], called: nn.Module) -> list[nn.Module | None]:
        """Return the script's own module for each recorded one, by class, parameter names and shapes."""
        candidates = [called] + [m for m in gc.get_objects() if isinstance(m, nn.Module) and m is not called]
        modules: list[nn.Module | None] = []
        for about in recorded:
            same = [
                m
                for m in candidates
                if type(m).__name__.removeprefix("FSDP") == about["class"].removeprefix("FSDP")
                and not any(m is own for own in modules)
                and [observer.plain_name(n) for n, _ in m.named_parameters()] == about["names"]
                and [tuple(p.shape) for p in m.parameters()] == about["shapes"]
            ]
            if not same:
                self.failures.append(f"{about['class']} is not there again in one process")
            modules.append(same[0] if same else None)
        return modules

    def _optimizers(self, record: dict[str, Any], by_id: dict[int, str]) -> dict[int, Any]:
        """Return the script's own optimizer for each recorded one, by its class and parameters."""
        optimizers: dict[int, Any] = {}
        for place, name in enumerate(record["optimizers"]):
            groups = next((s["groups"] for s in record["steps"] if s.get("optimizer") == place), None)
            if groups is None:
                continue
            wanted = [own["names"] for own in groups]
            for optimizer in self._recorder.known.optimizers:
                own = [[by_id.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
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
                        part(observer.local(keys[key]), places[rank].get(key)).copy_(value)

    def _gradients(
        self, modules: list[nn.Module | None], keys: dict[str, Any], buffers: dict[str, Any], step: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], list[str], list[Any]]:
        """Compute one rank's forwards and backwards of a step again. Return gradients, what was left out, outputs."""
        totals: dict[str, torch.Tensor] = {}
        left_out, compared = [], []
        with torch.no_grad():
            for key, value in step["buffers"].items():
                if key in buffers and buffers[key].shape == value.shape:
                    buffers[key].copy_(value)
        for call in step["calls"]:
            module = modules[call["module"]]
            if module is None or call["args"] is None:
                left_out.append(f"call {call['number']}")
                continue
            module.train(call["training"])
            by_name = dict(module.named_modules())
            for name in call["unlike"]:
                by_name[name].training = not call["training"]
            observer.restore_random(call["random"])
            kind = next((p.device.type for p in module.parameters()), "cpu")
            place = next((p.device for p in module.parameters()), torch.device("cpu"))
            args, kwargs = on(call["args"], place), on(call["kwargs"], place)
            dtype = getattr(torch, call["autocast"].removeprefix("torch.")) if call["autocast"] else None
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                torch.clear_autocast_cache()
                output = module(*args, **kwargs)
            outputs = [t for t in observer.tensors_of(output) if t.requires_grad]
            compared.append({"call": call["number"], "outputs": [observer.sketch_of(t) for t in outputs]})
            if len(outputs) != len(call["outputs"]):
                left_out.append(f"call {call['number']}: {len(outputs)} outputs, not {len(call['outputs'])}")
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
                    value = observer.host_copy(gradient)
                    totals[key] = totals[key] + value if key in totals else value
        return totals, left_out, compared

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
            for key, gradient in step["gradients"].items():
                place = places[rank].get(key)
                if rank and place is None:
                    continue
                if keys[key].grad is None:
                    keys[key].grad = torch.zeros_like(keys[key])
                part(observer.local(keys[key].grad), place).copy_(gradient)
        optimizer.step()
        return {key: observer.host_copy(keys[key]) for key in names}


def part(whole: torch.Tensor, place: dict[str, Any] | None) -> torch.Tensor:
    """Return the view of a whole tensor that a rank has."""
    if place is None:
        return whole
    for dim, (offset, size) in enumerate(zip(place["offset"], place["size"], strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
    return whole


def on(tree: Any, device: torch.device) -> Any:
    """Return a copy of an argument tree with its tensors on a device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device, copy=True)
    if type(tree) in (list, tuple):
        return type(tree)(on(one, device) for one in tree)
    if isinstance(tree, dict):
        return {key: on(value, device) for key, value in tree.items()}
    return tree


def leave_whole() -> None:
    """Let `fully_shard` return modules as they are: one process has them whole."""
    import torch.distributed.fsdp as fsdp

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

    fsdp.fully_shard = fully_shard
