"""Plan: the parallel layout of a job, frozen and complete. Each section is one concept with exact keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from shoal.bounded_files import RefusedFileError, read_toml
from shoal.errors import PlanError, nearest

# Outermost first: neighbouring ranks are on the axis that communicates most, so tensor groups stay within a host.
AXES = ("pipeline", "data", "shard", "context", "tensor")
# Every degree of a layout: `expert` divides the ranks of a stage once more.
DEGREES = (*AXES, "expert")


class Coordinate(NamedTuple):
    """A rank's index on each axis, each in [0, degree)."""

    pipeline: int
    data: int
    shard: int
    context: int
    tensor: int


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


SCHEMA: Literal[1] = 1
Dtype = Literal["float32", "bfloat16", "float16"]
Degree = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        """Raise a PlanError, where pydantic raises its own error: users write `shoal.Layout(data=2)` by hand."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _plan_error(error, type(self), f"{type(self).__name__}: ") from None

    # Without this mark pydantic calls the method for sections within a plan too, and loses their place in the plan.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def trusted_copy(self, values: Mapping[str, Any]) -> Self:
        """Return the copy that `model_copy` makes with these values, but faster: a search makes very many copies."""
        copied, fields_set = self.__new__(type(self)), self.__pydantic_fields_set__
        if not fields_set >= values.keys():
            fields_set = fields_set | values.keys()
        object.__setattr__(copied, "__dict__", {**self.__dict__, **values})
        object.__setattr__(copied, "__pydantic_fields_set__", fields_set)
        object.__setattr__(copied, "__pydantic_extra__", None)
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied


class Layout(_Section):
    """Degrees of the mesh axes, each at least 1; their product, without `expert`, is the world size.

    `expert`: number of ranks that divide the experts of each mixture. It divides the ranks of a pipeline stage (data x
    shard x context x tensor) and is no factor of the world size. Consecutive ranks of a stage are an expert group.
    `shares`: relative speeds of the ranks that divide grains (data x shard, in rank order), as whole numbers. Empty
    means equal speeds. A rank computes grains in proportion to its speed.
    Raises: PlanError for an unknown name, or a number that is no integer of at least 1.
    """

    data: Degree = 1
    shard: Degree = 1
    tensor: Degree = 1
    pipeline: Degree = 1
    context: Degree = 1
    expert: Degree = 1
    shares: tuple[Degree, ...] = Field(default=(), strict=False)

    @property
    def world_size(self) -> int:
        """Number of processes: the product of the degrees."""
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    def degree(self, axis: str) -> int:
        """Return the degree of one axis."""
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`; the inverse of `rank`. Raises: IndexError outside the world."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        places: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**places)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at a coordinate. Raises: IndexError if an index is outside its degree."""
        rank = 0
        for axis, place in zip(AXES, coordinate, strict=True):
            if not 0 <= place < self.degree(axis):
                raise IndexError(f"{axis} = {place} is not in [0, {self.degree(axis)})")
            rank = rank * self.degree(axis) + place
        return rank

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """Yield the groups of ranks that differ only along `axes`, in order."""
        seen: dict[Coordinate, list[int]] = {}
        for rank in range(self.world_size):
            seen.setdefault(self.coordinate(rank)._replace(**dict.fromkeys(axes, 0)), []).append(rank)
        yield from seen.values()

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage, which `expert` divides into groups."""
        return self.data * self.shard * self.context * self.tensor

    def expert_groups(self) -> list[list[int]]:
        """Return the groups of ranks that divide the experts of a stage among them: consecutive ranks, in order."""
        return [list(range(first, first + self.expert)) for first in range(0, self.world_size, self.expert)]

    def expert_copies(self) -> list[list[int]]:
        """Return the groups of ranks of a stage that hold the same experts."""
        stages = range(0, self.world_size, self.stage_ranks)
        return [
            list(range(first + place, first + self.stage_ranks, self.expert))
            for first in stages
            for place in range(self.expert)
        ]

    def fitting_experts(self, stage_ranks: int) -> int:
        """Return the largest degree of experts for a stage of this many ranks that divides the present degree."""
        return math.gcd(self.expert, stage_ranks)

    @property
    def divides_grains(self) -> int:
        """Number of ranks with different grains: the data degree times the shard degree."""
        return self.data * self.shard

    @property
    def shares_grains(self) -> int:
        """Number of ranks that compute the same grains together: the product of the other degrees."""
        return self.tensor * self.pipeline * self.context


class BatchSection(_Section):
    """Grains in one forward; 0 leaves the number to `plans.resolve.judge`."""

    grains_per_microbatch: Annotated[int, Field(ge=0)] = 0


class ShardSection(_Section):
    """ZeRO stage of the shard axis (1, 2 or 3), and the microbatches after which sharded gradients are summed.

    `sizes`: relative sizes of the ranks' shards along the shard axis, as whole numbers. Empty means equal shards.
    """

    level: Literal["optimizer", "gradients", "parameters"] = "parameters"
    reduce: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    offload: bool = False
    sizes: tuple[Degree, ...] = Field(default=(), strict=False)


class TensorSection(_Section):
    """Sequence parallelism: whether the tensor axis divides positions between the pairs of layers."""

    sequence: bool = False


class PipelineSection(_Section):
    """Pipeline schedule and stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    stages_per_rank: Degree = 1
    split: tuple[str, ...] = Field(default=(), strict=False)


