"""The timing of one window: its seconds as if without a probe, and the cost of each part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from salience.events import StepCosts
from salience.watch.probe import WARMUP_STEPS, costs_of
from salience.watch.steps import Step

DROPPED_STEPS = 4
"""Number of first steps of a window that do not count, since something may just have been switched."""
MAX_BLOCKS = 8
"""Maximum number of parts of a window that are compared with those of another."""
MIN_STEPS = 4
"""A window with fewer steps says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTiming:
    """The seconds of one whole window."""

    seconds: float
    """Seconds of the window: planning, starting workers, and all steps."""
    step: float
    """Mean seconds per step, without the first steps."""
    blocks: tuple[float, ...]
    """Mean seconds per step in consecutive equal parts of the window."""
    costs: StepCosts | None


def measure_window(
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
) -> WindowTiming | None:
    """Time a window of `batches` by its steps; None if there are too few.

    `lead`: seconds before the first. `inputs`: what probes measured. `ahead`: batches that are ready after a probe, whose waits
    say nothing. `first`: the run's first window, in which everything warms up. `restarts`: workers are started again
    in every window, so that waiting for them is part of each. `fills`: a cache is filled, mostly in the first steps of the
    window, so that the waits of all steps count.
    """
    natural, ready = list[Step](), 0
    for step in steps:
        ready = ahead if step.held else ready - 1
        if not step.held and not step.trying and ready < 0:
            natural.append(step)
    dropped = min(WARMUP_STEPS if first else DROPPED_STEPS, len(natural) // 4)
    body = natural[dropped:]
    if len(body) < MIN_STEPS:
        return None
    if fills:
        return _filling(natural, body, batches, lead, workers)
    each = np.array([step.wait + step.busy for step in body])
    waits = sum(step.wait for step in natural[:dropped]) - dropped * float(np.mean([step.wait for step in body]))
    blocks = np.array_split(each, min(MAX_BLOCKS, len(each) // 2))
    return WindowTiming(
        seconds=float(each.mean()) * batches + lead + (max(0.0, waits) if restarts else 0.0),
        step=float(each.mean()),
        blocks=tuple(float(block.mean()) for block in blocks),
        costs=costs_of([*body, *(step for step in steps if step.held)], inputs, workers),
    )


def _filling(natural: Sequence[Step], body: Sequence[Step], batches: int, lead: float, workers: int) -> WindowTiming:
    """Timing of a window that fills a cache, from waits of all steps and computing after the first ones; input is their sum."""
    wait = float(np.mean([step.wait if step.idle is None else min(step.idle, step.wait) for step in natural]))
    forward, backward = np.mean([(step.forward, step.backward) for step in body], axis=0).tolist()
    names = {name: 0 for step in natural for name in step.work}
    each = float(np.mean([step.wait for step in natural])) + forward + backward
    costs = StepCosts(
        step=wait + forward + backward, wait=wait, input=wait + forward + backward, compute=forward + backward,
        work={name: float(np.mean([step.work.get(name, 0.0) for step in natural])) for name in names},
        forward=forward, backward=backward, workers=workers, steps=len(natural),
    )  # fmt: skip
    return WindowTiming(seconds=each * batches + lead, step=each, blocks=(each,), costs=costs)
