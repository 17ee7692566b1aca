"""The ledger with several ranks: one copy per node, into which the batches of all ranks are entered in the order of steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.ledger.ledger import Ids, Ledger, block_bytes
from salience.ledger.statistics import FEATURE_ROWS, LOGIT_ROWS, LOSS_ROWS, NORM_ROWS, TARGET_ROWS
from salience.memory import node_memory
from salience.ranks import Ranks

_KINDS: tuple[tuple[str, ...], ...] = ((), LOSS_ROWS, TARGET_ROWS, LOGIT_ROWS, NORM_ROWS, FEATURE_ROWS)


class Flags(NamedTuple):
    """How a batch is to be entered."""

    window: int
    seen: bool
    """False for what comes after the forward pass, when the samples were already counted as seen."""
    trained: bool
    """True if its samples go into a gradient."""


Entry = tuple[Ids, tuple[str, ...], npt.NDArray[np.float32], Flags]
"""A batch to be entered: ids, names of rows, values [rows, B], flags."""


def shared_ledger(ranks: Ranks, n: int) -> Ledger:
    """A ledger in shared memory, created by the first rank of the node and opened by the others."""
    ledger = Ledger(n, memory=node_memory(ranks, block_bytes(n)).buffer, fresh=ranks.leads_node)
    ranks.barrier()
    return ledger


def exchange(ranks: Ranks, batches: Sequence[Entry]) -> Iterator[Entry]:
    """Gather the batches of all ranks in the order of steps, so that the ledger does not depend on the number of ranks.

    Ids are sent as int64 and values as float32, separately.
    """
    header = np.array(
        [(len(ids), _KINDS.index(names), *map(int, flags)) for ids, names, _, flags in batches], dtype=np.int64
    ).reshape(-1, 5)
    ids = np.concatenate([b[0] for b in batches]) if batches else np.empty(0, dtype=np.int64)
    values = np.concatenate([b[2].ravel() for b in batches]) if batches else np.empty(0, dtype=np.float32)
    mine = [torch.from_numpy(part) for part in (header.ravel(), ids, values)]
    lengths = torch.stack(ranks.all_gather(torch.tensor([len(part) for part in mine]), name="exchange")).T.tolist()
    parts = zip(*(_gathered(ranks, part, of_ranks) for part, of_ranks in zip(mine, lengths, strict=True)), strict=True)
    for step in itertools.zip_longest(*(_batches(*part) for part in parts)):
        yield from (batch for batch in step if batch is not None)


def _gathered(ranks: Ranks, part: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The parts of all ranks: padded to the longest, since all_gather wants equal sizes."""
    padded = torch.zeros(max(lengths), dtype=part.dtype)
    padded[: len(part)] = part
    return [one[:n] for one, n in zip(ranks.all_gather(padded, name="exchange"), lengths, strict=True)]


def _batches(head: Tensor, all_ids: Tensor, all_values: Tensor) -> Iterator[Entry]:
    """The batches that one rank sent."""
    i = v = 0
    for count, kind, window, seen, trained in head.numpy().reshape(-1, 5).tolist():
        names = _KINDS[kind]
        block = all_values.numpy()[v : v + len(names) * count].reshape(len(names), count)
        yield all_ids.numpy()[i : i + count], names, block, Flags(window, bool(seen), bool(trained))
        i, v = i + count, v + len(names) * count
