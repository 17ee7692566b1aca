"""A rank that is paused: the others wait, training goes on, and every sample is trained on exactly once."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# Writes how often each sample was trained on, and in how unequal parts.
PAUSED = """
import json, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
import salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

rank, port, folder = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
data = TensorDataset(torch.randn(203, 8, generator=torch.Generator().manual_seed(0)), torch.arange(203) % 4)
loader = salience.Loader(data, 8, epochs=4, balance=True)
model = torch.nn.Linear(8, 4)
ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for step, (x, y) in enumerate(loader):
        time.sleep(0.002 * len(x))
        loss = loader.loss(F.cross_entropy(ddp(x), y, reduction="none"), None, None)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if (rank, epoch, step) == (1, 1, 5):
            open(f"{folder}/now", "w").close()
            time.sleep(0.5)
summary = loader.summary()
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"trained": loader.ledger.seen.tolist(), "shares": loader._run.balancing.shares.tolist()}, file)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("seconds", [1.5, pytest.param(10, marks=pytest.mark.slow)])
def test_a_paused_rank_is_waited_for_and_does_not_count_as_a_slow_one(tmp_path: Path, seconds: float):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PAUSED, json.dumps([rank, port, str(tmp_path)])], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]  # fmt: skip
    wait_for(tmp_path / "now")
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    ranks[1].send_signal(signal.SIGCONT)
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    found: list[Any] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["trained"] == [4] * 203
    assert min(found[0]["shares"]) > 0.3, "one pause is no speed"
