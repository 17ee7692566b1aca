"""Batches by length on two ranks: disjoint parts that fit, and the gradient of all samples, or of all tokens."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

N, MOST = 151, 200

SCRIPT = """
import json, sys
import numpy as np, torch, torch.distributed as dist
import salience
from torch.nn.parallel import DistributedDataParallel

rank, port, folder, select, by_token = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
sizes = np.minimum(60, 1 + np.random.default_rng(0).geometric(0.08, 151))
x = torch.randn(151, 4, generator=torch.Generator().manual_seed(1))
data = [torch.full((int(size),), i) for i, size in enumerate(sizes)]
pad = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
def make():
    return salience.Loader(data, batch_tokens=200, lengths=sizes, collate_fn=pad, with_ids=True, epochs=4, select=select)
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
ddp, parts, padded = DistributedDataParallel(model), [], []
loader = make()
def step(ids, batch):
    each = ddp(x[ids])[:, 0]
    if by_token:
        mask = batch >= 0
        loader.loss(each[:, None].expand(batch.shape), mask=mask, ids=ids, total=151 * sizes.mean()).backward()
    else:
        loader.loss(each, ids=ids).backward()
    parts.append(ids.tolist())
    padded.append(batch.numel())
for number, (ids, batch) in enumerate(loader):
    step(ids, batch)
    if number == 3:
        break
state = loader.state_dict()
loader = make()
loader.load_state_dict(state)
for ids, batch in loader:
    step(ids, batch)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"parts": parts, "padded": padded, "grad": model.weight.grad.tolist()}, file)
dist.barrier()
dist.destroy_process_group()
"""


def run(folder, select, by_token):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps([rank, port, str(folder), select, by_token])],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=180)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("select", "by_token"), [(None, False), ("default", True)])
def test_two_ranks_cover_a_window_once_and_have_the_gradient_of_all_of_it(tmp_path, select, by_token):
    """Stopped after four steps and resumed, too. The first window of `default` visits everything."""
    one, two = run(tmp_path, select, by_token)
    assert len(one["parts"]) == len(two["parts"])
    visited = [i for rank in (one, two) for part in rank["parts"] for i in part]
    assert sorted(visited) == list(range(N))
    assert max(one["padded"] + two["padded"]) <= MOST
    assert all(part for rank in (one, two) for part in rank["parts"])
    sizes = np.minimum(60, 1 + np.random.default_rng(0).geometric(0.08, N))
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
    weights = torch.from_numpy(sizes / sizes.sum()).float() if by_token else torch.full((N,), 1 / N)
    steps = 1 if by_token else len(one["parts"])
    torch.testing.assert_close(torch.tensor(one["grad"])[0] / steps, (weights[:, None] * x).sum(0))
    assert one["grad"] == two["grad"]
