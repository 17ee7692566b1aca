"""Is our list of suspected labels as good as cleanlab's, and does the confidence on it mean what it says?

Task: one plain run in observe mode over labels of which a known fifth is wrong: symmetric (any other class), pair (class c
becomes c + 1), instance (what a weak model, trained on other images, confuses), and none. Baseline: cleanlab on the same
predictions, averaged over all visits in the same way: its list (`find_label_issues`) and its rankings (`self_confidence`,
`normalized_margin`). Ours sees only what the ledger keeps of them: the four likeliest classes and p(label).

Figures: AUROC of the ranking; of the list its length, precision and recall; precision among as many as are truly wrong; and
stated probability against true share in ten bins. A run whose labels cannot be judged has no list and states nothing.

Embarrassing would be: a ranking clearly under cleanlab's better one, a list of lower precision, suspects on clean labels, or a
bin of at least 50 labels whose stated probability is more than 10 points from the truth.

    pip install 'salience[bench]'
    python benchmarks/suspects.py --quick                                 # rendered digits, under a minute
    python benchmarks/suspects.py --data cifar10.tar.gz [--runs DIR]      # or a folder of idx files (MNIST's format)

`--runs` keeps the observed runs as .npz, and those already there are not trained again. `--svg FILE` draws the reliability of
all parts together. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from planted import Observed, digits, images_of, observe, planted
from reliability import largest_gap, reliability, reliability_chart, standalone
from salience.ledger import Ledger
from salience.select.noise import evidence, judge, odds_of_wrong, rate_of, sharpness

KINDS = ("symmetric", "pair", "instance", "clean")
SHARE = 0.2
BINS = 10
COLUMNS = ("label", "confidence", "seen")


def auroc(score: np.ndarray, wrong: np.ndarray) -> float:
    """How often a wrong label scores above a right one; ties count half."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    positives = int(wrong.sum())
    return float((rank[wrong].sum() - positives * (positives + 1) / 2) / (positives * (len(wrong) - positives)))


