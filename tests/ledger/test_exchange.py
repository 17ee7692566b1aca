"""What ranks send each other of their statistics: ids and values apart, whole, in order, and as few bytes as are stated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Two ranks with batches of other sizes; rank 0 counts what it hands to the process group.
SCRIPT = """
import json, sys, time
import numpy as np, torch, torch.distributed as dist
from salience.ledger.exchange import exchange
from salience.ledger.statistics import LOGIT_ROWS, LOSS_ROWS, TARGET_ROWS
from salience.ranks import Ranks

rank, folder, rows, count = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

class Counted(Ranks):
    bytes = 0

    def all_gather(self, tensor, *, name="all_gather"):
        self.bytes += tensor.nbytes
        return super().all_gather(tensor, name=name)

ranks = Counted()
names = {1: LOSS_ROWS, 2: TARGET_ROWS, 13: LOGIT_ROWS}[rows]
ids = np.arange(rank, 2 * count, 2)[: count - 7 * rank]
batches = [(part, names, np.full((len(names), len(part)), 1.0 + rank, dtype=np.float32), (3, True, bool(k % 2)))
           for k, part in enumerate(np.array_split(ids, 20))]
ranks.bytes, begin = 0, time.perf_counter()
found = [(ids.tolist(), list(names), values.mean().item(), flags) for ids, names, values, flags in exchange(ranks, batches)]
seconds = time.perf_counter() - begin
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"bytes": ranks.bytes, "seconds": seconds, "found": found}, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("rows", "stated"), [(1, 12), (2, 16), (13, 60)])
def test_a_visit_costs_as_many_bytes_as_the_page_says_and_all_arrive_in_the_order_of_steps(
    tmp_path: Path, rows: int, stated: int
):
    count = 2000
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps([rank, str(tmp_path), rows, count])],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["found"] == second["found"], "every rank enters the same"
    assert sorted(i for ids, *_ in first["found"] for i in ids) == sorted([*range(0, 4000, 2), *range(1, 3987, 2)])
    assert [mean for _, _, mean, _ in first["found"][:4]] == [1.0, 2.0, 1.0, 2.0], "step by step, rank by rank"
    assert stated <= first["bytes"] / count < 1.05 * stated
