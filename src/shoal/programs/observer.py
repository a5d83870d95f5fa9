"""Observer of an unchanged training script, within the script's own process. It needs torch alone.

In record mode each rank writes what its first steps did: samples, inputs, random states, gradients of outputs, local
gradients, gradients as the optimizer gets them, clipping, rates, weights. The observer makes no collective call,
changes no value and draws no number. When all ranks have written, the processes end.

In replay mode one process runs the script up to its first forward, and the observer takes over: it computes each
recorded forward again from the recorded weights, and each recorded update with the script's own optimizer.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import pickle
import random
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

VERSION = 1
# Modules that only call another one; the outermost module is looked for inside of them.
WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "_FabricModule",
    "DeepSpeedEngine",
    "LightningModule",
}
PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
LOSSES = {
    "cross_entropy": "ignore_index",
    "nll_loss": "ignore_index",
    "mse_loss": None,
    "l1_loss": None,
    "smooth_l1_loss": None,
    "huber_loss": None,
    "binary_cross_entropy": None,
    "binary_cross_entropy_with_logits": None,
}
# Bytes of an output's values that are kept; larger outputs are compared by samples of their elements.
_MOST_OUTPUT = 1 << 20
_WAIT_SECONDS = 60.0


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, dicts and dataclasses, in order. A tensor that recurs appears once."""
    known: dict[int, torch.Tensor] = {}

    def walk(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            known.setdefault(id(value), value)
        elif isinstance(value, dict) or hasattr(value, "keys"):
            for key in list(value.keys()):
                walk(value[key], depth + 1)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one, depth + 1)
        elif depth < 8 and hasattr(value, "__dataclass_fields__"):
            for key in value.__dataclass_fields__:
                walk(getattr(value, key), depth + 1)

    walk(tree)
    return list(known.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of a tensor, detached, which may be a view."""
    with torch.no_grad():
        return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's values on the host."""
    return local(tensor).to("cpu", copy=True)


def digest(tensor: torch.Tensor) -> str:
    """Return a SHA-1 of a tensor's values on this rank."""
    flat = local(tensor).cpu().contiguous().view(-1)
    flat = flat.view(torch.uint8) if flat.numel() else flat
    return hashlib.sha1(flat.numpy().data if flat.numel() else b"").hexdigest()


def row_digests(tensor: torch.Tensor) -> list[str]:
    """Return a SHA-1 of each row of a batch."""
    with torch.no_grad():
        rows = local(tensor).cpu().contiguous()
        if rows.ndim == 0 or not rows.numel():
            return []
        flat = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return [hashlib.sha1(row.data).hexdigest()[:16] for row in flat]


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def moved(tree: Any) -> Any:
    """Return a copy of an argument tree for a pickle: tensors on the host; other objects as they are, if possible."""
    if isinstance(tree, torch.Tensor):
        return kept(tree)
    if type(tree) in (list, tuple):
        return type(tree)(moved(one) for one in tree)
    if isinstance(tree, dict) or (hasattr(tree, "keys") and hasattr(tree, "__getitem__")):
        return {key: moved(tree[key]) for key in tree.keys()}
    if isinstance(tree, (int, float, str, bool, type(None), torch.dtype, torch.Size)):
        return tree
    try:
        pickle.dumps(tree)
    except Exception:
        raise TypeError(f"an argument of type {type(tree).__name__}") from None
    return tree


def random_states() -> dict[str, Any]:
    """Return the states of the process's random generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Set the random generators to recorded states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def place_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return where a rank's part lies in the whole tensor: shape, offset and placements. None for a whole tensor."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    kinds = [type(one).__name__ for one in tensor.placements]
    return {"shape": tuple(tensor.shape), "offset": tuple(offset), "size": tuple(shape), "placements": kinds}


class Sketch:
    """Elements of a tensor at fixed places, and its norm: enough to tell two tensors apart."""

    @staticmethod
    def of(tensor: torch.Tensor) -> dict[str, Any]:
        values = local(tensor)
        flat = values.reshape(-1)
        if flat.numel() * flat.element_size() > _MOST_OUTPUT:
            places = torch.linspace(0, flat.numel() - 1, 4096, dtype=torch.float64, device=flat.device).long()
            flat = flat[places]
        norm = values.double().norm().item() if values.is_floating_point() else 0.0
        return {"shape": tuple(values.shape), "norm": norm, "values": flat.to("cpu", copy=True)}


class Modules:
    """Outermost modules in the order of their first calls, and keys of their parameters."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.places: dict[int, int] = {}
        self.keys: dict[int, str] = {}  # id of a parameter -> "MODULE:NAME"
        self.parameters: dict[str, torch.Tensor] = {}

    def number(self, module: nn.Module) -> int:
        """Return a module's number; a new module's parameters become known."""
        if id(module) not in self.places:
            self.places[id(module)] = len(self.modules)
            self.modules.append(module)
        number = self.places[id(module)]
        for name, parameter in module.named_parameters():
            if id(parameter) not in self.keys or self.parameters.get(self.keys[id(parameter)]) is not parameter:
                key = f"{number}:{plain_name(name)}"
                self.keys[id(parameter)], self.parameters[key] = key, parameter
        return number


class Recorder:
    """Recorder of a rank's first steps."""

    def __init__(self, folder: str, num_steps: int, keeps: int) -> None:
        self.folder, self.num_steps, self._most_bytes = folder, num_steps, keeps
        self.known = Modules()
        self.optimizers: list[Any] = []
        self.steps: list[dict[str, Any]] = []
        self.unseen: list[str] = []  # what could not be observed, in words
        self.samplers: list[dict[str, Any]] = []
        self.loaders: list[dict[str, Any]] = []
        self.scheduled = 0
        self._depth = threading.local()
        self._stored: dict[str, str] = {}  # digest of each parameter's newest stored values
        self._local: dict[str, torch.Tensor] = {}
        self._passes: dict[str, list[int]] = {}
        self._hooked: dict[str, Any] = {}
        self.num_backwards = 0
        self._in_backward = 0
        self.seconds = 0.0
        self._done = False
        self._bytes = 0
        self._new_step()

    @property
    def rank(self) -> int:
        """This process's rank, which a script that starts its processes itself may set late."""
        return torch.distributed.get_rank() if is_joined() else int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        """The number of processes."""
        return torch.distributed.get_world_size() if is_joined() else int(os.environ.get("WORLD_SIZE", "1"))

    # ------------------------------------------------------------------------------------------------- the step

    def _new_step(self) -> None:
        self.step: dict[str, Any] = {
            "calls": [],
            "losses": [],
            "clips": [],
            "scales": [],
            "unscaled": False,
            "scheduled": 0,
            "weights": {},
            "buffers": {},
            "places": {},
        }

    def note(self, what: str) -> None:
        """Note once what cannot be observed."""
        if what not in self.unseen:
            self.unseen.append(what)

    def _store(self, into: dict[str, torch.Tensor], key: str, tensor: torch.Tensor) -> str:
        """Store a parameter's values if they are not the newest stored ones; return their digest."""
        now = digest(tensor)
        if self._stored.get(key) != now:
            self._stored[key] = now
            if self.rank == 0 or is_sharded(tensor):
                into[key] = kept(tensor)
        return now

    # --------------------------------------------------------------------------------------------------- forward

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note the begin of a module's forward, before any of its own hooks."""
        if self._done or getattr(self._depth, "paused", False):
            return
        if any(kind.__name__ in WRAPPERS for kind in type(module).__mro__) or is_loss(module):
            return
        depth = getattr(self._depth, "now", 0)
        self._depth.now = depth + 1
        if depth:
            return
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            self._depth.call = None
            return
        began = time.perf_counter()
        number = self.known.number(module)
        first = not self.step["calls"]
        weights: dict[str, str] = {}
        for parameter in module.parameters():
            key = self.known.keys[id(parameter)]
            if parameter.requires_grad and key not in self._hooked:
                self._hooked[key] = parameter
                if not is_sharded(parameter):
                    parameter.register_hook(functools.partial(self._gradient, key, parameter))
            weights[key] = self._store(self.step["weights"], key, parameter)
            place = place_of(parameter)
            if place is not None:
                self.step["places"][key] = place
        buffers = {f"{number}:{plain_name(n)}": b for n, b in module.named_buffers()}
        if first or not any(call["module"] == number for call in self.step["calls"]):
            self.step["buffers"] |= {k: kept(b) for k, b in buffers.items() if b.numel() < 1 << 20}
        kind = next((p.device.type for p in module.parameters()), "cpu")
        self._depth.call = {
            "module": number,
            "random": random_states(),
            "training": module.training,
            "unlike": [n for n, m in module.named_modules() if m.training != module.training],
            "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            "weights": hashlib.sha1("".join(weights.values()).encode()).hexdigest(),
            "passes": {},
        }
        self.seconds += time.perf_counter() - began

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note the end of a module's forward: arguments, output, and hooks for the gradients of the output."""
        if self._done or getattr(self._depth, "paused", False):
            return
        if any(kind.__name__ in WRAPPERS for kind in type(module).__mro__) or is_loss(module):
            return
        depth = self._depth.now = getattr(self._depth, "now", 1) - 1
        call = getattr(self._depth, "call", None)
        if depth or call is None:
            return
        self._depth.call = None
        began = time.perf_counter()
        try:
            call["args"], call["kwargs"] = moved(args), moved(dict(kwargs))
        except TypeError as error:
            self.note(f"{type(module).__name__} is called with {error}, which is not recorded: it is not replayed")
            call["args"] = None
        inputs = [t for t in tensors_of((args, kwargs)) if t.ndim]
        call["rows"] = row_digests(inputs[0]) if inputs else []
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        call["outputs"] = [Sketch.of(t) for t in outputs]
        call["number"] = len(self.step["calls"])
        self.step["calls"].append(call)
        for place, tensor in enumerate(outputs):
            tensor.register_hook(functools.partial(self._output_gradient, call, place))
        self.seconds += time.perf_counter() - began

    def _output_gradient(self, call: dict[str, Any], place: int, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        of_pass = call["passes"].setdefault(self.num_backwards, {})
        of_pass[place] = kept(gradient) if place not in of_pass else of_pass[place] + kept(gradient)
        self.seconds += time.perf_counter() - began

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward as torch does, and count it."""
        outer = not self._in_backward
        self.num_backwards += outer
        self._in_backward += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._in_backward -= 1

    def _gradient(self, key: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        if parameter.grad is None:
            self._forget(key)
        values = kept(gradient)
        self._local[key] = self._local[key] + values if key in self._local else values
        passes = self._passes.setdefault(key, [])
        if not passes or passes[-1] != self.num_backwards:
            passes.append(self.num_backwards)
        self.seconds += time.perf_counter() - began

    def _forget(self, key: str) -> None:
        self._local.pop(key, None)
        self._passes.pop(key, None)

    def cleared(self, parameters: Any) -> None:
        """Note that gradients are set to zero."""
        for parameter in parameters:
            key = self.known.keys.get(id(parameter))
            if key is not None:
                self._forget(key)

    # ---------------------------------------------------------------------------------------------------- update

    def number_of(self, optimizer: Any) -> int:
        for place, own in enumerate(self.optimizers):
            if own is optimizer:
                return place
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def before_update(self, optimizer: Any) -> None:
        """Note gradients, rates and weights as the optimizer gets them."""
        if self._done:
            return
        began = time.perf_counter()
        step = self.step
        step["optimizer"] = self.number_of(optimizer)
        step["gradients"], step["local"], step["groups"], step["digests"] = {}, {}, [], {}
        step["passes"] = {}
        step["strange"] = 0  # parameters of the optimizer that no observed module has
        for group in optimizer.param_groups:
            values = {n: v for n, v in group.items() if isinstance(v, (int, float, bool, tuple, str, type(None)))}
            values |= {n: v.item() for n, v in group.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
            names = []
            for parameter in group["params"]:
                key = self.known.keys.get(id(parameter))
                if key is None or self.known.parameters.get(key) is not parameter:
                    step["strange"] += 1
                    continue
                names.append(key)
                place = place_of(parameter)
                if place is not None:
                    step["places"][key] = place
                self._store(step["weights"], key, parameter)
                if parameter.grad is None:
                    continue
                step["gradients"][key] = kept(parameter.grad)
                step["digests"][key] = digest(parameter.grad)
                if key in self._local:
                    step["local"][key] = self._local[key]
                    step["passes"][key] = list(self._passes.get(key, ()))
            step["groups"].append({"names": names, "values": values})
        step["backwards"] = self.num_backwards
        self.seconds += time.perf_counter() - began

    def after_update(self, optimizer: Any) -> None:
        """Note weights after an update, and leave after the last step."""
        if self._done or "groups" not in self.step:
            return
        began = time.perf_counter()
        after, digests = {}, {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = self.known.keys.get(id(parameter))
                if key is not None:
                    digests[key] = self._store(after, key, parameter)
        self.step["after"], self.step["after_digests"] = after, digests
        self.steps.append(self.step)
        self._new_step()
        self.seconds += time.perf_counter() - began
        if len(self.steps) >= self.num_steps:
            self.write()
            self._leave()

    # ------------------------------------------------------------------------------------------------------- end

    def write(self) -> None:
        """Write the record. Later calls do nothing."""
        if self._done or not (self.steps or "RANK" in os.environ):
            return
        self._done = True
        record = {
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "torch": torch.__version__,
            "libraries": {
                name: getattr(sys.modules[name], "__version__", "?")
                for name in ("accelerate", "transformers", "pytorch_lightning", "lightning", "deepspeed", "keras")
                if name in sys.modules
            },
            "modules": [
                {
                    "class": type(module).__name__,
                    "names": [plain_name(n) for n, _ in module.named_parameters()],
                    "shapes": [tuple(p.shape) for p in module.parameters()],
                }
                for module in self.known.modules
            ],
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "steps": self.steps,
            "unfinished": {"calls": len(self.step["calls"])},
            "samplers": self.samplers,
            "loaders": self.loaders,
            "unseen": self.unseen,
            "seconds": self.seconds,
        }
        path = os.path.join(self.folder, f"rank-{self.rank}.pt")
        torch.save(record, path + ".new")
        os.replace(path + ".new", path)

    def _leave(self) -> None:
        """End the process once every rank has written, without exit handlers, which would wait for peers."""
        paths = [os.path.join(self.folder, f"rank-{rank}.pt") for rank in range(self.world)]
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end and not all(map(os.path.exists, paths)):
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def is_joined() -> bool:
    """Return True if this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_loss(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.loss"


# ------------------------------------------------------------------------------------------------------------ replay


class Replay:
    """Replay of a record in one process, which takes the script's modules and optimizers over."""

    def __init__(self, records: str, folder: str, recorder: Recorder) -> None:
        self._records, self.folder, self._recorder = records, folder, recorder
        self.failures: list[str] = []

    def take_over(self, module: nn.Module) -> None:
        """Replay every recorded step, write the results, and end the process."""
        code = 0
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", enabled=False))
                torch.clear_autocast_cache()
                result = self._replayed(module)
        except Exception as error:
            import traceback

            traceback.print_exc()
            result, code = {"error": f"{type(error).__name__}: {error}"}, 1
        path = os.path.join(self.folder, "replay.pt")
        torch.save(result, path + ".new")
        os.replace(path + ".new", path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _replayed(self, module: nn.Module) -> dict[str, Any]:
        names = sorted(n for n in os.listdir(self._records) if n.startswith("rank-") and n.endswith(".pt"))
        records = [torch.load(os.path.join(self._records, n), weights_only=False) for n in names]
        records.sort(key=lambda record: record["rank"])
        first = records[0]
        modules = self._modules(first["modules"], module)
        keys: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for number, own in enumerate(modules):
            if own is None:
                continue
            keys |= {f"{number}:{plain_name(n)}": p for n, p in own.named_parameters()}
            buffers |= {f"{number}:{plain_name(n)}": b for n, b in own.named_buffers()}
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
        import gc

        candidates = [called] + [m for m in gc.get_objects() if isinstance(m, nn.Module) and m is not called]
        found: list[nn.Module | None] = []
        for about in recorded:
            same = [
                m
                for m in candidates
                if type(m).__name__.removeprefix("FSDP") == about["class"].removeprefix("FSDP")
                and not any(m is own for own in found)
                and [plain_name(n) for n, _ in m.named_parameters()] == about["names"]
                and [tuple(p.shape) for p in m.parameters()] == about["shapes"]
            ]
            if not same:
                self.failures.append(f"{about['class']} is not there again in one process")
            found.append(same[0] if same else None)
        return found

    def _optimizers(self, record: dict[str, Any], by_id: dict[int, str]) -> dict[int, Any]:
        """Return the script's own optimizer for each recorded one, by its class and parameters."""
        found: dict[int, Any] = {}
        for place, name in enumerate(record["optimizers"]):
            groups = next((s["groups"] for s in record["steps"] if s.get("optimizer") == place), None)
            if groups is None:
                continue
            wanted = [own["names"] for own in groups]
            for optimizer in self._recorder.optimizers:
                own = [[by_id.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
                if type(optimizer).__name__ == name and own == wanted:
                    found[place] = optimizer
                    break
            else:
                self.failures.append(f"no {name} of the same parameters is there in one process")
        return found

    @staticmethod
    def _load(keys: dict[str, torch.Tensor], ranks: list[dict[str, torch.Tensor]], places: list[dict[str, Any]]) -> None:
        """Set parameters from the ranks' whole tensors or parts."""
        with torch.no_grad():
            for rank, own in enumerate(ranks):
                for key, value in own.items():
                    if key in keys:
                        part(local(keys[key]), places[rank].get(key)).copy_(value)

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
            restore_random(call["random"])
            kind = next((p.device.type for p in module.parameters()), "cpu")
            place = next((p.device for p in module.parameters()), torch.device("cpu"))
            args, kwargs = on(call["args"], place), on(call["kwargs"], place)
            dtype = getattr(torch, call["autocast"].removeprefix("torch.")) if call["autocast"] else None
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                torch.clear_autocast_cache()
                output = module(*args, **kwargs)
            outputs = [t for t in tensors_of(output) if t.requires_grad]
            compared.append({"call": call["number"], "outputs": [Sketch.of(t) for t in outputs]})
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
                    value = kept(gradient)
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
        order.sort(key=lambda n: -outputs[n].grad_fn._sequence_nr() if outputs[n].grad_fn is not None else 0)
        for place, later in enumerate(order):
            earlier = [n for n in order[place + 1 :]]
            if not earlier:
                break
            through = torch.autograd.grad(
                outputs[later], [outputs[n] for n in earlier], given[later], retain_graph=True, allow_unused=True
            )
            for n, flow in zip(earlier, through, strict=True):
                if flow is not None:
                    given[n] = given[n] - flow
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
                part(local(keys[key].grad), place).copy_(gradient)
        optimizer.step()
        return {key: kept(keys[key]) for key in names}


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


# ----------------------------------------------------------------------------------------------------------- patches


def start() -> None:
    """Install the observer in this process, as the variable SHOAL_OBSERVER says."""
    options = json.loads(os.environ["SHOAL_OBSERVER"])
    recorder = Recorder(options["folder"], options["steps"], options.get("bytes", 1 << 30))
    replay = Replay(options["of"], options["folder"], recorder) if options["mode"] == "replay" else None
    install(recorder, replay)
    if replay is None:
        atexit.register(recorder.write)


def install(recorder: Recorder, replay: Replay | None) -> None:
    """Install the hooks of a recorder, or those that a replay waits for."""
    from torch.nn.modules import module as nn_module
    from torch.optim import lr_scheduler
    from torch.optim.optimizer import (
        Optimizer,
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def before_forward(module: nn.Module, args: Any) -> None:
        if replay is None:
            recorder.enter(module, args)
        elif not (any(kind.__name__ in WRAPPERS for kind in type(module).__mro__) or is_loss(module)):
            if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                handle.remove()
                replay.take_over(module)

    def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorder.leave(module, args, kwargs, output)

    handle = nn_module.register_module_forward_pre_hook(before_forward)
    made = Optimizer.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        recorder.number_of(self)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    if replay is not None:
        _replace_sharding()
        return
    nn_module.register_module_forward_hook(after_forward, with_kwargs=True, always_call=True)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the optimizer itself comes first
        if not callable(closure):
            recorder.before_update(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            recorder.before_update(optimizer)
            return loss

        return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": observed})

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.after_update(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)

    def around(owner: Any, name: str, wrap: Any) -> None:
        if hasattr(owner, name):
            setattr(owner, name, functools.wraps(getattr(owner, name))(functools.partial(wrap, getattr(owner, name))))

    around(torch.autograd, "backward", recorder.backward)

    def method(owner: Any, name: str, before: Any) -> None:
        """Call `before(self, ...)` before a method."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            before(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        setattr(owner, name, call)

    method(Optimizer, "zero_grad", lambda self, *_, **__: recorder.cleared(p for g in self.param_groups for p in g["params"]))
    method(nn.Module, "zero_grad", lambda self, *_, **__: recorder.cleared(self.parameters()))

    def clipped(kind: str, run: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = run(parameters, *args, **kwargs)
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        about = {"kind": kind, "limit": float(limit), "keys": [recorder.known.keys.get(id(p)) for p in parameters]}
        if kind == "norm":
            about["norm"] = float(norm.full_tensor() if is_replicated(norm) else local(norm))
            about["type"] = float(args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0))
        recorder.step["clips"].append(about)
        return norm

    import torch.nn.utils.clip_grad as clip_grad

    for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        wrapped = functools.wraps(getattr(clip_grad, name))(functools.partial(clipped, kind, getattr(clip_grad, name)))
        for owner in (clip_grad, torch.nn.utils):
            setattr(owner, name, wrapped)

    scaler = torch.amp.GradScaler
    method(scaler, "scale", lambda self, *_: recorder.step["scales"].append(float(self.get_scale())))
    method(scaler, "unscale_", lambda self, *_: recorder.step.__setitem__("unscaled", True))

    def loss_function(name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if getattr(recorder, "in_loss", False) or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return result
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(target, torch.Tensor):
            return result
        count = target.numel()
        if LOSSES[name] is not None and not target.is_floating_point():
            count = int((target != kwargs.get("ignore_index", -100)).sum())
        elif LOSSES[name] is not None and target.ndim > 1:
            count = target.numel() // target.shape[1]
        about = {"function": name, "count": count, "reduction": kwargs.get("reduction", "mean"), "gradient": None}
        about["call"] = len(recorder.step["calls"]) - (getattr(recorder._depth, "now", 0) == 0)
        recorder.step["losses"].append(about)

        def received(gradient: torch.Tensor) -> None:
            about["gradient"] = (about["gradient"] or 0.0) + float(local(gradient).double().sum())

        result.register_hook(received)
        return result

    import torch.nn.functional as functional

    for name in LOSSES:
        around(functional, name, functools.partial(_once, recorder, loss_function, name))

    from torch.utils.data import DataLoader

    def iterated(self: Any) -> None:
        inner = self.sampler if self.batch_sampler is None else getattr(self.batch_sampler, "sampler", self.sampler)
        recorder.loaders.append(
            {"loader": id(self), "step": len(recorder.steps), "sampler": type(inner).__name__, "number": len(recorder.loaders)}
        )

    method(DataLoader, "__iter__", iterated)
    from torch.utils.data.distributed import DistributedSampler

    def sampled(self: Any) -> None:
        names = ("epoch", "seed", "rank", "num_replicas", "shuffle", "drop_last")
        about = {name: getattr(self, name, None) for name in names}
        recorder.samplers.append({**about, "sampler": id(self), "step": len(recorder.steps)})

    method(DistributedSampler, "__iter__", sampled)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and "step" in vars(kind):
            method(kind, "step", functools.partial(_scheduled, recorder))


def _scheduled(recorder: Recorder, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    metric = args[0] if args and type(scheduler).__name__ == "ReduceLROnPlateau" else kwargs.get("metrics")
    if metric is not None:
        recorder.step.setdefault("metrics", []).append(float(metric))
    recorder.step["scheduled"] += 1


def _once(recorder: Recorder, observed: Any, name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a loss function, observed unless another observed one calls it."""
    if getattr(recorder._depth, "loss", False):
        return run(*args, **kwargs)
    recorder._depth.loss = True
    try:
        return observed(name, run, *args, **kwargs)
    finally:
        recorder._depth.loss = False


def is_replicated(tensor: Any) -> bool:
    """Return True for a sharded scalar whose whole value every rank can compute by a collective call."""
    return False and is_sharded(tensor)


def _replace_sharding() -> None:
    """Let `fully_shard` return modules as they are: one process has them whole."""
    import torch.distributed.fsdp as fsdp

    class Whole:
        def __getattr__(self, name: str) -> Any:
            if name.startswith(("set_", "reshard", "unshard")):
                return lambda *args, **kwargs: None
            raise AttributeError(name)

    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        for own in module if isinstance(module, (list, tuple)) else [module]:
            for name in (
                "set_requires_gradient_sync",
                "set_is_last_backward",
                "set_reshard_after_backward",
                "set_reshard_after_forward",
                "set_requires_all_reduce",
                "set_modules_to_forward_prefetch",
                "set_modules_to_backward_prefetch",
                "set_gradient_divide_factor",
                "set_unshard_in_backward",
                "reshard",
                "unshard",
            ):
                if not hasattr(own, name):
                    setattr(type(own), name, lambda self, *a, **k: None)
        return module

    fsdp.fully_shard = fully_shard
