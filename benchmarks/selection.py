"""Does selection beat the honest control, and is it safe under label noise?

Baselines: all data; **the shorter run** (uniform, the same visits, its schedule fitted to them); a random share with salience's
own keep curve; published rules by name. Same model (ResNet-9), augmentation, optimizer and schedule rule (one cycle over
visits) for all; the learning rate was chosen from 0.2, 0.4, 0.8 for all data, the shorter run and the hardest-40% rule.

Embarrassing would be: losing to the shorter run, or to all data under label noise.

    python benchmarks/selection.py --data cifar10.tar.gz [--rows rows.jsonl] [--jobs 8]     # needs a GPU
    python benchmarks/selection.py --show benchmarks/rows/selection-2026-11-16.jsonl        # rows measured before
    python benchmarks/selection.py --quick                                                  # rendered digits, CPU, a minute
    python benchmarks/selection.py --parts clicks,text,segment [--seeds 3]                  # elsewhere.py, CPU, 3 minutes each
    python benchmarks/selection.py --parts overlap,concentrated,rare,many,parity --seeds 6   # points.py, CPU, 10 minutes

Rows are appended to --rows as they finish, and those already there are not run again (those of clicks, text and segment
are). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cifar import Data, Spec, condition, load, train
from salience.app.glyphs import render
from salience.config import Fetching, SelectConfig, Use
from salience.select import preset
from salience.stats import t_quantile

PRESETS = {"infobatch": 20, "kakurenbo": 19, "seta": 17, "el2n": 24, "forgetting": 24, "epsilon_greedy": 24, "ucb": 24}
"""Published rules and the epochs that bring each near the default's visits."""
NEW_PRESETS = [
    Spec(name="grand", select="grand", attach=True),
    Spec(name="window", select="window"),
    Spec(name="rho", select="rho", reference=True, epochs=20),
    Spec(name="proxy", select="proxy", reference=True, epochs=20),
    Spec(name="coarse_to_fine", select="coarse_to_fine", reference=True, epochs=20),
    Spec(name="selective_backprop", select="selective_backprop"),
]
RANDOM = SelectConfig(keep=Use(name="all_less_all", options={"share": 0.4, "warmup": 2, "end": 0.2}))
ONCE = SelectConfig(filters=(Use(name="redundancy"),))
"""Everything but near-copies."""
NOISES = [("symmetric", 0.4), ("pair", 0.4), ("symmetric", 0.2), ("pair", 0.2)]


def timed() -> list[Spec]:
    """Alone on the device, in turns, after a run that warms it up: what is saved in seconds."""
    full = Spec(name="time_full", plain=True)
    ours = Spec(name="time_default", select="default")
    rows = [replace(full, name="warm_up", epochs=1)]
    return rows + [replace(spec, seed=seed) for seed in range(2) for spec in (full, ours)]


def specs() -> dict[str, list[Spec]]:
    """Parts, and in each the rows that matter most first, so that a run cut short has them."""
    full, shorter = Spec(name="full", plain=True), Spec(name="shorter", plain=True, epochs=14)
    ours, chance = Spec(name="default", select="default"), Spec(name="random", select=RANDOM)
    clean = [replace(s, seed=seed) for seed in range(5) for s in (full, shorter, ours)]
    noise = [
        replace(s, noise=kind, share=share, seed=seed)
        for seed in range(3)
        for kind, share in NOISES
        for s in (full, ours)
    ]
    noise += [replace(shorter, noise=kind, share=share) for kind, share in NOISES]
    noise += [Spec(name="el2n", select="el2n", noise=kind, share=share) for kind, share in NOISES]
    noise += [Spec(name="perfect_filter", select=("oracle", RANDOM), noise=kind, share=share) for kind, share in NOISES]
    doubled = Spec(name="copies_full", plain=True, copies=0.3)
    once = Spec(name="copies_once", select=ONCE, copies=0.3, attach=True)
    given = replace(once, name="copies_given", attach=False, thumbnails=True)
    copies = [replace(s, seed=seed) for seed in range(3) for s in (doubled, once, given)]
    rules = [Spec(name=name, select=name, epochs=epochs) for name, epochs in PRESETS.items()]
    rules += [replace(chance, seed=0), replace(chance, seed=1), *NEW_PRESETS]
    again = [replace(rule, seed=seed) for seed in (1, 2) for rule in rules[: len(PRESETS)]]
    rare = [replace(s, tail=50, seed=seed) for seed in range(3) for s in (full, shorter, ours)]
    long = [replace(s, name=f"{s.name}100", epochs=round(s.epochs * 100 / 24)) for s in (full, shorter, ours)]
    return {
        "clean": clean,
        "tail": rare,
        "long": long,
        "noise": noise,
        "copies": copies,
        "presets": rules + again,
        "io": io_specs(),
    }


