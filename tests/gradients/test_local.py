"""Ranks that take steps of their own: averaging, the quadratic rule, groups, quorum, state."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import digest, problem, run_ranks, wrapped

import salience
from salience.errors import RankError
from salience.gradients.quorum import REGULAR, TOGETHER, Rounds


def steps(rank: int, ddp: Any, optimizer: Any, n: int, pause: float = 0.0) -> None:
    x, y = problem(rank)
    for step in range(n):
        picked = torch.arange(step * 32, step * 32 + 32) % len(y)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[picked]), y[picked]).backward()
        optimizer.step()
        time.sleep(pause)


def accuracy(rank: int, ddp: Any) -> float:
    x, y = problem(rank)
    with torch.no_grad():
        return (ddp.module(x).argmax(1) == y).float().mean().item()


def local(rank: int) -> Any:
    found: dict[str, Any] = {}
    for name, options in {
        "blocking": {"overlap": False}, "overlapped": {}, "outer": {"outer": (0.7, 0.9)}, "rule": {"steps": 2, "alpha": 0.3},
    }.items():  # fmt: skip
        ddp = wrapped()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)  # which differs between ranks until close()
        handle = salience.sync(ddp, optimizer, mode="local", **{"steps": 4, **options})
        steps(rank, ddp, optimizer, 30)
        apart = digest(ddp.module)
        rounds = handle.exchange.rounds
        handle.average()
        found[name] = [apart, digest(ddp.module), accuracy(rank, ddp), rounds, handle.sent]
        handle.close()
        steps(rank, ddp, optimizer, 2)  # plain DDP again
        found[name].append(digest(ddp.module))
        found[name].append(len(optimizer.state))
    return found


def test_local_steps_end_in_equal_parameters_and_learn(tmp_path):
    first, second = run_ranks(tmp_path, local)
    assert isinstance(first, dict), first
    for name in first:
        assert first[name][0] != second[name][0], "ranks never went apart: nothing was local"
        assert first[name][1] == second[name][1], name
        assert first[name][5] == second[name][5], f"{name}: plain steps drive ranks apart"
        assert first[name][6] > 0, "the optimizer has no momentum, so nothing was tested"
        assert min(first[name][2], second[name][2]) > 0.9, name
    assert first["blocking"][3] == 7  # 28 of 30 steps
    assert first["overlapped"][3] == 6, "the last one is still under way"
    assert first["rule"][3] == 2, "(0.3 / 0.1)^2 = 9 steps: at 9, 18 and 27, the last one under way"


def against_arithmetic(rank: int) -> Any:
    """One exchange of two parameters, against the mean by hand: equal to a bfloat16, and the error comes the next time."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = wrapped(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    handle = salience.sync(ddp, optimizer, mode="local", steps=1, overlap=False)
    seen = []
    for _ in range(64):
        optimizer.zero_grad()
        ddp(torch.tensor([[-1.001, -0.5 - rank]])).sum().backward()  # moves the weight by 1.001 and by 0.5 + rank
        optimizer.step()
        seen.append(model.weight.detach().flatten().tolist())
    del handle
    return [seen[0], seen[-1]]


def test_parameters_are_the_mean_of_all_ranks_and_rounding_errors_do_not_add_up(tmp_path):
    first, second = run_ranks(tmp_path, against_arithmetic)
    assert first == second
    assert first[0] == pytest.approx([1.0, 1.0], abs=0.004)
    assert first[1] == pytest.approx([64 * 1.001, 64 * 1.0], abs=0.02)


def uneven(rank: int) -> Any:
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = salience.sync(ddp, optimizer, mode="local", steps=4)
    steps(rank, ddp, optimizer, 3 - rank)  # not yet an exchange
    with pytest.raises(RankError) as caught:
        handle.average()
    return str(caught.value)


def test_ranks_that_disagree_on_the_number_of_steps_are_told(tmp_path):
    for said in run_ranks(tmp_path, uneven):
        assert said.startswith("Ranks disagree on the number of optimizer steps (rank 0: 3, rank 1: 2)")


def resumed(rank: int, folder: str) -> Any:
    """Four exchanges at once, and two, saved, and two more with new objects."""
    found: dict[str, Any] = {}
    for name, parts in {"whole": (16,), "halves": (8, 8)}.items():
        ddp = wrapped()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = salience.sync(ddp, optimizer, mode="local", steps=4, overlap=False, outer=(0.7, 0.9))
        done = 0
        for part in parts:
            if done:
                torch.save({"model": ddp.module.state_dict(), "sync": handle.state_dict()}, f"{folder}/{rank}.pt")
                saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
                handle.close()
                ddp = wrapped()
                ddp.module.load_state_dict(saved["model"])
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
                handle = salience.sync(ddp, optimizer, mode="local", steps=4, overlap=False, outer=(0.7, 0.9))
                handle.load_state_dict(saved["sync"])
            steps(rank, ddp, optimizer, part)
            done += part
        found[name] = [handle.exchange.count, accuracy(rank, ddp), digest(ddp.module)]
    return found


def test_a_saved_run_goes_on_where_it_was(tmp_path):
    first, second = run_ranks(tmp_path, resumed, str(tmp_path))
    assert isinstance(first, dict), first
    assert first["whole"][0] == first["halves"][0] == 16
    assert first["halves"][2] == second["halves"][2]
    assert first["halves"][1] > 0.8


