"""The single communication hook that DDP gets; it collects buckets and hands them to the exchange in use.

DDP calls the hook for its buckets in the same order on every rank, but runs what follows a collective in whatever order the
collectives end. So nothing follows one here: an exchange starts what it can when a bucket comes, and does the rest with all
gradients at hand when the last one has come. (DDP looks at the annotations of a hook: they must not be strings in this file.)
"""

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
        """Backward passes whose gradients have travelled since `reset`."""
        self._places = {id(p): i for i, p in enumerate(ddp.parameters()) if p.requires_grad}
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def open(self) -> bool:
        """True if some buckets of a backward pass have come, and not the last."""
        return bool(self._waiting)

    def reset(self) -> None:
        """Forget the buckets of the last backward pass; a step begins."""
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
            self.exchange.finish([self._gradients[place] for place in sorted(self._gradients)])
            waiting = self._waiting
            passes = self.passes + 1
            self.reset()
            self.passes = passes
            for done, result in waiting:
                done.set_result(result)
        return future


def on_bucket(traffic: Traffic, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook itself."""
    return traffic.on_bucket(bucket)
