"""Two ranks tune together: they switch at the same steps, decide alike, and stay equal."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(800, 8, generator=g), torch.randint(0, 4, (800,), generator=g))
    torch.manual_seed(1)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loader = salience.Loader(data, 4, epochs=4)
    fast = salience.tune(ddp, optimizer, loader, levers=("fused", "foreach"), memory=300)
    for _ in range(4):
        for x, y in loader:
            loss = loader.loss(F.cross_entropy(fast(x), y, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    said = [(one.lever, one.action) for one in fast.decisions]
    torch.save({"state": state, "said": said, "on": fast.on, "done": fast.done}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_decide_alike_and_stay_equal(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert one["said"] == other["said"]
    assert one["on"] == other["on"]
    assert one["done"]
    assert ("checkpoint", "keep") in one["said"]
    assert {lever for lever, _ in one["said"]} >= {"checkpoint", "fused", "foreach"}
    assert all(torch.equal(a, b) for a, b in zip(one["state"].values(), other["state"].values(), strict=True))
