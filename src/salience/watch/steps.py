"""How a training loop spends its time, step by step: waiting for a batch, forward pass, backward pass.

The loader sees three moments of a step without any help from the user: when the loop asks for a batch, when it gets one, and
when it calls `loss`. On a GPU the same moments are events on its stream, since the host runs ahead.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salience.events import StepSeconds

STEPS_KEPT = 4096
"""Maximum number of steps that are kept."""
STEPS_ADDED_UP = 256
"""Steps that are added up together, in a fraction of the time that they would take one by one."""


class Stopwatch:
    """Adds up seconds by name: `with watch("plan"): ...`. The parts of a run report their own seconds to one."""

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
    """From asking for the batch to receiving it."""
    copy: float = 0.0
    """From receiving the batch to having it on the device, if the loop reports that."""
    forward: float = 0.0
    """From having the batch on the device to calling loss()."""
    backward: float = 0.0
    """From loss() to asking for the next batch: backward pass, optimizer, and whatever else the loop does."""
    sync: float = 0.0
    """Part of `backward` in which this rank waited for gradients of the others."""
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent by the worker that made the batch: "fetch", "decode", and stages by name."""
    idle: float | None = None
    """Time the GPU was idle before it got this batch; None without a GPU."""
    held: bool = False
    """True if a probe held the batch back, so that its wait means nothing."""
    trying: bool = False
    """True if `salience.sync` was measuring or trying a mode, so that the step is not representative of the run."""

    @property
    def busy(self) -> float:
        return self.copy + self.forward + self.backward


class Steps:
    """Records the times of steps. A call costs a microsecond or two."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self.count = 0
        self.losses = False
        """True once loss() was called."""
        self.lr: float | None = None
        """Learning rate of the step, if a ProgressLR sets it."""
        self.trying = False
        """True while `salience.sync` measures, or tries a mode."""
        self.knows_waits = False
        """True once `waited` was called: waits for other ranks are measured."""
        self._synced = 0.0
        self._over: list[Step] = []
        """Steps that are over and not added up yet, without those that a probe held back."""
        self._sums, self._work = Counter[str](), Counter[str]()
        """Seconds since the last call of `spent`, but for those of `_over`; `_work` by stage of the workers."""
        self._asked = self._got = self._copied = self._loss_at = 0.0
        self._device: torch.device | None = None
        self._events: deque[tuple[Step, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._asked_event: torch.cuda.Event | None = None

    def ask(self) -> None:
        """The loop asks for a batch; the previous step is over."""
        now = time.perf_counter()
        if self._got:
            step = self.steps[-1]
            begin = max(self._got, self._copied)
            step.copy = begin - self._got
            if self._loss_at > begin:
                step.forward, step.backward = self._loss_at - begin, now - self._loss_at
            else:
                step.forward, step.backward = now - begin, 0.0
            step.sync, step.trying = min(self._synced, step.backward), self.trying
            if not step.held:
                self._over.append(step)
                if len(self._over) == STEPS_ADDED_UP:
                    self._add_up()
            self._got = self._synced = 0.0  # it is over
        self._asked = now
        if self._device is not None:
            self._asked_event = _event(self._device)

    def got(self, work: Mapping[str, float] | None = None, *, held: bool = False) -> None:
        """The batch has arrived."""
        self._got = time.perf_counter()
        step = Step(self._got - self._asked, work=work or {}, held=held)
        if self._device is not None and self._asked_event is not None:
            self._events.append((step, self._asked_event, _event(self._device)))
            self._settle()
        self.steps.append(step)
        self.count += 1

    def copied(self) -> None:
        """The batch is on the device; an asynchronous copy takes no time on the host."""
        self._copied = time.perf_counter()

    def on_loss(self, losses: Tensor) -> None:
        """`loss` was called."""
        self._loss_at = time.perf_counter()
        if not self.losses:  # even to ask for the device takes microseconds
            self.losses = True
            self._device = losses.device if losses.is_cuda else None

    def synced(self, seconds: float, *, trying: bool) -> None:
        """`salience.sync` delayed the loop by this many seconds; `trying` as in `Step`."""
        self._synced += seconds
        self.trying = trying

    def waited(self, seconds: float) -> None:
        """After the end of the backward pass, DistributedDataParallel delayed the loop by this many seconds."""
        self._synced += seconds
        self.knows_waits = True

    def spent(self) -> StepSeconds | None:
        """Seconds of all steps since the last call; None if there were none."""
        self._add_up()
        sums, work = self._sums, self._work
        self._sums, self._work = Counter(), Counter()
        return StepSeconds(**sums, work=dict(work)) if sums else None  # pyright: ignore[reportArgumentType]

    def _add_up(self) -> None:
        over, self._over = self._over, []
        for step in over:
            for name in ("wait", "copy", "forward", "backward"):
                self._sums[name] += getattr(step, name)
            self._work.update(step.work)  # pyright: ignore[reportArgumentType]
        if over:
            self._sums["steps"] += len(over)

    def pause(self) -> None:
        """The window is over: the time until the next batch is asked for belongs to no step."""
        self._got = self._loss_at = 0.0
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