def io_specs() -> list[Spec]:
    """Plans that know a cache of 20% (simulated), and uniform runs of several lengths; for benchmarks/io_bound.py.

    The plans of the first seed are recorded; `cifar.pack_trace` makes the small files in benchmarks/rows of them.
    """
    ours = preset("io")

    def keep(share: float, end: float = 0.2) -> Use:
        return Use(name="all_less_all", options={"share": share, "warmup": 2, "end": end})

    rules: dict[str, SelectConfig] = {
        "io": ours,
        "io-30": replace(ours, keep=keep(0.3), fetch=Fetching(top=0.15, refresh=0.1)),
        "default": preset("default"),
        "default-25": replace(preset("default"), keep=keep(0.25)),
        "io-top20-S10": replace(ours, fetch=Fetching(top=0.2, refresh=0.1)),
        "io-top20-S0": replace(ours, fetch=Fetching(top=0.2, refresh=0.0)),
        "io-top40-S0": replace(ours, fetch=Fetching(top=0.4, refresh=0.0)),
        "io-30-S25": replace(ours, keep=keep(0.3)),
        "io-20": replace(ours, keep=keep(0.2), fetch=Fetching(top=0.1, refresh=0.1)),
        "io-25-short-end": replace(ours, keep=keep(0.25, 0.15), fetch=Fetching(top=0.1, refresh=0.0)),
    }
    rows = [
        Spec(name=f"{name}@20%", select=rule, cache=0.2, seed=seed) for seed in (0, 1) for name, rule in rules.items()
    ]
    rows = [replace(row, trace=f"runs/{row.name}") if row.seed == 0 else row for row in rows]
    return rows + [
        Spec(name=f"shorter{e}", plain=True, epochs=e, seed=seed) for seed in (0, 1) for e in (8, 11, 17, 20)
    ]


def quick_specs() -> list[Spec]:
    small = {"model": "cnn", "batch_size": 64, "lr": 0.1, "scale": 1.0, "flip": False}
    full = Spec(name="full", plain=True, epochs=10, **small)
    ours = Spec(name="default", select="default", epochs=10, **small)
    rows = [full, Spec(name="shorter", plain=True, epochs=6, **small), ours]
    return rows + [replace(s, noise="symmetric", share=0.4) for s in (full, ours)]


def quick_data() -> Data:
    data: Data = {}
    for split, n in (("train", 3000), ("test", 1000)):
        made = render(n, split=split, copies=0.0, wrong=0.0)
        data[f"{split}_x"] = np.repeat(made.images[:, None], 3, axis=1)
        data[f"{split}_y"] = made.true_labels
    return data


def key(row: Any) -> str:
    get = row.get if isinstance(row, dict) else lambda name: getattr(row, name)
    noise = get("noise") if isinstance(row, dict) else condition(row)
    return f"{get('name')}/{noise}/{get('seed')}"


def run_one(spec: Spec, data: Data, device: str) -> dict[str, Any]:
    try:
        row = train(spec, data, device)
    except Exception:
        row = {"name": spec.name, "seed": spec.seed, "noise": "", "error": traceback.format_exc()[-800:]}
    return json.loads(json.dumps(row, default=float))


def _worker(todo: Any, done: Any, path: str) -> None:
    data = load(path)
    while (spec := todo.get()) is not None:
        done.put(run_one(spec, data, "cuda"))


