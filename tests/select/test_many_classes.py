"""Everything that is counted per class takes memory in proportion to the samples, however many classes there are."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, sys
import numpy as np
from salience.config import SelectConfig, Use
from salience.ledger import Ledger
from salience.select import Pipeline, preset
from salience.select.findings import study
from salience.select.noise import contradictions
from salience.select.summary import summarise

classes, n = int(sys.argv[1]), 2 * int(sys.argv[1])
rng = np.random.default_rng(0)
ledger = Ledger(n)
ledger.label[:] = rng.permutation(n) % classes
wrong = rng.random(n) < 0.2
ledger.vote[:] = (ledger.label[:, None] + rng.integers(1, classes, (n, 4))) % classes
ledger.vote[~wrong, 0] = ledger.label[~wrong]
ledger.guess[:] = ledger.vote[:, 0]
ledger.vote_p[:] = (0.8, 0.1, 0.05, 0.05)
ledger.confidence[:] = np.where(wrong, 0.01, 0.8)
ledger.mean_loss[:] = ledger.last_loss[:] = rng.random(n)
ledger.margin[:], ledger.el2n[:], ledger.seen[:], ledger.trained[:] = 1, 0.5, 8, 8
ledger.last_seen[:] = 3
ledger.course[:] = [(0.3 - 0.01 * k, 0.2, n / 10, 0.0) for k in range(8)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
filters = tuple(Use(name=name) for name in ("noise", "class_floor", "tail", "redundancy"))
full = SelectConfig(filters=filters, scores=(Use(name="el2n"),), sampler=Use(name="ratio"), keep=Use(name="constant"))
for config in (preset("default"), full):
    plan = Pipeline(config, strict=True).plan(ledger, window=10, windows=20, batch_size=100, seed=0)
assert contradictions(ledger).rate > 0.1
assert study(ledger).findings.class_count == classes
assert summarise(ledger, full, windows=10)["class_count"] == classes
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_two_hundred_thousand_classes_take_little_memory():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "200000"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250, "MB over the ledger, whose own 400,000 rows have 35"
