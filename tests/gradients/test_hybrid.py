"""Helper ranks as shards of a parameter server for a share of every bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import digest, problem, run_ranks, small_net
from torch.nn.parallel import DistributedDataParallel

import salience
from salience.errors import ConfigError
from salience.gradients import hybrid, serve
from salience.gradients.hybrid import best_share


def trained(rank: int, workers: Any, share: float | None, steps: int = 6) -> Any:
    ddp = DistributedDataParallel(small_net(), process_group=workers, bucket_cap_mb=0.01, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = None
    if share != 0:
        handle = salience.sync(ddp, optimizer, mode="hybrid", helpers=[1, 3], share=share)
    x, y = problem(rank)
    for step in range(steps):
        picked = torch.arange(step * 32, step * 32 + 32) % len(y)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[picked]), y[picked]).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return ddp, flat, handle


def helped(rank: int) -> Any:
    """Ranks 0 and 2 train, 1 and 3 help; against plain DDP of the workers alone."""
    hybrid.PIECE = 1000  # so that the small net travels in several pieces
    workers = dist.new_group([0, 2])
    if rank in (1, 3):
        for _ in range(3):
            serve([1, 3])
        return "served"
    found: dict[str, Any] = {}
    _, plain, _ = trained(rank, workers, 0)
    for share in (0.5, 1.0, None):
        ddp, flat, handle = trained(rank, workers, share)
        exchange: Any = handle.traffic.exchange
        handle.load_state_dict(handle.state_dict())  # nothing stays behind, so there is nothing to lose
        found[str(share)] = [
            digest(ddp.module), (flat - plain).abs().max().item(), handle.sent, sorted(exchange.times), exchange.lossy,
        ]  # fmt: skip
        handle.close()
        found[str(share)].append(len(handle.links.shards))
    return found


def test_workers_get_the_mean_whatever_share_the_helpers_add_up(tmp_path):
    first, one, second, three = run_ranks(tmp_path, helped, world=4)
    assert isinstance(first, dict), first
    assert (one, three) == ("served", "served")
    for share, (mine, apart, sent, times, lossy, left) in first.items():
        assert mine == second[share][0], f"{share}: parameters differ between workers"
        assert apart < 1e-5, f"{share}: not the mean"
        assert sent > 0
        assert times == ([0, 0.25, 0.5, 0.75, 1] if share == "None" else [])
        assert (lossy, left) == (False, 0)


def test_helpers_are_left_out_unless_they_are_clearly_faster():
    assert best_share({0.0: 1.0, 0.5: 0.8, 1.0: 0.9}) == 0.5
    assert best_share({0.0: 1.0, 0.5: 0.99, 1.0: 1.2}) == 0.0
    assert best_share({0.0: 1.0, 0.5: 1.5, 1.0: 1.2}) == 0.0


def refused(rank: int) -> Any:
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said = []
    for more in ({}, {"helpers": [1]}, {"helpers": [5]}, {"helpers": [1], "groups": "node"}, {"helpers": 1}):
        with pytest.raises(ConfigError) as caught:
            salience.sync(ddp, optimizer, mode="hybrid", **more)
        said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        serve([1 - rank])
    return [*said, str(caught.value).replace(f"Rank {rank}", "Rank").replace(f"[{1 - rank}]", "[]")]


def test_helpers_that_train_or_are_not_there_are_refused(tmp_path):
    first, second = run_ranks(tmp_path, refused)
    assert first == second
    assert "helpers=None must name all ranks" in first[0]
    assert all("that do not train" in said for said in first[:3])
    assert "cannot be combined" in first[3]
    assert "a list of ranks" in first[4]
    assert "called serve()" in first[5]


def worker_fails(rank: int) -> Any:
    workers = dist.new_group([0, 1])
    if rank == 2:
        try:
            serve([2], deadline=60)
        except salience.RankError as error:
            return str(error)
        return "nobody said anything"
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=workers)
    salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode="hybrid", helpers=[2], share=0.5)
    if rank == 0:
        dist.destroy_process_group()
    return ""


@pytest.mark.slow  # it waits for a deadline of a minute
def test_a_helper_whose_workers_are_gone_says_so(tmp_path):
    *_, said = run_ranks(tmp_path, worker_fails, world=3)
    assert said.startswith("Helper rank 2 lost the workers"), said
