"""The job's model: construction from the seed, the shapes of lazy modules, and a search for values without a seed.

The default number of grains follows from the model and a few samples. It depends on no device and no measurement. A
grain is the smallest microbatch. The estimate of a sample's activation bytes is positions times features, in float32.
Positions are tokens, patches or frames. Features are the elements that all modules compute at one position. The
estimate only ranks jobs: it ignores attention matrices. Layers of a convolutional model differ in their positions, so
its forward is run on the meta device, and the estimate is what autograd saves there, as in the planner's profile.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoal.data.loader import DataRank, MapLoader
from shoal.data.source import MapSource, Opened, opened, order_of, small_batch, training_data
from shoal.distributed.failures import user_error
from shoal.distributed.mesh import Mesh
from shoal.distributed.process_setup import one_thread
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.launch.supervise.child import look_in_child
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.expert_balance import count_choices
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.numerics.isolation import YieldingHooks, without_modes
from shoal.numerics.no_trace import NoTrace
from shoal.numerics.operators import is_strided, raw_bytes, replace_leaves, storage_key, tensors_in
from shoal.numerics.outputs import microbatch_loss
from shoal.numerics.precision import Precision
from shoal.parallel.blocks.narrow_products import in_precision
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.deferred_init import SEED_IT, InitRecorder, NotUnderstoodError, deferred
from shoal.parallel.model.structure import refuse_wrapped, unwrapped
from shoal.parallel.model.value_free import construction, twin
from shoal.plans.grains import FEW_GRAINS, default_grains, grains_of_statistics, random_key

# Only a model constructed within this time is constructed again; only this many elements are compared.
_SECONDS = 0.3
_CHILD_SECONDS = 3.0
_MOST_ELEMENTS = 1 << 26
_TWO_RUNS = "two runs of this job may begin with different weights"


def build_model(job: Job, precision: Precision) -> nn.Module:
    """Build the job's model from the seed, on the device in the plan's dtype. Raises: as `make_model`."""
    return in_precision(seeded_model(job).to(precision.device), precision)


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
    for module in model.modules() if job.batch_norm == "batch" else ():
        if isinstance(module, nn.SyncBatchNorm):  # as torch computes it in a process of its own
            module.__class__ = _AnyBatchNorm  # type: ignore[assignment]
    refuse_wrapped(model)
    with one_thread():
        model = whole(model, job)
    _refuse_unreadable(model)
    count_choices(model, job.buffers)
    return model


def _refuse_unreadable(model: nn.Module) -> None:
    """Raise JobError for a module without code in Python, and for a tensor that is not one block of numbers."""
    scripted = next((n or "itself" for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise JobError(
            given=f"model() with a part that torch.jit has scripted or traced: {scripted}",
            conflict="shoal divides, copies and checks modules of Python, and such a module has no code of its own",
            remedy="give the plain module, and script or trace what is trained; scripted functions may stay",
        )
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    sparse = next(((name, tensor.layout) for name, tensor in named if tensor.layout != torch.strided), None)
    if sparse is not None:
        raise JobError(
            given=f"the parameter or buffer {sparse[0]}, whose layout is {sparse[1]}",
            conflict="ranks compare and send tensors as one block of numbers, and checkpoints keep them so",
            remedy="register its indices and its values as buffers (values that are trained as a parameter), and make "
            "the sparse tensor of them in the forward; a constant may be a plain attribute",
        )


class _AnyBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of any number of dims, as SyncBatchNorm is."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept all inputs."""


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
            order = order_of(data, job, job.length)
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
            microbatch_loss(job)(model, batch)
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
            remedy=f"register_buffer, whose values are those of rank 0 and in each checkpoint; or {SEED_IT}",
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
        f"follow from Job(seed), and {_TWO_RUNS}; construct the module inside model(); {SEED_IT}"
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
        return [f"model() gives another structure when it is called again with the same seed ({odd}); {SEED_IT}"]
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
                f"{_TWO_RUNS}; {SEED_IT}"
            ]
    return []


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return one.is_meta or one.layout != torch.strided or torch.equal(raw_bytes(one), raw_bytes(other))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


_FLOAT_BYTES = 4
# An upper bound of the tensors that autograd saves for a layer: outputs of the layer, norm, activation and dropout.
_MOST_SAVED = 4
# Number of samples to read, spread over the data: ragged samples differ, and a batch is as long as its longest sample.
_LOOKED_AT = 8
# Classes of torch and Keras, by name: an import of Keras would be slow for jobs that do not use it.
_BATCH_NORMS = {"_BatchNorm", "BatchNormalization"}
_DIMS_OF_TOKENS = 2
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class GrainsChoice:
    """Number of grains, and the reason in words."""

    num_grains: int
    why: str


def with_grains(job: Job) -> Job:
    """Return the job with its number of grains, the default if the job has none. Raises: errors of the job's data."""
    return replace(job, grains=grains_of(job, outline(job)).num_grains) if job.grains is None else job


