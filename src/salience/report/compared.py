"""Runs side by side: arms are runs with the same settings except for the seed, and are compared seed by seed.

The interval is Student's t over the differences of runs that share a seed (for times, over the logarithms of their
ratios); a difference whose interval includes none is called not significant.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from salience.report.story import Story
from salience.report.text import metric
from salience.report.words import count
from salience.stats import Interval, paired_interval

NOT_SETTINGS = ("seed", "out", "resume", "salience", "torch", "workers", "device", "checkpoint_every")
"""Settings that may differ between runs of one arm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedArm:
    """Runs with the same settings except for the seed."""

    name: str
    stories: tuple[Story, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An arm compared with the first one; None if a figure is missing, or no seed is shared."""

    arm: ComparedArm
    against: ComparedArm
    metric: Interval | None
    """Difference of the last validation results."""
    seconds: Interval | None
    visits: Interval | None
    """Ratios."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `salience compare` shows."""

    arms: tuple[ComparedArm, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def stories(self) -> list[Story]:
        return [story for arm in self.arms for story in arm.stories]


def compare(stories: Sequence[Story]) -> Comparison:
    """Compare every arm with that of the first run."""
    arms = arms_of(stories)
    return Comparison(
        arms=arms, differences=tuple(_difference(arm, arms[0]) for arm in arms[1:]), notes=tuple(_doubts(stories))
    )


def against(story: Story, baseline: Story) -> Comparison:
    """Compare one run with another, whatever their settings."""
    arms = ComparedArm(name=baseline.name, stories=(baseline,)), ComparedArm(name=story.name, stories=(story,))
    notes = tuple(_doubts((baseline, story)))
    return Comparison(arms=arms, differences=(_difference(arms[1], arms[0]),), notes=notes)


def arms_of(stories: Sequence[Story]) -> tuple[ComparedArm, ...]:
    """Runs in groups that differ only in the seed, in the order given."""
    groups: dict[str, list[Story]] = {}
    for story in stories:
        settings = story.all_settings
        key = json.dumps({k: v for k, v in settings.items() if k not in NOT_SETTINGS}, sort_keys=True, default=str)
        groups.setdefault(key, []).append(story)
    names = [_name(group) for group in groups.values()]
    doubled = {name for name in names if names.count(name) > 1}
    return tuple(
        ComparedArm(name=group[0].name if name in doubled else name, stories=tuple(group))
        for name, group in zip(names, groups.values(), strict=True)
    )


def _name(group: Sequence[Story]) -> str:
    """The name of the runs without the seed at its end: less-0 and less-seed1 are 'less'."""
    if len(group) == 1:
        return group[0].name
    names = {re.sub(r"([-_.](seed|s)?[-_.]?|seed[-_.]?)?\d+$", "", story.name) for story in group} - {""}
    return names.pop() if len(names) == 1 else group[0].arm


def _difference(arm: ComparedArm, against: ComparedArm) -> Difference:
    def pairs(value: Callable[[Story], float | None]) -> list[tuple[float, float]]:
        mine, theirs = _by_seed(arm, value), _by_seed(against, value)
        if len(arm.stories) == len(against.stories) == 1:  # nothing else to pair it with
            return list(zip(mine.values(), theirs.values(), strict=False))
        return [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]

    def ratio(value: Callable[[Story], float | None]) -> Interval | None:
        logs = paired_interval([math.log(one / other) for one, other in pairs(value)])
        if logs is None:
            return None
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return Interval(mean=math.exp(logs.mean), low=low, high=high, pairs=logs.pairs)

    return Difference(
        arm=arm,
        against=against,
        metric=paired_interval([one - other for one, other in pairs(lambda story: story.metric)]),
        seconds=ratio(lambda story: story.seconds or None),
        visits=ratio(lambda story: story.visits or None),
    )


def _by_seed(arm: ComparedArm, value: Callable[[Story], float | None]) -> dict[int, float]:
    """The mean over each seed's runs that have a value."""
    found: dict[int, list[float]] = {}
    for story in arm.stories:
        one = value(story)
        if one is not None:
            found.setdefault(story.run.seed, []).append(one)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def _doubts(stories: Sequence[Story]) -> list[str]:
    """Why some figures may not be comparable."""
    said: list[str] = []
    sizes = sorted({story.run.population for story in stories if story.run.population})
    if len(sizes) > 1:
        said.append(
            f"The runs are of {' and '.join(f'{size:,}' for size in sizes)} samples, so their results cannot be compared."
        )
    for key in ("salience", "torch"):
        versions = sorted({getattr(story.run, key) for story in stories if getattr(story.run, key)})
        if len(versions) > 1:
            said.append(f"The runs were made with {key} {' and '.join(versions)}.")
    known = {story.run.knowledge for story in stories}
    if len(known) > 1:
        told = ", ".join(f"{story.name} from {story.run.knowledge or 'its own'}" for story in stories)
        said.append(
            f"The runs did not start from the same shared ledger ({told}), so part of their difference may come from "
            "that; give them one comparison=."
        )
    said += [f"{story.name}: {note}" for story in stories for note in story.notes if "not finished" in note]
    return said


# ---------------------------------------------------------------- in words


SECONDS_NOTE = "Seconds can be compared only between runs on the same machine; evaluation is not included."
HEAD = ("run", "seed", "select", "result", "best", "visits", "of all", "seconds", "overhead")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each run, under HEAD."""
    return [
        (
            story.name, str(story.run.seed), story.arm, metric(story, story.metric), metric(story, story.best),
            f"{story.visits:,}", f"{story.share:.0%}", f"{story.seconds:.1f}", f"{story.own:.1%}",
        )
        for story in comparison.stories
    ]  # fmt: skip


def said_of(comparison: Comparison) -> list[str]:
    """How every arm compares with the first one: result, visits and seconds, and what is not significant."""
    said = [" ".join(sentences(one)) for one in comparison.differences]
    return said or ["All runs have the same settings except for the seed, so there is nothing to compare."]


def sentences(difference: Difference) -> list[str]:
    both = f"{difference.arm.name} against {difference.against.name}:"
    if difference.seconds is None and difference.metric is None and difference.visits is None:
        return [f"{both} they share no seed, or nothing was done, so nothing can be compared."]
    parts = [both, _result(difference)]
    if difference.visits is not None:
        parts.append(f"{difference.visits.mean:.2f}x the visits.")
    if difference.seconds is not None:
        parts.append(_times(difference.seconds))
    return parts


def _result(difference: Difference) -> str:
    found = difference.metric
    if found is None:
        return "At least one has no validation result, so accuracy cannot be compared."
    stories = (*difference.arm.stories, *difference.against.stories)
    shares = all(story.in_shares for story in stories)
    name = "Accuracy" if all(story.measure == "accuracy" for story in stories) else "Result"

    def form(value: float) -> str:
        return f"{100 * value:+.2f}" if shares else f"{value:+.3g}"

    text = f"{name} {form(found.mean)}{' points' if shares else ''}"
    if found.low is None or found.high is None:
        return f"{text}; with one pair of runs this may be chance."
    text += f" (95% interval: {form(found.low)} to {form(found.high)}, {count(found.pairs, 'seed')})"
    return f"{text}: {_better(found.mean)}." if found.separated(0.0) else f"{text}: not significant."


def _better(value: float) -> str:
    return "better" if value > 0 else "worse"


def _times(found: Interval) -> str:
    text = f"{found.mean:.2f}x the seconds"
    if found.low is None or found.high is None:
        return f"{text}, measured once."
    text += f" (95% interval: {found.low:.2f} to {found.high:.2f})"
    return f"{text}: {'less' if found.mean < 1 else 'more'}." if found.separated(1.0) else f"{text}: not significant."
