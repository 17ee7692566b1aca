"""What a training loop does with its time, step by step: waits for a batch, goes forward, goes backward.

The loader knows three moments of a step without asking the user for anything: when the loop comes back for a batch, when it
gets one, and when it calls `loss`. On a GPU the same moments are events of its stream, since the host runs ahead.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from salience.events import StepSeconds

STEPS_KEPT = 4096
"""Number of steps that are remembered."""


class Stopwatch:
    """Adds up seconds by name: `with watch("plan"): ...`. Every part of a run reports its own seconds to one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(slots=True)
class Step:
    """Seconds of one step."""

    wait: float
    """From asking for the batch to having it."""
    copy: float = 0.0
    """From having it to having it on the device, where the loop says so."""
    forward: float = 0.0
    """From having the batch on the device to calling loss()."""
    backward: float = 0.0
    """From loss() to asking for the next batch: backward pass, optimizer, and whatever else the loop does."""
    sync: float = 0.0
    """Part of `backward` in which this rank waited for gradients of the others."""
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the worker that made the batch spent: "fetch", "decode", and stages by name."""
    idle: float | None = None
    """Time the GPU had nothing to do before it got this batch; None without a GPU."""
    held: bool = False
    """True if the batch came out of a probe, so that its wait means nothing."""
    trying: bool = False
    """True if `salience.sync` was measuring or trying a mode, so that the step is not one of the run as it is."""

    @property
    def busy(self) -> float:
        return self.copy + self.forward + self.backward


class Steps:
    """Records steps. A call costs a microsecond or two."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self.count = 0
        self.losses = False
        """True once loss() was called."""
        self.lr: float | None = None
        """Learning rate of the step, where a ProgressLR sets it."""
        self.trying = False
        """True while `salience.sync` measures, or tries a mode."""
        self.knows_waits = False
        """True once it was told of a wait for other ranks at the end of a backward pass."""
        self._synced = 0.0
        self._sums, self._work = Counter[str](), Counter[str]()
        """Seconds since `spent` was last called, without steps that a probe held back; `_work` by stage of the workers."""
        self._asked = self._got = self._copied = self._lost = 0.0
        self._device: torch.device | None = None
        self._events: deque[tuple[Step, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._asked_event: torch.cuda.Event | None = None

    def ask(self) -> None:
        """The loop wants a batch; the step before is over."""
        now = time.perf_counter()
        if self.count and self._got:
            step = self.steps[-1]
            begin = max(self._got, self._copied)
            step.copy = begin - self._got
            if self._lost > begin:
                step.forward, step.backward = self._lost - begin, now - self._lost
            else:
                step.forward, step.backward = now - begin, 0.0
            step.sync, step.trying = min(self._synced, step.backward), self.trying
            if not step.held:
                for name in ("wait", "copy", "forward", "backward"):
                    self._sums[name] += getattr(step, name)
                self._sums["steps"] += 1
                self._work.update(step.work)  # pyright: ignore[reportArgumentType]
            self._got = self._synced = 0.0  # it is over
        self._asked = now
        if self._device is not None:
            self._asked_event = _event(self._device)

    def got(self, work: Mapping[str, float] | None = None, *, held: bool = False) -> None:
        """The batch is here."""
        self._got = time.perf_counter()
        step = Step(self._got - self._asked, work=work or {}, held=held)
        if self._device is not None and self._asked_event is not None:
            self._events.append((step, self._asked_event, _event(self._device)))
            self._settle()
        self.steps.append(step)
        self.count += 1

    def copied(self) -> None:
        """The batch is on the device; a copy that goes on beside the host takes the host no time."""
        self._copied = time.perf_counter()

    def on_loss(self, device: torch.device) -> float:
        """`loss` was called, with losses on `device`. Returns the moment, by `time.perf_counter`."""
        self._lost = time.perf_counter()
        self.losses = True
        if self._device is None and device.type == "cuda":
            self._device = device
        return self._lost

    def synced(self, seconds: float, *, trying: bool) -> None:
        """`salience.sync` held the loop up for so long; `trying` as in `Step`."""
        self._synced += seconds
        self.trying = trying

    def waited(self, seconds: float) -> None:
        """The backward pass was over, and DistributedDataParallel held the loop up for so long."""
        self._synced += seconds
        self.knows_waits = True

    def spent(self) -> StepSeconds | None:
        """Seconds of all steps since the last call; None where there were none."""
        sums, work = self._sums, self._work
        self._sums, self._work = Counter(), Counter()
        return StepSeconds(**sums, work=dict(work)) if sums else None  # pyright: ignore[reportArgumentType]

    def pause(self) -> None:
        """The window is over: the time until the next batch is asked for belongs to no step."""
        self._got = self._lost = 0.0
        self._asked_event = None

    def _settle(self) -> None:
        """Fill in idle times whose events have happened by now; never waits for the device."""
        while self._events and self._events[0][2].query():
            step, asked, got = self._events.popleft()
            step.idle = asked.elapsed_time(got) / 1000


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
