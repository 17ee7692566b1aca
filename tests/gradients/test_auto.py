"""mode="auto": predictions by hand, and whole decisions over a link whose speed is known."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import digest, problem, run_ranks, wrapped

import salience
from salience.gradients.auto import EARLY, SETTLED, Trial
from salience.gradients.costs import Costs, NoLink, rehearse, share_of, some_gradients
from salience.gradients.link import Link
from salience.gradients.modes import MODES, resolve


def test_predictions_add_up():
    costs = Costs(
        plain=0.8, compute=0.05, exchange=0.8, busy=0.022, latency=0.001,
        encode={"lowrank": 0.004, "topk": 0.01, "local": 0.011},
        share={"bf16": 0.5, "lowrank": 0.01, "topk": 0.02, "local": 0.5},
    )  # fmt: skip
    assert costs.predict("bf16") == pytest.approx(0.05 + 0.001 + 0.3995)
    assert costs.predict("lowrank") == pytest.approx(0.05 + 0.004 + 0.002 + 0.00799)
    assert costs.local_steps == 11  # 1.25 * (0.003 + 0.3995) / 0.05 = 10.06
    assert costs.predict("local") == pytest.approx(0.05 + (0.011 + 0.011) / 11)
    assert costs.speedup("local") == pytest.approx(0.8 / 0.052)
    assert costs.best(["bf16", "lowrank", "topk", "local"]) == "local"
    assert costs.best(["bf16", "lowrank", "topk"]) == "lowrank", "the milder of two that are about as fast"
    assert costs.best([]) == ""


@pytest.mark.parametrize("mode", ["bf16", "lowrank", "topk"])
def test_the_share_of_a_mode_is_what_it_sends(mode):
    link: Any = NoLink(4)
    gradients = [torch.randn(100, 200), torch.randn(200), torch.randn(7, 3)]
    given = {"overlap": False} if mode == "bf16" else {**resolve(mode, {}), "warmup": 0}
    MODES[mode].make(link, **given).finish([one.clone() for one in gradients])
    whole = 2 * 3 / 4 * 4 * sum(one.numel() for one in gradients)
    assert share_of(mode, 4, gradients) == pytest.approx(link.sent / whole, rel=0.01)
    assert share_of("local", 4, gradients) == 0.5


def test_a_rehearsal_works_on_a_part_of_a_large_model():
    sample, scale = some_gradients([torch.zeros(9), torch.zeros(40, 10), torch.zeros(1000, 50)], limit=20_000)
    assert [tuple(one.shape) for one in sample] == [(400, 50)]
    assert scale == pytest.approx(50_409 / 20_000)
    whole, scale = some_gradients([torch.zeros(9), torch.zeros(40, 10), torch.zeros(())])
    assert sum(one.numel() for one in whole) == 410
    assert scale == 1
    assert all(rehearse(mode, 2, sample) > 0 for mode in ("bf16", "lowrank", "topk", "local"))


def test_a_trial_ends_at_once_where_one_pair_leaves_no_doubt():
    trial = Trial(mode="topk", options={}, warm=4, timed=4, without=[1.0])
    assert trial.verdict is None, "nothing with the mode yet"
    trial.with_mode = [0.5]
    assert trial.verdict is True
    trial.with_mode = [1.2]
    assert trial.verdict is False
    trial.with_mode = [0.8]
    assert trial.verdict is None, "1.25 times as fast, once"
    trial.without += [1.0]
    assert trial.verdict is None, "the second pair is not complete"
    trial.with_mode += [0.8]
    assert trial.verdict is True
    trial.with_mode, trial.without = [0.8, 1.3, 0.9], [1.0] * 3
    assert trial.verdict is False


class SlowLink(Link):
    """A link of known speed: waits after each collective as long as its bytes would take."""

    rate = 1e6

    def wait(self, work: Any) -> None:
        super().wait(work)
        before, self.counted = getattr(self, "counted", 0.0), self.sent
        time.sleep((self.sent - before) / self.rate)


def started(rank: int, rate: float, candidates: tuple[str, ...] = ("lowrank", "topk"), **options: Any) -> Any:
    """A run with auto over a link of known speed, and a function that makes steps and notes the mode of each."""
    x, y = problem(rank)
    ddp = wrapped(forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    loader = type("Quiet", (), {"events": salience.events.EventLog(), "seed": 0, "epoch": 0})()
    handle = salience.sync(ddp, optimizer, loader, mode="auto", **options)
    main = handle.links.main
    handle.links.main = SlowLink(main.group, main.notes, main.deadline)
    handle.links.main.rate = rate
    if handle.auto.candidates:
        handle.auto.candidates = candidates
        handle.auto._restart()
    modes = []

    def steps(n: int) -> None:
        for step in range(n):
            picked = torch.arange(step * 32, step * 32 + 32) % len(y)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x[picked]), y[picked]).backward()
            optimizer.step()
            modes.append(handle.mode)

    def told() -> Any:
        handle.average()
        found = [
            [one["action"], one["lever"], one["reason"]] for one in loader.events.recent if one["kind"] == "decision"
        ]
        return {"told": found, "modes": modes, "digest": digest(ddp.module), "sent": handle.sent}

    return handle, steps, told


def slow_then_fast(rank: int) -> Any:
    handle, steps, told = started(rank, 1e6)
    steps(60)
    adopted, saved = handle.auto.adopted, handle.state_dict()["mode"]
    handle.links.main.rate = 1e12
    steps(150)
    return {
        **told(),
        "looks": [handle.auto._step, handle.auto._doubts, handle.auto._pace],
        "adopted": adopted,
        "saved": saved,
    }


def test_a_slow_link_makes_it_try_and_keep_and_a_fast_one_decide_again(tmp_path):
    first, second = run_ranks(tmp_path, slow_then_fast)
    assert isinstance(first, dict), first
    assert first["digest"] == second["digest"]
    assert first["modes"] == second["modes"], "ranks were in different modes"
    assert first["told"] == second["told"]
    (tried, kept, again), mode = first["told"][:3], first["adopted"]
    assert tried[0] == "try", first["told"]
    assert "lossy" in tried[2]
    assert kept[:2] == ["keep", f'sync(mode="{mode}")'], first["told"]
    assert first["saved"] == mode
    assert set(first["modes"][:SETTLED]) == {"allreduce", mode}
    assert again[0] == "undo", first["told"]
    assert "measured again" in again[2]
    assert "allreduce" in first["modes"][60:]


def very_slow(rank: int) -> Any:
    _, steps, told = started(rank, 2e5)
    steps(EARLY + 1)
    return told()


def test_over_a_very_slow_link_it_decides_after_a_few_steps(tmp_path):
    first, second = run_ranks(tmp_path, very_slow)
    assert isinstance(first, dict), first
    assert first["modes"] == second["modes"]
    *plain, decided, after = first["modes"]
    assert set(plain) == {"allreduce"}
    assert decided == after != "allreduce", first["told"]


def fast_then_slow(rank: int) -> Any:
    handle, steps, told = started(rank, 1e12, ("local",))
    handle.auto._step, handle.auto._pace = SETTLED, 1e-4  # as it stands where plain all-reduce was found fast enough
    steps(64)
    handle.links.main.rate = 1e6
    steps(200)
    return {**told(), "adopted": handle.auto.adopted}


def test_a_link_that_becomes_slow_is_noticed_from_the_waits_of_plain_steps(tmp_path):
    first, second = run_ranks(tmp_path, fast_then_slow)
    assert isinstance(first, dict), first
    assert first["digest"] == second["digest"]
    assert first["told"] == second["told"]
    assert first["adopted"] == "local", first["told"]
    assert [one[0] for one in first["told"]][:3] == ["skip", "try", "keep"]
    assert "measured again" in first["told"][0][2]


def resumed(rank: int) -> Any:
    """A mode that a trial has kept is saved, and loaded by new runs: on as many ranks, and as if there had been others."""
    handle, steps, told = started(rank, 1e6, ("topk",))
    steps(40)
    found, state = [told()["modes"][-1]], handle.state_dict()
    handle.close()
    for changes in ({}, {"world": 3}):
        again, steps, told = started(rank, 1e6, ("topk",))
        again.load_state_dict({**state, **changes})
        kept = any(bool(one.any()) for one in again.traffic.exchange.pools if one is not None)
        steps(2)
        found.append([told()["modes"], again.auto.adopted, kept])
        again.close()
    return found


def test_a_resumed_run_goes_on_in_the_mode_that_was_kept(tmp_path):
    for said in run_ranks(tmp_path, resumed):
        assert isinstance(said, list), said
        assert said == ["topk", [["topk", "topk"], "topk", True], [["topk", "topk"], "topk", False]]


def not_lossy(rank: int) -> Any:
    _, steps, told = started(rank, 1e6, lossy=False)
    steps(SETTLED + 2)
    return told()


def test_without_lossy_modes_nothing_is_measured(tmp_path):
    first, second = run_ranks(tmp_path, not_lossy)
    assert isinstance(first, dict), first
    assert set(first["modes"]) == {"allreduce"}
    assert [one[0] for one in first["told"]] == ["skip"]
    assert "lossy=False" in second["told"][0][2]


def ruled_out(rank: int) -> Any:
    ddp = wrapped(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    loader = type("Quiet", (), {"events": salience.events.EventLog(), "seed": 0, "epoch": 0})()
    handle = salience.sync(ddp, optimizer, loader, mode="auto")
    auto = handle.auto
    loader.events.emit("evaluated", metric=0.9)
    auto.adopted, auto._step, auto._pace = "topk", SETTLED + 60, None
    handle.switch("topk", resolve("topk", {}))
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
