"""What iter(loader) returns behaves as DataLoader's does, and a second one never spoils the first."""

from __future__ import annotations

import gc
import multiprocessing
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import salience
from salience.errors import ConfigError, LossError, StateError

N = 200


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(N), torch.arange(N) % 4)


def feed_losses(loader, x):
    return loader.loss(x.float() % 7)


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_peek_inside_the_loop_spoils_nothing(select, workers):
    def run(peeks):
        loader = salience.Loader(numbers(), 10, epochs=3, select=select, num_workers=workers)
        seen = []
        for _ in range(2):
            for k, (x, _) in enumerate(loader):
                feed_losses(loader, x)
                seen.append(x.tolist())
                if peeks and k % 10 == 5:
                    assert len(next(iter(loader))[0]) == 10
        return seen, loader.ledger.seen.copy(), loader.visits

    (plain, seen, visits), (peeked, seen_too, visits_too) = run(peeks=False), run(peeks=True)
    assert peeked[:20] == plain[:20]
    assert len(peeked) == len(plain)
    assert visits == visits_too
    np.testing.assert_array_equal(np.bincount(np.concatenate(peeked), minlength=N), seen_too)
    np.testing.assert_array_equal(np.bincount(np.concatenate(plain), minlength=N), seen)


def test_peeks_when_observing_draw_what_a_dataloader_would():
    def run(loader):
        seen = []
        for _ in range(2):
            for k, (x, _) in enumerate(loader):
                seen.append(x.tolist())
                if k == 3:
                    seen.append(next(iter(loader))[0].tolist())
        return seen

    plain = DataLoader(numbers(), 10, shuffle=True, generator=torch.Generator().manual_seed(0))
    assert run(salience.Loader(numbers(), 10)) == run(plain)


def test_two_iterators_at_once_each_deliver_every_sample_once():
    loader = salience.Loader(numbers(), 10)
    pairs = list(zip(loader, loader, strict=True))
    for side in (0, 1):
        assert sorted(torch.cat([pair[side][0] for pair in pairs]).tolist()) == list(range(N))
    assert (loader.epoch, loader.visits) == (1, N), "one of them counts"


def test_the_first_iterator_to_deliver_is_the_one_that_counts():
    loader = salience.Loader(numbers(), 10, epochs=2, select="default")
    unused, used = iter(loader), iter(loader)
    first = torch.cat([x for x, _ in used])
    assert loader.epoch == 1
    assert sorted(first.tolist()) == sorted(loader.plan.ids.tolist())
    del unused


def test_iter_plans_and_a_window_is_used_up_only_once_a_batch_is_taken():
    loader = salience.Loader(numbers(), 10, epochs=8, select="default")
    for _ in range(3):
        for x, _ in loader:
            feed_losses(loader, x)
    iter(loader)
    plan, length = loader.plan, len(loader)
    assert plan.window == 3
    it = iter(loader)
    assert loader.plan.ids.tolist() == plan.ids.tolist()
    assert len(it) == length == sum(1 for _ in it)
    assert loader.epoch == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unused_iter_draws_what_a_dataloader_would(workers):
    def run(loader):
        iter(loader)
        return [x.tolist() for _ in range(2) for x, _ in loader]

    plain = DataLoader(numbers(), 10, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=workers)
    assert run(salience.Loader(numbers(), 10, num_workers=workers)) == run(plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_stops_at_len_has_finished_its_window(workers):
    def run(loader):
        seen = []
        for _ in range(3):
            it = iter(loader)
            seen += [next(it)[0].tolist() for _ in range(len(loader))]
        return seen

    plain = DataLoader(numbers(), 10, shuffle=True, generator=torch.Generator().manual_seed(0), num_workers=workers)
    log = salience.events.EventLog()
    loader = salience.Loader(numbers(), 10, epochs=3, log=log, num_workers=workers)
    heard = []
    log.listen(heard.append)
    assert run(loader) == run(plain)
    loader.state_dict()
    ends = [event for event in heard if event["kind"] == "window"]
    assert [event["finished"] for event in ends] == [True, True, True]
    assert loader.progress == 1.0


class Files(Dataset):
    """Has to be opened in each worker, as a file or a connection."""

    def __init__(self) -> None:
        self.opened = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        return i if self.opened else -1


def open_files(worker: int) -> None:
    get_worker_info().dataset.opened += 1


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_info_names_the_users_data_set(context):
    loader = salience.Loader(Files(), 8, num_workers=2, worker_init_fn=open_files, multiprocessing_context=context)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))


