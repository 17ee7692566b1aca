"""The ranks of a run: how many there are, which of them share this node, and the few collectives that we use.

Every collective has a deadline. When it passes, or when a rank is lost, each waiting rank raises `RankError`, which names the
ranks that did not get that far, if the process group has a store to look that up. Besides `gradients` and `app.parallel`, no
other module asks `torch.distributed`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions  # pyright: ignore[reportPrivateImportUsage]

from salience.errors import ConfigError, RankError

T = TypeVar("T")

DEADLINES = {"nccl": 600.0}
"""Seconds after which torch itself gives up on a collective of a backend, by default."""
OTHER_DEADLINE = 1800.0
"""The same for all other backends."""
DEADLINE_SHARE = 0.95
"""Share of that time after which we give up, so that users see our message."""
GRACE = 10.0
"""Seconds after the deadline that a backend has to end the collective itself."""
DATA_PARALLEL_NAMES = ("dp", "data", "data_parallel")
"""Names of the dimension of a device mesh along which samples are divided."""


class Ranks:
    """The ranks of a process group. Making one is a collective call, and so is every method."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        dim: str | None = None,
        deadline: float | None = None,
        node: int | None = None,
    ) -> None:
        """`group` is a process group (None = the default one) or a device mesh, of which `dim` is the data-parallel dimension.

        `deadline` is in seconds; None = a little less than the timeout of the group. `node` is a number that ranks of one node
        share; None = detected.
        """
        if isinstance(group, DeviceMesh):
            group = _dimension(group, dim)
        elif dim is not None:
            raise ConfigError(f"dim is {dim!r}, which belongs to a DeviceMesh; pass the mesh, or leave dim out.")
        self._group: Any = dist.group.WORLD if group is None else group
        _ALIVE.add(self)
        self.rank = dist.get_rank(self._group)
        self.world = dist.get_world_size(self._group)
        on_gpu = dist.get_backend(self._group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.deadline = _default_deadline(self._group, self._device) if deadline is None else deadline
        """Maximum seconds for a collective."""
        self._count = 0
        """Number of collectives begun so far."""
        self._store: Any = None
        mine = torch.tensor([_node() if node is None else node, int.from_bytes(os.urandom(7))], dtype=torch.int64)
        seen = torch.stack(self.all_gather(mine, name="Ranks"))
        nodes = seen[:, 0].tolist()
        self.node_ranks = [rank for rank, other in enumerate(nodes) if other == nodes[self.rank]]
        """The ranks of this node, lowest first."""
        self.node_leader = self.node_ranks[0]
        self.leads_node = self.node_leader == self.rank
        self.several_nodes = len(self.node_ranks) < self.world
        self._key = f"salience/ranks/{int(seen[0, 1]):x}"
        with contextlib.suppress(RuntimeError):  # a group without a store: then ranks are not named
            self._store = self._group.get_group_store() if hasattr(self._group, "get_group_store") else None

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        self._any(False, "barrier")

    def agree(self, trouble: Exception | None, elsewhere: Exception) -> None:
        """Raise on every rank if one has trouble: its own error there, `elsewhere` on the others. Otherwise a barrier."""
        anywhere = self._any(trouble is not None, "agree")
        if trouble is not None:
            raise trouble
        if anywhere:
            raise elsewhere

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks if one has different settings from rank 0; the message names the settings."""
        found = self.gather_objects(dict(settings))
        for rank, (name, value) in ((r, item) for r, one in enumerate(found) for item in one.items()):
            if value != found[0].get(name):
                raise ConfigError(
                    f"Ranks were given different settings: {name} is {found[0].get(name)!r} on rank 0 and {value!r} on rank "
                    f"{rank}; it must be the same on all ranks."
                )

    def all_max(self, array: npt.NDArray[Any]) -> None:
        """Fill `array` with the maximum over all ranks, element by element."""
        moved = torch.from_numpy(array).to(self._device)
        self._all_reduce_max(moved, "all_max")
        array[:] = moved.cpu().numpy()

    def broadcast_array(self, array: npt.NDArray[Any]) -> None:
        """Fill `array`, which has the same shape and type on every rank, with the values of rank 0."""
        self._broadcast(moved := torch.from_numpy(array).to(self._device), "broadcast_array")
        array[:] = moved.cpu().numpy()

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank; it must be representable in JSON."""
        data = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        self._broadcast(length := torch.tensor([len(data)], device=self._device), "broadcast")
        moved = (
            data.to(self._device)
            if self.rank == 0
            else torch.empty(int(length), dtype=torch.uint8, device=self._device)
        )
        self._broadcast(moved, "broadcast")
        return _unpacked(moved.cpu())

    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in order of rank; they must be representable in JSON."""
        return [_unpacked(part) for part in self.all_gather_ragged(_packed(value), name="gather_objects")]

    def node_gather(self, value: T) -> list[T]:
        """The values of all ranks of this node."""
        parts = self.gather_objects(value)
        return [parts[rank] for rank in self.node_ranks]

    def node_broadcast(self, value: T) -> T:
        """The value of the first rank of this node."""
        return self.gather_objects(value)[self.node_leader]

    def all_gather(self, tensor: Tensor, *, name: str = "all_gather") -> list[Tensor]:
        """Tensors of equal shape from all ranks, on the CPU."""
        mine = tensor.to(self._device)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        self._wait(name, lambda options: self._group.allgather([out], [mine], options), AllgatherOptions(), *out, mine)
        return [part.cpu().detach() for part in out]

    def all_gather_ragged(self, tensor: Tensor, *, name: str = "all_gather_ragged") -> list[Tensor]:
        """Tensors [n] of any length from all ranks: padded to the longest, since all_gather needs equal sizes."""
        lengths = [int(n) for n in self.all_gather(torch.tensor([len(tensor)]), name=name)]
        padded = torch.zeros(max(lengths), dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        return [part[:n] for part, n in zip(self.all_gather(padded, name=name), lengths, strict=True)]

    def _let_go(self) -> None:
        """Release the group: its threads end with the last reference to it."""
        self._group = self._store = None

    def _any(self, here: bool, name: str) -> bool:
        flag = torch.tensor([here], dtype=torch.int64, device=self._device)
        self._all_reduce_max(flag, name)
        return int(flag) > 0

    def _all_reduce_max(self, tensor: Tensor, name: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]
        self._wait(name, lambda options: self._group.allreduce([tensor], options), options, tensor)

    def _broadcast(self, tensor: Tensor, name: str) -> None:  # from rank 0, which the options name by default
        self._wait(name, lambda options: self._group.broadcast([tensor], options), dist.BroadcastOptions(), tensor)

    def _wait(self, name: str, begin: Callable[[Any], Any], options: Any, *tensors: Tensor) -> None:
        """Begin a collective on `tensors` and wait for its end, until the deadline.

        On the CPU the deadline is the collective's own timeout, and we wait until it has failed: a collective that is still
        running keeps the process from ending, or aborts it. NCCL would end the process at its timeout, so we give up first.
        """
        self._count += 1
        _IN_FLIGHT.append([weakref.ref(tensor) for tensor in tensors])
        try:
            if self._store is not None:
                self._store.set(f"{self._key}/{self.rank}", str(self._count))  # a few microseconds
            if self._device.type == "cpu":
                options.timeout = timedelta(seconds=self.deadline)
                begin(options).wait(timedelta(seconds=self.deadline + GRACE))
            else:
                with contextlib.suppress(AttributeError):  # before PyTorch 2.7 some have no such option and never wait
                    options.asyncOp = True
                _wait_on_gpu(begin(options), self.deadline)
        except RuntimeError as cause:
            raise RankError(self._complaint(name)) from cause

    def _complaint(self, name: str) -> str:
        waits = self._behind()
        if waits:
            who = f"{'rank' if len(waits) == 1 else 'ranks'} {', '.join(map(str, waits))} of {self.world} did not reach it"
        else:
            who = "a rank was lost or did not reach it (torch.distributed.monitored_barrier names the missing ones under Gloo)"
        return (
            f"Rank {self.rank} gave up the collective {name!r}, for which it waits {self.deadline:g} s at most: {who}. Look "
            "for the first error of those; every rank must iterate and call state_dict(), summary() and report() equally often "
            "(on one rank alone: summary(local=True), report(local=True))."
        )

    def _behind(self) -> list[int]:
        """The ranks that have begun fewer collectives than this one."""
        found: list[int] = []
        store = self._store
        if store is None:
            return found
        with contextlib.suppress(RuntimeError, ValueError):  # the store went with the rank that kept it
            for rank in range(self.world):
                key = f"{self._key}/{rank}"
                if rank != self.rank and (not store.check([key]) or int(store.get(key)) < self._count):
                    found.append(rank)
        return found


_ALIVE: weakref.WeakSet[Ranks] = weakref.WeakSet()
_IN_FLIGHT: deque[list[weakref.ref[Tensor]]] = deque(maxlen=8)
"""Tensors of the collectives begun last, which a thread of the backend may still hold after they have ended."""
LONGEST_FAREWELL = 1.0
"""Maximum seconds that a process waits at its end until threads of Gloo release the tensors of our collectives."""
FAREWELL = 0.02
"""Seconds that it waits for those of other collectives, of which we know nothing."""


@atexit.register
def _leave() -> None:
    """Let Gloo's threads come to rest before the interpreter is taken apart.

    They let go of a collective's tensors shortly after it has ended, and for that need the interpreter: one that asks for it
    too late is ended by Python inside a C++ destructor, which aborts the process ("terminate called without an active
    exception"). The threads themselves belong to the process group: they are ended here unless a script, or its
    DistributedDataParallel, still refers to the group.
    """
    for ranks in list(_ALIVE):
        ranks._let_go()  # pyright: ignore[reportPrivateUsage]
    if _ALIVE and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    if _IN_FLIGHT:
        time.sleep(FAREWELL)
    end = time.monotonic() + LONGEST_FAREWELL
    while any(held() is not None for tensors in _IN_FLIGHT for held in tensors) and time.monotonic() < end:
        time.sleep(0.001)


def started_late(ranks: Ranks | None) -> bool:
    """True if a process group was created after we had looked for `ranks` and found none."""
    return ranks is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def current_ranks() -> Ranks | None:
    """The ranks of the default process group; None in a single process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks()
    return None


def local_rank() -> int:
    """The local rank of this process as set by torchrun; 0 without it."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def _dimension(mesh: DeviceMesh, dim: str | None) -> dist.ProcessGroup:
    """The process group of the data-parallel dimension of a mesh."""
    names = mesh.mesh_dim_names or ()
    if dim is None:
        if mesh.ndim == 1:
            return mesh.get_group()
        dim = next((name for name in DATA_PARALLEL_NAMES if name in names), None)
    if dim is None or dim not in names:
        raise ConfigError(
            f"The device mesh has the dimensions {names or 'without names'}; pass dim=, the name of the data-parallel one."
        )
    return mesh.get_group(dim)


def _default_deadline(group: dist.ProcessGroup, device: torch.device) -> float:
    """A little less than the timeout that the group was created with, or torch's default."""
    seconds = DEADLINES.get(dist.get_backend(group), OTHER_DEADLINE)
    with contextlib.suppress(AttributeError, RuntimeError):  # only some backends tell
        seconds = group._get_backend(device).options._timeout.total_seconds()  # pyright: ignore
    return DEADLINE_SHARE * seconds


def _wait_on_gpu(work: Any, deadline: float) -> None:
    """Wait with a deadline; NCCL's own wait returns at once, and later work would wait without one."""
    end, pause = time.monotonic() + deadline, 0.00002
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"not finished in {deadline:g} s")
        time.sleep(pause)
        pause = min(0.002, 1.5 * pause)
    work.wait()


def _packed(value: Any) -> Tensor:
    text = json.dumps(value, default=lambda number: number.item())  # NumPy's numbers as Python's
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())


def _unpacked(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def _node() -> int:
    """A number that is the same for all processes of a running node and differs between nodes."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(name.encode())
