"""Presets against their rule on examples small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.select import Candidates, Clock, Pipeline, View, preset
from salience.select.filters import coarse
from salience.select.pick import RecentLosses
from salience.select.reference import reference_of
from salience.select.samplers import slide

N = 10


def known(losses) -> Ledger:
    ledger = Ledger(len(losses))
    for window in range(4):
        ledger.record(np.arange(len(losses)), {"loss": np.array(losses, dtype=np.float32)}, window=window)
    return ledger


def planned(name: str, ledger: Ledger, window: int, reference=None, windows: int = 10) -> list[int]:
    found = None if reference is None else reference_of(reference, ledger.n)
    pipeline = Pipeline(preset(name), reference=found, strict=True)
    plan = pipeline.plan(ledger, window=window, windows=windows, batch_size=1, seed=0)
    assert (plan.weights == 1).all()
    return sorted(plan.ids.tolist())


def test_rho_takes_what_is_hard_here_and_easy_elsewhere():
    here = np.arange(N, dtype=np.float32)  # 0 the easiest ... 9 the hardest
    there = np.array([0, 0, 0, 0, 0, 0, 0, 7, 8, 9], dtype=np.float32)  # the three hardest are hard for anyone
    assert planned("rho", known(here), 5, there) == [3, 4, 5, 6]  # 40% of 10 by 0 1 2 3 4 5 6 0 0 0
    assert planned("rho", known(here), 0, there) == list(range(N))  # everything at both ends
    assert planned("rho", known(here), 9, there) == list(range(N))


def test_proxy_takes_the_same_half_in_every_window_whatever_is_learnt():
    there = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], dtype=np.float32)
    for window in (0, 5, 9):
        for here in (np.arange(N), np.arange(N)[::-1]):
            assert planned("proxy", known(here), window, there) == [0, 1, 2, 3, 4]


def test_fine_pruning_lets_the_highest_losses_rest_for_four_epochs_in_seven():
    losses = known([5, 0, 9, 1, 8, 2, 7, 3, 6, 4])
    windows = [planned("fine_pruning", losses, window, windows=15) for window in range(15)]
    whole = [window for window, ids in enumerate(windows) if len(ids) == N]
    assert whole == [0, 1, 2, 7, 8, 9, 14]
    assert all(ids == [0, 1, 3, 5, 6, 7, 8, 9] for window, ids in enumerate(windows) if window not in whole)


def test_fine_pruning_says_its_saving_in_advance():
    selector = salience.Selector(400, batch_size=20, epochs=14, select="fine_pruning")
    assert (
        selector.visits_expected == 14 * 400 - 7 * 100
    )  # the last window is whole, in place of the eighth prune epoch
    assert selector.total_steps == selector.visits_expected // 20
    assert "It makes 4,900 of 5,600 visits, 12.5% fewer" in selector.report()


def test_the_rule_that_was_called_fine_pruning_is_named_where_a_reference_is_given():
    selector = salience.Selector(10, epochs=9, select="fine_pruning", reference=np.arange(10.0))
    said = [event["text"] for event in selector.events.recent if event["kind"] == "warning"]
    assert said == [
        "'fine_pruning' is now the published rule and asks no reference; the rule of that name before is 'coarse_to_fine'."
    ]


def test_coarse_to_fine_drops_the_easiest_of_every_class_for_good_and_selects_among_the_rest():
    ledger = known([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    ledger.label[:] = [0] * 4 + [1] * 6
    there = [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    # 30% of 4 is 1, of 6 also 1: samples 0 and 4 are out, hard as 0 is here.
    assert planned("coarse_to_fine", ledger, 9, there) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert planned("coarse_to_fine", ledger, 5, there) == [1, 2, 3, 5]  # 40% of 10, the hardest of the others


def test_coarse_takes_its_share_of_every_class_and_keeps_what_nobody_knows():
    ledger = known(np.zeros(9))
    ledger.label[:] = [2, 2, 2, 2, 0, 0, 0, 0, -1]
    seen = View(ledger, Clock(window=3, windows=9), reference_of([4, 3, 2, 1, 8, 7, 6, float("nan"), 0.5], 9))
    assert np.flatnonzero(~coarse(seen, drop=0.5).keep).tolist() == [2, 3, 5, 6]
    with pytest.raises(ConfigError, match="drop is 1"):
        coarse(seen, drop=1)


def test_coarse_waits_for_the_classes_so_that_its_choice_is_made_once():
    ledger = known(np.zeros(4))
    ledger.seen[1] = 0
    assert coarse(View(ledger, Clock(window=3, windows=9), reference_of([1, 2, 3, 4], 4))).keep is None


@pytest.mark.parametrize(("window", "first"), [(2, 1), (4, 2), (6, 4), (7, 4)])
def test_the_window_slides_from_easy_to_hard(window, first):
    # 10 samples, 5 at a time: first = round(5 * time / 0.8), time = window / 10: 1.25, 2.5, 3.75, 4.375
    assert planned("window", known(np.arange(N)), window) == list(range(first, first + 5))


def test_slide_reaches_both_ends():
    have = Candidates(
        view=View(Ledger(N), Clock(window=8, windows=10, keep=0.3)), ids=np.arange(N),
        importance=np.linspace(1, 0, N, dtype=np.float32), raw_of_all=np.zeros(N, dtype=np.float32),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    assert sorted(slide(have, 3, rng, begin=0, until=0.8).positions) == [0, 1, 2]
    assert sorted(slide(have, 3, rng, begin=0.9, until=1.0).positions) == [7, 8, 9]
    with pytest.raises(ConfigError, match=r"begin is 0\.9, until 0\.5"):
        slide(have, 3, rng, begin=0.9, until=0.5)


def test_selective_backprop_trains_on_the_harder_half_of_every_batch_by_itself():
    selector = salience.Selector(40, batch_size=20, epochs=2, select="selective_backprop")
    for ids, weights in selector:
        parameter = torch.ones(20, requires_grad=True)
        hardness = ids.float() + 1
        loss = selector.loss(hardness * parameter)
        loss.backward()
        picked = parameter.grad != 0
        assert picked.sum() == 10
        torch.testing.assert_close(loss, hardness[picked].mean())  # weights: none
        assert (weights == 1).all()
    assert (selector.ledger.seen == 1).all()
    assert selector.ledger.trained.sum() == 20


def test_selective_backprop_picks_as_often_as_the_percentile_says():
    """One batch of 40, half of it drawn with P ~ percentile^1 without replacement, against NumPy drawing the same."""
    runs, hits = 400, np.zeros(4)
    for seed in range(runs):
        selector = salience.Selector(40, batch_size=40, epochs=1, select="selective_backprop", seed=seed)
        for ids, _ in selector:
            selector.loss(ids.float())
        hits += selector.ledger.trained.reshape(4, 10).sum(1)
    rng, rule, draws = np.random.default_rng(0), np.zeros(4), 4000
    chance = np.arange(1, 41) / np.arange(1, 41).sum()
    for _ in range(draws):
        rule += np.bincount(rng.choice(40, 20, replace=False, p=chance) // 10, minlength=4)
    share, wanted = hits / (10 * runs), rule / (10 * draws)
    error = np.sqrt(wanted * (1 - wanted) / (10 * runs))
    assert (np.abs(share - wanted) < 4 * error).all()
    assert wanted[3] - wanted[0] > 20 * error.max()  # the test can tell


def test_a_loop_that_picks_itself_is_left_alone():
    selector = salience.Selector(40, batch_size=20, epochs=2, select="selective_backprop")
    for ids, _ in selector:
        keep = selector.pick(ids.float())
        assert len(keep) == 10
        torch.testing.assert_close(selector.loss(ids.float()[keep]), ids[keep].float().mean())
    assert selector.ledger.trained.sum() == 20
    next(iter(selector))
    with pytest.raises(ConfigError, match="share is 0"):
        selector.pick(torch.ones(20), share=0)


def test_percentiles_are_taken_over_recent_losses():
    recent = RecentLosses(capacity=4)
    assert recent.percentile(torch.tensor([1.0, 2.0])).tolist() == [0.5, 1.0]
    assert recent.percentile(torch.tensor([3.0, 0.0, 1.5])).tolist() == [1.0, 0.25, 0.5]  # of 2, 3, 0, 1.5
