"""Probes that change nothing: the next batches are held back (the loader alone), then released one after the other (the loop
alone). They are the planned batches in their order, so that the run is the same with and without.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

import torch

from salience.events import BottleneckFound, MachineUse, StepCosts
from salience.watch.model import ceiling, find_bottleneck, levers
from salience.watch.steps import Step, Steps
from salience.watch.usage import MAX_SAMPLES_PER_PROFILE, UsageRecord

T = TypeVar("T")
WARMUP_STEPS = 8
"""First steps of a run, in which things warm up."""
IDLE_GPU_SHARE = 0.5
"""A GPU that is busy for less than this share of the time does not hold a loop back."""


class Enough(BaseException):
    """Everything was measured: the script that is profiled may stop."""


@dataclass(slots=True)
class Probe:
    """When to hold back how many batches, and what was measured."""

    depth: int = 4
    """Batches that may be ready already, so that their time says nothing."""
    timed: int = 8
    """Batches after those that are timed."""
    every: int = 64
    """Steps between two probes."""
    first: int = 12
    """Steps before the first: whatever warms up has done so."""
    times: int = 4
    """Number of probes in all."""
    inputs: list[float] = field(default_factory=list[float])
    """Seconds per batch, one entry for each probe."""
    done: int = 0
    stops: bool = False
    """Raise Enough when all probes are done and their batches are used."""
    usage: UsageRecord | None = None
    """Takes note of how busy the machine is, where somebody wants to know."""

    def check(self, steps: Steps) -> None:
        """Look at the machine; stop the script where everything is measured and the loop calls loss()."""
        if self.usage is not None:
            self.usage.note()
        last = self.first + self.times * (self.every + self.depth + self.timed)
        if self.stops and self.done >= self.times and steps.count >= last and steps.losses:
            raise Enough

    def due(self, count: int) -> bool:
        return self.done < self.times and count >= self.first + self.done * (self.every + self.depth + self.timed)

    def hold(self, batches: Iterator[T]) -> list[T]:
        """The next batches, as fast as they come; fewer at a window's end."""
        held: list[T] = []
        begin = time.perf_counter()
        self.done += 1
        for batch in batches:
            held.append(batch)
            if len(held) == self.depth:
                begin = time.perf_counter()
            if len(held) == self.depth + self.timed:
                break
        if len(held) > self.depth:
            self.inputs.append((time.perf_counter() - begin) / (len(held) - self.depth))
        return held

    def costs(self, steps: Steps, workers: int) -> StepCosts | None:
        """Over the steps so far; None as long as there was no whole probe."""
        settled = list(steps.steps)[WARMUP_STEPS:-1]  # the last may not be over
        if not self.inputs or not any(step.held for step in settled):
            return None
        return costs_of(settled, self.inputs, workers)


def costs_of(steps: Sequence[Step], inputs: Sequence[float], workers: int) -> StepCosts | None:
    """Means over steps, and the median of what probes measured of the loader alone; None where the steps are too few.

    Without a probe the loader alone is taken to cost what it waits (no workers), or what its workers do side by side.
    """
    natural = [s for s in steps if not s.held and not s.trying]
    alone = [s for s in steps if s.held and not s.trying] or natural
    if len(natural) < 4:
        return None
    work = {name: _mean([s.work.get(name, 0.0) for s in natural]) for name in {n: 0 for s in natural for n in s.work}}
    waits = [s.wait if s.idle is None else min(s.idle, s.wait) for s in natural]
    supposed = sum(work.values()) / workers if workers else _mean(waits)
    return StepCosts(
        step=_mean([s.wait + s.busy for s in natural]),
        wait=_mean(waits),
        input=median(inputs) if inputs else supposed,
        compute=_mean([s.busy for s in alone]),
        work=work,
        copy=_mean([s.copy for s in alone]),
        forward=_mean([s.forward for s in alone]),
        backward=_mean([s.backward - s.sync for s in alone]),
        sync=_mean([s.sync for s in alone]),
        workers=workers,
        steps=len(natural),
    )


def _mean(values: list[float]) -> float:
    """Mean without the highest and lowest twentieth: a checkpoint or an evaluation in between is not a step."""
    values = sorted(values)
    cut = len(values) // 20
    kept = values[cut : len(values) - cut] or values
    return sum(kept) / len(kept)


@dataclass(slots=True)
class Session:
    """The loaders that a profiled script makes, each with its probe."""

    stop: bool = True
    """True if the script is stopped once its first loader with losses has been measured."""
    times: int = 4
    found: list[tuple[Probe, Steps, int]] = field(default_factory=list[tuple[Probe, Steps, int]])
    """Probe, steps and number of workers of each."""
    usage: UsageRecord = field(default_factory=lambda: UsageRecord(MAX_SAMPLES_PER_PROFILE))
    """How busy the machine is while they are measured."""

    def probe_for(self, steps: Steps, workers: int, ahead: int) -> Probe:
        """A probe for a loader whose workers have up to `ahead` batches ready."""
        probe = Probe(depth=max(2, ahead + 1), times=self.times, stops=self.stop, usage=self.usage)
        self.found.append((probe, steps, workers))
        return probe

    def measured(self) -> tuple[StepCosts, Steps] | None:
        """The result of the loader that made most steps."""
        for probe, steps, workers in sorted(self.found, key=lambda item: -item[1].count):
            costs = probe.costs(steps, workers)
            if costs is not None:
                return costs, steps
        return None


def profiled(
    costs: StepCosts, *, cores: int, losses: bool, usage: Sequence[MachineUse] = (), missing: Sequence[str] = ()
) -> BottleneckFound:
    """The verdict on measured costs, with what levers could gain and how busy the machine was.

    `losses`: the loop called `loss()`. `missing`: packages that are not installed.
    """
    ceilings = [ceiling(costs, lever) for lever in levers(costs, cores=cores)]
    said = find_bottleneck(costs, sorted(ceilings, key=lambda c: (not c.exact, -(c.speedup or 0.0))))
    notes: list[str] = []
    if not losses:
        notes.append("The script never calls loader.loss(), so forward and backward cannot be told apart.")
    busy = [max(sample.gpu) for sample in usage[len(usage) // 2 :] if sample.gpu]
    if said.bound == "compute" and busy and sum(busy) / len(busy) < IDLE_GPU_SHARE:
        notes.append(
            f"The GPU itself was busy only {sum(busy) / len(busy):.0%} of the time (NVML): Python and kernel launches hold the "
            "loop back. Larger batches, torch.compile or CUDA graphs would help more than any lever here."
        )
    if not torch.cuda.is_available():
        notes.append("No GPU was found: the accelerator is this machine's processor.")
    elif "pynvml" in missing:
        notes.append(
            "nvidia-ml-py is not installed (pip install 'salience[watch]'): how busy the GPUs were is not shown."
        )
    if "psutil" in missing:
        notes.append("psutil is not installed (pip install 'salience[watch]'): how busy the machine was is not shown.")
    return replace(said, usage=tuple(usage), notes=tuple(notes))


_SESSION: ContextVar[Session | None] = ContextVar("salience_profile", default=None)


def current_session() -> Session | None:
    """The profile that is being made; None outside `salience profile`."""
    return _SESSION.get()


@contextmanager
def profiling(session: Session) -> Generator[Session]:
    """Measure the loaders that are made inside this block."""
    token = _SESSION.set(session)
    try:
        yield session
    finally:
        _SESSION.reset(token)
