"""The job's model: construction from the seed, the shapes of lazy modules, and a search for values without a seed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoal.data.loader import DataRank, MapLoader
from shoal.data.opened import opened, order_of
from shoal.data.source import MapSource, small_batch
from shoal.distributed.failures import user_error
from shoal.distributed.mesh import Mesh
from shoal.distributed.process_setup import one_thread
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.launch.supervise.child import look_in_child
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.flat import is_strided, raw_bytes
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.numerics.no_trace import NoTrace
from shoal.numerics.precision import Precision
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.deferred_init import InitRecorder, NotUnderstoodError
from shoal.parallel.model.wrappers import refuse_wrapped, unwrapped
from shoal.plans.grains import random_key

# Only a model constructed within this time is constructed again; only this many elements are compared.
_SECONDS = 0.3
_CHILD_SECONDS = 3.0
_MOST_ELEMENTS = 1 << 26
_TWO_RUNS = "two runs of this job may begin with different weights"
_SEED_IT = (
    "a generator of the job's own (numpy.random.default_rng(), torch.Generator()) has to be seeded inside model(), or "
    "left out: shoal seeds the global ones"
)


def build_model(job: Job, precision: Precision) -> nn.Module:
    """Build the job's model from the seed, on the device in the plan's dtype. Raises: as `make_model`."""
    return precision.apply(seeded_model(job).to(precision.device))


def seeded_model(job: Job) -> nn.Module:
    """Build the job's model with initial values from the seed. Raises: as `make_model`."""
    seed_everything(random_key(job.seed, "initial values"))
    return make_model(job)


def make_model(job: Job) -> nn.Module:
    """Build the job's model on one thread, so that its bits are always identical. Raises: UserCodeError, JobError."""
    try:
        with one_thread(), unwrapped():
            model = adapted(job.model())
    except ShoalError:
        raise
    except Exception as error:
        raise user_error("model()", error) from error
    if not isinstance(model, nn.Module):
        raise JobError(
            given=f"model() returned {type(model).__name__}",
            conflict="the engine trains a torch.nn.Module",
            remedy="return the module",
        )
    refuse_wrapped(model)
    with one_thread():
        return whole(model, job)


# ------------------------------------------------------------------------------------------------------- lazy modules


def lazy_names(model: object) -> list[str]:
    """Return the names of parameters and buffers that have no shape yet; empty if `model` is not a module."""
    if not isinstance(model, nn.Module):
        return []
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]


def whole(model: nn.Module, job: Job) -> nn.Module:
    """Return the model. If it has lazy modules, first run one forward with the first step's batch.

    Initial values are identical to plain torch: they are drawn when the forward reaches a lazy module, from the
    generators as the constructor left them. The forward changes nothing else: buffers, attributes of modules and
    generators are restored. Raises: UserCodeError, DataError; JobError for a lazy module that the forward does not use.
    """
    names = lazy_names(model)
    if not names:
        return model
    if any(isinstance(mode, InitRecorder) for mode in _get_current_dispatch_mode_stack()):
        raise NotUnderstoodError("lazy modules, whose shapes a forward gives")
    with generators_kept():  # the batch of the first step as one process reads it, or the first samples of a stream
        job = opened(job)
        data = job.train_data
        if isinstance(data.source, MapSource):
            order = order_of(data, job, job.length, job.shuffle is not False)
            loader = MapLoader(data.source, order, DataRank(0, 1), 0, pin_memory=False, bad_samples=data.bad_samples)
            loader.seek(0, order.num_grains)
            batch: object = next(loader.step(0).microbatches).batch
        else:
            batch = small_batch(data.source, data.collate, count=job.global_batch)
    tensors = {m: [*m._parameters.values(), *m._buffers.values()] for m in model.modules()}
    lazy = {m for m, own in tensors.items() if any(t is not None and is_lazy(t) for t in own)}
    attributes = {m: dict(vars(m)) for m in tensors if m not in lazy}
    buffers = {m: _buffer_values(m) for m in attributes}

    def keep(module: nn.Module, args: object) -> None:  # runs after torch's own hook, which initialises the module
        buffers.setdefault(module, _buffer_values(module))

    handles = [module.register_forward_pre_hook(keep) for module in lazy]
    try:
        with NoTrace(None, {"loss": job.loss}):
            job.loss(model, batch)
    except ShoalError:
        raise
    except Exception as error:
        raise user_error("the model or loss, in the forward that makes lazy modules whole,", error, batch) from error
    finally:
        for handle in handles:
            handle.remove()
    for module, values in attributes.items():
        vars(module).clear()
        vars(module).update(values)
    with torch.no_grad():
        for module, own_buffers in buffers.items():
            for name, (buffer, value) in own_buffers.items():
                module._buffers[name] = buffer.copy_(value)
    names = lazy_names(model)
    if names:
        raise JobError(
            given=f"a model with lazy modules: {', '.join(names[:8])}",
            conflict="the loss of the first batch does not use them, so that they have no shape",
            remedy="use them in the forward, or give these layers their sizes: nn.Linear(64, 10) for nn.LazyLinear(10)",
        )
    return model


