"""What can happen in a run: one frozen dataclass per kind of event. Everything a report shows comes from these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from salience.events.data import KeysMatched, LengthsBatched, StreamRead
from salience.events.findings import Findings
from salience.events.timing import (
    BottleneckFound,
    LeverDecided,
    MachineUse,
    NoiseMeasured,
    SettingsChanged,
    StepSeconds,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A process started a run, or resumed one."""

    kind: ClassVar[str] = "run"
    salience: str = ""
    """Version of salience."""
    torch: str = ""
    """Version of PyTorch."""
    population: int = 0
    """Number of samples in the data set."""
    batch_size: int = 0
    """Samples per batch and rank."""
    epochs: int | None = None
    """Planned number of epochs; None if it was not given."""
    steps: int | None = None
    """Batches of the whole run on each rank; None if it is counted in epochs."""
    pieces: int = 1
    """Windows per epoch."""
    seed: int = 0
    """The seed all plans are derived from."""
    world: int = 1
    """Number of ranks."""
    drop_last: bool = False
    """True if an incomplete last batch is dropped."""
    select: str | Mapping[str, Any] = "observe"
    """The resolved selection config, or "observe", "trace", or "recorded" by an Observer."""
    knowledge: str = ""
    """With a shared ledger: digest of what the run started from, or "nothing"; empty without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterNote:
    """What one filter did in one window."""

    name: str
    """Name of the filter."""
    dropped: int = 0
    """Samples it left out."""
    forced: int = 0
    """Samples it forced."""
    reason: str = ""
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlanned:
    """A window was planned."""

    kind: ClassVar[str] = "plan"
    window: int
    """Window index, starting at 0."""
    picked: int
    """Visits in the plan."""
    population: int
    """Number of samples in the data set."""
    progress: float = 0.0
    """Progress of the run before this window, from 0 to 1."""
    seconds: float = 0.0
    """Seconds spent on planning so far in this process."""
    visited: int = 0
    """Visits made before this window."""
    filters: tuple[FilterNote, ...] = ()
    """One note per filter."""
    by_importance: tuple[float, ...] | None = None
    """Share of the samples that was picked, by tenths of importance in ascending order; None if all are equal."""
    resolution: float = 1.0
    """Share of the full side at which images are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowClosed:
    """A window ended."""

    kind: ClassVar[str] = "window"
    window: int
    """Window index, starting at 0."""
    batches: int
    """Number of batches delivered."""
    of: int
    """Number of batches planned."""
    finished: bool
    """False if the loop left before the last batch."""
    seconds: float
    """Duration of the window."""
    overhead: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds salience has used so far in this process, by part."""
    visited: int = 0
    """Visits made so far."""
    steps: StepSeconds | None = None
    """Where the seconds went; None where no step was timed."""
    loss: float | None = None
    """Mean loss of the samples visited in this window; None where it is unknown."""
    lr: float | None = None
    """Learning rate at the end of the window; None unless a ProgressLR sets it."""
    usage: tuple[MachineUse, ...] = ()
    """How busy the machine was, at a few moments of the window; empty without psutil."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The user reported a validation result."""

    kind: ClassVar[str] = "evaluated"
    metric: float | None
    """The result; higher is better. None where it was not finite."""
    progress: float = 0.0
    """Progress of the run, from 0 to 1."""
    window: int = 0
    """Number of windows done."""
    visited: int = 0
    """Visits made so far."""
    more: Mapping[str, float | None] = field(default_factory=dict[str, float | None], metadata={"rest": True})
    """Further figures the user reported, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced:
    """balance=True changed the parts of the batches that the ranks take."""

    kind: ClassVar[str] = "balanced"
    window: int
    """First window with the new parts."""
    shares: tuple[float, ...] = ()
    """Part of every batch, by rank; they sum to 1."""
    gain: float = 1.0
    """By how much steps were expected to become faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """keep = "auto" changed the share that is kept."""

    kind: ClassVar[str] = "steered"
    window: int
    """First window with the new share."""
    before: float = field(metadata={"json": "from"})
    """Share kept before."""
    after: float = field(metadata={"json": "to"})
    """Share kept from now on."""
    progress: float = 0.0
    """Progress of the run at the validation result, from 0 to 1."""
    metric: float | None = None
    """The validation result behind the decision."""
    mean: float | None = None
    """Mean of the baseline at equal progress."""
    spread: float | None = None
    """Spread of the baseline at equal progress."""
    low: float | None = None
    """Lower end of the baseline's band at equal progress."""
    reason: str = ""
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalsChosen:
    """The first batch of the attached model decided which layers gradient norms are computed from."""

    kind: ClassVar[str] = "signals"
    text: str
    """The choice in words."""
    grad_norm: str = ""
    """The kind of gradient norm."""
    layers: tuple[str, ...] = ()
    """Names of the layers used."""
    of: int = 0
    """Number of layers that could have been used."""
    share: float | None = None
    """Predicted operations as a share of those of the step."""
    left_out: tuple[str, ...] = ()
    """Other kinds of layers with trainable parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNearZero:
    """How much of a layer's gradient is near zero."""

    name: str
    """Name of the layer; empty for parameters of the model itself."""
    entries: int
    """Number of its parameters."""
    easiest: float
    """Share of its entries near zero, for the quarter of the samples with the lowest loss."""
    hardest: float
    """Share of its entries near zero, for the quarter with the highest loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientsProbed:
    """At an accuracy mark, the gradients of a few samples were examined one by one."""

    kind: ClassVar[str] = "gradients"
    window: int
    """Number of windows done."""
    accuracy: float
    """The validation result that passed a mark, from 0 to 1."""
    samples: int
    """Samples of the probe."""
    mean_loss: float
    """Mean of their losses."""
    losses: tuple[float, ...] = ()
    """Mean loss of groups of equal size, in the order of their losses."""
    shares: tuple[float, ...] = ()
    """Share of all gradient entries near zero in each group."""
    layers: tuple[LayerNearZero, ...] = ()
    """The layers one by one."""
    learnt_loss: float | None = None
    """Loss below which nine tenths of a sample's gradient are near zero; None if there is no such sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesScored:
    """The background scorer returned results."""

    kind: ClassVar[str] = "scored"
    window: int
    """Window whose weights were used."""
    samples: int
    """Number of samples scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiesFound:
    """Near-copies were looked for, and the result changed."""

    kind: ClassVar[str] = "copies"
    window: int
    """Next window to be planned."""
    samples: int
    """Samples that belong to a group."""
    groups: int
    """Number of groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleBroken:
    """A sample of a Source could not be read or decoded."""

    kind: ClassVar[str] = "broken"
    window: int
    """Window in which it was noticed."""
    id: int
    """Id of the sample."""
    name: str
    """Name of the sample in its source."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedCounted:
    """What was read from a Source so far in this process."""

    kind: ClassVar[str] = "feed"
    window: int
    """Window that has just ended."""
    broken: int = 0
    """Samples found broken."""
    samples: int = 0
    """Samples requested."""
    bytes_used: int = 0
    """Bytes of the samples that were delivered."""
    bytes_sent: int = 0
    """Bytes the store sent, including gaps between samples and repeated requests."""
    requests: int = 0
    """Requests, including repeated ones."""
    retried: int = 0
    """Requests repeated after an error."""
    hedged: int = 0
    """Second requests sent because the first was slow."""
    cache: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counters of the cache; empty where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreatCounted:
    """What was done with the stages of augmentation so far."""

    kind: ClassVar[str] = "treat"
    window: int = 0
    """Window that has just ended."""
    treatment: str
    """"fresh", "reuse" or "echo"."""
    views: int = 1
    """Views per fetched sample."""
    split: int | None = None
    """Number of stages before the kept intermediate; None if nothing is kept."""
    adapted: float = 1.0
    """Strength of stages with a curve, which follows the gap between training and validation."""
    frozen: tuple[str, ...] = ()
    """Random stages whose draws are kept with the intermediate."""
    fresh_shares: tuple[float | None, ...] = ()
    """Smallest, median and largest share of a sample's visits that were fresh."""
    costs_us: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Microseconds per call, by stage."""
    saved_seconds: float = 0.0
    """Seconds of the workers' time that reuse saved."""
    visits: int = 0
    """Visits so far."""
    fresh: int = 0
    """Visits that ran every stage."""
    stored: int = 0
    """Visits that ran every stage and kept the intermediate."""
    reused: int = 0
    """Visits that started from a kept intermediate."""
    missed: int = 0
    """Visits whose intermediate had to be made again."""
    unfit: int = 0
    """Intermediates that could not be kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summarised:
    """A report was asked for."""

    kind: ClassVar[str] = "observed"
    summary: Mapping[str, Any]
    """What `summary()` returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """Something went wrong, and training continued."""

    kind: ClassVar[str] = "warning"
    text: str
    """The warning."""


EventData = (
    RunStarted | WindowPlanned | SignalsChosen | GradientsProbed | WindowClosed | Evaluated | Balanced | Steered
    | SamplesScored | CopiesFound | Findings | SampleBroken | FeedCounted | TreatCounted | BottleneckFound | LeverDecided
    | NoiseMeasured | SettingsChanged | LengthsBatched | KeysMatched | StreamRead | Summarised | Warned
)  # fmt: skip
"""Any kind of event."""

KINDS: dict[str, type[Any]] = {one.kind: one for one in EventData.__args__}
"""The dataclass of each kind."""
