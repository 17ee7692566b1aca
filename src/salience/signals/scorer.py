"""A background scorer: a process with low priority that runs a snapshot of the model over samples that are not visited.

    the run, at a window's start                      the scorer
    take()   the scores finished since then      <-   values[:, :done]
    ask(ids) weights and ids into shared memory  ->   copies them, counts `taken` up, scores batch by batch

Neither side waits or locks. The run writes weights and ids only once the scorer has taken the previous question, and the
scorer reads them only until it has taken it. The pipe carries a few bytes per window; when it closes, the other side is gone.
Work that is unfinished when the next question arrives is dropped.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.batches import Order, columns, comparable, integer_targets
from salience.child import Child, Lost
from salience.errors import DataError, PluginError
from salience.ledger.statistics import LOGIT_ROWS, reduce_batch
from salience.memory import Memory, fence

Ids = npt.NDArray[np.int64]
Found = tuple[Ids, npt.NDArray[np.float32], int]
"""Ids, their SCORE_ROWS and the window at whose start they were asked for."""

MAX_REFRESH_SHARE = 0.25
"""Largest share of the unpicked samples that is scored in a window: the refresh set."""
SCORE_ROWS = (*LOGIT_ROWS, "forward_norm")
"""The values returned for each sample."""
SECONDS_WITHOUT_SCORE = 300.0
"""The scorer is switched off after this many seconds without a single score."""


def stalest(
    picked: Ids, last_seen: npt.NDArray[np.int32], rng: np.random.Generator, *, share: float = MAX_REFRESH_SHARE
) -> Ids:
    """The `share` of the samples not `picked` that have waited longest, longest first, with ties at random, int64."""
    rest = np.ones(len(last_seen), dtype=bool)
    rest[picked] = False
    ids = rng.permutation(np.flatnonzero(rest))
    # 16 bits, since NumPy sorts those by radix, many times faster.
    waited = np.argsort(np.minimum(last_seen[ids] + 1, 65535).astype(np.uint16), kind="stable")
    return ids[waited[: math.ceil(share * len(ids))]]


class LastLinear:
    """Captures the input of the Linear that runs last in a model's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.given: Tensor | None = None
        self.bias, self.width = 0.0, 0
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._hooks = [module.register_forward_hook(self._ran) for module in linears]

    def _ran(self, module: nn.Linear, given: tuple[Tensor, ...], gave: Tensor) -> None:
        self.given, self.bias, self.width = given[0], float(len([*module.parameters()]) > 1), module.out_features

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


def forward_norm(logits: Tensor, targets: Tensor, given: Tensor | None, bias: float = 1.0) -> Tensor:
    """Norm of the gradient of cross-entropy in the last Linear, |p - y| sqrt(|h|^2 + 1), from a forward pass alone, [B].

    h is the input of that layer. The order is nearly that of the norm over all layers (benchmarks/criteria_grand.py).
    NaN if the last Linear did not make these logits from one vector per sample.
    """
    if given is None or given.dim() != 2 or len(given) != len(logits):
        return torch.full((len(logits),), math.nan, device=logits.device)
    inside = targets.clamp(0, logits.shape[1] - 1)
    residual = logits.softmax(1).scatter_add(1, inside[:, None], -torch.ones_like(logits[:, :1]))
    h = given.float()
    norm = (torch.linalg.vecdot(residual, residual) * (torch.linalg.vecdot(h, h) + bias)).sqrt()
    return torch.where(inside == targets, norm, math.nan)


@torch.no_grad()
def score(model: nn.Module, last: LastLinear, batch: Any, count: int, device: torch.device) -> Tensor:
    """SCORE_ROWS for a collated batch (inputs, integer targets): cross-entropy, logits and gradient norm, [rows, count]."""
    targets = integer_targets(comparable(columns(batch, count), count))
    if targets is None or not isinstance(batch, (tuple, list)):
        raise DataError("the background scorer needs batches (inputs, ..., targets) with one integer class per sample")
    inputs: Any = batch[0]
    targets = targets.to(device)
    logits = model(inputs.to(device)).float()
    rows = reduce_batch(F.cross_entropy(logits, targets, reduction="none"), logits, targets)[1]
    return torch.cat((rows, forward_norm(logits, targets, last.given, last.bias)[None])).cpu()


