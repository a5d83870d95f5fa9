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
import itertools
import json
import multiprocessing
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_map


def beside(name: str) -> Any:
    """Return a module of this folder, or of a path, in an environment that may be without shoal."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    name = os.path.basename(name)
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
# Bytes of an output's values that are kept; larger outputs are compared by samples of their elements.
_MOST_OUTPUT = 1 << 20
_STATES_BYTES = 10_000  # of the random states before a forward
_WAIT_SECONDS = 60.0
# File by which the parent process asks ranks that hang where they are, and the suffix of their answers.
STALLED = "stalled"


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


def digests(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor's values on this rank: of the sums of their bits by 8 KiB, and of the rest.

    All tensors together cost one concatenation, and on a GPU one copy to the host.
    """
    pieces, ends = [torch.empty(0, dtype=torch.uint8)], [0]
    for values in map(parts.local, tensors):
        flat = (values.to_dense() if values.is_sparse else values).reshape(-1).view(torch.uint8)
        size, summed = flat.numel() >> 13 << 13, 0
        if size:
            flat = flat.clone() if flat.storage_offset() % 8 else flat
            pieces.append(flat[:size].view(torch.int64).view(-1, 1024).sum(1).view(torch.uint8))
            flat, summed = flat[size:], size >> 10
        pieces.append(flat)
        ends.append(ends[-1] + summed + flat.numel())
    device = pieces[-1].device
    data = torch.cat([piece.to(device) for piece in pieces]).cpu().numpy().data
    return [hashlib.blake2b(data[begin:end], digest_size=16).hexdigest() for begin, end in itertools.pairwise(ends)]


def row_digests(tensor: torch.Tensor) -> list[str]:
    """Return a digest of each row of a batch."""
    if tensor.ndim == 0 or tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
        return []
    with torch.no_grad():
        rows = parts.host_copy(tensor)
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
    if is_packed(tree):
        return PackedSequence(*map(moved, tree))
    if isinstance(tree, (int, float, str, type(None), torch.dtype, torch.Size)):
        return plain(tree)
    raise TypeError(f"an argument of type {type(tree).__name__}")


def is_packed(value: Any) -> bool:
    """Return True for sequences of several lengths in torch's packed form."""
    return isinstance(value, PackedSequence)


def by_sequence(value: Any) -> Any:
    """Return packed sequences as a batch of rows with zeros behind each; any other value as it is."""
    return pad_packed_sequence(value, batch_first=True)[0] if is_packed(value) else value


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
        states["numpy"] = (kind, tuple(words.tolist()), *rest)
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


def same_state(one: Any, other: Any) -> bool:
    """Return True if two states, such as those of a random generator, are equal."""
    tensors = isinstance(one, torch.Tensor) + isinstance(other, torch.Tensor)
    return torch.equal(one, other) if tensors == 2 else not tensors and bool(one == other)


