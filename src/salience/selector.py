"""salience.Selector: ids and weights without a DataLoader, for data that already sits on the accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy.typing as npt
import torch
from torch import Tensor

from salience.events import EventLog
from salience.ledger import Ledger
from salience.report.sinks import Sink
from salience.run import Run, Select
from salience.select.reference import Opinion
from salience.select.steering import Paths


class Selector(Run):
    """Yields `(ids, weights)` on `device` for each batch of a window; `loss`, `pick`, `progress` as in `Loader`.

        selector = salience.Selector(len(x), batch_size=512, epochs=24, select="default", device="cuda")
        for epoch in range(24):
            for ids, weights in selector:
                losses = F.cross_entropy(model(x[ids]), y[ids], reduction="none")
                selector.loss(losses).backward(); ...

    `loss` applies the weights itself; they are handed out for those who reduce on their own.
    """

    def __init__(
        self,
        n: int,
        *,
        batch_size: int = 128,
        epochs: int | None = None,
        select: Select = None,
        seed: int = 0,
        labels: npt.ArrayLike | None = None,
        device: torch.device | str = "cpu",
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        ledger: Ledger | str | Path | None = None,
        reference: Opinion | Sequence[Opinion] | None = None,
        baseline: Paths | None = None,
        embeddings: npt.ArrayLike | None = None,
        trace: str | Path | None = None,
        log: EventLog | str | Path | None = None,
        sinks: Sequence[str | Sink] = (),
        strict: bool = False,
    ) -> None:
        super().__init__(
            n, batch_size=batch_size, epochs=epochs, select=select, seed=seed, drop_last=drop_last, generator=generator,
            ledger=ledger, reference=reference, baseline=baseline, embeddings=embeddings, trace=trace, log=log, sinks=sinks,
            strict=strict,
        )  # fmt: skip
        self.device = torch.device(device)
        if labels is not None:
            self._ledger.set_labels(labels)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        shard = self._open_window()
        ids = torch.from_numpy(shard.plan.ids.copy()).to(self.device)
        weights = torch.from_numpy(shard.plan.weights.copy()).to(self.device)
        for number in range(len(shard)):
            if number not in self._delivered:
                span = shard.span(number)
                self._deliver(number, shard.ids(number))
                yield ids[span], weights[span]
        self._close_window()
