"""Are the criteria what they say? Each part answers one question and is a file of its own, `criteria_<part>.py`.

Every part has a function `measure(*, quick: bool, seed: int) -> dict` whose figures go into one JSON object, the last line of
stdout, under their own names. What would embarrass us, and the baselines, are in the docstring of each part.

    python benchmarks/criteria.py --quick                 # all parts, about a minute each
    python benchmarks/criteria.py --parts grand,influence  # some of them, at full size

`seconds` says what each part took. A part that fails is named in `failed`, the others go on, and the exit status is 1. The part
`scorer` measures seconds: run it alone on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PREFIX = "criteria_"


def parts() -> list[str]:
    return sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default=",".join(parts()), help=f"of {', '.join(parts())}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, Any] = {"seconds": {}, "failed": []}
    for part in filter(None, args.parts.split(",")):
        begin = time.perf_counter()
        try:
            found = importlib.import_module(PREFIX + part).measure(quick=args.quick, seed=args.seed)
        except Exception:
            traceback.print_exc()
            figures["failed"].append(part)
            continue
        figures["seconds"][part] = round(time.perf_counter() - begin)
        print(f"{part}: {figures['seconds'][part]} s, {json.dumps(found)}", flush=True)
        figures |= found
    print(json.dumps(figures))
    sys.exit(bool(figures["failed"]))


if __name__ == "__main__":
    main()
