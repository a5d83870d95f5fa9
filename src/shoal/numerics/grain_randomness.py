"""Random numbers and batch statistics by grain, also if several grains share one forward.

Before each forward the global generators are seeded by (seed, step), the same on every rank. Under `GrainScope` every
random operation of the model draws one number from that generator. Each grain's rows come from a generator keyed by
(that number, grain). In a job of many grains the rows come from their positions in a stream keyed by that number. So a
grain's dropout mask does not depend on the other grains of the forward. Recomputation in the backward draws the same
masks again, because torch.utils.checkpoint restores the global generator. Batch normalisation also runs grain by grain.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.numerics.batch_statistics import BATCH_NORM, normalised_by_grain
from shoal.numerics.draws import at_once, fill_kept, keep_mask, of_size, under, words_at
from shoal.numerics.generators import device_generators, python_generators, seed_torch, torch_generator
from shoal.plans.grains import Grain, random_key

INT63 = 2**63 - 1


class NotFusibleError(Exception):
    """Error for a model that computes something on a batch which cannot be divided by grain."""


class GrainScope(TorchFunctionMode):
    """Context of a microbatch's forward and backward that seeds random operations and normalises by grain."""

    def __init__(self, seed: int, step: int, grains: Sequence[Grain], *, by_position: bool = False) -> None:
        """Create the scope. `by_position`: draw by position for all grains at once if possible (see `draws`)."""
        super().__init__()
        self.by_position, self._starts = by_position, [grain.start for grain in grains]
        self._key = random_key(seed, "model", step)
        self._indices = [grain.index for grain in grains]
        self._sizes = [grain.size for grain in grains]
        self._rows = sum(self._sizes)
        self.calls = 0
        self._leaked = False
        self._outside: tuple[Any, ...] | None = None  # states of the other generators while the scope is active
        self._left: Tensor | None = None
        self._passed: set[bytes] = set()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each grain."""
        return tuple(self._sizes)

    def __enter__(self) -> GrainScope:
        """Seed the generators. A later entry, such as a pipeline's for the backward, continues from the last exit."""
        seed_torch(self._key)
        if self._left is not None:
            torch.default_generator.set_state(self._left)
        self._outside = python_generators(), device_generators()
        self._expected = torch_generator()
        self._passed.add(self._expected)
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
            return torch_generator() != self._expected or (python_generators(), device_generators()) != self._outside

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Return one generator per grain for one random operation."""
        base = self._key_of_call()
        return [torch.Generator(device).manual_seed(random_key(base, index)) for index in self._indices]

    def under(self, generator: torch.Generator, call: Callable[[], Any]) -> Any:
        """Run `call` with the device's global generator in the state of `generator`, then restore that generator."""
        return under(generator, call)

    def words(self, rows: int, elements: int) -> Tensor:
        """Return 32 random bits for each element of one random operation, int32 [rows, elements], by position.

        Raises: NotFusibleError if the rows are not the samples.
        """
        if rows != self._rows:
            raise NotFusibleError(f"a random operation on {rows} rows")
        base, starts = self._key_of_call(), self._starts
        with torch._C.DisableTorchFunction():
            if starts[-1] + self._sizes[-1] - starts[0] == rows:  # consecutive grains, the common case
                return words_at(base, starts[0], rows, elements)
            return torch.cat([words_at(base, *one, elements) for one in zip(starts, self._sizes, strict=True)])

    def _key_of_call(self) -> int:
        """Draw the key of one random operation from the global generator."""
        self.calls += 1
        with torch._C.DisableTorchFunction():
            before = torch_generator()
            base = int(torch.randint(INT63, ()))
            if before == self._expected:
                self._expected = torch_generator()
                self._passed.add(self._expected)
            elif before not in self._passed:  # a known state: recomputation has restored the generator
                self._leaked = True
        return base

    def skip(self, count: int) -> None:
        """Draw the keys of `count` random operations that another rank computes."""
        self.calls += count
        with torch._C.DisableTorchFunction():
            for _ in range(count):
                torch.randint(INT63, ())
            self._expected = torch_generator()
            self._passed.add(self._expected)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split a tensor's rows by grain. Raises: NotFusibleError if the first dim does not count the samples."""
        if tensor.ndim == 0 or tensor.shape[0] != self._rows:
            # Also for a single grain: the way to compute a model must not depend on a rank's number of grains.
            raise NotFusibleError(f"a random or batch-wide operation on shape {tuple(tensor.shape)}")
        return list(tensor.split(self._sizes))


