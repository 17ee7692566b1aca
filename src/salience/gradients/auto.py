"""`auto`: measures link and compute, predicts what each mode would make of a step, tries the best, keeps it if it is faster.

    first       5 steps of plain all-reduce, not looked at (DDP rearranges its buckets)
    then        8 steps with gradients in one piece after the backward pass: how long the link takes, and the rest of a step
    then        a prediction for each mode; one that promises less than 1.05 times the speed is not tried
    then        two to four pairs of blocks of steps, plain and with the mode; kept if surely more than 1.02 times as fast
    from then   every 64 steps the link is timed; if it stays half or twice as fast for five steps, all of this starts again

All ranks decide alike, from the means of what they measured. Lossy modes are said to be lossy when they are tried, and are
given up for good when two validation results in a row are below the best one from before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from salience.events import Event, LeverDecided
from salience.gradients.costs import Costs, Timed, rehearse, some_gradients
from salience.gradients.exchange import Exchange, Whole
from salience.gradients.options import resolve
from salience.stats import paired_interval

if TYPE_CHECKING:
    from salience.gradients.handle import Handle

SKIP, MEASURE, BLOCK, PAIRS, CHECK_EVERY = 5, 8, 6, 4, 64
"""Steps not looked at, steps measured, steps per block of a trial, most pairs of blocks, steps between looks at the link."""
WORTH, KEEP, HOPELESS, CHANGED = 1.05, 1.02, 1 / 1.1, 2.0
"""Speed-ups worth a trial, needed to stay, and that end a trial at once; change of the link after which all starts again."""
PROBE = 1 << 17
"""Bytes of the message that times the link."""
DOUBTS = 4
"""Looks in a row at a changed link before it is believed."""
CANDIDATES = ("bf16", "lowrank", "topk", "local")
"""Modes that are tried, the mildest first."""


@dataclass(kw_only=True, slots=True)
class Trial:
    """Blocks of steps without a mode and with it, by turns; seconds per step of each."""

    mode: str
    options: dict[str, Any]
    length: int
    """Steps per block."""
    on: bool = False
    block: list[float] = field(default_factory=list[float])
    without: list[float] = field(default_factory=list[float])
    with_mode: list[float] = field(default_factory=list[float])
    exchange: Exchange | None = None
    """The mode's own exchange, so that what stays behind in one block is there in the next."""

    @property
    def gains(self) -> list[float]:
        """Logarithms of the speed-up, one per pair of blocks."""
        return [math.log(a / b) for a, b in zip(self.without, self.with_mode, strict=False)]

    @property
    def over(self) -> bool:
        """Enough pairs, or fewer that leave no doubt: a first one that is hopeless, or two that agree."""
        gains = self.gains
        if len(gains) < len(self.without):
            return False
        sure = paired_interval(gains, 0.90)
        clear = sure is not None and sure.low is not None and sure.low > math.log(KEEP)
        return clear or len(gains) >= PAIRS or gains[0] < math.log(HOPELESS)


