"""Observer of an unchanged training script, within the script's own process. It needs torch alone.

In record mode each rank writes what its first steps did: samples, inputs, random states, gradients of outputs, local
gradients, gradients as the optimizer gets them, clipping, rates, weights. The observer makes no collective call,
changes no value and draws no number. When all ranks have written, the processes end.

In replay mode one process runs the script up to its first forward, and the observer takes over: it computes each
recorded forward again from the recorded weights, and each recorded update with the script's own optimizer.
"""

import atexit
import functools
import gc
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn


def beside(name: str) -> Any:
    """Return a module of this folder, in an environment that may be without shoal."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_shoal_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"_shoal_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING or __name__ != "_shoal_observer":
    from shoal.programs import parts
else:  # within a script, whose environment may be without shoal
    parts = beside("parts")

# Modules that only call another one; the outermost module is looked for inside of them.
WRAPPERS = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"),
    *("_FabricModule", "DeepSpeedEngine", "LightningModule"),
}
# Wrappers whose parameters and gradients cannot be read.
UNREAD = {"DeepSpeedEngine"}
OF_CLASSES = ("cross_entropy", "nll_loss")  # losses that ignore targets of one index
LOSSES = (
    *(*OF_CLASSES, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
# Functions of torch.distributed that bring values of other ranks, and parts of torch that use them to shard parameters.
EXCHANGES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "gather", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "all_to_all_single", "recv"),
    *("batch_isend_irecv", "all_gather_object", "broadcast_object_list"),
    *("all_gather_tensor", "all_gather_single", "reduce_scatter_single", "permute_tensor"),
)
SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._functional_collectives")
# Bytes of an output's values that are kept; larger outputs are compared by samples of their elements.
_MOST_OUTPUT = 1 << 20
_WAIT_SECONDS = 60.0


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists, dicts and dataclasses, in order. A tensor that recurs appears once."""
    known: dict[int, torch.Tensor] = {}

    def walk(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            known.setdefault(id(value), value)
        elif is_mapping(value):
            for key in list(value.keys()):
                walk(value[key], depth + 1)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one, depth + 1)
        elif depth < 8 and hasattr(value, "__dataclass_fields__"):
            for key in value.__dataclass_fields__:
                walk(getattr(value, key, None), depth + 1)

    walk(tree)
    return list(known.values())


