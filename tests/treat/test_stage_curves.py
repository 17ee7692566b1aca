"""Augmentation that changes with the run: curves, what workers see of progress, resume, views, and a strength that adapts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.treat.curves import Adapting, amount_at, training_accuracy
from salience.treat.stages import unit
from salience.treat.treating import allowed_splits

N, EPOCHS, BATCH = 40, 4, 10


class Rows(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i):
        return torch.zeros(2), i % 2


def told(x, *, progress):
    """Puts the progress into the first number."""
    return x + torch.tensor([progress, 0.0])


def scaled(x, *, strength):
    """Puts its strength into the second number."""
    return x + torch.tensor([0.0, strength])


def mark(x):
    """Puts a one into the second number."""
    return x + torch.tensor([0.0, 1.0])


def half(progress):
    return 0.5


def batches(loader, epochs=EPOCHS, stop=None):
    out = []
    for _ in range(loader.epoch, epochs):
        for x, _ in loader:
            loader.loss(x.mean(1) + 1)
            out.append(x)
            if len(out) == stop:
                return out
    return out


def a_loader(*stages, workers=0, **options):
    return salience.Loader(Rows(), BATCH, epochs=EPOCHS, augment=list(stages), num_workers=workers, **options)


def test_named_curves_fade_rise_and_stop():
    assert [amount_at("fade", p) for p in (0.0, 0.7, 0.85, 1.0)] == pytest.approx([1, 1, 0.5, 0])
    assert [amount_at("rise", p) for p in (0.0, 0.15, 0.3, 1.0)] == pytest.approx([0, 0.5, 1, 1])
    assert [amount_at("early", p) for p in (0.0, 0.69, 0.71)] == [1, 1, 0]
    assert amount_at(lambda p: 3 * p, 0.5) == 1, "held to 0 to 1"
    assert amount_at(None, 0.5) == amount_at("fade", None) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_stages_see_the_progress_of_their_batch_in_every_worker(workers):
    seen = [x[:, 0] for x in batches(a_loader(told, workers=workers))]
    wanted = np.arange(EPOCHS * N // BATCH) / (EPOCHS * N // BATCH)
    np.testing.assert_allclose(torch.stack(seen), np.repeat(wanted[:, None], BATCH, axis=1), atol=1e-6)


def test_a_stage_that_takes_a_strength_is_told_it_by_the_curve():
    seen = [float(x[0, 1]) for x in batches(a_loader(salience.Stage(scaled, curve="fade")))]
    assert seen[0] == seen[11] == 1
    assert seen[12:] == pytest.approx([(1 - k / 16) / 0.3 for k in range(12, 16)], abs=1e-5)


def test_any_other_stage_is_left_out_for_the_rest_of_the_samples():
    x = torch.cat(batches(a_loader(salience.Stage(mark, curve=half))))[:, 1]
    assert set(x.tolist()) == {0.0, 1.0}
    assert float(x.mean()) == pytest.approx(0.5, abs=0.12)  # 160 draws: three standard deviations
    late = torch.cat(batches(a_loader(salience.Stage(mark, curve="early")))[12:])
    assert not late[:, 1].any()


def test_what_decides_is_the_seed_of_the_sample_and_the_place_of_the_stage():
    drawn = np.array([[unit(seed, place) for place in range(2)] for seed in range(2000)])
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.06
    assert unit(5, 0) == unit(5, 0) != unit(5, 1)


@pytest.mark.parametrize("stop", [6, 14])
def test_a_resumed_run_augments_as_if_it_had_not_stopped(stop):
    stages = told, salience.Stage(mark, curve=half), salience.Stage(scaled, curve="fade")
    whole = batches(a_loader(*stages))
    begun = a_loader(*stages)
    first = batches(begun, stop=stop)
    again = a_loader(*stages)
    again.load_state_dict(copy.deepcopy(begun.state_dict()))
    for mine, wanted in zip(first + batches(again), whole, strict=True):
        assert torch.equal(mine, wanted)


def test_nothing_that_changes_with_the_run_is_kept_as_an_intermediate():
    draws = np.array([False, False, True])
    for stage in (salience.Stage(told, random=False), salience.Stage(scaled, random=False, curve="fade")):
        allowed, why = allowed_splits((stage, salience.Stage(mark, random=True)), draws, strength=False)
        assert allowed.tolist() == [True, False]
        assert "depends on progress" in why


def test_the_number_of_views_follows_a_curve():
    def views(progress):
        return 1 if progress < 0.5 else 3

    draws = salience.Stage(mark, random=True)
    treat = salience.Treat("echo", views=views, distance=1, memory="1MiB", split=0)
    loader = salience.Loader(Rows(), 2, epochs=EPOCHS, augment=[draws], treat=treat)
    found = []
    for _ in range(EPOCHS):
        for x, _ in loader:
            loader.loss(x.mean(1))
        found.append(len(np.unique(loader.plan.ids)))
    assert found[0] == found[1] == N
    assert max(found[2:]) < N


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: salience.Stage(mark, curve="fad"), "no curve 'fad'"),
        (lambda: salience.Stage(mark, curve=3), "function of progress"),
        (lambda: salience.Loader(Rows(), BATCH, augment=[told]), "pass epochs="),
        (lambda: a_loader(mark, treat=salience.Treat(adapt=True)), "adapt needs a stage"),
        (lambda: salience.Treat("echo", views=99), "views is 99"),
    ],
)
def test_what_cannot_work_is_said_at_once(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


# ---------------------------------------------------------------- a strength that adapts


def test_the_strength_follows_the_gap_after_two_results_that_agree():
    adapting = Adapting()
    assert adapting.evaluated(0.7, 0.8) == "", "one result moves nothing"
    assert "augmentation from 100% to 75%" in adapting.evaluated(0.7, 0.8)
    assert adapting.amount == 0.75
    assert adapting.evaluated(0.7, 0.8) == ""
    assert adapting.evaluated(0.9, 0.8) == "", "a result that disagrees begins anew"
    assert "augmentation from 75% to 100%" in adapting.evaluated(0.9, 0.8)
    assert [adapting.evaluated(0.9, 0.8) for _ in range(4)] == [""] * 4, "it cannot become stronger"
    assert [adapting.evaluated(0.83, 0.8) for _ in range(4)] == [""] * 4, "between little and much it stays"


def test_training_accuracy_is_that_of_the_samples_visited_last():
    ledger = Ledger(300)
    ledger.set_labels(np.zeros(300, dtype=np.int64))
    ledger.last_seen[:], ledger.guess[:] = 3, 0
    ledger.guess[:50] = 1
    ledger.last_seen[200:] = 2
    assert training_accuracy(ledger, 3) == pytest.approx(0.75)
    assert training_accuracy(ledger, 4) is None


def test_a_run_that_learns_by_heart_keeps_its_augmentation_and_one_that_does_not_weakens_it(problem):
    found = {}
    for name, metric in (("heart", 0.1), ("well", 1.0)):
        stages = [salience.Stage(scaled_row, curve=whole)]
        loader = salience.Loader(problem, 50, epochs=4, augment=stages, treat=salience.Treat(adapt=True))
        for _ in range(4):
            for inputs, targets in loader:
                logits = torch.nn.functional.one_hot(targets, 4).float() * 4
                loader.loss(torch.ones(len(inputs)), logits, targets)
            loader.evaluated(metric)
        found[name] = loader._run.staging.treating.adapting.amount
        decided = [event["lever"] for event in loader.events.recent if event.kind == "decision"]
        assert decided == ([] if name == "heart" else ["augmentation"])
    assert found == {"heart": 1.0, "well": 0.75}


def scaled_row(x, *, strength):
    return x * strength


def whole(progress):
    return 1.0
