"""A run that is counted in steps: it ends after so many batches, in the middle of an epoch, and progress ends with it."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import salience
from salience.errors import ConfigError
from salience.events import EventLog

from conftest import require

N, CLASSES = 230, 4


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, CLASSES, generator=g)).argmax(1))


def go(loader, stop=None):
    """Train to the end, or for `stop` steps: labels and progress of each batch."""
    seen, model = [], torch.nn.Linear(8, CLASSES)
    while loader.progress < 1:
        for x, y in loader:
            logits = model(x)
            loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            seen.append((y.tolist(), loader.progress))
            if len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "select", [None, "default", "infobatch", "uniform", {"preset": "uniform", "steps": "constant"}]
)
@pytest.mark.parametrize("steps", [3, 40, 150])
def test_a_run_has_as_many_batches_as_it_has_steps(steps, select, window):
    loader = salience.Loader(data(), 10, steps=steps, select=select, window=window)
    assert loader.total_steps == steps
    progress = [after for _, after in go(loader)]
    assert len(progress) == steps
    np.testing.assert_allclose(progress, np.arange(1, steps + 1) / steps)


def test_observed_batches_are_those_of_a_dataloader_that_is_left_after_so_many():
    g = torch.Generator().manual_seed(0)
    plain = DataLoader(data(), 10, shuffle=True, generator=g)
    batches = itertools.chain.from_iterable(iter(plain) for _ in range(3))
    expected = [y.tolist() for _, y in itertools.islice(batches, 60)]
    assert [labels for labels, _ in go(salience.Loader(data(), 10, steps=60))] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generator_ends_where_a_loop_with_a_break_leaves_it(workers):
    def plain():
        steps, loader = 0, DataLoader(data(), 10, shuffle=True, num_workers=workers)
        while True:
            for _, y in loader:
                yield y.tolist()
                if (steps := steps + 1) == 35:
                    return

    def ours():
        loader = salience.Loader(data(), 10, steps=35, generator="global", num_workers=workers)
        while loader.progress < 1:
            for _, y in loader:
                yield y.tolist()

    ends = []
    for run in (plain, ours):
        with torch.random.fork_rng():
            torch.manual_seed(4)
            ends.append((list(run()), torch.rand(1).item()))
    assert ends[0] == ends[1]


def test_selection_is_paced_over_the_steps():
    log, plans = EventLog(), []
    log.listen(lambda event: plans.append(event["picked"]) if event["kind"] == "plan" else None)
    loader = salience.Loader(data(), 10, steps=150, select={"preset": "uniform", "keep": "all_less_all"}, log=log)
    go(loader)
    assert plans[0] == 230 // 10 * 10, "all at the start"
    assert min(plans[2:-1]) <= 120, "less in the middle"
    assert plans[-1] > 120, "all at the end, but for what is cut"
    assert len(plans) == loader.epochs
    assert sum(plans) == 150 * 10


def test_len_is_cut_with_the_last_epoch():
    loader = salience.Loader(data(), 10, steps=40)
    assert len(loader) == 23
    go(loader, stop=23)
    list(itertools.islice(loader, 1))
    assert len(loader) == 17
    short = salience.Loader(data(), 10, steps=4)
    assert len(short) == 4


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("stop", [7, 23, 110, 119])
def test_a_run_that_is_resumed_ends_after_the_same_step(select, stop):
    whole = salience.Loader(data(), 10, steps=120, select=select)
    torch.manual_seed(0)
    expected = go(whole)
    first = salience.Loader(data(), 10, steps=120, select=select)
    torch.manual_seed(0)
    seen = go(first, stop=stop)
    again = salience.Loader(data(), 10, steps=120, select=select)
    again.load_state_dict(first.state_dict())
    torch.manual_seed(0)  # the same model, which is not trained
    assert seen + go(again) == expected


def test_a_schedule_ends_at_zero():
    loader = salience.Loader(data(), 10, steps=31, select="uniform")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = salience.ProgressLR(optimizer, loader, "linear")
    while loader.progress < 1:
        for x, _ in loader:
            loader.loss(x.sum(1))
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.0]


def test_a_loop_that_fetches_ahead_finds_no_batch_after_the_last_step():
    selector = salience.Selector(N, batch_size=10, steps=30)

    def batches():
        while selector.progress < 1:
            yield from selector

    stream = batches()
    following = next(stream)
    while following is not None:
        ids, _ = following
        following = next(stream, None)
        selector.loss(torch.rand(len(ids)), ids=ids)
    assert selector.visits == selector.ledger.seen.sum() == 300


def test_a_batch_that_was_fetched_and_left_is_not_counted_as_trained():
    selector = salience.Selector(N, batch_size=10, steps=30)
    batches = iter(selector)
    for _ in range(5):
        next(batches)
        selector.loss(torch.rand(10))
    next(batches)
    assert selector.ledger.seen.sum() == selector.ledger.trained.sum() == 50


def test_more_steps_than_said_go_on_and_that_is_said():
    log, said = EventLog(), []
    log.listen(lambda event: said.append(event["text"]) if event["kind"] == "warning" else None)
    selector = salience.Selector(N, batch_size=10, steps=30, select="uniform", log=log)
    while selector.progress < 1:
        for ids, _ in selector:
            selector.loss(ids.float())
    assert not said
    for ids, _ in selector:
        selector.loss(ids.float())
    assert selector.progress == 1
    assert ["More steps are made than steps=30" in text for text in said] == [True]


def test_its_report_says_how_many_epochs_the_steps_made_and_claims_no_visits_saved(tmp_path):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    loader = salience.Loader(data(), 10, steps=120, select="uniform", log=tmp_path / "run.jsonl")
    go(loader)
    text, page = loader.report(tmp_path / "x.html"), (tmp_path / "x.html").read_text()
    for told in (text, page):
        assert f"In 120 steps, selection made {loader.epoch} epochs; on all data they would be 5.2." in told
        assert " visits instead of " not in told
    assert "fewer" not in text
    assert "has not finished" not in page


def test_the_report_of_an_observed_run_claims_no_selection(tmp_path):
    require(importlib.util.find_spec("jinja2") is not None, "jinja2")
    loader = salience.Loader(data(), 10, steps=40, log=tmp_path / "run.jsonl")
    go(loader, stop=30)
    loader.report(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "No sample was left out." in page
    assert "selection made" not in page
    assert "The run has not finished: 23 of 40 steps are done." in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": 2.5}, "steps is 2.5; it must be an integer"),
        ({"steps": 5, "epochs": 2}, "epochs=2 and steps=5 both say how long the run is"),
        ({"steps": 5, "even": True}, "even=True fixes the batches of an epoch"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        salience.Loader(data(), 10, **options)
