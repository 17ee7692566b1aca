"""mode="auto": predictions by hand, and whole decisions over a link whose speed is known."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import digest, problem, run_ranks, wrapped

import salience
from salience.gradients.costs import Costs, rehearse, some_gradients
from salience.gradients.link import Link


def test_predictions_add_up():
    costs = Costs(
        compute=0.05, exchange=0.8, latency=0.001, encode={"lowrank": 0.004, "topk": 0.01},
        share={"bf16": 0.5, "lowrank": 0.01, "topk": 0.02, "local": 0.5},
    )  # fmt: skip
    assert costs.predict("allreduce") == pytest.approx(0.85)
    assert costs.predict("bf16") == pytest.approx(0.05 + 0.001 + 0.3995)
    assert costs.predict("lowrank") == pytest.approx(0.05 + 0.004 + 0.002 + 0.00799)
    assert costs.local_steps == 11  # 1.25 * (0.003 + 0.3995) / 0.05 = 10.06
    assert costs.predict("local") == pytest.approx(0.05)
    assert costs.best(["bf16", "lowrank", "topk", "local"]) == "local"
    assert costs.best(["bf16", "lowrank", "topk"]) == "lowrank", "the milder of two that are about as fast"
    assert costs.best([]) == ""


def test_a_rehearsal_counts_what_would_be_sent():
    gradients = some_gradients([torch.zeros(100, 200), torch.zeros(200)])
    assert rehearse("bf16", 2, gradients)[1] == pytest.approx(0.5)
    # Rank 2: two numbers for each of 100 rows and 200 columns, and the bias whole.
    assert rehearse("lowrank", 2, gradients)[1] == pytest.approx((2 * 300 + 200) / 20_200)
    assert rehearse("local", 2, gradients) == (0.0, 0.5)


class SlowLink(Link):
    """A link of known speed: waits after each collective as long as its bytes would take."""

    rate = 1e6

    def wait(self, work: Any) -> None:
        super().wait(work)
        before, self.counted = getattr(self, "counted", 0.0), self.sent
        time.sleep((self.sent - before) / self.rate)


def decided(rank: int) -> Any:
    x, y = problem(rank)
    ddp = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    loader = type("Quiet", (), {"events": salience.events.EventLog(), "seed": 0, "epoch": 0})()
    handle = salience.sync(ddp, optimizer, loader, mode="auto")
    main = handle.links.main
    handle.links.main = SlowLink(main.group, main.notes, main.deadline)
    handle.auto.candidates = ("lowrank", "topk")  # whose blocks are short
    handle.auto._restart()
    modes = []

    def steps(n: int) -> None:
        for step in range(n):
            picked = torch.arange(step * 32, step * 32 + 32) % len(y)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x[picked]), y[picked]).backward()
            optimizer.step()
            modes.append(handle.mode)

    steps(120)
    adopted = handle.auto.adopted
    state = handle.state_dict()
    handle.links.main.rate = 1e12
    steps(80)
    handle.average()
    told = [[one["action"], one["lever"], one["reason"]] for one in loader.events.recent]
    return {"told": told, "adopted": adopted, "modes": modes, "digest": digest(ddp.module), "saved": state["mode"]}


def test_a_slow_link_makes_it_try_and_keep_and_a_fast_one_decide_again(tmp_path):
    first, second = run_ranks(tmp_path, decided)
    assert isinstance(first, dict), first
    assert first["digest"] == second["digest"]
    assert first["modes"] == second["modes"], "ranks were in different modes"
    assert first["told"] == second["told"]
    (tried, kept, again), mode = first["told"][:3], first["adopted"]
    assert tried[0] == "try", first["told"]
    assert "lossy" in tried[2]
    assert kept[:2] == ["keep", f'sync(mode="{mode}")'], first["told"]
    assert first["saved"] == mode
    assert set(first["modes"][:110]) == {"allreduce", mode}, "plain and the mode, by turns"
    assert again[0] == "undo"
    assert "measured again" in again[2]
    assert "allreduce" in first["modes"][128:]


def ruled_out(rank: int) -> Any:
    ddp = wrapped(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    loader = type("Quiet", (), {"events": salience.events.EventLog(), "seed": 0, "epoch": 0})()
    handle = salience.sync(ddp, optimizer, loader, mode="auto")
    auto = handle.auto
    loader.events.emit("evaluated", metric=0.9)
    auto.adopted, auto._step, auto._link = "topk", 60, auto._probe(1 << 17)
    handle.switch("topk", salience.gradients.options.resolve("topk", {}))
    if rank == 0:  # only one rank validates
        loader.events.emit("evaluated", metric=0.8)
        loader.events.emit("evaluated", metric=0.7)
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    return [auto.refused, auto.adopted, handle.mode]


def test_two_validation_results_below_the_mark_rule_a_mode_out_on_all_ranks(tmp_path):
    assert run_ranks(tmp_path, ruled_out) == [[["topk"], "", "allreduce"]] * 2
