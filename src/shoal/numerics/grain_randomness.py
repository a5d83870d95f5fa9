"""Random numbers and batch statistics by grain, also if several grains share one forward.

Under `GrainScope` the numbers that a module draws are a hash of (seed, step, the module's name, the count of its draws
in this forward, the sample's position, the element): see `hashed_draws`. So a sample's dropout mask does not depend on
the other samples of the forward, nor on what other modules draw. Functions without a form by hash draw from one
generator per grain. Batch normalisation also runs grain by grain.

Each draw also takes a token from the global generator, which is seeded by (seed, step). torch.utils.checkpoint restores
that generator, so recomputation in the backward takes the same tokens, and finds the names and counts of the forward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from shoal.errors import JobMismatchError
from shoal.numerics.batch_statistics import BATCH_NORM, normalised_by_grain
from shoal.numerics.draws import at_once, of_size
from shoal.numerics.generators import device_generators, python_generators, seed_torch, torch_generator
from shoal.numerics.hashed_draws import SampleKeys, Site
from shoal.plans.grains import Grain, random_key

_CALL = nn.Module._call_impl.__code__
_NOTHING = contextlib.nullcontext()


class NotFusibleError(Exception):
    """Error for a model that computes something on a batch which cannot be divided by grain."""


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no transform of torch.func is active, as its inputs are the same for the whole model.

    Raises: NotFusibleError for a vmap that asks for other numbers in each of its calls.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NOTHING
    for transform in pyfunctorch.retrieve_all_functorch_interpreters():
        if isinstance(transform, pyfunctorch.VmapInterpreter) and transform.randomness() != "same":
            raise NotFusibleError("a random operation under torch.vmap")
    return pyfunctorch.temporarily_clear_interpreter_stack()


class Sites:
    """Names and counts of the modules that draw in one forward, also when the backward recomputes a part of it."""

    def __init__(self, key: int, names: Mapping[nn.Module, str]) -> None:
        """Begin a forward. `key`: seed of the tokens. `names`: names of the model's modules."""
        self._seed, self._names = key, names
        self._counts: Counter[str] = Counter()
        self._known: dict[int, tuple[Site, ...]] = {}  # by token
        self._token = torch.empty((), dtype=torch.int64)
        self._inside = ""

    def next(self, places: Sequence[str] = (), names: dict[str, list[str]] | None = None) -> tuple[Site, ...]:
        """Return the sites of the next draws: one for each of some `places`, by default that of `inside`.

        `names`: the places' names by the module whose forward runs, which this method completes.
        """
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                token = int(self._token.random_())
        else:
            token = int(self._token.random_())
        sites = self._known.get(token)
        if sites is None:
            outer, here, names = self.module(), [], {} if names is None else names
            if outer not in names:
                names[outer] = [self._name_at(place, outer) for place in places or [self._inside]]
            for name in names[outer]:
                here.append((name, self._counts.get(name, 0)))
                self._counts[name] = here[-1][1] + 1
            sites = self._known[token] = tuple(here)
        return sites

    def module(self) -> str:
        """Return the name of the innermost module of the model whose forward runs; "" if there is none."""
        frame = sys._getframe(1) if self._names else None
        while frame is not None:
            if frame.f_code is _CALL:
                name = self._names.get(frame.f_locals["self"])
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def places(self) -> dict[str, str]:
        """Return the places of the model's modules by their ids in digits, for a region that equal modules share.

        A place is the name within the module whose forward runs, or "/" and the whole name if it is not within that.
        """
        outer = self._called(self.module())
        inner = {} if outer is None else {module: name for name, module in outer.named_modules()}
        return {str(id(module)): inner.get(module, f"/{name}") for module, name in self._names.items()}

    def _name_at(self, place: str, outer: str) -> str:
        """Return the name of the module at a place, which is the first name of a module that has several."""
        if place.startswith("/") or not place:
            return place[1:] or outer
        module = self._called(outer)
        return place if module is None else self._names.get(module.get_submodule(place), outer)

    def _called(self, name: str) -> nn.Module | None:
        return next((module for module, own in self._names.items() if own == name), None)

    @contextlib.contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Attribute draws to the module at a place, as a compiled region has to."""
        before, self._inside = self._inside, place
        try:
            yield
        finally:
            self._inside = before

    def pass_over(self, counts: Mapping[str, int]) -> None:
        """Count draws, by module, that are not computed here."""
        self._counts.update(counts)

    def seed(self) -> None:
        """Seed the global generators for a forward."""
        seed_torch(self._seed)

    @property
    def is_undisturbed(self) -> bool:
        """True if no other code has drawn from torch's global generator."""
        own = torch.Generator().manual_seed(self._seed)
        tokens = torch.empty(len(self._known), dtype=torch.int64).random_(generator=own)
        return tokens.tolist() == list(self._known) and torch_generator() == own.get_state().numpy().tobytes()

    @property
    def in_order(self) -> list[tuple[Site, ...]]:
        """Sites of all draws so far, in their order."""
        return list(self._known.values())


