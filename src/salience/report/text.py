"""Reports as plain text: of a summary (`loader.report()`), and of a story (`salience report` and the text of the page)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from salience.curves import Shorter
from salience.events import build
from salience.report import words
from salience.report.console import columns
from salience.report.story import Story
from salience.report.words import Names, SampleNames, count

MAX_LINES_LISTED = 8
"""Maximum number of classes, and of samples of each kind, that are listed."""


# ---------------------------------------------------------------- a summary


def render(summary: Mapping[str, Any], *, names: Names = None, samples: SampleNames = None) -> str:
    """What a run has learnt about its samples, from `loader.summary()`; `names` are those of classes."""
    if not summary["seen"]:
        return "Nothing was recorded yet: call loader.loss(losses, logits, targets) in the training step."
    parts = (
        _headline(summary),
        _classes(summary, names),
        "\n".join(
            ["Hardest samples:", *(_sample(one, names, samples) for one in summary["hardest"][:MAX_LINES_LISTED])]
        ),
        _suspects(summary, names, samples),
        _never(summary),
        words.not_finite(summary["not_finite"]),
    )
    return "\n\n".join(part for part in parts if part)


def _headline(summary: Mapping[str, Any]) -> str:
    seen = f"{summary['seen']:,} of {summary['samples']:,} samples seen, {count(summary['visits'], 'visit')}"
    lines = [f"{seen}, mean loss {words.loss(summary['mean_loss'])}."]
    told, made = summary["forecast"], summary.get("selected")
    if made is not None and made.get("steps"):
        said = words.selected_in_steps(made["steps"], made["windows"], made["visits"], summary["samples"])
        return "\n".join([*lines, said])
    if made is not None:
        return "\n".join(
            [*lines, words.selected(made["windows"], told["windows"], made["visits"], made["visits_full"])]
        )
    lines += words.forecast(told, build(Shorter, told))
    if told["skipped_mean_loss"] is not None and told["visits"] < told["visits_full"]:
        skipped = round((told["visits_full"] - told["visits"]) / told["windows"])
        lines.append(
            f"It would skip {skipped:,} samples per epoch, and {told['skipped_in_middle']:,} in the middle of the run, whose "
            f"mean loss is {words.loss(told['skipped_mean_loss'])}."
        )
    return "\n".join(lines)


def _name(index: int, names: Names) -> str:
    if index < 0:
        return "-"
    return names[index] if names is not None and index < len(names) else str(index)


def _classes(summary: Mapping[str, Any], names: Names) -> str:
    classes = sorted(summary["classes"], key=lambda c: -(c["mean_loss"] or 0))
    if not classes:
        return ""
    every = summary["class_count"]
    lines = [f"Classes, hardest first{'' if every <= MAX_LINES_LISTED else f' ({MAX_LINES_LISTED} of {every:,})'}:"]
    rows = [("class", "samples", "mean loss", "accuracy", "of samples", "of visits")]
    for c in classes[:MAX_LINES_LISTED]:
        accuracy, share, visits = (
            "-" if c[key] is None else f"{c[key]:.1%}" for key in ("accuracy", "share", "visits")
        )
        rows.append(
            (_name(c["label"], names), f"{c['samples']:,}", words.loss(c["mean_loss"]), accuracy, share, visits)
        )
    lines.append(columns(rows, right=range(1, 6), indent="  "))
    uneven = sorted((c for c in classes if c["reason"]), key=lambda c: c["visits"] / c["share"])
    return "\n".join([*lines, *(f"  {_name(c['label'], names)} was {c['reason']}." for c in uneven[:MAX_LINES_LISTED])])


def _sample(one: Mapping[str, Any], names: Names, samples: SampleNames) -> str:
    guess = "" if one["guess"] < 0 else f", model says {_name(one['guess'], names)}"
    label = "" if one["label"] < 0 else f"labelled {_name(one['label'], names)}{guess}, "
    named = f"sample {one['id']:>8}"
    if samples is not None:
        named = f"{words.sample_name(one['id'], samples)} (sample {one['id']})"
    return f"  {named}: {label}{words.history(one['mean_loss'], one['right'], one['seen'])}"


def _suspects(summary: Mapping[str, Any], names: Names, samples: SampleNames) -> str:
    suspects = summary.get("suspects")
    if not suspects or not suspects["count"]:
        return words.cannot_judge(suspects["weak"]) if suspects and suspects["weak"] else ""
    head = f"{words.look_wrong(suspects['count'], expected=suspects['expected'])}. Most certain first:"
    return "\n".join([
        head,
        *(
            f"{_sample(one, names, samples)}, {one['confidence']:.0%} certain"
            for one in suspects["samples"][:MAX_LINES_LISTED]
        ),
    ])  # fmt: skip


def _never(summary: Mapping[str, Any]) -> str:
    if not summary["classes"]:
        return ""
    if not summary["never_learnt"]:
        return "Every sample seen at least twice was classified correctly at least once."
    return (
        f"Never learnt: {count(summary['never_learnt'], 'sample')} seen at least twice and never classified correctly."
    )


# ---------------------------------------------------------------- a story


def verdict(story: Story) -> str:
    """A few plain sentences on what was trained, how well, at what cost, and what was found."""
    return " ".join(part for part in (_trained(story), *_cost(story), _decided(story), _found(story)) if part)


def sections(story: Story) -> dict[str, str]:
    """A sentence or two about each part of the run, by name; empty if there is nothing to say."""
    found = story.findings
    return {
        "time": _waiting(story),
        "machine": _machine(story),
        "bytes": _bytes(story),
        "gradients": _gradients(story),
        "stages": _stages(story),
        "suspects": "" if found is None else words.labels(found),
        "copies": "" if found is None else words.near_copies(found),
        "hard": "" if found is None else words.hard(found),
        "losses": "" if found is None else words.not_finite(found.not_finite),
    }


def metric(story: Story, value: float | None) -> str:
    """A validation result, as a percentage if all results are shares."""
    if value is None:
        return "-"
    return f"{value:.1%}" if story.in_shares else f"{value:.4g}"


def _trained(story: Story) -> str:
    done, what = story.done, str(story.settings.get("model") or "The model")
    population = story.population
    if not population:
        return "Nothing was recorded for a whole epoch yet." if story.recorded else "The run has planned nothing yet."
    data = f"{population:,} samples" + (f" of {len(story.classes)} classes" if story.classes else "")
    if story.metric is None:
        return f"{what} trained for {count(done, 'epoch')} on {data}; no validation result was reported."
    name = "a test accuracy of" if story.measure == "accuracy" else "a validation metric of"
    best = "" if story.best is None or story.best <= story.metric else f" (best: {metric(story, story.best)})"
    return f"{what} reached {name} {metric(story, story.metric)}{best} after {count(done, 'epoch')} on {data}."


def _cost(story: Story) -> list[str]:
    if not story.visits:
        return []
    took = f"Training took {words.seconds(story.seconds)}, {story.own:.1%} of it for salience itself."
    if story.selects:
        if story.run.steps is not None:
            return [words.selected_in_steps(story.batches, story.done, story.visits, story.population), took]
        return [words.selected(story.done, story.run.epochs, story.visits, story.full), took]
    if story.recorded:
        return [took, f"The loop drew its samples itself; {count(story.visits, 'visit')} were recorded."]
    every = "Every sample was visited in every epoch." if story.run.steps is None else "No sample was left out."
    said = [took, every]
    if story.shorter is None:
        return said
    if story.forecast is not None:
        return said + words.forecast(story.forecast, story.shorter)
    return said if story.shorter.cannot_say else said + words.cost(story.shorter, story.epochs)


def _decided(story: Story) -> str:
    """What `auto` kept and undid, or that it did nothing; empty if it was off."""
    kept = [
        one.lever + ("" if one.measured is None else f" ({one.measured:.2f}x as fast)")
        for one in story.decisions
        if one.action == "keep"
    ]
    undone = [one.lever for one in story.decisions if one.action == "undo"]
    if not story.decisions:
        return "auto found no lever worth a trial." if story.auto else ""
    said = ("kept", kept), ("tried and undid", undone)
    parts = [f"{what} {words.listed(levers)}" for what, levers in said if levers]
    return f"auto {words.listed(parts)}." if parts else "auto changed nothing."


def _machine(story: Story) -> str:
    """How busy the machine was, as means over the run; empty if there is only one sample."""
    used = story.usage
    if len(used) < 2:
        return ""

    def mean(values: list[float]) -> str:
        return words.percent(sum(values) / len(values))

    parts = [f"the processors were {mean([one.cpu for one in used])} busy"]
    parts += [
        f"GPU {k} was {mean([one.gpu[k] for one in used])} busy" for k in range(min(len(one.gpu) for one in used))
    ]
    parts.append(f"{mean([one.memory for one in used])} of the memory was in use")
    return f"On average, {words.listed(parts)}, other programs included."


def _found(story: Story) -> str:
    found = story.findings
    if found is None:
        return ""
    parts: list[str] = []
    if found.suspected:
        parts.append(words.look_wrong(found.suspected).replace(" look", " that look", 1))
    if found.spare:
        parts.append(f"{found.spare:,} near-cop{'y' if found.spare == 1 else 'ies'}")
    if story.broken:
        parts.append(count(len(story.broken), "broken sample"))
    said = f"Found: {words.listed(parts)}." if parts else ""
    labels = "" if found.suspected else "Labels cannot be judged yet." if found.weak else words.labels(found)
    return f"{said} {labels}".strip()


def _waiting(story: Story) -> str:
    """Where the time went, by the last measurement or from the seconds of the steps."""
    if story.bottlenecks:
        return story.bottlenecks[-1].text
    share, work = story.waiting, story.work
    if share is None:
        return ""
    text, total = f"The loop spent {words.percent(share)} of its time waiting for batches.", sum(work.values())
    if total > 0:
        most = max(work, key=lambda name: work[name])
        text += f" {work[most] / total:.0%} of the time to make them went into {most}."
    return text


def _gradients(story: Story) -> str:
    """The result of the last probe of gradients."""
    if not story.probes:
        return ""
    last = story.probes[-1]
    at = f"At an accuracy of {words.percent(last.accuracy)}"
    if last.learnt_loss is None:
        return f"{at} no sample of the probe had nine tenths of its gradient near zero: none is learnt to the end."
    relative = last.learnt_loss / last.mean_loss if last.mean_loss > 0 else 0.0
    return (
        f"{at} nine tenths of the gradient are near zero for samples under a loss of {last.learnt_loss:.3g} "
        f"({relative:.2g} times the mean): they teach hardly anything."
    )


def _bytes(story: Story) -> str:
    feed = story.feed
    if not feed:
        return ""
    asked = f"{feed.get('samples', 0):,.0f} samples were read in {feed.get('requests', 0):,.0f} requests"
    cache = "" if feed.get("cache_bytes") else " No cache was used."
    return f"{asked}; the store sent {words.size(feed.get('bytes_sent', 0))}.{cache}"


def _stages(story: Story) -> str:
    treated = story.treated
    if treated is None:
        return ""
    saved = f", which saved {words.seconds(treated.saved_seconds)} of the workers' time" if treated.reused else ""
    return (
        f'Augmentation with treat="{treated.treatment}": {treated.reused:,} of {count(treated.visits, "visit")} started from a '
        f"kept intermediate{saved}."
    )
