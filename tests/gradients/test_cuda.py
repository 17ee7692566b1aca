"""On a GPU the hook must not make the host wait once per bucket."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import problem, run_ranks, small_net
from torch.nn.parallel import DistributedDataParallel

import salience


def waits(rank: int, mode: str) -> Any:
    """Warnings about synchronisations in one backward pass, with one bucket and with many; two processes on one GPU."""
    counts = []
    x, y = (part.cuda() for part in problem(rank))
    for megabytes in (25, 0.001):
        ddp = DistributedDataParallel(small_net().cuda(), bucket_cap_mb=megabytes, forward_sync_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        salience.sync(ddp, optimizer, mode=mode)
        for step in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if step == 3 else "default")
                loss.backward()
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
        counts.append(sum("synchroniz" in str(one.message) for one in seen))
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["allreduce", "bf16", "topk", "kernels", "lowrank", "lazy"])
def test_more_buckets_make_the_host_wait_no_more_often(tmp_path, mode):
    for one_bucket, many in run_ranks(tmp_path, waits, mode):
        assert many == one_bucket
        assert many == 0 or mode not in ("allreduce", "bf16")
