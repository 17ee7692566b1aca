"""Real processes under Gloo: what each collective gives, and what is said when a rank does not come."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import salience
from salience.errors import ConfigError, RankError, StateError
from salience.ledger.exchange import shared_ledger
from salience.memory import node_memory
from salience.ranks import Ranks, current_ranks


def work(rank: int, port: int, out: str, world: int, act: Callable[[int], Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        said = act(rank)
    except Exception:
        said = traceback.format_exc()
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    # The process that keeps the store leaves last.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.add("done", 1)
    while rank == 0 and int(store.add("done", 0)) < world:
        time.sleep(0.01)
    os._exit(0)


@pytest.fixture
def run(tmp_path):
    def start(act: Callable[[int], Any], world: int = 2) -> list[Any]:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        mp.spawn(work, (port, str(tmp_path), world, act), nprocs=world)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]

    return start


def collectives(rank: int) -> Any:
    ranks = current_ranks()
    assert ranks is not None
    largest, shared = np.array([rank, 5 - rank]), np.full(3, rank == 0)
    ranks.all_max(largest)
    ranks.broadcast_array(shared)
    ranks.barrier()
    return {
        "who": [ranks.rank, ranks.world, ranks.node_ranks, ranks.leads_node, ranks.several_nodes],
        "all_max": largest.tolist(),
        "broadcast_array": shared.tolist(),
        "broadcast": ranks.broadcast([0.1 + rank, np.int64(7 + rank), bool(rank)]),
        "gather_objects": ranks.gather_objects([rank] * rank),
        "node_broadcast": ranks.node_broadcast(f"rank {rank}"),
        "ragged": [part.tolist() for part in ranks.all_gather_ragged(torch.arange(2 * rank))],
    }


def test_each_collective_gives_every_rank_what_it_says(run):
    first, second = run(collectives)
    assert first.pop("who") == [0, 2, [0, 1], True, False]
    assert second.pop("who") == [1, 2, [0, 1], False, False]
    assert first == second == {
        "all_max": [1, 5], "broadcast_array": [True] * 3, "broadcast": [0.1, 7, False], "gather_objects": [[], [1]],
        "node_broadcast": "rank 0", "ragged": [[], [0, 1]],
    }  # fmt: skip


def trouble(rank: int) -> Any:
    ranks = Ranks()
    ranks.agree(None, ValueError("nobody has any"))
    try:
        ranks.agree(ValueError("mine") if rank == 1 else None, KeyError("of another"))
    except Exception as error:
        return repr(error)


def test_the_trouble_of_one_rank_stops_all(run):
    assert run(trouble) == ["KeyError('of another')", "ValueError('mine')"]


SETTINGS = ({"n": 41}, {"batch_size": 3}, {"seed": 1}, {"select": "default"}, {"balance": True}, {"auto": True})


def unlike(rank: int) -> Any:
    said = []
    for other in SETTINGS:
        given = {"n": 40, "batch_size": 4, **(other if rank else {})}
        data = torch.utils.data.TensorDataset(torch.zeros(given.pop("n"), 2))
        try:
            salience.Loader(data, epochs=2, **given)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_ranks_with_other_settings_stop_with_one_sentence_that_names_it(run):
    first, second = run(unlike)
    assert first == second
    named = (
        "the size of the data set is 40 on rank 0 and 41",
        "batch_size is 4",
        "seed is 0",
        "select is",
        "balance is",
        "auto is",
    )
    assert len(first) == len(named), first
    for sentence, name in zip(first, named, strict=True):
        assert sentence.startswith(f"Ranks were given different settings: {name}")


def nodes(rank: int) -> Any:
    ranks = Ranks(node=rank // 2)
    ledger = shared_ledger(ranks, 4)
    if ranks.leads_node:
        ledger.seen[:] = 1 + ranks.rank
    ranks.barrier()
    return [ranks.node_ranks, ranks.node_leader, ranks.several_nodes, ranks.node_gather(rank), ledger.seen.tolist()]


def test_ranks_of_a_node_share_its_ledger_and_no_other(run):
    found = run(nodes, world=4)
    assert found[0] == found[1] == [[0, 1], 0, True, [0, 1], [1] * 4]
    assert found[2] == found[3] == [[2, 3], 2, True, [2, 3], [3] * 4]


def no_memory(rank: int) -> Any:
    ranks = Ranks()
    with pytest.raises(StateError) as caught:
        node_memory(ranks, 1 << 62)
    memory = node_memory(ranks, 8)
    if rank == 1:
        memory.array(np.int64, 1)[0] = 5
    ranks.barrier()
    return [str(caught.value), int(memory.array(np.int64, 1)[0])]


def test_when_the_first_rank_of_a_node_gets_no_memory_all_are_told_and_can_go_on(run):
    first, second = run(no_memory)
    assert "bytes of shared memory cannot be allocated" in first[0]
    assert second[0] == "Another rank has no shared memory; its message says why."
    assert first[1] == second[1] == 5


def mesh(rank: int) -> Any:
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ConfigError, match="pass dim="):
        Ranks(unnamed)
    along, across = Ranks(made), Ranks(made, dim="tp")
    value = np.array([rank])
    along.broadcast_array(value)
    return [along.rank, along.world, across.rank, int(value[0]), along.gather_objects(rank), across.broadcast(rank)]


def test_the_data_parallel_dimension_of_a_mesh_is_a_group_of_its_own(run):
    assert run(mesh, world=4) == [
        [0, 2, 0, 0, [0, 2], 0],
        [0, 2, 1, 1, [1, 3], 0],
        [1, 2, 0, 0, [0, 2], 2],
        [1, 2, 1, 1, [1, 3], 2],
    ]


def missing(rank: int) -> Any:
    ranks = Ranks(deadline=2.0)
    ranks.barrier()
    if rank == 2:
        return "gone elsewhere"
    with pytest.raises(RankError) as caught:
        ranks.all_max(np.zeros(1))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(run):
    first, second, third = run(missing, world=3)
    assert third == "gone elsewhere"
    for rank, said in enumerate((first, second)):
        assert said.startswith(f"Rank {rank} gave up the collective 'all_max'")
        assert "2 s at most: rank 2 of 3 did not reach it" in said


def lost(rank: int) -> Any:
    ranks = Ranks(deadline=60.0)
    if rank == 1:
        return "left"
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store.wait(["done"])  # the other is about to be gone
    with pytest.raises(RankError) as caught:
        for _ in range(2):
            ranks.barrier()
    return str(caught.value)


def test_a_rank_that_ended_is_named_without_waiting_for_the_deadline(run):
    first, second = run(lost)
    assert second == "left"
    assert "'barrier'" in first
    assert "rank 1 of 2 did not reach it" in first


def test_a_single_process_has_no_ranks():
    assert current_ranks() is None


def patience(rank: int) -> Any:
    return [Ranks().deadline, Ranks(deadline=5).deadline]


def test_the_deadline_is_a_little_before_the_time_out_of_the_group(run):
    assert run(patience) == [[0.95 * 1800, 5]] * 2


REPORTS = """
import sys, torch, torch.distributed as dist, salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
loader = salience.Loader(TensorDataset(torch.randn(64, 8)), 8, epochs=2)
ddp = DistributedDataParallel(torch.nn.Linear(8, 1))
for number, (x,) in enumerate(loader):
    if rank == 0 and number == 2:  # while the other goes on training with the same process group
        print("local", loader.summary(local=True)["samples"], len(loader.report(local=True)) > 0, flush=True)
        loader._run.setup.ranks.deadline = 2.0
        loader.report()
    loader.loss(ddp(x).squeeze(1) ** 2).backward()
