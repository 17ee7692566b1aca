"""The ledger among several ranks: one copy a node, and every rank's batches entered on every node in rank order."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from salience.errors import Misattributed
from salience.ledger.ledger import Ids, Ledger, block_bytes, shared_folder
from salience.ledger.statistics import FEATURE_ROWS, LOGIT_ROWS, LOSS_ROWS, NORM_ROWS, TARGET_ROWS

_KINDS: tuple[tuple[str, ...], ...] = ((), LOSS_ROWS, TARGET_ROWS, LOGIT_ROWS, NORM_ROWS, FEATURE_ROWS)

Batch = tuple[Ids, tuple[str, ...], npt.NDArray[np.float32], tuple[int, bool, bool]]
"""ids, row names, values [rows, B], (window, seen, trained)."""


class Group:
    """The ranks of the default process group, and which of them share this node."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        on_gpu = dist.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        nodes = self._gather(torch.tensor([_node()], dtype=torch.int64))
        self.node_leader = next(rank for rank, node in enumerate(nodes) if torch.equal(node, nodes[self.rank]))
        self.leads_node = self.node_leader == self.rank
        self.node_ranks = [rank for rank, node in enumerate(nodes) if torch.equal(node, nodes[self.rank])]
        """The ranks of this node."""
        self.several_nodes = len(self.node_ranks) < self.world

    def ledger(self, n: int) -> Ledger:
        """A ledger in shared memory, created by the node's first rank and opened by its others."""
        token = torch.tensor([os.getpid()], dtype=torch.int64)
        owner = int(self._gather(token)[self.node_leader])
        path = shared_folder(block_bytes(n)) / f"salience-{_node():x}-{owner}"
        ledger = Ledger.shared(n, path, create=True) if self.leads_node else None
        self.barrier()
        ledger = ledger or Ledger.shared(n, path, create=False)
        self.barrier()
        if self.leads_node:  # mapped everywhere by now; without a name nothing is left behind by a crash
            with contextlib.suppress(OSError):
                path.unlink()
        return ledger

    def exchange(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """All batches of all ranks, rank 0's first. Ids travel as int64 and values as float32, apart."""
        header = np.array(
            [(len(ids), _KINDS.index(names), *map(int, flags)) for ids, names, _, flags in batches], dtype=np.int64
        ).reshape(-1, 5)
        ids = np.concatenate([b[0] for b in batches]) if batches else np.empty(0, dtype=np.int64)
        values = np.concatenate([b[2].ravel() for b in batches]) if batches else np.empty(0, dtype=np.float32)
        parts = zip(
            self._gather_ragged(torch.from_numpy(header.ravel())),
            self._gather_ragged(torch.from_numpy(ids)),
            self._gather_ragged(torch.from_numpy(values)),
            strict=True,
        )
        for head, all_ids, all_values in parts:
            i = v = 0
            for count, kind, window, seen, trained in head.numpy().reshape(-1, 5).tolist():
                names = _KINDS[kind]
                block = all_values.numpy()[v : v + len(names) * count].reshape(len(names), count)
                yield all_ids.numpy()[i : i + count], names, block, (window, bool(seen), bool(trained))
                i, v = i + count, v + len(names) * count

    def agree(self, trouble: Exception | None, elsewhere: Exception | None = None) -> None:
        """Raise on every rank when one of them has trouble (`elsewhere` on the others); otherwise a barrier."""
        flag = torch.tensor([trouble is not None], dtype=torch.int64, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if trouble is not None:
            raise trouble
        if int(flag) > 0:
            said = "Another rank recorded losses for the wrong samples; its message says which."
            raise elsewhere or Misattributed(said)

    def barrier(self) -> None:
        self.agree(None)

    def share(self, array: npt.NDArray[Any]) -> None:
        """Fill `array`, of the same shape and type everywhere, with rank 0's."""
        moved = torch.from_numpy(array).to(self._device)
        dist.broadcast(moved, 0)
        array[:] = moved.cpu().numpy()

    def largest(self, array: npt.NDArray[Any]) -> None:
        """Fill `array` with the largest of all ranks, number by number."""
        moved = torch.from_numpy(array).to(self._device)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX)
        array[:] = moved.cpu().numpy()

    def first(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on every rank."""
        return self._gather(torch.tensor(numbers, dtype=torch.float64))[0].tolist()

    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank passed."""
        return [part.tolist() for part in self._gather_ragged(torch.tensor(list(numbers), dtype=torch.int64))]

    def of_node(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank of this node passed."""
        parts = self.of_all(numbers)
        return [parts[rank] for rank in self.node_ranks]

    def of_leader(self, text: str) -> str:
        """What the node's first rank passed."""
        letters = torch.tensor(list(text.encode()), dtype=torch.int64)
        return bytes(self._gather_ragged(letters)[self.node_leader].tolist()).decode()

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of equal shape from all ranks, on the CPU."""
        mine = tensor.to(self._device)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(out, mine)
        return [part.cpu() for part in out]

    def _gather_ragged(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of any length: padded to the longest, since all_gather wants equal sizes."""
        lengths = [int(n) for n in self._gather(torch.tensor([len(tensor)], dtype=torch.int64))]
        padded = torch.zeros(max(lengths), dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        return [part[:n] for part, n in zip(self._gather(padded), lengths, strict=True)]


def current_group() -> Group | None:
    """The group when torch.distributed runs with more than one rank, else None."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Group()
    return None


def _node() -> int:
    """A number that is equal for processes of one running node and differs between nodes."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())
