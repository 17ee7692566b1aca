"""Every rank makes the plan for itself: they stop together where their plans differ."""

from __future__ import annotations

import zlib

import numpy as np

from salience.errors import StateError
from salience.plan import Shard
from salience.ranks import Ranks


def check_equal(shard: Shard, ranks: Ranks) -> None:
    """Stop all ranks if their plans, or how these are divided, differ."""
    plan, digest = shard.plan, 0
    for part in (plan.ids, plan.weights, shard.cuts):
        digest = zlib.crc32(np.ascontiguousarray(part).tobytes(), digest)
    found = [ours for (ours,) in ranks.gather_objects([digest])]
    if len(set(found)) > 1:
        raise StateError(
            f"The ranks made different plans for window {plan.window} (checksums {found}); give every rank the same data "
            "set, seed, select, salience version and, to resume from, state."
        )
