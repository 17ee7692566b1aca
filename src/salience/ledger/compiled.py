"""`loss` inside a compiled step: one operator that records a batch and returns its weights.

`torch.compile` cannot trace recording, which keeps state, reads clocks and leaves tensors in flight: it would break the graph
and recompile as counters change. An operator is a single node for the compiler: it is called once per step, and the compiler
sets no guards on what it does.

    self._handle = register(self)                                 # once, by the object with the method weigh()
    ...
    if torch.compiler.is_compiling():                             # in loss(); eager code calls weigh() itself
        return weighted_sum(losses, logits, targets, self._handle)

`weigh(losses, logits, targets) -> Tensor` may have side effects (record, look up the batch delivered last, raise); logits and
targets are None if they were not given. It returns float32 weights [B] on the device of the losses, *with the division in
them*: 1 / B each for a plain mean, w * world / B_global in general, so that the loss is their product, summed. The
result is copied, since the compiler may write into it. The object is held weakly: the operator keeps no run alive.

No gradient flows through the operator; the gradient of each loss is its weight. The operator counts its calls in a tensor of
the handle. To the compiler that is a mutation, so it does not drop, merge, repeat or reorder calls. The calls are kept out of
CUDA graphs (tag `cudagraph_unsafe`), which would replay the kernels without the Python code.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from salience.errors import LossError


class Weigher(Protocol):
    """The object that every compiled step calls."""

    def weigh(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        """Record a batch and return its weights, float32 [B], that sum the losses to the value to train on."""
        ...


class LossHandle(NamedTuple):
    """How compiled code refers to a weigher."""

    number: int
    """Constant, so that no guard of the compiler depends on something that changes."""
    calls: Tensor
    """Number of calls of the operator so far, int64 [1]."""


_weighers: weakref.WeakValueDictionary[int, Weigher] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(weigher: Weigher) -> LossHandle:
    """The handle under which the operator finds `weigher` for as long as it lives."""
    number = next(_numbers)
    _weighers[number] = weigher
    return LossHandle(number, torch.zeros(1, dtype=torch.int64))


def weighted_sum(losses: Tensor, logits: Tensor | None, targets: Tensor | None, handle: LossHandle) -> Tensor:
    """sum(w * l) with the weights from `weigh`; for compiled code, in which it is one node of the graph."""
    nothing = losses.detach().new_empty(0)
    logits = nothing if logits is None else logits.detach()
    targets = nothing if targets is None else targets.detach()
    weights = _weigh(losses.detach(), logits, targets, handle.calls, handle.number)
    return (losses.to(torch.float32) * weights).sum()


_UNSAFE: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
"""Older versions of torch know neither the tag nor the argument."""


@torch.library.custom_op("salience::weigh", mutates_args=("calls",), **_UNSAFE)
def _weigh(losses: Tensor, logits: Tensor, targets: Tensor, calls: Tensor, number: int) -> Tensor:
    calls += 1
    weigher = _weighers.get(number)
    if weigher is None:
        raise LossError("The loader of this compiled step is gone; compile the step again with the loader in use.")
    weights = weigher.weigh(losses, logits if logits.numel() else None, targets if targets.numel() else None)
    if weights.shape != losses.shape or weights.dtype != torch.float32 or weights.device != losses.device:
        raise LossError(
            f"weigh() returned {weights.dtype} of shape {tuple(weights.shape)} on {weights.device}; it must be one "
            f"float32 weight per loss, {tuple(losses.shape)} on {losses.device}."
        )
    return weights.clone()


@_weigh.register_fake
def _(losses: Tensor, logits: Tensor, targets: Tensor, calls: Tensor, number: int) -> Tensor:
    return losses.new_empty(losses.shape, dtype=torch.float32)