def drawn_since(before: dict[str, Any]) -> list[str]:
    """Return the generators that have drawn numbers since their states were noted."""
    now = random_states()
    return [name for name, state in before.items() if not same_state(state, now[name])]


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
        self.seen: dict[int, list[int]] = {}  # ids of each module's parameters at its newest forward
        self.beside: list[list[int]] = []  # for each module, the ranks that compute parts of one forward
        self.places: dict[int, int] = {}
        self.wrappers: dict[int, nn.Module] = {}  # around a module: by the id of this
        self.parts: dict[str, parts.ParameterPart] = {}
        self.owners: dict[int, dict[str, None]] = {}  # keys of what a tensor of an optimizer has, by its id
        self.optimizers: list[Any] = []
        self.loose: dict[str, tuple[int, int, int]] = {}  # optimizer, group and place of parameters in no called module

    def adopt(self, tensor: torch.Tensor) -> parts.ParameterPart:
        """Return the part of an optimizer's parameter that gets gradients, and is in no module that was called."""
        place = next(
            (number, group, index)
            for number, optimizer in enumerate(self.optimizers)
            for group, own in enumerate(optimizer.param_groups)
            for index, p in enumerate(own["params"])
            if p is tensor
        )
        if not self.loose:
            self.places[id(self.loose)] = len(self.modules)
            self.modules.append(LooseParameters())
            self.beside.append([parts.own_rank()])
        number = self.places[id(self.loose)]
        owners: Any = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        names = [f" {name}" for one in owners for name, p in one._parameters.items() if p is tensor][:1]
        optimizer = f"{type(self.optimizers[place[0]]).__name__} {place[0]}"
        key = f"{number}:{optimizer}, group {place[1]}, parameter {place[2]}{''.join(names)}"
        own = (tensor.detach, functools.partial(getattr, tensor, "grad"))
        self.parts[key] = parts.ParameterPart(key, None, tuple(tensor.shape), tensor, *own, tensor.dtype)
        self.loose[key] = place
        self.owners.setdefault(id(tensor), {})[key] = None
        return self.parts[key]

    def number(self, module: nn.Module) -> int:
        """Return a module's number; a new module's parameters become known."""
        if id(module) not in self.places:
            self.places[id(module)] = len(self.modules)
            self.modules.append(module)
            self.beside.append(parts.tensor_ranks(module))
        number = self.places[id(module)]
        owners = [id(p) for p in module.parameters()]
        if self.seen.get(number) == owners:  # parts keep their parameters, whose ids nothing else gets
            return number
        self.seen[number] = owners
        for part in parts.parts_of(self.wrappers.get(id(module), module), number):
            self.owners.setdefault(id(part.owner), {})[part.key] = None
            self.parts[part.key] = part
        return number

    def of(self, tensor: torch.Tensor) -> list[parts.ParameterPart]:
        """Return the parts of parameters that a tensor of an optimizer has, of those that modules still use."""
        own = [self.parts[key] for key in self.owners.get(id(tensor), ())]
        return [part for part in own if part.owner is tensor]

    def gradients(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the gradients that these parameters have."""
        of_all = {key: self.parts[key].gradient() for key in keys}
        return {key: gradient for key, gradient in of_all.items() if gradient is not None}

    def of_module(self, number: int) -> list[parts.ParameterPart]:
        """Return the parts of a module's parameters."""
        return [part for key, part in self.parts.items() if key.startswith(f"{number}:")]

    def state(self, number: int, stored: dict[str, str]) -> str:
        """Return one digest of a module's weights from the digest of each that is trained."""
        digests = "".join(stored.get(part.key, "") for part in self.of_module(number) if not part.is_frozen)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    def number_of(self, optimizer: Any) -> int:
        """Return an optimizer's number, in the order of their construction."""
        for place, own in enumerate(self.optimizers):
            if own is optimizer:
                return place
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1


class LooseParameters(nn.Module):
    """Place in the list of modules of the parameters that are in none that was called."""


class LeftGradients:
    """Gradients as the newest backward, or the newest call that is known, has left them; on the host."""

    def __init__(self, known: ScriptParts, deaf: set[str]) -> None:
        self._known, self._deaf = known, deaf
        self._marks: dict[str, Any] = {}  # of the values: themselves on the CPU, else their digests
        self.values: dict[str, torch.Tensor] = {}
        self._given = set[str]()  # those whose values are in a record

    def give(self, key: str) -> torch.Tensor:
        """Return a gradient's values for a record; later values get memory of their own."""
        self._given.add(key)
        return self.values[key]

    def look(self, keys: Iterable[str]) -> None:
        """Note the gradients of these parameters as they are now."""
        gradients = self._known.gradients(() if self._deaf else keys)
        for key, now in self._marks_of(gradients).items():
            if key not in self._marks or not same_state(self._marks[key], now):
                old, own = self.values.get(key), parts.local(gradients[key])
                if (
                    old is None
                    or key in self._given
                    or (old.shape, old.dtype) != (own.shape, own.dtype)
                    or own.is_sparse
                ):
                    self.values[key] = parts.host_copy(own)  # fresh memory costs more than the copy
                else:
                    old.copy_(own)
                self._given.discard(key)
                self._marks[key] = self.values[key] if isinstance(now, torch.Tensor) else now

    def unchanged(self, keys: Iterable[str]) -> list[str]:
        """Return those parameters whose gradients are still as they were left."""
        gradients = self._known.gradients(key for key in keys if key in self._marks)
        return [key for key, now in self._marks_of(gradients).items() if same_state(self._marks[key], now)]

    @staticmethod
    def _marks_of(gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
        own = {key: parts.local(gradient) for key, gradient in gradients.items()}
        on_host = all(one.device.type == "cpu" and not one.is_sparse for one in own.values())
        return own if on_host else dict(zip(own, digests(own.values()), strict=True))


def new_step() -> dict[str, Any]:
    """Return the record of a step without anything in it."""
    lists: dict[str, Any] = {
        name: [] for name in ("calls", "losses", "clips", "scales", "erased", "gathers", "gathered")
    }
    maps: dict[str, Any] = {
        name: {} for name in ("weights", "buffers", "places", "summed", "carried", "left", "random")
    }
    # Backwards that came before the step, and how often an optimizer's closure computed the gradient in it.
    return {**lists, **maps, "unscaled": False, "began": 0, "evaluations": 1}


class ScriptRecorder:
    """Recorder of a rank's first steps."""

    def __init__(self, folder: str, num_steps: int, room: float = float("inf")) -> None:
        self.folder, self.num_steps = folder, num_steps
        self.known = ScriptParts()
        self.steps: list[dict[str, Any]] = []
        self.unseen: list[str] = []  # what could not be observed, in words
        self.turn = 0, 1  # of the optimizer's steps that make an update together
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
        self._handles: dict[str, Any] = {}  # of the hooks
        self.num_backwards = 0
        self._in_backward = 0
        self._first_backward = -1  # the step in which the newest first backward was
        self.in_scaler = self.by_metric = False  # by_metric: a scheduler follows a number
        self.deaf = set[str]()  # why nothing is recorded now: "done", "full", or a second gradient of one update
        self.joins: float | None = None  # steps before this rank has no more samples; None without DDP's Join
        self.exchanges = set[str]()  # functions by which the script's own forwards get values of other ranks
        self.outputs: list[Any] = []  # weak references of those before the next backward
        self.hooks = set[str]()  # of DDP, through which gradients are summed
        self.room, self.num_unseen = room, 0  # bytes that the record may have yet; updates after it was full
        self.left = LeftGradients(self.known, self.deaf)
        self._begin: dict[str, str] = {}  # digest of each parameter's first stored values
        self._trained = set[str]()  # parameters that have had gradients
        self._random: dict[str, Any] = {}  # states of the generators before the newest update
        self._process = os.getpid()
        self._awaited: dict[int, Any] = {}  # parameters of optimizers that no called module has, by their ids
        self.untrained: list[dict[str, Any]] = []  # modules that are called and not trained, with their weights
        self._known_untrained = weakref.WeakSet[nn.Module]()
        self.step = new_step()
        self.rank, self.world = parts.own_rank(), num_ranks()

    def note(self, what: str) -> None:
        """Note once what cannot be observed."""
        if what not in self.unseen:
            self.unseen.append(what)

    def _store(self, into: dict[str, torch.Tensor], own: Sequence[parts.ParameterPart]) -> dict[str, str]:
        """Store the weights of parts that are not the newest stored ones; return the digest of each."""
        weights = [part.weights() for part in own]
        now = digests(weights)
        for part, values, digest in zip(own, weights, now, strict=True):
            if part.place is not None:
                self.step["places"][part.key] = part.place
            self._begin.setdefault(part.key, digest)
            if self._stored.get(part.key) != digest:
                self._stored[part.key] = digest
                if self.rank == 0 or part.place is not None:
                    into[part.key] = parts.host_copy(values)
        return dict(zip((part.key for part in own), now, strict=True))

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note the begin of a module's forward, before any of its own hooks. A backward may compute it again."""
        if self.deaf or self._in_backward:
            return
        if is_passed_by(module):
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
            is_new = id(module) not in self.known.places and module not in self._known_untrained
            is_frozen = not any(p.requires_grad for p in module.parameters())
            if is_new and (is_frozen or self.steps) and next(module.parameters(), None) is not None:
                self._known_untrained.add(module)
                own = list(parts.parts_of(self.known.wrappers.get(id(module), module), 0))
                values = zip(own, digests(part.weights() for part in own), strict=True)
                weights = {part.key.partition(":")[2]: f"{part.place} {digest}" for part, digest in values}
                about = {"class": type(module).__name__, "step": len(self.steps), "weights": weights}
                self.untrained.append(about)
            return
        self.thread.args = args  # later hooks of the module may change them, and the replay has such hooks itself
        if "deepspeed.runtime.engine" in sys.modules and id(module) not in self.known.places:
            parts.note_engine(self, module)
        number = self.known.number(module)
        first = not self.step["calls"]
        self.rank = parts.own_rank()
        own = self.known.of_module(number)
        weights = self._store(self.step["weights"], own)
        dtypes: dict[str, str] = {}
        for part in own:
            if part.owner.requires_grad and self._hooked.get(part.key) is not part.owner:
                self._hooked[part.key] = part.owner
                if part.place is None:
                    hook: Any = functools.partial(self._gradient, part.key, part.owner)
                    self._handles[part.key] = part.owner.register_hook(hook)
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
            "frozen": [part.key for part in own if not part.owner.requires_grad],
            "passes": {},
            "gradient_places": {},
            "exchanges": any(isinstance(m, nn.SyncBatchNorm) and m.training for m in module.modules()),
            "digest": self.known.state(number, self._stored),
        }

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Note the end of a module's forward: arguments, output, and hooks for the gradients of the output."""
        if self.deaf or self._in_backward or is_passed_by(module):
            return
        depth = self.thread.now = getattr(self.thread, "now", 1) - 1
        call = getattr(self.thread, "call", None)
        if depth or call is None:
            return
        self.thread.call = None
        args, self.thread.args = self.thread.args, None
        try:
            call["args"], call["kwargs"] = moved(args), moved(dict(kwargs))
        except TypeError as error:
            self.note(f"{type(module).__name__} is called with {error}, which is not recorded: it is not replayed")
            call["args"] = None
        inputs = [t for t in tensors_of(tree_map(by_sequence, (args, kwargs), is_leaf=is_packed)) if t.ndim]
        columns = [row_digests(t) for t in inputs if len(t) == len(inputs[0])]
        call["rows"] = ["".join(row) for row in zip(*columns, strict=False)]
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        call["outputs"] = [sketch_of(t) for t in outputs]
        call["widths"] = [t.shape[-1] for t in outputs if t.ndim > 1]
        call["number"] = len(self.step["calls"])
        call["draws"] = drawn_since(call["random"])
        self.step["calls"].append(call)
        self.outputs += map(weakref.ref, outputs)
        for place, tensor in enumerate(outputs):
            tensor.register_hook(functools.partial(self._output_gradient, call, place))

    def _output_gradient(self, call: dict[str, Any], place: int, gradient: torch.Tensor) -> None:
        of_pass = call["passes"].setdefault(self.num_backwards, {})
        values = parts.host_copy(gradient)
        of_pass[place] = of_pass[place] + values if place in of_pass else values
        call["gradient_places"][place] = parts.place_of(gradient)

    def backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward as torch does, and count it."""
        outer = not self._in_backward
        self.num_backwards += outer
        if outer and not self.deaf and self._first_backward != len(self.steps):
            self._first_backward = len(self.steps)
            for part in self.known.parts.values():
                before = part.gradient() if part.place is not None else None
                if before is not None and parts.local(before).any():
                    self.step["carried"][part.key] = parts.host_copy(before)
        for key in [key for key in self._local if key in self._spent] if outer else ():
            gradient = self._hooked[key].grad
            if gradient is None or not parts.host_copy(gradient).any():  # set to zero by the script itself
                self.cleared([self._hooked[key]])
        for optimizer in self.known.optimizers if outer and not self.deaf else ():
            for p in [p for group in optimizer.param_groups for p in group["params"]]:
                if id(p) in self.known.owners or id(p) in self._awaited or not (p.requires_grad and p.is_leaf):
                    continue
                self._awaited[id(p)] = p
                if parts.place_of(p) is None:
                    p.register_hook(functools.partial(self._gradient, "", p))
        for key, handle in self._handles.items() if outer else ():  # behind the hooks of the script's own
            hooks: Any = self._hooked[key]._backward_hooks
            if hooks and next(reversed(hooks)) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the places in the dict
        self._in_backward += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._in_backward -= 1
            if outer:
                self.outputs.clear()
                self.left.look(self.known.parts)

    def _gradient(self, key: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.deaf:
            return
        if not key:  # of an optimizer's parameter that is in no module that was called
            if id(parameter) not in self.known.owners:
                part = self.known.adopt(parameter)
                self._hooked[part.key] = parameter
                digest = self._store(self.step["weights"], [part])
                for call in self.step["calls"][:1] if not self.steps else ():
                    call["weights"] |= digest
            key = next((own for own in self.known.owners[id(parameter)] if own in self.known.loose), "")
            if not key:
                return
        if parameter.grad is None and key in self._local:
            self.cleared([parameter])
        self._trained.add(key)
        if key in self._local and key not in self._spent and not gradient.is_sparse:  # no record has it yet
            self._local[key] += gradient.detach().to(self._local[key].device)
        else:
            values = parts.host_copy(gradient)
            self._local[key] = self._local[key] + values if key in self._local else values
        self._spent.discard(key)
        passes = self._passes.setdefault(key, [])
        if not passes or passes[-1] != self.num_backwards:
            passes.append(self.num_backwards)

    def cleared(self, parameters: Any) -> None:
        """Note that gradients are set to zero."""
        for parameter in () if self.deaf else parameters:
            for part in self.known.of(parameter):
                if part.key in self._local and part.key not in self._spent:
                    self.step["erased"].append(part.key)
                self._local.pop(part.key, None)
                self._passes.pop(part.key, None)

    def before_update(self, optimizer: Any) -> None:
        """Note gradients, rates and weights as the optimizer gets them."""
        if self.deaf:
            return
        step = self.step
        self.rank, self.world = parts.own_rank(), num_ranks()  # a script may leave its process group before it ends
        step["optimizer"] = self.known.number_of(optimizer)
        if not self.turn[0]:
            step["gradients"], step["local"], step["passes"], step["groups"] = {}, {}, {}, []
            step["strange"] = 0  # parameters of the optimizer that no observed module has
        step["raw"] = bool(step["scales"]) and not step["unscaled"] and not self.in_scaler
        of_groups = [[self.known.of(p) for p in group["params"]] for group in optimizer.param_groups]
        every = [part for group in of_groups for own in group for part in own]
        self._store(step["weights"], [part for part in every if not part.is_frozen])  # a forward may change the frozen
        unchanged = set(self.left.unchanged(part.key for part in every))
        for group, of_group in zip(optimizer.param_groups, of_groups, strict=True):
            values = {n: plain(v) for n, v in group.items() if isinstance(v, (int, float, tuple, str, type(None)))}
            values |= {n: v.item() for n, v in group.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
            names = []
            if self.turn[1] > 1 and not group["params"]:  # ZeRO-3 gives one group at a time
                continue
            for own in of_group:
                step["strange"] += not own
                for part in own:
                    names.append(part.key)
                    gradient = part.gradient()
                    if gradient is None:
                        continue
                    left = self.left.values.get(part.key)
                    is_changed = left is None or part.key not in unchanged
                    step["gradients"][part.key] = parts.host_copy(gradient) if is_changed else self.left.give(part.key)
                    if is_changed and left is not None:
                        step["left"][part.key] = self.left.give(part.key)
                    self._spent.add(part.key)
                    summed = parts.place_of(gradient)
                    if summed is not None:
                        step["summed"][part.key] = summed["summed"]
                    if part.key in self._local:
                        step["local"][part.key] = self._local[part.key]
                        step["passes"][part.key] = list(self._passes.get(part.key, ()))
            step["groups"].append({"names": names, "values": values})
        for name, width, before in step["gathers"]:
            if any(width in call["widths"] and not call["passes"] for call in step["calls"][:before]):
                step["gathered"].append(name)
        if not self.turn[0]:
            numbers = {call["module"] for call in step["calls"]}
            step["states"] = {number: self.known.state(number, self._stored) for number in numbers}
        self._random = random_states()

    def after_update(self, optimizer: Any) -> None:
        """Note weights after an update, and leave after the last step."""
        if "full" in self.deaf:
            self.num_unseen += 1
        elif self.deaf or "groups" not in self.step:
            return
        else:
            if drawn_since(self._random):
                self.step["random"] = self._random
            every = [part for group in optimizer.param_groups for p in group["params"] for part in self.known.of(p)]
            after = self._store(self.step.setdefault("after", {}), every)
            self.step["after_digests"] = self.step.get("after_digests", {}) | after
            if self.turn[0] + 1 < self.turn[1]:  # other groups follow
                return
            self.steps.append(self.step)
            large = [
                self.step[name] for name in ("weights", "buffers", "carried", "left", "gradients", "local", "after")
            ]
            large += [call.get(name) for call in self.step["calls"] for name in ("args", "kwargs", "outputs", "passes")]
            self.room -= sum(tensor.nbytes for tensor in tensors_of(large)) + _STATES_BYTES * len(self.step["calls"])
            if self.room < 0.0:
                self.deaf.add("full")
            self.step = {**new_step(), "began": self.num_backwards}
        if len(self.steps) + self.num_unseen >= self.num_steps:
            self.write()
            leave(self.folder, self.world)

    def skip(self) -> None:
        """Drop what led to an update that a loss scaler has left out."""
        self._spent.update(self._local)
        same = ("weights", "buffers", "places")
        self.step = {**new_step(), "began": self.num_backwards, **{name: self.step[name] for name in same}}

    def write(self, *, final: bool = True) -> None:
        """Write the record, for the last time if `final`: later calls do nothing."""
        path = path_of(self.folder, self.rank)
        helps = multiprocessing.parent_process() is not None or os.path.exists(path)  # a loader's worker, or a launcher
        if "done" in self.deaf or os.getpid() != self._process or (not self.steps and helps):
            return
        self.deaf |= {"done"} if final else set()
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None and any(isinstance(one, stages._PipelineStageBase) for one in gc.get_objects()):
            self.unread.add("PipelineStage")
        groups = [group for optimizer in self.known.optimizers for group in optimizer.param_groups]
        own = {part.key for group in groups for p in group["params"] for part in self.known.of(p)}
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
                    "loose": [(key.partition(":")[2], *at) for key, at in self.known.loose.items()]
                    if isinstance(module, LooseParameters)
                    else [],
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
            "joins": self.joins,
            "untrained": self.untrained,
            "exchanges": sorted(self.exchanges),
            "hooks": sorted(self.hooks),
            "num_unseen": self.num_unseen,
            "alone": sorted(k for k in self._trained - own if self._stored.get(k) != self._begin.get(k)),
            "idle": [k for k in self.left.values if k not in own and self._stored.get(k) == self._begin.get(k)],
            "redirected": dict(getattr(sys.modules.get("_shoal_on_cpu"), "redirected", {})),
        }
        torch.save(record, path + ".new")  # noqa: TID251  (read with weights_only: data, no code)
        os.replace(path + ".new", path)


def path_of(folder: str, rank: int, suffix: str = "pt") -> str:
    """Return the file of a rank's record."""
    return os.path.join(folder, f"rank-{rank}.{suffix}")


def leave(folder: str, world: int, suffix: str = "pt") -> None:
    """End the process once every rank has written, without exit handlers, which would wait for peers."""
    paths = [path_of(folder, rank, suffix) for rank in range(world)]
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end and not all(map(os.path.exists, paths)):
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def num_ranks() -> int:
    """Return the number of processes."""
    return torch.distributed.get_world_size() if parts.is_joined() else int(os.environ.get("WORLD_SIZE", "1"))


def is_passed_by(module: Any) -> bool:
    """Return True for wrappers, inside of which the outermost module is looked for, and for losses."""
    kind: Any = type(module)
    return _is_passed_by(kind)


@functools.cache
def _is_passed_by(kind: Any) -> bool:
    return kind.__module__ == "torch.nn.modules.loss" or any(one.__name__ in WRAPPERS for one in kind.__mro__)


def is_trained(module: nn.Module, args: Any) -> bool:
    """Return True if a forward of a module may have gradients of its parameters. Keras calls layers without values."""
    if any(type(one).__name__ == "KerasTensor" for one in args):
        return False
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def clip_whole(module: nn.Module, recorder: ScriptRecorder, run: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
    """Clip as FullyShardedDataParallel's own method does, and note it."""
    before = len(recorder.step["clips"])
    norm = run(module, limit, *args, **kwargs)
    if len(recorder.step["clips"]) == before:  # else it has called the function for whole gradients
        about = {"kind": "norm", "limit": float(limit), "norm": float(norm), "keys": list(recorder.known.parts)}
        recorder.step["clips"].append(about)
    return norm


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
    hooks = beside("hooks")  # before the modules that need it
    if options.get("cpu"):
        beside("on_cpu").install(options["world"])
    if options["mode"] == "clock":
        beside(options["clock"]).install(options)
        return
    job = options["mode"] == "job"
    room = options.get("room", float("inf"))
    recorder = beside("as_job").install(options) if job else ScriptRecorder(options["folder"], options["steps"], room)
    hooks.note_optimizers(recorder)
    if options["mode"] == "replay":
        beside("replay").ScriptReplay(options, recorder).install()
        return
    hooks.observe_steps(recorder)
    hooks.observe_calls(recorder)
    hooks.observe_ranks(recorder)
    hooks.observe_data(recorder)
    if not job:
        atexit.register(recorder.write)
        threading.Thread(target=hooks.answer_stall, args=(recorder,), name="shoal-stalls", daemon=True).start()
