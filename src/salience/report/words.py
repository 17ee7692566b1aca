"""Numbers in readable form, and the sentences that all reports share: console, text and page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from salience.curves import Shorter
from salience.errors import ConfigError, printable
from salience.events import Findings, Suspect

Names = Sequence[str] | None
"""Names of the classes, if they are known."""
SampleNames = Sequence[str] | Callable[[int], str] | None
"""Names of samples: one per sample, or a function of the id."""


# ---------------------------------------------------------------- numbers


def count(number: int, what: str) -> str:
    """'1 epoch', '2,000 epochs'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def percent(value: float) -> str:
    """A share with as many digits as it needs: '0.4%', '12%'."""
    return f"{value:.1%}" if abs(value) < 0.0995 and value else f"{value:.0%}"


def seconds(value: float) -> str:
    """'4.3 ms', '0.4 s', '42 s', '3 min 20 s', '2 h 5 min'."""
    if 0 < value < 0.095:
        return f"{1000 * value:.2g} ms"
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


def size(value: float) -> str:
    """Bytes: '512 bytes', '3.4 MiB'."""
    if abs(value) < 1024:
        return f"{value:,.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"


def short_size(value: float) -> str:
    """Bytes for an axis: '0', '5 kB', '1.5 GB'."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= power:
            return f"{value / power:.3g} {unit}"
    return f"{value:.3g}"


def loss(value: float | None) -> str:
    """Three significant digits, however small: '1.25', '0.00042', '3.1e-07'; '-' if it is unknown."""
    return "-" if value is None else f"{value:.3g}"


def times(value: float | None) -> str:
    """A speed-up: '1.50x'; '∞' if it is unbounded."""
    return "∞" if value is None else f"{value:.2f}x"


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def class_name(index: int, names: Names) -> str:
    """The name of a class; 'class 3' if it has none."""
    return names[index] if names is not None and 0 <= index < len(names) else f"class {index}"


def sample_name(sample: int, names: SampleNames) -> str:
    """The name of a sample."""
    if names is None:
        return f"sample {sample}"
    try:
        return printable(str(names(sample) if callable(names) else names[sample]))
    except (IndexError, KeyError) as cause:
        raise ConfigError(f"names has no name for a sample of this run ({cause}); give one per sample.") from cause


# ---------------------------------------------------------------- visits


def instead(visits: float, full: float) -> str:
    """'2,000 visits instead of 4,000 (50% fewer)'."""
    change = (full - visits) / full if full else 0.0
    return f"{visits:,.0f} visits instead of {full:,.0f} ({abs(change):.0%} {'fewer' if change >= 0 else 'more'})"


def selected(windows: int, planned: int | None, visits: float, full: float) -> str:
    """What a selecting run has saved in `windows` of the `planned` windows."""
    when = "Over" if planned is None or windows >= planned else "So far, over"
    return f"{when} {count(windows, 'epoch')}, selection made {instead(visits, full)}."


def selected_in_steps(steps: int, windows: int, visits: float, population: int) -> str:
    """What a selecting run that is counted in steps has gained: more epochs, not fewer visits."""
    passes = visits / population if population else 0.0
    return (
        f"In {count(steps, 'step')}, selection made {count(windows, 'epoch')}; on all data they would be {passes:.1f}."
    )


def forecast(told: Mapping[str, Any], found: Shorter) -> list[str]:
    """Sentences on whether fewer epochs would be enough, and on what selection would save."""
    over, saved = f"over {count(round(told['windows']), 'epoch')}", instead(told["visits"], told["visits_full"])
    lines = cost(found, round(told["windows"]))
    if told["visits"] >= told["visits_full"]:
        lines.append(f"Forecast: {over} selection would save no visits.")
    elif found.rising:
        lines.append(f"Selection is not advised for this run; {over} it would make {saved}.")
    else:
        lines.append(f"Forecast: {over} selection would make {saved}.")
    return lines


def cost(found: Shorter, epochs: int) -> list[str]:
    """What fewer visits would cost; shown before selection is mentioned."""
    if found.cannot_say:
        return [f"Cannot say what fewer visits would cost: {found.cannot_say}."]
    return [*_enough(found, epochs), *_lost(found, epochs)]


def _amount(found: Shorter, value: float, *, unit: bool = True) -> str:
    """A difference of the metric: '0.2 points' if results are shares, otherwise two significant digits."""
    if not found.points:
        return f"{value:.2g}"
    return f"{100 * value:.1f}" + " points" * unit


def _enough(found: Shorter, epochs: int) -> list[str]:
    if found.enough_epochs is None or found.moved is None or found.metric_noise is None:
        return []
    rest, noise = epochs - found.enough_epochs, _amount(found, found.metric_noise, unit=False)
    moved = f"changed the validation metric by {_amount(found, abs(found.moved))}, less than its noise ({noise})"
    if found.moved < -found.metric_noise:
        moved = f"lowered the validation metric by {_amount(found, -found.moved)} (its noise is {noise})"
    return [f"{found.enough_epochs:,} of {count(epochs, 'epoch')} would be enough: the last {rest:,} {moved}."]


def _lost(found: Shorter, epochs: int) -> list[str]:
    if found.share >= 1 or found.loss_low is None or found.loss_high is None or found.metric_noise is None:
        return []
    length = f"{max(1, int(found.share * epochs + 0.5)):,} of {count(epochs, 'epoch')}"
    run = f"run on all data with as many visits as selection makes ({length})"
    noise, high = _amount(found, found.metric_noise, unit=False), _amount(found, found.loss_high)
    if found.loss_high <= found.metric_noise:
        return [f"A {run} would end within the noise ({_amount(found, found.metric_noise)}) of this one."]
    if not found.rising:
        return [f"A {run} would lose up to {high} (the noise is {noise})."]
    lost = f"a {run} would end {_amount(found, found.loss_low, unit=False)} to {high} lower (the noise is {noise})"
    longer = [] if found.enough_epochs is not None else ["This run was still learning: train longer, not shorter."]
    return [f"Fewer visits will cost accuracy: {lost}.", *longer]


# ---------------------------------------------------------------- findings


def cannot_judge(why: str) -> str:
    return f"Labels cannot be judged: {why}."


def look_wrong(number: int, judged: int | None = None, expected: float | None = None) -> str:
    """'6 of 300 labels look wrong; about 5 of them probably are'."""
    text = f"{number:,}" if judged is None else f"{number:,} of {judged:,}"
    label = "labels" if judged is not None or number != 1 else "label"
    text += f" {label} look{'s' if number == 1 else ''} wrong"
    return (
        text if expected is None else f"{text}; about {expected:,.0f} of them probably {'is' if number == 1 else 'are'}"
    )


def labels(found: Findings) -> str:
    """What can be said about the labels; empty if they were never judged."""
    if found.suspected:
        doubt = (
            " That many speak against the model rather than the labels." if 2 * found.suspected >= found.judged else ""
        )
        return f"{look_wrong(found.suspected, found.judged, found.expected)}.{doubt}"
    if found.weak:
        return cannot_judge(found.weak)
    return f"None of {found.judged:,} labels look wrong." if found.judged else ""


def near_copies(found: Findings) -> str:
    """How many samples can be represented by others; empty if copies were not searched for."""
    if found.spare is None or found.groups is None:
        return ""
    if not found.spare:
        return "No sample is a near-copy of another."
    return f"{count(found.spare, 'sample')} could be represented by a near-copy ({count(found.groups, 'group')})."


def hard(found: Findings) -> str:
    """A sentence on the list of hard samples."""
    if found.weak:
        return f"{cannot_judge(found.weak)} Some of these samples may be mislabelled."
    if not found.judged:
        return "Labels were not judged: some of these samples may be mislabelled."
    return "These samples are hard although their labels seem right."


def not_finite(number: int) -> str:
    if not number:
        return ""
    losses = "1 loss was" if number == 1 else f"{number:,} losses were"
    return f"{losses} NaN or infinite: counted, and not stored."


def history(mean_loss: float | None, right: int | None, seen: int) -> str:
    """'mean loss 0.12, right at 3 of 8 visits'; without the latter if correctness is unknown."""
    text = f"mean loss {loss(mean_loss)}"
    return text + (
        f", right at {right:,} of {count(seen, 'visit')}" if right is not None else f", {count(seen, 'visit')}"
    )


def suspicion(one: Suspect, names: Names) -> str:
    """Why a label looks wrong."""
    if one.guess_p is None or one.right is None or one.seen is None:  # an older log has the sentence alone
        return one.reason
    says = f"The model predicts {class_name(one.guess, names)} with a mean probability of {one.guess_p:.2f}"
    return f"{says}, and predicted the label at {one.right:,} of {count(one.seen, 'visit')}."
