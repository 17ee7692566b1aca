"""Schedules over progress."""

from __future__ import annotations

import pytest
import torch

import salience
from salience.errors import ConfigError, StateError
from salience.schedule import SHAPES


class Clock:
    progress = 0.0


def test_the_rate_follows_progress_whatever_the_number_of_steps():
    clock = Clock()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = salience.ProgressLR(optimizer, clock, lambda p: 1 - p)
    rates = []
    for progress in (0.1, 0.5, 1.0):
        clock.progress = progress
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == pytest.approx([1.8, 1.0, 0.0])


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_ends_at_zero_and_never_exceeds_one(name):
    values = [SHAPES[name](k / 100) for k in range(101)]
    assert values[-1] == pytest.approx(0)
    assert max(values) == pytest.approx(1)
    assert min(values) >= 0


def test_a_schedule_does_not_keep_its_loader_alive_and_says_so_when_it_is_gone():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = salience.ProgressLR(optimizer, clock := Clock())
    del clock
    optimizer.step()
    with pytest.raises(StateError, match="is gone"):
        schedule.step()


def test_an_unknown_shape_gets_a_hint():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        salience.ProgressLR(optimizer, Clock(), "cosin")


def test_the_rate_is_multiplied_by_what_the_batch_size_asks_for():
    clock = Clock()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = salience.ProgressLR(optimizer, clock, lambda p: 1 - p)
    clock.progress, clock.lr_scale = 0.5, 0.4
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([2.0 * 0.5 * 0.4])
