"""`local`: every rank takes H steps of its own, then parameters are averaged; the exchange runs during the next H steps.

With x_i the parameters of rank i, a the anchor that all ranks share, and s_i what x_i was when the exchange began:

    begin     s_i = x_i,  d_i = x_i - a      d_i starts to travel, and training goes on
    H later   a <- a + mean of d_i           the same on every rank, to the bit
              x_i <- a + (x_i - s_i)         what was learnt meanwhile stays (CoCoD-SGD, Shen et al. 2019)

With an outer step (DiLoCo, Douillard et al. 2023), `a` moves by Nesterov momentum on the mean instead.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from salience.gradients.exchange import Averager, Exchange, join, split
from salience.gradients.link import Link
from salience.gradients.nodes import Nodes
from salience.gradients.rules import local_steps


class Local(Exchange):
    """Local steps on the parameters and floating-point buffers of a DDP model."""

    lossy = True

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        averager: Averager,
        everybody: Link | Nodes,
        inside: Exchange,
        *,
        silent: bool,
        steps: int,
        alpha: float | None,
        most: int,
        overlap: bool,
        outer: tuple[float, float] | None,
    ) -> None:
        """`inside` exchanges the gradients of each step inside a group; with `silent`, DDP exchanges none."""
        self.ddp, self.optimizer, self.averager, self.everybody = ddp, optimizer, averager, everybody
        self.inside, self.silent = inside, silent
        self.base, self.alpha, self.most, self.overlap, self.outer = steps, alpha, most, overlap, outer
        self.count = 0
        """Number of optimizer steps made."""
        self.last = 0
        """Step after which parameters were last sent."""
        self.rounds = 0
        """Number of exchanges that have arrived."""
        self.seconds = 0.0
        """Seconds of the last exchange."""
        parameters = [one.detach() for one in ddp.module.parameters() if one.is_floating_point()]
        self._tensors = [*parameters, *(one for one in ddp.module.buffers() if one.is_floating_point())]
        self._parameters = sum(one.numel() for one in parameters)
        self.anchor = self._first_anchor()
        self.velocity = torch.zeros_like(self.anchor) if outer else None
        self._sent: Tensor | None = None
        self._pending: Future[list[Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="salience-sync")
        self._silence = ExitStack()
        if silent:
            self._silence.enter_context(ddp.no_sync())

    @property
    def interval(self) -> int:
        """Number of local steps until the next exchange, at the learning rate of the first parameter group."""
        return local_steps(self.base, self.alpha, float(self.optimizer.param_groups[0]["lr"]), self.most)

    def begin(self, bucket: Tensor) -> None:
        self.inside.begin(bucket)

    def finish(self, gradients: Sequence[Tensor]) -> None:
        self.inside.finish(gradients)

    def stepped(self) -> None:
        self.count += 1
        if self.count - self.last >= self.interval:
            self._arrive()
            self._begin()
            if not self.overlap:
                self._arrive()

    def average(self) -> None:
        """Wait for everything in flight and average now."""
        self._arrive()
        self._begin(together=True)
        self._arrive()
        digest = zlib.crc32(join(self._tensors).cpu().numpy().tobytes())
        self._thread.submit(self.everybody.check_equal, digest).result()

    def leave(self) -> None:
        """Average everything, including the optimizer's own tensors, and let DDP exchange gradients again.

        With different momentum on each rank, equal gradients would drive equal parameters apart.
        """
        self.average()
        kept = [value for one in self._states() for _, value in sorted(one.items()) if _is_moment(value)]
        if kept:
            split(self._thread.submit(self.everybody.mean, join(kept)).result(), kept)
        self.averager.leave()
        self._silence.close()
        self._thread.shutdown()

    def _states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter, in the order of its groups."""
        of = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [self.optimizer.state[p] for p in of if p in self.optimizer.state]

    def _first_anchor(self) -> Tensor:
        """Parameters, which are equal on all ranks, and zeros for buffers, which need not be."""
        anchor = join(self._tensors)
        anchor[self._parameters :] = 0.0
        return anchor

    def _begin(self, *, together: bool = False) -> None:
        self._sent = join(self._tensors)
        self.last = self.count
        self._pending = self._thread.submit(self._exchange, self._sent - self.anchor, self.count, together=together)

    def _exchange(self, vector: Tensor, count: int, *, together: bool) -> list[Tensor]:
        start = time.perf_counter()
        updates = self.averager(vector, count, together=together)
        self.seconds = time.perf_counter() - start
        return updates

    def _arrive(self) -> None:
        if self._pending is None or self._sent is None:
            return
        pending, self._pending = self._pending, None
        for update in pending.result():
            self.anchor = self._moved(update)
            self.rounds += 1
        split(join(self._tensors).sub_(self._sent).add_(self.anchor), self._tensors)

    def _moved(self, update: Tensor) -> Tensor:
        if self.outer is None or self.velocity is None:
            return self.anchor.add_(update)
        rate, momentum = self.outer
        self.velocity = momentum * self.velocity + update
        return self.anchor + rate * (update + momentum * self.velocity)

    def state_dict(self) -> dict[str, Any]:
        """Collective: averages first, so that one model is saved. The averager's residuals are this rank's own."""
        self.average()
        averager = self.averager.state_dict()
        return {"count": self.count, "last": self.last, "velocity": self.velocity, "averager": averager}

    def restart(self) -> None:
        if self._pending is not None:  # on its way before the parameters were loaded: no concern of theirs
            self._pending.result()
            self._pending = None
        self.anchor = self._first_anchor()

    def load_state_dict(self, state: Mapping[str, Any], *, residuals: bool = True) -> None:
        """Continue from the model's current parameters, which must be those saved."""
        self.restart()
        self.count, self.last = int(state["count"]), int(state["last"])
        if self.outer and state["velocity"] is not None:
            self.velocity = state["velocity"].to(self.anchor.device)
        if residuals:
            self.averager.load_state_dict(state["averager"])


def _is_moment(value: Any) -> bool:
    """True for a tensor that accumulates gradients, as opposed to a counter."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