def grouped(rank: int) -> Any:
    """Two groups of two: plain, compressed and local across; and uneven groups against the mean over all ranks."""
    found: dict[str, Any] = {}
    for name, mode, options in [
        ("plain", "hierarchical", {}), ("topk", "topk", {"rate": 0.05, "small": 64}), ("local", "local", {"steps": 4}),
    ]:  # fmt: skip
        ddp = wrapped(forward_sync_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = salience.sync(ddp, optimizer, mode=mode, groups=[[0, 1], [2, 3]], **options)
        steps(rank, ddp, optimizer, 30)
        handle.average()
        across = handle.links.nodes.across
        found[name] = [digest(ddp.module), accuracy(rank, ddp), 0 if across is None else across.sent]
    model = torch.nn.Linear(1, 1)
    ddp = wrapped(model)
    handle = salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode="hierarchical", groups=[[3], [0, 1, 2]])
    ddp(torch.tensor([[float(rank)]])).sum().backward()
    found["uneven"] = model.weight.grad.item()
    return found


def test_groups_give_the_mean_over_all_ranks_and_one_rank_of_each_talks_across(tmp_path):
    ranks = run_ranks(tmp_path, grouped, world=4)
    assert isinstance(ranks[0], dict), ranks[0]
    for name in ("plain", "topk", "local"):
        assert len({one[name][0] for one in ranks}) == 1, name
        assert min(one[name][1] for one in ranks) > 0.9
        assert [one[name][2] > 0 for one in ranks] == [True, False, True, False]
    assert [one["uneven"] for one in ranks] == pytest.approx([1.5] * 4)


def test_a_round_ends_with_the_quorum_and_late_ones_join_the_next():
    rounds = Rounds(world=3, quorum=2, staleness=1)
    one = torch.ones(2)
    assert rounds.come(0, REGULAR, one) == {}
    answers = rounds.come(1, REGULAR, 3 * one)
    assert sorted(answers) == [0, 1]
    assert answers[0][0].tolist() == [2, 2]  # (1 + 3) / 2
    rounds.come(0, REGULAR, one)
    assert rounds.come(1, REGULAR, one) == {}, "rank 2 has missed one round already: it is waited for"
    answers = rounds.come(2, REGULAR, 7 * one)
    assert [update.tolist() for update in answers[2]] == [[2, 2], [3, 3]], "it catches up, in order"
    assert [update.tolist() for update in answers[0]] == [[3, 3]]
    # Rank 0 wants equal parameters; it counts as waiting, and is answered when all have asked.
    assert rounds.come(0, TOGETHER, 2 * one) == {}
    assert sorted(rounds.come(1, REGULAR, 4 * one)) == [1]
    assert rounds.come(2, TOGETHER, one) == {}
    last = rounds.come(1, TOGETHER, 2 * one)
    assert sorted(last) == [0, 1, 2]
    assert last[0][0].tolist() == [3, 3]


def slow_one(rank: int, every: int) -> Any:
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = salience.sync(ddp, optimizer, mode="quorum", steps=every, staleness=3, overlap=False)
    waited = []
    x, y = problem(rank)
    for step in range(24):
        picked = torch.arange(step * 32, step * 32 + 32) % len(y)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[picked]), y[picked]).backward()
        if rank == 2:
            time.sleep(0.15)
        optimizer.step()
        waited.append(handle.exchange.rounds)
    handle.average()
    found = [digest(ddp.module), accuracy(rank, ddp), handle.exchange.rounds]
    handle.close()
    return [*found, digest(ddp.module)]


def stuck(rank: int) -> Any:
    """A rank comes to no averaging point; the other waits for it."""
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    handle = salience.sync(ddp, optimizer, mode="quorum", quorum=2, deadline=1.0)
    handle.average()
    if rank == 0:
        time.sleep(4)
        return ""
    try:
        handle.average()
    except RankError as error:
        return str(error)
    return "went on"


def test_a_first_rank_that_does_not_come_is_named_at_the_deadline(tmp_path):
    _, said = run_ranks(tmp_path, stuck)
    assert said.startswith("Rank 1 lost rank 0, or waited 1 s for it, while parameters were averaged"), said


@pytest.mark.parametrize("every", [1, 2])
def test_a_slow_rank_does_not_hold_the_others_and_all_end_equal(tmp_path, every):
    ranks = run_ranks(tmp_path, slow_one, every, world=3)
    assert all(isinstance(one, list) for one in ranks), ranks
    assert len({one[0] for one in ranks}) == 1
    assert len({one[3] for one in ranks}) == 1
    assert min(one[1] for one in ranks) > 0.9
    assert len({one[2] for one in ranks}) == 1, "every rank makes every update"
    assert ranks[0][2] > 24 // every + 1, "more rounds than averaging points of one rank: the slow one missed some"


def windows(rank: int) -> Any:
    """A Loader's windows end with equal parameters, without a word in the loop."""
    x, y = problem(0)
    loader = salience.Loader(torch.utils.data.TensorDataset(x, y), 16, epochs=2)
    ddp = wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    salience.sync(ddp, optimizer, loader, mode="local", steps=3)
    ends = []
    for _ in range(2):
        for a, b in loader:
            losses = F.cross_entropy(ddp(a), b, reduction="none")
            optimizer.zero_grad()
            loader.loss(losses).backward()
            optimizer.step()
        ends.append(digest(ddp.module))
    return ends


def test_windows_of_a_loader_end_with_equal_parameters(tmp_path):
    first, second = run_ranks(tmp_path, windows)
    assert len(first) == 2
    assert first == second
    assert first[0] != first[1]
