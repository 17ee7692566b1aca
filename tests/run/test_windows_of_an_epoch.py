"""A window may be shorter than an epoch: `window=` samples are planned at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import salience
from salience.errors import ConfigError, StateError
from salience.events import EventLog

N = 205


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(N), torch.arange(N) % 4)


def passes(loader, epochs=2):
    seen = []
    for _ in range(epochs):
        for x, _ in loader:
            loader.loss(x.float() % 7)
            seen.append(x.tolist())
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [10, 64, "1k"])
def test_observing_in_pieces_is_bit_for_bit_a_dataloader(window, workers):
    plain = DataLoader(numbers(), 10, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=workers)
    loader = salience.Loader(numbers(), 10, window=window, epochs=2, num_workers=workers)
    assert len(loader) == len(plain)
    assert passes(loader) == [x.tolist() for _ in range(2) for x, _ in plain]
    assert (loader.epoch, loader.progress) == (2, 1.0)
    assert (loader.ledger.seen == 2).all()


def test_a_loop_that_stops_at_len_draws_in_pieces_what_it_does_with_a_dataloader():
    def run(loader, generator):
        seen = []
        for _ in range(3):
            it = iter(loader)
            seen += [next(it)[0].tolist() for _ in range(len(loader))]
        return seen, torch.rand((), generator=generator)

    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    plain = run(DataLoader(numbers(), 10, shuffle=True, generator=one), one)
    assert run(salience.Loader(numbers(), 10, window=50, generator=other), other) == plain


def test_every_sample_has_its_turn_once_in_the_full_windows_of_an_epoch():
    selector = salience.Selector(N, batch_size=10, epochs=4, window=50, select="default")
    for _ in range(4):
        for ids, _ in selector:
            selector.loss(ids.float() % 7, torch.randn(len(ids), 4), ids % 4)
    assert selector.epoch == 4
    assert selector.progress == pytest.approx(1.0)
    assert (selector.ledger.seen > 0).all()
    assert selector.plan.window == 4 * 5 - 1


def test_a_selecting_epoch_visits_in_pieces_about_what_it_visits_at_once():
    def visits(window):
        selector = salience.Selector(20_000, batch_size=10, epochs=10, window=window, select="uniform")
        return [sum(len(ids) for ids, _ in selector) for _ in range(3)]

    assert visits("2k") == visits(None) == [10_000] * 3


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("stop", [3, 5, 17, 20, 21, 30])
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not(select, stop):
    def make():
        return salience.Loader(numbers(), 10, epochs=3, window=50, select=select)

    whole = passes(make(), 3)
    first, seen = make(), []
    while len(seen) < stop:
        for x, _ in first:
            first.loss(x.float() % 7)
            seen.append(x.tolist())
            if len(seen) == stop:
                break
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    rest = passes(second, 3 - second.epoch)
    assert seen + rest == whole
    assert second.visits == sum(map(len, whole))


def test_windows_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="at least one batch"):
        salience.Selector(N, batch_size=10, window=9)
    with pytest.raises(ConfigError, match="write a number of samples"):
        salience.Selector(N, batch_size=10, window="many")
    state = salience.Selector(N, batch_size=10, window=50).state_dict()
    with pytest.raises(StateError, match="same window="):
        salience.Selector(N, batch_size=10).load_state_dict(state)


def test_pieces_mix_classes_that_lie_sorted_on_disk():
    labels = np.repeat(np.arange(4), 50)
    selector = salience.Selector(200, batch_size=10, epochs=4, window=50, select="uniform", labels=labels)
    for _ in selector:
        assert len(np.unique(labels[selector.plan.ids])) == 4


def test_a_state_saved_again_before_the_first_batch_loses_nothing():
    def make():
        return salience.Loader(numbers(), 10, epochs=2, window=50)

    loader = make()
    it = iter(loader)
    first = next(it)[0].tolist()
    states = [loader.state_dict()]
    for _ in range(2):
        loader = make()
        loader.load_state_dict(states[-1])
        states.append(loader.state_dict())
    assert [first, *(x.tolist() for x, _ in loader)] == passes(make(), 1)


def test_a_loop_that_fetches_ahead_may_be_late_across_windows():
    loader = salience.Loader(numbers(), 10, epochs=2, window=50, with_ids=True)
    last = None
    for ids, (x, _) in loader:
        if last is not None:
            loader.loss(last[1].float(), ids=last[0])
        last = ids, x
    loader.loss(last[1].float(), ids=last[0])
    assert (loader.ledger.seen == 1).all()


def test_what_is_left_of_an_epoch_that_was_broken_off_is_passed_over():
    loader = salience.Loader(numbers(), 10, epochs=4, window=50)
    for _ in range(2):
        for _ in loader:
            break
    assert sum(1 for _ in loader) == 21
    assert loader.epoch == 3


def test_auto_decides_at_the_edges_of_epochs(tmp_path):
    log = EventLog(tmp_path / "log.jsonl")
    for window in range(4):
        log.emit("settings", window=window, workers=0, cache=0, treat=False, select=window % 2 == 1)
    loader = salience.Loader(numbers(), 10, epochs=4, window=50, auto=tmp_path / "log.jsonl")
    for epoch in range(4):
        seen = torch.cat([x for x, _ in loader])
        assert len(seen.unique()) == len(seen) or epoch == 3, "nothing is visited twice in an epoch"
        if epoch % 2 == 0:
            assert len(seen) == N, "nothing is left out of a plain epoch"
