"""What runs gained by which settings under which bottleneck, kept from run to run for the bandit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from salience.errors import StateError

TRUST, TRUST_SD = 0.8, 0.3
"""Of a prediction, before anything is known: predictions are what a lever gains at most."""
ACROSS = 0.1
"""By how much gains of the same settings under the same bottleneck differ from run to run."""
RUNS = 20
"""Remembered of each arm."""
FORMAT = "salience-bandit-1"

Found = dict[str, dict[str, dict[str, list[float]]]]


class Memory:
    """What runs gained: signature -> arm -> run -> (predicted, gain a visit, share visited). In a JSON file, with a path."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: Found = {}
        if path is not None and path.exists():
            self.found = _read(path)

    def note(self, signature: str, arm: str, run: str, predicted: float, gain: float, share: float = 1.0) -> None:
        runs = self.found.setdefault(signature, {}).setdefault(arm, {})
        runs[run] = [predicted, gain, share]
        for old in list(runs)[:-RUNS]:
            del runs[old]

    def gains(self, signature: str, arm: str, run: str) -> list[float]:
        """A visit, of other runs."""
        return [row[1] for other, row in self.found.get(signature, {}).get(arm, {}).items() if other != run]

    def trust(self, run: str, own: Sequence[tuple[float, float]] = ()) -> float:
        """k: how far predictions came true in other runs, whatever held them back, and in this one's (predicted, gain) `own`;
        ridge regression of gains on predictions, both logarithms."""
        pairs = [*own]
        pairs += [
            (math.log(row[0]), row[1] - math.log(row[2]))
            for arms in self.found.values()
            for runs in arms.values()
            for other, row in runs.items()
            if other != run and row[0] > 1 and row[2] > 0
        ]
        above = sum(x * y for x, y in pairs) / ACROSS**2 + TRUST / TRUST_SD**2
        return above / (sum(x * x for x, _ in pairs) / ACROSS**2 + 1 / TRUST_SD**2)

    def save(self, run: str) -> str:
        """Put what `run` saw into the file, beside what others wrote meanwhile; what is wrong, if it cannot be written."""
        if self.path is None:
            return ""
        part = self.path.with_name(f"{self.path.name}.{os.urandom(6).hex()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            there = Memory(self.path)
            for sign, arms in self.found.items():
                for arm, runs in arms.items():
                    if run in runs:
                        there.note(sign, arm, run, *runs[run])
            part.write_text(json.dumps({"format": FORMAT, "found": there.found}), encoding="utf-8")
            os.replace(part, self.path)
        except (OSError, StateError) as cause:
            return str(cause)
        return ""


def _read(path: Path) -> Found:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if read["format"] != FORMAT:
            raise ValueError(read["format"])
        return {
            str(sign): {
                str(arm): {str(run): [float(v) for v in (row[0], row[1], row[2])] for run, row in runs.items()}
                for arm, runs in arms.items()
            }
            for sign, arms in read["found"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as cause:
        raise StateError(
            f'{str(path)!r} is no memory of policy="bandit" ({cause}); remove it, or name another file.'
        ) from cause
