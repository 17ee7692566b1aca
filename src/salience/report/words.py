"""Numbers as people read them, and a run in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from salience.select.enough import Shorter

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


def shorter_of(forecast: Mapping[str, Any]) -> Shorter:
    """What a forecast says of a shorter run; an older salience said nothing."""
    return Shorter(**{field.name: forecast[field.name] for field in fields(Shorter) if field.name in forecast})


def cost(found: Shorter, epochs: int) -> list[str]:
    """What fewer visits would cost, in plain sentences, to be read before selection is spoken of."""
    if found.cannot_say:
        return [f"Cannot say what fewer visits would cost: {found.cannot_say}."]
    return [*_enough(found, epochs), *_lost(found, epochs)]


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


def _amount(found: Shorter, value: float, *, unit: bool = True) -> str:
    """A difference of the metric: '0.2 points' where results are shares, else as many digits as matter."""
    if not found.points:
        return f"{value:.2g}"
    return f"{100 * value:.1f}" + " points" * unit


def _enough(found: Shorter, epochs: int) -> list[str]:
    if found.enough_epochs is None or found.moved is None or found.metric_noise is None:
        return []
    rest, noise = epochs - found.enough_epochs, _amount(found, found.metric_noise, unit=False)
    moved = f"moved validation by {_amount(found, abs(found.moved))}, less than its own noise ({noise})"
    if found.moved < -found.metric_noise:
        moved = f"lowered validation by {_amount(found, -found.moved)} (its own noise is {noise})"
    return [f"{found.enough_epochs:,} of {count(epochs, 'epoch')} would do: the last {rest:,} {moved}."]


def _lost(found: Shorter, epochs: int) -> list[str]:
    if found.share >= 1 or found.loss_low is None or found.loss_high is None or found.metric_noise is None:
        return []
    length = f"{max(1, int(found.share * epochs + 0.5)):,} of {count(epochs, 'epoch')}"
    run = f"run on all data with as many visits as selection makes ({length})"
    noise, high = _amount(found, found.metric_noise, unit=False), _amount(found, found.loss_high)
    if found.loss_high <= found.metric_noise:
        return [f"A {run} would end within its noise ({_amount(found, found.metric_noise)})."]
    if not found.rising:
        return [f"A {run} would lose up to {high} (noise {noise})."]
    lost = f"a {run} would end {_amount(found, found.loss_low, unit=False)} to {high} lower (noise {noise})"
    longer = [] if found.enough_epochs is not None else ["This run was still learning: train longer, not shorter."]
    return [f"Fewer visits will cost: {lost}.", *longer]


def _measure(story: Story) -> str:
    return "a test accuracy of" if story.measure == "accuracy" else "a validation metric of"


def _cost(story: Story) -> str:
    if not story.visits:
        return ""
    took = f"{seconds(story.seconds)} of training, of which salience took {story.own:.1%} for itself"
    if not story.selects:
        return " ".join([f"Nothing was left out; {took}.", *_forecast(story)])
    return f"It made {story.share:.0%} of the visits that all data would take; {took}."


def _forecast(story: Story) -> list[str]:
    """Whether less would do, and what selection would save."""
    saved = 0.0 if story.forecast is None else story.forecast["saved"]
    if story.shorter is None or (story.forecast is None and story.shorter.cannot_say):
        return []
    said = cost(story.shorter, round(story.forecast["windows"]) if story.forecast else story.epochs)
    advice = "; it is not advised here" if story.shorter.rising else ""
    return said + ([f"Selection would make {saved:.0%} fewer visits{advice}."] if saved > 0 else [])


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
