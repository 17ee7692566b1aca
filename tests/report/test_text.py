"""Reports as text: whether less would be enough is said before selection is mentioned; a selecting run says what it saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import salience
from salience.curves import Shorter
from salience.events import build
from salience.report import words
from salience.report.html import page
from salience.report.reader import read_log, story_of
from salience.report.text import render, sections, verdict
from salience.report.words import cost

N, EPOCHS = 200, 20
PROGRESS = np.arange(1, EPOCHS + 1) / EPOCHS
SETTLED = 0.8 - 0.3 * np.exp(-20 * PROGRESS) + 0.002 * (-1.0) ** np.arange(EPOCHS)
RISING = 0.2 + 0.6 * np.sqrt(PROGRESS)


def windows(
    selector: salience.Selector, metrics: np.ndarray | None, *, stop: int = EPOCHS, trained: float = 1.0
) -> salience.Selector:
    """Go on to window `stop`; samples have losses of their own, which `trained` multiplies from window to window."""
    for window in range(selector.epoch, stop):
        for ids, _ in selector:
            selector.loss((ids + 1) / N * trained**window)
        if metrics is not None:
            selector.evaluated(float(metrics[window]))
    return selector


def observed(metrics: np.ndarray | None, **options) -> salience.Selector:
    given = {"epochs": EPOCHS, **{key: options.pop(key) for key in ("epochs", "log", "select") if key in options}}
    return windows(salience.Selector(N, batch_size=20, **given), metrics, **options)


def said(selector: salience.Selector) -> list[str]:
    return selector.report().split("\n\n")[0].splitlines()


# ---------------------------------------------------------------- is less enough


def test_a_run_that_settled_is_told_how_many_epochs_would_do_before_it_is_told_of_selection():
    _, enough, within, forecast, _ = said(observed(SETTLED))
    assert enough.startswith("10 of 20 epochs would be enough: the last 10 changed the validation metric by 0.")
    assert "less than its noise (0." in enough
    assert "would end within the noise (0." in within
    assert forecast.startswith("Forecast: over 20 epochs selection would make ")


def test_a_run_that_was_still_learning_is_advised_to_go_on_and_not_to_select():
    _, costs, longer, advice, _ = said(observed(RISING))
    assert costs.startswith(
        "Fewer visits will cost accuracy: a run on all data with as many visits as selection makes (1"
    )
    assert costs.endswith("points lower (the noise is 0.2).")
    assert longer == "This run was still learning: train longer, not shorter."
    assert advice.startswith("Selection is not advised for this run; over 20 epochs it would make ")


def test_without_validation_results_the_cost_of_fewer_visits_is_not_known():
    assert "Cannot say what fewer visits would cost: no validation results; call loader.evaluated(metric)." in said(
        observed(None)
    )


def test_a_training_loss_that_still_falls_is_mentioned_where_there_is_no_validation():
    _, cannot, *_ = said(observed(None, trained=0.9))
    assert "no validation results, and the training loss still fell by 3" in cannot


def test_a_run_that_does_not_know_its_length_is_asked_for_it():
    _, cannot, *_ = said(observed(SETTLED, epochs=None))
    assert cannot == "Cannot say what fewer visits would cost: the run does not know its length; pass epochs=."


def test_in_mid_run_nothing_is_said_of_its_end():
    _, cannot, *_ = said(observed(SETTLED, stop=10))
    assert cannot == "Cannot say what fewer visits would cost: validation was last reported at 50% of the run."


def test_samples_skipped_per_epoch_agree_with_the_visits_saved():
    selector = observed(SETTLED)
    forecast = selector.summary()["forecast"]
    skipped = (forecast["visits_full"] - forecast["visits"]) / EPOCHS
    assert (
        f"It would skip {skipped:.0f} samples per epoch, and {forecast['skipped_in_middle']:,} in the middle"
        in said(selector)[-1]
    )


def test_a_resumed_run_remembers_its_results():
    first = observed(RISING, stop=8)
    second = salience.Selector(N, batch_size=20, epochs=EPOCHS)
    second.load_state_dict(first.state_dict())
    assert said(windows(second, RISING)) == said(observed(RISING))


# ---------------------------------------------------------------- a run that selects


def test_a_finished_run_that_selected_says_what_it_saved_and_forecasts_nothing():
    selector = observed(RISING, select="uniform")
    assert said(selector)[1:] == ["Over 20 epochs, selection made 2,000 visits instead of 4,000 (50% fewer)."]


def test_an_unfinished_run_that_selects_says_what_it_saved_so_far():
    selector = observed(RISING, select="uniform", stop=5)
    assert said(selector)[1:] == ["So far, over 5 epochs, selection made 500 visits instead of 1,000 (50% fewer)."]


# ---------------------------------------------------------------- the page


def test_the_page_says_the_same_from_the_log(tmp_path: Path):
    for name, metrics in (("settled", SETTLED), ("rising", RISING)):
        selector = observed(metrics, log=tmp_path / f"{name}.jsonl")
        _, *lines, _ = said(selector)
        assert " ".join(lines) in verdict(story_of(read_log(tmp_path / f"{name}.jsonl"), name=name))


def test_the_page_does_not_advise_selection_to_a_run_that_was_still_learning(tmp_path: Path):
    observed(RISING, log=tmp_path / "x.jsonl").report()
    assert "Selection is not advised for this run;" in verdict(story_of(read_log(tmp_path / "x.jsonl"), name="x"))


def test_the_page_knows_when_less_is_enough_without_a_report_having_been_asked_for(tmp_path: Path):
    observed(SETTLED, log=tmp_path / "x.jsonl")
    story = story_of(read_log(tmp_path / "x.jsonl"), name="x")
    assert story.forecast is None
    assert "10 of 20 epochs would be enough" in verdict(story)


def test_the_page_of_a_run_that_selected_does_not_judge_a_shorter_one(tmp_path: Path):
    observed(RISING, select="uniform", log=tmp_path / "x.jsonl").report()
    story = story_of(read_log(tmp_path / "x.jsonl"), name="x")
    assert story.shorter is None
    assert "Over 20 epochs, selection made 2,000 visits instead of 4,000 (50% fewer)." in verdict(story)


# ---------------------------------------------------------------- words


def test_a_metric_that_fell_is_said_to_have_been_lowered():
    found = Shorter(share=1.0, loss_low=0, loss_high=0, metric_noise=0.002, enough_epochs=30, moved=-0.01, points=True)
    assert cost(found, 50) == [
        "30 of 50 epochs would be enough: the last 20 lowered the validation metric by 1.0 points (its noise is 0.2)."
    ]


@pytest.mark.parametrize(
    ("points", "amount"), [(True, "up to 12.0 points (the noise is 5.0)"), (False, "up to 0.12 (the noise is 0.05)")]
)
def test_points_are_only_of_shares(points, amount):
    found = Shorter(share=0.5, loss_low=0, loss_high=0.12, metric_noise=0.05, points=points)
    assert cost(found, 9) == [
        f"A run on all data with as many visits as selection makes (5 of 9 epochs) would lose {amount}."
    ]


def test_epochs_that_would_do_are_told_beside_what_fewer_still_would_cost():
    found = Shorter(
        share=0.5,
        loss_low=0.02,
        loss_high=0.08,
        metric_noise=0.005,
        enough_epochs=80,
        moved=0.001,
        rising=True,
        points=True,
    )
    enough, costs = cost(found, 100)
    assert enough.startswith("80 of 100 epochs would be enough")
    assert "(50 of 100 epochs) would end 2.0 to 8.0 points lower (the noise is 0.5)" in costs


def test_the_summary_of_an_older_salience_is_still_rendered():
    summary = observed(SETTLED).summary()
    del summary["selected"]
    for key in (
        "share",
        "loss_low",
        "loss_high",
        "metric_noise",
        "enough_epochs",
        "moved",
        "rising",
        "points",
        "cannot_say",
    ):
        del summary["forecast"][key]
    assert build(Shorter, summary["forecast"]) == Shorter()
    assert render(summary).splitlines()[1].startswith("Forecast: over 20 epochs")


def test_where_correctness_is_unknown_nothing_is_said_of_it():
    selector = observed(None, stop=4)
    text = selector.report()
    assert "sample      199: mean loss 1, 4 visits" in text
    assert "right" not in text
    assert selector.summary()["hardest"][0]["right"] is None


def test_small_losses_are_not_printed_as_nothing():
    selector = salience.Selector(N, batch_size=20, epochs=4)
    for ids, _ in selector:
        selector.loss((ids + 1) / N * 1e-4)
    text = selector.report()
    assert "mean loss 5.02e-05." in text
    assert "mean loss 0.0001, 1 visit" in text


def test_a_forecast_that_saves_nothing_says_so():
    told = {"windows": 2, "visits": 96, "visits_full": 88, "saved": -0.09}
    assert (
        words.forecast(told, Shorter(cannot_say="x"))[-1] == "Forecast: over 2 epochs selection would save no visits."
    )


SPEAKS = """
import torch, salience
loader = salience.Loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 4, epochs=2, select={"keep": "auto"})
for _ in range(2):
    for x, in loader:
        loader.loss(x.sum(1))
"""


def test_the_library_prints_nothing_but_warnings_which_say_whose_they_are():
    done = subprocess.run([sys.executable, "-c", SPEAKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines() != []
    assert all(line.startswith("salience: ") for line in done.stderr.splitlines()), done.stderr


def test_the_text_of_a_log_has_the_sentences_of_the_page(tmp_path: Path):
    pytest.importorskip("jinja2")
    selector = observed(SETTLED, log=tmp_path / "x.jsonl")
    selector.report()
    story = story_of(read_log(tmp_path / "x.jsonl"), name="x")
    shown = page(story)
    for text in (verdict(story), *sections(story).values()):
        assert text in shown.replace("&#39;", "'")
