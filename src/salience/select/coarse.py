"""Coarse pruning: once and for all, by another model's opinion, the same share of every class."""

from __future__ import annotations

import numpy as np

from salience.errors import ConfigError
from salience.registry import card
from salience.select.view import Verdict, View


@card(needs=("reference",), exact=False)
def coarse(view: View, *, drop: float = 0.3) -> Verdict:
    """Leaves out the `drop` of every class that other models found easiest, in every window.

    Of a class with m samples the floor(drop * m) with the lowest mean rank (`view.hardness`, in 16 bits); unknown ranks
    count as hardest, and stay. Starts when the classes are known: at once, or when every sample was seen; what has none by then
    is one class of its own.
    """
    if not 0 <= drop < 1:
        raise ConfigError(f"coarse: drop is {drop}; it must be at least 0 and below 1.")
    label = view.label
    if (view.unseen & (label < 0)).any():
        return Verdict(reason="waits until every sample was seen and its class is known")
    sizes = np.bincount(label + 1)
    # By class, the easiest first, unknown ones last. 16 bits, since NumPy sorts those by radix, many times faster.
    rank = np.nan_to_num(view.hardness * 65534, nan=65535).astype(np.uint16)
    order = np.argsort(rank, kind="stable")
    group = (label + 1).astype(np.uint16 if len(sizes) < 2**16 else np.int32)
    order = order[np.argsort(group[order], kind="stable")]
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    keep = np.empty(view.n, dtype=bool)
    keep[order] = np.arange(view.n) - first >= np.repeat(np.floor(drop * sizes), sizes)
    return Verdict(keep=keep, reason=f"easiest {drop:.0%} of its class by the reference")
