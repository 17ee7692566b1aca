"""Moving batches to a device: from pinned memory, on a stream of their own, one batch ahead of the training loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from salience.run.part import Batch


def moved(content: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`: inside dicts, lists and tuples, and of objects that have a method `to`."""
    if isinstance(content, Tensor):
        return content.to(device, non_blocking=True)
    if callable(getattr(content, "to", None)):
        return content.to(device)
    if isinstance(content, MutableMapping):
        mapping = copy.copy(cast("MutableMapping[Any, Any]", content))  # of its own type, as DataLoader pins it
        mapping.update({key: moved(part, device) for key, part in mapping.items()})
        return mapping
    if isinstance(content, (list, tuple)):
        items = [moved(part, device) for part in cast("list[Any]", content)]
        return type(content)(*items) if hasattr(content, "_fields") else type(content)(items)
    return content


def tensors_of(content: Any) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(content, Tensor):
        yield content
    else:
        for part in _parts_of(content):
            yield from tensors_of(part)


def _parts_of(content: Any) -> list[Any]:
    if isinstance(content, Mapping):
        return list(cast("Mapping[Any, Any]", content).values())
    return list(cast("list[Any]", content)) if isinstance(content, (list, tuple)) else []


def can_be_copied_beside(content: Any) -> bool:
    """False if an object moves itself by a method `to` and hides its tensors: these could not be protected from reuse of
    their memory while the loop still reads them."""
    if isinstance(content, (Tensor, Mapping, list, tuple)):
        return all(can_be_copied_beside(part) for part in _parts_of(cast("Any", content)))
    return not callable(getattr(content, "to", None))


class Moving:
    """Copies batches to one device. On CUDA the copies run on a stream of their own."""

    def __init__(self, device: torch.device, *, ahead: bool = True) -> None:
        self.device = device
        self.ahead = ahead and device.type == "cuda"
        """True if a batch is copied while the loop works on the one before."""
        self._stream: torch.cuda.Stream | None = None

    def begin(self, batch: Batch) -> None:
        """Begin to copy a batch."""
        if self.device.type != "cuda" or not can_be_copied_beside(batch.content):
            batch.content = moved(batch.content, self.device)
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            batch.content = moved(batch.content, self.device)
            batch.copied = torch.cuda.Event()
            batch.copied.record(self._stream)

    def finish(self, batch: Batch) -> None:
        """Have the stream of the training loop wait for the copy; the host waits for nothing."""
        if batch.copied is not None:
            loop = torch.cuda.current_stream(self.device)
            loop.wait_event(batch.copied)
            for tensor in tensors_of(batch.content):
                if tensor.is_cuda:
                    tensor.record_stream(loop)  # its memory is not used again before the loop is done with it
            batch.copied = None
