"""Corners of training in which error feedback could lose something, or ranks come apart."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import digest, problem, run_ranks, small_net, wrapped
from torch import nn

import salience
from salience.gradients import nodes

FEEDBACK: dict[str, dict[str, Any]] = {
    "topk": {"rate": 0.05, "small": 16}, "kernels": {"rate": 0.1, "small": 16}, "lowrank": {"rank": 1}, "lazy": {"small": 16},
}  # fmt: skip


def behind(handle: Any, count: int) -> list[torch.Tensor]:
    """What has stayed behind on this rank, by parameter."""
    exchange: Any = handle.traffic.exchange
    if hasattr(exchange, "errors"):
        return [exchange.errors.get(i, torch.zeros(0)) for i in range(count)]
    return [torch.zeros(0) if one is None else one for one in exchange.pools]


class Branches(nn.Module):
    """Its second layer is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.second(x) if both else x)


def unused(rank: int) -> Any:
    """In every other step no rank uses `second`, whose gradient the optimizer then does not look at."""
    found = {}
    for mode, options in FEEDBACK.items():
        ddp = wrapped(Branches(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        handle = salience.sync(ddp, optimizer, mode=mode, **options)
        weight = ddp.module.second.weight
        out, mine, most = torch.zeros_like(weight), torch.zeros_like(weight), 0.0
        for step in range(9):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
            y = torch.arange(8) % 4
            optimizer.zero_grad()
            F.cross_entropy(ddp(x, step % 2 == 0), y).backward()
            if weight.grad is not None:
                out += weight.grad
            optimizer.step()
            alone = Branches()
            F.cross_entropy(alone(x, step % 2 == 0), y).backward()
            mine += 0 if alone.second.weight.grad is None else alone.second.weight.grad
            left = behind(handle, 6)[2]
            rest = left.view(16, 16).clone() if left.numel() else torch.zeros(16, 16)
            most = max(most, rest.abs().max().item())
        mean = handle.links.main.mean
        found[mode] = [(out + mean(rest.clone()) - mean(mine)).abs().max().item(), most]
    return found


def test_nothing_is_lost_in_layers_that_no_rank_uses_in_a_step(tmp_path):
    for found in run_ranks(tmp_path, unused):
        assert isinstance(found, dict), found
        for mode, (apart, rest) in found.items():
            assert rest > 1e-5, f"{mode}: nothing stayed behind, so nothing was tested"
            assert apart < 1e-5, mode


def union(rank: int) -> Any:
    """Uneven parts with importance weights, in two backward passes per step, against one process with all."""
    found = {}
    sizes, world = (48, 16), 2
    data = [problem(one) for one in range(world)]
    weights = [1 + torch.rand(256, generator=torch.Generator().manual_seed(one)) for one in range(world)]
    total = sum(sizes)
    for mode, options in FEEDBACK.items():
        ddp = wrapped(small_net().eval())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        handle = salience.sync(ddp, optimizer, mode=mode, **options)
        out = [torch.zeros_like(p) for p in ddp.parameters()]
        whole = [torch.zeros_like(p) for p in ddp.parameters()]
        for step in range(5):
            optimizer.zero_grad()
            picked = [torch.arange(step * size, (step + 1) * size) for size in sizes]
            for half, part in enumerate(picked[rank].chunk(2)):
                x, y, w = data[rank][0][part], data[rank][1][part], weights[rank][part]
                ddp.require_backward_grad_sync = half == 1  # what no_sync() sets
                (world / total * (w * F.cross_entropy(ddp(x), y, reduction="none")).sum()).backward()
            for gathered, p in zip(out, ddp.parameters(), strict=True):
                gathered += p.grad
            optimizer.step()
            alone = small_net().eval()
            for (x, y), w, part in zip(data, weights, picked, strict=True):
                ((w[part] * F.cross_entropy(alone(x[part]), y[part], reduction="none")).sum() / total).backward()
            for gathered, p in zip(whole, alone.parameters(), strict=True):
                gathered += p.grad
        apart, kept = 0.0, 0.0
        for gathered, full, one in zip(out, whole, behind(handle, len(out)), strict=True):
            rest = one.reshape(full.shape) if one.numel() else torch.zeros_like(full)
            rest = handle.links.main.mean(rest.clone())
            apart, kept = max(apart, (gathered + rest - full).abs().max().item()), max(kept, rest.abs().max().item())
        found[mode] = [apart, kept]
    return found


def test_uneven_weighted_accumulated_parts_add_up_to_the_gradient_of_the_union(tmp_path):
    for found in run_ranks(tmp_path, union):
        assert isinstance(found, dict), found
        for mode, (apart, kept) in found.items():
            assert kept > 1e-4, f"{mode}: nothing stayed behind, so nothing was tested"
            assert apart < 2e-5, mode


class Mixed(nn.Module):
    """One layer in bfloat16, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16).bfloat16(), nn.Linear(16, 4)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(self.frozen(x)).bfloat16()).float())


def everything(rank: int) -> Any:
    """Two dtypes, two parameter groups, a schedule, a frozen layer, buckets as views: in every mode, alone and in groups."""
    found = {}
    nodes.PIECE = 100  # so that the small net travels in several pieces
    every = {**FEEDBACK, "allreduce": {}, "fp16": {}, "bf16": {}, "local": {"steps": 2}, "quorum": {"steps": 2}}
    for (mode, options), groups in itertools.product(every.items(), (None, [[0], [1]], [[0, 1]])):
        if mode == "quorum" and groups:
            continue  # a quorum is one of ranks, not of groups
        ddp = wrapped(Mixed(), gradient_as_bucket_view=True)
        first, *rest = [p for p in ddp.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": rest, "lr": 0.1}], momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        handle = salience.sync(ddp, optimizer, mode=mode, groups=groups, **options)
        losses = []
        for step in range(7):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step % 2))
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), torch.arange(8) % 4)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        handle.average()
        found[f"{mode} {groups}"] = [digest(ddp.module.float()), losses[0], losses[-1]]
        handle.close()
    return found


def test_ranks_stay_equal_to_the_bit_in_every_mode(tmp_path):
    first, second = run_ranks(tmp_path, everything)
    assert isinstance(first, dict), first
    assert len(first) == 25
    for name, (mine, before, after) in first.items():
        assert mine == second[name][0], f"{name}: parameters differ between ranks"
        assert after < before, f"{name} learnt nothing"


def scheduled(rank: int) -> Any:
    """The quadratic rule while the learning rate falls: sync() reads that of the first parameter group."""
    ddp = wrapped(nn.Linear(2, 2))
    groups = [{"params": [ddp.module.weight], "lr": 0.1}, {"params": [ddp.module.bias], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else 0.5)
    handle = salience.sync(ddp, optimizer, mode="local", steps=1, alpha=0.16, overlap=False)
    rounds = []
    for _ in range(24):
        optimizer.zero_grad()
        ddp(torch.ones(1, 2) * (1 + rank)).sum().backward()
        optimizer.step()
        schedule.step()
        rounds.append(handle.exchange.rounds)
    return rounds


def test_local_steps_grow_while_the_learning_rate_falls(tmp_path):
    first, second = run_ranks(tmp_path, scheduled)
    assert first == second
    # (0.16 / 0.1)^2 = 2.56, so 2 steps at first; from the fifth step (0.16 / 0.05)^2 = 10.24, so 10: after 2, 4, 14 and 24.
    assert [step + 1 for step in range(24) if first[step] > ([0, *first])[step]] == [2, 4, 14, 24]


STATES = {
    **FEEDBACK, "local": {"steps": 2}, "quorum": {"steps": 2}, "allreduce": {}, "fp16": {}, "bf16": {},
    "topk in groups": {**FEEDBACK["topk"], "groups": "each"}, "local in groups": {"steps": 2, "groups": "each"},
}  # fmt: skip
"""Options by mode; `groups` of one rank each."""
NOTHING_KEPT = ("allreduce", "fp16", "bf16")


def go_on(rank: int, folder: str, saved: bool, own: int) -> Any:
    """Three steps in each mode, from the state that rank `own` has saved; then the states are saved."""
    found: dict[str, Any] = {}
    for mode, options in STATES.items():
        ddp = wrapped(nn.Linear(16, 16))
        groups = [[one] for one in range(dist.get_world_size())] if "groups" in options else None
        events = salience.events.EventLog()
        loader = type("Quiet", (), {"events": events, "seed": 0, "epoch": 0})()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = salience.sync(ddp, optimizer, loader, mode=mode.split()[0], **{**options, "groups": groups})
        if saved:
            last = torch.load(f"{folder}/{mode}-{min(rank, own)}.pt", weights_only=True)
            ddp.module.load_state_dict(last["model"])
            handle.load_state_dict(last["sync"])
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
            ddp(x).square().sum().backward()
            optimizer.step()
        state = handle.state_dict()
        if not saved:
            torch.save({"model": ddp.module.state_dict(), "sync": state}, f"{folder}/{mode}-{rank}.pt")
        told = [event["text"] for event in events.recent]
        found[mode] = [digest(ddp.module), state["inner"].get("step", state["inner"].get("count")), told]
        handle.close()
    return found


def test_states_are_loaded_by_another_number_of_ranks_and_by_the_wrong_rank(tmp_path):
    folder = str(tmp_path)
    before = run_ranks(tmp_path, go_on, folder, False, 0)
    assert isinstance(before[0], dict), before[0]
    same = run_ranks(tmp_path, go_on, folder, True, 1)
    for name, ranks in {"three": run_ranks(tmp_path, go_on, folder, True, 1, world=3),
                        "wrong file": run_ranks(tmp_path, go_on, folder, True, 0)}.items():  # fmt: skip
        for mode in STATES:
            assert isinstance(ranks[0], dict), ranks[0]
            assert len({one[mode][0] for one in ranks}) == 1, f"{name}, {mode}: parameters differ between ranks"
            if mode in NOTHING_KEPT:
                assert not any(one[mode][2] for one in ranks), f"{name}, {mode}: nothing was there to be dropped"
                continue
            assert all("are dropped" in one[mode][2][0] for one in ranks), f"{name}, {mode}"
            if mode != "lazy":
                assert {one[mode][1] for one in ranks} == {6}, f"{name}, {mode}: the counter was lost"
    for mode in STATES:
        assert same[0][mode][0] == same[1][mode][0]
        assert not same[0][mode][2], "nothing is dropped on the same ranks"


def regrouped(rank: int) -> Any:
    """Residuals of ranks that lead a group belong to that group."""
    found = []
    state: dict[str, Any] = {}
    for groups in ([[0], [1]], [[0], [1]], [[0, 1]]):
        events = salience.events.EventLog()
        loader = type("Quiet", (), {"events": events, "seed": 0, "epoch": 0})()
        ddp = wrapped(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = salience.sync(ddp, optimizer, loader, mode="topk", groups=groups, small=16)
        if state:
            handle.load_state_dict(state)
        ddp(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        state = handle.state_dict()
        found.append([event["text"] for event in events.recent])
        handle.close()
    return found


def test_residuals_of_other_groups_are_dropped_and_the_log_says_so(tmp_path):
    first, second = run_ranks(tmp_path, regrouped)
    assert isinstance(first, list), first
    for rank, (fresh, same, (said,)) in enumerate((first, second)):
        assert fresh == same == []
        assert said == (
            f"The state was saved by rank {rank} of 2 in the groups [[0], [1]] and is loaded by rank {rank} of 2 in the "
            "groups [[0, 1]]: gradients that had stayed behind (residuals) are dropped."
        )


def alone(rank: int) -> Any:
    """A state of a single process, for two ranks, in modes whose names differ there."""
    found = {}
    for mode in ("auto", "hierarchical", "topk", "local"):
        ddp = wrapped(nn.Linear(4, 4))
        handle = salience.sync(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mode=mode)
        for p in ddp.parameters():
            p.data.fill_(3.0)
        handle.load_state_dict({"mode": mode, "world": 1, "rank": 0})
        handle.average()
        found[mode] = [p.flatten()[0].item() for p in ddp.parameters()]
        handle.close()
    return found


def test_the_state_of_a_single_process_is_taken_up_by_two(tmp_path):
    assert run_ranks(tmp_path, alone) == [{mode: [3.0, 3.0] for mode in ("auto", "hierarchical", "topk", "local")}] * 2


def with_decay(rank: int) -> Any:
    said = []
    for weight_decay in (0.0, 0.01):
        events = salience.events.EventLog()
        loader = type("Quiet", (), {"events": events, "seed": 0, "epoch": 0})()
        ddp = wrapped(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=weight_decay)
        salience.sync(ddp, optimizer, loader, mode="topk", momentum=0.9)
        said.append([event["text"] for event in events.recent])
    ddp = wrapped(nn.Linear(4, 4))
    try:
        salience.sync(ddp, torch.optim.Adam(ddp.parameters()), mode="topk", momentum=0.9)
    except salience.ConfigError as error:
        said.append(str(error))
    return said


def test_momentum_of_sync_is_refused_beside_adam_and_weight_decay_is_explained(tmp_path):
    first, second = run_ranks(tmp_path, with_decay)
    assert first == second
    assert first[0] == []
    assert "does not gather in the momentum" in first[1][0]
    assert "would count twice" in first[2]