def active_scope() -> GrainScope | None:
    """Return the innermost scope under which the code runs, or None."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, GrainScope)), None)


class _DrawnError(Exception):
    """Error that leaves a handler at the point where it would draw."""


class DrawCounter(TorchFunctionMode):
    """Context that counts the random operations a GrainScope would seed, and changes no result."""

    _sizes = (1,)
    _rows = 1
    by_position = False

    def __init__(self) -> None:
        super().__init__()
        self.count = self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler: Any = _HANDLERS.get(func)
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if handler is _sized:  # this counter does not know the number of rows
                self.count += kwargs.get("generator") is None
            elif handler is not None and handler is not _batch_norm:
                with contextlib.suppress(_DrawnError, NotFusibleError):
                    return handler(self, func, args, kwargs)
            return func(*args, **kwargs)

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """Count one operation and leave the handler."""
        self.count += 1
        raise _DrawnError

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor as one part."""
        return [tensor]


def _dropout(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, p, training = _dropout_arguments(*args, **kwargs)
    if not training or p == 0.0 or tensor.numel() == 0:
        return func(*args, **kwargs)
    if p == 1.0:
        return tensor * 0.0
    with torch.no_grad():
        noise = torch.empty_like(tensor)
        if scope.by_position and noise.is_cpu:
            noise.copy_(keep_mask(scope.words(len(noise), noise[0].numel()), 1.0 - p).view_as(noise))
        else:
            parts = scope.split(noise)
            fill_kept(noise, parts, 1.0 - p, scope.generators(tensor.device))
        noise.div_(1.0 - p)
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
    return normalised_by_grain(scope.split(given["input"]), given)


def _split_call(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a random function once per grain on the grain's rows, each time under the grain's generator."""
    whole = at_once(scope, func, args, kwargs) if scope.by_position else None
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
    for i, generator in enumerate(scope.generators(next(iter(tensors.values())).device)):
        rows = [split[id(a)][i] if id(a) in split else a for a in args]
        named = {k: split[id(a)][i] if id(a) in split else a for k, a in options.items()}
        outputs.append(scope.under(generator, functools.partial(func, *rows, **named)))
    whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return args[0].copy_(whole) if in_place or overwrite else whole


def _sized(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw `rand`, `randn` and their like by grain; the first size must be the number of samples."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args)
    if func is torch.randint or not size or kwargs.get("generator") is not None or kwargs.get("out") is not None:
        raise NotFusibleError(f"{getattr(func, '__name__', func)} of a size that does not follow the samples")
    if size[0] != scope._rows:
        raise NotFusibleError(f"{getattr(func, '__name__', func)} of size {tuple(size)}")
    options = {k: v for k, v in kwargs.items() if k != "size"}
    whole = of_size(scope, func, size, options) if scope.by_position else None
    if whole is not None:
        return whole
    device = torch.device(options.get("device") or "cpu")
    parts = [
        func(rows, *size[1:], generator=generator, **options)
        for rows, generator in zip(scope._sizes, scope.generators(device), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention(scope: GrainScope, func: Any, args: Any, kwargs: Any) -> Any:
    dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if dropout_p == 0.0:
        return func(*args, **kwargs)
    whole = at_once(scope, func, args, kwargs) if scope.by_position else None
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
    F.gumbel_softmax: _split_call,
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
    return function in _HANDLERS
