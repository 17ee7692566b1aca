"""How the ranks that torchrun starts find each other, also those that it starts again after a failure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from salience.errors import RankError
from salience.ranks import Ranks

PATIENCE = 600.0
"""Seconds that a rank waits for the others to start."""
LOOK_EVERY = 0.05
"""Seconds between two looks into the store."""


@contextmanager
def joined_ranks(device: torch.device) -> Generator[Ranks | None]:
    """The ranks that torchrun started, in a process group that lasts as long as the block; None in a single process."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield None
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world = next(cast("Any", dist).rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=meet(store, rank, world), rank=rank, world_size=world)
    ranks = Ranks()
    yield ranks  # after an error the others are told by the closed connection
    ranks.barrier()
    dist.destroy_process_group()


def meet(store: Any, rank: int, world: int, patience: float = PATIENCE) -> Any:
    """A part of the store that only these processes use.

    torchrun keeps one store for all restarts. Gloo and NCCL would find there what ranks had left that are gone, and try to
    reach those (pytorch issue 135712). The number of restarts would not do as a prefix: every node counts its own. So every
    process calls itself by a random name. Rank 0 lists the names it finds until all those listed have come to the meeting that
    is called by its own; the others go to a meeting only if its list has their name.
    """
    me, end = os.urandom(8).hex(), time.monotonic() + patience
    meeting, names, missing = me, [me], list(range(1, world))
    store.set(f"salience/name/{rank}", me)
    while True:
        if rank == 0:
            names = [me, *(_look(store, f"salience/name/{other}") for other in range(1, world))]
            store.set("salience/meeting", json.dumps(names))
            missing = [other for other in range(1, world) if not store.check([f"salience/{me}/{names[other]}"])]
        elif me in (names := json.loads(_look(store, "salience/meeting") or "[]")):
            meeting, missing = names[0], []
            store.set(f"salience/{meeting}/{me}", "here")
        if not missing:
            return cast("Any", dist).PrefixStore(f"salience/{meeting}", store)
        if time.monotonic() > end:
            who = f"ranks {missing} of {world}" if rank == 0 else "rank 0, which did not call the ranks together"
            raise RankError(
                f"Rank {rank} waited {patience:g} s for {who} at the start; look for the first error of those."
            )
        time.sleep(LOOK_EVERY)


def _look(store: Any, key: str) -> str:
    """What is in the store; empty where there is nothing."""
    return store.get(key).decode() if store.check([key]) else ""
