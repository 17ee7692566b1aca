"""Batches that grow where the rate would fall: the rule, and the plans of a run with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError, StateError
from salience.large import Growth


def test_the_factor_doubles_where_the_rate_would_halve():
    growth = Growth(most=10**9, shape="linear")  # rate 1 - p
    factors = [growth.factor(w, 16) for w in range(16)]
    assert factors == [1] * 8 + [2] * 4 + [4] * 2 + [8, 16]


def test_warming_up_does_not_count_as_falling():
    growth = Growth(most=10**9, shape="one_cycle")
    assert [growth.factor(w, 8) for w in range(3)] == [1, 1, 1]


def test_batches_stay_below_the_cap_and_the_number_of_samples():
    assert Growth(most=300, shape="linear").batch(100, 15, 16, 10_000) == 200
    assert Growth(most=10**9, shape="linear").batch(100, 15, 16, 450) == 400


@pytest.mark.parametrize(("rule", "scale"), [("sgd", 4.0), ("adam", 2.0)])
def test_the_rate_follows_by_rule(rule, scale):
    assert Growth(most=10**9, rule=rule).lr_scale(32, 128) == scale


@pytest.fixture
def points() -> TensorDataset:
    return TensorDataset(torch.arange(400).float(), torch.arange(400) % 4)


def run(loader: Any, epochs: int, stop: int | None = None) -> list[tuple[int, float, float]]:
    """(batch size, factor on the rate, progress) of every step."""
    found = []
    for _ in range(loader.epoch, epochs):
        for x, _ in loader:
            loader.loss(x)
            found.append((len(x), loader.lr_scale, loader.progress))
            if len(found) == stop:
                return found
    return found


@pytest.mark.parametrize("select", [None, "uniform"])
def test_a_run_has_larger_and_fewer_steps_and_every_sample_of_its_plan(points, select):
    loader = salience.Loader(points, 25, epochs=8, select=select, grow=Growth(most=100, shape="linear"))
    expected = loader.total_steps
    found = run(loader, 8)
    assert len(found) == expected
    assert {size for size, _, _ in found} == {25, 50, 100}
    assert sum(size for size, _, _ in found) == loader.visits
    assert found[-1][2] == 1.0  # schedules end with the run
    if select is None:
        assert loader.visits == 8 * 400


def test_progress_counts_samples_so_that_schedules_are_unchanged(points):
    grown = run(salience.Loader(points, 25, epochs=8, grow=Growth(most=100, shape="linear")), 8)
    plain = run(salience.Loader(points, 25, epochs=8), 8)
    assert {progress for _, _, progress in grown} <= {progress for _, _, progress in plain}


def test_the_rate_of_a_schedule_is_multiplied(points):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loader = salience.Loader(points, 25, epochs=8, grow=Growth(most=10_000, shape="linear"))
    schedule = salience.ProgressLR(optimizer, loader, "linear")
    rates = []
    for _ in range(8):
        for x, _ in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            loader.loss(x)
            optimizer.step()
            schedule.step()
    assert (
        min(rates[: int(0.9 * len(rates))]) > 0.4
    )  # between its peak and half of it, where it would have fallen to 0.1


def test_a_resumed_run_goes_on_with_the_same_batches(points):
    def make(**changes: Any) -> Any:
        return salience.Loader(points, 25, epochs=8, grow=Growth(most=100, shape="linear", **changes))

    whole, loader = run(make(), 8), make()
    part = run(loader, 8, stop=90)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert part + run(again, 8) == whole
    with pytest.raises(StateError, match="grow"):
        make(rule="adam").load_state_dict(loader.state_dict())


def test_the_plan_has_the_size(points):
    loader = salience.Selector(400, batch_size=25, epochs=4, grow=Growth(most=100, shape="linear"))
    sizes = []
    for _ in range(4):
        for ids, _ in loader:
            loader.loss(ids.float())
        assert loader.plan is not None
        sizes.append((loader.plan.batch_size, loader.plan.lr_scale))
    assert sizes == [(25, 1.0), (25, 1.0), (50, 2.0), (100, 4.0)]


def test_what_cannot_grow_is_refused(points, tmp_path):
    with pytest.raises(ConfigError, match="needs epochs"):
        salience.Loader(points, 25, grow=Growth(most=100))
    with pytest.raises(ConfigError, match="Did you mean 'sgd'"):
        Growth(most=100, rule="sdg")
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        Growth(most=100, shape="liner")
    with pytest.raises(ConfigError, match="most is 0"):
        Growth(most=0)
