"""How many bytes would a store send for real plans, under each cache policy? A simulation: no bytes move.

Plans: those of a `default` and of an `io` run recorded on CIFAR-10 (benchmarks/rows/io-*.npz); P(pick) = percentile, the
workload of the importance-cache papers; and every sample once a window. Every policy gets the same bytes.

Embarrassing would be: an importance cache that fetches more than never-evict, or misses its bound by more than a few percent.

    python benchmarks/caches.py [--quick]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from cifar import unpack_plans
from rivals import POLICIES, bound, policy
from salience.feed.policy import Floats, Ids
from salience.feed.simulate import fetched

ROWS = Path(__file__).parent / "rows"
Plans = list[tuple[Ids, Floats]]


def recorded(name: str) -> tuple[Plans, int]:
    """The recorded plans, with the importance of every sample when each was made."""
    plans = unpack_plans(ROWS / f"io-{name}-2026-11-16.npz")
    zeros = np.zeros(plans[0].population, dtype=np.float32)
    return [
        (plan.ids, zeros if plan.importance_of_all is None else plan.importance_of_all.astype(np.float32))
        for plan in plans
    ], len(zeros)


def percentile(n: int, windows: int, power: float = 1.0) -> Plans:
    rng = np.random.default_rng(0)
    importance = (rng.permutation(n) / n).astype(np.float32)
    return [(rng.permutation(np.flatnonzero(rng.random(n) < importance**power)), importance) for _ in range(windows)]


def uniform(n: int, windows: int) -> Plans:
    rng = np.random.default_rng(1)
    return [(rng.permutation(n), np.ones(n, dtype=np.float32)) for _ in range(windows)]


def table(
    title: str, plans: Plans, sizes: np.ndarray, shares: list[float], first: int
) -> dict[str, dict[float, float]]:
    """Bytes a window from window `first` on, over the bytes of all samples."""
    print(f"\n{title}: bytes a window over those of all samples")
    print(f"  {'cache':<14}" + "".join(f"{share:>8.0%}" for share in shares))
    out: dict[str, dict[float, float]] = {}
    for name in POLICIES:
        out[name] = {}
        for share in shares:
            sent = fetched(policy(name, int(share * sizes.sum()), sizes), plans, sizes)
            out[name][share] = float(np.mean(sent[first:]) / sizes.sum())
        print(f"  {name:<14}" + "".join(f"{out[name][share]:>8.3f}" for share in shares), flush=True)
    return out


def hit_us(n: int) -> float:
    """Microseconds of one look-up among n samples."""
    cache = policy("planned", n // 5, np.ones(n, dtype=np.int64))
    cache.window(np.random.default_rng(0).random(n).astype(np.float32), np.arange(n))
    ids = np.random.default_rng(1).integers(0, n, 100_000).tolist()
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        for i in ids:
            cache.hit(i)
        best = min(best, time.perf_counter() - begin)
    return best / len(ids) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and cache sizes")
    quick = parser.parse_args().quick
    shares = [0.2] if quick else [0.05, 0.1, 0.2, 0.4]
    n = 5_000 if quick else 50_000
    sizes = np.random.default_rng(2).lognormal(np.log(115_000), 0.4, n).astype(np.int64)
    once = table("Every sample once a window", uniform(n, 6), sizes, shares, 2)
    picked = table("P(pick) = percentile", percentile(n, 8), sizes, shares, 2)
    out = {
        "hit_rate_uniform": round(1 - once["never_evict"][0.2], 4),
        "bytes_vs_lru": round(once["lru"][0.2] / picked["impact"][0.2], 3),
        "bytes_vs_never_evict": round(once["never_evict"][0.2] / picked["impact"][0.2], 3),
        "bytes_vs_never_evict_same_plan": round(picked["never_evict"][0.2] / picked["impact"][0.2], 3),
        "bytes_vs_bound": round(picked["impact"][0.2] / bound(0.2, 1.0), 4),
        "hit_us": round(hit_us(1_000_000), 3),
    }
    for name in () if quick else ("default", "io"):
        plans, population = recorded(name)
        real = table(f"A recorded `{name}` run, whole", plans, sizes[:population], shares, 0)
        middle = table(f"A recorded `{name}` run, windows 4 to 18", plans[:19], sizes[:population], [0.2], 4)
        out[f"{name}_vs_never_evict_same_plan"] = round(real["never_evict"][0.2] / real["planned"][0.2], 3)
        out[f"{name}_middle_vs_never_evict_same_plan"] = round(middle["never_evict"][0.2] / middle["planned"][0.2], 3)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