def run_all(rows: list[Spec], path: str, jobs: int, store: Path) -> None:
    """Run rows in `jobs` processes that share the device, writing each as it comes."""
    context = mp.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for spec in [*rows, *[None] * jobs]:
        todo.put(spec)
    workers = [context.Process(target=_worker, args=(todo, done, path)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    begin = time.perf_counter()
    for number in range(len(rows)):
        write(done.get(), store)
        print(f"  {number + 1} of {len(rows)} rows, {time.perf_counter() - begin:.0f} s", flush=True)
    for worker in workers:
        worker.join()


def write(row: dict[str, Any], store: Path) -> None:
    with store.open("a") as file:
        file.write(json.dumps(row) + "\n")
    what = row.get("error") or f"accuracy {row['accuracy']:.2f}, {row['visits']:.1f} visits, {row['seconds']:.0f} s"
    print(f"{row['name']:<18} {row['noise']:<14} seed {row['seed']}: {what}", flush=True)


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95% interval (Student's t; 0 for one value)."""
    a = np.asarray(values)
    half = t_quantile(0.95, len(a) - 1) * a.std(ddof=1) / np.sqrt(len(a)) if len(a) > 1 else 0.0
    return float(a.mean()), float(half)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table on stdout, and the figures as one dict."""
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if "accuracy" in row:
            groups.setdefault((row["noise"], row["name"]), {})[row["seed"]] = row
    print(f"\n{'labels':<14} {'rule':<20} {'accuracy':>16} {'forward':>8} {'backward':>9} {'seeds':>6}")
    for (noise, name), runs in sorted(groups.items()):
        if name.startswith(("time_", "warm_up", "trace_")):
            continue
        mean, half = mean_interval([r["accuracy"] for r in runs.values()])
        visits, backward = (np.mean([r[k] for r in runs.values()]) for k in ("visits", "backward"))
        spread = f"{mean:.2f} ± {half:.2f}" if half else f"{mean:.2f}"
        print(f"{noise or 'clean':<14} {name:<20} {spread:>16} {visits:>8.1f} {backward:>9.1f} {len(runs):>6}")

    def paired(noise: str, one: str, two: str) -> list[float]:
        a, b = groups.get((noise, one), {}), groups.get((noise, two), {})
        return [a[seed]["accuracy"] - b[seed]["accuracy"] for seed in a if seed in b]

    def visits(noise: str, name: str) -> float:
        return float(np.mean([r["visits"] for r in groups[noise, name].values()]))

    out: dict[str, Any] = {}
    for figure, one, two in (("clean_gap", "full", "default"), ("clean_vs_shorter", "default", "shorter")):
        if differences := paired("", one, two):
            mean, half = mean_interval(differences)
            out |= {figure: round(mean, 3), f"{figure}_interval": [round(mean - half, 3), round(mean + half, 3)]}
    if ("", "full") in groups and ("", "default") in groups:
        out["clean_visit_ratio"] = round(visits("", "full") / visits("", "default"), 3)
    if ("", "time_full") in groups and ("", "time_default") in groups:
        seconds = {
            name: np.mean([r["seconds"] for r in groups["", name].values()]) for name in ("time_full", "time_default")
        }
        out["clean_speedup"] = round(float(seconds["time_full"] / seconds["time_default"]), 3)
    pairs = paired("", "copies_once", "copies_full"), paired("", "copies_given", "copies_full")
    for name, differences in zip(("copies_once", "copies_given"), pairs, strict=True):
        if differences:
            runs = groups["", name].values()
            out |= {
                f"{name}_gap": round(-float(np.mean(differences)), 3),
                f"{name}_visits": round(visits("", name) / visits("", "copies_full"), 3),
                **{
                    f"{name}_{k}": round(float(np.mean([r[f"copies_{k}"] for r in runs])), 4)
                    for k in ("recall", "precision")
                },
            }
    for share in ("0.4", "0.2"):
        gains = {kind: paired(f"{kind}{share}", "default", "full") for kind in ("symmetric", "pair")}
        if all(gains.values()):
            level = round(100 * float(share))
            out[f"noise_gain_{level}"] = round(float(np.mean([np.mean(g) for g in gains.values()])), 3)
            for kind, gain in gains.items():
                out[f"noise_gain_{level}_{kind}"] = round(float(np.mean(gain)), 3)
                name = f"{kind}{share}"
                out[f"noise_auroc_{level}_{kind}"] = round(
                    float(np.mean([r["auroc"] for r in groups[name, "default"].values()])), 4
                )
                out[f"noise_visits_{level}_{kind}"] = round(visits(name, "default") / visits(name, "full"), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="cifar10.tar.gz: train and test folders of small JPEGs")
    parser.add_argument("--rows", default="runs/selection.jsonl", help="where finished rows are kept")
    parser.add_argument("--jobs", type=int, default=8, help="processes that share the device")
    parser.add_argument(
        "--parts",
        default="",
        help="of time,clean,tail,long,noise,copies,presets,io (the default), or of the parts of elsewhere.py",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of clicks and the parts after it")
    parser.add_argument("--show", default="", help="print table and figures of a file of rows, and run nothing")
    parser.add_argument("--quick", action="store_true", help="rendered digits on the CPU, within a minute")
    args = parser.parse_args()
    import elsewhere  # here, since it imports from this file

    if args.show:
        rows = [json.loads(line) for line in Path(args.show).read_text().splitlines()]
        print(json.dumps(figures(rows) | elsewhere.figures(rows)))
        return
    parts = args.parts.split(",") if args.parts else ["time", *specs()]
    known = ["time", *specs(), *elsewhere.PARTS]
    if unknown := [part for part in parts if part not in known]:
        parser.error(f"there is no part {unknown[0]!r}; parts are {', '.join(known)}")
    away = [part for part in parts if part in elsewhere.PARTS]
    parts = [part for part in parts if part not in elsewhere.PARTS]
    out: dict[str, Any] = {}
    store = Path(args.rows if not args.quick else "runs/selection-quick.jsonl")
    store.parent.mkdir(parents=True, exist_ok=True)
    if args.quick:
        store.unlink(missing_ok=True)
        data = quick_data()
        for spec in quick_specs():
            write(run_one(spec, data, "cpu"), store)
    elif parts:
        if not torch.cuda.is_available() or not args.data:
            parser.error("the full benchmark needs a GPU and --data; use --quick elsewhere")
        have = {key(json.loads(line)) for line in store.read_text().splitlines()} if store.exists() else set()
        data = load(args.data)
        for spec in timed() if "time" in parts else []:
            if key(spec) not in have:
                write(run_one(spec, data, "cuda"), store)
        wanted = [spec for part in parts if part != "time" for spec in specs()[part]]
        run_all([spec for spec in wanted if key(spec) not in have], args.data, args.jobs, store)
    if args.quick or parts:
        out |= figures([json.loads(line) for line in store.read_text().splitlines()])
    if away:
        out |= elsewhere.run(away, args.seeds, store)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
