"""Ranks that take unequal parts of every batch: by their speed, and by what samples cost."""

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
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError
from salience.plan import Plan
from salience.run.balancing import by_cost, cut_by_cost
from salience.run.speeds import BOUND, Speeds

# Rank 1 takes four times as long per sample. Rank 0 writes the plans, losses and the model.
SCRIPT = """
import json, sys, time
import numpy as np, torch, torch.distributed as dist, torch.nn.functional as F
import salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

rank, port, folder, select, costs, model_kind, window = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
g = torch.Generator().manual_seed(3)
x = torch.randn(203, 8, generator=g)
data = TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))
lengths = np.random.default_rng(0).integers(1, 50, 203) if costs else None
loader = salience.Loader(data, 16, epochs=5, select=select, with_ids=True, balance=True, costs=lengths, window=window)
heard = []
loader.events.listen(heard.append)
model = torch.nn.Linear(8, 4)
with torch.no_grad():
    [p.fill_(0.01) for p in model.parameters()]
if model_kind == "sharded":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    loader.attach(fully_shard(torch.nn.Linear(8, 4), mesh=init_device_mesh("cpu", (2,))))
if model_kind == "norm":
    loader.attach(torch.nn.Sequential(torch.nn.BatchNorm1d(8), model))
ddp, optimizer, steps, shares = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), [], []
for epoch in range(5):
    for ids, (a, b) in loader:
        time.sleep((0.0005, 0.002)[rank] * len(a))
        logits = ddp(a)
        losses = F.cross_entropy(logits, b, reduction="none")
        if select == "selective_backprop":
            keep = loader.pick(losses)
            loss, ids = loader.loss(losses[keep]), ids[keep]
        else:
            loss = loader.loss(losses, logits, b, ids)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        steps.append(ids.tolist())
    shares.append(loader._run.balancing.shares.tolist())
loader.summary()
warned = [e["text"] for e in heard if e["kind"] == "warning"]
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"steps": steps, "shares": shares, "weight": model.weight.tolist(), "seen": loader.ledger.seen.tolist(),
               "warned": warned, "waits": [(step.backward, step.sync) for step in loader.steps.steps]}, file)
dist.barrier()
dist.destroy_process_group()
"""


def run(
    folder: Path, select: str | None = None, *, costs: bool = False, model: str = "plain", window: int | None = None
) -> list[Any]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps([rank, port, str(folder), select, costs, model, window])],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=180)[1] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("select", [None, "infobatch"])
def test_a_slow_rank_takes_less_and_the_gradient_stays_that_of_one_process(tmp_path, select):
    fast, slow = run(tmp_path, select)
    assert fast["shares"] == slow["shares"]
    assert fast["shares"][-1][0] > 0.65, "rank 0 is four times as fast"
    assert len(slow["steps"][-2]) < len(fast["steps"][-2])
    loader = salience.Loader(data(), 32, epochs=5, select=select, with_ids=True)
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        [p.fill_(0.01) for p in model.parameters()]
    optimizer, alone = torch.optim.SGD(model.parameters(), lr=0.1), []
    heaviest = []
    for _ in range(5):
        for ids, (x, y) in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            alone.append(sorted(ids.tolist()))
            heaviest.append(float(loader.plan.weights.max()))
    assert (max(heaviest) > 1) == (select is not None), "importance weights are at work"
    assert [sorted(a + b) for a, b in zip(fast["steps"], slow["steps"], strict=True)] == alone
    torch.testing.assert_close(model.weight.detach(), torch.tensor(fast["weight"]), atol=1e-5, rtol=1e-4)
    assert fast["seen"] == slow["seen"] == loader.ledger.seen.tolist()


@pytest.mark.parametrize("window", [32, 96])
def test_short_windows_are_balanced_too(tmp_path, window):
    """Windows of one and of three batches, less than it takes to know a rank's speed."""
    fast, slow = run(tmp_path, window=window)
    assert fast["shares"] == slow["shares"]
    assert fast["shares"][-1][0] > 0.65
    assert fast["seen"] == slow["seen"] == [5] * 203


def test_the_wait_of_plain_ddp_for_a_slow_rank_is_told_apart_from_the_backward_pass(tmp_path):
    fast, slow = run(tmp_path, window=None)
    first = [step[1] for step in fast["waits"][2:7]]  # parts are still equal
    assert min(first) > 0
    assert np.median(first) > np.median([step[1] for step in slow["waits"][2:7]])
    assert all(wait <= backward for backward, wait in fast["waits"])


def test_picked_samples_of_unequal_parts_give_the_gradient_of_their_union(tmp_path):
    fast, slow = run(tmp_path, "selective_backprop")
    assert fast["shares"][-1][0] > 0.6
    x, y = data().tensors
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        [p.fill_(0.01) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one, other in zip(fast["steps"], slow["steps"], strict=True):
        kept = torch.tensor(one + other)
        optimizer.zero_grad()
        F.cross_entropy(model(x[kept]), y[kept]).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.tensor(fast["weight"]), atol=1e-5, rtol=1e-4)
    assert fast["seen"] == slow["seen"]


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(203, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))


def test_batches_by_cost_are_covered_exactly_once_and_batch_norm_is_warned_of(tmp_path):
    fast, slow = run(tmp_path, costs=True, model="norm")
    for epoch in range(5):
        steps = [fast["steps"][epoch * 7 : epoch * 7 + 7], slow["steps"][epoch * 7 : epoch * 7 + 7]]
        assert sorted(i for part in steps for ids in part for i in ids) == list(range(203))
    assert any("SyncBatchNorm" in text for text in fast["warned"])


