"""`auto`: watches what all-reduce costs, predicts what each mode would make of a step, tries the best and keeps what is faster.

    first       3 steps of plain all-reduce, ignored (DDP rearranges its buckets)
    then        8 steps of plain all-reduce, watched: how long a step takes, and how long it waits for gradients at its end. No
                mode can save more than that wait; if it is too short to be worth it, nothing else is measured
    then        3 steps with gradients in one piece after the backward pass: how long the link takes, and the rest of a step.
                (Where steps do little but wait, the second and the third of all tell as much, and these and the 8 are left out)
    then        the work of modes that could win is timed on a part of the model, and each gets a prediction
    then        a block of steps with the best one, if it promises enough; more blocks by turns where one leaves doubt
    from then   the wait at the end of steps (all-reduce), the time of an exchange (local steps) or of a message (other modes)
                is looked at every 64 steps; if it stays half or twice as long, all of this starts again

All ranks make the same decisions, from the measurements of all. The log says of a lossy mode that it is lossy when it is tried,
and it is given up for good when two validation results in a row are below the best one from before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from salience.events import Event, LeverDecided, StepCosts
from salience.gradients.costs import Costs, rehearse, share_of, some_gradients
from salience.gradients.exchange import Exchange, Whole
from salience.gradients.local import Local
from salience.gradients.modes import STEP_AHEAD, resolve
from salience.stats import paired_interval
from salience.watch import Steps
from salience.watch.model import find_bottleneck

if TYPE_CHECKING:
    from salience.gradients.handle import Handle

SKIP, WATCH, PIECE, BLOCK, PAIRS, CHECK_EVERY = 3, 8, 3, 8, 3, 64
"""Steps ignored, watched, and with gradients in one piece; steps per block of a trial, maximum number of pairs of blocks, steps
between two checks of the link."""
LOCAL_WARM = 16
"""Local steps that are not timed in a trial, at least: the first exchanges of a new thread are up to twelve times as slow as
later ones (9.8 MB: 299, 141, 136, 43, 24 ms)."""
SETTLED = SKIP + WATCH + PIECE
"""Steps after which a decision has been made."""
EARLY, EARLY_WATCH, CLEAR = 3, 2, 3.0
"""After `EARLY` steps the last `EARLY_WATCH` are looked at. If each would be `CLEAR` times as fast without its wait, that is
about the time of the link, and a mode is chosen at once: where links are slow, steps of measuring are what `auto` costs."""
WORTH, KEEP, SURE, HOPELESS, CHANGED = 1.15, 1.02, 1.5, 1 / 1.1, 2.0
"""Speed-ups that are worth a trial, that keep a mode, that need no second pair of blocks, and that end a trial at once; change
of the link after which everything starts again."""
PROBE = 1 << 18
"""Bytes of the message that times the link."""
HIDDEN = 0.9
"""An exchange of parameters counts as hidden if it takes at most this share of the time of H steps."""
DOUBTS = 3
"""Number of checks in a row that must show a changed link."""
CANDIDATES = ("bf16", "lowrank", "topk", "local")
"""Modes to try, the mildest first."""


@dataclass(kw_only=True, slots=True)
class Trial:
    """Alternating blocks of steps without a mode and with it, and their seconds per step."""

    mode: str
    options: dict[str, Any]
    warm: int
    """First steps of a block with the mode that are not timed: buffers are new, and an exchange must be under way."""
    timed: int
    on: bool = True
    block: list[float] = field(default_factory=list[float])
    without: list[float] = field(default_factory=list[float])
    with_mode: list[float] = field(default_factory=list[float])
    exchange: Exchange | None = None
    """The mode's exchange, kept so that residuals of one block are there in the next; local steps start again."""

    @property
    def over(self) -> bool:
        """True if the block is complete."""
        return len(self.block) >= (self.warm + self.timed if self.on else BLOCK)

    @property
    def gains(self) -> list[float]:
        """Logarithms of the speed-up, one for each pair of blocks."""
        return [math.log(a / b) for a, b in zip(self.without, self.with_mode, strict=False)]

    @property
    def verdict(self) -> bool | None:
        """True = keep the mode, False = drop it, None = undecided: a pair is incomplete or leaves doubt."""
        gains = self.gains
        if len(gains) < len(self.without):
            return None
        sure = paired_interval(gains, 0.90)
        if gains[0] > math.log(SURE) or (sure is not None and sure.low is not None and sure.low > math.log(KEEP)):
            return True
        return False if len(gains) >= PAIRS or gains[0] < math.log(HOPELESS) else None


