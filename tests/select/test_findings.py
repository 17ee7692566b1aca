"""Findings: wrong labels with a confidence that holds, hard but clean samples, near-copies, uneven classes."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import salience
from salience.app.models import build
from salience.errors import StateError
from salience.events import ClassFinding
from salience.ledger import Ledger
from salience.report.text import render
from salience.select.findings import (
    copies,
    findings,
    hardest,
    load_copies,
    save_copies,
    study,
    suspected,
    suspects,
)
from salience.select.noise import judge
from salience.select.presets import preset
from salience.select.summary import summarise

from conftest import require


def trained(wrong: float, seed: int, *, shifts: bool = True) -> tuple[Ledger, np.ndarray, np.ndarray]:
    """The ledger of a small network trained on rendered glyphs; which labels are wrong, which images hard.

    With `shifts` images are moved by up to two pixels at each visit, so that wrong labels are not learnt by heart.
    """
    require(importlib.util.find_spec("PIL") is not None, "Pillow")
    from salience.app.glyphs import render

    glyphs = render(4000, classes=6, size=16, wrong=wrong, copies=0, seed=seed)
    x, y = torch.from_numpy(glyphs.images).unsqueeze(1).float() / 127.5 - 1, torch.from_numpy(glyphs.labels)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build("cnn", 6, channels=1, size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    selector = salience.Selector(len(y), batch_size=50, epochs=8, seed=seed)
    rng = np.random.default_rng(seed)
    schedule = salience.ProgressLR(optimizer, selector)
    for _ in range(8):
        for ids, _ in selector:
            step = rng.integers(-2, 3, 2).tolist() if shifts else [0, 0]
            logits = model(x[ids].roll(step, (2, 3)))
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return selector.ledger, glyphs.wrong, glyphs.hard


@pytest.fixture(scope="module")
def runs() -> list[tuple[Ledger, np.ndarray, np.ndarray]]:
    return [trained(wrong, seed) for seed, wrong in enumerate((0.2, 0.3))]


def sample(n: int, **columns: object) -> Ledger:
    ledger = Ledger(n)
    for name, values in columns.items():
        ledger[name][:] = values
    return ledger


# ---------------------------------------------------------------- labels


def test_the_confidence_is_how_often_the_label_is_wrong(runs):
    said = np.concatenate([judge(ledger).wrong for ledger, _, _ in runs])
    true = np.concatenate([wrong for _, wrong, _ in runs])
    shown = said > 0.5
    table = [f"precision {true[shown].mean():.2f}, recall {true[shown].sum() / true.sum():.2f}"]
    for low, high in ((0, 0.1), (0.9, 1)):
        some = (said > low) & (said <= high)
        table.append(f"said {said[some].mean():.2f}, true {true[some].mean():.2f} of {some.sum()}")
        assert some.sum() >= 50, table
        assert abs(true[some].mean() - said[some].mean()) < 0.1, table
    assert true[shown].mean() > 0.7, table
    assert true[shown].sum() > 0.35 * true.sum(), table


def test_the_firmest_suspects_are_wrong_and_not_listed_as_hard(runs):
    for ledger, wrong, _ in runs:
        first = suspects(ledger, top=20)
        assert wrong[[s.id for s in first]].mean() >= 0.85
        assert [s.confidence for s in first] == sorted((s.confidence for s in first), reverse=True)
        assert all(s.label == ledger.label[s.id] != s.guess for s in first)
        assert not {h.id for h in hardest(ledger, top=20)} & {s.id for s in suspects(ledger)}


def test_wrong_labels_learnt_by_heart_are_neither_listed_nor_called_right():
    ledger, _, _ = trained(0.2, 0, shifts=False)
    said = judge(ledger)
    assert said.verdict != "no sign of wrong labels"
    assert not said.firm


def test_clean_labels_are_hardly_suspected_and_the_hardest_are_the_distorted_ones():
    ledger, _, hard = trained(0.0, 5)
    assert suspected(ledger, judge(ledger)).mean() < 0.02
    assert hard[[h.id for h in hardest(ledger, top=20)]].mean() > 3 * hard.mean()


def test_reasons_say_in_words_what_was_seen(runs):
    ledger = runs[1][0]
    one = suspects(ledger, top=1, names=["ant", "bee", "cat", "dog", "eel", "fly"])[0]
    said = ["ant", "bee", "cat", "dog", "eel", "fly"][one.guess]
    p, right = ledger.vote_p[one.id, 0], ledger.right[one.id]
    assert one.reason == f"the model says {said} with p {p:.2f}; it gave the label at {right} of 8 visits"
    assert f"says class {one.guess} with" in suspects(ledger, top=1)[0].reason
    twice = sample(1, mean_loss=2.125, seen=12, right=3, forgotten=2, guess=1, label=0)
    assert hardest(twice)[0].reason == "mean loss 2.1, right at 3 of 12 visits, forgotten 2 times"
    alone = sample(1, mean_loss=0.5, seen=1)
    assert (hardest(alone)[0].reason, hardest(alone)[0].confidence) == ("mean loss 0.5 at 1 visit", None)


def test_a_model_that_has_hardly_learnt_its_classes_makes_no_label_look_wrong():
    """Guesses at random, each with confidence: nothing about a label follows from that."""
    n, rng = 3000, np.random.default_rng(0)
    ledger = Ledger(n)
    ledger.set_labels(rng.integers(0, 6, n))
    ledger.seen[:], ledger.last_seen[:] = 5, 4
    ledger.guess[:] = ledger.vote[:, 0] = rng.integers(0, 6, n)
    ledger.vote_p[:, 0] = 0.5 + 0.5 * rng.random(n)
    ledger.confidence[:] = 0.1
    ledger.mean_loss[:] = rng.random(n)
    said = findings(ledger)
    assert said.suspected == 0
    assert said.suspects == ()
    assert said.weak.startswith("the model differs from 82.9% of the labels")
    assert "learnt too little" in said.weak
    summary = summarise(ledger, windows=5, forecast_with=preset("default"))
    assert "Labels cannot be judged: the model differs" in render(summary)
    assert said.hard


def test_without_logits_or_without_losses_nothing_is_claimed():
    for ledger in (Ledger(5), sample(5, mean_loss=1.0, seen=2), sample(5, label=[0, 1, 0, 1, 0])):
        found = findings(ledger)
        assert (found.judged, found.noise_rate, found.suspected, found.suspects, found.groups) == (0, None, 0, (), None)
    assert len(findings(sample(5, mean_loss=1.0, seen=2)).hard) == 5
    assert np.isnan(judge(Ledger(5)).wrong).all()


def test_one_sample_and_a_hundred_equal_ones_do_no_harm():
    for n in (1, 100):
        same = sample(n, seen=3, right=3, label=0, guess=0, mean_loss=0.1, confidence=0.9)
        same.vote_p[:, 0] = 0.9
        assert findings(same).suspected == 0
        assert np.isfinite(judge(same).wrong).all()


# ---------------------------------------------------------------- once


@pytest.fixture
def judged(monkeypatch) -> list[int]:
    """Visits in the ledger each time its labels were judged; the judgement itself is real."""
    calls: list[int] = []

    def counted(history):
        calls.append(int(history.seen.sum()))
        return judge(history)

    monkeypatch.setattr("salience.select.findings.judge", counted)
    monkeypatch.setattr("salience.select.noise.judge", counted)
    return calls


def learn(selector: salience.Selector, windows: int) -> None:
    label = torch.arange(selector.n) % 4
    for _ in range(windows):
        for ids, _ in selector:
            logits = F.one_hot(label[ids], 4).float() * (1 + selector.epoch)
            selector.loss(F.cross_entropy(logits, label[ids], reduction="none"), logits, label[ids])


def test_labels_are_judged_once_per_run_however_often_it_is_reported_and_forecast(judged):
    selector = salience.Selector(400, batch_size=20, epochs=6)
    learn(selector, 6)
    selector.report()
    selector.summary()
    selector.report()
    assert judged == [2400]
    assert [event.kind for event in selector.events.recent].count("findings") == 1


def test_labels_are_judged_again_once_more_was_learnt(judged):
    selector = salience.Selector(400, batch_size=20, epochs=6)
    learn(selector, 3)
    selector.report()
    learn(selector, 3)
    selector.report()
    assert judged == [1200, 2400]
    assert [event.kind for event in selector.events.recent].count("findings") == 2


def test_a_study_is_kept_until_the_ledger_or_the_copies_change():
    ledger = sample(8, label=[0, 1] * 4, mean_loss=1.0, seen=2)
    first = study(ledger, windows=2)
    assert study(ledger, windows=2, last=first) is first
    near = np.array([0, 0, 1, 1, -1, -1, -1, -1], np.int32), np.ones(8, np.float32)
    second = study(ledger, near, windows=2, last=first)
    assert second.findings.groups == 2
    ledger.seen[0] += 1
    assert study(ledger, near, windows=2, last=second) is not second


def test_of_very_many_classes_the_hardest_are_listed():
    n = 3000
    ledger = sample(n, label=np.arange(n), mean_loss=np.arange(n) / n, seen=1)
    found = findings(ledger)
    assert (found.class_count, len(found.classes)) == (n, 1000)
    assert [one.label for one in found.classes] == list(range(2000, n))


# ---------------------------------------------------------------- near-copies


GROUP = np.array([2, -1, 0, 0, 2, 1, 2, -1], dtype=np.int32)
ALIKE = np.array([0.98, 0, 1, 1, 1, 1, 0.99, 0], dtype=np.float32)


def test_groups_of_copies_have_a_representative_members_and_a_reason():
    large, small = copies(GROUP, ALIKE)  # group 1 has one member: no copies
    assert (large.id, large.members, large.reason) == (4, (0, 4, 6), "features agree to 0.98")
    assert large.confidence == pytest.approx(0.98)
    assert (small.id, small.members, small.confidence, small.reason) == (2, (2, 3), 1.0, "byte-identical")
    assert copies(GROUP, ALIKE, top=1) == [large]
    assert copies(np.full(4, -1, dtype=np.int32), np.zeros(4, dtype=np.float32)) == []
    found = findings(Ledger(8), (GROUP, ALIKE))
    assert (found.groups, found.spare) == (2, 3)


def test_what_is_almost_identical_is_not_called_so():
    nearly = np.array([1, np.nextafter(np.float32(1), np.float32(0))], dtype=np.float32)
    assert copies(np.zeros(2, dtype=np.int32), nearly)[0].reason == "features agree to 0.9999"


def test_copies_survive_their_file_and_others_are_refused(tmp_path):
    save_copies(tmp_path / "copies.npz", GROUP, ALIKE)
    group, alike = load_copies(tmp_path / "copies.npz", 8)
    np.testing.assert_array_equal(group, GROUP)
    np.testing.assert_array_equal(alike, ALIKE)
    with pytest.raises(StateError, match="is of 8 samples, the ledger of 9"):
        load_copies(tmp_path / "copies.npz", 9)
    for group, alike in ((GROUP[1:], ALIKE), (GROUP + 8, ALIKE), (GROUP.astype(np.float32), ALIKE), (GROUP, ALIKE + 1)):
        with pytest.raises(StateError, match=r"both must be \[n\]|not between 0 and 1"):
            save_copies(tmp_path / "bad.npz", group, alike)
    salience.ledger.save(Ledger(8), tmp_path / "ledger.npz")
    with pytest.raises(StateError, match="not a file of near-copies"):
        load_copies(tmp_path / "ledger.npz", 8)


# ---------------------------------------------------------------- classes


def classes(ledger: Ledger) -> tuple[ClassFinding, ...]:
    return findings(ledger).classes


def test_a_class_that_got_less_than_its_share_says_why():
    easy = np.arange(10) < 5
    ledger = sample(
        10, label=np.where(easy, 0, 2), trained=np.where(easy, 1, 4), mean_loss=np.where(easy, 0.1, 1.1), seen=4
    )
    zero, two = classes(ledger)
    assert (zero.label, zero.samples, zero.share, zero.visits) == (0, 5, 0.5, 0.2)
    assert zero.reason == "visited 0.4x its share: mean loss 0.1 against 0.6 overall"
    assert two.reason == "visited 1.6x its share: mean loss 1.1 against 0.6 overall"


def test_a_class_that_lost_visits_to_suspected_labels_says_so():
    n, rng = 6000, np.random.default_rng(0)
    ledger = sample(n, seen=8, trained=8, mean_loss=0.5, confidence=0.9)
    truth = rng.integers(0, 3, n)
    wrong = (truth == 1) & (rng.random(n) < 0.12)
    ledger.set_labels(np.where(wrong, 0, truth))  # all of them in class 0
    ledger.vote[:, 0], ledger.vote_p[:, 0] = truth, 0.9 + 0.05 * rng.random(n)
    ledger.confidence[wrong] = 0.01
    ledger.trained[ledger.label == 0] = 3
    ledger.course[:] = [(0.3 - 0.01 * k, 0.2, n / 10, 0.0) for k in range(8)]
    assert "of its labels look wrong against" in classes(ledger)[0].reason


def test_even_classes_need_no_reason_and_no_classes_no_classes():
    assert [one.reason for one in classes(sample(4, label=[0, 0, 1, 1], trained=2, mean_loss=1.0))] == ["", ""]
    assert [one.visits for one in classes(sample(4, label=[0, 0, 1, 1]))] == [None, None]
    assert classes(Ledger(4)) == ()
