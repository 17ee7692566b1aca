"""How long until salience is there?

Question: `from salience import Loader` against `import torch` alone, and `salience --help` and bare `salience`, in fresh
interpreters, by turns (`import salience` loads next to nothing). Bars: at most 1.15 times torch; help under 0.3 s. Seconds are
processor seconds of the interpreter, which other jobs disturb less, and `wall` those of the clock; bytecode is kept, as an
installed package has it. Against us: a warm file cache, since reading torch from disk would hide us.

    python benchmarks/startup.py [--quick]      # about a minute; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import os
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

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str]) -> tuple[float, float]:
    """Processor seconds and those of the clock."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    _, child.returncode, used = os.wait4(child.pid, 0)
    return used.ru_utime + used.ru_stime, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    rounds = 5 if parser.parse_args().quick else 15
    for command in COMMANDS.values():
        seconds(command)  # warms the file cache
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds):
        for name in list(COMMANDS)[:: 1 if number % 2 else -1]:
            found[name].append(seconds(COMMANDS[name]))
    ratios = [round(ours / torch, 4) for (ours, _), (torch, _) in zip(found["salience"], found["torch"], strict=True)]
    middle = {f"{name}_s": round(statistics.median(used for used, _ in times), 4) for name, times in found.items()}
    wall = {name: round(statistics.median(clock for _, clock in times), 4) for name, times in found.items()}
    print(json.dumps({"import_ratio": statistics.median(ratios), **middle, "wall": wall, "ratios": sorted(ratios)}))


if __name__ == "__main__":
    main()
