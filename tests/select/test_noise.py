"""The noise filter tells wrong labels from hard samples, says when there are none, and takes back what it misjudged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.select import Clock, View
from salience.select.noise import contradiction, direction, disagreement, edge_of, judge, noise, noise_rate, transitions
from salience.select.weights import scaled_weights

N, CLASSES = 3000, 6


def history(
    wrong: np.ndarray, *, windows: int = 8, seed: int = 0, neighbour: bool = False
) -> tuple[Ledger, np.ndarray]:
    """A ledger after training on labels of which `wrong` (bool [N]) are another class; 10% of the rest are hard.

    With `neighbour`, class c is labelled c + 1 and the model has half learnt that habit.
    """
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, CLASSES, N)
    step = 1 if neighbour else rng.integers(1, CLASSES, N)
    label = np.where(wrong, (truth + step) % CLASSES, truth)
    hard = ~wrong & (rng.random(N) < 0.1)
    ledger = Ledger(N)
    for window in range(windows):
        z = rng.normal(0, 1, (N, CLASSES))
        z[np.arange(N), truth] += np.where(hard, 0.8, 4.0)
        if neighbour:
            z[np.arange(N), (truth + 1) % CLASSES] += 3.0
        logits = torch.from_numpy(z).float()
        losses = F.cross_entropy(logits, torch.from_numpy(label), reduction="none")
        recorder = salience.ledger.Recorder(ledger)
        recorder.record(np.arange(N), losses, logits, torch.from_numpy(label), window=window)
        recorder.flush()
    return ledger, hard


def some(share: float) -> np.ndarray:
    return np.random.default_rng(5).random(N) < share


def verdict(ledger: Ledger, window: int = 8, before: float = 0.0, **options):
    return noise(View(ledger, Clock(window=window, windows=20, keep=0.4, noise=before)), **options)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_wrong_labels_are_found_and_counted_and_hard_samples_stay(share):
    wrong = some(share)
    ledger, hard = history(wrong)
    said = verdict(ledger)
    left_out = ~said.keep
    assert left_out[wrong].mean() > 0.8
    assert left_out[~wrong & ~hard].mean() < 0.01
    assert left_out[hard].mean() < 0.5
    assert said.noise == pytest.approx(share, abs=0.06)
    assert said.share == pytest.approx(min(0.65, 4 * said.noise))


def test_clean_labels_are_left_alone_and_hard_samples_may_be_preferred():
    ledger, _ = history(some(0))
    said = verdict(ledger)
    assert said.keep is None
    assert said.noise == 0
    assert "no sign of wrong labels" in said.reason


def test_a_model_that_has_hardly_learnt_anything_proves_nothing():
    """One that differs from half of the labels may be at fault itself: neither noise nor the lack of it is claimed."""
    assert np.isnan(noise_rate(0.5, 0.2, 0.01))
    assert noise_rate(0.3, 0.02, 0.01) == 0
    assert noise_rate(0.3, 0.15, 0.01) == 0.15
    assert noise_rate(0.5, 0.004, 0.01) != 0


def test_it_waits_for_two_visits_and_leaves_out_only_from_its_start_on():
    wrong = some(0.2)
    assert np.isnan(verdict(history(wrong, windows=1)[0]).noise)
    ledger, _ = history(wrong)
    early = verdict(ledger, window=3, start=0.3)
    assert early.keep is None
    assert np.isnan(early.noise)
    assert verdict(history(some(0))[0], window=3, start=0.3).noise == 0
    assert (~verdict(ledger, window=6, start=0.3).keep).any()


def test_labels_that_went_astray_one_way_are_told_by_their_direction():
    """Class c is labelled c + 1 in 40%, and the model all but believes it: margins alone say little."""
    wrong = some(0.4)
    ledger, _ = history(wrong, neighbour=True)

    def auroc(score: np.ndarray) -> float:
        rank = np.argsort(np.argsort(score))
        return (rank[wrong].mean() - (wrong.sum() - 1) / 2) / (~wrong).sum()

    plain = contradiction(ledger.margin, ledger.label)
    told = judge(ledger, before=0.3).suspicion
    assert auroc(told) > auroc(plain) + 0.02
    table = transitions(ledger.label, ledger.guess, ledger.guess_p)
    assert np.diag(table, 1).min() > 1.5 * np.diag(table, -1).max()
    both_ways = direction(ledger.label, ledger.other, (table + table.T) / 2)
    np.testing.assert_allclose(both_ways, 0, atol=1e-6)


def test_what_was_left_out_is_looked_at_again_with_weight_zero_and_taken_back_if_it_was_misjudged():
    wrong = some(0.3)
    ledger, _ = history(wrong)
    ledger.last_seen[:] = 7
    ledger.last_seen[wrong] = 4
    said = verdict(ledger)
    assert said.force[wrong].mean() > 0.8
    assert not said.force[~wrong].any()
    np.testing.assert_array_equal(said.factor == 0, said.force)
    misjudged = np.flatnonzero(said.force)[:5]
    ledger.margin[misjudged], ledger.guess[misjudged], ledger.last_seen[misjudged] = 3.0, ledger.label[misjudged], 8
    assert verdict(ledger, window=9, before=said.noise).keep[misjudged].all()


def test_old_margins_are_compared_with_those_of_their_time():
    wrong = some(0.3)
    ledger, _ = history(wrong)
    before = ~verdict(ledger).keep
    ledger.last_seen[~before] = 9
    ledger.last_seen[np.flatnonzero(~before)[::10]] = 7  # not drawn since, like those left out
    fresh = ledger.last_seen == 9
    ledger.margin[fresh] *= 3  # the model got surer, so that old margins look small
    assert (contradiction(ledger.margin, ledger.label)[before] < 0.75).mean() > 0.5
    assert (~verdict(ledger, window=10, before=0.3).keep)[before].mean() > 0.9


def test_suspected_samples_may_weigh_less_instead():
    wrong = some(0.3)
    said = verdict(history(wrong)[0], weight=0.25)
    assert said.keep is None
    assert said.force is None
    assert set(np.unique(said.factor)) == {np.float32(0.25), np.float32(1)}
    assert wrong[said.factor < 1].mean() > 0.85


def test_the_estimate_is_remembered_while_labels_still_look_wrong_and_forgotten_when_they_do_not():
    wrong = some(0.3)
    ledger, _ = history(wrong)
    ledger.guess_p[wrong] = 0.3  # left out and not looked at since: the model is surer of others by now
    assert judge(ledger).rate < 0.1 or np.isnan(judge(ledger).rate)
    assert judge(ledger, before=0.3).rate == pytest.approx(0.99 * 0.3)
    healed, _ = history(some(0))
    assert judge(healed, before=0.5).rate < 0.1
    assert judge(healed, before=0.005).rate == 0


def test_it_refuses_when_nearly_everything_is_suspected():
    ledger, _ = history(some(0.9))
    said = verdict(ledger, before=0.5)
    assert said.keep is None
    assert "refused" in said.reason


def test_a_class_with_one_sample_and_unknown_classes_do_no_harm():
    ledger, _ = history(some(0.2))
    ledger.label[0] = CLASSES
    assert np.isfinite(judge(ledger).suspicion).all()
    assert verdict(Ledger(N)).keep is None
    unknown = Ledger(N)
    unknown.seen[:] = 5
    assert verdict(unknown).keep is None
    assert disagreement(unknown.label, unknown.guess, unknown.guess_p) == (0.0, 0.0)


def test_the_surest_tenth_is_taken_of_each_class_alike():
    guess = np.repeat([0, 1], 1000)
    p = np.concatenate((np.linspace(0.9, 1, 1000), np.linspace(0.3, 0.5, 1000))).astype(np.float16)
    label = guess.copy()
    label[-50:] = 0  # half of the surest tenth of class 1, none of class 0
    wrong, sure = disagreement(label, guess, p)
    assert wrong == 50 / 2000
    assert sure == pytest.approx(0.25, abs=0.02)


def test_not_many_more_are_suspected_than_are_wrong():
    s = np.random.default_rng(0).random(10_000).astype(np.float32) * 2
    assert edge_of(s, 0.6) == 0.75
    assert (s > edge_of(s, 0.1)).mean() == pytest.approx(0.125, abs=0.001)


@pytest.mark.parametrize("options", [{"start": 2}, {"weight": -1}, {"lowest": 0}, {"revisit": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        verdict(Ledger(N), **options)


def test_scaled_weights_keep_their_mean():
    weights = scaled_weights(np.ones(10, dtype=np.float32), (np.arange(10) > 1).astype(np.float32))
    assert weights[:2].tolist() == [0, 0]
    assert weights.mean() == pytest.approx(1)
    nothing = scaled_weights(np.ones(3, dtype=np.float32), np.zeros(3, dtype=np.float32))
    assert nothing.tolist() == [1, 1, 1]


def test_a_real_run_on_noisy_labels_leaves_out_mostly_wrong_ones():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 20, generator=g)
    truth = (x @ torch.randn(20, 4, generator=g)).argmax(1)
    wrong = torch.rand(2000, generator=g) < 0.3
    y = torch.where(wrong, (truth + torch.randint(1, 4, (2000,), generator=g)) % 4, truth)
    selector = salience.Selector(2000, batch_size=50, epochs=12, select="default")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        for ids, _ in selector:
            logits = model(x[ids])
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    left_out = np.ones(2000, dtype=bool)
    left_out[selector.plan.ids] = False
    assert left_out.sum() > 200
    assert wrong.numpy()[left_out].mean() > 0.85


def test_without_logits_the_filter_is_off_and_that_is_said(caplog):
    selector = salience.Selector(100, batch_size=50, epochs=10, select="default")
    for ids, _ in selector:
        selector.loss(torch.rand(len(ids)))
    assert "filter 'noise' reads 'margin'" in caplog.text
    assert "this filter is off" in caplog.text


def test_suspected_labels_can_be_replaced_by_the_models_and_only_if_you_ask():
    ledger, _ = history(some(0.3))
    truth = np.random.default_rng(0).integers(0, CLASSES, N)
    selector = salience.Selector(N, batch_size=500, epochs=10, select="default", ledger=ledger)
    ids, _ = next(iter(selector))
    given = torch.from_numpy(ledger.label[ids.numpy()].astype(np.int64))
    better = selector.relabelled(given)
    changed = (better != given).numpy()
    assert changed.mean() == pytest.approx(0.3, abs=0.1)
    assert (better.numpy() == truth[ids.numpy()])[changed].mean() > 0.9
    with pytest.raises(salience.LossError, match="pass them all"):
        selector.relabelled(given[:3])