def test_an_iterator_taken_before_a_resume_is_refused():
    loader = salience.Loader(numbers(), 10, epochs=2)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="call iter"):
        next(it)
    assert sum(1 for _ in loader) == N // 10 - 1, "it ate none of the batches"


def test_a_window_that_is_broken_off_is_over_when_its_iterator_is_gone():
    loader = salience.Loader(numbers(), 10, epochs=3)
    for x, _ in loader:
        feed_losses(loader, x)
        break
    gc.collect()
    assert sum(1 for _ in loader) == N // 10
    assert loader.epoch == 2
    assert loader.visits == 10 + N


def test_a_selector_can_be_peeked_at_too():
    selector = salience.Selector(N, batch_size=10, epochs=2, select="default")
    seen = []
    for ids, _ in selector:
        selector.loss(ids.float())
        peeked, weights = next(iter(selector))
        assert len(peeked) == len(weights) == 10
        seen += ids.tolist()
    assert len(seen) == len(set(seen)) == selector.visits


def test_an_old_iterator_that_somebody_still_holds_is_named():
    loader = salience.Loader(numbers(), 10, epochs=5)
    held = iter(loader)
    for _ in range(len(loader)):
        feed_losses(loader, next(held)[0])
    again = iter(loader)  # the last epoch has not been told that it is over
    x, _ = next(again)
    with pytest.raises(LossError, match="del it"):
        feed_losses(loader, x)
    del held, again
    assert sum(1 for _ in loader) == N // 10
    assert (loader.epoch, loader.visits) == (2, 2 * N)


def test_after_a_resume_iterators_taken_before_do_not_count_as_in_use():
    loader = salience.Loader(numbers(), 10, epochs=5)
    state, it = loader.state_dict(), iter(loader)
    next(it)
    loader.load_state_dict(state)
    assert sum(1 for _ in loader) == N // 10
    assert (loader.epoch, loader.visits) == (1, N)


def test_a_state_that_is_refused_leaves_the_iterator_in_use():
    loader = salience.Loader(numbers(), 10, epochs=5)
    it = iter(loader)
    next(it)
    with pytest.raises(StateError):
        loader.load_state_dict({"version": 1})
    assert sum(1 for _ in it) == N // 10 - 1


def test_a_rollback_in_the_same_process_forgets_what_came_after_it():
    loader = salience.Loader(numbers(), 10, epochs=5)
    state = loader.state_dict()
    for x, _ in loader:
        feed_losses(loader, x)
    loader.load_state_dict(state)
    assert loader.ledger.seen.sum() == 0
    for x, _ in loader:
        feed_losses(loader, x)
    assert (loader.ledger.seen == 1).all()


def test_ids_may_be_changed_in_place_by_the_loop():
    loader = salience.Loader(numbers(), 10, with_ids=True)
    for ids, (x, _) in loader:
        feed_losses(loader, x)
        ids.add_(1)
    assert (loader.ledger.seen == 1).all()
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(N) % 7)


@pytest.mark.parametrize("select", [None, "default"])
def test_a_state_saved_after_peeks_goes_on_exactly(select):
    """Pictures are logged every ten batches, and accuracy is measured by a pass inside the epoch."""

    def make():
        return salience.Loader(numbers(), 10, epochs=3, select=select)

    def go(loader, seen, stop=None, peeks=True):
        while loader.epoch < 3:
            for x, _ in loader:
                feed_losses(loader, x)
                seen.append(x.tolist())
                if peeks and len(seen) % 10 == 5:
                    next(iter(loader))
                    assert sum(len(x) for x, _ in loader) == N
                if len(seen) == stop:
                    return loader.state_dict()
        return None

    plain, seen = make(), []
    go(plain, expected := [], peeks=False)
    state = go(make(), seen, stop=16)
    loader = make()
    loader.load_state_dict(state)
    go(loader, seen)
    assert seen[:20] == expected[:20]
    assert loader.visits == plain.visits == sum(map(len, seen))
    np.testing.assert_array_equal(np.bincount(np.concatenate(seen), minlength=N), loader.ledger.seen)


