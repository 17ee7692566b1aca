"""Runs side by side: what is one arm, what is paired, and what is not significant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runs import long_log

from salience.report.compared import against, arms_of, compare, rows, sentences
from salience.report.reader import read_log, story_of
from salience.report.story import Result, Story


@pytest.fixture
def story(tmp_path) -> Story:
    return story_of(read_log(long_log(tmp_path / "x.jsonl", 4)), name="run")


def variant(story: Story, name: str, *, seed: int, metric: float, seconds: float = 2.0, share: float = 0.5) -> Story:
    """The same run as it might have ended with another seed and share."""
    run = replace(story.run, seed=seed, select={"keep": {"name": "constant", "share": share}})
    end = (Result(window=4, progress=1.0, metric=metric),)
    return replace(story, name=name, run=run, evaluations=end, seconds=seconds)


def arms(
    story: Story, first: list[float], second: list[float], seconds: tuple[float, float] = (2.0, 1.0)
) -> list[Story]:
    one = [variant(story, f"all-{s}", seed=s, metric=m, seconds=seconds[0] + s / 100) for s, m in enumerate(first)]
    two = [variant(story, f"less-{s}", seed=s, metric=m, seconds=seconds[1], share=0.4) for s, m in enumerate(second)]
    return [*one, *two]


def test_runs_that_differ_in_the_seed_alone_are_one_arm_with_the_name_they_share(story):
    runs = [variant(story, name, seed=s, metric=0.5, share=k) for name, s, k in (
        ("less-seed0", 0, 0.4), ("all_0", 0, 1.0), ("less-seed1", 1, 0.4), ("all_1", 1, 1.0), ("other", 0, 0.3),
    )]  # fmt: skip
    found = arms_of(runs)
    assert [(arm.name, len(arm.stories)) for arm in found] == [("less", 2), ("all", 2), ("other", 1)]


def test_what_differs_in_every_seed_is_significant(story):
    (found,) = compare(arms(story, [0.90, 0.80, 0.70], [0.92, 0.82, 0.721])).differences
    assert found.metric.pairs == 3
    assert found.metric.mean == pytest.approx(0.0203, abs=1e-4)  # the spread between seeds is in both, and goes out
    said = " ".join(sentences(found))
    assert "+2.03 points" in said
    assert "3 seeds): better." in said
    assert found.seconds.mean == pytest.approx(0.5, rel=0.01)
    assert ": less." in said


def test_what_chance_could_do_is_not_significant(story):
    (found,) = compare(arms(story, [0.90, 0.80], [0.93, 0.79], (2.0, 2.0))).differences
    said = " ".join(sentences(found))
    assert "2 seeds): not significant." in said
    assert "the seconds (95% interval: 0.97 to 1.03): not significant." in said


def test_one_pair_has_no_interval_whatever_its_seeds(story):
    one, other = variant(story, "a", seed=0, metric=0.8), variant(story, "b", seed=7, metric=0.9)
    (found,) = against(other, one).differences
    assert "+10.00 points; with one pair of runs this may be chance." in sentences(found)[1]


def test_arms_without_a_common_seed_are_not_paired(story):
    runs = arms(story, [0.9, 0.8], [])
    runs += [variant(story, f"less-{s}", seed=s, metric=0.9, share=0.4) for s in (5, 6)]
    (found,) = compare(runs).differences
    assert sentences(found) == [
        "less against all: they share no seed, or nothing was done, so nothing can be compared."
    ]


def test_a_run_without_results_is_compared_in_the_rest(story):
    one = variant(story, "a", seed=0, metric=0.8)
    none = replace(variant(story, "b", seed=0, metric=0.8, share=0.3), evaluations=())
    (found,) = compare([one, none]).differences
    assert sentences(found)[1:3] == [
        "At least one has no validation result, so accuracy cannot be compared.",
        "1.00x the visits.",
    ]
    assert rows(compare([one, none]))[1][3:5] == ("-", "-")


def test_runs_on_other_data_and_of_other_versions_are_doubted(story):
    other = replace(story, name="b", run=replace(story.run, population=7, torch="1"))
    assert compare([story, other]).notes == (
        "The runs are of 7 and 1,000 samples, so their results cannot be compared.",
        "The runs were made with torch 1 and 2.",
    )
