"""Events about time: where the seconds of a step go, what holds a run back, and what `auto` does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Where the seconds of a window's steps went."""

    steps: int = 0
    """Number of steps."""
    wait: float = 0.0
    """Seconds the loop waited for batches."""
    copy: float = 0.0
    """Seconds spent on copying to the device."""
    forward: float = 0.0
    """Seconds up to the loss."""
    backward: float = 0.0
    """Seconds from the loss to the next batch."""
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of the workers, by stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeverCeiling:
    """What one lever could gain at most."""

    name: str
    """The lever as the user writes it."""
    exact: bool
    """True if the result of training stays exactly the same."""
    speedup: float | None
    """Largest possible speed-up; None if it is unbounded."""
    low: float | None
    """Lower end of the bracket."""
    high: float | None
    """Upper end of the bracket; None if it is unbounded."""
    worth: bool = True
    """False if it promises too little to be worth trying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds per step in steady state."""

    step: float
    """Seconds per step of the run as it is."""
    wait: float
    """Seconds per step that the accelerator waits for input."""
    input: float
    """Seconds per batch of the loader alone."""
    compute: float
    """Seconds per step of the loop alone."""
    work: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds per batch of the workers, by stage."""
    copy: float = 0.0
    """Seconds per step spent on copying to the device."""
    forward: float = 0.0
    """Seconds per step up to the loss."""
    backward: float = 0.0
    """Seconds per step from the loss to the next batch, without `sync`."""
    sync: float = 0.0
    """Seconds per step spent waiting for gradients of other ranks, if `salience.sync` exchanges them."""
    workers: int = 0
    """Number of workers."""
    steps: int = 0
    """Number of steps measured."""

    @property
    def waiting(self) -> float:
        """Share of a step spent waiting for input."""
        return min(1.0, max(0.0, self.wait / self.step)) if self.step > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineUse:
    """How busy the machine was at one moment."""

    seconds: float
    """Seconds since sampling began."""
    cpu: float
    """Share of all cores in use."""
    memory: float
    """Share of the memory in use."""
    disk: float
    """Bytes read and written per second."""
    network: float
    """Bytes received and sent per second."""
    gpu: tuple[float, ...] = ()
    """Share of the time each GPU was busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BottleneckFound:
    """A measurement of what holds the run back is complete."""

    kind: ClassVar[str] = "verdict"
    text: str
    """The verdict in one sentence."""
    window: int = 0
    """Window before which it was measured."""
    bound: str = ""
    """"input", "compute", "mixed" or "sync"."""
    cause: str = ""
    """The stage that causes most of it."""
    share: float | None = None
    """Share of that stage in the time of the loader, or in compute."""
    costs: StepCosts | None = None
    """The measured seconds."""
    levers: tuple[LeverCeiling, ...] = ()
    """What could be switched on."""
    usage: tuple[MachineUse, ...] = ()
    """How busy the machine was over time; `salience profile` records it."""
    notes: tuple[str, ...] = ()
    """Remarks about the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeverDecided:
    """`auto` tried, kept, undid or skipped a lever."""

    kind: ClassVar[str] = "decision"
    window: int
    """First window for which it holds."""
    lever: str
    """The lever as the user writes it."""
    action: str
    """"try", "keep", "undo" or "skip"."""
    predicted: float | None = None
    """Predicted speed-up."""
    measured: float | None = None
    """Measured speed-up."""
    interval: tuple[float | None, float | None] | None = None
    """Confidence interval of the measured speed-up."""
    reason: str = ""
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseMeasured:
    """The gradient noise scale was measured over a window."""

    kind: ClassVar[str] = "noise"
    window: int
    """Window it was measured in."""
    scale: float | None
    """Noise scale in samples, averaged over windows; None where the noise hides the gradient."""
    of_window: float | None = None
    """That of this window alone."""
    square: float
    """Average of |G|^2, the squared norm of the true gradient."""
    trace: float
    """Average of tr, the variance of a sample's gradient."""
    small: float
    """Samples behind the smaller gradients: the harmonic mean over ranks, or 1."""
    big: float
    """Samples behind the gradient of a step."""
    steps: int = 0
    """Steps measured."""
    caveat: str = ""
    """What the number does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsChanged:
    """The settings `auto` uses from this window on."""

    kind: ClassVar[str] = "settings"
    window: int
    """First window with these settings."""
    workers: int = 0
    """Number of workers."""
    cache: int = 0
    """Size of the cache in bytes; 0 = none."""
    treat: bool = False
    """True if intermediates are reused."""
    select: bool = False
    """True if fewer samples are visited."""
    resolution: bool = False
    """True if images are smaller in a part of the run."""
    prefetch: int = 0
    """Batches that each worker makes ahead; 0 = as given."""
    pin: bool = False
    """True if batches are copied to pinned memory, although that was left open."""
