"""Batches that cannot be made, time-outs, signals, killed workers: the rest can be had, and nothing waits forever."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import salience
from salience.errors import DataError, StateError

N = 200


class Fragile(Dataset):
    """One sample cannot be read."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> int:
        if i == 17:
            raise OSError("sample 17 is broken")
        return i


class Slow(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        time.sleep(0.002)
        return i


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_the_epoch_can_be_had_after_an_exception(workers):
    def run(loader):
        it, seen, errors = iter(loader), [], 0
        while True:
            try:
                seen += next(it).tolist()
            except StopIteration:
                return seen, errors
            except OSError:
                errors += 1

    plain = DataLoader(Fragile(), 5, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=workers)
    seen, errors = run(salience.Loader(Fragile(), 5, num_workers=workers))
    assert (seen, errors) == run(plain)
    assert (len(seen), errors) == (45, 1)


def test_an_epoch_with_a_batch_that_failed_is_over_at_its_end_and_resumes_as_such():
    loader = salience.Loader(Fragile(), 5, epochs=3)
    it, batches = iter(loader), 0
    while True:
        try:
            next(it)
            batches += 1
        except StopIteration:
            break
        except OSError:
            continue
    assert (batches, loader.epoch) == (9, 1)
    again = salience.Loader(Fragile(), 5, epochs=3)
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    assert len(again) == 10


def test_an_iterator_that_another_one_took_over_from_has_the_rest_of_its_order():
    loader = salience.Loader(Fragile(), 5, epochs=3, generator=torch.Generator().manual_seed(5))
    it, seen = iter(loader), []
    with pytest.raises(OSError, match="sample 17"):
        while True:
            seen += next(it).tolist()
    other = iter(loader)
    next(other)
    visits = loader.visits
    rest = [i for batch in it for i in batch.tolist()]
    assert rest
    assert len({*seen, *rest}) == len(seen) + len(rest) == 45
    assert loader.visits == visits, "they do not count"


def test_in_a_selecting_run_an_iterator_that_another_one_took_over_from_is_refused():
    loader = salience.Loader(Fragile(), 5, epochs=3, select="uniform")
    it = iter(loader)
    with pytest.raises(OSError, match="sample 17"):
        while True:
            next(it)
    other = iter(loader)
    next(other)
    with pytest.raises(StateError, match="taken over"):
        next(it)


class Late(Dataset):
    """One sample comes after the time-out."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        if i == 7:
            time.sleep(2.5)
        return i


def test_the_rest_of_the_epoch_can_be_had_after_a_time_out():
    def run(loader):
        it, seen, late = iter(loader), [], 0
        while True:
            try:
                seen.append(next(it).tolist())
            except StopIteration:
                return seen, late > 0
            except RuntimeError as error:
                late += "timed out" in str(error)

    plain = DataLoader(Late(), 5, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=1, timeout=1)
    assert run(salience.Loader(Late(), 5, num_workers=1, timeout=1)) == run(plain)


class Interrupted(Dataset):
    """Somebody presses Ctrl-C while a sample is read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        if i == 7:
            signal.raise_signal(signal.SIGINT)
        return i


def test_the_rest_of_the_epoch_can_be_had_after_a_signal():
    def run(loader):
        it, seen = iter(loader), []
        while True:
            try:
                seen.append(next(it).tolist())
            except StopIteration:
                return seen
            except KeyboardInterrupt:
                seen.append("interrupted")

    plain = DataLoader(Interrupted(), 5, shuffle=True, generator=torch.Generator().manual_seed(0))
    assert run(salience.Loader(Interrupted(), 5)) == run(plain)


@pytest.mark.parametrize("window", [None, 16])
def test_a_window_of_which_no_batch_can_be_read_is_passed_over(window):
    """It was opened again and again, so that the loop never came to an end."""
    loader = salience.Loader(Fragile(), 10, epochs=2, window=window, drop_last=True)
    for _ in range(2):
        it, seen, errors = iter(loader), 0, 0
        while errors < 10:
            try:
                seen += len(next(it))
            except StopIteration:
                break
            except OSError:
                errors += 1
        assert (seen, errors) == (40, 1)
    assert loader.epoch == 2


def test_after_an_error_in_a_worker_the_next_epoch_counts():
    """What torch raises keeps its frames, and the iterator with them, in a cycle that only the garbage collector ends."""
    loader = salience.Loader(Fragile(), 5, epochs=3, num_workers=1, generator=torch.Generator().manual_seed(5))

    def until_it_failed():
        it = iter(loader)
        for _ in range(10):
            try:
                next(it)
            except OSError:
                return next(it)

    gc.disable()
    try:
        until_it_failed()
        before, it = loader.visits, iter(loader)
        assert loader.visits == before
        loader.loss(next(it).float())
        assert loader.epoch == 1
    finally:
        gc.enable()


class Ending(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        return next(iter(())) if i == 7 else i


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_stop_iteration_does_not_end_the_epoch_unnoticed(workers):
    it, seen = iter(salience.Loader(Ending(), 5, num_workers=workers)), 0
    with pytest.raises(DataError, match="raised StopIteration for the samples"):
        while True:
            seen += len(next(it))
    assert seen + sum(map(len, it)) == 15


def test_a_collate_function_that_raises_stop_iteration_does_not_end_the_epoch_unnoticed():
    with pytest.raises(DataError, match="The collate function raised StopIteration"):
        list(salience.Loader(range(20), 5, collate_fn=lambda samples: next(iter(()))))


@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_worker_was_killed_the_rest_of_the_window_can_be_had(persistent):
    loader = salience.Loader(Slow(), 10, epochs=2, num_workers=2, persistent_workers=persistent)
    it, seen = iter(loader), []
    with pytest.raises(RuntimeError, match="DataLoader worker"):  # torch raises it wherever the main thread is
        for batch in it:
            seen += batch.tolist()
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    for _ in range(2):  # a DataLoader would wait forever
        with pytest.raises((RuntimeError, StateError), match="worker"):
            while True:
                seen += next(it).tolist()
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="before load_state_dict"):
        next(it)
    seen += [i for batch in loader for i in batch.tolist()]
    assert sorted(seen) == list(range(len(Slow())))
    assert len([*loader]) == len(loader)


def test_an_iterator_whose_worker_was_killed_stays_refused_after_a_resume_in_the_same_process():
    loader = salience.Loader(Slow(), 10, epochs=2, num_workers=2)
    seen: list[int] = []

    def until_a_worker_is_killed(it):
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            while True:
                seen.extend(next(it).tolist())
                loader.loss(torch.ones(10))
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    first = iter(loader)
    until_a_worker_is_killed(first)
    loader.load_state_dict(loader.state_dict())
    second = iter(loader)
    seen += next(second).tolist()
    loader.loss(torch.ones(10))
    for _ in range(2):
        with pytest.raises(StateError, match="before load_state_dict"):
            next(first)
    until_a_worker_is_killed(second)
    loader.load_state_dict(loader.state_dict())
    for batch in loader:
        seen += batch.tolist()
        loader.loss(batch.float())
    assert sorted(seen) == list(range(N))
    assert (loader.ledger.seen == 1).all()


def test_workers_that_are_killed_between_two_epochs_are_replaced_at_the_second_iter():
    loader = salience.Loader(range(N), 10, epochs=2, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == N // 10
    with pytest.raises(RuntimeError, match="DataLoader worker"):  # torch raises it wherever the main thread is
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        time.sleep(1)
        iter(loader)
    for _ in range(2):
        try:
            found = torch.cat(list(loader)).tolist()
        except RuntimeError:
            continue  # it was raised above in place of what iter() raises
    assert sorted(found) == list(range(N))
