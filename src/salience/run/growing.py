"""A data set that grows at its end while a run uses it: what must grow with it, and what cannot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from salience.errors import DataError
from salience.plan import Trace
from salience.run.lengths import Lengths

if TYPE_CHECKING:
    from salience.run.run import Run

ANEW = "make a new Loader with ledger=loader.ledger, which finds rows by their keys"


def grow(run: Run, keys: Sequence[Hashable], lengths: Lengths | None = None) -> None:
    """Take in the samples that a data set has got at its end; new rows are for samples never seen. Between two windows only."""
    ledger, n = run.recording.ledger, len(keys)
    known = ledger.keys
    assert known is not None
    moved = [(i, old, new) for i, (old, new) in enumerate(zip(known, keys, strict=False)) if old != new][:1]
    if moved or n < len(known):
        what = (
            f"sample {moved[0][0]} was {moved[0][1]!r} and is now {moved[0][2]!r}"
            if moved
            else f"{len(known)} became {n}"
        )
        raise DataError(
            f"While a run uses it, a data set may only grow at its end, and {what}; where samples go or move, {ANEW}."
        )
    _check(run, n)
    before = len(known)
    doubles = n - len(set(keys))
    if doubles:
        raise DataError(f"{doubles} samples were added under a key of another one; a key names one sample.")
    known.add(keys[before:])
    ledger.extend(n)
    run.setup.grow(n)
    run.planning.order.n = n
    run.copying.grow()
    run.sensing.regrow_features(run.copying)
    if run.by_length is not None and lengths is not None:
        run.by_length.grown(lengths)
    run.events.emit("keys", known=before, new=n - before, gone=0)


def _check(run: Run, n: int) -> None:
    """Raise DataError if something in this run has one entry per sample and cannot grow."""
    sensing, planning = run.sensing, run.planning
    fixed = {
        "several ranks share one ledger": run.setup.ranks is not None,
        "a window is shorter than an epoch": run.setup.pieces > 1,
        "stages keep intermediates by sample": run.staging is not None,
        "reference= has one opinion per sample": sensing.given is not None,
        "a proxy or a jury is attached": sensing.proxy is not None or sensing.jury is not None,
        "a scorer runs in the background": sensing.scorer is not None,
        "copies= is about its samples": run.copying.known is not None,
        "embeddings= has one vector per sample": run.copying.given,
        "quality= has one number per sample": planning.pipeline is not None and planning.pipeline.quality is not None,
        "the subset is fixed": planning.fixed is not None,
        "its plans are those of a trace": isinstance(planning.config, Trace),
    }
    for why, so in fixed.items():
        if so:
            raise DataError(f"The data set grew from {run.setup.n} to {n} samples, and {why}: {ANEW}.")
