"""The ledger among several ranks: one copy per node, and every rank's batches entered on every node in rank order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from salience.ledger.ledger import Ids, Ledger, block_bytes, shared_folder
from salience.ledger.statistics import FEATURE_ROWS, LOGIT_ROWS, LOSS_ROWS, NORM_ROWS, TARGET_ROWS
from salience.ranks import Ranks

_KINDS: tuple[tuple[str, ...], ...] = ((), LOSS_ROWS, TARGET_ROWS, LOGIT_ROWS, NORM_ROWS, FEATURE_ROWS)

Batch = tuple[Ids, tuple[str, ...], npt.NDArray[np.float32], tuple[int, bool, bool]]
"""ids, row names, values [rows, B], (window, seen, trained)."""


def shared_ledger(ranks: Ranks, n: int) -> Ledger:
    """A ledger in shared memory, created by the first rank of the node and opened by the others."""
    path = Path(ranks.node_broadcast(str(shared_folder(block_bytes(n)) / f"salience-{os.urandom(12).hex()}")))
    ledger = Ledger.shared(n, path, create=True) if ranks.leads_node else None
    ranks.barrier()
    ledger = ledger or Ledger.shared(n, path, create=False)
    ranks.barrier()
    if ranks.leads_node:  # mapped everywhere by now; without a name nothing is left behind by a crash
        with contextlib.suppress(OSError):
            path.unlink()
    return ledger


def exchange(ranks: Ranks, batches: Sequence[Batch]) -> Iterator[Batch]:
    """All batches of all ranks, rank 0's first. Ids travel as int64 and values as float32, separately."""
    header = np.array(
        [(len(ids), _KINDS.index(names), *map(int, flags)) for ids, names, _, flags in batches], dtype=np.int64
    ).reshape(-1, 5)
    ids = np.concatenate([b[0] for b in batches]) if batches else np.empty(0, dtype=np.int64)
    values = np.concatenate([b[2].ravel() for b in batches]) if batches else np.empty(0, dtype=np.float32)
    parts = zip(
        *(ranks.all_gather_ragged(torch.from_numpy(part), name="exchange") for part in (header.ravel(), ids, values)),
        strict=True,
    )
    for head, all_ids, all_values in parts:
        i = v = 0
        for count, kind, window, seen, trained in head.numpy().reshape(-1, 5).tolist():
            names = _KINDS[kind]
            block = all_values.numpy()[v : v + len(names) * count].reshape(len(names), count)
            yield all_ids.numpy()[i : i + count], names, block, (window, bool(seen), bool(trained))
            i, v = i + count, v + len(names) * count
