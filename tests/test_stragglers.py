"""A rank that is paused, and one that is lost for good: training goes on, and every sample is trained on exactly once."""

from __future__ import annotations

import json
import os
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


def wait_for_port(port: int) -> None:
    end = time.monotonic() + 120
    while True:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end, "nobody listens"
        time.sleep(0.1)


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


# As a node each: the second is killed with its agent, and the first goes on alone.
ELASTIC = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
import salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
(folder / f"process-{os.getppid()}").write_text(str(os.getpid()))
data = TensorDataset(torch.randn(203, 8, generator=torch.Generator().manual_seed(0)), torch.arange(203) % 4)
loader = salience.Loader(data, 16 // world, epochs=2, select="infobatch", with_ids=True)
model = torch.nn.Linear(8, 4)
state = folder / "state.pt"
if state.exists():
    loader.load_state_dict(torch.load(state, weights_only=True))
net = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(loader.epoch, 2):
    for step, (ids, (x, y)) in enumerate(loader):
        loss = loader.loss(F.cross_entropy(net(x), y, reduction="none"), None, None, ids)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        saved = loader.state_dict()
        if rank == 0:
            torch.save(saved, folder / "part")
            os.replace(folder / "part", state)
        with open(folder / f"ids-{world}-{rank}", "a") as file:
            file.write(json.dumps([epoch, ids.tolist(), sorted(loader.plan.ids.tolist())]) + chr(10))
        dist.barrier()
        if world == 2 and (epoch, step) == (0, 4):
            (folder / f"now-{rank}").touch()
            while not (folder / "killed").exists():
                time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.slow  # torchrun takes its time to believe that a node is lost
def test_a_node_lost_under_torchrun_leaves_the_rest_of_the_window_to_the_others_exactly_once(tmp_path: Path):
    (tmp_path / "train.py").write_text(ELASTIC)
    port = free_port()
    start = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost", "--rdzv-conf=last_call_timeout=2",
        str(tmp_path / "train.py"), str(tmp_path),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    first = subprocess.Popen(start, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_port(port)  # it keeps the store
    second = subprocess.Popen(start, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for rank in (0, 1):
        wait_for(tmp_path / f"now-{rank}", 180)
    second.kill()
    os.kill(int((tmp_path / f"process-{second.pid}").read_text()), signal.SIGKILL)
    (tmp_path / "killed").touch()
    said = first.communicate(timeout=240)[0]
    second.wait()
    assert first.returncode == 0, said
    before = [[json.loads(line) for line in (tmp_path / f"ids-2-{rank}").read_text().splitlines()] for rank in (0, 1)]
    after = [json.loads(line) for line in (tmp_path / "ids-1-0").read_text().splitlines()]
    assert len(before[0]) == len(before[1]) == 5
    for epoch in (0, 1):
        made = [i for rank in before for e, ids, _ in rank if e == epoch for i in ids]
        made += [i for e, ids, _ in after if e == epoch for i in ids]
        plan = next(plan for e, _, plan in [*before[0], *after] if e == epoch)
        assert sorted(made) == plan, f"window {epoch}: every sample of the plan exactly once"