class GrainScope(TorchFunctionMode):
    """Context of a microbatch's forward and backward that seeds random operations and normalises by grain."""

    def __init__(
        self,
        seed: int,
        step: int,
        grains: Sequence[Grain],
        names: Mapping[nn.Module, str] | None = None,
        *,
        is_older: bool = False,
        keys: SampleKeys | None = None,
        batch_norm: Callable[[Mapping[str, Any]], Tensor] | None = None,
    ) -> None:
        """Create the scope.

        `names`: names of the model's modules; by default all draws belong to one module. `is_older`: the training began
        before numbers were drawn by hash, so it must not draw. `keys`: the keys of a scope that is replayed.
        `batch_norm`: computes torch's function from its arguments in place of normalisation by grain.
        """
        super().__init__()
        self.key = random_key(seed, "model", step)
        self.sites = Sites(self.key, names or {})
        self.keys = keys or SampleKeys(seed, step, grains)
        self._indices = [grain.index for grain in grains]
        self.sizes = tuple([grain.size for grain in grains])  # rows of each grain
        self._rows = sum(self.sizes)
        self._is_older, self.batch_norm = is_older, batch_norm
        self.calls = 0
        self._leaked = False
        self._outside: tuple[Any, ...] | None = None  # states of the other generators while the scope is active
        self._left: Tensor | None = None

    def __enter__(self) -> GrainScope:
        """Seed the generators. A later entry, such as a pipeline's for the backward, continues from the last exit."""
        self.sites.seed()
        if self._left is not None:
            torch.default_generator.set_state(self._left)
        self._outside = python_generators(), device_generators()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._leaked = self.leaked()
        self._outside = None
        self._left = torch.default_generator.get_state()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        kwargs = kwargs or {}
        if handler is not None:
            return handler(self, func, args, kwargs)
        if func not in _DIFFERENTIATE:
            return func(*args, **kwargs)

        # A derivative within the loss runs with this scope active, so that recomputed regions draw under it.
        def run_backward(*given: Any, **options: Any) -> Any:
            torch.overrides._push_mode(self)
            try:
                return _RUN_BACKWARD(*given, **options)
            finally:
                torch.overrides._pop_mode()

        _AUTOGRAD._engine_run_backward = run_backward
        try:
            return func(*args, **kwargs)
        finally:
            _AUTOGRAD._engine_run_backward = _RUN_BACKWARD

    def leaked(self) -> bool:
        """Return True if any code drew from a global generator past this scope while the scope was active."""
        if self._leaked or self._outside is None:
            return self._leaked
        with torch._C.DisableTorchFunction():
            return not self.sites.is_undisturbed or (python_generators(), device_generators()) != self._outside

    def keys_at(self, places: Sequence[str], device: torch.device, names: dict[str, list[str]] | None = None) -> Tensor:
        """Return the rows' keys for one draw at each of several places, int32 [draws, 2, rows], and count the draws.

        `names`: as in `Sites.next`.
        """
        self._refuse_older()
        self.calls += len(places)
        with torch._C.DisableTorchFunction():
            return torch.stack([self.keys.at(site, device) for site in self.sites.next(places, names)])

    def words(self, rows: int, elements: int, device: torch.device) -> Tensor:
        """Return 32 random bits for each element of each row, int32 [rows, elements], for the next operation.

        Raises: NotFusibleError if the rows are not the samples.
        """
        with torch._C.DisableTorchFunction(), _untransformed():
            return self.keys.words(self._next(rows), elements, device)

    def noise(self, rows: int, shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the factors of a dropout in a shape of `rows` samples, as `words`."""
        with torch._C.DisableTorchFunction(), _untransformed():
            return self.keys.noise(self._next(rows), shape, p, dtype, device)

    def pass_over(self, draws: Mapping[str, int]) -> None:
        """Count the draws of modules that another rank computes: this rank may call one of these modules too."""
        self.calls += sum(draws.values())
        self.sites.pass_over(draws)

    def generators(self, func: Any, device: torch.device) -> list[torch.Generator]:
        """Return one generator per grain for one operation of a function that has no form by hash."""
        with torch._C.DisableTorchFunction():
            name, count = self._next(self._rows)
        keys = [random_key(self.key, name, count, index) for index in self._indices]
        return [torch.Generator(device).manual_seed(key) for key in keys]

    def _next(self, rows: int) -> Site:
        """Return the site of the next draw on a tensor of `rows`."""
        self.check_rows(rows)
        self._refuse_older()
        self.calls += 1
        return self.sites.next()[0]

    def _refuse_older(self) -> None:
        if self._is_older:
            raise JobMismatchError(
                given="a checkpoint of a training that draws random numbers, such as dropout's",
                conflict="an older version began it, and this version draws other numbers from the same seed",
                remedy="resume it with the version that wrote the checkpoint, or begin the training anew",
            )

    def check_rows(self, rows: int) -> None:
        """Check that a dim counts the samples. Raises: NotFusibleError."""
        # Also for a single grain: the way to compute a model must not depend on a rank's number of grains.
        if rows != self._rows:
            raise NotFusibleError(f"a random or batch-wide operation on {rows} rows")

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split a tensor's rows by grain. Raises: NotFusibleError if the first dim does not count the samples."""
        self.check_rows(tensor.shape[0] if tensor.ndim else 0)
        return list(tensor.split(self.sizes))


def active_scope() -> GrainScope | None:
    """Return the innermost scope under which the code runs, or None."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, GrainScope)), None)


class _DrawnError(Exception):
    """Error that leaves a handler at the point where it would draw."""


class DrawCounter(GrainScope):
    """Context that counts the draws that a GrainScope would attribute to each module, and changes no result."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__(0, 0, [Grain(0, 0, 1)], names)
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> DrawCounter:
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchFunctionMode.__exit__(self, *error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler, kwargs = _HANDLERS.get(func), kwargs or {}
        if handler is not None and handler is not _batch_norm:
            with contextlib.suppress(_DrawnError, NotFusibleError):
                return handler(self, func, args, kwargs)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor as one part."""
        return [tensor]

    def check_rows(self, rows: int) -> None:
        """Accept any dim, since the number of samples is unknown."""

    def _next(self, rows: int) -> Site:
        """Count one draw and leave the handler."""
        self.counts[self.sites.module()] += 1
        raise _DrawnError


def _dropout(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, p, training = _dropout_arguments(*args, **kwargs)
    if not training or not 0.0 < p <= 1.0 or tensor.numel() == 0:
        return func(*args, **kwargs)
    if p == 1.0:
        return tensor * 0.0
    shape, dtype = tensor.shape, tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    noise = scope.noise(shape[0] if shape else 0, shape, p, dtype, tensor.device)
    if kwargs.get("inplace", False) or (func is F.dropout and len(args) > 3 and args[3]):
        return tensor.mul_(noise)
    return tensor * noise


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool]:
    return input, p, training if train is None else train


def _batch_norm(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(BATCH_NORM, args, strict=False)) | kwargs
    if not given.get("training", False):
        return func(*args, **kwargs)
    scope.calls += 1
    if scope.batch_norm is not None:
        scope.check_rows(given["input"].shape[0])
        return scope.batch_norm(given)
    return normalised_by_grain(scope.split(given["input"]), given)


def _split_call(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a random function once per grain on the grain's rows, each time under the grain's generator."""
    whole = at_once(scope, func, args, kwargs)
    if whole is not None:
        return whole
    in_place = getattr(func, "__name__", "").endswith("_")
    values = [*args, *kwargs.values()]
    tensors = {id(a): a for a in values if isinstance(a, Tensor) and a.ndim > 0}
    if not tensors:
        raise NotFusibleError(f"{getattr(func, '__name__', func)} without a tensor of samples")
    # Functions in place get copies of the rows: autograd forbids writes to several views of one tensor.
    split = {key: [r.clone() for r in scope.split(t)] if in_place else scope.split(t) for key, t in tensors.items()}
    overwrite = kwargs.get("inplace", False)
    options = {**kwargs, "inplace": False} if overwrite else kwargs
    outputs = []
    for i, generator in enumerate(scope.generators(getattr(func, "func", func), next(iter(tensors.values())).device)):
        rows = [split[id(a)][i] if id(a) in split else a for a in args]
        named = {k: split[id(a)][i] if id(a) in split else a for k, a in options.items()}
        outputs.append(_under(generator, functools.partial(func, *rows, **named)))
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return args[0].copy_(whole) if in_place or overwrite else whole


def _sized(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw `rand`, `randn` and their like by grain; the first size must be the number of samples."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args)
    if func is torch.randint or not size or kwargs.get("generator") is not None or kwargs.get("out") is not None:
        raise NotFusibleError(f"{getattr(func, '__name__', func)} of a size that does not follow the samples")
    scope.check_rows(size[0])
    options = {k: v for k, v in kwargs.items() if k != "size"}
    whole = of_size(scope, func, size, options)
    if whole is not None:
        return whole
    device = torch.device(options.get("device") or "cpu")
    parts = [
        func(rows, *size[1:], generator=generator, **options)
        for rows, generator in zip(scope.sizes, scope.generators(func, device), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if dropout_p == 0.0:
        return func(*args, **kwargs)
    whole = at_once(scope, func, args, kwargs)
    if whole is not None:
        return whole
    names = ("query", "key", "value", "attn_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.pop("attn_mask", None)
    rest = {k: v for k, v in given.items() if k not in names} | {"dropout_p": dropout_p}
    if len(args) > 5:
        rest["is_causal"] = args[5]
    if mask is not None and mask.ndim == given["query"].ndim and mask.shape[0] > 1:
        return _split_call(scope, func, (given["query"], given["key"], given["value"], mask), rest)
    # A mask that all samples share is not divided, whatever its first dim is.
    masked = functools.partial(func, attn_mask=mask)
    return _split_call(scope, masked, (given["query"], given["key"], given["value"]), rest)


def _under(generator: torch.Generator, call: Callable[[], Any]) -> Any:
    """Run `call` with the device's global generator in the state of `generator`, then restore the global generator."""
    device = generator.device
    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        return call()
    finally:
        own.set_state(before)


def _by_heads(weights: Tensor, p: float) -> Tensor:
    """Drop attention weights [samples * heads, ...] as rows of samples."""
    scope = active_scope()
    assert scope is not None
    rows = sum(scope.sizes)
    scope.check_rows(weights.shape[0] if weights.shape[0] % rows else rows)
    by_sample = weights.unflatten(0, (rows, -1))
    return F.dropout(by_sample, p).flatten(0, 1)


def _open(func: Any, **instead: Any) -> Callable[[GrainScope, Any, Any, Any], Any]:
    """Return a handler that runs a function of torch's in Python under the scope, not as one operation."""
    inside: dict[str, Any] = {"has_torch_function": lambda _: False, "has_torch_function_unary": lambda _: False}
    own = FunctionType(func.__code__, {**func.__globals__, **inside, **instead}, func.__name__, func.__defaults__)

    def handle(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
        torch.overrides._push_mode(scope)
        try:
            return own(*args, **kwargs)
        finally:
            torch.overrides._pop_mode()

    return handle


def _random_if(name: str, place: int, default: Any) -> Callable[..., Any]:
    """Return a handler for a function that draws only if its argument `name` (at `place`) is true."""

    def handle(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
        active = kwargs.get(name, args[place] if len(args) > place else default)
        return _split_call(scope, func, args, kwargs) if active else func(*args, **kwargs)

    return handle


def _generator_given(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    """Divide a draw from the global generator by grain; refuse a draw from a generator of the user's own."""
    if kwargs.get("generator") is not None:
        raise NotFusibleError(f"{getattr(func, '__name__', func)} with a generator of its own")
    return _split_call(scope, func, args, kwargs)


def belongs_to_grains(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call draws random numbers or has batch statistics, so that a GrainScope has to see it."""
    handler = _HANDLERS.get(func) if callable(func) else None
    if handler is _dropout:
        _, p, training = _dropout_arguments(*args, **kwargs)
        return bool(training) and p != 0.0
    if func is F.multi_head_attention_forward:
        training = kwargs.get("training", args[13] if len(args) > 13 else True)
        return bool(training) and (kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0) != 0.0)
    if handler is _batch_norm:
        return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    if handler is _attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) != 0.0)
    return handler is not None


# torch's functions that run autograd's engine, and the entry to it that they share.
_DIFFERENTIATE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_AUTOGRAD: Any = torch.autograd
_RUN_BACKWARD = _AUTOGRAD._engine_run_backward

_HANDLERS: dict[Any, Callable[[GrainScope, Any, Any, Any], Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: _attention,
    F.rrelu: _random_if("training", 3, False),
    F.gumbel_softmax: _open(F.gumbel_softmax),
    F.multi_head_attention_forward: _open(F.multi_head_attention_forward, dropout=_by_heads),
    torch.rand: _sized,
    torch.randn: _sized,
    torch.randint: _sized,
    **{f: _random_if("training", 2, True) for f in (F.dropout1d, F.dropout2d, F.dropout3d)},
    **{f: _random_if("training", 2, False) for f in (F.alpha_dropout, F.feature_alpha_dropout)},
    **dict.fromkeys((torch.bernoulli, torch.poisson, torch.multinomial, torch.normal), _generator_given),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _generator_given),
    **{
        getattr(Tensor, name): _generator_given
        for name in [
            "bernoulli_",
            "bernoulli",
            "normal_",
            "uniform_",
            "exponential_",
            "random_",
            "log_normal_",
            "cauchy_",
            "geometric_",
            "multinomial",
        ]
    },
}


def draws(function: Any) -> bool:
    """Return True if a function of torch draws random numbers or computes batch statistics, at least in some cases."""
    return function in _HANDLERS and function is not F.multi_head_attention_forward  # whose parts draw