def test_iter_starts_the_workers():
    loader = salience.Loader(range(N), 10, num_workers=2)
    it = iter(loader)
    assert len(multiprocessing.active_children()) == 2
    assert len(it) == N // 10


def test_losses_of_a_peek_are_refused_and_named():
    loader = salience.Loader(numbers(), 10)
    it = iter(loader)
    x, _ = next(it)
    feed_losses(loader, x)
    peeked, _ = next(iter(loader))
    with pytest.raises(LossError, match="does not count"):
        feed_losses(loader, peeked)


def test_a_second_loss_with_ids_is_refused_as_one_without():
    loader = salience.Loader(numbers(), 10, with_ids=True)
    it = iter(loader)
    first, _ = next(it)
    next(it)
    loader.loss(first.float(), ids=first)
    with pytest.raises(LossError, match="twice"):
        loader.loss(first.float(), ids=first)
    loader.loss(first.float(), ids=first, again=True)
    not_yet = torch.from_numpy(loader.plan.shard().ids(5).copy())
    with pytest.raises(LossError, match="was delivered"):
        loader.loss(not_yet.float(), ids=not_yet)


def test_len_is_exact_while_the_last_epochs_iterator_is_still_held():
    loader = salience.Loader(numbers(), 10, epochs=4, select="infobatch")
    for _ in range(4):
        it = iter(loader)
        said, seen = len(it), [feed_losses(loader, x) for x, _ in it]
        assert said == len(seen)


@pytest.mark.parametrize("select", [None, "default"])
def test_threads_each_get_every_sample_once(select):
    loader = salience.Loader(numbers(), 10, epochs=30, select=select)
    begin, seen, failed = threading.Barrier(3), [], []

    def go_through():
        try:
            it = iter(loader)
            first, _ = next(it)
            begin.wait()  # one counts, the others are peeks
            seen.append(first.tolist() + [i for x, _ in it for i in x.tolist()])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go_through) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [sorted(ids) for ids in seen] == [list(range(N))] * 3


def test_a_value_that_is_refused_leaves_the_loader_as_it_was():
    loader = salience.Loader(numbers(), 10)
    with pytest.raises(ValueError, match="multiprocessing_context"):
        loader.multiprocessing_context = "no such"
    loader.timeout = 0
    assert sum(1 for _ in loader) == N // 10


@pytest.mark.parametrize("name", ["dataset", "select", "epochs", "augment", "seed", "window", "log"])
def test_what_a_loader_was_made_with_cannot_be_set(name):
    loader = salience.Loader(numbers(), 10)
    with pytest.raises(ConfigError, match=f"make a new one with {name}="):
        setattr(loader, name, None)


def test_a_trace_of_an_observed_run_has_the_order_that_was_delivered(tmp_path):
    loader = salience.Loader(numbers(), 10, epochs=1, trace=tmp_path)
    unused = iter(loader)
    seen = torch.cat([x for x, _ in loader]).tolist()
    assert salience.Trace(tmp_path).read(0).ids.tolist() == seen
    del unused


def test_a_loop_cut_to_the_length_of_the_window_before_is_told():
    """It stops at len() without running into the end, and asks for the next length before that window is planned."""
    loader = salience.Loader(range(200), 10, epochs=4, select="default")
    for _ in range(4):
        length = len(loader)
        for number, batch in enumerate(loader):
            loader.loss(batch.float())
            if number + 1 == length:
                break
    next(iter(loader))  # the last window is closed when another one begins
    said = [event["text"] for event in loader.events.recent if event.kind == "warning"]
    assert [text for text in said if "what len() said before the window was planned" in text]