class _Board:
    """The data that both processes see, in one block of shared memory."""

    def __init__(self, weight_bytes: int, most: int) -> None:
        size = 8 * (2 + most) + 4 * len(SCORE_ROWS) * most
        self.__setstate__((Memory(_aligned(size) + max(1, weight_bytes)), most))

    def __getstate__(self) -> tuple[Memory, int]:
        return self._memory, self._most

    def __setstate__(self, state: tuple[Memory, int]) -> None:
        self._memory, self._most = memory, most = state
        whole = torch.from_numpy(memory.array(np.uint8, memory.size))
        after = 16 + 8 * most
        end = after + 4 * len(SCORE_ROWS) * most
        self.counts = whole[:16].view(torch.int64)
        """Number of questions taken and of samples done, int64 [2]; only the scorer writes it."""
        self.ids = whole[16:after].view(torch.int64)
        """Ids to score, int64 [most]."""
        self.values = whole[after:end].view(torch.float32).view(len(SCORE_ROWS), most)
        """Scores of the first `done` of them, float32 [rows, most]."""
        self.weights = whole[_aligned(end) :]
        """All parameters and buffers in a row, uint8."""

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Position of the values of each of `tensors` in `weights`."""
        found: list[Tensor] = []
        start = 0
        for tensor in tensors:
            part = self.weights[start : start + tensor.numel() * tensor.element_size()]
            found.append(part.view(tensor.dtype).view(tensor.shape))
            start += _room(tensor)
        return found


class Scorer:
    """The scorer's process, seen from the run. Every failure raises PluginError in `take` or `ask`; then `close` it."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        collate: Any,
        *,
        n: int,
        batch_size: int,
        device: torch.device | str = "cpu",
        patience: float = SECONDS_WITHOUT_SCORE,
    ) -> None:
        """`data` returns the samples of an Order at once, `collate` makes a BatchEnvelope of them (`salience.batches`)."""
        self._tensors = _tensors(model)
        self._board = _Board(sum(map(_room, self._tensors)), math.ceil(MAX_REFRESH_SHARE * n))
        self._places = self._board.places(self._tensors)
        self._asked = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)
        self._window = self._brought = 0
        self._patience, self._heard = patience, time.monotonic()
        copied = io.BytesIO()
        torch.save(model, copied)
        arguments = copied.getvalue(), data, collate, self._board, batch_size, torch.device(device)
        self._child = Child(_work, *arguments, name="salience-scorer", start="spawn")
        self.process, self.close = self._child.process, self._child.close

    @property
    def done(self) -> int:
        """Number of samples of the last question that are scored so far."""
        taken, done = self._board.counts.tolist()
        return done if taken == self._asked else 0

    def take(self) -> Found:
        """The results so far: ids, their SCORE_ROWS [rows, m], and the window at whose start they were asked for."""
        try:
            if self._child.pipe.poll():  # it never sends but when it fails
                self._child.receive()
        except Lost as lost:
            raise PluginError(str(lost)) from lost
        done = self.done
        if done or not len(self._ids):
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._patience:
            raise PluginError(f"it scored nothing in {self._patience:g} seconds")
        fence()  # the number of scores before the scores
        new, self._brought = slice(self._brought, done), done
        return self._ids[new], self._board.values[:, new].numpy().copy(), self._window

    def ask(self, ids: Ids, *, window: int) -> None:
        """Ask for scores of these samples with the current weights; does nothing while the last question is being taken."""
        if int(self._board.counts[0]) != self._asked or not len(ids):
            return
        fence()  # what was asked before has been taken
        with torch.no_grad():
            for place, tensor in zip(self._places, self._tensors, strict=True):
                place.copy_(tensor)
        self._board.ids[: len(ids)] = torch.from_numpy(ids)
        self._ids, self._window, self._brought = ids, window, 0
        self._asked += 1
        try:
            self._child.send(len(ids))
        except Lost as lost:
            raise PluginError(str(lost)) from lost


def _work(
    pipe: Any, copied: bytes, data: Any, collate: Any, board: _Board, batch_size: int, device: torch.device
) -> None:
    """The main function of the process: one thread, lowest priority; it ends when the pipe closes."""
    os.nice(19)
    torch.set_num_threads(1)
    # Pickled by our own parent a moment ago.
    model: nn.Module = torch.load(io.BytesIO(copied), map_location=device, weights_only=False).eval()
    tensors, last = _tensors(model), LastLinear(model)
    places = board.places(tensors)
    while True:
        count = pipe.recv()
        board.counts[1] = 0
        with torch.no_grad():
            for tensor, place in zip(tensors, places, strict=True):
                tensor.copy_(place)
        ids = board.ids[:count].numpy().copy()
        fence()  # all is taken before the run may write again
        board.counts[0] += 1
        for start in range(0, count, batch_size):
            if pipe.poll():
                break
            order = Order(0, ids[start : start + batch_size])
            end = start + len(order.ids)
            board.values[:, start:end] = score(
                model, last, collate(data.__getitems__(order)).batch, len(order.ids), device
            )
            fence()  # the scores before their number
            board.counts[1] = end


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _room(tensor: Tensor) -> int:
    """Bytes rounded up to where the next tensor of any type may begin."""
    return _aligned(tensor.numel() * tensor.element_size())


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
