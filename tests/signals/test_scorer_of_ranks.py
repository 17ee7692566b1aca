"""Two real processes under Gloo, each with a scorer of its own: what both find is in the one ledger."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience

N = 120


def work(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        g = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(N, 8, generator=g), torch.randint(0, 4, (N,), generator=g))
        loader = salience.Loader(data, 10, epochs=3, select={"preset": "uniform", "keep": 0.5})
        model = nn.Linear(8, 4)
        with torch.no_grad():
            model.weight.fill_(0.1)
        loader.attach(model, background=True, grad_norm="last")
        for epoch in range(2):
            for number, (x, y) in enumerate(loader):
                if epoch == 0 and number == 0:
                    scorer = loader._run.sensing.scorer
                    for _ in range(6000):
                        if scorer.done >= 7:
                            break
                        time.sleep(0.01)
                if epoch == 1 and number == 0:
                    ledger = loader.ledger
                    scored = np.flatnonzero((ledger.seen == 1) & (ledger.trained == 0))
                    told = {"scored": scored.tolist(), "norms": int(np.isfinite(ledger.grad_norm[scored]).sum())}
                    Path(out, f"{rank}.json").write_text(json.dumps(told))
                    if rank == 1:  # the run goes on without it
                        loader._run.sensing.scorer.process.kill()
                        loader._run.sensing.scorer.process.join()
                z = model(x)
                loader.loss(F.cross_entropy(z, y, reduction="none"), z, y).backward()
        next(iter(loader))
        assert (loader._run.sensing.scorer is None) == (rank == 1)
        loader.detach()
    except Exception:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


def test_scorers_of_two_ranks_share_the_work_and_one_may_be_lost(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=2)
    assert not [p.read_text() for p in tmp_path.glob("*.error")]
    one, other = (json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert len(one["scored"]) == one["norms"] == 15  # a quarter of the sixty that were not picked
