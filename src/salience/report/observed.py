"""The summary of a run as text: what could be saved, which classes and samples are hard, what was never learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from salience.report.words import cost, count, shorter_of


def render(summary: dict[str, Any], *, names: Sequence[str] | None = None, shown: int = 8) -> str:
    """Plain text for an `observed` event's summary; `names` are class names."""
    if not summary["seen"]:
        return "Nothing was recorded yet: call loader.loss(losses, logits, targets) in the training step."
    parts = [_headline(summary), _classes(summary, names, shown), _hardest(summary, names, shown)]
    parts += [_suspects(summary, names, shown), _never(summary, names, shown)]
    if summary["not_finite"]:
        parts.append(f"{summary['not_finite']:,} losses were NaN or infinite; they were counted and not stored.")
    return "\n\n".join(part for part in parts if part)


def _headline(summary: dict[str, Any]) -> str:
    seen = (
        f"{summary['seen']:,} of {summary['samples']:,} samples seen, {summary['visits']:,} visits, "
        f"mean loss {summary['mean_loss']:.3f}."
    )
    told = _forecast(summary["forecast"]) if summary.get("selected") is None else _selected(summary)
    return "\n".join([seen, *told])


def _selected(summary: dict[str, Any]) -> list[str]:
    """What a run that selects has saved."""
    made = summary["selected"]
    when = "Over" if made["windows"] == summary["forecast"]["windows"] else "So far, over"
    return [f"{when} {count(made['windows'], 'epoch')}, selection made {_visits(made)}."]


def _forecast(forecast: dict[str, Any]) -> list[str]:
    """Whether less would do, and what selection would save."""
    found = shorter_of(forecast)
    over = f"over {count(forecast['windows'], 'epoch')}"
    lines = cost(found, forecast["windows"])
    if found.rising:
        lines.append(f"Selection is not advised for this run; {over} it would make {_visits(forecast)}.")
    else:
        lines.append(f"Forecast: {over} selection would make {_visits(forecast)}.")
    if forecast["skipped_mean_loss"] is not None:
        skipped = round((forecast["visits_full"] - forecast["visits"]) / forecast["windows"])
        lines.append(
            f"It would skip {skipped:,} samples per epoch, {forecast['skipped_in_middle']:,} in the middle of the run, where "
            f"their mean loss is {forecast['skipped_mean_loss']:.3f}."
        )
    return lines


def _visits(told: dict[str, Any]) -> str:
    return f"{told['visits']:,} visits instead of {told['visits_full']:,} ({told['saved']:.0%} fewer)"


def _name(index: int, names: Sequence[str] | None) -> str:
    if index < 0:
        return "-"
    return names[index] if names is not None and index < len(names) else str(index)


def _classes(summary: dict[str, Any], names: Sequence[str] | None, shown: int) -> str:
    classes = sorted(summary["classes"], key=lambda c: -(c["mean_loss"] or 0))
    if not classes:
        return ""
    lines = [f"Classes, hardest first{'' if len(classes) <= shown else f' ({shown} of {len(classes)})'}:"]
    lines.append(
        f"  {'class':<16} {'samples':>9} {'mean loss':>10} {'accuracy':>9} {'of samples':>11} {'of visits':>10}"
    )
    shares = {one["label"]: one for one in summary["balance"]}
    for c in classes[:shown]:
        share = shares[c["class"]]
        visits = "-" if share["visits"] is None else f"{share['visits']:.1%}"
        accuracy = "-" if c["accuracy"] is None else f"{c['accuracy']:.1%}"
        loss = "-" if c["mean_loss"] is None else f"{c['mean_loss']:.3f}"
        line = f"  {_name(c['class'], names):<16} {c['samples']:>9,} {loss:>10} {accuracy:>9}"
        lines.append(f"{line} {share['samples']:>11.1%} {visits:>10}")
    uneven = [one for one in summary["balance"] if one["reason"]]
    uneven.sort(key=lambda one: one["visits"] / one["samples"])
    lines += [f"  {_name(one['label'], names)} was {one['reason']}." for one in uneven[:shown]]
    return "\n".join(lines)


def _sample(s: dict[str, Any], names: Sequence[str] | None) -> str:
    guess = "" if s["guess"] < 0 else f", model says {_name(s['guess'], names)}"
    label = "" if s["label"] < 0 else f"labelled {_name(s['label'], names)}{guess}, "
    return f"  sample {s['id']:>8}: {label}mean loss {s['mean_loss']:.2f}, right {s['right']} of {s['seen']} visits"


def _hardest(summary: dict[str, Any], names: Sequence[str] | None, shown: int) -> str:
    lines = [_sample(s, names) for s in summary["hardest"][:shown]]
    return "\n".join(["Hardest samples:", *lines])


def _suspects(summary: dict[str, Any], names: Sequence[str] | None, shown: int) -> str:
    suspects = summary.get("suspects")
    if not suspects or not suspects["count"]:
        weak = suspects and suspects.get("weak")
        return f"Labels cannot be judged: {weak}." if weak else ""
    head = f"Suspected wrong labels: {suspects['count']:,} (the history contradicts them; the firmest first):"
    lines = [f"{_sample(s, names)}, {s['confidence']:.0%} sure" for s in suspects["samples"][:shown]]
    return "\n".join([head, *lines])


def _never(summary: dict[str, Any], names: Sequence[str] | None, shown: int) -> str:
    count = summary["never_learnt"]
    if not summary["classes"]:
        return ""
    if count == 0:
        return "Every sample seen twice or more was given its label at least once."
    return f"Never learnt: {count:,} samples were not given their label at any of their visits."
