"""The single communication hook for DDP; it collects buckets and passes them to the exchange in use.

DDP calls the hook for its buckets in the same order on every rank, but runs what follows a collective in whatever order the
collectives end. So nothing follows one here: an exchange starts what it can when a bucket comes, and does the rest with all
gradients at hand when the last one has come. (DDP looks at the annotations of a hook: they must not be strings in this file.)
"""

import time
from collections import deque
from typing import Any

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from salience.errors import ConfigError
from salience.gradients.exchange import Exchange


class Traffic:
    """The buckets of the backward pass in progress, and the exchange they go to; it can be replaced between two steps."""

    exchange: Exchange

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.passes = 0
        """Number of backward passes whose gradients have travelled since `reset`."""
        self.seconds = 0.0
        """Seconds that the loop has waited for the exchange; the reader resets it to 0."""
        self._watched: deque[tuple[float, float, Any]] = deque(maxlen=0)
        """Seconds, processor seconds and, on a GPU, two marks of its stream, around the last calls of `finish`."""
        self._places = {id(p): i for i, p in enumerate(ddp.parameters()) if p.requires_grad}
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def open(self) -> bool:
        """True if some buckets of a backward pass have arrived, but not the last."""
        return bool(self._waiting)

    def reset(self) -> None:
        """Forget the buckets of the last backward pass: a step begins."""
        self.passes = 0
        self._waiting, self._gradients = [], {}

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise ConfigError(
                "A gradient is sparse, which sync() cannot exchange; make the embedding with sparse=False."
            )
        future = torch.futures.Future[torch.Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append((future, buffer))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._gradients[self._places[id(parameter)]] = gradient
        self.exchange.begin(buffer)
        if bucket.is_last():
            self._finish(on_gpu=buffer.is_cuda)
        return future

    def _finish(self, *, on_gpu: bool) -> None:
        marked = on_gpu and bool(self._watched.maxlen)  # there the stream waits, and the host goes on
        before = _mark() if marked else None
        start, busy = time.perf_counter(), time.process_time()
        self.exchange.finish([self._gradients[place] for place in sorted(self._gradients)])
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self._watched.append((seconds, time.process_time() - busy, (before, _mark()) if marked else None))
        waiting, passes = self._waiting, self.passes + 1
        self.reset()
        self.passes = passes
        for done, result in waiting:
            done.set_result(result)

    def watch(self, steps: int) -> None:
        """Remember from now on how long the exchange took once all gradients were there, for the last `steps` steps."""
        self._watched = deque(maxlen=steps)

    def waits(self, steps: int) -> list[float]:
        """Seconds of the last watched `steps`; on a GPU this waits for the device."""
        watched = list(self._watched)[-steps:]
        if not watched or watched[-1][2] is None:
            return [seconds for seconds, *_ in watched]
        watched[-1][2][1].synchronize()
        return [marks[0].elapsed_time(marks[1]) / 1000 for *_, marks in watched]

    def busy(self, steps: int) -> list[float]:
        """Processor seconds of this process during those waits."""
        return [busy for _, busy, _ in list(self._watched)[-steps:]]


def _mark() -> Any:
    """A point of the current CUDA stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def on_bucket(traffic: Traffic, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook itself."""
    return traffic.on_bucket(bucket)
