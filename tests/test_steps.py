"""steps = "constant": batches shrink with the visits, the learning rate follows, and everything that counts steps is right."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import salience
from salience.errors import ConfigError
from salience.events import EventLog

N, EPOCHS = 300, 10
SELECT = {"preset": "epsilon_greedy", "steps": "constant"}
WINDOWS = [300] * 2 + [120] * 6 + [300] * 2


def make(select=SELECT, **more):
    return salience.Selector(N, batch_size=30, epochs=EPOCHS, select=select, **more)


def go(selector, stop=None):
    """Sizes of the batches, and progress and learning-rate factor as each is delivered."""
    seen = []
    for _ in range(selector.epoch, EPOCHS):
        for ids, _ in selector:
            selector.loss(ids.float())
            seen.append((ids.tolist(), selector.progress))
            if len(seen) == stop:
                return seen
    return seen


def sizes_of_a_window(selector):
    """Sizes of the batches of the next window, with a loss for each."""
    sizes = []
    for ids, _ in selector:
        selector.loss(ids.float())
        sizes.append(len(ids))
    return sizes


def test_every_window_has_the_steps_of_a_full_one_with_smaller_batches():
    selector = make()
    assert selector.total_steps == 10 * EPOCHS
    for visits in WINDOWS:
        assert len(selector) == 10
        assert sizes_of_a_window(selector) == [visits // 10] * 10
    assert selector.progress == pytest.approx(1)
    assert selector.batch_size == 30  # what was asked for stays


@pytest.mark.parametrize(("power", "factor"), [(0.5, 0.4**0.5), (1.0, 0.4), (0.0, 1.0)])
def test_every_step_has_the_learning_rate_of_its_own_batch(power, factor):
    """Also the first step of a window, whose rate the scheduler sets before the window is planned."""
    selector = make({**SELECT, "lr_power": power})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = salience.ProgressLR(optimizer, selector, lambda progress: 1.0)
    for visits in WINDOWS:
        for ids, _ in selector:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * (1 if visits == N else factor))
            selector.loss(ids.float())
            optimizer.step()
            schedule.step()


def test_a_batch_never_falls_below_one_sample():
    selector = salience.Selector(50, batch_size=1, epochs=10, select=SELECT)
    assert [len(sizes_of_a_window(selector)) for _ in range(4)] == [50, 50, 20, 20]
    assert selector.lr_scale == 1.0


@pytest.mark.parametrize("stop", [1, 20, 25, 30, 79, 80])
def test_a_resumed_run_has_the_same_batches_progress_and_rate(stop):
    whole = go(make())
    stopped = make()
    first = go(stopped, stop)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.lr_scale == stopped.lr_scale
    assert first + go(resumed) == whole


def test_a_replayed_trace_has_the_same_steps_and_rates(tmp_path):
    recorded = make(trace=tmp_path)
    whole = [(ids, recorded.lr_scale) for _ in range(EPOCHS) for ids, _ in recorded if recorded.loss(ids.float()) >= 0]
    replay = make(salience.Trace(tmp_path))
    assert replay.total_steps == 100
    assert len(replay) == 10
    again = [(ids, replay.lr_scale) for _ in range(EPOCHS) for ids, _ in replay]
    assert len(again) == 100
    for (a, rate), (b, same) in zip(whole, again, strict=True):
        assert torch.equal(a, b)
        assert rate == same


def test_by_default_fewer_visits_are_fewer_steps():
    selector = make("epsilon_greedy")
    assert selector.total_steps == 4 * 10 + 6 * 4
    assert selector.lr_scale == 1.0
    next(iter(selector))
    assert selector.lr_scale == 1.0


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"steps": "same"}, "'fewer' or 'constant'"),
        ({"steps": 3}, "must be text"),
        ({"lr_power": -1}, "at least 0"),
        ({"lr_power": "linear"}, "must be a number"),
        ({"pick": 0}, "above 0 and at most 1"),
    ],
)
def test_wrong_settings_are_refused(setting, says):
    with pytest.raises(ConfigError, match=says):
        make(setting)


def work(rank: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    selector = make({**SELECT, "keep": "auto"}, baseline=f"{out}/full.jsonl" if rank == 0 else "only rank 0 reads it")
    sizes = []
    for _ in range(EPOCHS):
        sizes.append(sizes_of_a_window(selector))
        if rank == 0:  # as most loops do
            selector.evaluated(0.5)
    np.savez(
        f"{out}/{rank}.npz", steps=[len(s) for s in sizes], visits=[sum(s) for s in sizes], scale=selector.lr_scale
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_take_their_half_of_every_step_and_rank_0_steers_both(tmp_path: Path):
    log = EventLog(tmp_path / "full.jsonl")
    for k in range(1, 5):
        log.emit("evaluated", metric=0.5, progress=k / 4)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=2)
    one, two = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    both = one["visits"] + two["visits"]
    # 40% until two results in the band, then 33%, then 25%. A full window has 300 / (2 x 30) = 5 steps.
    # Batches are whole and equal: 33% is five of 2 x 10, 25% five of 2 x 8.
    assert both.tolist() == [300, 300, 120, 120, 100, 100, 80, 80, 300, 300]
    np.testing.assert_array_equal(one["steps"], two["steps"])
    assert set(one["steps"].tolist()) == {5}
