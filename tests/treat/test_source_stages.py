"""Stages behind a Source, with and without its cache, on one rank and on two."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import Dataset

import salience
from salience import Treat

N, BATCH = 60, 10
REUSE = Treat("reuse", split=1)  # by hand: decoding costs less here than keeping


def fill(folder: Path) -> str:
    for label, name in enumerate(["ape", "cat"]):
        (folder / name).mkdir(parents=True)
        for i in range(N // 2):
            (folder / name / f"{i:02}.bin").write_bytes(bytes([label, i] * 50))
    return str(folder)


def decode(data) -> Tensor:
    if data[0] > 1:
        raise ValueError("none of ours")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).float()


def jitter(x: Tensor) -> Tensor:
    return x + torch.rand(1)


def loader_of(url: str, treat: Treat | None = REUSE, batch: int = BATCH, **more) -> salience.Loader:
    return salience.Loader(
        salience.Source(url), batch, epochs=5, decode=decode, augment=[jitter], treat=treat, seed=2, **more
    )


def run(loader: salience.Loader, windows: int = 4) -> list[tuple[Tensor, Tensor]]:
    out = []
    for _ in range(windows):
        for x, y in loader:
            loader.loss(torch.ones(len(y)))
            out.append((x, y))
    return out


@pytest.mark.parametrize("more", [{"num_workers": 1}, {"cache": "1MiB"}, {"cache": "1MiB", "views": True}], ids=str)
def test_a_source_gives_the_same_tensors_with_reuse_and_a_cache(tmp_path, more):
    url = fill(tmp_path)
    fresh, reused = run(loader_of(url, None)), run(loader_of(url, **more))
    for (a, b), (c, d) in zip(fresh, reused, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_decode_is_the_first_stage_and_reused_samples_are_not_read_again(tmp_path):
    loader = loader_of(fill(tmp_path))
    run(loader, 5)
    treating = loader._run.staging.treating
    assert treating.split.stages == 1
    reused = treating.counts["reused"]
    assert reused > N
    assert loader._run.feeding.source.stats.samples == 5 * N - reused + 8  # eight for the rehearsal
    assert "Intermediates lie after decode" in loader.report()


@pytest.mark.parametrize("treat", [REUSE, Treat("echo", views=2, distance=1, split=1)], ids=["reuse", "echo"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_cache_reads_only_what_is_not_reused(tmp_path, treat, workers):
    loader = loader_of(fill(tmp_path), treat, batch=4, cache="1MiB", num_workers=workers)
    run(loader, 5)
    reused = loader._run.staging.treating.counts["reused"]
    assert reused > N
    assert loader._run.feeding.feed.counts()["samples"] == 5 * N - reused


@pytest.mark.parametrize("workers", [0, 1])
def test_an_intermediate_that_is_gone_is_made_again_beside_the_cache(tmp_path, workers):
    url = fill(tmp_path)
    loader = loader_of(url, cache="1MiB", num_workers=workers)
    got = run(loader, 1)
    loader._run.staging.treating.staged.slots._data[:] = 0
    got += run(loader, 1)
    assert loader._run.staging.treating.counts["missed"] == (loader.plan.level == 2).sum() > 0
    for (a, b), (c, d) in zip(run(loader_of(url, None), 2), got, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_a_recorded_plan_with_reused_visits_is_replayed_without_stages(tmp_path):
    """Who has no intermediates needs the bytes of all samples, whatever the plan says of their treatment."""
    url = fill(tmp_path / "data")
    run(loader_of(url, trace=tmp_path / "trace"), 5)
    trace = salience.Trace(tmp_path / "trace")
    assert any((trace.read(window).level == 2).any() for window in range(5))
    options = {"epochs": 5, "decode": decode, "seed": 2}
    cached = salience.Loader(salience.Source(url), BATCH, select=trace, cache="1MiB", **options)
    plain = salience.Loader(salience.Source(url), BATCH, select=trace, **options)
    for (a, b), (c, d) in zip(run(cached, 5), run(plain, 5), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_samples_that_cannot_be_read_or_decoded_are_stood_in_for(tmp_path):
    url = fill(tmp_path)
    source = salience.Source(url)
    (tmp_path / "ape" / "03.bin").unlink()
    (tmp_path / "cat" / "04.bin").write_bytes(b"x" * 100)
    loader = salience.Loader(
        salience.Source(url, index=source.index),
        BATCH,
        epochs=2,
        decode=decode,
        augment=[jitter],
        max_broken=0.1,
        seed=2,
    )
    for x, y in loader:
        losses = torch.ones(len(y), requires_grad=True)
        loader.loss(losses).backward()
        assert (losses.grad >= 0).all()
        assert set(x[:, 0].long().tolist()) <= {0, 1}
    assert {source.names[i] for i in loader._run.feeding.broken} == {"ape/03.bin", "cat/04.bin"}
    assert "'cat/04.bin': stage 'decode' failed on it (ValueError: none of ours)" in loader.report()


def work(rank: int, port: int, out: str, url: str, kind: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        treat = Treat(kind, views=2, distance=1, split=1)
        loader = salience.Loader(
            salience.Source(url), 1, epochs=5, decode=decode, augment=[jitter], treat=treat, seed=2, with_ids=True
        )
        rows, levels = [], []
        for _ in range(4):
            for ids, (x, _) in loader:
                loader.loss(torch.ones(len(ids)), ids=ids)
                rows += [(loader.epoch, int(i), float(v)) for i, v in zip(ids, x[:, 1], strict=True)]
            levels.append(loader.plan.level.copy())
        np.savez(
            f"{out}/{rank}.npz", rows=np.array(rows), levels=np.concatenate(levels),
            missed=np.array(loader._run.staging.treating.counts["missed"]),
            reused=np.array(loader._run.staging.treating.counts["reused"]),
        )  # fmt: skip
    except Exception:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["reuse", "echo"])
def test_two_ranks_share_levels_intermediates_and_draws(tmp_path, kind):
    url = fill(tmp_path / "data")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path), url, kind), nprocs=2)
    errors = {p.name: p.read_text() for p in tmp_path.glob("*.error")}
    assert not errors, errors
    one, two = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    np.testing.assert_array_equal(one["levels"], two["levels"])
    assert one["reused"] + two["reused"] > N // 2
    if kind == "reuse":
        assert one["missed"] + two["missed"] == 0, "what one rank made the other did not find"
    alone = salience.Loader(
        salience.Source(url), 2, epochs=5, decode=decode, augment=[jitter], seed=2, with_ids=True,
        treat=Treat(kind, views=2, distance=1, split=1),
    )  # fmt: skip
    rows = []
    for _ in range(4):
        for ids, (x, _) in alone:
            alone.loss(torch.ones(len(ids)), ids=ids)
            rows += [(alone.epoch, int(i), float(v)) for i, v in zip(ids, x[:, 1], strict=True)]
    both = np.concatenate((one["rows"], two["rows"]))
    np.testing.assert_allclose(both[np.lexsort(both.T[::-1])], sorted(rows))


class Unreadable(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Tensor:
        raise OSError("the disk is gone")


def work_in_vain(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for _ in salience.Loader(Unreadable(), 2, epochs=1, augment=[jitter], treat="reuse"):
            pass
    except Exception as error:
        Path(out, f"{rank}.error").write_text(str(error))
    dist.barrier()


def test_a_rehearsal_that_fails_on_one_rank_stops_both(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work_in_vain, args=(port, str(tmp_path)), nprocs=2)
    first, second = ((tmp_path / f"{rank}.error").read_text() for rank in range(2))
    assert "the disk is gone" in first
    assert second == "The stages failed in the rehearsal on rank 0; its message says how."
