"""Two real processes under Gloo with DDP: every rank's norms are in the one ledger, as if made alone."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import salience

N = 21  # odd, so that the last batch is uneven


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 2, 6, 6, generator=g), torch.randint(0, 3, (N,), generator=g))


def net() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data = 0.2 * torch.randn(p.shape, generator=g)
    return model


def work(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        loader = salience.Loader(data(), 4)
        model = DistributedDataParallel(net())
        loader.attach(model, grad_norm="all")
        for x, y in loader:
            loader.loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        loader.state_dict()  # brings the ledgers together
        np.save(f"{out}/{rank}.npy", loader.ledger.grad_norm)
    except Exception:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


def test_norms_of_two_ranks_are_those_of_one(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=2)
    assert not [p.read_text() for p in tmp_path.glob("*.error")]
    alone, model = salience.Loader(data(), 8), net()
    alone.attach(model, grad_norm="all")
    for x, y in alone:
        alone.loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    wanted = alone.ledger.grad_norm
    assert np.isfinite(wanted).all()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"{rank}.npy"), wanted, rtol=1e-4)