def _not_whole_tensor(products: object) -> object:
    """Refuse scales of whole tensors by their usual names in other programs."""
    if isinstance(products, str) and products.startswith("float8") and "tensor" in products:
        message = "a scale of a whole tensor depends on how the layout cuts the tensor"
        raise PydanticCustomError("whole_tensor", message)
    return products


Products = Literal["same", "float8_rows", "float8_blocks"]


class PrecisionSection(_Section):
    """Dtypes of the parameters, of the compute (autocast if it differs) and of the gradient sums.

    `products`: what linear layers of repeated blocks multiply in: the compute's dtype, or float8 with scales of rows or
    of blocks of 128.
    """

    parameters: Dtype = "float32"
    compute: Dtype = "float32"
    products: Annotated[Products, BeforeValidator(_not_whole_tensor)] = "same"
    reduce: Dtype = "float32"
    loss_scale: Literal["none", "dynamic"] | Annotated[float, Field(gt=0)] = "none"


class MemorySection(_Section):
    """Activation recomputation, and whether ranks of a host share one copy of parameters and optimizer state."""

    recompute: Literal["none", "selective", "full"] = "none"
    shared: bool = False


class CollectivesSection(_Section):
    """Algorithm of the gradients' all_reduce, and their compression."""

    all_reduce: Literal["native", "ring", "tree", "recursive_doubling", "hierarchical", "shared_memory"] = "native"
    compression: Literal["none", "bfloat16", "float16", "int8", "topk", "powersgd"] = "none"


class ServerSection(_Section):
    """Parameter servers, to which workers push gradients; `staleness` bounds the age of applied gradients."""

    mode: Literal["none", "synchronous", "bounded", "asynchronous"] = "none"
    staleness: Annotated[int, Field(ge=0)] = 0
    num_servers: Degree = 1


class CompressionSection(_Section):
    """Strength of gradient compression, and its error guard (see docs/compression.md)."""

    block: Annotated[int, Field(ge=1)] = 256  # values that share an int8 scale
    density: Annotated[float, Field(gt=0, le=1)] = 0.1  # the share of values that topk sends
    rank: Degree = 4  # rank of powersgd's factors
    feedback: bool = True  # add the unsent part to the next step's gradient
    guard_every: Annotated[int, Field(ge=0)] = 100  # interval in steps of comparisons with the exact sum; 0: never
    guard_lost: Annotated[float, Field(gt=0)] = 0.5  # lost share of energy that ends compression for the run


class DataSection(_Section):
    """Data-loading processes per rank; 0 loads in the rank itself."""

    workers: Annotated[int, Field(ge=0)] = 0


class ExecutionSection(_Section):
    """Exact or fast sums over grains; compilation; channels-last memory format of images; CUDA graph of a step."""

    exact: bool = False
    channels_last: bool = False
    cuda_graph: bool = False
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"