def listed(mask: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    found = int(np.count_nonzero(mask & wrong))
    return {
        "listed": int(mask.sum()),
        "precision": round(found / mask.sum(), 3) if mask.any() else None,
        "recall": round(found / wrong.sum(), 3) if wrong.any() else None,
    }


def ranked(score: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    if not wrong.any():
        return {}
    first = np.argsort(-score, kind="stable")[: wrong.sum()]
    return {"auroc": round(auroc(score, wrong), 4), "precision_at_truth": round(float(wrong[first].mean()), 3)}


def ours(run: Observed) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of our list and ranking, and the stated probabilities, NaN where labels cannot be judged."""
    ledger = run.ledger
    said = judge(ledger)
    found = evidence(ledger.label, ledger.vote, ledger.vote_p)
    columns = (ledger.label, ledger.vote, ledger.vote_p, ledger.confidence)
    odds = odds_of_wrong(*columns, found.transitions, sharpness(*columns, found, rate_of(found, ledger.course)))
    row = {"verdict": said.verdict, "rate": None if np.isnan(said.rate) else round(said.rate, 3)}
    return row | listed(said.suspects(), run.wrong) | ranked(odds, run.wrong), said.wrong


def cleanlab_of(run: Observed) -> dict[str, dict[str, Any]]:
    from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
    from cleanlab.rank import get_label_quality_scores  # pyright: ignore[reportMissingImports]

    labels = run.ledger.label.astype(np.int64)
    p = run.predictions.astype(np.float64)
    p /= p.sum(axis=1, keepdims=True)
    rows = {"cleanlab": listed(find_label_issues(labels, p, n_jobs=1), run.wrong)}
    for method in ("self_confidence", "normalized_margin"):
        rows[f"cleanlab {method}"] = ranked(-get_label_quality_scores(labels, p, method=method), run.wrong)
    return rows


def keep(run: Observed, file: Path) -> None:
    ledger = run.ledger
    arrays = {name: ledger[name] for name in COLUMNS} | {"vote": ledger.vote, "vote_p": ledger.vote_p}
    np.savez(file, course=np.array(ledger.course), predictions=run.predictions, wrong=run.wrong, **arrays)


def kept(file: Path) -> Observed:
    with np.load(file) as saved:
        ledger = Ledger(len(saved["label"]))
        for name in COLUMNS:
            ledger[name][:] = saved[name]
        ledger.vote[:], ledger.vote_p[:] = saved["vote"], saved["vote_p"]
        ledger.course = [(float(d), float(s), float(m), float(o)) for d, s, m, o in saved["course"]]
        return Observed(ledger=ledger, predictions=saved["predictions"], wrong=saved["wrong"])


def show(name: str, rows: dict[str, dict[str, Any]], table: list[tuple[float, float, int]]) -> None:
    print(f"\n{name}: {rows['ours']['verdict']}, rate {rows['ours']['rate']}")
    print(f"  {'':28}{'AUROC':>8}{'at truth':>10}{'listed':>8}{'precision':>11}{'recall':>8}")
    for method, row in rows.items():
        cells = (row.get(key) for key in ("auroc", "precision_at_truth", "listed", "precision", "recall"))
        print(
            f"  {method:28}"
            + "".join(f"{'-' if c is None else c:>{w}}" for c, w in zip(cells, (8, 10, 8, 11, 8), strict=True))
        )
    if table:
        print("  stated / true (labels): " + "  ".join(f"{p:.2f}/{q:.2f} ({n})" for p, q, n in table))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--data", help="CIFAR-10 as an archive or folder of images, or a folder of idx files")
    args.add_argument("--quick", action="store_true", help="rendered digits")
    args.add_argument("--samples", type=int, default=16_000)
    args.add_argument("--epochs", type=int, default=12)
    args.add_argument("--kinds", default=",".join(KINDS))
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--runs", help="folder in which observed runs are kept")
    args.add_argument("--svg", help="file for the reliability picture")
    given = args.parse_args()
    if not given.quick and not given.data:
        args.error("give --quick or --data")
    torch.set_num_threads(1)
    samples, epochs = (4000, 10) if given.quick else (given.samples, given.epochs)
    images = None
    figures: dict[str, Any] = {}
    stated_of_all: list[np.ndarray] = []
    wrong_of_all: list[np.ndarray] = []
    for kind in given.kinds.split(","):
        file = Path(given.runs) / f"{kind}-{samples}-{epochs}-{given.seed}.npz" if given.runs else None
        begin = time.perf_counter()
        if file is not None and file.exists():
            run = kept(file)
        else:
            images = images or (
                digits(samples, given.seed) if given.quick else images_of(given.data, samples, given.seed)
            )
            labels = planted(images, kind, SHARE, given.seed)
            run = observe(images, labels, epochs=epochs, seed=given.seed)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                keep(run, file)
        row, stated = ours(run)
        rows = {"ours": row, **cleanlab_of(run)}
        table = reliability(stated, run.wrong, BINS)
        show(f"{kind} ({time.perf_counter() - begin:.0f} s)", rows, table)
        figures[kind] = summary(rows) | {"largest_gap": round(largest_gap(table), 3) if table else None, "rows": rows}
        stated_of_all.append(stated)
        wrong_of_all.append(run.wrong)
    if given.svg:
        table = reliability(np.concatenate(stated_of_all), np.concatenate(wrong_of_all), BINS)
        Path(given.svg).write_text(standalone(reliability_chart(table)), encoding="utf-8")
    print(json.dumps(figures))


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours over cleanlab's: of the ranking, against the better of its two; of the list, precision and recall."""
    best = max((row["auroc"] for name, row in rows.items() if name != "ours" and "auroc" in row), default=None)
    found: dict[str, Any] = {}
    if best:
        found["auroc_ratio"] = round(rows["ours"]["auroc"] / best, 3)
    for key in ("precision", "recall"):
        mine, theirs = rows["ours"][key], rows["cleanlab"][key]
        found[f"{key}_ratio"] = round(mine / theirs, 3) if mine is not None and theirs else None
    return found


if __name__ == "__main__":
    main()
