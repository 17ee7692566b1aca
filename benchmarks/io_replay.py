"""Plans recorded while training, replayed through a store: what do time and bytes buy in accuracy? Part of io_bound.py.

The rows (rows/io-*.jsonl, rows/selection-*.jsonl) say what accuracy each rule reached on a GPU; the plans of some are beside
them (rows/io-NAME-DATE.npz). Of a recorded plan a fixed random share of the samples is taken, as many as the store has:
shares, importance and the order of windows stay what they were. Uniform runs of N passes need no plan: each pass is
everything once, so one measured run of the longest gives the time of all of them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caches import Plans, uniform
from cifar import unpack_plans
from io_rig import DEFAULT, RATIOS, Bench, Row

ROWS = Path(__file__).parent / "rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What a run cost and what it reached."""

    name: str
    kind: str
    """"ours", "never_evict" (the same plans), "uniform" (fewer passes) or "full"."""
    accuracy: float
    seconds: float
    passes: float
    """Bytes the store sent, over those of all samples."""


def accuracies(rows: Path = ROWS) -> dict[str, float]:
    """Mean over seeds on clean data, by the rule's name."""
    found: dict[str, list[float]] = defaultdict(list)
    for file in [*rows.glob("selection-*.jsonl"), *rows.glob("io-*.jsonl")]:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if not row.get("noise") and "accuracy" in row:
                found[row["name"]].append(row["accuracy"])
    return {name: float(np.mean(values)) for name, values in found.items()}


def recorded(accuracy: dict[str, float], rows: Path = ROWS) -> dict[str, tuple[Path, float]]:
    """Rules with recorded plans: file and accuracy; io-NAME-DATE.npz belongs to the rows NAME@20%."""
    found: dict[str, tuple[Path, float]] = {}
    for file in sorted(rows.glob("io-*.npz")):
        name = re.fullmatch(r"io-(.+)-\d{4}-\d\d-\d\d", file.stem)
        if name and f"{name[1]}@20%" in accuracy:
            found[name[1]] = file, accuracy[f"{name[1]}@20%"]
    return found


def passes_of(accuracy: dict[str, float]) -> dict[int, float]:
    """Passes of the uniform runs -> accuracy: "full" is 24, "shorter" 14, "shorterN" N."""
    found = {24: accuracy["full"], 14: accuracy["shorter"]}
    found |= {int(name[7:]): value for name, value in accuracy.items() if re.fullmatch(r"shorter\d+", name)}
    return dict(sorted(found.items()))


def sampled(file: Path, n: int) -> Plans:
    """The recorded plans on n samples drawn from their population."""
    plans = unpack_plans(file)
    chosen = np.sort(np.random.default_rng(0).permutation(plans[0].population)[:n])
    place = np.full(plans[0].population, -1, np.int64)
    place[chosen] = np.arange(n)
    out: Plans = []
    for plan in plans:
        ids = place[plan.ids]
        assert plan.importance_of_all is not None
        out.append((ids[ids >= 0], plan.importance_of_all[chosen].astype(np.float32)))
    return out


def reached_by(curve: Sequence[Point], accuracy: float) -> float | None:
    """Seconds a uniform run takes to this accuracy, between the runs that were made; None below the shortest.

    Above the longest: what the longest takes, which is less than it would need.
    """
    order = sorted(curve, key=lambda point: point.accuracy)
    if accuracy < order[0].accuracy:
        return None
    return float(np.interp(accuracy, [p.accuracy for p in order], [p.seconds for p in order]))


def gap_at(points: Sequence[tuple[float, float]], speedup: float) -> float | None:
    """The accuracy gap at which `speedup` over all data is reached, between (speedup, gap) points; None if it never is."""
    order = sorted([(1.0, 0.0), *points])
    if order[-1][0] < speedup:
        return None
    return round(float(np.interp(speedup, [times for times, _ in order], [gap for _, gap in order])), 2)


def against_accuracy(points: Sequence[Point]) -> dict[str, Any]:
    """The figures: how much longer uniform runs take to the same accuracy, what the cache adds, and where 2.4x lies."""
    full = next(point for point in points if point.kind == "full")
    curve = [point for point in points if point.kind in ("uniform", "full")]
    ours = [point for point in points if point.kind == "ours"]
    same = [point for point in points if point.kind == "never_evict"]
    uniform = {p.name: reached_by(curve, p.accuracy) for p in ours}
    times = {p.name: round(seconds / p.seconds, 3) for p in ours if (seconds := uniform[p.name]) is not None}
    return {
        "time_vs_uniform_subsample": min(times.values(), default=None),
        "time_vs_uniform_subsample_each": times,
        "time_vs_never_evict_all": {p.name: round(full.seconds / p.seconds, 3) for p in ours},
        "time_vs_never_evict_same_plans": {
            p.name: round(q.seconds / p.seconds, 3) for p, q in zip(ours, same, strict=True)
        },
        "gap": {p.name: round(full.accuracy - p.accuracy, 2) for p in ours},
        "gap_at_2_4x_time": gap_at([(full.seconds / p.seconds, full.accuracy - p.accuracy) for p in ours], 2.4),
        "gap_at_2_4x_bytes": gap_at([(full.passes / p.passes, full.accuracy - p.accuracy) for p in ours], 2.4),
    }