def test_a_sharded_model_is_told_that_speeds_cannot_be_measured(tmp_path):
    fast, slow = run(tmp_path, model="sharded")
    assert fast["shares"][-1] == slow["shares"][-1] == [0.5, 0.5]
    assert [text for text in fast["warned"] if "fully_shard" in text] == fast["warned"]


# --- the rules alone ---


def a_plan(n: int, batch_size: int) -> Plan:
    ones = np.ones(n, dtype=np.float32)
    return Plan(
        window=0, population=n, batch_size=batch_size, ids=np.random.default_rng(1).permutation(n), weights=ones,
        importance=ones.copy(), level=np.zeros(n, dtype=np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2), (0.25, 0.25, 0.25, 0.25)])
def test_a_cut_by_cost_is_as_good_as_the_best_of_all_cuts_for_two_ranks_and_better_than_equal_parts(shares):
    rng = np.random.default_rng(0)
    costs, parts = np.sort(rng.lognormal(3, 0.8, 64))[::-1], np.array(shares)
    cuts = cut_by_cost(costs, parts)
    assert (np.diff(cuts) >= 1).all()
    assert (cuts[0], cuts[-1]) == (0, 64)

    def time(edges: Any) -> float:
        return max((b - a) * costs[a] / share for a, b, share in zip(edges[:-1], edges[1:], parts, strict=True))

    assert time(cuts) < 0.8 * 64 / len(parts) * costs[0] / (1 / len(parts))
    if len(parts) == 2:
        assert time(cuts) == pytest.approx(min(time((0, k, 64)) for k in range(1, 64)))


@pytest.mark.parametrize("costs", [np.zeros(40), np.ones(40), np.r_[1e9, np.ones(39)]])
def test_costs_that_are_all_alike_or_one_giant_leave_work_for_every_rank(costs):
    shards = [by_cost(a_plan(40, 10).shard(rank, 3), costs, np.full(3, 1 / 3)) for rank in range(3)]
    visited = [shard.ids(k) for shard in shards for k in range(4)]
    assert all(len(ids) for ids in visited)
    assert sorted(np.concatenate(visited)) == list(range(40))


# --- speeds ---


def measured(speeds: Speeds | None, work: Any, paces: Any, fixed: Any) -> Speeds:
    """What is known after steps with this work on ranks that take `pace * (fixed + work)` seconds."""
    work = np.asarray(work, dtype=np.float64)
    seconds = np.asarray(paces) * (np.asarray(fixed) + work)
    if speeds is None:
        return Speeds.first(work, seconds)
    speeds.learn(work, seconds)
    return speeds


@pytest.mark.parametrize("fixed", [(0.0, 0.0), (20.0, 20.0), (5.0, 25.0)])
@pytest.mark.parametrize("paces", [(1.0, 4.0), (1.0, 1.0), (3.0, 1.0)])
def test_after_a_few_measurements_all_ranks_take_as_long_whatever_their_fixed_work(paces, fixed):
    speeds, work = None, np.array([64.0, 64.0])
    for _ in range(6):
        speeds = measured(speeds, work, paces, fixed)
        work = speeds.parts()
    assert work.sum() == pytest.approx(128)
    first, second = np.asarray(paces) * (np.asarray(fixed) + work)
    assert first == pytest.approx(second, rel=0.03)


def test_a_rank_that_becomes_slow_and_fast_again_is_followed():
    speeds, work = None, np.full(3, 40.0)
    for paces in [(1, 1, 1)] * 3 + [(1, 1, 4)] * 8 + [(1, 1, 1)] * 8:
        speeds = measured(speeds, work, paces, (10, 10, 10))
        work = speeds.parts()
        if paces[2] == 4:
            slow = work[2]
    assert slow < 15
    assert work == pytest.approx(np.full(3, 40.0), rel=0.1)


def test_noise_of_the_clock_moves_parts_little():
    rng, speeds, work = np.random.default_rng(0), None, np.full(4, 32.0)
    for _ in range(40):
        speeds = measured(speeds, work, np.array([1, 1, 2, 4]) * rng.normal(1, 0.03, 4), np.full(4, 8.0))
        work = speeds.parts()
    ideal = measured(
        measured(None, np.full(4, 32.0), [1, 1, 2, 4], np.full(4, 8.0)), work, [1, 1, 2, 4], np.full(4, 8.0)
    )
    assert work == pytest.approx(ideal.parts(), rel=0.25)


def test_parts_are_bounded():
    parts = measured(None, [10, 10, 10], [1e-6, 1.0, 1.0], [0, 0, 0]).parts()
    assert parts.sum() == pytest.approx(30)
    assert parts.min() >= 10 / BOUND / 2
    assert parts.max() <= 10 * BOUND


def test_speeds_are_saved_and_restored():
    speeds = measured(measured(None, [64, 64], [1, 4], [9, 9]), [100, 28], [1, 4], [9, 9])
    again = Speeds.from_state(speeds.state_dict())
    assert again.parts().tolist() == speeds.parts().tolist()
    assert again.fixed == pytest.approx([9, 9])


def test_costs_of_another_length_are_refused():
    with pytest.raises(ConfigError, match=r"costs have shape \(3,\)"):
        salience.Loader(data(), 16, costs=[1, 2, 3])


def test_in_one_process_balance_changes_nothing_and_says_so_once():
    heard = []
    loader = salience.Loader(data(), 16, balance=True)
    loader.events.listen(heard.append)
    for _ in range(2):
        list(loader)
    assert [event["text"] for event in heard if event["kind"] == "warning"] == [
        "balance=True does nothing in a single process: there is nobody to share batches with."
    ]
    plain, balanced = (
        [ids.tolist() for ids, _ in salience.Loader(data(), 16, with_ids=True, **more)]
        for more in ({}, {"balance": True, "costs": np.arange(203)})
    )
    assert plain == balanced
