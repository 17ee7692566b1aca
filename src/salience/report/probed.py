"""What the probes of gradients say: how much of a gradient is near zero, by loss and by layer, and since which loss."""

from __future__ import annotations

import math

from salience.report import words
from salience.report.charts import Chart, Series, bars, lines
from salience.report.story import Story

MAX_PROBES_DRAWN = 6
"""Probes drawn in a chart: as many as there are colours; of more, the first, the last and some between."""
SMALLEST_LOSS = 1e-6
"""Losses under this are drawn as this, on an axis of powers of ten."""
MAX_LAYERS_DRAWN = 12
"""Layers drawn; of more, the largest."""


def by_loss(story: Story) -> Chart | None:
    """The share of gradient entries near zero over the loss, a line per probe."""
    probes = story.probes
    if not probes:
        return None
    count = min(len(probes), MAX_PROBES_DRAWN)
    shown = [probes[round(i * (len(probes) - 1) / max(1, count - 1))] for i in range(count)]
    curves = [
        (f"at {words.percent(one.accuracy)}", dict(zip(map(_log, one.losses), one.shares, strict=True)))
        for one in shown
    ]
    x = sorted({loss for _, curve in curves for loss in curve})
    series = [Series(name=name, values=[curve.get(loss) for loss in x]) for name, curve in curves]
    note = f"Entries under 0.0001, of {shown[-1].samples} samples one by one; each mark is an eighth of them."
    return lines(
        "Gradient near zero, by loss", x, series, x_label="loss", form=words.percent, least=0.0, note=note,
        x_form=lambda power: f"{10**power:.2g}",
    )  # fmt: skip


def _log(loss: float) -> float:
    return math.log10(max(loss, SMALLEST_LOSS))


def by_layer(story: Story) -> Chart | None:
    """The same by layer, for the quarters of lowest and of highest loss in the last probe."""
    layers = story.probes[-1].layers if story.probes else ()
    if not layers:
        return None
    largest = sorted(layers, key=lambda one: -one.entries)[:MAX_LAYERS_DRAWN]
    shown = [one for one in layers if one in largest]
    note = f"The {len(shown)} largest of {len(layers)} layers." if len(layers) > len(shown) else ""
    return bars(
        f"Gradient near zero, by layer, at {words.percent(story.probes[-1].accuracy)}",
        [one.name or "the model itself" for one in shown],
        [
            Series(name="quarter of lowest loss", values=[one.easiest for one in shown]),
            Series(name="quarter of highest loss", values=[one.hardest for one in shown]),
        ],
        form=words.percent, what="layer", note=note,
    )  # fmt: skip


def sentence(story: Story) -> str:
    """What the last probe says, in words; empty where there was none."""
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
