"""One window as it was: its seconds as they would be without a probe, and what each part of a step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from salience.watch.model import Costs
from salience.watch.probe import WARM, costs_of
from salience.watch.steps import Step

DROPPED = 4
"""First steps of a window whose computing does not count: something may just have been switched."""
BLOCKS = 8
LEAST = 4
"""Steps below which a window says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A whole window."""

    seconds: float
    """Planning, workers that start, and all its steps."""
    step: float
    """Seconds of a step behind the first ones."""
    blocks: tuple[float, ...]
    """The same, of equal parts of the window one after the other."""
    costs: Costs | None


def look(
    steps: Sequence[Step],
    *,
    batches: int,
    lead: float,
    inputs: Sequence[float],
    ahead: int,
    workers: int,
    first: bool,
    restarts: bool,
    fills: bool = False,
) -> Seen | None:
    """From the steps of a window of `batches`; None where they are too few.

    `lead`: seconds before the first. `inputs`: what probes measured. `ahead`: batches that are ready after a probe, whose waits
    say nothing. `first`: the run's first window, in which everything warms up. `restarts`: whether workers start anew in
    every window, so that waiting for them belongs to each. `fills`: a cache is filled, mostly in the window's first steps,
    so that they count as all others do.
    """
    natural, ready = list[Step](), 0
    for step in steps:
        ready = ahead if step.held else ready - 1
        if not step.held and ready < 0:
            natural.append(step)
    dropped = 0 if fills else min(WARM if first else DROPPED, len(natural) // 4)
    body = natural[dropped:]
    if len(body) < LEAST:
        return None
    each = np.array([step.wait + step.busy for step in body])
    waits = sum(step.wait for step in natural[:dropped]) - dropped * float(np.mean([step.wait for step in body]))
    blocks = np.array_split(each, min(BLOCKS, len(each) // 2))
    return Seen(
        seconds=float(each.mean()) * batches + lead + (max(0.0, waits) if restarts else 0.0),
        step=float(each.mean()),
        blocks=tuple(float(block.mean()) for block in blocks),
        costs=_plain_costs(body, workers)
        if fills
        else costs_of([*body, *(step for step in steps if step.held)], inputs, workers),
    )


def _plain_costs(steps: Sequence[Step], workers: int) -> Costs:
    """Means over all steps, with input alone as slow as they are: what reading costs where little is here yet."""
    wait, forward, backward = (
        float(np.mean([getattr(one, name) for one in steps])) for name in ("wait", "forward", "backward")
    )
    names = {name: 0 for one in steps for name in one.work}
    work = {name: float(np.mean([one.work.get(name, 0.0) for one in steps])) for name in names}
    busy = forward + backward
    return Costs(
        step=wait + busy, wait=wait, input=wait + busy, compute=busy, work=work, forward=forward, backward=backward,
        workers=workers, steps=len(steps),
    )  # fmt: skip