class Chooser:
    """Decides between modes during the run."""

    def __init__(self, handle: Handle, *, lossy: bool = True) -> None:
        self.handle = handle
        self.candidates = CANDIDATES if lossy else ()
        self.refused: list[str] = []
        """Modes that validation results have ruled out."""
        self.adopted = ""
        """The mode in use since a trial; empty for all-reduce."""
        self.trial: Trial | None = None
        self._seconds: deque[float] = deque(maxlen=WATCH)
        """Seconds of the last steps."""
        self._best, self._below = -math.inf, 0
        handle.traffic.watch(WATCH)
        self._restart()
        if not lossy:
            self._tell("skip", "allreduce", reason="lossy=False leaves nothing to choose from; nothing is measured")

    def _restart(self) -> None:
        self.handle.switch("allreduce", {})
        self.adopted, self.trial, self._step = "", None, 0
        self._decide_at = 0
        """The step after which a mode is chosen, while gradients travel in one piece until then; otherwise 0."""
        self._seconds.clear()
        self._pace: float | None = None
        """Seconds of a wait, an exchange or a message when the mode was chosen; None if the next look sets it."""
        self._doubts = 0
        """Number of checks in a row in which the link seemed to have changed."""
        self._since = time.perf_counter()

    def step(self) -> None:
        """Called after each step of the optimizer."""
        seconds = time.perf_counter() - self._since
        self._step += 1
        self._seconds.append(seconds)
        if not self.candidates:
            return
        if self.trial is not None:
            self._follow(self.trial, seconds)
        elif self._step == EARLY:
            self._watched_early()
        elif self._step == SKIP + WATCH:
            self._watched()
        elif self._step == self._decide_at:
            self._decide(PIECE)
        elif self._step > SETTLED and (self._step - SETTLED) % self._patience == 0:
            self._look()
        self._since = time.perf_counter()

    @property
    def trying(self) -> bool:
        """True while steps are not representative of the mode in use, since they are measured or a mode is tried."""
        return self.trial is not None or self._step < self._decide_at

    # --- measuring and predicting ---

    @property
    def _patience(self) -> int:
        """Steps between two checks of the link: fewer if it seems to have changed, and enough for new measurements."""
        if not self._doubts:
            return WATCH if self._pace is None else CHECK_EVERY
        if not self.adopted:
            return WATCH
        return self._local.interval if self._local else 1

    @property
    def _local(self) -> Local | None:
        """The exchange in use, if ranks take steps of their own."""
        exchange = self.handle.traffic.exchange
        return exchange if isinstance(exchange, Local) else None

    @property
    def _device(self) -> torch.device | None:
        """The device that small tensors must be on to be sent."""
        return self.handle.links.main.device

    def _mean(self, *numbers: float) -> list[float]:
        """The means over ranks, the same on all. Collective."""
        return self.handle.links.main.mean(torch.tensor(numbers, dtype=torch.float64, device=self._device)).tolist()

    def _probe(self, size: int, times: int = 1) -> float:
        """Seconds of an all-reduce of `size` bytes: the best of several, as the mean over ranks. Collective."""
        found: list[float] = []
        for _ in range(times):
            start = time.perf_counter()
            self.handle.links.main.mean(torch.zeros(size // 4, device=self._device)).sum().item()
            found.append(time.perf_counter() - start)
        return self._mean(min(found))[0]

    def _waits(self, steps: int = WATCH) -> tuple[Tensor, Tensor]:
        """Seconds of the last steps, and of their waits for gradients at the end, [steps] each. Collective.

        The rank that arrives last only waits for the link, so the shortest wait of a step counts.
        """
        row = [*list(self._seconds)[-steps:], *self.handle.traffic.waits(steps)]
        rows = self.handle.links.main.gather(torch.tensor(row, dtype=torch.float64, device=self._device))
        seconds, waits = rows.cpu().view(-1, 2, steps).unbind(1)
        return seconds.mean(0), waits.amin(0)

    def _watched_early(self) -> None:
        """Choose at once if the first steps leave no doubt that they wait for the link; otherwise watch more of them."""
        seconds, waits = self._waits(EARLY_WATCH)
        if bool((seconds >= CLEAR * (seconds - waits)).all()):
            self._pace, self._step_seconds = waits.median().item(), seconds.median().item()
            self._say_bottleneck(self._step_seconds, self._pace, EARLY_WATCH)
            self._decide(EARLY_WATCH)

    def _watched(self) -> None:
        """Continue measuring if steps wait long enough for gradients; otherwise stay with all-reduce."""
        step, wait = (one.median().item() for one in self._waits())
        self._pace = wait
        self._say_bottleneck(step, wait, WATCH)
        ceiling = step / max(step - wait, 1e-9)
        if ceiling < WORTH:
            self._step = SETTLED
            shown = f"steps wait {1000 * wait:.1f} of {1000 * step:.1f} ms for gradients"
            self._tell("skip", "allreduce", predicted=ceiling, reason=f"{shown}; no mode can gain {WORTH:g}x")
            return
        self._step_seconds = step
        self._decide_at = SETTLED
        if self.handle.links.nodes is None:
            self.handle.traffic.exchange = Whole(self.handle.links.main, overlap=False)

    def _decide(self, count: int) -> None:
        """From the last `count` steps, predict what each mode would make of a step, and try the best if it promises enough."""
        traffic = self.handle.traffic
        self._step, self._decide_at = SETTLED, 0
        seconds, waits, busy = list(self._seconds)[-count:], traffic.waits(count), traffic.busy(count)
        self.handle.switch("allreduce", {})
        parameters = [p for p in self.handle.ddp.parameters() if p.requires_grad]
        step, exchange, busy = self._mean(*map(statistics.median, (seconds, waits, busy)))
        world = self.handle.links.main.world
        costs = Costs(
            plain=self._step_seconds, compute=max(step - exchange, 0.0), exchange=exchange, busy=busy,
            latency=self._probe(4, 2), share={mode: share_of(mode, world, parameters) for mode in self.candidates},
        )  # fmt: skip
        allowed = [mode for mode in self.candidates if mode not in self.refused]
        # Its own work cannot make a mode faster: those that would not win without it need not be rehearsed.
        hopeful = [mode for mode in allowed if costs.speedup(mode) >= WORTH]
        sample, scale = some_gradients(parameters)
        found = self._mean(0.0, *(scale * rehearse(mode, world, sample) for mode in hopeful))[1:]
        costs.encode.update(zip(hopeful, found, strict=True))
        mode = costs.best(hopeful)
        speedup = costs.speedup(mode) if mode else 1.0
        shown = f"all-reduce takes {1000 * exchange:.1f} ms of link time, a step {1000 * costs.plain:.1f} ms"
        if speedup < WORTH:
            self._tell("skip", mode or "allreduce", predicted=speedup, reason=f"{shown}; nothing promises {WORTH:g}x")
            return
        self._tell("try", mode, predicted=speedup, reason=f"{shown}; {mode} is lossy, so validate the result")
        given = {"steps": costs.local_steps} if mode == "local" else {}
        warm, timed = (max(costs.local_steps, n) for n in (LOCAL_WARM, BLOCK)) if given else (BLOCK // 2, BLOCK // 2)
        self.trial = Trial(mode=mode, options=resolve(mode, given), warm=warm, timed=timed, without=[costs.plain])
        self._turn(self.trial)

    def _say_bottleneck(self, step: float, sync: float, watched: int) -> None:
        """Log a verdict if ranks mostly wait for gradients."""
        steps = getattr(self.handle.loader, "steps", None)
        recent = [one.wait for one in list(steps.steps)[-watched:]] if isinstance(steps, Steps) else []
        wait = statistics.fmean(recent) if recent else 0.0
        seconds = StepCosts(step=step, wait=wait, input=wait, compute=step - wait, work={}, sync=sync, steps=watched)
        found = find_bottleneck(seconds)
        if found.bound != "sync":
            return
        window = int(getattr(self.handle.loader, "epoch", 0))
        self.handle.tell(replace(found, window=window))

    # --- trying ---

    def _follow(self, trial: Trial, seconds: float) -> None:
        """A step of a trial was made."""
        trial.block.append(seconds)
        if not trial.over:
            return
        steady = trial.block[
            trial.warm if trial.on else 1 :
        ]  # without the mode, what a switch begins is over after a step
        (mean,) = self._mean(statistics.fmean(steady))
        (trial.with_mode if trial.on else trial.without).append(mean)
        trial.block = []
        if trial.verdict is None:
            trial.on = not trial.on
            self._turn(trial)
            return
        interval = paired_interval(trial.gains, 0.90)
        assert interval is not None
        low, high = (None if end is None else math.exp(end) for end in (interval.low, interval.high))
        self.trial, kept = None, trial.verdict
        self._tell(
            "keep" if kept else "undo", trial.mode, measured=math.exp(interval.mean), interval=(low, high),
            reason="faster by turns; lossy, so validate the result" if kept else "not surely faster by turns",
        )  # fmt: skip
        self._step = SETTLED
        if kept:
            self.adopted, self._pace = trial.mode, None
        else:
            self.handle.switch("allreduce", {})

    def _turn(self, trial: Trial) -> None:
        """Begin a block: plain, or with the mode."""
        if not trial.on:
            self.handle.switch("allreduce", {})
            return
        self.handle.switch(trial.mode, trial.options, trial.exchange)
        if trial.mode not in STEP_AHEAD:
            trial.exchange = self.handle.traffic.exchange

    # --- afterwards ---

    def _look(self) -> None:
        """Start over if the link has changed or validation results have ruled the mode out, on all ranks alike. Collective."""
        if self.adopted and self._mean(float(self._below >= 2))[0] > 0:
            self._tell(
                "undo", self.adopted, reason="two validation results in a row are below the best one from before it"
            )
            self.refused.append(self.adopted)
            self._below = 0
            self._restart()
            return
        before, now, matters = self._pace, *self._pace_now()
        if before is None:
            self._pace = now
        elif not matters or 1 / CHANGED < now / max(before, 1e-9) < CHANGED:
            self._doubts = 0
        elif self._doubts < DOUBTS:
            self._doubts += 1  # a busy moment; ask again soon
        else:
            text = f"exchanges take {1000 * now:.1f} ms instead of {1000 * before:.1f}, so all is measured again"
            self._tell("undo" if self.adopted else "skip", self.adopted or "allreduce", reason=text)
            self._restart()

    def _pace_now(self) -> tuple[float, bool]:
        """Seconds that measure the speed of the link, and whether a change would matter. Collective."""
        if not self.adopted:
            step, wait = (one.median().item() for one in self._waits())
            return wait, step / max(step - wait, 1e-9) >= WORTH
        local = self._local
        if local is None:
            return self._probe(PROBE), True
        # A message would meet the exchange that is under way, which takes about half as long as all-reduce would.
        exchange, step = self._mean(local.seconds, statistics.median(self._seconds))
        return exchange, step + 2 * exchange < WORTH * step or exchange > HIDDEN * local.interval * step

    def on_event(self, event: Event) -> None:
        """Follow validation results: those from before a mode was in use set the level that it must reach."""
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
        return {"adopted": self.adopted, "refused": self.refused, "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the mode that a trial kept; otherwise measure from the start."""
        self.refused, self._best = list(state["refused"]), float(state["best"])
        if state["adopted"]:
            self.adopted, self._pace, self._step, self.trial = state["adopted"], None, SETTLED, None
