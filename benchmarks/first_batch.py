"""How long does a window wait for its first batch?

Question: what is in the cache comes first in a window that selects; how much sooner does the loop get its first batch than
if it came in random order? Samples of 115 kB in shards behind HTTP with 20 ms latency and 80 MB/s, a cache for a fifth of
them. Baseline: the same run in random order, window by window by turns. Against us: windows are long in practice, so that
the wait hardly counts; the ratio is of the first batch alone.

    python benchmarks/first_batch.py [--quick]      # about a minute; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import salience
from io_rig import LATENCY, RATE, SHARE, make
from salience.run.feeding import Feeding
from store_server import running

BATCH = 32


class RandomOrder(Feeding):
    """Plans without knowing what is in the cache."""

    def stock(self) -> None:
        return None


def first_waits(url: str, cache: int, preset: str, windows: int) -> dict[str, list[float]]:
    """Milliseconds until the first batch of each window after the first, by order."""
    loaders = {
        name: salience.Loader(
            salience.Source(url, decode=len, cache=cache), BATCH, epochs=windows, select=preset, seed=1
        )
        for name in ("resident", "random")
    }
    loaders["random"]._run.feeding.__class__ = RandomOrder
    waits: dict[str, list[float]] = {name: [] for name in loaders}
    for window in range(windows):
        for name, loader in loaders.items():
            begin = time.perf_counter()
            for number, batch in enumerate(loader):
                if not number and window:
                    waits[name].append(1e3 * (time.perf_counter() - begin))
                loader.loss(batch.float() / 1e5)
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and windows")
    quick = parser.parse_args().quick
    out: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        index = make(root, 300 if quick else 1000)
        with running(root / "shards", rate=RATE, latency=LATENCY) as store:
            for preset in ("uniform", "infobatch"):
                waits = first_waits(store.url, int(SHARE * index.nbytes), preset, 6 if quick else 12)
                middle = {name: statistics.median(values) for name, values in waits.items()}
                print(
                    f"{preset}: first batch after {middle['resident']:.0f} ms, in random order {middle['random']:.0f} ms"
                )
                out[f"{preset}_first_batch_ratio"] = round(middle["resident"] / middle["random"], 3)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
