"""The charts of a story and of a comparison; None if there is nothing to draw."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from salience.events import MachineUse
from salience.report import words
from salience.report.charts import Chart, Series, bars, columns, lines
from salience.report.compared import ComparedArm, Comparison
from salience.report.story import Result, Story

MAX_CLASSES_DRAWN = 20
"""Maximum number of classes in a chart; with more, the worst or the most uneven."""
MAX_SERIES_DRAWN = 6
"""Maximum number of series in a chart: the number of colours."""
MAX_LAYERS_DRAWN = 12
"""Maximum number of layers drawn; with more, the largest."""
SMALLEST_LOSS = 1e-6
"""Smaller losses are drawn as this value, on an axis of powers of ten."""

Points = Sequence[tuple[float, float]]


def _over(curves: Mapping[str, Points]) -> tuple[list[float], Series]:
    """Several curves over one axis: the union of their positions, None where a curve has no value."""
    x = sorted({at for points in curves.values() for at, _ in points})
    return x, {name: [dict(points).get(at) for at in x] for name, points in curves.items()}


# ---------------------------------------------------------------- how it went


def results(story: Story, baseline: Comparison | None) -> Chart | None:
    runs = {story.name: story.evaluations}
    for other in () if baseline is None else baseline.arms[0].stories[:1]:
        runs[f"baseline {other.name}"] = other.evaluations
    x, series = _over({name: [(float(one.window), one.metric) for one in found] for name, found in runs.items()})
    name = "Test accuracy" if story.measure == "accuracy" else "Validation metric"
    return lines(name, x, series, x_label=f"{story.unit}s done", form=_metric_form(story))


def _metric_form(story: Story) -> Callable[[float], str]:
    return words.percent if story.in_shares else words.short


def training(story: Story) -> list[Chart | None]:
    """The training loss and the learning rate, epoch by epoch."""
    ends = [window.end for window in story.windows if window.end is not None]
    x = [end.window + 1.0 for end in ends]
    found = {
        "Training loss": [end.loss for end in ends],
        f"Learning rate at the end of each {story.unit}": [end.lr for end in ends],
    }
    return [
        lines(title, x, {title.split(" at ")[0].lower(): values}, x_label=story.unit, form="{:.3g}".format, least=0.0)
        for title, values in found.items()
    ]


def seconds_per_epoch(story: Story) -> Chart | None:
    done = [window for window in story.windows if window.end is not None and window.end.of]
    parts = {"seconds": [window.seconds for window in done]}
    return columns(
        f"Seconds per {story.unit}",
        [str(w.number + 1) for w in done],
        parts,
        x_label=story.unit,
        form=lambda v: f"{v:.3g} s",
    )


# ---------------------------------------------------------------- where the time went


def timeline(story: Story) -> Chart | None:
    """Seconds of every epoch, by what the loop did."""
    done = [(window, window.steps) for window in story.windows if window.steps is not None]
    spent = [steps for _, steps in done]
    series: dict[str, list[float]] = {
        "waiting for batches": [one.wait for one in spent],
        "copying to the device": [one.copy for one in spent],
        "forward": [one.forward for one in spent],
        "backward and optimizer": [one.backward for one in spent],
        "planning and the rest": [max(0.0, w.seconds - s.wait - s.copy - s.forward - s.backward) for w, s in done],
    }
    if not any(series["copying to the device"]):
        del series["copying to the device"]
    names = [str(window.number + 1) for window, _ in done]
    return columns("Seconds of the loop", names, series, x_label=story.unit, form=lambda v: f"{v:.3g} s")


def work(story: Story) -> Chart | None:
    work = sorted(((name, spent) for name, spent in story.work.items() if spent > 0), key=lambda item: -item[1])
    values = {"seconds": [spent for _, spent in work]}
    return bars("Seconds to make the batches", [name for name, _ in work], values, form=words.seconds, what="stage")


def machine(story: Story) -> list[Chart | None]:
    """How busy the machine was: shares of processors, memory and GPUs; bytes through disks and networks."""
    used = story.usage
    if len(used) < 2:
        return []
    gpus = range(min(MAX_SERIES_DRAWN - 2, *(len(one.gpu) for one in used)))
    shares: dict[str, Callable[[MachineUse], float]] = {
        "processors": lambda one: one.cpu,
        "memory": lambda one: one.memory,
    }
    shares |= {f"GPU {k}": lambda one, k=k: one.gpu[k] for k in gpus}
    moved: dict[str, Callable[[MachineUse], float]] = {"disk": lambda one: one.disk, "network": lambda one: one.network}

    def drawn(
        title: str, of: Mapping[str, Callable[[MachineUse], float]], form: Callable[[float], str]
    ) -> Chart | None:
        series = {name: [read(one) for one in used] for name, read in of.items()}
        x = [one.seconds for one in used]
        return lines(title, x, series, x_label="seconds", form=form, x_form=words.short, least=0.0)

    return [
        drawn("Busy: share of the time, and of the memory", shares, words.percent),
        drawn("Bytes per second, read and written", moved, words.short_size),
    ]


def bytes_sent(story: Story) -> Chart | None:
    feed = story.feed
    if not feed.get("cache_bytes"):
        return None
    names = {
        "bytes": "without a cache", "lru_bytes": "with LRU", "never_evict_bytes": "with one that never evicts",
        "bytes_used": "this run", "bound_bytes": "the least possible",
    }  # fmt: skip
    keys = [key for key in names if f"cache_{key}" in feed]  # rivals are simulated only where there is a trace
    values = {"bytes": [float(feed[f"cache_{key}"]) for key in keys]}
    title = "Bytes of samples that the store sent"
    return bars(title, [names[key] for key in keys], values, form=words.size, what="cache")


def stage_costs(story: Story) -> Chart | None:
    costs = {} if story.treated is None else {k: v for k, v in story.treated.costs_us.items() if v is not None}
    values = {"microseconds": list(costs.values())}
    return bars("Microseconds per call", list(costs), values, form=lambda v: f"{v:,.0f} µs", what="stage")


# ---------------------------------------------------------------- what was selected


def by_importance(story: Story) -> Chart | None:
    """The share picked among the least and among the most important samples, over time."""
    done = [(w.number + 1.0, w.plan.by_importance or ()) for w in story.windows]
    done = [(number, shares) for number, shares in done if len(shares) == 10]
    if all(share == 1 for _, shares in done for share in shares):
        return None
    groups = {"least important tenth": (0, 1), "middle": (4, 6), "most important tenth": (9, 10)}
    series = {name: [statistics.fmean(s[low:high]) for _, s in done] for name, (low, high) in groups.items()}
    return lines(
        "Share visited, by importance", [number for number, _ in done], series, x_label=story.unit, form=words.percent,
        least=0.0,
    )  # fmt: skip


def kept(story: Story) -> Chart | None:
    if not story.selects:
        return None
    shares = {"visited": [w.plan.picked * story.pieces / w.population if w.population else None for w in story.windows]}
    names = [str(w.number + 1) for w in story.windows]
    return columns("Share of the samples visited", names, shares, x_label=story.unit, form=words.percent)


def times_trained(story: Story) -> Chart | None:
    known = None if story.findings is None else story.findings.visits
    if known is None or not known.counted or not story.selects:
        return None
    names = [str(low) if low == high else f"{low} to {high}" for low, high, _ in known.times]
    note = f"{known.always:,} samples in every epoch, {known.sometimes:,} in some, {known.never:,} in none."
    return columns(
        "How often samples were trained on", names, {"samples": [n for *_, n in known.times]}, x_label="times",
        form=words.short, note=note,
    )  # fmt: skip


def by_loss(story: Story) -> Chart | None:
    known = None if story.findings is None else story.findings.visits
    if known is None or not known.loss_edges:
        return None
    edges = known.loss_edges
    names = [f"{low:.2g} to {high:.2g}" for low, high in itertools.pairwise(edges)]
    series = {"samples": [often + seldom for often, seldom in zip(known.often, known.seldom, strict=True)]}
    if story.selects and known.counted:
        parts = {"in more than half of the epochs": known.often, "in half or fewer": known.seldom}
        series = {name: list(values) for name, values in parts.items() if any(values)}
    feet = [(float(i), f"{edges[i]:.2g}") for i in range(0, len(edges), (len(edges) - 1) // 4)]
    return columns(
        "Importance: the samples by mean loss", names, series, x_label="mean loss", form=words.short, feet=feet,
        note="Easy samples are on the left, hard ones on the right; importance is computed from this.",
    )  # fmt: skip


def dropped(story: Story) -> Chart | None:
    """What every filter left out, window by window."""
    names = dict.fromkeys(note.name for window in story.windows for note in window.plan.filters)
    left = {name: [sum(n.dropped for n in w.plan.filters if n.name == name) for w in story.windows] for name in names}
    series = dict([item for item in left.items() if any(item[1])][:MAX_SERIES_DRAWN])
    epochs, note = [str(window.number + 1) for window in story.windows], f"All by {next(iter(series), '')}."
    return columns(
        "Samples left out by filters",
        epochs,
        series,
        x_label=story.unit,
        form=words.short,
        note=note * (len(series) == 1),
    )


# ---------------------------------------------------------------- classes


def accuracy_by_class(story: Story) -> Chart | None:
    """The share of each class that is classified correctly, the worst classes first."""
    classes = () if story.findings is None else story.findings.classes
    known = sorted((one for one in classes if one.accuracy is not None), key=lambda one: one.accuracy or 0.0)
    shown = known[:MAX_CLASSES_DRAWN]
    note = f"The {len(shown)} worst of {len(known):,} classes." if len(known) > len(shown) else ""
    return None if len(known) < 2 else bars(
        "Accuracy in training, by class", [story.class_name(one.label) for one in shown],
        {"accuracy": [one.accuracy for one in shown]}, form=words.percent, what="class", note=note, hues=False,
    )  # fmt: skip


def confused(story: Story) -> Chart | None:
    """The pairs of classes that the model confuses most often."""
    pairs = () if story.findings is None else story.findings.confusions
    names = [f"{story.class_name(one.label)} taken for {story.class_name(one.guess)}" for one in pairs]
    shares = ", ".join(f"{one.share:.0%}" for one in pairs[:3])
    return bars(
        "Classes that are confused", names, {"samples": [one.samples for one in pairs]}, form=words.short, what="pair",
        note=f"The first {min(3, len(pairs))} are {shares} of their class.", hues=False,
    )  # fmt: skip


def class_balance(story: Story) -> Chart | None:
    found = story.findings
    if found is None or not story.selects:
        return None
    shown, note = [one for one in found.classes if one.visits is not None], ""
    if len(shown) > MAX_CLASSES_DRAWN:
        shown.sort(key=lambda one: -abs((one.visits or 0.0) / one.share - 1))
        note = f"The {MAX_CLASSES_DRAWN} most uneven of {found.class_count:,} classes."
        shown = shown[:MAX_CLASSES_DRAWN]
    series = {"of the samples": [one.share for one in shown], "of the visits": [one.visits for one in shown]}
    return bars(
        "Share of each class in samples and visits", [story.class_name(one.label) for one in shown], series,
        form="{:.1%}".format, what="class", note=note,
    )  # fmt: skip


# ---------------------------------------------------------------- gradients near zero


def near_zero_by_loss(story: Story) -> Chart | None:
    """The share of gradient entries near zero over the loss: a line per probe, or the first, the last and some in between."""
    probes = story.probes
    count = min(len(probes), MAX_SERIES_DRAWN)
    shown = [probes[round(i * (len(probes) - 1) / max(1, count - 1))] for i in range(count)]
    samples = shown[-1].samples if shown else 0
    x, series = _over({
        f"at {words.percent(one.accuracy)}": [
            (math.log10(max(loss, SMALLEST_LOSS)), share) for loss, share in zip(one.losses, one.shares, strict=True)
        ]
        for one in shown
    })  # fmt: skip
    return lines(
        "Gradient near zero, by loss", x, series, x_label="loss", form=words.percent, least=0.0,
        x_form=lambda power: f"{10**power:.2g}",
        note=f"Entries under 0.0001, of {samples} samples one by one; each mark is an eighth of them.",
    )  # fmt: skip


def near_zero_by_layer(story: Story) -> Chart | None:
    """The same by layer, for the quarters with the lowest and the highest loss in the last probe."""
    if not story.probes:
        return None
    layers = story.probes[-1].layers
    largest = sorted(layers, key=lambda one: -one.entries)[:MAX_LAYERS_DRAWN]
    shown = [one for one in layers if one in largest]
    note = f"The {len(shown)} largest of {len(layers)} layers." if len(layers) > len(shown) else ""
    series = {
        "quarter of lowest loss": [one.easiest for one in shown],
        "quarter of highest loss": [one.hardest for one in shown],
    }
    title = f"Gradient near zero, by layer, at {words.percent(story.probes[-1].accuracy)}"
    names = [one.name or "the model itself" for one in shown]
    return bars(title, names, series, form=words.percent, what="layer", note=note)


# ---------------------------------------------------------------- comparisons


def _visits_at(story: Story, one: Result) -> float:
    return float(sum(window.visits for window in story.windows if window.number < one.window))


def result_over_visits(arms: Sequence[ComparedArm]) -> Chart | None:
    """Result over visits, the mean of each arm's seeds."""
    runs: dict[str, list[tuple[float, float]]] = {}
    for arm in arms[:MAX_SERIES_DRAWN]:
        told = [story for story in arm.stories if story.evaluations]
        runs[arm.name] = [
            (
                statistics.fmean(_visits_at(story, story.evaluations[k]) for story in told),
                statistics.fmean(story.evaluations[k].metric for story in told),
            )
            for k in range(min((len(story.evaluations) for story in told), default=0))
        ]
    x, series = _over({name: points for name, points in runs.items() if points})
    form = _metric_form(next((story for arm in arms for story in arm.stories if story.evaluations), arms[0].stories[0]))
    note = f"The first {MAX_SERIES_DRAWN} of {len(arms)} arms." if len(arms) > MAX_SERIES_DRAWN else ""
    return lines("Result over visits", x, series, x_label="visits", form=form, x_form=words.short, note=note)


def means(arms: Sequence[ComparedArm]) -> list[Chart | None]:
    def bar(title: str, value: Callable[[Story], float], form: Callable[[float], str]) -> Chart | None:
        means = {"mean": [statistics.fmean(value(story) for story in arm.stories) for arm in arms]}
        return bars(title, [arm.name for arm in arms], means, form=form, what="arm")

    return [
        bar("Seconds of training", lambda story: story.seconds, words.seconds),
        bar("Visits", lambda story: float(story.visits), words.short),
    ]