class Chooser:
    """Decides between modes as the run goes on."""

    def __init__(self, handle: Handle, *, lossy: bool = True) -> None:
        self.handle = handle
        self.candidates = CANDIDATES if lossy else ()
        self.refused: list[str] = []
        """Modes that validation results have ruled out."""
        self.adopted = ""
        """The mode in use since a trial; empty for all-reduce."""
        self.trial: Trial | None = None
        self._link = 0.0
        """Seconds of the probing message when the mode was chosen."""
        self._best, self._below = -math.inf, 0
        self._restart()

    def _restart(self) -> None:
        self.handle.switch("allreduce", {})
        self.adopted, self.trial, self._step = "", None, 0
        self._plain = self.handle.traffic.exchange
        whole = Whole(self.handle.links.main, overlap=False)
        self._timed = Timed(whole if self.handle.links.nodes is None else self._plain)
        self._doubts = 0
        """Looks in a row at which the link seemed to have changed."""
        self._seconds: list[float] = []
        self._sending: list[float] = []
        self._since = time.perf_counter()

    def step(self) -> None:
        """The optimizer has made a step."""
        seconds = time.perf_counter() - self._since
        self._step += 1
        if self.trial is not None:
            self._follow(self.trial, seconds)
        elif self._step == SKIP:
            self.handle.traffic.exchange = self._timed
        elif SKIP < self._step <= SKIP + MEASURE:
            self._seconds.append(seconds)
            self._sending.append(self._timed.seconds)
            if self._step == SKIP + MEASURE:
                self.handle.traffic.exchange = self._plain
                self._decide()
        elif self._step > SKIP and (self._step % CHECK_EVERY == 0 or self._doubts):
            self._look()
        self._since = time.perf_counter()

    # --- measuring and predicting ---

    def _mean(self, *numbers: float) -> list[float]:
        """The means over ranks, the same on all. Collective."""
        return self.handle.links.main.mean(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def _probe(self, size: int) -> float:
        """Seconds of an all-reduce of `size` bytes, the best of three, the mean over ranks. Collective."""
        times: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            self.handle.links.main.mean(torch.zeros(size // 4))
            times.append(time.perf_counter() - start)
        return self._mean(min(times))[0]

    def _decide(self) -> None:
        candidates = [mode for mode in self.candidates if mode not in self.refused]
        gradients = some_gradients([p for p in self.handle.ddp.parameters() if p.requires_grad])
        rehearsed = [rehearse(mode, self.handle.links.main.world, gradients) for mode in candidates]
        latency, self._link = self._probe(4), self._probe(PROBE)
        step, link, *encode = self._mean(
            statistics.median(self._seconds), statistics.median(self._sending), *(seconds for seconds, _ in rehearsed)
        )
        costs = Costs(
            compute=max(step - link, 0.0), exchange=link, latency=latency, encode=dict(zip(candidates, encode, strict=True)),
            share={mode: share for mode, (_, share) in zip(candidates, rehearsed, strict=True)},
        )  # fmt: skip
        mode = costs.best(candidates)
        speedup = costs.predict("allreduce") / costs.predict(mode) if mode else 1.0
        shown = f"all-reduce takes {1000 * link:.1f} of {1000 * step:.1f} ms per step"
        if speedup < WORTH:
            self._tell("skip", mode or "allreduce", predicted=speedup, reason=f"{shown}; nothing promises {WORTH:g}x")
            return
        self._tell("try", mode, predicted=speedup, reason=f"{shown}; {mode} is lossy, so validate the result")
        given = {"steps": costs.local_steps} if mode == "local" else {}
        length = 2 * costs.local_steps if mode == "local" else BLOCK
        self.trial = Trial(mode=mode, options=resolve(mode, given), length=length)

    # --- trying ---

    def _follow(self, trial: Trial, seconds: float) -> None:
        """A step of a trial was made."""
        trial.block.append(seconds)
        if len(trial.block) < trial.length:
            return
        (mean,) = self._mean(statistics.fmean(trial.block[1:]))  # the first waits for what the switch began
        (trial.with_mode if trial.on else trial.without).append(mean)
        trial.block, trial.on = [], not trial.on
        if not trial.over:
            self._turn(trial)
            return
        interval = paired_interval(trial.gains, 0.90)
        assert interval is not None
        low, high = (None if end is None else math.exp(end) for end in (interval.low, interval.high))
        kept = low is not None and low > KEEP
        self.trial = None
        self._tell(
            "keep" if kept else "undo", trial.mode, measured=math.exp(interval.mean), interval=(low, high),
            reason="faster by turns; lossy, so validate the result" if kept else "not surely faster by turns",
        )  # fmt: skip
        if kept:
            self.adopted, trial.on = trial.mode, True
            self._turn(trial)
        else:
            self.handle.switch("allreduce", {})

    def _turn(self, trial: Trial) -> None:
        """Begin a block: plain, or with the mode."""
        if not trial.on:
            self.handle.switch("allreduce", {}, self._plain)
            return
        self.handle.switch(trial.mode, trial.options, trial.exchange)
        trial.exchange = self.handle.traffic.exchange

    # --- afterwards ---

    def _look(self) -> None:
        """Has the link changed, or have validation results ruled the mode out? The same answer on all ranks."""
        now = self._probe(PROBE)
        worse = self._mean(float(self._below >= 2))[0] > 0
        if worse and self.adopted:
            self._tell(
                "undo", self.adopted, reason="two validation results in a row are below the best one from before it"
            )
            self.refused.append(self.adopted)
            self._below = 0
            self._restart()
        elif 1 / CHANGED < now / max(self._link, 1e-9) < CHANGED:
            self._doubts = 0
        elif self._doubts < DOUBTS:
            self._doubts += 1  # a busy moment; ask again after the next step
        else:
            text = f"{PROBE // 1024} kB take {1000 * now:.1f} ms instead of {1000 * self._link:.1f}, so all is measured again"
            self._tell("undo" if self.adopted else "skip", self.adopted or "allreduce", reason=text)
            self._restart()

    def on_event(self, event: Event) -> None:
        """Follow validation results: those from before a mode is in use set the mark that it must reach."""
        if event.kind == "evaluated" and event["metric"] is not None:
            metric = float(event["metric"])
            if not self.adopted:
                self._best = max(self._best, metric)
            else:
                self._below = self._below + 1 if metric < self._best else 0

    def _tell(self, action: str, mode: str, **more: Any) -> None:
        window = int(getattr(self.handle.loader, "epoch", 0))
        self.handle.tell(LeverDecided(window=window, lever=f'sync(mode="{mode}")', action=action, **more))

    def state_dict(self) -> dict[str, Any]:
        return {"adopted": self.adopted, "refused": self.refused, "best": self._best, "link": self._link}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the mode that a trial kept; otherwise measure from the start."""
        self.refused, self._best = list(state["refused"]), float(state["best"])
        if state["adopted"]:
            self.adopted, self._link, self._step, self.trial = (
                state["adopted"],
                float(state["link"]),
                SKIP + MEASURE,
                None,
            )
