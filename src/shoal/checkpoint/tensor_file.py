"""Tensor files in the safetensors format, written without a copy of the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shoal.checkpoint.state import raw

# Dtype names of the safetensors format.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def open_tensors(path: Path) -> Any:
    """Open a tensor file, also at a path that is not UTF-8, which the library refuses.

    Raises: SafetensorError; OSError.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            return safe_open(f"/dev/fd/{file.fileno()}", framework="pt")
    return safe_open(path, framework="pt")


def tensor_file_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: the header, then each tensor's own memory. Raises: KeyError for other dtypes.

    The library's `save` first builds the whole file in memory. If a run has used up its memory, that allocation fails
    and ends or hangs the process.
    """
    order, header = tensor_file_head({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    yield header
    for name in order:
        yield raw(tensors[name])


def tensor_file_head(
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[list[str], bytes]:
    """Return the names in the order of their data, and the header of a file with these dtypes and shapes."""
    order = sorted(described, key=lambda name: (-described[name][0].itemsize, name))  # aligned to item size
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = described[name]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return order, len(text).to_bytes(8, "little") + text
