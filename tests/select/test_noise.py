"""The noise filter tells wrong labels from hard samples, estimates how many there are, and takes back what it misjudged."""

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
from salience.select.noise import noise, noise_rate, suspicion, threshold
from salience.select.weights import muted_weights

N, CLASSES = 3000, 6


def history(wrong: np.ndarray, *, windows: int = 8, seed: int = 0) -> tuple[Ledger, np.ndarray]:
    """A ledger after training on labels of which `wrong` (bool [N]) are another class; 10% of the rest are hard."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, CLASSES, N)
    label = np.where(wrong, (truth + rng.integers(1, CLASSES, N)) % CLASSES, truth)
    hard = ~wrong & (rng.random(N) < 0.1)
    ledger = Ledger(N)
    for window in range(windows):
        z = rng.normal(0, 1, (N, CLASSES))
        z[np.arange(N), truth] += np.where(hard, 0.8, 4.0)
        logits = torch.from_numpy(z).float()
        losses = F.cross_entropy(logits, torch.from_numpy(label), reduction="none")
        recorder = salience.ledger.Recorder(ledger)
        recorder.record(np.arange(N), losses, logits, torch.from_numpy(label), window=window)
        recorder.flush()
    return ledger, hard


def verdict(ledger: Ledger, window: int = 8, **options):
    return noise(View(ledger, Clock(window=window, windows=20, keep=0.4)), **options)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_wrong_labels_are_found_and_counted_and_hard_samples_stay(share):
    wrong = np.random.default_rng(5).random(N) < share
    ledger, hard = history(wrong)
    said = verdict(ledger)
    left_out = ~said.keep
    assert left_out[wrong].mean() > 0.95
    assert left_out[~wrong & ~hard].mean() < 0.01
    assert left_out[hard].mean() < 0.5
    assert said.noise == pytest.approx(share, abs=0.04)
    assert said.share == pytest.approx(min(0.65, 4 * said.noise))


def test_clean_data_is_left_almost_alone():
    ledger, _ = history(np.zeros(N, dtype=bool))
    said = verdict(ledger)
    assert (~said.keep).mean() < 0.005
    assert said.noise < 0.04
    assert said.share < 0.16


def test_it_waits_until_its_start_and_says_that_it_has_no_estimate_yet():
    ledger, _ = history(np.zeros(N, dtype=bool))
    said = verdict(ledger, window=5)
    assert said.keep is None
    assert np.isnan(said.noise)


def test_what_was_left_out_is_looked_at_again_with_weight_zero_and_taken_back_if_it_was_misjudged():
    wrong = np.random.default_rng(5).random(N) < 0.3
    ledger, _ = history(wrong)
    ledger.last_seen[:] = 7
    ledger.last_seen[wrong] = 4
    said = verdict(ledger)
    assert said.force[wrong].mean() > 0.95
    assert not said.force[~wrong].any()
    np.testing.assert_array_equal(said.mute, said.force)
    misjudged = np.flatnonzero(said.force)[:5]
    ledger.margin[misjudged], ledger.guess[misjudged], ledger.last_seen[misjudged] = 3.0, ledger.label[misjudged], 8
    assert verdict(ledger, window=9).keep[misjudged].all()


def test_an_old_judgement_holds_until_the_sample_was_seen_again():
    wrong = np.random.default_rng(5).random(N) < 0.3
    ledger, _ = history(wrong)
    before = ~verdict(ledger).keep
    ledger.last_seen[:] = 9
    ledger.last_seen[before] = 7
    ledger.margin[~before] *= 2  # the model got surer, so that old margins look small
    s = suspicion(ledger.margin, ledger.label, ledger.guess)
    assert (s[before] < 0.75).any()  # by its edge alone the filter would take some back
    assert (~verdict(ledger, window=10).keep)[before].all()


def test_it_refuses_when_nearly_everything_is_suspected():
    ledger, _ = history(np.random.default_rng(5).random(N) < 0.9)
    said = verdict(ledger)
    assert said.keep is None
    assert "refused" in said.reason


def test_a_class_with_one_sample_and_unknown_classes_do_no_harm():
    ledger, _ = history(np.zeros(N, dtype=bool))
    ledger.label[0] = CLASSES
    assert np.isfinite(suspicion(ledger.margin, ledger.label, ledger.guess)).all()
    assert verdict(Ledger(N)).keep.all()
    assert noise_rate(np.full(5, np.nan, dtype=np.float32)) == 0.0


def test_the_more_noise_the_lower_the_edge():
    assert threshold(0.0, 0.5) == 1.0 > threshold(0.1, 0.5) > threshold(0.2, 0.5) > threshold(0.4, 0.5) == 0.5


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="start is 2"):
        verdict(Ledger(N), start=2)


def test_muted_samples_get_no_weight_and_the_mean_stays_one():
    weights = muted_weights(np.ones(10, dtype=np.float32), np.arange(10) < 2)
    assert weights[:2].tolist() == [0, 0]
    assert weights.mean() == pytest.approx(1)


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
