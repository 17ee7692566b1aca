"""salience.tune: a handle that calls the model, and finds out while training which levers make the step faster.

    steps as they are -> predict -> steps with a lever and without it, in turns -> keep or undo -> the next lever

The steps it times are steps of the training itself: nothing is run twice, and no batch is skipped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from salience.decide.trial import gain
from salience.door import Door
from salience.errors import ConfigError, StateError, did_you_mean
from salience.events import LeverDecided
from salience.feed.sizes import parse_bytes
from salience.ranks import Ranks, current_ranks
from salience.speed.blocks import (
    FEWEST_STEPS,
    MOST_STEPS,
    SECONDS_PER_BLOCK,
    STEPS_AFTER_SWITCH,
    Block,
    LeverTrial,
    block_verdict,
)
from salience.speed.checkpointing import units_of
from salience.speed.fitting import fit, inside
from salience.speed.levers import BY_NAME, INSTEAD_OF, NUMERICS, SPEED_LEVERS, Facts, SpeedLever, ceiling
from salience.speed.way import Way, shapes
from salience.watch.model import MIN_SPEEDUP_TO_TRY

STEPS_WITH_RANKS = 16
"""Steps of a block with several ranks, which must end their blocks together."""
TRIAL_SHARE = 0.3
"""Largest share of the steps left that the trial of a lever may take."""
FEW_SHAPES = 2
"""A model is compiled if the batches measured have at most so many shapes: the usual one, and a last one."""


def tune(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Door,
    *,
    numerics: str = "rounding",
    levers: Sequence[str] | None = None,
    memory: int | str | None = None,
) -> Tuned:
    """A handle to call in place of the model; while it is trained, it finds the levers that make its steps faster.

        fast = salience.tune(model, optimizer, loader)
        for x, y in loader:
            logits = fast(x)                                   # was: model(x)

    `numerics` is what a lever may do to the numbers: "exact", "rounding" (the same operations, whose last bits differ; the
    default) or "lossy" (bfloat16, TF32). `levers` are the only ones to try, by name, whatever is predicted of them. `memory`
    ("2GiB") is what activations may take: above that, some are made again in the backward pass. With several ranks every rank
    must call it.
    """
    if not isinstance(loader, Door):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"tune() was given a {type(loader).__name__} as loader; it must be a salience.Loader or Selector, which times the "
            "steps and logs what is decided."
        )
    if numerics not in NUMERICS:
        raise ConfigError(f"numerics is {numerics!r}.{did_you_mean(numerics, NUMERICS)}")
    for name in levers or ():
        if name not in BY_NAME:
            raise ConfigError(f"There is no lever {name!r}.{did_you_mean(name, BY_NAME)}")
    budget = None if memory is None else parse_bytes(memory) if isinstance(memory, str) else memory
    if budget is not None and budget <= 0:
        raise ConfigError(f"memory is {memory!r}; it must be a number of bytes above 0, such as '2GiB'.")
    return Tuned(model, optimizer, loader, numerics=numerics, levers=levers, memory=budget, ranks=current_ranks())


class Tuned:
    """Calls the model with the levers that are on; `tune` makes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Door,
        *,
        numerics: str = "rounding",
        levers: Sequence[str] | None = None,
        memory: int | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._way = Way(model, optimizer, device)
        self._ranks, self._memory, self._clock = ranks, memory, clock
        allowed = NUMERICS[: NUMERICS.index(numerics) + 1]
        self._named = levers is not None
        self._left = [
            one for one in SPEED_LEVERS if (one.name in levers if levers is not None else one.numerics in allowed)
        ]
        """Levers that have not been tried."""
        self.decisions: list[LeverDecided] = []
        """What was tried, kept, undone and skipped, in order."""
        self._costs: dict[str, float] = {}
        """Seconds per step by stage, as measured with the levers kept so far; empty before that."""
        self._trial: LeverTrial | None = None
        self._block = Block()
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._last: tuple[float, int] | None = None
        """When the last training step began, and in which window."""
        self._failure = ""
        self._optimizing = self._began = 0.0
        self._hooks: list[Any] = []
        self._measured = memory is None
        if self._left:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_optimizer),
                optimizer.register_step_post_hook(self._after_optimizer),
            ]

    # --- what a loop calls ---

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """The model's output, computed with the levers that are on."""
        if self.model.training and torch.is_grad_enabled():
            if not self._measured:
                self._fit_into_memory(inputs, more)
            if not self.done:
                self._step(inputs)
        trial = self._trial
        try:
            return self._way(*inputs, **more)
        except Exception as cause:
            if trial is None or trial.lever.name not in self._way.on:
                raise
            # Switched off here; the verdict follows at the end of the block, on all ranks together.
            self._failure = f"it failed: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            self._way.switch(trial.lever.name, False)
            return self._way(*inputs, **more)

    @property
    def done(self) -> bool:
        """True once every lever was tried or skipped: the rest of the run keeps what pays."""
        return not self._left and self._trial is None

    @property
    def on(self) -> tuple[str, ...]:
        """Names of the levers of the next step: those kept, and the one under trial in its turn."""
        return tuple(name for name in BY_NAME if name in self._way.on)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the levers that were found to pay, in the order in which they were kept."""
        return tuple(one.lever for one in self.decisions if one.action == "keep")

    def report(self) -> str:
        """What was decided, line by line."""
        lines: list[str] = []
        for one in self.decisions:
            if one.action == "try":
                continue
            found = "" if one.measured is None else f", measured {one.measured:.2f}x"
            predicted = "" if one.predicted is None else f" (at most {one.predicted:.2f}x{found})"
            lines.append(f"{one.action:5} {one.lever}{predicted}: {one.reason}.")
        if not self.done:
            lines.append("Not all levers were tried yet.")
        return "\n".join(lines) or "Nothing was tried yet."

    def close(self) -> None:
        """Switch every lever off: model and optimizer are as they were, and calls are plain calls of the model."""
        self._left, self._trial, self._measured = [], None, True
        for lever in sorted(self._way.on):
            self._way.switch(lever, False)
        self._way.segments = ((), ())
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """What was decided; a trial in progress begins anew after a resume."""
        left = [one.name for one in self._left]
        trial = [] if self._trial is None else [self._trial.lever.name]
        on = self._way.on - set(trial)
        return {
            "on": [name for name in BY_NAME if name in on],
            "left": trial + left, "segments": [list(group) for group in self._way.segments[1]],
            "shape": None if self._way.shape is None else [list(one) for one in self._way.shape],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was kept; load the states of model and optimizer first."""
        unknown = sorted({*state["on"], *state["left"]} - set(BY_NAME))
        if unknown:
            raise StateError(
                f"The state of tune() names the lever {unknown[0]!r}, which this version does not have; resume with the "
                "salience that saved it."
            )
        for lever in [name for name in self._way.on if name not in state["on"]]:
            self._way.switch(lever, False)
        for lever in state["on"]:
            self._way.switch(lever, True)
        self._left = [BY_NAME[name] for name in state["left"]]
        self._trial, self._block, self._last, self._costs = None, Block(), None, {}
        if state["shape"] is not None:
            self._way.shape = tuple(torch.Size(one) for one in state["shape"])
        if state["segments"]:
            self._way.segments = units_of(inside(self.model)), [tuple(group) for group in state["segments"]]
            self._measured = True
        if self.done:
            self._end()

    # --- one step ---

    def _step(self, inputs: Sequence[Any]) -> None:
        """A training step begins: the one before is over."""
        now, window = self._clock(), self._window
        self._shapes.add(shapes(inputs))
        if self._way.shape is None:
            self._way.shape = shapes(inputs)
        block, last = self._block, self._last
        self._last = now, window
        if last is None or last[1] != window:  # what lies between two windows belongs to no step
            self._optimizing = 0.0
            return
        if block.skip:
            block.skip -= 1
            self._optimizing = 0.0
            if not block.skip:
                self._synchronise()
                self._last = self._clock(), window
            return
        block.seconds.append(now - last[0])
        block.optimizer += self._optimizing
        steps = self.loader.steps.steps
        block.wait += steps[-1].wait if steps else 0.0
        self._optimizing = 0.0
        if self._full(block):
            if self._way.device.type == "cuda":  # the host runs ahead of the device
                self._synchronise()
                block.seconds = [(sum(block.seconds) + self._clock() - now) / len(block.seconds)]
            self._block = Block()
            self._over(block)
            self._last = None

    def _full(self, block: Block) -> bool:
        count = len(block.seconds)
        if self._ranks is not None:
            return count >= STEPS_WITH_RANKS
        return count >= FEWEST_STEPS and (sum(block.seconds) >= SECONDS_PER_BLOCK or count >= MOST_STEPS)

    def _over(self, block: Block) -> None:
        """A block is complete: decide. With several ranks they all take the times of rank 0, and a failure of any."""
        count = max(1, len(block.seconds))
        step = statistics.median(block.seconds)
        measured: list[Any] = [step, block.optimizer / count, block.wait / count, len(self._shapes), self._failure]
        if self._ranks is not None:
            everyone = self._ranks.gather_objects(measured)
            measured = [*everyone[0][:4], next((one[4] for one in everyone if one[4]), "")]
        step, optimizer, wait, kinds, failure = measured
        self._failure = ""
        if self._trial is None:
            optimizer, wait = min(optimizer, step), min(wait, step)
            self._costs = {"optimizer": optimizer, "wait": wait, "model": max(0.0, step - optimizer - wait)}
            self._try_next(step, int(kinds))
        else:
            self._judge(self._trial, step, failure)

    # --- which lever, and did it help ---

    def _try_next(self, step: float, kinds: int) -> None:
        """Switch to the trial of the next lever that is worth one; what is not is named."""
        while self._left:
            lever = self._left.pop(0)
            predicted = ceiling(self._costs, lever)
            why = self._against(lever, predicted, step, kinds)
            if why:
                self._tell(lever, "skip", predicted, why)
                continue
            self._trial = LeverTrial(lever, predicted, off=[step])
            self._way.switch(lever.name, True)
            self._tell(lever, "try", predicted, lever.words(self.model))
            return
        self._end()

    def _against(self, lever: SpeedLever, predicted: float, step: float, kinds: int) -> str:
        ranks = 1 if self._ranks is None else self._ranks.world
        facts = Facts(model=self.model, optimizer=self.optimizer, device=self._way.device, ranks=ranks)
        if why := lever.refused(facts):
            return why
        if (other := INSTEAD_OF.get(lever.name)) in self._way.on:
            return f"{other} is on, which does the same"
        if lever.name in ("compile", "cuda_graphs") and kinds > FEW_SHAPES:
            return "the batches differ in shape"
        if self._named:
            return ""
        if predicted < MIN_SPEEDUP_TO_TRY:
            return f"it could gain less than {MIN_SPEEDUP_TO_TRY}x"
        left = self._steps_left
        if left is not None and TRIAL_SHARE * left < 2 * (FEWEST_STEPS + STEPS_AFTER_SWITCH):
            return "too few steps are left for a trial to pay"
        if left is not None and lever.costs > left * step * (1 - 1 / predicted):
            return f"switching it on takes about {lever.costs:.0f} s, more than it could save in the steps left"
        return ""

    def _judge(self, trial: LeverTrial, step: float, failure: str) -> None:
        """Add a block to the trial, and end it if it is clear."""
        lever = trial.lever
        (trial.on if len(trial.on) < len(trial.off) else trial.off).append(step)
        found = None if failure else gain(trial.off, trial.on)
        even = len(trial.on) == len(trial.off)
        verdict = (False, failure) if found is None else block_verdict(trial.off, trial.on) if even else None
        if verdict is None:
            self._way.switch(lever.name, not even)
            return
        kept, reason = verdict
        self._way.switch(lever.name, kept)
        self._trial, self._costs = None, {}
        measured = None if found is None else found.speedup
        interval = None if found is None or not found.low else (found.low, found.high)
        reason += f"; {lever.words(self.model)}"
        self._tell(lever, "keep" if kept else "undo", trial.predicted, reason, measured, interval)
        if not self._left:
            self._end()

    def _fit_into_memory(self, inputs: Sequence[Any], more: Mapping[str, Any]) -> None:
        """Before the first step: measure on a few samples what activations take, and choose what is made again."""
        self._measured = True
        assert self._memory is not None
        found = fit(self.model, inputs, more, self._memory)
        if found.segments:
            self._way.segments = found.units, found.segments
        if found.trouble:
            self.loader.events.emit("warning", text=found.trouble)
        if found.said:
            action = "keep" if found.segments else "skip"
            self._decide(LeverDecided(window=self._window, lever="checkpoint", action=action, reason=found.said))

    # --- the rest ---

    @property
    def _window(self) -> int:
        plan = self.loader.plan
        return 0 if plan is None else plan.window

    @property
    def _steps_left(self) -> float | None:
        total = self.loader.total_steps
        return None if total is None else total * (1 - self.loader.progress)

    def _tell(
        self,
        lever: SpeedLever,
        action: str,
        predicted: float,
        reason: str,
        measured: float | None = None,
        interval: tuple[float, float] | None = None,
    ) -> None:
        self._decide(LeverDecided(
            window=self._window, lever=lever.name, action=action, predicted=predicted, measured=measured,
            interval=interval, reason=reason,
        ))  # fmt: skip

    def _decide(self, decision: LeverDecided) -> None:
        self.decisions.append(decision)
        if self._ranks is None or self._ranks.rank == 0:
            self.loader.events.emit(decision)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_optimizer(self, *_: Any) -> None:
        if self._trial is None:
            self._synchronise()
            self._began = self._clock()

    def _after_optimizer(self, *_: Any) -> None:
        if self._trial is None:
            self._synchronise()
            self._optimizing += self._clock() - self._began

    def _synchronise(self) -> None:
        if self._way.device.type == "cuda":
            torch.cuda.synchronize(self._way.device)
