"""The parts of the criteria benchmark run, on a handful of samples: what they measure is measured in benchmarks/."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_a_run_with_a_jury_leaves_three_families_of_experts() -> None:
    from criteria_mixture import run
    from planted import digits, planted

    images = digits(100, 0)
    labels = planted(images, "symmetric", 0.2, 0)
    assert np.count_nonzero(labels != images.y) == 20
    ledgers, share = run(images, labels, epochs=1, batch=50, seed=0)
    assert list(ledgers) == ["model", "jury", "jury, held out"]
    assert all((ledger.seen == 1).all() for ledger in ledgers.values())
    assert 0 < share < 1


def test_the_scorer_works_in_one_window_of_each_pair() -> None:
    from criteria_scorer import pairs

    ratios, scored = pairs(1, 2, seed=0)
    assert ratios.shape == (2,)
    assert (ratios > 0).all()
    assert scored >= 0  # how many it comes to score is a matter of time


def test_augmentation_is_steered_by_the_gap_in_one_arm_and_by_curves_in_others() -> None:
    from criteria_augment import ARMS, accuracy

    found = {name: accuracy(arm, n=100, epochs=2, seed=0) for name, arm in ARMS.items()}
    assert all(0 <= value <= 1 for value, _ in found.values())


def test_tuning_counts_the_runs_it_costs() -> None:
    from criteria_tuned import Runs
    from salience.select import preset

    runs = Runs(64, 300, 1, 0, 0.4)
    results, cost = runs(preset("window"), 1)
    assert (len(results), runs.made, cost) == (300, 1, 64 / 1e5)


def test_a_part_that_does_not_exist_is_named_and_the_last_line_is_still_json(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "criteria.py"), "--quick", "--parts", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {"seconds": {}, "failed": ["nothing"]}
