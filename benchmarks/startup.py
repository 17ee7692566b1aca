"""How long until salience is there?

Question: `from salience import Loader` against `import torch` alone, and `salience --help` and bare `salience`, in fresh
interpreters, by turns (`import salience` loads next to nothing). Bars: at most 1.15 times torch; help under 0.3 s. Against
us: a warm file cache, since reading torch from disk would hide us.

    python benchmarks/startup.py [--quick]      # about a minute; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "torch": [sys.executable, "-c", "import torch"],
    "salience": [sys.executable, "-c", "from salience import Loader"],
    "help": [sys.executable, "-m", "salience", "--help"],
    "bare": [sys.executable, "-m", "salience"],
    "python": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    rounds = 5 if parser.parse_args().quick else 15
    for command in COMMANDS.values():
        seconds(command)  # warms the file cache
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds):
        for name in list(COMMANDS)[:: 1 if number % 2 else -1]:
            found[name].append(seconds(COMMANDS[name]))
    ratios = [ours / torch for ours, torch in zip(found["salience"], found["torch"], strict=True)]
    middle = {f"{name}_s": round(statistics.median(times), 4) for name, times in found.items()}
    print(json.dumps({"import_ratio": round(statistics.median(ratios), 4), **middle, "ratios": sorted(ratios)}))


if __name__ == "__main__":
    main()
