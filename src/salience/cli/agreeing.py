"""The text and charts of `salience scores compare` and `salience scores history`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from salience.cli.opening import kept, write_page
from salience.errors import ConfigError, StateError
from salience.events.coding import plain
from salience.report.charts import Chart, bars, lines
from salience.report.console import columns, say
from salience.report.html import Table, sheet
from salience.report.words import class_name, percent

if TYPE_CHECKING:
    from salience.events import ClassFinding
    from salience.select.agreement import Agreement
    from salience.select.contrast import Contrast
    from salience.select.view import Bools

MAX_NETWORKS_DRAWN = 6
MAX_CLASSES_DRAWN = 20
NAMES = {
    "ema_loss": "mean loss", "el2n": "EL2N", "aum": "AUM", "confidence": "1 - p(label)", "forgetting": "forgetting",
    "variance": "variance", "grand": "GraNd",
}  # fmt: skip
"""Names of criteria in text."""


def compare(args: argparse.Namespace) -> int:
    """Compare networks over the same data, pair by pair: is importance a property of the data or of the model?"""
    from salience.select.agreement import agreement

    if len(args.ledgers) < 2:
        raise ConfigError("There is one run and nothing to compare it with; name at least two.")
    opened = [kept(path) for path in args.ledgers]
    loaded = dict(zip(names_of(args.ledgers), (one.ledger for one in opened), strict=True))
    found = agreement(loaded, wrong=wrong_labels(args.wrong, opened[0].ledger.n))
    if args.json:
        return _json(as_table(found, args.top))
    pairs = [
        (
            f"{one.a} / {one.b}", f"{one.correlations[found.criteria[0]]:.2f}", f"{one.overlaps[0.1]:.0%}",
            f"{one.suspected[2]:,} of {one.suspected[0]:,} and {one.suspected[1]:,}",
        )
        for one in found.pairs
    ]  # fmt: skip
    unsteady = zip(found.unsteady[: args.top].tolist(), found.spread[: args.top].tolist(), strict=True)
    file = next((one.file for one in opened if one.file is not None), None)
    tables = [
        Table(
            title="Pair by pair", head=("networks", "rank correlation", "hardest tenth", "suspected by both"), rows=pairs
        ),
        Table(
            title="Hardest to rank", head=("sample", "standard deviation of its rank", *(["file"] if file else [])),
            rows=[(str(i), f"{spread:.2f}", *([file(i)] if file else [])) for i, spread in unsteady],
            note="Ranks go from 0 to 1; networks that drew them by lot would have a standard deviation of about 0.29.",
        ),
    ]  # fmt: skip
    return _shown(args, "compare", " · ".join(found.names), sentences(found), tables, drawn(found))


def _json(values: Any) -> int:
    say(json.dumps(plain(values)))
    return 0


def _shown(
    args: argparse.Namespace, action: str, title: str, said: Sequence[str], tables: Sequence[Table],
    charts: Sequence[Chart | None],
) -> int:  # fmt: skip
    """Print sentences and tables and, if asked for, write a page that also has charts."""
    say("\n".join(said))
    tables = [one for one in tables if one.rows]
    for one in tables:
        say(f"\n{one.title}:\n{columns([one.head, *one.rows], indent='  ')}")
    if args.output:
        write_page(sheet(f"salience scores {action}", title, said=said, charts=charts, tables=tables), args.output)
        say(f"\nWritten to {args.output}.")
    return 0


def sentences(found: Agreement) -> list[str]:
    """The results of a comparison in sentences, the verdict first."""
    said = [
        f"Importance is a property {found.verdict} here: over {found.samples:,} samples the ranks by "
        f"{NAMES[found.criteria[0]]} correlate by {found.correlation:.2f}, and the hardest tenth of one network holds "
        f"{found.overlap:.0%} of that of another (10% by chance)."
    ]
    if any(found.suspected):
        each = ", ".join(f"{count:,}" for count in found.suspected)
        said.append(
            f"Labels suspected by each network: {each}; by more than half of them: {found.voted:,}; by one alone: "
            f"{found.alone:,}."
        )
    else:
        said.append("No network suspects a label.")
    if found.found:
        alone = {name: value for name, value in found.found.items() if name != "all together"}
        best = max(alone, key=lambda name: alone[name])
        said.append(
            f"The labels known to be wrong rank over the others with an AUROC of {found.found['all together']:.3f} by all "
            f"networks together (mean rank), and of {alone[best]:.3f} by the best one alone, {best}."
        )
    return said


def drawn(found: Agreement) -> list[Chart | None]:
    """Charts of correlation by criterion, overlap by share, and correlation by class."""
    pairs = found.pairs[:MAX_NETWORKS_DRAWN]
    titles = [f"{one.a} / {one.b}" for one in pairs]
    note = f"The first {len(pairs)} of {len(found.pairs)} pairs." if len(found.pairs) > len(pairs) else ""
    shares = list(pairs[0].overlaps)
    overlaps = {name: [one.overlaps[s] for s in shares] for name, one in zip(titles, pairs, strict=True)}
    if len(overlaps) == MAX_NETWORKS_DRAWN:
        overlaps.popitem()
    correlations = {
        name: [max(0.0, one.correlations[c]) for c in found.criteria] for name, one in zip(titles, pairs, strict=True)
    }
    by_class = {
        c: float(np.mean([one.by_class[c] for one in found.pairs if c in one.by_class])) for c in pairs[0].by_class
    }
    lowest = sorted(by_class, key=lambda c: by_class[c])[:MAX_CLASSES_DRAWN]
    return [
        bars(
            "Rank correlation, by criterion", [NAMES[name] for name in found.criteria], correlations,
            form="{:.2f}".format, what="criterion", note=note, hues=False,
        ),
        lines(
            "Overlap of the hardest", shares, {**overlaps, "by chance": shares},
            x_label="share of hardest samples", form=percent, x_form=percent, least=0.0, note=note,
        ),
        bars(
            "Rank correlation within classes", [f"class {c}" for c in lowest],
            {"mean of the pairs": [max(0.0, by_class[c]) for c in lowest]}, form="{:.2f}".format, what="class", hues=False,
            note=f"The {len(lowest)} lowest of {len(by_class)} classes." if len(by_class) > len(lowest) else "",
        ),
    ]  # fmt: skip


def as_table(found: Agreement, top: int) -> dict[str, Any]:
    """A comparison as values for JSON."""
    return {
        "networks": found.names, "samples": found.samples, "verdict": found.verdict,
        "rank_correlation": round(found.correlation, 4), "overlap_hardest_tenth": round(found.overlap, 4),
        "suspected": found.suspected, "voted": found.voted, "alone": found.alone, "auroc": found.found,
        "pairs": found.pairs,
        "unsteady": [
            (i, round(spread, 4)) for i, spread in zip(found.unsteady[:top].tolist(), found.spread[:top].tolist(), strict=True)
        ],
    }  # fmt: skip


def history(args: argparse.Namespace) -> int:
    """Show how suspected, hard and easy samples developed, and what separates suspected from hard ones."""
    from salience.app.checkpoint import HISTORY
    from salience.ledger import history as histories
    from salience.select.classes import class_findings
    from salience.select.contrast import contrast, groups_of

    folder = Path(args.ledger)
    opened = kept(folder)
    ledger = opened.ledger
    file = Path(args.history) if args.history else (folder if folder.is_dir() else folder.parent) / HISTORY
    if not file.exists():
        raise StateError(
            f"There is no {str(file)!r}; `salience train` writes it, and salience.ledger.history.save(loader.history, file)."
        )
    remembered = histories.load(file)
    if remembered.n != ledger.n:
        raise StateError(
            f"The history is of {remembered.n:,} samples, the ledger of {ledger.n:,}; they must be of one run."
        )
    wrong = wrong_labels(args.wrong, ledger.n)
    groups = groups_of(ledger, wrong)
    found = contrast(remembered, groups, known=wrong is not None)
    classes = class_findings(ledger, groups[found.first])[1]
    if args.json:
        return _json({
            "windows": found.windows, "sizes": found.sizes, "known": found.known, "course": found.course,
            "separation": found.separation, "classes": classes,
        })  # fmt: skip
    head, *rows = rows_of(found)
    tables = [Table(title="Epoch by epoch", head=head, rows=rows), uneven(classes, opened.classes)]
    return _shown(args, "history", folder.name, told(found), tables, courses(found))


def uneven(classes: Sequence[ClassFinding], names: Sequence[str] | None) -> Table:
    """Why classes got more or fewer of the visits than of the samples, those that lost most first."""
    shown = [one for one in classes if one.visits is not None and one.reason]
    shown.sort(key=lambda one: (one.visits or 0.0) / one.share)
    rows = [(class_name(one.label, names), percent(one.share), percent(one.visits or 0.0), one.reason) for one in shown]
    return Table(
        title="Classes that gained or lost visits", head=("class", "of samples", "of visits", "why"), rows=rows
    )


def told(found: Contrast) -> list[str]:
    """The results of a history in sentences."""
    sizes = ", ".join(f"{count:,} {name}" for name, count in found.sizes.items())
    said = [f"Of the samples followed over {len(found.windows)} epochs: {sizes}."]
    if not found.windows:
        return ["The history has no epochs."]
    if not found.sizes[found.first]:
        return [*said, f"None is {found.first}, so that there is nothing to tell from hard ones."]
    best = found.best()
    if best is not None:
        name, window, value = best
        how = "higher" if value >= 0.5 else "lower"
        said.append(
            f"What tells {found.first} labels from hard samples best is {name} after epoch {window + 1}, {how} in the former "
            f"(AUROC {max(value, 1 - value):.2f})."
        )
    last = {name: values[-1] for name, values in found.separation.items() if np.isfinite(values[-1])}
    said.append(
        "At the end: " + ", ".join(f"{name} {value:.2f}" for name, value in last.items()) + " (0.5 = not at all)."
    )
    if not found.known:
        said.append(
            "The suspected are those this run came to suspect, so that this says by what, and not that it is right; "
            "--wrong FILE measures it against labels known to be wrong."
        )
    return said


def rows_of(found: Contrast) -> list[list[str]]:
    """Rows per epoch: mean loss and variance of every group that has samples, times forgotten, and what separates them."""
    groups = [name for name, count in found.sizes.items() if count]
    separation = {name: values for name, values in found.separation.items() if np.isfinite(values).any()}
    rows = [["epoch", *(f"{q} {g}" for q in found.course for g in groups), *(f"AUROC {q}" for q in separation)]]
    for i, window in enumerate(found.windows):
        values = [found.course[q][g][i] for q in found.course for g in groups]
        apart = [values[i] for values in separation.values()]
        rows.append([str(window + 1), *(_cell(v, ".3g") for v in values), *(_cell(v, ".2f") for v in apart)])
    return rows


def courses(found: Contrast) -> list[Chart | None]:
    """A chart per quantity with the groups side by side, and one of the separation."""
    x = [window + 1.0 for window in found.windows]
    titles = {
        "loss": "Mean loss",
        "variance": "Variance of the loss",
        "forgotten": "Times forgotten",
        "right": "Times right",
    }
    charts = [
        lines(
            titles[quantity], x, {name: plain(values) for name, values in of.items() if found.sizes[name]},
            x_label="epoch", form="{:.3g}".format, least=0.0,
        )
        for quantity, of in found.course.items()
    ]  # fmt: skip
    apart = {name: plain(values) for name, values in found.separation.items()}
    note = f"AUROC of {found.first} against hard samples: 0.5 tells nothing, 1 and 0 tell everything."
    charts.append(lines("What separates", x, apart, x_label="epoch", form="{:.2f}".format, least=0.0, note=note))
    return charts


def wrong_labels(file: str | None, n: int) -> Bools | None:
    """A mask of the ids in a file, one per line; None without a file."""
    if not file:
        return None
    try:
        ids = [int(line) for line in Path(file).read_text(encoding="utf-8").split()]
    except OSError as cause:
        raise ConfigError(f"--wrong {file!r} cannot be read: {cause.strerror or cause}.") from cause
    except ValueError as cause:
        raise ConfigError(f"--wrong {file!r} must hold ids of samples, one per line: {cause}.") from cause
    outside = [i for i in ids if not 0 <= i < n]
    if outside:
        raise ConfigError(f"--wrong {file!r} names sample {outside[0]}; there are {n:,}, from 0.")
    mask = np.zeros(n, dtype=bool)
    mask[ids] = True
    return mask


def names_of(paths: Sequence[str]) -> list[str]:
    """Names of networks: their folders or files, numbered if two have the same name."""
    plain = [Path(path).resolve().name if Path(path).is_dir() else Path(path).stem for path in paths]
    return [
        name if plain.count(name) == 1 else f"{name} ({plain[: i + 1].count(name)})" for i, name in enumerate(plain)
    ]


def _cell(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"
