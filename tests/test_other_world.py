"""A run saved on some ranks goes on with another number of them: real processes under Gloo, stopped in mid-window."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import salience
from salience.errors import StateError
from salience.plan import Plan, Shard

from conftest import require

N, EPOCHS = 203, 3

# One rank of one leg: trains from the state of the leg before, if there is one, and stops after `stop` batches. Rank 0 alone
# writes the state, as scripts do. A rank number from `hosts` on gets a host name of its own: another node.
SCRIPT = """
import ctypes, json, socket, sys
import numpy as np, torch, torch.distributed as dist, torch.nn.functional as F
import salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

rank, world, port, folder, leg, stop, select, batch, hosts = json.loads(sys.argv[1])
torch.set_num_threads(1)
g = torch.Generator().manual_seed(3)
x = torch.randn(203, 8, generator=g)
data = TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))

def main():
    if rank >= hosts:
        assert ctypes.CDLL(None).unshare(0x04000000) == 0
        socket.sethostname("salience-node-b")
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    loader = salience.Loader(data, batch, epochs=3, select=select, with_ids=True)
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        [p.fill_(0.01) for p in model.parameters()]
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if leg:
        state = torch.load(f"{folder}/{leg - 1}.pt", weights_only=True)
        loader.load_state_dict(state["loader"]); model.load_state_dict(state["model"])
    steps, done = [], 0
    while loader.epoch < 3 and done != stop:
        for ids, (a, b) in loader:
            losses = F.cross_entropy(trained(a), b, reduction="none")
            loss = loader.loss(losses, ids=ids)
            steps.append([loader.epoch, loader.plan.window, ids.tolist()])
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            done += 1
            if done == stop:
                break
    state = {"loader": loader.state_dict(), "model": model.state_dict()}
    if rank == 0:
        torch.save(state, f"{folder}/{leg}.pt")
    ledger = loader.ledger
    np.savez(f"{folder}/{leg}-{rank}.npz", weight=model.weight.detach().numpy(), seen=ledger.seen, trained=ledger.trained,
             loss=ledger.mean_loss, visits=loader.visits, batch=loader.batch_size, progress=loader.progress)
    with open(f"{folder}/{leg}-{rank}.json", "w") as file:
        json.dump(steps, file)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()

