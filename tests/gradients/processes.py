"""Real processes under Gloo, one thread each, for the tests of this folder."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def run_ranks(folder: Path, act: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """What `act(rank, *args)` returned on each rank, as JSON; a traceback as text where it raised."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    mp.spawn(_work, (port, str(folder), world, act, args), nprocs=world)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _work(rank: int, port: int, out: str, world: int, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        said = act(rank, *args)
    except Exception:
        said = traceback.format_exc()
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    # The process that keeps the store leaves last, and none while another still talks.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.add("done", 1)
    while int(store.add("done", 0)) < world:
        time.sleep(0.01)
    if rank == 0:
        time.sleep(0.3)
    os._exit(0)


def small_net() -> nn.Module:
    """A convolution, a large and a small linear layer, a norm: every kind of layer that modes treat differently."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def wrapped(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """Under DDP in many small buckets, the hard case for order."""
    return DistributedDataParallel(small_net() if model is None else model, bucket_cap_mb=0.001, **options)


def problem(rank: int, n: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of which the brightest quadrant is the class; other ones on every rank."""
    g = torch.Generator().manual_seed(10 + rank)
    y = torch.randint(4, (n,), generator=g)
    x = 0.5 * torch.randn(n, 1, 6, 6, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 0, 3 * (c // 2) : 3 * (c // 2) + 3, 3 * (c % 2) : 3 * (c % 2) + 3] += 1.0
    return x, y


def digest(model: nn.Module) -> int:
    """One number for all parameters, to the bit."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return zlib.crc32(flat.numpy().tobytes())
