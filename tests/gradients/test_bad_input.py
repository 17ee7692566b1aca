"""What sync() refuses: one sentence, on every rank, and nobody is left waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import salience
from salience.errors import ConfigError, RankError
from salience.gradients import checks
from salience.gradients.modes import resolve


def attempt(model: nn.Module, mode: str = "topk", **more: Any) -> str:
    momentum = more.pop("optimizer_momentum", 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with pytest.raises(ConfigError) as caught:
        salience.sync(model, optimizer, mode=mode, **more)
    return str(caught.value)


def refused(rank: int) -> Any:
    found = {}
    linear = nn.Linear(3, 2)
    found["not wrapped"] = attempt(linear)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ddp.register_comm_hook(None, allreduce_hook)
    found["hooked before"] = attempt(ddp)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode="topk")
    found["twice"] = attempt(ddp)
    found["mode differs"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), mode="topk" if rank == 0 else "lazy")
    found["option differs"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), rate=0.01 * (1 + rank))
    found["bad on one rank"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), rate=0.01 if rank == 0 else 7)
    checks.__version__ = f"0.{rank}"  # two installed versions cannot be had in one test
    found["version"] = attempt(DistributedDataParallel(nn.Linear(3, 2)))
    checks.__version__ = salience.__version__
    found["dtype"] = attempt(DistributedDataParallel(nn.Linear(3, 2).double()))
    found["sparse"] = attempt(DistributedDataParallel(nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))))
    found["momentum"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), momentum=0.9, optimizer_momentum=0.9)
    found["groups"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), groups=[[0], [0, 1]])
    data = type("Data", (), {"n": 100 + rank, "seed": 0})()
    found["data"] = attempt(DistributedDataParallel(nn.Linear(3, 2)), loader=data)
    return found


def test_every_refusal_is_one_sentence_and_the_same_on_all_ranks(tmp_path):
    first, second = run_ranks(tmp_path, refused)
    assert isinstance(first, dict), first
    assert first == second
    expected = {
        "not wrapped": "not wrapped in DistributedDataParallel",
        "hooked before": "already has a communication hook",
        "twice": "called twice",
        "mode differs": "mode is 'topk' on rank 0 and 'lazy' on rank 1",
        "option differs": "options is",
        "bad on one rank": "rate is 7; it must be a number from 1e-06 to 1. (rank 1)",
        "version": "version of salience is '0.0' on rank 0 and '0.1' on rank 1",
        "dtype": "torch.float64",
        "sparse": "sparse=False",
        "momentum": "would count twice",
        "groups": "exactly once",
        "data": "size of the data set is 100 on rank 0 and 101 on rank 1",
    }
    for name, part in expected.items():
        assert part in first[name], f"{name}: {first[name]}"
        assert first[name].count("\n") == 0


class Branches(nn.Module):
    """Uses its second layer only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def without_gradient(rank: int, mode: str) -> Any:
    ddp = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    salience.sync(ddp, optimizer, mode=mode)
    said = ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, 3), rank == 0 or step < 2).sum().backward()
            optimizer.step()
    except RankError as error:
        said = str(error)
    return said


@pytest.mark.parametrize("mode", ["allreduce", "topk", "lowrank", "hierarchical"])
def test_a_parameter_without_gradient_on_one_rank_stops_both(tmp_path, mode):
    first, second = run_ranks(tmp_path, without_gradient, mode)
    assert first == second
    assert first.startswith("Rank 1 came to optimizer.step() without all its gradients")
    assert "find_unused_parameters=True" in first


class Table(nn.Module):
    """Its sparse gradient is not to be seen from the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Parameter(torch.randn(5, 2)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.embedding(x, self.rows, sparse=True))


def sparse(rank: int) -> Any:
    ddp = DistributedDataParallel(Table())
    salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode="topk")
    with pytest.raises(ConfigError) as caught:
        ddp(torch.tensor([0, 1])).square().sum().backward()
    return str(caught.value)


def test_a_sparse_gradient_that_only_shows_in_the_backward_pass_is_named(tmp_path):
    said = "The gradient of 'rows' is sparse, which sync() cannot exchange; make it dense (sparse=False)."
    assert run_ranks(tmp_path, sparse) == [said] * 2


def stops_early(rank: int, mode: str, options: dict[str, Any]) -> Any:
    """Rank 1 makes fewer steps than the others."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    salience.sync(ddp, optimizer, mode=mode, deadline=2.0, **options)
    try:
        for _ in range(2 if rank == 1 else 3):
            optimizer.zero_grad()
            ddp(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    except RankError as error:
        return str(error)
    return "made its steps"


@pytest.mark.parametrize(("mode", "options"), [("topk", {}), ("local", {"steps": 1, "overlap": False})])
def test_a_rank_that_makes_fewer_steps_is_named_at_the_deadline(tmp_path, mode, options):
    first, second, third = run_ranks(tmp_path, stops_early, mode, options, world=3)
    assert first.startswith("Rank 0 of 3 waited 2 s for gradients of rank 1;"), first
    assert third.startswith("Rank 2 of 3 waited 2 s for gradients of rank 1;"), third
    assert second == "made its steps"


def never_calls(rank: int) -> Any:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    if rank == 1:
        return ""
    try:
        salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode="topk", deadline=2.0)
    except RankError as error:
        return str(error)
    return "went on"


def test_a_rank_that_does_not_call_sync_is_waited_for_until_the_deadline(tmp_path):
    said, _ = run_ranks(tmp_path, never_calls)
    assert "waits 2 s at most" in said, said


@pytest.mark.parametrize(
    ("mode", "given", "said"),
    [
        ("topc", {}, "Did you mean 'topk'"),
        ("topk", {"rat": 0.1}, "Did you mean 'rate'"),
        ("topk", {"rate": 0}, "rate is 0"),
        ("local", {"steps": 0}, "steps is 0"),
        ("local", {"steps": 2.5}, "a whole number"),
        ("local", {"overlap": 1}, "True or False"),
        ("local", {"outer": 0.7}, "a pair"),
        ("lowrank", {"rank": True}, "rank is True"),
    ],
)
def test_options_say_what_is_allowed(mode, given, said):
    with pytest.raises(ConfigError, match=said):
        resolve(mode, given)


def test_options_have_defaults_and_none_where_it_means_something():
    assert resolve("local", {"steps": 4, "alpha": None})["most"] == 512
    assert resolve("quorum", {"quorum": 2})["staleness"] == 2