main()
"""


def run_leg(
    folder: Path, leg: int, world: int, *, stop: int = -1, select: str | None = None, batch: int = 16, hosts: int = 99
) -> tuple[list[list[Any]], list[Any]]:
    """Train on `world` ranks; returns the global batches as (epoch, window, ids over all ranks), and what each rank knows."""
    (folder / "leg.py").write_text(SCRIPT)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, folder / "leg.py", json.dumps([rank, world, port, str(folder), leg, stop, select, batch, hosts])],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    steps = [json.loads((folder / f"{leg}-{rank}.json").read_text()) for rank in range(world)]
    whole = [[*parts[0][:2], [i for part in parts for i in part[2]]] for parts in zip(*steps, strict=True)]
    return whole, [np.load(folder / f"{leg}-{rank}.npz") for rank in range(world)]


@pytest.mark.parametrize("select", [None, "infobatch"])
def test_ranks_may_become_fewer_and_more_in_mid_window_and_every_step_stays_what_it_was(tmp_path, select):
    (tmp_path / "whole").mkdir()
    whole, found = run_leg(tmp_path / "whole", 0, 2, select=select)
    # 2 ranks, then 1, then 4; of 16 samples per rank on 2, so steps of 32; the script's batch_size stays 16.
    legs = [
        run_leg(tmp_path, leg, world, stop=stop, select=select)
        for leg, world, stop in ((0, 2, 2), (1, 1, 3), (2, 4, -1))
    ]
    together = [step for steps, _ in legs for step in steps]
    assert [sorted(ids) for *_, ids in together] == [sorted(ids) for *_, ids in whole]
    for epoch in range(EPOCHS if select is None else 0):
        assert sorted(i for at, _, ids in together if at == epoch for i in ids) == list(range(N))
    for rank, last in enumerate(legs[-1][1]):
        np.testing.assert_array_equal(last["seen"], found[0]["seen"], err_msg=f"rank {rank}")
        np.testing.assert_allclose(last["loss"], found[0]["loss"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(last["weight"], found[0]["weight"], rtol=1e-4, atol=1e-5)
        assert (last["visits"], last["progress"]) == (found[0]["visits"], 1.0)
    assert [part["batch"] for _, parts in legs for part in parts] == [16, 16, 32, 8, 8, 8, 8]


def test_a_global_batch_that_does_not_divide_is_kept_as_well(tmp_path):
    first, _ = run_leg(tmp_path, 0, 2, stop=3)
    rest, _ = run_leg(tmp_path, 1, 3)
    assert [len(ids) for at, _, ids in first + rest if at == 0] == [32] * 6 + [11]
    assert sorted(i for at, _, ids in first + rest if at == 0 for i in ids) == list(range(N))


def test_what_pick_remembers_goes_on_with_the_state_of_one_rank(tmp_path):
    """Both ranks resume from what rank 0 saved: each has its own recent losses again, and picks the same samples."""
    (tmp_path / "whole").mkdir()
    _, whole = run_leg(tmp_path / "whole", 0, 2, select="selective_backprop")
    run_leg(tmp_path, 0, 2, stop=9, select="selective_backprop")
    _, rest = run_leg(tmp_path, 1, 2, select="selective_backprop")
    np.testing.assert_array_equal(rest[1]["trained"], whole[1]["trained"])
    np.testing.assert_array_equal(rest[0]["loss"], whole[0]["loss"])


def test_picking_goes_on_with_other_ranks_and_trains_as_many(tmp_path):
    (tmp_path / "whole").mkdir()
    steps, whole = run_leg(tmp_path / "whole", 0, 2, select="selective_backprop")
    legs = [
        run_leg(tmp_path, leg, world, stop=stop, select="selective_backprop")
        for leg, world, stop in ((0, 2, 9), (1, 1, 2), (2, 4, -1))
    ]
    for last in legs[-1][1]:
        np.testing.assert_array_equal(last["seen"], whole[0]["seen"])
        assert (last["trained"] <= last["seen"]).all()
        most = sum(len(ids) for *_, ids in steps)
        assert abs(int(last["trained"].sum()) - int(whole[0]["trained"].sum())) <= len(steps), (
            "one per batch for rounding"
        )
        assert int(last["trained"].sum()) < most
    together = [step for steps, _ in legs for step in steps]
    assert [sorted(ids) for *_, ids in together] == [sorted(ids) for *_, ids in steps]


def another_node_is_allowed() -> bool:
    code = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x04000000))"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_number_of_nodes_has_one_ledger_each(tmp_path):
    require(another_node_is_allowed(), "the right to have a host name of its own (unshare)")
    first, _ = run_leg(tmp_path, 0, 2, stop=3)
    rest, found = run_leg(tmp_path, 1, 2, hosts=1)
    assert sorted(i for at, _, ids in first + rest if at == 0 for i in ids) == list(range(N))
    np.testing.assert_array_equal(found[0]["seen"], found[1]["seen"])
    np.testing.assert_array_equal(found[0]["loss"], found[1]["loss"])


# --- without processes ---


def a_plan(n: int, batch_size: int) -> Plan:
    ones = np.ones(n, dtype=np.float32)
    return Plan(
        window=0, population=n, batch_size=batch_size, ids=np.random.default_rng(0).permutation(n), weights=ones,
        importance=ones.copy(), level=np.zeros(n, dtype=np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize("n", [40, 41, 43, 47])
@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize(("before", "world"), [(1, 4), (2, 1), (2, 4), (4, 2), (3, 5)])
def test_what_is_left_of_a_window_is_divided_among_other_ranks_exactly_once(n, done, before, world):
    saved = Shard.from_arrays(a_plan(n, 10).shard(0, before).arrays())
    over = set(range(min(done, len(saved))))
    shards = [saved.among(rank, world, over) for rank in range(world)]
    left = [number for number in range(len(shards[0])) if number not in over]
    visits = [(shard.weights(number), shard.ids(number)) for number in left for shard in shards]
    assert all(len(ids) for _, ids in visits), "no rank without work"
    counted = np.concatenate([np.empty(0, dtype=np.int64), *(ids[weights > 0] for weights, ids in visits)])
    delivered = np.concatenate(
        [np.empty(0, dtype=np.int64), *(saved.plan.ids[saved.cuts[0, k] : saved.cuts[-1, k]] for k in over)]
    )
    assert sorted([*counted, *delivered]) == list(range(n))
    assert sum(int(shards[0].global_sizes[number]) for number in left) == len(counted)


def test_a_tail_that_was_filled_up_can_be_divided_once_more():
    saved = a_plan(42, 10).shard(0, 2)  # a tail of 2
    four = saved.among(0, 4, {0, 1, 2, 3})
    assert len(four.plan) == 44
    two = Shard.from_arrays(four.arrays()).among(1, 2, {0, 1, 2, 3})
    assert (two.ids(4).tolist(), two.global_sizes[4]) == ([saved.plan.ids[41]], 2)


def test_visits_that_fill_up_are_neither_recorded_nor_learnt_from():
    loader = salience.Selector(42, batch_size=10, epochs=1)
    for _ in range(4):
        ids, _ = next(it := iter(loader)) if loader.visits == 0 else next(it)
        loader.loss(torch.ones(len(ids)))
    run = loader._run
    run.course.resume(run.course.shard.among(0, 4, {0, 1, 2, 3}).of(3), {0, 1, 2, 3})
    run.resumes += 1
    (ids, weights), *more = loader
    assert (len(ids), weights.tolist(), more) == (1, [0.0], [])
    assert float(loader.loss(torch.ones(1))) == 0.0
    assert loader.ledger.seen[int(ids)] == 0


def test_more_ranks_than_samples_of_a_step_are_refused():
    with pytest.raises(StateError, match="batches of 4 samples, which cannot be divided among 6 ranks"):
        a_plan(12, 4).shard().among(0, 6, set())
