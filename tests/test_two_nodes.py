"""Three ranks on two nodes (a host name of its own makes a rank another node): cache, ledger exchange and resume."""

from __future__ import annotations

import ctypes
import os
import socket
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import salience

from conftest import require

N, WORLD, EPOCHS, NEW_HOST_NAMES = 90, 3, 3, 0x04000000


def another_node(name: str) -> bool:
    """Give this process a host name of its own; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(NEW_HOST_NAMES) != 0:
        return False
    socket.sethostname(name)
    return True


def decode(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).float()


def work(rank: int, port: int, folder: str, out: str, stop: int, resume: str, workers: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if rank == 2:
        assert another_node("salience-node-b")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        source = salience.Source(folder, decode=decode, cache="2kB")
        more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader = salience.Loader(source, 5, epochs=EPOCHS, select="uniform", with_ids=True, **more)
        if resume:
            loader.load_state_dict(torch.load(f"{resume}/{rank}.pt", weights_only=True))
        seen = []
        while loader.epoch < EPOCHS and len(seen) != stop:
            for ids, (x, _) in loader:
                loader.loss(x[:, 0], ids=ids)
                assert (x[:, 0] == ids).all(), "bytes of another sample"
                seen.append(ids.tolist())
                if len(seen) == stop:
                    break
        state = loader.state_dict()
        torch.save(state, f"{out}/{rank}.pt")
        ranks = loader._run.setup.ranks
        np.savez(
            f"{out}/{rank}.npz", ids=np.array(seen, dtype=object), node=np.array(ranks.node_ranks), seen=loader.ledger.seen,
            loss=loader.ledger.last_loss,
        )  # fmt: skip
    except Exception:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


def run(out: Path, folder: Path, *, workers: int, stop: int = -1, resume: str = "") -> list:
    out.mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(folder), str(out), stop, resume, workers), nprocs=WORLD)
    errors = {p.name: p.read_text() for p in out.glob("*.error")}
    assert not errors, errors
    return [np.load(out / f"{rank}.npz", allow_pickle=True) for rank in range(WORLD)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    probe = mp.get_context("spawn").Process(target=_may_be_another_node)
    probe.start()
    probe.join()
    require(probe.exitcode == 0, "the right to have a host name of its own (unshare)")
    for i in range(N):
        place = tmp_path / "data" / f"{i % 2}" / f"{i:03d}.bin"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes([0]) * 40)
    names = salience.Source(tmp_path / "data").names
    for i in range(N):  # the first byte is the sample's number
        (tmp_path / "data" / names[i]).write_bytes(bytes([i]) * 40)
    return tmp_path / "data"


def _may_be_another_node() -> None:
    raise SystemExit(0 if another_node("salience-node-c") else 1)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_nodes_share_one_plan_and_one_ledger_and_go_on_exactly(tmp_path, folder, workers):
    whole = run(tmp_path / "whole", folder, workers=workers)
    assert [part["node"].tolist() for part in whole] == [[0, 1], [0, 1], [2]]
    for name in ("seen", "loss"):  # one ledger per node, equal on both
        np.testing.assert_array_equal(whole[0][name], whole[2][name])
    visits = np.concatenate([np.concatenate(part["ids"]) for part in whole]).astype(np.int64)
    np.testing.assert_array_equal(np.bincount(visits, minlength=N), whole[0]["seen"])
    first = run(tmp_path / "first", folder, workers=workers, stop=4)
    rest = run(tmp_path / "rest", folder, workers=workers, resume=str(tmp_path / "first"))
    for rank in range(WORLD):
        assert [*first[rank]["ids"].tolist(), *rest[rank]["ids"].tolist()] == whole[rank]["ids"].tolist()
        np.testing.assert_array_equal(rest[rank]["loss"], whole[rank]["loss"])
