"""Numbers as people read them, and a run in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salience.report.story import Story


def count(number: int, what: str) -> str:
    """'1 epoch', '2,000 epochs'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """A share with as many digits as it needs: '0.4%', '12%'."""
    return f"{value:.1%}" if abs(value) < 0.0995 and value else f"{value:.0%}"


def seconds(value: float) -> str:
    """'0.4 s', '42 s', '3 min 20 s', '2 h 5 min'."""
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    if value < 7170:
        return f"{int(value + 0.5) // 60} min {int(value + 0.5) % 60} s"
    return f"{int(value / 60 + 0.5) // 60} h {int(value / 60 + 0.5) % 60} min"


def short(value: float) -> str:
    """A number for an axis: '0.25', '1,500', '12k', '3.4M'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def metric(story: Story, value: float | None) -> str:
    """A validation result: as a percentage where all of them are shares."""
    if value is None:
        return "-"
    if all(0 <= one.metric <= 1 for one in story.evaluations):
        return f"{value:.1%}"
    return f"{value:.4g}"


def verdict(story: Story) -> str:
    """What was trained, how well, at what cost, and what it found, in a few plain sentences."""
    return " ".join(part for part in (_trained(story), _cost(story), _found(story)) if part)


def waiting(story: Story) -> str:
    """Where the time went, in a sentence or two: as it was measured last, or from the seconds of the steps."""
    if story.held:
        return story.held[-1].text
    share, work = story.waiting, story.work
    if share is None:
        return ""
    text = f"The loop waited for batches {percent(share)} of its time."
    total = sum(work.values())
    if total > 0:
        most = max(work, key=lambda name: work[name])
        text += f" Of what the workers did, {most} took {work[most] / total:.0%}."
    return text


def _trained(story: Story) -> str:
    done = sum(window.finished for window in story.windows)
    what = str(story.settings.get("model") or "The model")
    population = max((window.population for window in story.windows), default=0)
    if not population:
        return "The run has planned nothing yet."
    data = f"{population:,} samples" + (f" of {len(story.classes)} classes" if story.classes else "")
    if story.metric is None:
        return f"{what} trained for {count(done, 'epoch')} on {data}; no validation result was reported."
    reached = f"{what} reached {_measure(story)} {metric(story, story.metric)}"
    best = story.best
    if best is not None and best > story.metric:
        reached += f" (best {metric(story, best)})"
    return f"{reached} after {count(done, 'epoch')} on {data}."


def _measure(story: Story) -> str:
    return "a test accuracy of" if story.measure == "accuracy" else "a validation metric of"


def _cost(story: Story) -> str:
    if not story.visits:
        return ""
    took = f"{seconds(story.seconds)} of training, of which salience took {story.own:.1%} for itself"
    if not story.selects:
        text = f"Nothing was left out; {took}."
        saved = 0.0 if story.forecast is None else story.forecast["saved"]
        return text + (f" Selection would make {saved:.0%} fewer visits." if saved > 0 else "")
    return f"It made {story.share:.0%} of the visits that all data would take; {took}."


def _found(story: Story) -> str:
    found = story.findings
    if found is None:
        return ""
    parts: list[str] = []
    if found.suspected:
        parts.append(f"{count(found.suspected, 'label')} that look{'s' if found.suspected == 1 else ''} wrong")
    if found.spare:
        parts.append(f"{found.spare:,} near-cop{'y' if found.spare == 1 else 'ies'}")
    if story.broken:
        parts.append(f"{count(len(story.broken), 'broken sample')}")
    weak = f"Labels cannot be judged: {found.weak}." if found.weak else ""
    if not parts:
        return weak or ("No label looks wrong." if found.judged else "")
    said = f"It found {' and '.join(parts)}." if len(parts) < 3 else f"It found {parts[0]}, {parts[1]} and {parts[2]}."
    return f"{said} {weak}".rstrip()