def is_mapping(value: Any) -> bool:
    """Return True for what has values by keys, but not for a tuple with a field of the name `keys`."""
    return isinstance(value, dict) or (callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__"))


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values on this rank."""
    flat = parts.host_copy(tensor).contiguous().view(-1)  # NumPy would forbid to resize the tensor's own storage
    flat = flat.view(torch.uint8) if flat.numel() else flat
    return hashlib.blake2b(flat.numpy().data if flat.numel() else b"", digest_size=16).hexdigest()


def row_digests(tensor: torch.Tensor) -> list[str]:
    """Return a digest of each row of a batch."""
    with torch.no_grad():
        rows = parts.host_copy(tensor)
        if rows.ndim == 0 or rows.layout != torch.strided or rows.is_nested or not rows.numel():
            return []
        flat = rows.contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=8).hexdigest() for row in flat]


def moved(tree: Any) -> Any:
    """Return a copy of an argument tree as data: tensors on the host, mappings as dicts.

    Raises: TypeError for an object that is no data.
    """
    if isinstance(tree, torch.Tensor) and all(one.is_replicate() for one in getattr(tree, "placements", ())):
        return parts.host_copy(tree)
    if type(tree) in (list, tuple):
        return type(tree)(moved(one) for one in tree)
    if is_mapping(tree):
        return {key: moved(value) for key, value in tree.items()}
    if isinstance(tree, (int, float, str, type(None), torch.dtype, torch.Size)):
        return plain(tree)
    raise TypeError(f"an argument of type {type(tree).__name__}")


def plain(value: Any) -> Any:
    """Return a value as one of Python's own types, which a record may contain: NumPy's floats are subclasses."""
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(plain(one) for one in value)
    own = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if own is None else own(value)


def random_states() -> dict[str, Any]:
    """Return the states of the process's random generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(words.astype("int64")), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Set the random generators to recorded states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        kind, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def sketch_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's elements, or those at fixed places if it is large: enough to tell two tensors apart."""
    values = parts.local(tensor)
    flat = values.reshape(-1)
    if flat.numel() * flat.element_size() > _MOST_OUTPUT:
        places = torch.linspace(0, flat.numel() - 1, 4096, dtype=torch.float64, device=flat.device).long()
        flat = flat[places]
    return {"place": parts.place_of(tensor), "values": flat.to("cpu", copy=True)}


class ScriptParts:
    """Outermost modules in the order of their first calls, parts of their parameters, and optimizers."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.beside: list[list[int]] = []  # for each module, the ranks that compute parts of one forward
        self.places: dict[int, int] = {}
        self.wrappers: dict[int, nn.Module] = {}  # around a module: by the id of this
        self.parts: dict[str, parts.ParameterPart] = {}
        self.owners: dict[int, dict[str, None]] = {}  # keys of what a tensor of an optimizer has, by its id
        self.optimizers: list[Any] = []

    def number(self, module: nn.Module) -> int:
        """Return a module's number; a new module's parameters become known."""
        if id(module) not in self.places:
            self.places[id(module)] = len(self.modules)
            self.modules.append(module)
            self.beside.append(parts.tensor_ranks(module))
        number = self.places[id(module)]
        for part in parts.parts_of(self.wrappers.get(id(module), module), number):
            self.owners.setdefault(id(part.owner), {})[part.key] = None
            self.parts[part.key] = part
        return number

    def of(self, tensor: torch.Tensor) -> list[parts.ParameterPart]:
        """Return the parts of parameters that a tensor of an optimizer has, of those that modules still use."""
        own = [self.parts[key] for key in self.owners.get(id(tensor), ())]
        return [part for part in own if part.owner is tensor]

    def of_module(self, number: int) -> list[parts.ParameterPart]:
        """Return the parts of a module's parameters."""
        return [part for key, part in self.parts.items() if key.startswith(f"{number}:")]

    def state(self, number: int, stored: dict[str, str]) -> str:
        """Return one digest of a module's weights from the digest of each."""
        digests = "".join(stored.get(part.key, "") for part in self.of_module(number))
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    def number_of(self, optimizer: Any) -> int:
        """Return an optimizer's number, in the order of their construction."""
        for place, own in enumerate(self.optimizers):
            if own is optimizer:
                return place
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1


def new_step() -> dict[str, Any]:
    """Return the record of a step without anything in it."""
    lists: dict[str, Any] = {name: [] for name in ("calls", "losses", "clips", "scales", "erased")}
    return {**lists, "unscaled": False, "weights": {}, "buffers": {}, "places": {}, "summed": {}, "carried": {}}


class ScriptRecorder:
    """Recorder of a rank's first steps."""

    def __init__(self, folder: str, num_steps: int) -> None:
        self.folder, self.num_steps = folder, num_steps
        self.known = ScriptParts()
        self.steps: list[dict[str, Any]] = []
        self.unseen: list[str] = []  # what could not be observed, in words
        self.unread: set[str] = set()  # wrappers whose gradients cannot be read
        self.samplers: list[dict[str, Any]] = []
        self.loaders: list[dict[str, Any]] = []
        self.thread = threading.local()
        self._stored: dict[str, str] = {}  # digest of each parameter's newest stored values
        self._local: dict[str, torch.Tensor] = {}
        self._passes: dict[str, list[int]] = {}
        self._large: dict[str, tuple[int, int]] = {}  # identity and version of each buffer's newest stored values
        self._spent: set[str] = set()  # parameters whose newest gradient an optimizer has got
        self._hooked: dict[str, Any] = {}
        self.num_backwards = 0
        self._in_backward = self.in_update = 0
        self._first_backward = -1  # the step in which the newest first backward was
        self.in_scaler = self.by_metric = False  # by_metric: a scheduler follows a number
        self.seconds = 0.0
        self._done = False
        self._process = os.getpid()
        self.step = new_step()
        self.rank, self.world = parts.own_rank(), num_ranks()

    # ------------------------------------------------------------------------------------------------- the step

    def note(self, what: str) -> None:
        """Note once what cannot be observed."""
        if what not in self.unseen:
            self.unseen.append(what)

    def _store(self, into: dict[str, torch.Tensor], part: parts.ParameterPart) -> str:
        """Store a part's weights if they are not the newest stored ones; return their digest."""
        weights = part.weights()
        now = digest(weights)
        if part.place is not None:
            self.step["places"][part.key] = part.place
        if self._stored.get(part.key) != now:
            self._stored[part.key] = now
            if parts.own_rank() == 0 or part.place is not None:
                into[part.key] = parts.host_copy(weights)
        return now

    # --------------------------------------------------------------------------------------------------- forward

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note the begin of a module's forward, before any of its own hooks. A backward may compute it again."""
        if self._done or self._in_backward:
            return
        if is_passed_by(module):
            self.unread.update(UNREAD & {type(module).__name__})
            if type(module).__name__ == "FullyShardedDataParallel":
                if not self.known.wrappers:
                    kind: Any = type(module)
                    kind.clip_grad_norm_ = functools.partialmethod(clip_whole, self, kind.clip_grad_norm_)
                self.known.wrappers.setdefault(id(module.module), module)
            return
        depth = getattr(self.thread, "now", 0)
        self.thread.now = depth + 1
        if depth:
            return
        if not is_trained(module, args):
            self.thread.call = None
            return
        began = time.perf_counter()
        self.thread.args = args  # later hooks of the module may change them, and the replay has such hooks itself
        number = self.known.number(module)
        first = not self.step["calls"]
        weights: dict[str, str] = {}
        dtypes: dict[str, str] = {}
        for part in self.known.of_module(number):
            if part.owner.requires_grad and self._hooked.get(part.key) is not part.owner:
                self._hooked[part.key] = part.owner
                if part.place is None:
                    part.owner.register_hook(functools.partial(self._gradient, part.key, part.owner))
            weights[part.key] = self._store(self.step["weights"], part)
            if part.dtype != part.weights().dtype:
                dtypes[part.key] = str(part.dtype)
        buffers = {f"{number}:{parts.plain_name(n)}": b for n, b in module.named_buffers()}
        if first or not any(call["module"] == number for call in self.step["calls"]):
            for key, buffer in buffers.items():
                state = (id(buffer), buffer._version)
                if buffer.numel() < 1 << 20 or self._large.get(key) != state:
                    self._large[key] = state
                    self.step["buffers"][key] = parts.host_copy(buffer)
        kind = next((p.device.type for p in module.parameters()), "cpu")
        self.thread.call = {
            "module": number,
            "random": random_states(),
            "training": module.training,
            "unlike": [n for n, m in module.named_modules() if m.training != module.training],
            "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            "weights": weights if not self.steps else {},
            "dtypes": dtypes,
            "passes": {},
            "gradient_places": {},
            "exchanges": any(isinstance(m, nn.SyncBatchNorm) and m.training for m in module.modules()),
            "digest": self.known.state(number, self._stored),
        }
        self.seconds += time.perf_counter() - began

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Note the end of a module's forward: arguments, output, and hooks for the gradients of the output."""
        if self._done or self._in_backward or is_passed_by(module):
            return
        depth = self.thread.now = getattr(self.thread, "now", 1) - 1
        call = getattr(self.thread, "call", None)
        if depth or call is None:
            return
        self.thread.call = None
        began = time.perf_counter()
        args, self.thread.args = self.thread.args, None
        try:
            call["args"], call["kwargs"] = moved(args), moved(dict(kwargs))
        except TypeError as error:
            self.note(f"{type(module).__name__} is called with {error}, which is not recorded: it is not replayed")
            call["args"] = None
        inputs = [t for t in tensors_of((args, kwargs)) if t.ndim]
        columns = [row_digests(t) for t in inputs if len(t) == len(inputs[0])]
        call["rows"] = ["".join(row) for row in zip(*columns, strict=False)]
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        call["outputs"] = [sketch_of(t) for t in outputs]
        call["number"] = len(self.step["calls"])
        call["draws"] = not torch.equal(call["random"]["torch"], torch.get_rng_state())
        self.step["calls"].append(call)
        for place, tensor in enumerate(outputs):
            tensor.register_hook(functools.partial(self._output_gradient, call, place))
        self.seconds += time.perf_counter() - began

    def _output_gradient(self, call: dict[str, Any], place: int, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        of_pass = call["passes"].setdefault(self.num_backwards, {})
        values = parts.host_copy(gradient)
        of_pass[place] = of_pass[place] + values if place in of_pass else values
        call["gradient_places"][place] = parts.place_of(gradient)
        self.seconds += time.perf_counter() - began

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward as torch does, and count it."""
        outer = not self._in_backward
        self.num_backwards += outer
        if outer and not self._done and self._first_backward != len(self.steps):
            self._first_backward = len(self.steps)
            for part in self.known.parts.values():
                before = part.gradient() if part.place is not None else None
                if before is not None and parts.local(before).any():
                    self.step["carried"][part.key] = parts.host_copy(before)
        self._in_backward += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._in_backward -= 1

    def _gradient(self, key: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        if parameter.grad is None:
            self.cleared([parameter])
        values = parts.host_copy(gradient)
        self._spent.discard(key)
        self._local[key] = self._local[key] + values if key in self._local else values
        passes = self._passes.setdefault(key, [])
        if not passes or passes[-1] != self.num_backwards:
            passes.append(self.num_backwards)
        self.seconds += time.perf_counter() - began

    def cleared(self, parameters: Any) -> None:
        """Note that gradients are set to zero."""
        for parameter in parameters:
            for part in self.known.of(parameter):
                if part.key in self._local and part.key not in self._spent:
                    self.step["erased"].append(part.key)
                self._local.pop(part.key, None)
                self._passes.pop(part.key, None)

    # ---------------------------------------------------------------------------------------------------- update

    def before_update(self, optimizer: Any) -> None:
        """Note gradients, rates and weights as the optimizer gets them."""
        if self._done:
            return
        began = time.perf_counter()
        step = self.step
        self.rank, self.world = parts.own_rank(), num_ranks()  # a script may leave its process group before it ends
        step["optimizer"] = self.known.number_of(optimizer)
        step["gradients"], step["local"], step["passes"], step["groups"] = {}, {}, {}, []
        step["raw"] = bool(step["scales"]) and not step["unscaled"] and not self.in_scaler
        step["strange"] = 0  # parameters of the optimizer that no observed module has
        for group in optimizer.param_groups:
            values = {n: plain(v) for n, v in group.items() if isinstance(v, (int, float, tuple, str, type(None)))}
            values |= {n: v.item() for n, v in group.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
            names = []
            for parameter in group["params"]:
                own = self.known.of(parameter)
                step["strange"] += not own
                for part in own:
                    names.append(part.key)
                    self._store(step["weights"], part)
                    gradient = part.gradient()
                    if gradient is None:
                        continue
                    step["gradients"][part.key] = parts.host_copy(gradient)
                    self._spent.add(part.key)
                    summed = parts.place_of(gradient)
                    if summed is not None:
                        step["summed"][part.key] = summed["summed"]
                    if part.key in self._local:
                        step["local"][part.key] = self._local[part.key]
                        step["passes"][part.key] = list(self._passes.get(part.key, ()))
            step["groups"].append({"names": names, "values": values})
        numbers = {call["module"] for call in step["calls"]}
        step["states"] = {number: self.known.state(number, self._stored) for number in numbers}
        self.seconds += time.perf_counter() - began

    def after_update(self, optimizer: Any) -> None:
        """Note weights after an update, and leave after the last step."""
        if self._done or "groups" not in self.step:
            return
        began = time.perf_counter()
        after: dict[str, torch.Tensor] = {}
        digests: dict[str, str] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digests |= {part.key: self._store(after, part) for part in self.known.of(parameter)}
        self.step["after"], self.step["after_digests"] = after, digests
        self.steps.append(self.step)
        self.step = new_step()
        self.seconds += time.perf_counter() - began
        if len(self.steps) >= self.num_steps:
            self.write()
            leave(self.folder, self.world)

    # ------------------------------------------------------------------------------------------------------- end

    def skip(self) -> None:
        """Drop what led to an update that a loss scaler has left out."""
        self._spent.update(self._local)
        same = ("weights", "buffers", "places")
        self.step = {**new_step(), **{name: self.step[name] for name in same}}

    def write(self) -> None:
        """Write the record. Later calls do nothing."""
        path = os.path.join(self.folder, f"rank-{self.rank}.pt")
        helps = multiprocessing.parent_process() is not None or os.path.exists(path)  # a loader's worker, or a launcher
        if self._done or os.getpid() != self._process or (not self.steps and helps):
            return
        self._done = True
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None and any(isinstance(one, stages._PipelineStageBase) for one in gc.get_objects()):
            self.unread.add("PipelineStage")
        record = {
            "rank": self.rank,
            "libraries": {
                name: str(getattr(sys.modules[name], "__version__", "?"))
                for name in ("accelerate", "transformers", "pytorch_lightning", "lightning", "deepspeed", "keras")
                if name in sys.modules
            },
            "modules": [
                {
                    "class": type(module).__name__,
                    "shapes": {p.key.partition(":")[2]: p.shape for p in self.known.of_module(number)},
                    "beside": self.known.beside[number],
                    "casts": parts.casts_of(module),
                }
                for number, module in enumerate(self.known.modules)
            ],
            "optimizers": [type(optimizer).__name__ for optimizer in self.known.optimizers],
            "steps": self.steps,
            "samplers": self.samplers,
            "loaders": self.loaders,
            "unseen": self.unseen,
            "unread": sorted(self.unread),
            "by_metric": self.by_metric,
            "redirected": dict(getattr(sys.modules.get("_shoal_on_cpu"), "redirected", {})),
            "seconds": self.seconds,
        }
        torch.save(record, path + ".new")  # noqa: TID251  (read with weights_only: data, no code)
        os.replace(path + ".new", path)


def leave(folder: str, world: int) -> None:
    """End the process once every rank has written, without exit handlers, which would wait for peers."""
    paths = [os.path.join(folder, f"rank-{rank}.pt") for rank in range(world)]
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end and not all(map(os.path.exists, paths)):
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def num_ranks() -> int:
    """Return the number of processes."""
    return torch.distributed.get_world_size() if parts.is_joined() else int(os.environ.get("WORLD_SIZE", "1"))


def is_passed_by(module: nn.Module) -> bool:
    """Return True for wrappers, inside of which the outermost module is looked for, and for losses."""
    if type(module).__module__ == "torch.nn.modules.loss":
        return True
    return any(kind.__name__ in WRAPPERS for kind in type(module).__mro__)


def is_trained(module: nn.Module, args: Any) -> bool:
    """Return True if a forward of a module may have gradients of its parameters. Keras calls layers without values."""
    if any(type(one).__name__ == "KerasTensor" for one in args):
        return False
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


# ----------------------------------------------------------------------------------------------------------- patches


def observe() -> bool:
    """Observe this process for `shoal verify --script`: the first line of a script that its hooks do not reach.

    Such is a notebook, or a worker of a launcher that sets PYTHONPATH anew. Return False, with a note, if no
    verification is under way, which the variable SHOAL_OBSERVER says.
    """
    if "_shoal_observer" in sys.modules:  # the hooks have reached it
        return True
    if "SHOAL_OBSERVER" not in os.environ:
        from shoal.errors import say_note

        say_note("shoal.observe: no shoal verify --script is under way")
        return False
    beside("observer").start()
    return True


def start() -> None:
    """Install the observer in this process, as the variable SHOAL_OBSERVER says."""
    options = json.loads(os.environ["SHOAL_OBSERVER"])
    if not options.get("spawns"):  # what a rank starts, such as workers that load data, is no rank
        os.environ.pop("SHOAL_OBSERVER")
    if options.get("cpu"):
        beside("on_cpu").install(options["world"])
    job = options["mode"] == "job"
    recorder = beside("as_job").install(options) if job else ScriptRecorder(options["folder"], options["steps"])
    note_optimizers(recorder)
    if options["mode"] == "replay":
        beside("replay").ScriptReplay(options, recorder).install()
        return
    observe_steps(recorder)
    observe_calls(recorder)
    observe_data(recorder)
    if not job:
        atexit.register(recorder.write)


def method(owner: Any, name: str, before: Any) -> None:
    """Call `before(self, ...)` before a method of a class."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, name, call)


def around(owner: Any, name: str, wrap: Any) -> None:
    """Replace a function of a module by `wrap(function, ...)`."""
    if hasattr(owner, name):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(functools.partial(wrap, original)))


def note_optimizers(recorder: ScriptRecorder) -> None:
    """Let the recorder know every optimizer in the order of their construction."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder.known.number_of(self)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


def observe_steps(recorder: ScriptRecorder) -> None:
    """Install the hooks of forwards, backwards and optimizer steps."""
    from torch.nn.modules import module as nn_module
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    nn_module.register_module_forward_pre_hook(recorder.enter)
    nn_module.register_module_forward_hook(recorder.leave, with_kwargs=True, always_call=True)
    around(torch.autograd, "backward", recorder.backward)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        recorder.in_update += 1
        if recorder.in_update > 1:  # the step of an optimizer within another's
            return None
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
        recorder.in_update -= 1
        if not recorder.in_update:
            recorder.after_update(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)

    def zeroed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        recorder.cleared(parameter for group in optimizer.param_groups for parameter in group["params"])

    method(torch.optim.Optimizer, "zero_grad", zeroed)
    method(nn.Module, "zero_grad", lambda self, *args, **kwargs: recorder.cleared(self.parameters()))


def observe_calls(recorder: ScriptRecorder) -> None:
    """Install the wrappers of clipping, loss scaling, loss functions and schedulers."""
    import torch.distributed._functional_collectives as functional_collectives
    import torch.nn.functional as functional
    from torch.nn.utils import clip_grad

    def clipped(kind: str, run: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        result = run(parameters, *args, **kwargs)
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        keys = [part.key for p in parameters for part in recorder.known.of(p)]
        about: dict[str, Any] = {"kind": kind, "limit": float(limit or 0.0), "norm": None, "keys": keys}
        about["raw"] = bool(recorder.step["scales"]) and not recorder.step["unscaled"]
        if kind == "norm" and parts.is_sharded(result) and any(not one.is_replicate() for one in result.placements):
            recorder.note("the norm by which gradients are clipped: each rank has a part of it")
        elif kind == "norm":
            about["norm"] = float(parts.local(result))
        recorder.step["clips"].append(about)
        return result

    for name, kind in (("clip_grad_norm_", "norm"), ("clip_grad_value_", "value")):
        original = getattr(clip_grad, name)
        for owner in (clip_grad, torch.nn.utils):
            setattr(owner, name, functools.wraps(original)(functools.partial(clipped, kind, original)))

    scaler = torch.amp.GradScaler
    step = scaler.step

    @functools.wraps(step)
    def scaled_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, recorder.in_scaler = len(recorder.steps), True
        result = step(self, *args, **kwargs)
        recorder.in_scaler = False
        if len(recorder.steps) == before and self.is_enabled():
            recorder.skip()
        return result

    scaler.step = scaled_step  # type: ignore[method-assign]
    method(scaler, "scale", lambda self, *args: recorder.step["scales"].append(float(self.get_scale())))
    method(scaler, "unscale_", lambda self, *args: recorder.step.__setitem__("unscaled", True))

    def metric_followed(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        recorder.by_metric = True

    def exchanged(run: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(recorder.thread, "call", None)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if call is not None and (".experimental" in caller or not caller.startswith(SHARDING)):
            call["exchanges"] = True
        return run(*args, **kwargs)

    method(torch.optim.lr_scheduler.ReduceLROnPlateau, "__init__", metric_followed)
    for name in EXCHANGES:
        around(torch.distributed, name, exchanged)
        for of_tensors in (name, f"{name}_autograd"):
            around(functional_collectives, of_tensors, exchanged)

    def loss_function(name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder._done or getattr(recorder.thread, "loss", False):  # called by another observed one
            return run(*args, **kwargs)
        recorder.thread.loss = True
        try:
            result = run(*args, **kwargs)
        finally:
            recorder.thread.loss = False
        weigh(recorder, name, result, kwargs.get("target", args[1] if len(args) > 1 else None), kwargs)
        return result

    for name in LOSSES:
        around(functional, name, functools.partial(loss_function, name))


def clip_whole(module: nn.Module, recorder: ScriptRecorder, run: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
    """Clip as FullyShardedDataParallel's own method does, and note it."""
    before = len(recorder.step["clips"])
    norm = run(module, limit, *args, **kwargs)
    if len(recorder.step["clips"]) == before:  # else it has called the function for whole gradients
        about = {"kind": "norm", "limit": float(limit), "norm": float(norm), "keys": list(recorder.known.parts)}
        recorder.step["clips"].append(about)
    return norm


def weigh(recorder: ScriptRecorder, name: str, result: Any, target: Any, options: dict[str, Any]) -> None:
    """Note how many elements a loss counts, and later the gradient of its result."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad or not isinstance(target, torch.Tensor):
        return
    whole, ignored = target.numel(), 0
    count: float = whole
    if name in OF_CLASSES and not target.is_floating_point():
        counted = target[target != options.get("ignore_index", -100)]
        own, ignored = options.get("weight"), whole - counted.numel()
        count = counted.numel() if own is None else float(parts.local(own)[counted].sum())
    elif name in OF_CLASSES and target.ndim > 1:
        count = whole // target.shape[1]
    about: dict[str, Any] = {
        "function": name,
        "count": count,
        "ignored": ignored,
        "weighted": options.get("weight") is not None,
        "reduction": options.get("reduction", "mean"),
        "gradient": None,
    }
    about["call"] = len(recorder.step["calls"]) - (getattr(recorder.thread, "now", 0) == 0)
    recorder.step["losses"].append(about)

    def received(gradient: torch.Tensor) -> None:
        each = parts.local(gradient).double()
        about["gradient"] = (about["gradient"] or 0.0) + float(each.sum())
        if about["reduction"] == "none":  # the script itself chooses the elements that count, and what each weighs
            each = each[each != 0.0]
            about["count"] = each.numel()
            about["weighted"] |= bool(each.numel()) and float(each.max() - each.min()) > 1e-3 * float(each.abs().max())

    result.register_hook(received)


def observe_data(recorder: ScriptRecorder) -> None:
    """Install the wrappers of loaders and samplers."""
    from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
    from torch.utils.data.distributed import DistributedSampler

    shuffled = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

    def iterated(loader: Any) -> None:
        inner = wrapper = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        while wrapper is not None:  # a framework's own batches of a script's batches of its samples
            inner, wrapper = wrapper, getattr(wrapper, "sampler", getattr(wrapper, "batch_sampler", None))
        shuffles = hasattr(inner, "set_epoch") or isinstance(inner, shuffled)
        is_fixed = not shuffles or not getattr(inner, "shuffle", True)
        kind = "SequentialSampler" if is_fixed else type(inner).__name__
        recorder.loaders.append({"loader": id(loader), "step": len(recorder.steps), "sampler": kind})

    def sampled(sampler: Any) -> None:
        names = ("epoch", "seed", "rank", "num_replicas", "shuffle", "drop_last")
        about = {name: getattr(sampler, name, None) for name in names}
        recorder.samplers.append({**about, "sampler": id(sampler), "step": len(recorder.steps)})

    method(DataLoader, "__iter__", iterated)
    method(DistributedSampler, "__iter__", sampled)