def _compared(prediction: dict[str, Any]) -> dict[str, Any]:
    """Check that a run can compare this prediction's numbers with its own. Raises: ValueError."""
    for name in ("terms", "factors"):
        values = prediction.get(name, {})
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            raise ValueError(f"{name} is a table of numbers, as shoal plan -o writes it")
    for name in ("step_seconds", "peak_bytes", "host_seconds"):
        if not _is_number(prediction.get(name, 0)):
            raise ValueError(f"{name} is a number, as shoal plan -o writes it")
    if prediction.get("terms") and "step_seconds" not in prediction:
        raise ValueError("terms without the step_seconds that they add up to")
    return prediction


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Plan(_Section):
    """Parallel layout of a job: complete, written as TOML, never an input to the maths."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    layout: Layout = Layout()
    batch: BatchSection = BatchSection()
    shard: ShardSection = ShardSection()
    tensor: TensorSection = TensorSection()
    pipeline: PipelineSection = PipelineSection()
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    collectives: CollectivesSection = CollectivesSection()
    compression: CompressionSection = CompressionSection()
    server: ServerSection = ServerSection()
    data: DataSection = DataSection()
    execution: ExecutionSection = ExecutionSection()
    prediction: Annotated[dict[str, Any], AfterValidator(_compared)] = Field(default_factory=dict)

    @property
    def shards_model(self) -> bool:
        """True if gradients, and possibly parameters, are divided over the shard axis."""
        return self.layout.shard > 1 and self.shard.level != "optimizer"

    @property
    def divides_model(self) -> bool:
        """True if each rank has only a part of the model."""
        return self.shards_model or self.layout.shares_grains > 1 or self.layout.expert > 1

    @property
    def shares_memory(self) -> bool:
        """True if the ranks share one copy of the parameters in memory."""
        return self.memory.shared and not self.serves and self.layout.divides_grains > 1

    @property
    def num_owners(self) -> int:
        """Number of ranks that divide the optimizer's state of a whole model, and a shared copy of the parameters."""
        return self.layout.divides_grains if self.shares_memory else self.layout.shard

    @property
    def serves(self) -> bool:
        """True if servers store the parameters; the ranks of the layout are then workers."""
        return self.server.mode != "none"

    @property
    def num_processes(self) -> int:
        """Number of processes: the ranks of the layout and, with servers, the servers and the conductor."""
        return self.layout.world_size + (1 + self.server.num_servers if self.serves else 0)

    @property
    def divides_step(self) -> int:
        """Number of ranks that divide the grains of one step; a worker that runs ahead computes all of them."""
        return 1 if self.server.mode in ("bounded", "asynchronous") else self.layout.divides_grains

    @property
    def uncompressed(self) -> Self:
        """This plan without gradient compression."""
        if self.collectives.compression == "none":
            return self
        plain = self.collectives.model_copy(update={"compression": "none"})
        return self.model_copy(update={"collectives": plain, "compression": CompressionSection()})

    def with_sections(self, **sections: dict[str, Any]) -> Plan:
        """Return this plan with some keys of some sections replaced. Raises: PlanError as `from_mapping` does."""
        document = self.to_mapping()
        for name, changes in sections.items():
            document[name] = {**document.get(name, {}), **changes}
        return Plan.from_mapping(document, source="plan")

    def to_mapping(self) -> dict[str, Any]:
        """Return the whole plan as nested dicts, `schema` first, with every key present."""
        document = self.model_dump(by_alias=True)
        for section, key in (("pipeline", "split"), ("layout", "shares"), ("shard", "sizes")):
            document[section][key] = list(document[section][key])
        return document

    @classmethod
    def from_mapping(cls, document: dict[str, Any], source: str) -> Self:
        """Return the plan from nested dicts; `source` names the file in messages.

        Raises: PlanError with every mistake at once, each with its path and, for an unknown key, the nearest name.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise _plan_error(error, cls, f"in {source}: ") from None


def _plan_error(error: ValidationError, root: type[BaseModel], source: str) -> PlanError:
    given: list[str] = []
    conflict: list[str] = []
    remedy: list[str] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False):
        # A union reports an error for each member, with the member as the last part of the path.
        path = tuple(str(p) for p in item["loc"] if not str(p).startswith(("literal[", "constrained-", "float")))
        dotted = ".".join(path)
        if dotted in seen:
            remedy[-1] += f"; or {_wanted(item, path, root)}"
            continue
        seen.add(dotted)
        given.append(f"{dotted} = {item['input']!r:.60}")
        if item["type"] == "extra_forbidden":
            known = _known_keys(path[:-1], root)
            conflict.append(f"{dotted}: unknown key")
            remedy.append(f"{dotted}: use one of {', '.join(known)}{nearest(path[-1], known)}")
        else:
            expected = item["msg"].removeprefix("Value error, ")
            expected = expected[0].lower() + expected[1:]
            conflict.append(f"{dotted}: {expected}")
            remedy.append(f"{dotted}: {_wanted(item, path, root)}")
    return PlanError(given=source + "\n".join(given), conflict="\n".join(conflict), remedy="\n".join(remedy))


# Remedies by pydantic's error type, formatted with the error's context.
_WANTED = {
    "int_type": "write a whole number, without quotes or a point",
    "bool_type": "write true or false",
    "float_type": "write a number, without quotes",
    "string_type": "write a text in quotes",
    "tuple_type": "write a list in brackets",
    "dict_type": "write a table",
    "greater_than_equal": "write {ge} or more",
    "greater_than": "write more than {gt}",
    "less_than_equal": "write {le} or less",
    "whole_tensor": 'write "float8_rows", a scale for each token and each row of a weight, or "float8_blocks"',
    "value_error": "leave [prediction] to the planner, or out: the run only compares itself with it",
}


def _known_keys(path: tuple[str, ...], root: type[BaseModel]) -> list[str]:
    model: Any = root
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [f.alias or name for name, f in model.model_fields.items()]


def _wanted(item: Any, path: tuple[str, ...], root: type[BaseModel]) -> str:
    if path == ("schema",):
        return f"write {SCHEMA}, or read the plan with the version of shoal that wrote it"
    if item["type"] == "literal_error":
        options = [o.strip(" '") for o in str(item["ctx"]["expected"]).replace(" or ", ", ").split(",")]
        close = nearest(item["input"], options) if isinstance(item["input"], str) else ""
        return f"write one of {', '.join(options)}{close}"
    known = _known_keys(path, root)
    if known:
        return f"write a table with any of {', '.join(known)}"
    return _WANTED.get(item["type"], "leave it out for the default").format(**item.get("ctx", {}))


def read_plan(path: Path, *, named: bool = False) -> Plan:
    """Return the plan in a TOML file; missing keys have their defaults. `named`: a user names the file.

    Raises: PlanError if the file is missing, is not TOML, or has mistakes (all of them at once).
    """
    try:
        document = read_toml(path, named=named)
    except RefusedFileError as error:
        raise PlanError(given=f"--plan {path}", conflict=str(error), remedy="correct the file at that place") from None
    except OSError as error:
        raise PlanError(
            given=f"--plan {path}",
            conflict=f"the file cannot be read: {error.strerror}",
            remedy="give the path of a plan, or leave --plan out and write --devices N",
        ) from None
    document.setdefault("schema", SCHEMA)
    return Plan.from_mapping(document, source=str(path))


def plan_text(plan: Plan) -> str:
    """Return the whole plan as TOML text, from which `read_plan` restores the same plan."""
    return tomli_w.dumps(plan.to_mapping())


_ZERO = {"optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}


def degrees_in_use(layout: Layout, between: str = " = ") -> list[str]:
    """Return the name and degree of each axis with a degree above 1, in the order of the plan file."""
    axes = ("data", "shard", "tensor", "pipeline", "context", "expert")
    return [f"{axis}{between}{layout.degree(axis)}" for axis in axes if layout.degree(axis) > 1]


def described(plan: Plan) -> str:
    """Return the degrees in use, the settings that differ from the default, and the servers if any."""
    words = degrees_in_use(plan.layout, " ") or ["one device"]
    if plan.layout.shares:
        words.append(f"shares {':'.join(map(str, plan.layout.shares))}")
    if plan.layout.shard > 1:
        words.append(_ZERO[plan.shard.level])
    if plan.layout.pipeline > 1:
        stages = f" x {plan.pipeline.stages_per_rank}" if plan.pipeline.stages_per_rank > 1 else ""
        words.append(plan.pipeline.schedule + stages)
    if plan.tensor.sequence and plan.layout.tensor > 1:
        words.append("sequence")
    if plan.shares_memory:
        words.append("one copy of the model")
    if plan.execution.cuda_graph:
        words.append("CUDA graph")
    if plan.memory.recompute != "none":
        words.append(f"recompute {plan.memory.recompute}")
    if plan.serves:
        bound = f" (staleness {plan.server.staleness})" if plan.server.mode == "bounded" else ""
        count = plan.server.num_servers
        words.append(f"{plan.server.mode}{bound} with {count} server{'s' if count > 1 else ''}")
    return ", ".join(words)


def layout_name(plan: Plan) -> str:
    """Return the layout as a table names it, such as `dp8 zero3 tp2 pp4`; `described` says the same in words.

    `dp` counts all ranks that share the grains of a step. `zero3/4` means that 4 of them divide the model's state.
    """
    axes, pipeline = plan.layout, plan.pipeline
    words = [f"dp{axes.data * axes.shard}"] if axes.data * axes.shard > 1 else []
    if axes.shard > 1:
        words.append(_ZERO[plan.shard.level].replace("-", "").lower() + (f"/{axes.shard}" if axes.data > 1 else ""))
    if axes.context > 1:
        words.append(f"cp{axes.context}")
    if axes.tensor > 1:
        words.append(f"tp{axes.tensor}" + ("+sp" if plan.tensor.sequence else ""))
    if axes.pipeline > 1:
        stages = f"x{pipeline.stages_per_rank}" if pipeline.stages_per_rank > 1 else ""
        schedule = {"1f1b": "", "interleaved_1f1b": " interleaved"}.get(pipeline.schedule, f" {pipeline.schedule}")
        words.append(f"pp{axes.pipeline}{stages}{schedule}")
    if axes.expert > 1:
        words.append(f"ep{axes.expert}")
    words = words or ["1 device"]
    words += [
        word for word, applies in (("shared", plan.shares_memory), ("graph", plan.execution.cuda_graph)) if applies
    ]
    if plan.memory.recompute != "none":
        words.append("rc" if plan.memory.recompute == "full" else "rc-part")
    if plan.serves:
        words.append(f"ps{plan.server.num_servers} {plan.server.mode}")
    return " ".join(words)