def _buffer_values(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the buffers of a module by name, each with a copy of its value."""
    named = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and not is_lazy(buffer)}
    return {name: (buffer, buffer.detach().clone()) for name, buffer in named.items()}


# ---------------------------------------------------------------------------------------------- values without a seed


def construct_twice(make: Callable[[], nn.Module], drawn: bool) -> tuple[nn.Module, list[str]]:
    """Construct the model with seeded generators, and return it with sentences about values that ignore the seed.

    A child process constructs a second model if the first took up to 0.3 s. Side effects of `model()`, such as globals
    and prints, happen once in this process. Uninitialized memory counts as equal.
    Raises: errors of the first construction; JobError if a tensor that neither ranks nor checkpoints share gets other
    values.
    """
    began = time.perf_counter()
    model = make()
    if time.perf_counter() - began > _SECONDS:
        return model, []
    known = _values(model)

    def work() -> dict[str, list[str]]:
        torch.set_num_threads(1)  # a forked process has no OpenMP threads
        # As torch.use_deterministic_algorithms, without its import of torch's compiler, which takes 2 s.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        second = make()
        plain = _plain_values(second)
        third = _plain_values(make()) if plain else {}
        unlike = [name for name in plain if name in third and not _are_equal(plain[name], third[name])]
        return {"said": _second_differs(known, _values(second), drawn=drawn), "unshared": unlike}

    result = look_in_child(work, _CHILD_SECONDS)
    if result is not None and result["unshared"]:
        raise JobError(
            given=f"model(), which gives other values to {_some(result['unshared'])} when it is called again with the "
            "same seed",
            conflict="a plain attribute is neither shared by ranks nor in checkpoints: each rank, and a resumed run, "
            "would compute with values of its own",
            remedy=f"register_buffer, whose values are those of rank 0 and in each checkpoint; or {_SEED_IT}",
        )
    return model, result["said"] if result is not None else []


def unlike_ranks(mesh: Mesh, model: nn.Module) -> list[str]:
    """Return a sentence if ranks have constructed different initial values. Collective: all ranks, one JSON gather."""
    values = [value for value in _values(model).values() if is_strided(value) and not value.is_meta]
    if mesh.world_size == 1 or sum(value.numel() for value in values) > _MOST_ELEMENTS:
        return []
    checksums = mesh.gather_json(bits_checksum(values))
    others = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if not others:
        return []
    return [
        f"model() gives other initial values on rank {others[0]} than on rank 0, whose values are taken: they do not "
        f"follow from Job(seed), and {_TWO_RUNS}; construct the module inside model(); {_SEED_IT}"
    ]


def _values(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if not is_lazy(tensor)}


def _plain_values(model: nn.Module) -> dict[str, Tensor]:
    """Return floating-point tensors that are plain attributes: neither broadcast nor in checkpoints."""
    return {
        f"{prefix}.{name}".removeprefix("."): value.detach()
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
        and is_strided(value)
        and not value.is_meta
        and (value.is_floating_point() or value.is_complex())
    }


def _second_differs(known: dict[str, Tensor], second: dict[str, Tensor], *, drawn: bool) -> list[str]:
    """Return a sentence about the structure, shared tensors or values that the second construction reveals."""
    if known.keys() != second.keys():
        odd = min(known.keys() ^ second.keys())
        return [f"model() gives another structure when it is called again with the same seed ({odd}); {_SEED_IT}"]
    shared = [
        name
        for name, value in second.items()
        if value.numel() > 0 and not value.is_meta and value.data_ptr() == known[name].data_ptr()
    ]
    if shared and drawn:
        return [
            f"model() returns tensors that were made before it was called ({_some(shared)}): their initial values do "
            "not follow from Job(seed); construct the module inside model()"
        ]
    if not shared and sum(value.numel() for value in known.values()) <= _MOST_ELEMENTS:
        other = [name for name, value in known.items() if not _are_equal(value, second[name])]
        if other:
            return [
                f"model() gives other initial values when it is called again with the same seed ({_some(other)}): "
                f"{_TWO_RUNS}; {_SEED_IT}"
            ]
    return []


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return one.is_meta or one.layout != torch.strided or torch.equal(raw_bytes(one), raw_bytes(other))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
