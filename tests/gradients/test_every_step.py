"""Gradients that travel in every step: nothing is lost, all ranks hold the same, and training converges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import digest, problem, run_ranks, small_net, wrapped

import salience
from salience.gradients.hook import Traffic

LOSSY = {
    "fp16": {},
    "bf16": {},
    "topk": {"rate": 0.05, "small": 64},
    "kernels": {"rate": 0.1, "small": 64},
    "lowrank": {},
    "lazy": {"small": 64},
}


def train(
    rank: int, mode: str, options: dict[str, Any], steps: int = 60, accumulate: int = 1
) -> tuple[Any, Any, float]:
    x, y = problem(rank)
    ddp = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = salience.sync(ddp, optimizer, mode=mode, **options)
    for step in range(steps):
        picked = torch.arange(step * 32, step * 32 + 32) % len(y)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[picked]), y[picked]).backward()
        optimizer.step()
    handle.average()
    with torch.no_grad():
        right = (ddp.module(x).argmax(1) == y).float().mean().item()
    return ddp, handle, right


def all_modes(rank: int) -> Any:
    found = {}
    for mode, options in {"allreduce": {}, **LOSSY}.items():
        ddp, handle, right = train(rank, mode, options)
        found[mode] = [digest(ddp.module), right, handle.sent, handle.traffic.exchange.lossy]
    return found


def test_every_mode_converges_with_equal_parameters_and_sends_less(tmp_path):
    first, second = run_ranks(tmp_path, all_modes)
    for mode in ("allreduce", *LOSSY):
        assert first[mode][0] == second[mode][0], f"{mode}: parameters differ between ranks"
        assert min(first[mode][1], second[mode][1]) > 0.9, f"{mode}: {first[mode][1]}"
        assert first[mode][3] is (mode != "allreduce")
    for mode in LOSSY:
        assert first[mode][2] < 0.8 * first["allreduce"][2], f"{mode} sent {first[mode][2]}"


def conserved(rank: int) -> Any:
    """Compare what came out, plus what stayed behind, with the mean that plain all-reduce gives, summed over steps."""
    found = {}
    x, y = problem(rank)
    for mode in ("topk", "kernels", "lowrank", "lazy"):
        ddp = wrapped(forward_sync_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        handle = salience.sync(ddp, optimizer, mode=mode, **LOSSY[mode])
        out = [torch.zeros_like(p) for p in ddp.parameters()]
        local = [torch.zeros_like(p) for p in ddp.parameters()]
        for step in range(8):
            picked = torch.arange(step * 32, step * 32 + 32) % len(y)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x[picked]), y[picked]).backward()
            for total, p in zip(out, ddp.parameters(), strict=True):
                total += p.grad
            optimizer.step()
            alone = small_net()
            alone.load_state_dict(ddp.module.state_dict())
            F.cross_entropy(alone(x[picked]), y[picked]).backward()
            for total, p in zip(local, alone.parameters(), strict=True):
                total += p.grad
        exchange: Any = handle.traffic.exchange
        if mode == "lowrank":
            left = [exchange.errors.get(i, torch.zeros(0)) for i in range(len(out))]
        else:
            left = [torch.zeros(0) if one is None else one for one in exchange.pools]
        rest = [one.reshape(p.shape) if one.numel() else torch.zeros_like(p) for one, p in zip(left, out, strict=True)]
        worst, kept = 0.0, 0.0
        for total, mine, one in zip(out, local, rest, strict=True):
            mean, behind = handle.links.main.mean(mine.clone()), handle.links.main.mean(one.clone())
            worst = max(worst, (total + behind - mean).abs().max().item())
            kept = max(kept, behind.abs().max().item())
        found[mode] = [worst, kept]
    return found


def test_what_travelled_and_what_stayed_behind_add_up_to_the_gradients(tmp_path):
    for found in run_ranks(tmp_path, conserved):
        for mode, (worst, kept) in found.items():
            assert worst < 2e-5, mode
            assert kept > 1e-3, f"{mode}: nothing stayed behind, so nothing was tested"


def special(rank: int) -> Any:
    """Kernels whole; a gradient that is not finite; momentum correction; the state; the hook's own order."""
    found: dict[str, Any] = {}
    x, y = problem(rank)
    ddp = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = salience.sync(ddp, optimizer, mode="kernels", rate=0.05, small=64)
    F.cross_entropy(ddp(x), y).backward()
    kernels = ddp.module[2].weight.grad.view(128, 9)
    found["moved kernels"] = sorted({int(row) for row in (kernels != 0).sum(1)})
    found["some"] = int((kernels != 0).any(1).sum())
    optimizer.step()
    optimizer.zero_grad()
    before = [pool.clone() for pool in handle.traffic.exchange.pools if pool is not None]
    (F.cross_entropy(ddp(x), y) * (float("inf") if rank == 1 else 1.0)).backward()
    found["said"] = not bool(ddp.module[2].weight.grad.isfinite().all())
    after = [pool for pool in handle.traffic.exchange.pools if pool is not None]
    found["pools stay finite"] = all(bool(one.isfinite().all()) for one in after) and len(before) == len(after)

    state = handle.state_dict()
    handle.close()
    again = salience.sync(ddp, optimizer, mode="kernels", rate=0.05, small=64)
    again.load_state_dict(state)
    found["restored"] = all(
        torch.equal(a, b)
        for a, b in zip(state["inner"]["pools"], again.traffic.exchange.pools, strict=True)
        if a is not None
    )
    events = salience.events.EventLog()
    again.loader = type("Quiet", (), {"events": events, "seed": 0})()
    again.load_state_dict({**state, "world": 4})
    found["dropped"] = [event["text"] for event in events.recent]
    again.close()

    fixed = torch.optim.SGD(ddp.parameters(), lr=0.05)
    handle = salience.sync(ddp, fixed, mode="topk", rate=0.05, small=64, momentum=0.9, warmup=10)
    for step in range(40):
        picked = torch.arange(step * 32, step * 32 + 32) % len(y)
        fixed.zero_grad()
        F.cross_entropy(ddp(x[picked]), y[picked]).backward()
        fixed.step()
    with torch.no_grad():
        found["momentum"] = (ddp.module(x).argmax(1) == y).float().mean().item()
    found["digest"] = digest(ddp.module)
    return found


