"""Everything that is counted per class takes memory in proportion to the samples, however many classes there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEMORY = """
import gc, re, sys
import numpy as np


def resident(which):
    gc.collect()
    with open("/proc/self/status") as file:
        return int(re.search(which + r":\\s+(\\d+) kB", file.read())[1]) >> 10

"""

PLANS = """
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
before = resident("VmRSS")
filters = tuple(Use(name=name) for name in ("noise", "class_floor", "tail", "redundancy"))
full = SelectConfig(filters=filters, scores=(Use(name="el2n"),), sampler=Use(name="ratio"), keep=Use(name="constant"))
for config in (preset("default"), full):
    plan = Pipeline(config, strict=True).plan(ledger, window=10, windows=20, batch_size=100, seed=0)
assert contradictions(ledger).rate > 0.1
assert study(ledger).findings.class_count == classes
assert summarise(ledger, full, windows=10)["class_count"] == classes
print(resident("VmHWM") - before)
"""

RUN = """
import torch
import salience

classes, n, folder = int(sys.argv[1]), 2 * int(sys.argv[1]), sys.argv[2]
labels = (np.random.default_rng(0).permutation(n) % classes).astype(np.int32)
targets = torch.from_numpy(labels).long()
selector = salience.Selector(n, batch_size=20_000, epochs=4, select="default", labels=labels)
before = resident("VmRSS")
for _ in range(4):
    for ids, _ in selector:
        selector.loss(torch.rand(len(ids)), targets=targets[ids])
selector.report(folder + "/report.html")
assert selector.summary()["class_count"] == classes
torch.save(selector.state_dict(), folder + "/state.pt")
print(resident("VmHWM") - before)
"""


def megabytes(script: str, *given: object) -> int:
    """What a script in a process of its own prints at its end: MB over its ledger, at the most."""
    command = [sys.executable, "-W", "ignore", "-c", MEMORY + script, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_two_hundred_thousand_classes_take_little_memory():
    assert megabytes(PLANS, 200_000) < 250, "MB over the ledger, whose own 400,000 rows have 35"


@pytest.mark.slow
def test_a_million_classes_with_two_million_samples_stay_within_a_gigabyte_over_the_ledger(tmp_path):
    assert megabytes(PLANS, 1_000_000) < 1024
    assert megabytes(RUN, 1_000_000, tmp_path) < 1024
