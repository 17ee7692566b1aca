"""Two real processes under Gloo: rank 0 decides, and both do it in the same window."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import TensorDataset

import salience
from salience.events import read

WINDOWS = 12


def work(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        data = TensorDataset(torch.arange(200.0), torch.arange(200) % 4)
        loader = salience.Loader(data, 4, epochs=WINDOWS, with_ids=True, auto="lossy", log=f"{out}/log")
        used, plans = [], []
        for _ in range(WINDOWS):
            for ids, (x, _) in loader:
                time.sleep(0.001 * (1 + rank))  # they would measure different times
                loader.loss(x)
                assert len(ids) == len(x)
            used.append(astuple(loader._run.deciding.settings))
            plans.append(loader.plan.ids)
        np.savez(f"{out}/{rank}.npz", used=np.array(used), plans=np.concatenate(plans))
    finally:
        dist.destroy_process_group()


def test_rank_0_decides_for_all(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in (0, 1))
    assert np.array_equal(first["used"], second["used"])
    assert np.array_equal(first["plans"], second["plans"])
    assert first["used"][:, 3].any()  # select was on in some window
    decisions = [event for event in read(tmp_path / "log") if event["kind"] == "decision"]
    assert next(event["lever"] for event in decisions if event["action"] == "try") == 'select="default"'
