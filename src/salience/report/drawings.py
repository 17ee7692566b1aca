"""The charts of a story and of a comparison; None where there is nothing to draw."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from salience.report import words
from salience.report.charts import Chart, Series, bars, columns, lines
from salience.report.compared import ComparedArm, Comparison
from salience.report.story import Result, Story

MAX_CLASSES_DRAWN = 20
"""Classes shown in a chart; of more, the most uneven."""
MAX_ARMS_DRAWN = 6
"""Arms drawn in a chart: as many as there are colours."""


def _over(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> tuple[list[float], list[Series]]:
    """Several curves over one axis: the union of their places, None where a curve has no value."""
    x = sorted({at for _, points in runs for at, _ in points})
    curves = [(name, dict(points)) for name, points in runs]
    return x, [Series(name=name, values=[curve.get(at) for at in x]) for name, curve in curves]


def results(story: Story, baseline: Comparison | None) -> Chart | None:
    if not story.evaluations:
        return None
    runs = [(story.name, [(float(one.window), one.metric) for one in story.evaluations])]
    for other in () if baseline is None else baseline.arms[0].stories[:1]:
        runs.append((f"baseline {other.name}", [(float(one.window), one.metric) for one in other.evaluations]))
    x, series = _over(runs)
    name = "Test accuracy" if story.measure == "accuracy" else "Validation metric"
    return lines(name, x, series, x_label="epochs done", form=_metric_form(story))


def training(story: Story) -> list[Chart]:
    """The training loss and the learning rate, epoch by epoch."""
    ends = [(window.number + 1.0, window.end) for window in story.windows if window.end is not None]
    charts: list[Chart] = []
    for title, name in (("Training loss", "loss"), ("Learning rate at the end of each epoch", "lr")):
        known = [(at, value) for at, end in ends if (value := getattr(end, name)) is not None]
        if known:
            series = [Series(name=title.split(" at ")[0].lower(), values=[value for _, value in known])]
            x = [at for at, _ in known]
            charts.append(lines(title, x, series, x_label="epoch", form="{:.3g}".format, least=0.0))
    return charts


def machine(story: Story) -> list[Chart]:
    """How busy the machine was: shares of processors, memory and GPUs; bytes through disks and networks."""
    used = story.usage
    if len(used) < 2:
        return []
    x = [one.seconds for one in used]
    shares = [("processors", [one.cpu for one in used]), ("memory", [one.memory for one in used])]
    shares += [(f"GPU {k}", [one.gpu[k] for one in used]) for k in range(min(len(one.gpu) for one in used))]
    moved = [("disk", [one.disk for one in used]), ("network", [one.network for one in used])]

    def drawn(title: str, rows: Sequence[tuple[str, list[float]]], form: Callable[[float], str]) -> Chart:
        series = [Series(name=name, values=values) for name, values in rows[:MAX_ARMS_DRAWN]]
        return lines(title, x, series, x_label="seconds", form=form, x_form=words.short, least=0.0)

    return [
        drawn("Busy: share of the time, and of the memory", shares, words.percent),
        drawn("Bytes per second, read and written", moved, words.short_size),
    ]


def accuracy_by_class(story: Story) -> Chart | None:
    """The share of each class that is classified correctly, the worst classes first."""
    classes = () if story.findings is None else story.findings.classes
    known = sorted((one for one in classes if one.accuracy is not None), key=lambda one: one.accuracy or 0.0)
    if len(known) < 2:
        return None
    shown = known[:MAX_CLASSES_DRAWN]
    note = f"The {len(shown)} worst of {len(known):,} classes." if len(known) > len(shown) else ""
    return bars(
        "Accuracy in training, by class", [story.class_name(one.label) for one in shown],
        [Series(name="accuracy", values=[one.accuracy for one in shown])], form=words.percent, what="class", note=note,
        hues=False,
    )  # fmt: skip


def confused(story: Story) -> Chart | None:
    """The pairs of classes that the model confuses most often."""
    pairs = () if story.findings is None else story.findings.confusions
    if not pairs:
        return None
    names = [f"{story.class_name(one.label)} taken for {story.class_name(one.guess)}" for one in pairs]
    shares = ", ".join(f"{one.share:.0%}" for one in pairs[:3])
    return bars(
        "Classes that are confused", names, [Series(name="samples", values=[one.samples for one in pairs])],
        form=words.short, what="pair", hues=False,
        note=f"The first {min(3, len(pairs))} are {shares} of their class.",
    )  # fmt: skip


def _metric_form(story: Story) -> Callable[[float], str]:
    return words.percent if story.in_shares else words.short


def seconds_per_epoch(story: Story) -> Chart | None:
    done = [window for window in story.windows if window.end is not None and window.end.of]
    if not done:
        return None
    parts = [Series(name="seconds", values=[window.seconds for window in done])]
    return columns(
        "Seconds per epoch", [str(w.number + 1) for w in done], parts, x_label="epoch", form=lambda v: f"{v:.3g} s"
    )


def timeline(story: Story) -> Chart | None:
    """Seconds of every epoch by what the loop did in them."""
    done = [window for window in story.windows if window.steps is not None]
    if not done:
        return None
    spent = [window.steps for window in done if window.steps is not None]
    rest = [max(0.0, w.seconds - s.wait - s.copy - s.forward - s.backward) for w, s in zip(done, spent, strict=True)]
    copies = [one.copy for one in spent]
    series = [
        Series(name="waiting for batches", values=[one.wait for one in spent]),
        *([Series(name="copying to the device", values=copies)] if any(copies) else []),
        Series(name="forward", values=[one.forward for one in spent]),
        Series(name="backward and optimizer", values=[one.backward for one in spent]),
        Series(name="planning and the rest", values=rest),
    ]
    names = [str(window.number + 1) for window in done]
    return columns("Seconds of the loop", names, series, x_label="epoch", form=lambda v: f"{v:.3g} s")


def work(story: Story) -> Chart | None:
    work = {name: spent for name, spent in story.work.items() if spent > 0}
    if not work:
        return None
    names = sorted(work, key=lambda name: -work[name])
    values = [Series(name="seconds", values=[work[name] for name in names])]
    return bars("Seconds of the workers", names, values, form=words.seconds, what="stage")


def by_importance(story: Story) -> Chart | None:
    """The share picked of the least and of the most important samples, over time."""
    done = [(w.number + 1.0, w.plan.by_importance) for w in story.windows if w.plan.by_importance is not None]
    done = [(number, shares) for number, shares in done if len(shares) == 10]
    if not done or all(share == 1 for _, shares in done for share in shares):
        return None
    groups = (("least important tenth", 0, 1), ("middle", 4, 6), ("most important tenth", 9, 10))
    series = [
        Series(name=name, values=[sum(shares[low:high]) / (high - low) for _, shares in done])
        for name, low, high in groups
    ]
    return lines(
        "Share visited, by importance", [number for number, _ in done], series, x_label="epoch", form=words.percent,
        least=0.0,
    )  # fmt: skip


def kept(story: Story) -> Chart | None:
    if not story.windows or not story.selects:
        return None
    shares = [w.plan.picked / w.population if w.population else None for w in story.windows]
    return columns(
        "Share of the samples visited", [str(w.number + 1) for w in story.windows],
        [Series(name="visited", values=shares)], x_label="epoch", form=words.percent,
    )  # fmt: skip


def times_trained(story: Story) -> Chart | None:
    known = None if story.findings is None else story.findings.visits
    if known is None or not known.counted or not story.selects:
        return None
    names = [str(low) if low == high else f"{low} to {high}" for low, high, _ in known.times]
    note = f"{known.always:,} samples in every epoch, {known.sometimes:,} in some, {known.never:,} in none."
    return columns(
        "How often samples were trained on", names, [Series(name="samples", values=[n for *_, n in known.times])],
        x_label="times", form=words.short, note=note,
    )  # fmt: skip


def by_loss(story: Story) -> Chart | None:
    known = None if story.findings is None else story.findings.visits
    if known is None or not known.loss_edges:
        return None
    names = [f"{low:.2g} to {high:.2g}" for low, high in zip(known.loss_edges, known.loss_edges[1:], strict=False)]
    if story.selects and known.counted:
        parts = zip(("in more than half of the epochs", "in half or fewer"), (known.often, known.seldom), strict=True)
        series = [Series(name=name, values=values) for name, values in parts if any(values)]
    else:
        series = [
            Series(name="samples", values=[sum(column) for column in zip(known.often, known.seldom, strict=True)])
        ]
    every = (len(known.loss_edges) - 1) // 4
    feet = [(float(i), f"{known.loss_edges[i]:.2g}") for i in range(0, len(known.loss_edges), every)]
    return columns(
        "Importance: the samples by mean loss", names, series, x_label="mean loss", form=words.short, feet=feet,
        note="Easy samples are on the left, hard ones on the right; importance is made of this.",
    )  # fmt: skip


def class_balance(story: Story) -> Chart | None:
    found = story.findings
    if found is None or not found.classes or not story.selects:
        return None
    shown = [one for one in found.classes if one.visits is not None]
    note = ""
    if len(shown) > MAX_CLASSES_DRAWN:
        shown = sorted(shown, key=lambda one: abs((one.visits or 0.0) / one.share - 1), reverse=True)[
            :MAX_CLASSES_DRAWN
        ]
        note = f"The {MAX_CLASSES_DRAWN} most uneven of {found.class_count:,} classes."
    return bars(
        "Share of each class in samples and visits",
        [story.class_name(one.label) for one in shown],
        [
            Series(name="of the samples", values=[one.share for one in shown]),
            Series(name="of the visits", values=[one.visits for one in shown]),
        ],
        form=lambda v: f"{v:.1%}",
        what="class",
        note=note,
    )


def dropped(story: Story) -> Chart | None:
    """What every filter left out, window by window."""
    names = list(dict.fromkeys(note.name for window in story.windows for note in window.plan.filters))
    series = [
        Series(name=name, values=[sum(n.dropped for n in w.plan.filters if n.name == name) for w in story.windows])
        for name in names
    ]
    series = [one for one in series if any(one.values)]
    if not series:
        return None
    epochs = [str(window.number + 1) for window in story.windows]
    return columns(
        "Samples left out by filters", epochs, series[:MAX_ARMS_DRAWN], x_label="epoch", form=words.short,
        note=f"All by {series[0].name}." if len(series) == 1 else "",
    )  # fmt: skip


def bytes_sent(story: Story) -> Chart | None:
    feed = story.feed
    if not feed.get("cache_bytes"):
        return None
    names = {
        "bytes": "without a cache", "lru_bytes": "with LRU", "never_evict_bytes": "with one that never evicts",
        "bytes_used": "this run", "bound_bytes": "the least possible",
    }  # fmt: skip
    keys = [key for key in names if f"cache_{key}" in feed]  # rivals are simulated only where there is a trace
    values = [float(feed[f"cache_{key}"]) for key in keys]
    return bars(
        "Bytes of samples that the store sent", [names[key] for key in keys], [Series(name="bytes", values=values)],
        form=words.size, what="cache",
    )  # fmt: skip


def stage_costs(story: Story) -> Chart | None:
    costs = {} if story.treated is None else {k: v for k, v in story.treated.costs_us.items() if v is not None}
    if not costs:
        return None
    values = [Series(name="microseconds", values=list(costs.values()))]
    return bars("Microseconds per call", list(costs), values, form=lambda v: f"{v:,.0f} µs", what="stage")


def _visits_at(story: Story, one: Result) -> float:
    return float(sum(window.visits for window in story.windows if window.number < one.window))


def result_over_visits(arms: Sequence[ComparedArm]) -> Chart | None:
    """Result over visits, the mean of each arm's seeds."""
    runs: list[tuple[str, list[tuple[float, float]]]] = []
    for arm in arms[:MAX_ARMS_DRAWN]:
        told = [story for story in arm.stories if story.evaluations]
        count = min((len(story.evaluations) for story in told), default=0)
        points = [
            (
                statistics.fmean(_visits_at(story, story.evaluations[k]) for story in told),
                statistics.fmean(story.evaluations[k].metric for story in told),
            )
            for k in range(count)
        ]
        if points:
            runs.append((arm.name, points))
    if not runs:
        return None
    x, series = _over(runs)
    form = _metric_form(next(story for arm in arms for story in arm.stories if story.evaluations))
    note = f"The first {MAX_ARMS_DRAWN} of {len(arms)} arms." if len(arms) > MAX_ARMS_DRAWN else ""
    return lines("Result over visits", x, series, x_label="visits", form=form, x_form=words.short, note=note)


def means(arms: Sequence[ComparedArm]) -> list[Chart]:
    def bar(title: str, value: Callable[[Story], float], form: Callable[[float], str]) -> Chart:
        means = [statistics.fmean(value(story) for story in arm.stories) for arm in arms]
        return bars(title, [arm.name for arm in arms], [Series(name="mean", values=means)], form=form, what="arm")

    return [
        bar("Seconds of training", lambda story: story.seconds, words.seconds),
        bar("Visits", lambda story: float(story.visits), words.short),
    ]
