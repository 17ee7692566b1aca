"""Ranks that find each other in a store in which ranks before them have left their names."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from salience.app.joining import meet
from salience.errors import RankError


@pytest.fixture
def store() -> Any:
    """The store that torchrun keeps for all restarts."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def clients(store: Any, world: int) -> list[Any]:
    return [dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(world)]


def together(store: Any, order: list[int]) -> list[Any]:
    """What each rank gets when the ranks come in this order, one after the other has begun to wait."""
    found: list[Any] = [None] * len(order)
    stores = clients(store, len(order))

    def come(rank: int) -> None:
        found[rank] = meet(stores[rank], rank, len(order), 60)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.3)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_ranks_of_a_restart_see_nothing_of_those_before_them(store: Any, order: list[int]):
    before = together(store, [0, 1, 2])
    before[1].set("address", "of a rank that is gone")
    assert before[2].get("address") == b"of a rank that is gone"
    again = together(store, order)
    assert not any(one.check(["address"]) for one in again)
    again[1].set("address", "here")
    assert [one.get("address") for one in again] == [b"here"] * 3


def test_fewer_ranks_and_then_more_meet_in_the_same_store(store: Any):
    for order in ([0, 1, 2], [1, 0], [0, 3, 2, 1]):
        found = together(store, order)
        found[0].set("who", json.dumps(order))
        assert [one.get("who").decode() for one in found] == [json.dumps(order)] * len(order)


def test_a_rank_that_does_not_come_is_named(store: Any):
    together(store, [0, 1])
    with pytest.raises(RankError, match=r"Rank 0 waited 0.3 s for ranks \[1\] of 2 at the start"):
        meet(store, 0, 2, 0.3)
    with pytest.raises(RankError, match=r"waited 0.3 s for rank 0, which did not call the ranks together"):
        meet(store, 1, 2, 0.3)
