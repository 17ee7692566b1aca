"""`groups="auto"`: which ranks are near each other, found by timing messages between all pairs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SMALL, LARGE, TRIES = 8, 1 << 18, 3
"""Bytes of the messages that time latency and bandwidth, and the number of round trips of each; the shortest time counts."""
APART = 3.0
"""Messages between groups must take this many times as long as the slowest inside a group."""


def pairings(world: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which all ranks meet each other once (the circle method)."""
    seats = [*range(world), *([-1] if world % 2 else [])]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def near_groups(seconds: Sequence[Sequence[float]]) -> list[list[int]] | None:
    """Groups of ranks that are near each other, from seconds between all pairs [world][world]; None if there are none.

    Pairs are sorted by time, and the widest gap (as a ratio) divides near from far; it must be at least `APART`. Ranks that
    are near each other form a group, and all pairs of it must be near.
    """
    world = len(seconds)
    pairs = sorted((max(seconds[a][b], seconds[b][a]), a, b) for a, b in itertools.combinations(range(world), 2))
    gaps = [(math.log(max(pairs[i + 1][0], 1e-9) / max(pairs[i][0], 1e-9)), i + 1) for i in range(len(pairs) - 1)]
    widest, near = max(gaps, default=(0.0, 0))
    if widest < math.log(APART):
        return None
    group = list(range(world))
    for _, a, b in pairs[:near]:
        group = [group[a] if one == group[b] else one for one in group]
    found = [[rank for rank in range(world) if group[rank] == one] for one in sorted(set(group))]
    whole = sum(len(one) * (len(one) - 1) // 2 for one in found) == near
    return found if whole and len(found) > 1 else None


def pair_seconds(group: Any, deadline: float) -> list[list[float]]:
    """Seconds of a round trip of a small and a large message between all pairs of ranks, [world][world].

    The pairs of a round exchange messages at the same time, so those that share a slow link look even slower. Collective.
    """
    me, world = dist.get_rank(group), dist.get_world_size(group)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
    mine = torch.zeros(world, dtype=torch.float64)
    for pairs in pairings(world):
        for pair in pairs:
            if me in pair:
                other = pair[0] + pair[1] - me
                mine[other] = sum(_there_and_back(group, me, other, size, device, deadline) for size in (SMALL, LARGE))
    rows = [torch.zeros(world, dtype=torch.float64, device=device) for _ in range(world)]
    dist.all_gather(rows, mine.to(device), group=group)
    return [row.tolist() for row in rows]


def _there_and_back(group: Any, me: int, other: int, size: int, device: torch.device, deadline: float) -> float:
    message, patience = torch.zeros(size, dtype=torch.uint8, device=device), timedelta(seconds=deadline)
    times: list[float] = []
    for _ in range(TRIES):
        start = time.perf_counter()
        for sends in (me < other, me > other):
            turn = dist.isend if sends else dist.irecv
            work: Any = turn(message, group=group, **{"group_dst" if sends else "group_src": other})
            work.wait(patience) if device.type == "cpu" else work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
