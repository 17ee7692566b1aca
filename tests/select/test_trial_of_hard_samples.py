"""The trial on hard samples: drawn at random, ended as drawn, told from each other, saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.errors import StateError
from salience.ledger import Ledger
from salience.select.trial import (
    AFTER,
    BEFORE,
    FEWEST_ON_TRIAL,
    ID,
    RESTS,
    SEEN,
    WINDOW,
    WINDOWS_POOLED,
    advance,
    carried,
    on_trial,
)

N = 2000


def seen_once(hard: float = 0.5) -> Ledger:
    """A ledger after one window: a share `hard` of the samples has p(label) .2, the others .9."""
    ledger = Ledger(N)
    p = np.where(np.arange(N) < hard * N, 0.2, 0.9).astype(np.float32)
    ledger.last_loss[:], ledger.confidence[:] = -np.log(p), p
    ledger.seen[:], ledger.last_seen[:] = 1, 0
    return ledger


def visit(ledger: Ledger, ids: np.ndarray, window: int, p: float) -> None:
    ledger.last_loss[ids] = -np.log(p)
    ledger.seen[ids] += 1
    ledger.last_seen[ids] = window


def test_a_tenth_of_the_hard_samples_rests_and_as_many_others_are_visited():
    ledger = seen_once()
    advance(ledger, 1, seed=3)
    rests, visited = on_trial(ledger.trial, 1)
    assert (len(rests), len(visited)) == (100, 100)
    assert len(set(rests) | set(visited)) == 200
    assert max(*rests, *visited) < N // 2, "only hard ones"
    again = seen_once()
    advance(again, 1, seed=3)
    np.testing.assert_array_equal(again.trial, ledger.trial)
    assert set(on_trial(ledger.trial, 2)[1]) == set(rests) | set(visited), "all of them are visited in the next window"


def test_what_they_gained_is_read_from_their_visits_in_the_next_window():
    ledger = seen_once()
    advance(ledger, 1, seed=0)
    rests, visited = on_trial(ledger.trial, 1)
    visit(ledger, visited, 1, 0.3)
    advance(ledger, 2, seed=0)
    assert np.isnan(carried(ledger.trial)), "not over"
    visit(ledger, visited, 2, 0.6)
    visit(ledger, rests, 2, 0.4)
    advance(ledger, 3, seed=0)
    over = ledger.trial[ledger.trial[:, WINDOW] == 1]
    np.testing.assert_allclose(over[:, AFTER], np.where(over[:, RESTS] == 1, 0.4, 0.6), rtol=1e-5)
    assert carried(ledger.trial) == pytest.approx(0.2 / 0.4, rel=1e-4)


def test_samples_that_were_not_visited_as_drawn_do_not_count():
    ledger = seen_once()
    advance(ledger, 1, seed=0)
    rests, visited = on_trial(ledger.trial, 1)
    visit(ledger, visited, 1, 0.3)
    visit(ledger, rests[:10], 1, 0.3)  # a filter forced them
    advance(ledger, 2, seed=0)
    visit(ledger, visited[5:], 2, 0.6)  # five were left out
    visit(ledger, rests, 2, 0.4)
    ledger.last_loss[visited[5]] = np.inf
    advance(ledger, 3, seed=0)
    over = ledger.trial[ledger.trial[:, WINDOW] == 1, ID].astype(int)
    assert set(over) == (set(rests[10:]) | set(visited[6:]))


def test_trials_follow_each_other_without_sharing_samples_and_old_ones_go():
    ledger = seen_once()
    for window in range(1, 9):
        advance(ledger, window, seed=0)
        now = ledger.trial[ledger.trial[:, WINDOW] == window, ID]
        before = ledger.trial[ledger.trial[:, WINDOW] == window - 1, ID]
        assert not set(now) & set(before)
        ids = np.setdiff1d(np.arange(N), on_trial(ledger.trial, window)[0])
        visit(ledger, ids, window, 0.3)
    assert set(ledger.trial[:, WINDOW]) == set(range(8 - 1 - WINDOWS_POOLED, 9))
    np.testing.assert_allclose(ledger.trial[:, BEFORE] > 0, True)


def test_too_few_hard_samples_are_not_tried():
    ledger = seen_once(hard=10 * (FEWEST_ON_TRIAL - 1) / N)
    advance(ledger, 1, seed=0)
    assert not len(ledger.trial)
    assert not len(Ledger(5).trial)


def test_nothing_gained_is_no_outcome():
    rows = np.full((200, 6), 0.5)
    rows[:, RESTS] = np.arange(200) % 2
    assert np.isnan(carried(rows))
    assert np.isnan(carried(rows[:50]))


# ---------------------------------------------------------------- in a run


def train(selector: salience.Selector, x: torch.Tensor, y: torch.Tensor, windows: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(x.shape[1], 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(windows):
        for ids, _ in selector:
            logits = model(x[ids])
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 10, generator=g)
    return x, (x @ torch.randn(10, 4, generator=g) + 0.5 * torch.randn(N, 4, generator=g)).argmax(1)


def test_where_what_is_hard_is_learnt_with_the_others_it_is_preferred_and_that_is_said():
    x, y = problem()  # a linear model learns one rule from all of them
    selector = salience.Selector(N, batch_size=50, epochs=12, select="default", labels=y)
    train(selector, x, y, 7)
    assert carried(selector.ledger.trial) > 0.75
    said = {note.name: note for note in selector.plan.notes}["unsure"]
    assert "what others did: the unsure are preferred" in said.reason
    assert said.dropped == 0
    rests, visited = on_trial(selector.ledger.trial, selector.plan.window)
    assert not set(rests) & set(selector.plan.ids)
    assert set(visited) <= set(selector.plan.ids)


def test_a_trial_survives_a_checkpoint():
    x, y = problem()
    whole = salience.Selector(N, batch_size=50, epochs=12, select="default", labels=y)
    train(whole, x, y, 5)
    state = whole.state_dict()
    later = salience.Selector(N, batch_size=50, epochs=12, select="default", labels=y)
    later.load_state_dict(state)
    np.testing.assert_array_equal(later.ledger.trial, whole.ledger.trial)
    assert len(whole.ledger.trial)


def test_a_ledger_of_another_run_brings_no_trial_along():
    ledger = seen_once()
    advance(ledger, 1, seed=0)
    assert not len(salience.Selector(N, batch_size=50, epochs=12, select="default", ledger=ledger).ledger.trial)
    assert len(ledger.grown(N + 5).trial) == len(ledger.trial)


@pytest.mark.parametrize(
    ("column", "value"),
    [(WINDOW, 0.5), (ID, N), (ID, -1), (RESTS, 2), (SEEN, np.nan), (BEFORE, np.inf), (BEFORE, -1), (AFTER, np.inf)],
)
def test_rows_that_no_trial_gives_are_refused(column, value):
    ledger = seen_once()
    advance(ledger, 1, seed=0)
    state = ledger.state_dict()
    state["trial"][3, column] = value
    with pytest.raises(StateError, match="on trial"):
        Ledger(N).load_state_dict(state)
    with pytest.raises(StateError, match="on trial"):
        Ledger(N).load_state_dict(state | {"trial": np.zeros((3, 5))})
