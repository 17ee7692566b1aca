"""Moving batches to a device: from pinned memory, on a stream of their own, one batch ahead of the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    if isinstance(content, dict):
        parts = {key: moved(part, device) for key, part in cast("Mapping[Any, Any]", content).items()}
        return parts if type(content) is dict else cast("Any", type(content))(parts)
    if isinstance(content, (list, tuple)):
        items = [moved(part, device) for part in cast("list[Any]", content)]
        return type(content)(*items) if hasattr(content, "_fields") else type(content)(items)
    return content


def tensors_of(content: Any) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for part in cast("dict[Any, Any]", content).values():
            yield from tensors_of(part)
    elif isinstance(content, (list, tuple)):
        for part in cast("list[Any]", content):
            yield from tensors_of(part)


class Moving:
    """Copies batches to one device. On CUDA the copies run on a stream of their own."""

    def __init__(self, device: torch.device, *, ahead: bool = True) -> None:
        self.device = device
        self.ahead = ahead and device.type == "cuda"
        """True if a batch is copied while the loop works on the one before."""
        self._stream: torch.cuda.Stream | None = None

    def begin(self, batch: Batch) -> None:
        """Begin to copy a batch."""
        if self.device.type != "cuda":
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
