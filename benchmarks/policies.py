"""How much does `auto` lose against the best settings held from the first window on?

It is played on recorded windows, not on a model of them. `--record` runs every combination of levers by hand in real
regimes (those of auto.py, and two more) and writes down each window as the controller would see
it: seconds, parts of a window, costs by probe. Then the controller is asked at each of thirty edges, and the window it gets
is the next recorded one under the settings it chose: in order after a switch (a cache fills first), at the same share of
the run where a selection is on, else by lot.

regret = seconds of the run / seconds of the best settings held from the first window on - 1, the mean over repeated runs.
worst_vs_plain = the slowest of all runs over plain.

Embarrassing would be: a mean regret over 0.04, or a worst_vs_plain over 1.1.

    python benchmarks/policies.py [--record FILE] [--show FILE]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import auto
import salience
from auto import Regime, cpu, pause, storage
from salience.decide.controller import Controller
from salience.decide.levers import AvailableLevers, Settings, options
from salience.decide.timing import WindowTiming
from salience.events import StepCosts

WINDOWS, RECORDED, RUNS = 30, 10, 10
ROWS = Path(__file__).parent / "rows" / "policies-2026-11-16.jsonl"

# ---------------------------------------------------------------- regimes


@contextmanager
def light_cpu(windows: int) -> Generator[Regime]:
    """A model that takes about as long as two workers need for its batches."""
    with cpu(windows, lossy=True) as regime:
        yield replace(regime, step=lambda: pause(0.012))


REGIMES: dict[str, Callable[[int], Any]] = {
    **auto.REGIMES,
    "far_storage": lambda windows: storage(windows, size=8192, rate=2e6, latency=0.01, busy=0.012, lossy=True),
    "light_cpu": light_cpu,
}

# ---------------------------------------------------------------- recording


class ByHand(Controller):
    """Does as told, and writes down what it sees."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, windows=10**6, batches=10**9)
        self.seen: list[tuple[WindowTiming | None, AvailableLevers]] = []

    def edge(self, window: int, seen: WindowTiming | None, reach: AvailableLevers) -> list[Any]:
        if window:
            self.seen.append((seen, reach))
        return []


