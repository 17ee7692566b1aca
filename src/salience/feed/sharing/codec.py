"""Decoded samples as bytes in shared memory and back: tensors, arrays, images and plain values, nested. Nothing is unpickled.

A value that cannot be restored exactly (an object of an unknown class, an image with a palette) is not encoded; each job
decodes such samples by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

MODES = ("L", "RGB", "RGBA", "CMYK", "I", "F")
"""Modes of PIL images that consist of nothing but their pixels."""
PLAIN_KINDS = "biufc"
"""Kinds of NumPy types that are fully described by their bytes."""


class Unshareable(TypeError):
    """The sample cannot be encoded; the message names the offending class."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample as a header and buffers."""

    header: bytes
    buffers: list[memoryview]

    @property
    def size(self) -> int:
        """Bytes that `write` needs."""
        return 4 + len(self.header) + sum(buffer.nbytes for buffer in self.buffers)

    def write(self, target: memoryview) -> None:
        """Copy the encoded sample into `size` bytes of memory."""
        start = 4 + len(self.header)
        target[:4] = len(self.header).to_bytes(4, "little")
        target[4:start] = self.header
        for buffer in self.buffers:
            target[start : start + buffer.nbytes] = buffer
            start += buffer.nbytes


def encode(sample: Any) -> Encoded:
    """The sample as bytes; raises Unshareable if it could not be restored exactly."""
    buffers: list[memoryview] = []
    header = json.dumps(_described(sample, buffers), separators=(",", ":")).encode()
    return Encoded(header, buffers)


def decode(data: memoryview) -> Any:
    """The sample that was encoded; it shares no memory with `data`."""
    start = 4 + int.from_bytes(data[:4], "little")
    description = json.loads(bytes(data[4:start]))

    def take(count: int) -> bytearray:
        nonlocal start
        start += count
        return bytearray(data[start - count : start])

    return _built(description, take)


def _described(value: Any, buffers: list[memoryview]) -> list[Any]:
    """The value as JSON, without the bytes that go to `buffers`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return ["value", value]
    if kind in (tuple, list):
        return [kind.__name__, [_described(part, buffers) for part in cast("list[Any]", value)]]
    if kind is dict and all(type(key) is str for key in cast("dict[Any, Any]", value)):
        return ["dict", [[key, _described(part, buffers)] for key, part in cast("dict[str, Any]", value).items()]]
    if kind is Tensor:
        return _tensor(value, buffers)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _array(value, buffers)
    if kind is bytes:
        buffers.append(memoryview(value))
        return ["bytes", len(value)]
    if kind.__module__ == "PIL.Image" and value.mode in MODES and not value.info.get("exif"):
        pixels = value.tobytes()
        buffers.append(memoryview(pixels))
        return ["image", value.mode, value.size, len(pixels)]
    raise Unshareable(f"{kind.__module__}.{kind.__qualname__}")


def _tensor(value: Tensor, buffers: list[memoryview]) -> list[Any]:
    if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad or value.is_quantized:
        raise Unshareable("a tensor that is sparse, quantized, on a device or needs a gradient")
    if value.numel():
        whole = value.contiguous()  # not detach().numpy(), which has no bfloat16
        buffers.append(_view(whole.view(-1).view(torch.uint8).numpy()))
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]


def _array(value: Any, buffers: list[memoryview]) -> list[Any]:
    if value.dtype.kind not in PLAIN_KINDS:
        raise Unshareable(f"an array of {value.dtype}")
    array = np.ascontiguousarray(value)
    if array.nbytes:
        buffers.append(_view(array.reshape(-1).view(np.uint8)))
    name = "array" if isinstance(value, np.ndarray) else "scalar"
    return [name, value.dtype.str, list(value.shape)]


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _built(description: list[Any], take: Callable[[int], bytearray]) -> Any:
    kind, first, *rest = description
    if kind == "value":
        return first
    if kind in ("tuple", "list"):
        parts = [_built(part, take) for part in first]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {key: _built(part, take) for key, part in first}
    if kind == "bytes":
        return bytes(take(first))
    if kind == "image":
        from PIL import Image

        return Image.frombytes(first, tuple(rest[0]), bytes(take(rest[1])))
    shape = rest[0]
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "tensor":
        dtype: torch.dtype = getattr(torch, first)
        return (
            torch.frombuffer(take(count * dtype.itemsize), dtype=dtype).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    array = np.frombuffer(take(count * np.dtype(first).itemsize), dtype=first).reshape(shape)
    return array if kind == "array" else array[()]
