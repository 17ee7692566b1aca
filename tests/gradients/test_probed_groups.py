"""groups="auto": who is near whom, from times between all pairs of ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import digest, problem, run_ranks, wrapped

import salience
from salience.gradients import probe
from salience.gradients.probe import near_groups, pairings


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_everybody_meets_everybody_once_and_nobody_is_in_two_pairs_of_a_round(world):
    rounds = pairings(world)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(world), 2))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(set(members)) == len(members)


def between(nodes: list[int], near: float = 1e-4, far: float = 2e-3) -> list[list[float]]:
    return [[0.0 if a == b else near * (1 + 0.1 * a) if nodes[a] == nodes[b] else far * (1 + 0.05 * b)
             for b in range(len(nodes))] for a in range(len(nodes))]  # fmt: skip


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1, 2, 2]])
def test_ranks_that_are_near_each_other_form_a_group(nodes):
    found = near_groups(between(nodes))
    assert found == [
        [rank for rank, one in enumerate(nodes) if one == node] for node in sorted(set(nodes), key=nodes.index)
    ]


def test_no_groups_where_all_pairs_take_about_as_long_or_nothing_fits():
    assert near_groups(between([0, 0, 0, 0])) is None
    assert near_groups(between([0, 0, 1, 1], far=2.5e-4)) is None, "2.5 times is too little"
    assert near_groups([[0, 1.0], [1.0, 0]]) is None, "a single pair has nothing to be compared with"
    chain = between([0, 1, 2, 3])
    for a in range(3):  # 0-1, 1-2 and 2-3 are near, the ends are not
        chain[a][a + 1] = chain[a + 1][a] = 1e-5
    assert near_groups(chain) is None


def over_a_slow_link(rank: int, nodes: list[int] | None) -> Any:
    """Messages between nodes take longer, by a wait: the link of this machine is as fast between all ranks."""
    messages = probe._there_and_back
    if nodes is not None:

        def slowed(group: Any, me: int, other: int, *rest: Any) -> float:
            start = time.perf_counter()
            found = messages(group, me, other, *rest)
            time.sleep(0.2 if nodes[me] != nodes[other] else 0.0)
            return time.perf_counter() - start if nodes[me] != nodes[other] else found

        probe._there_and_back = slowed
    events = salience.events.EventLog()
    loader = type("Quiet", (), {"events": events, "seed": 0, "epoch": 0})()
    ddp = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = salience.sync(ddp, optimizer, loader, mode="hierarchical", groups="auto")
    x, y = problem(rank)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    nodes_found = None if handle.links.nodes is None else handle.links.nodes.groups
    return [nodes_found, digest(ddp.module), [event["text"] for event in events.recent]]


def test_groups_are_found_by_probing(tmp_path):
    ranks = run_ranks(tmp_path, over_a_slow_link, [0, 1, 0, 1], world=4)
    assert isinstance(ranks[0], list), ranks[0]
    for found, one, said in ranks:
        assert found == [[0, 2], [1, 3]]
        assert one == ranks[0][1]
        assert said == ['groups="auto" found [[0, 2], [1, 3]] by timing messages between all ranks.']


def test_two_ranks_have_no_groups_and_are_told(tmp_path):
    for found, _, said in run_ranks(tmp_path, over_a_slow_link, None):
        assert found is None
        assert "no groups" in said[0]