def record(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for name, make in REGIMES.items():
            with make(RECORDED) as regime:
                found = {(): run(regime, None)}
                base, reach = found[()][0], found[()][1][1][1]
                lossy = regime.auto == "lossy"
                costs = next(seen.costs for seen, _ in found[()][1] if seen is not None and seen.costs is not None)
                single = [one for one in options(costs, base, reach, RECORDED // 2) if one.exact or lossy]
                for count in range(len(single) + 1):
                    for parts in itertools.combinations(single, count):
                        settings = base
                        for part in parts:
                            changed = {
                                field: value
                                for field, value in asdict(part.settings).items()
                                if value != asdict(base)[field]
                            }
                            settings = replace(settings, **changed)
                        _, seen = run(regime, settings)
                        for window, (one, reach) in enumerate(seen):
                            row = {
                                "regime": name, "lossy": lossy, "settings": asdict(settings), "window": window,
                                "seen": None if one is None else asdict(one), "reach": asdict(reach),
                            }  # fmt: skip
                            out.write(json.dumps(row) + "\n")
                        out.flush()
                        told = [round(one.seconds, 2) for one, _ in seen if one is not None]
                        print(f"{name} {[part.name for part in parts] or 'plain'}: {told}", flush=True)


def run(
    regime: Regime, settings: Settings | None
) -> tuple[Settings, list[tuple[WindowTiming | None, AvailableLevers]]]:
    """Windows with these settings from the first on."""
    loader = salience.Loader(
        regime.data(), regime.batch, epochs=RECORDED + 1, **{**regime.options, "auto": regime.auto}
    )
    plain = replace(loader._run.deciding.settings, cache=0)  # pyright: ignore[reportPrivateUsage]
    controller = ByHand(settings or plain)
    loader._run.deciding.auto.controller = controller  # pyright: ignore[reportPrivateUsage,reportOptionalMemberAccess]
    step = regime.step()
    for _ in range(RECORDED + 1):
        for x, y in loader:
            step(loader, x, y)
    return controller.settings, controller.seen


# ---------------------------------------------------------------- playing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One regime."""

    lossy: bool
    base: Settings
    windows: dict[Settings, list[tuple[WindowTiming, AvailableLevers]]]


def load(path: Path) -> dict[str, Recorded]:
    found: dict[str, Recorded] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        settings = Settings(**row["settings"])
        regime = found.setdefault(row["regime"], Recorded(lossy=row["lossy"], base=settings, windows={}))
        if row["seen"] is None:
            continue
        given = row["seen"]
        costs = None if given["costs"] is None else StepCosts(**given["costs"])
        seen = WindowTiming(seconds=given["seconds"], step=given["step"], blocks=tuple(given["blocks"]), costs=costs)
        reach = AvailableLevers(**{**row["reach"], "reusable": tuple(row["reach"]["reusable"])})
        regime.windows.setdefault(settings, []).append((seen, reach))
    return found


def play(controller: Controller, regime: Recorded, rng: np.random.Generator) -> float:
    """Seconds of a run of WINDOWS under a policy."""
    total, since, before = 0.0, 0, regime.base
    for window in range(WINDOWS):
        settings = controller.settings
        fills = (settings.cache and not before.cache) or (settings.treat and not before.treat)
        since = 0 if fills or not window else since + 1
        before = settings
        seen, reach = at(regime, settings, window, since, rng)
        total += seen.seconds
        controller.edge(window + 1, seen if controller.probing else replace(seen, costs=None), reach)
    return total


def at(
    regime: Recorded, settings: Settings, window: int, since: int, rng: np.random.Generator
) -> tuple[WindowTiming, AvailableLevers]:
    """The recorded window that comes next."""
    windows = regime.windows[settings]
    reach = windows[min(len(windows) - 1, window * len(windows) // WINDOWS)][1]
    if settings.select:
        place = window * len(windows) // WINDOWS
    elif since < 2:
        place = since
    else:
        place = int(rng.integers(2, len(windows)))
    keep = list(reach.keep)
    stretched = [keep[min(len(keep) - 1, k * len(keep) // WINDOWS)] for k in range(WINDOWS)] if keep else keep
    return windows[place][0], replace(reach, keep=stretched)


def held(regime: Recorded, settings: Settings, rng: np.random.Generator) -> float:
    """Seconds of a run with these settings throughout."""
    return sum(at(regime, settings, window, window, rng)[0].seconds for window in range(WINDOWS))


def show(path: Path) -> dict[str, Any]:
    regimes, worst = load(path), 0.0
    out: dict[str, Any] = {"regret": {}}
    for name, regime in regimes.items():
        plain, best = (
            statistics.fmean(
                min(held(regime, settings, np.random.default_rng(k)) for settings in chosen) for k in range(RUNS)
            )
            for chosen in ([regime.base], list(regime.windows))
        )
        seconds: list[float] = []
        for k in range(RUNS):
            controller = Controller(regime.base, windows=WINDOWS, batches=40 * WINDOWS, lossy=regime.lossy)
            seconds.append(play(controller, regime, np.random.default_rng(k)))
        worst = max(worst, max(seconds) / plain)
        out["regret"][name] = {
            "plain": round(plain / best - 1, 3), "auto": round(statistics.fmean(seconds) / best - 1, 3)
        }  # fmt: skip
        print(f"{name}: {out['regret'][name]}", flush=True)
    for what in ("plain", "auto"):
        out[f"{what}_mean"] = round(statistics.fmean(one[what] for one in out["regret"].values()), 4)
    out["worst_vs_plain"] = round(worst, 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--record", metavar="FILE", help="run all combinations and write the windows there (15 minutes)"
    )
    parser.add_argument("--show", metavar="FILE", default=str(ROWS), help="recorded windows to play on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.record:
        record(Path(args.record))
        args.show = args.record
    print(json.dumps(show(Path(args.show))))


if __name__ == "__main__":
    main()