def replay(bench: Bench) -> dict[str, Any]:
    n, total, pause = len(bench.index), bench.index.nbytes, bench.pause(RATIOS[0])
    accuracy = accuracies()
    uniform_runs = passes_of(accuracy)

    def measured(policy: str, name: str, plans: Plans) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and passes of bytes from the start to the end of each window."""
        row = Row(name=policy, plan=name, options=bench.write(f"replay-{name}", plans))
        windows = bench.run(row, [pause] * len(plans), plans)
        return np.cumsum([w.seconds for w in windows]), np.cumsum([w.bytes for w in windows]) / total

    print(f"\nRecorded plans, through the store\n  {'':<32}{'accuracy':>9}{'seconds':>9}{'passes of bytes':>16}")
    points: list[Point] = []

    def add(name: str, kind: str, reached: float, seconds: float, passes: float) -> None:
        points.append(Point(name=name, kind=kind, accuracy=reached, seconds=float(seconds), passes=float(passes)))
        print(f"  {name:<32}{reached:>9.2f}{seconds:>9.1f}{passes:>16.2f}", flush=True)

    longest = max(uniform_runs)
    seconds, sent = measured("never_evict", "everything", uniform(n, longest))
    for passes, reached in uniform_runs.items():
        kind = "full" if passes == longest else "uniform"
        add(f"everything {passes} times", kind, reached, seconds[passes - 1], sent[passes - 1])
    for name, (file, reached) in recorded(accuracy).items():
        plans = sampled(file, n)
        for kind, cache in (("ours", DEFAULT), ("never_evict", "never_evict")):
            seconds, sent = measured(cache, name, plans)
            add(f"{name}, {cache}", kind, reached, seconds[-1], sent[-1])
    drawn = Path("runs/io_gap.svg")
    drawn.parent.mkdir(exist_ok=True)
    drawn.write_text(svg(points))
    print(f"  drawn in {drawn}")
    return against_accuracy(points)


COLOURS = {"ours": "#0a7d4b", "never_evict": "#c47a00", "uniform": "#3b6fb6", "full": "#444"}
WORDS = {
    "ours": "salience",
    "never_evict": "same plans, never-evict",
    "uniform": "uniform, fewer passes",
    "full": "all",
}


def svg(points: Sequence[Point]) -> str:
    """Time and bytes against the accuracy gap, side by side."""
    full = next(point for point in points if point.kind == "full")
    gaps = [full.accuracy - point.accuracy for point in points]
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 400" font-family="sans-serif" font-size="12">',
           '<rect width="940" height="400" fill="#fff"/>',
           *_panel(60, "seconds", points, gaps, [point.seconds for point in points]),
           *_panel(530, "bytes, in passes over the data", points, gaps, [point.passes for point in points])]  # fmt: skip
    for k, (kind, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{60 + 220 * k}" y="18" fill="{colour}">{WORDS[kind]}</text>')
    return "\n".join([*out, "</svg>\n"])


def _panel(left: int, title: str, points: Sequence[Point], gaps: list[float], sizes: list[float]) -> list[str]:
    low, high, most = min(gaps) - 0.1, max(gaps) + 0.1, 1.1 * max(sizes)
    at = [(left + 380 * (gap - low) / (high - low), 340 - 290 * size / most)
          for gap, size in zip(gaps, sizes, strict=True)]  # fmt: skip
    out = [f'<path d="M{left} 50V340H{left + 380}" fill="none" stroke="#999"/><text x="{left}" y="38">{title}</text>',
           f'<text x="{left + 380}" y="385" text-anchor="end">accuracy gap to all data, points</text>']  # fmt: skip
    for share in (0, 0.5, 1):
        out.append(f'<text x="{left + 380 * share}" y="358" text-anchor="middle">{low + share * (high - low):.1f}</text>'
                   f'<text x="{left - 6}" y="{344 - 290 * share}" text-anchor="end">{share * most:.0f}</text>')  # fmt: skip
    for kind, colour in COLOURS.items():
        mine = sorted((x, y, point.name) for (x, y), point in zip(at, points, strict=True) if point.kind == kind)
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y, _ in mine)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>')
        out.extend(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{colour}"><title>{name}</title></circle>'
                   for x, y, name in mine)  # fmt: skip
    return out
