"""`select="io"` through a real store: plans follow what the cache holds, and a resumed run makes the same plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from server import Server

import salience
from salience.cli import main

pytest.importorskip("obstore")
N, EPOCHS = 240, 8
SELECT: dict[str, Any] = {
    "preset": "io", "filters": [], "scores": ["ema_loss"],
    "keep": {"name": "all_less_all", "share": 0.4, "warmup": 1, "end": 0.15}, "fetch": {"top": 0.15, "refresh": 0.1},
}  # fmt: skip


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {
        f"set/c{i % 4}/{i:04}.bin": i.to_bytes(2, "little") + rng.bytes(int(rng.integers(500, 2000))) for i in range(N)
    }


def decode(data: bytes) -> int:
    return int.from_bytes(data[:2], "little")


def make(folder: Path | str, **more: Any) -> salience.Loader:
    source = salience.Source(folder)
    return salience.Loader(
        source, batch_size=16, epochs=EPOCHS, select=SELECT, decode=decode, cache=int(0.2 * source.sizes.sum()),
        with_ids=True, **more,
    )  # fmt: skip


def losses(ids: torch.Tensor, epoch: int) -> torch.Tensor:
    """Some are always hard, some never; a little of it changes from window to window."""
    return (ids * 7919 % 101).float() / 101 + 0.2 * ((ids + epoch) % 5).float() / 5


@pytest.fixture
def folder(tmp_path: Path, objects: dict[str, bytes]) -> Path:
    for path, data in objects.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path / "set"


def go(loader: salience.Loader, stop: int | None = None) -> list[list[int]]:
    """The ids of every batch; at most `stop` batches."""
    seen: list[list[int]] = []
    names = loader.dataset.source.names
    number = torch.tensor([int(names[i].rsplit("/", 1)[-1].removesuffix(".bin")) for i in range(N)])
    for _ in range(loader.epoch, EPOCHS):
        for ids, (who, _) in loader:
            assert (number[ids] == who).all()
            loader.loss(losses(ids, loader.epoch))
            seen.append(ids.tolist())
            if len(seen) == stop:
                return seen
    return seen


def test_plans_take_what_is_resident_and_cover_everything(folder, tmp_path):
    loader = make(folder, trace=tmp_path / "trace")
    seen = go(loader)
    loader.report()
    notes = [f for e in loader.events.recent if e["kind"] == "plan" for f in e["filters"] if f["name"] == "fetch"]
    assert len(notes) == EPOCHS - 2  # everything in the first window and the last
    assert sum(f["dropped"] for f in notes) > 20
    assert {i for batch in seen for i in batch} == set(range(N))
    feed = [e for e in loader.events.recent if e["kind"] == "feed"][-1]
    assert feed["cache"]["bytes_sent"] < feed["cache"]["never_evict_bytes"] < feed["cache"]["bytes"]
    assert feed["cache"]["bound_bytes"] <= feed["cache"]["bytes_used"]


@pytest.mark.parametrize("stop", [15, 19, 23, 40])  # at a window's edge, in mid-window, ...
def test_a_resumed_run_makes_the_same_plans_from_an_empty_cache(folder, stop, tmp_path):
    whole = go(make(folder))
    first = make(folder)
    begun = go(first, stop)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    del first
    second = make(folder)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert begun + go(second) == whole


def test_shards_over_http_with_workers(folder):
    packed = folder.parent / "packed"
    assert main(["pack", str(folder), str(packed), "--shard-size", "64KiB"]) == 0
    with Server({p.relative_to(packed).as_posix(): p.read_bytes() for p in packed.rglob("*") if p.is_file()}) as server:
        loader = make(server.url, num_workers=2)
        sent = server.bytes
        assert {i for batch in go(loader) for i in batch} == set(range(N))
        stats = (
            loader.dataset.source.stats
        )  # of a request that was doubled, the answer that came too late is not counted
        assert stats.bytes_sent <= server.bytes - sent
        assert stats.bytes_sent == server.bytes - sent or stats.hedged
        assert "The store sent" in loader.report()