def grains_of(job: Job, model: nn.Module | None, data: Opened | None = None) -> GrainsChoice:
    """Return the number of grains of a job, and the reason.

    `model`: the job's model on any device, or None if `outline` failed. In this case a deferred construction is tried.
    Raises: DataError if the data cannot be opened.
    """
    if job.grains is not None:
        return GrainsChoice(job.grains, "as the job says")
    if not job.fuse:
        return GrainsChoice(FEW_GRAINS, "default where the loss compares the samples of a grain")
    model = model or deferred_outline(job)
    if model is None:
        return GrainsChoice(FEW_GRAINS, "default; the model's size is not known before it is built")
    for name, module in model.named_modules():
        if module.training and any(base.__name__ in _BATCH_NORMS for base in type(module).__mro__):
            source = (data or training_data(job)).source
            count = grains_of_statistics(job.global_batch, len(source) if isinstance(source, MapSource) else 0)
            return GrainsChoice(count, f"default where batch statistics need samples ({name})")
    # A batch of a few samples. Errors are left to the first step, and the global generators stay unchanged.
    opened_data = data or training_data(job)
    source, batch, count = opened_data.source, None, 2
    with generators_kept(), contextlib.suppress(Exception):
        if isinstance(source, MapSource):
            count = min(len(source), _LOOKED_AT)
            batch = source.looked_at(np.arange(count) * len(source) // count)
        else:
            batch = small_batch(source, opened_data.collate)
    if batch is None:
        return GrainsChoice(FEW_GRAINS, "default; no sample could be looked at ahead")
    feature_bytes = _FLOAT_BYTES * features_of(model)
    sample_bytes = float(positions_of(model, batch, count) * feature_bytes)
    if is_convolutional(model):
        elements = max((-(-leaf.numel() // count) for leaf in tensors_in(batch)), default=1)
        if default_grains(job.global_batch, _MOST_SAVED * elements * feature_bytes) > FEW_GRAINS:  # else light anyway
            sample_bytes = saved_bytes(microbatch_loss(job), model, batch) / count or sample_bytes
    num_grains = default_grains(job.global_batch, sample_bytes)
    weight = "light" if num_grains == FEW_GRAINS else "heavy"
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if sample_bytes >= size), ("kB", 1e3))
    activations = f"about {sample_bytes / size:.3g} {unit} of activations each"
    return GrainsChoice(num_grains, f"default for {weight} samples: {activations}")


def outline(job: Job) -> nn.Module | None:
    """Return the job's model on the meta device, or None if its constructor computes with values."""
    try:
        with construction(), unwrapped(), warnings.catch_warnings():
            # A model() that loads a state dict loads nothing here, and all of it in the run.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            model = adapted(job.model())
        if lazy_names(model):  # their shapes need a forward with values
            with generators_kept():
                model = whole(job.model(), job if job.grains is not None else replace(job, grains=1)).to("meta")
        if isinstance(model, nn.Module):
            _refuse_unreadable(model)  # the ranks say so
    except Exception:
        return None
    return model if isinstance(model, nn.Module) else None


def deferred_outline(job: Job) -> nn.Module | None:
    """Return the job's model with deferred initial values, or None if its construction cannot be deferred."""
    try:
        with unwrapped():
            model = deferred(job.model, job.seed)[0]
    except Exception:
        return None
    return None if lazy_names(model) else model


def is_convolutional(model: nn.Module) -> bool:
    """Return True if a layer after the first one is a convolution, so that layers differ in their positions."""
    kinds = (*_CONVOLUTIONS, *_TRANSPOSED)
    layers = [module for module in model.modules() if isinstance(module, (*kinds, nn.Linear, nn.RNNBase))]
    return any(isinstance(layer, kinds) for layer in layers[1:])


def saved_bytes(loss: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> int:
    """Return the bytes that autograd saves in a forward of a batch, or 0 if the model cannot run on the meta device.

    The meta device has shapes and no values, so nothing is computed and the model stays unchanged. The first forward
    there takes a second or two, in which torch imports its kernels' shapes.
    """
    saved: dict[int, UntypedStorage] = {}  # kept alive, so that no other storage gets their key
    returned: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    own: list[Tensor] = []
    with NoTrace(model, {"loss": loss}), without_modes(), warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        shapes = twin(model, lambda _, tensor: tensor.detach().to("meta")).train()
        shapes.register_forward_hook(lambda *_: returned.append(True))
        inputs = replace_leaves(batch, Tensor, lambda leaf: leaf.to("meta"))
        own = [*shapes.parameters(), *shapes.buffers(), *tensors_in(inputs)]
        with torch.enable_grad(), torch.device("meta"), YieldingHooks(pack, lambda tensor: tensor):
            loss(shapes, inputs)  # a loss that reads values raises after the model's forward
    for tensor in own:
        saved.pop(storage_key(tensor), None)
    return sum(storage.nbytes() for storage in saved.values()) if returned else 0


def features_of(model: nn.Module) -> int:
    """Return the number of elements that all modules with parameters compute at one position of a sample."""
    count = 0
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        matrices = [p.shape[0] for p in own if p.ndim > 1]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            count += module.embedding_dim
        else:
            count += sum(matrices) if matrices else max((p.numel() for p in own), default=0)
    return count


def positions_of(model: nn.Module, batch: Any, num_samples: int) -> int:
    """Return a sample's number of positions: tokens if the model has embeddings, else outputs of its first layer."""
    embeds = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    per_position = 0  # input elements of the first layer for each of its output positions
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            per_position = module.in_channels * math.prod(module.stride)
        elif isinstance(module, nn.Linear):
            per_position = module.in_features
        elif isinstance(module, nn.RNNBase):
            per_position = module.input_size
        else:
            continue
        break
    positions = [1]
    for leaf in tensors_in(batch):
        elements = -(-leaf.numel() // num_samples)
        # Integers with more dims are pixels, or classes of pixels.
        if not leaf.is_floating_point() and leaf.ndim <= _DIMS_OF_TOKENS:
            positions.append(elements if embeds else 1)
        elif per_position:
            positions.append(elements // per_position)
    return max(positions)
