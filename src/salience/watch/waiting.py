"""How long a rank waits for gradients of the others, found without asking the model: at the end of its backward pass.

Autograd calls what was queued during a backward pass in order, once the graph is done. DistributedDataParallel queues its wait
for the last buckets there. A callback that was queued at the gradient of the losses, before anything else, runs just before
that wait, and one that it queues in turn runs just after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def time_wait(losses: Tensor, waited: Callable[[float], None]) -> None:
    """Call `waited` with the seconds from the end of this rank's backward pass to the end of its wait for other ranks."""
    queue: Callable[[Callable[[], None]], None] = cast("Any", torch.autograd.Variable)._execution_engine.queue_callback

    def begins(gradient: Tensor) -> None:
        del gradient
        queue(is_over)

    def is_over() -> None:
        begin = time.perf_counter()
        queue(lambda: waited(time.perf_counter() - begin))

    losses.register_hook(begins)
