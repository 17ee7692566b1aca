"""salience.Selector: ids and weights without a DataLoader, for data that already sits on the accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.door import Door
from salience.errors import ConfigError
from salience.events import EventLog
from salience.large.growth import Growth
from salience.ledger import Ledger
from salience.plan import Shard
from salience.report.sinks import Sink
from salience.run import Run
from salience.run.part import Batch
from salience.run.parts import Parts
from salience.run.resizing import Resizing
from salience.run.selection import Select
from salience.select.reference import Opinion
from salience.select.steering import Paths
from salience.treat.config import Treat


class Selector(Door):
    """Yields `(ids, weights)` on `device` for each batch of a window; `loss`, `pick`, `progress` as in `Loader`.

        selector = salience.Selector(len(x), batch_size=512, epochs=24, select="default", device="cuda")
        for epoch in range(24):
            for ids, weights in selector:
                losses = F.cross_entropy(model(x[ids]), y[ids], reduction="none")
                selector.loss(losses).backward(); ...

    `loss` applies the weights itself; they are delivered for loops that reduce the losses themselves. With `treat="resolution"`
    the loop calls `x = selector.resize(x)`.
    """

    def __init__(
        self,
        n: int,
        *,
        batch_size: int = 128,
        epochs: int | None = None,
        steps: int | None = None,
        select: Select = None,
        seed: int = 0,
        labels: npt.ArrayLike | None = None,
        device: torch.device | str = "cpu",
        drop_last: bool = False,
        window: int | str | None = None,
        generator: torch.Generator | None = None,
        ledger: Ledger | str | Path | None = None,
        reference: Opinion | Sequence[Opinion] | None = None,
        baseline: Paths | None = None,
        embeddings: npt.ArrayLike | None = None,
        trace: str | Path | None = None,
        log: EventLog | str | Path | None = None,
        sinks: Sequence[str | Sink] = (),
        strict: bool = False,
        treat: Treat | str | None = None,
        grow: Growth | None = None,
    ) -> None:
        parts = Parts(
            n, batch_size=batch_size, epochs=epochs, steps=steps, select=select, seed=seed, drop_last=drop_last, window=window,
            generator=generator, ledger=ledger, reference=reference, baseline=baseline, embeddings=embeddings, trace=trace,
            log=log, sinks=sinks, strict=strict, grow=grow,
        )  # fmt: skip
        if labels is not None:
            parts.recording.ledger.set_labels(labels)
        self.device = torch.device(device)
        resizing = None
        if treat is not None:
            if Treat.of(treat).kind != "resolution":
                raise ConfigError(
                    f'A Selector has no stages: treat is {treat!r}, and only "resolution" is possible here.'
                )
            resizing = Resizing(parts.setup, parts.voice, Treat.of(treat), by_itself=False)
        super().__init__(Run(parts, IdSource(self.device), resizing=resizing))


BATCHES_CUT_TOGETHER = 64
"""To cut many batches at once takes a fraction of the time that it takes to cut each between two training steps."""


class IdSource:
    """Ids and weights on a device."""

    has_workers = keeps_workers = False
    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, shard: Shard, done: frozenset[int]) -> Iterator[Batch]:
        """The batches of `shard` but for those in `done`."""
        plan, starts, sizes = shard.plan, shard.start, shard.stop - shard.start
        own = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)  # places in the plan
        ids = plan.ids[own]
        on_device = [torch.from_numpy(part).to(self._device) for part in (ids.copy(), plan.weights[own])]
        begin = 0
        for first in range(0, len(shard), BATCHES_CUT_TOGETHER):
            some = sizes[first : first + BATCHES_CUT_TOGETHER].tolist()
            end = begin + sum(some)
            rows = np.split(ids[begin:end], np.cumsum(some[:-1]))
            contents = zip(*(part[begin:end].split(some) for part in on_device), strict=True)
            yield from [
                Batch(plan.window, number, of, content=content)
                for number, (of, content) in enumerate(zip(rows, contents, strict=True), first)
                if number not in done
            ]
            begin = end

    def peek(self, order: npt.NDArray[np.int64], size: int, seeds: Tensor) -> Iterator[Any]:
        """Batches of `size` of these ids, which do not count."""
        for ids in torch.from_numpy(order).to(self._device).split(size):
            yield ids, torch.ones(len(ids), device=self._device)