def test_kernels_travel_whole_trouble_is_passed_on_and_state_returns(tmp_path):
    first, second = run_ranks(tmp_path, special)
    for one in (first, second):
        assert one["moved kernels"] in ([0, 9], [9]), "a kernel was cut"
        assert 0 < one["some"] < 128
        assert one["said"]
        assert one["pools stay finite"]
        assert one["restored"]
        assert "residuals) are dropped" in one["dropped"][0]
        assert one["momentum"] > 0.9
    assert first["digest"] == second["digest"]


def against_plain(rank: int) -> Any:
    """allreduce through our hook against DDP by itself, and against DDP with accumulation by no_sync."""
    x, y = problem(rank)
    digests = []
    for ours in (False, True):
        ddp = wrapped(forward_sync_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        if ours:
            salience.sync(ddp, optimizer, mode="allreduce")
        for step in range(8):
            optimizer.zero_grad()
            half = torch.arange(step * 16, step * 16 + 16) % len(y)
            with ddp.no_sync():
                F.cross_entropy(ddp(x[half]), y[half]).backward()
            F.cross_entropy(ddp(x[half + 100]), y[half + 100]).backward()
            optimizer.step()
        digests.append(digest(ddp.module))
    return digests


def test_plain_all_reduce_through_the_hook_is_ddp_to_the_bit(tmp_path):
    first, second = run_ranks(tmp_path, against_plain)
    assert first[0] == first[1] == second[0] == second[1]


def test_a_traffic_without_buckets_is_not_open():
    traffic = Traffic(torch.nn.Linear(2, 2))  # only its parameters are asked for
    assert not traffic.open
    assert traffic.passes == 0


@pytest.mark.parametrize("mode", ["topk", "auto", "hierarchical"])
def test_a_single_process_is_told_once_that_nothing_happens(mode):
    log = salience.events.EventLog()
    loader = type("Quiet", (), {"events": log, "seed": 0})()
    model = torch.nn.Linear(2, 2)
    handle = salience.sync(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, mode=mode)
    handle.average()
    handle.load_state_dict(handle.state_dict())
    handle.close()
    assert [event["text"] for event in log.recent] == [
        "sync() does nothing in a single process: there is nobody to exchange gradients with."
    ]
