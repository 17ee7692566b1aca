"""Are the criteria what they say? Each part answers one question and is a file of its own, `criteria_<part>.py`.

Every part has a function `measure(*, quick: bool, seed: int) -> dict` whose figures go into one JSON object, the last line of
stdout, under their own names. What would embarrass us, and the baselines, are in the docstring of each part.

    python benchmarks/criteria.py --quick                 # all parts, under a minute each
    python benchmarks/criteria.py --parts grand,influence  # some of them, at full size
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

PREFIX = "criteria_"


def parts() -> list[str]:
    return sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default=",".join(parts()), help=f"of {', '.join(parts())}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = {}
    for part in filter(None, args.parts.split(",")):
        begin = time.perf_counter()
        found = importlib.import_module(PREFIX + part).measure(quick=args.quick, seed=args.seed)
        print(f"{part}: {time.perf_counter() - begin:.0f} s, {json.dumps(found)}", flush=True)
        figures |= found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
