"""Does a stated probability mean what it says? Stated against true, as numbers and as a picture.

stated   how likely each label is wrong, as `judge` (select/noise.py) says it
wrong    whether it is wrong, where somebody knows: planted labels, reviewed suspects, reference points
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.report.charts import Chart, lines

MIN_SAMPLES = 50
"""Bins with fewer samples say little, and `largest_gap` ignores them."""
STYLE = (
    "svg{font:11px sans-serif;background:#fff}.line{fill:none;stroke-width:2}.line.c0{stroke:#0969da}"
    ".dot.c0{fill:#0969da}.line.c1{stroke:#8c959f;stroke-dasharray:4 3}.dot.c1{fill:none}"
    ".grid{stroke:#d8dee4}.tick,.label{fill:#57606a}.middle{text-anchor:middle}.end{text-anchor:end}"
)
"""Colours for a drawing that stands alone; on a page they come from the page."""

Bins = Sequence[tuple[float, float, int]]
"""Mean of what was stated, share that is true, and number of samples of each bin that has any."""


def reliability(
    stated: npt.NDArray[np.floating[Any]], wrong: npt.NDArray[np.bool_], bins: int = 10
) -> list[tuple[float, float, int]]:
    """What was stated on average, the share that is wrong and the count, for `bins` equal ranges of stated probability.

    `stated` is [n] from 0 to 1, NaN where nothing was stated; `wrong` is bool [n]. Bins without samples are left out.
    """
    known = np.isfinite(stated)
    p, truth = stated[known].astype(np.float64), wrong[known]
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    said = np.bincount(place, weights=p, minlength=bins)
    true = np.bincount(place, weights=truth, minlength=bins)
    return [(float(said[b] / count[b]), float(true[b] / count[b]), int(count[b])) for b in np.flatnonzero(count)]


def largest_gap(table: Bins, least: int = MIN_SAMPLES) -> float:
    """The largest difference between stated and true over the bins of at least `least` samples; 0 where there are none."""
    return max((abs(said - true) for said, true, count in table if count >= least), default=0.0)


def reliability_chart(table: Bins, *, title: str = "Stated against true", note: str = "") -> Chart:
    """The share of wrong labels over the stated probability, beside the diagonal on which both are equal."""
    if not table:
        raise ValueError("The table is empty: nothing was stated.")
    x = [said for said, _, _ in table]
    chart = lines(
        title, x, {"truly wrong": [true for _, true, _ in table], "as stated": x},
        x_label="stated probability that the label is wrong", form="{:.0%}".format, x_form="{:.0%}".format, least=0.0,
        note=note,
    )  # fmt: skip
    assert chart is not None
    rows = tuple((f"{said:.0%}", f"{true:.0%}", f"{count:,}") for said, true, count in table)
    return replace(chart, head=("stated", "truly wrong", "labels"), rows=rows)


def standalone(chart: Chart) -> str:
    """The drawing as an SVG file of its own."""
    return chart.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="440" ', 1).replace(
        "<title>", f"<style>{STYLE}</style><title>", 1
    )
