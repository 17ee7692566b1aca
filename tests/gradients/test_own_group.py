"""A model whose process group is not the default one: some ranks of the job do not train it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from processes import digest, run_ranks, wrapped
from torch import nn

import salience


def again_and_again(rank: int) -> Any:
    """Three of four ranks train two models, one after the other and then both, in groups of unequal size."""
    workers = dist.new_group([0, 1, 2])
    if rank == 3:
        return None
    models = [wrapped(nn.Linear(4, 4), process_group=workers) for _ in range(2)]
    found, handles = [], []
    for number, (model, mode) in enumerate([(0, "local"), (0, "topk"), (1, "local"), (0, "allreduce")]):
        ddp = models[model]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = salience.sync(ddp, optimizer, mode=mode, groups=[[0, 1], [2]])
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + 10 * number + step))
            ddp(x).square().sum().backward()
            optimizer.step()
        handle.average()
        found.append(digest(ddp.module))
        if number != 2:
            handle.close()
        handles.append(handle)
    return found


def test_groups_can_be_made_again_and_for_a_second_model(tmp_path):
    first, second, third, other = run_ranks(tmp_path, again_and_again, world=4)
    assert isinstance(first, list), first
    assert first == second == third
    assert len(set(first)) == 4
    assert other is None
