"""Safetensors files, written from the tensors' own memory.

The library's `save` makes the whole file in memory first; at the end of a run that fills its memory there is no room
for that, and a failed allocation of the library's ends the process or leaves it standing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shoal.checkpoint.state import raw

# What the format calls the dtypes.
NAMES = {
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


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in order: its header, then each tensor's own memory. Raises: KeyError for other dtypes."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # each at a multiple of its size
    header, end = {}, 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        yield raw(tensors[name])
