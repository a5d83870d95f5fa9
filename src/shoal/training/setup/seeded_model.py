"""Comparison of two constructions of a job's model with one seed, to find initial values that ignore the seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.distributed.mesh import Mesh
from shoal.errors import JobError
from shoal.launch.supervise.child import look_in_child
from shoal.numerics.checksum import bits_checksum
from shoal.numerics.flat import is_strided, raw_bytes

# Only a model constructed within this time is constructed again; only this many elements are compared.
_SECONDS = 0.3
_CHILD_SECONDS = 3.0
_MOST_ELEMENTS = 1 << 26
_TWO_RUNS = "two runs of this job may begin with different weights"
_SEED_IT = (
    "a generator of the job's own (numpy.random.default_rng(), torch.Generator()) has to be seeded inside model(), or "
    "left out: shoal seeds the global ones"
)


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
    known = dict(_values(model))

    def work() -> dict[str, list[str]]:
        torch.set_num_threads(1)  # a forked process has no OpenMP threads
        # As torch.use_deterministic_algorithms, without its import of torch's compiler, which takes 2 s.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        again = make()
        unshared = dict(_unshared(again))
        third = dict(_unshared(make())) if unshared else {}
        other = [name for name in unshared if name in third and not _are_equal(unshared[name], third[name])]
        return {"said": list(_unlike(known, dict(_values(again)), drawn=drawn)), "unshared": other}

    found = look_in_child(work, _CHILD_SECONDS)
    if found is not None and found["unshared"]:
        raise JobError(
            given=f"model(), which gives other values to {_some(found['unshared'])} when it is called again with the "
            "same seed",
            conflict="a plain attribute is neither shared by ranks nor in checkpoints: each rank, and a resumed run, "
            "would compute with values of its own",
            remedy=f"register_buffer, whose values are those of rank 0 and in each checkpoint; or {_SEED_IT}",
        )
    return model, found["said"] if found is not None else []


def unlike_ranks(mesh: Mesh, model: nn.Module) -> list[str]:
    """Return a sentence if ranks have constructed different initial values. Collective: all ranks, one JSON gather."""
    values = [value for _, value in _values(model) if is_strided(value) and not value.is_meta]
    if mesh.world_size == 1 or sum(value.numel() for value in values) > _MOST_ELEMENTS:
        return []
    told = mesh.gather_json(bits_checksum(values))
    others = [rank for rank, checksum in enumerate(told) if checksum != told[0]]
    if not others:
        return []
    return [
        f"model() gives other initial values on rank {others[0]} than on rank 0, whose values are taken: they do not "
        f"follow from Job(seed), and {_TWO_RUNS}; construct the module inside model(); {_SEED_IT}"
    ]


def _values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return ((name, tensor.detach()) for name, tensor in tensors if not is_lazy(tensor))


def _unshared(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield floating-point tensors that are plain attributes: neither broadcast nor in checkpoints."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            plain = isinstance(value, Tensor) and is_strided(value) and not value.is_meta
            if plain and (value.is_floating_point() or value.is_complex()):
                yield f"{prefix}.{name}".removeprefix("."), value.detach()


def _unlike(known: dict[str, Tensor], again: dict[str, Tensor], *, drawn: bool) -> Iterator[str]:
    """Yield sentences about structure, shared tensors or values that the second construction reveals."""
    shared = [name for name, value in again.items() if name in known and _is_one(value, known[name])]
    if known.keys() != again.keys():
        odd = min(known.keys() ^ again.keys())
        yield f"model() gives another structure when it is called again with the same seed ({odd}); {_SEED_IT}"
    elif shared and drawn:
        yield (
            f"model() returns tensors that were made before it was called ({_some(shared)}): their initial values do "
            "not follow from Job(seed); construct the module inside model()"
        )
    elif not shared and sum(value.numel() for value in known.values()) <= _MOST_ELEMENTS:
        other = [name for name, value in known.items() if not _are_equal(value, again[name])]
        if other:
            yield (
                f"model() gives other initial values when it is called again with the same seed ({_some(other)}): "
                f"{_TWO_RUNS}; {_SEED_IT}"
            )


def _is_one(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and not one.is_meta and one.data_ptr() == other.data_ptr()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return one.is_meta or one.layout != torch.strided or torch.equal(raw_bytes(one), raw_bytes(other))


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