"""
EARLY = """
import sys, torch, torch.distributed as dist, salience
from torch.utils.data import TensorDataset
loader = salience.Loader(TensorDataset(torch.randn(64, 8)), 8)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
try:
    next(iter(loader))
except salience.errors.ConfigError as error:
    print(error)
"""
TRAINS = """
import sys, torch, torch.distributed as dist, salience
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
rank, port, last, ends = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
loader = salience.Loader(TensorDataset(torch.randn(64, 8)), 8, epochs=1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))  # it refers to the process group until the very end
for (x,) in loader:
    loader.loss(model(x).squeeze(1) ** 2).backward()
for _ in range(50):
    loader.report() if last == "report" else dist.all_reduce(torch.ones(10))
sys.setswitchinterval(30)  # threads of Gloo that want the interpreter have to wait for it
if ends == "destroyed":
    dist.destroy_process_group()
"""


def two_scripts(script: str, *arguments: str) -> list[tuple[int, str]]:
    """Exit status and output of two ranks that run a script and end as scripts do."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, out) for process, out in zip(ranks, said, strict=True)]


def test_a_report_on_one_rank_alone_ends_the_script_at_the_deadline_and_says_how_to_make_one():
    (status, said), (other, _) = two_scripts(REPORTS)
    assert status == 1, "a traceback, and no signal or time-out"
    assert "RankError: Rank 0 gave up the collective" in said
    assert "local 64 True" in said
    assert "rank 1 of 2 did not reach it" in said
    assert "report(local=True)" in said
    assert other != 0


def test_a_loader_made_before_the_process_group_is_refused_when_it_is_iterated():
    for status, said in two_scripts(EARLY):
        assert status == 0
        assert "made before init_process_group()" in said


@pytest.mark.parametrize("last", ["report", "all_reduce"])
@pytest.mark.parametrize("ends", ["left alone", "destroyed"])
def test_a_script_ends_with_0_whether_or_not_it_destroys_its_process_group(ends, last):
    for _ in range(2):
        assert [status for status, _ in two_scripts(TRAINS, last, ends)] == [0, 0]


@pytest.mark.slow
def test_thirty_scripts_end_with_0():
    found = [
        status
        for _ in range(30)
        for status, _ in two_scripts(TRAINS.replace("sys.setswitch", "#"), "report", "destroyed")
    ]
    assert found == [0] * 60
