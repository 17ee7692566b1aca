"""What a run found out about its samples: labels that look wrong, hard samples, near-copies, classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A label that looks wrong."""

    id: int
    """Id of the sample."""
    label: int
    """The label it has."""
    guess: int
    """The class the model would give it."""
    confidence: float
    """Probability that the label is wrong, from 0 to 1."""
    reason: str
    """Why, in words."""
    guess_p: float | None = None
    """Mean probability the model gives that class."""
    right: int | None = None
    """Visits at which the model gave the label."""
    seen: int | None = None
    """Visits of the sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hard:
    """A sample that is hard although its label seems right."""

    id: int
    """Id of the sample."""
    label: int
    """The label it has; -1 = none."""
    guess: int
    """The class the model gave it last; -1 = unknown."""
    mean_loss: float
    """Exponential mean of its loss."""
    confidence: float | None
    """Probability that the label is right; None where labels cannot be judged."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyGroup:
    """Samples so similar that one can represent all of them."""

    id: int
    """The sample that represents the group."""
    members: tuple[int, ...]
    """All samples of the group, the representative included."""
    confidence: float
    """Similarity of the least similar member, from 0 to 1."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFinding:
    """One class: its share of the data, what it was given, and how well it was learnt."""

    label: int
    """Index of the class."""
    samples: int
    """Number of samples."""
    share: float
    """Its share of the samples that have a class."""
    visits: float | None = None
    """Its share of the visits that went into a gradient; None before there were any."""
    mean_loss: float | None = None
    """Mean over its samples of their mean loss; None where it is unknown."""
    accuracy: float | None = None
    """Share of its samples that were classified correctly at their last visit in training; None where it is unknown."""
    reason: str = ""
    """Why its share of the visits differs from its share of the samples; empty where it does not by much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """Samples of one class that the model takes for another."""

    label: int
    """Index of the class they have."""
    guess: int
    """Index of the class the model gave them at their last visit."""
    samples: int
    """Number of such samples."""
    share: float
    """Their share of the samples of the class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitFinding:
    """How often samples were trained on, and how hard they are."""

    counted: bool
    """False if the ledger was started from another run, so that its visits are not those of this run alone."""
    always: int
    """Samples trained on in every window."""
    sometimes: int
    """Samples trained on in some windows."""
    never: int
    """Samples trained on in no window."""
    times: tuple[tuple[int, int, int], ...]
    """Histogram of visits: (from, to, samples trained on that often)."""
    loss_edges: tuple[float, ...] = ()
    """Edges of the histogram of the mean loss, evenly spaced in its logarithm."""
    often: tuple[int, ...] = ()
    """Samples between the edges that were trained on in more than half of the windows."""
    seldom: tuple[int, ...] = ()
    """Samples between the edges that were trained on in half of the windows or fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Counts over all samples, and the first few of each kind."""

    kind: ClassVar[str] = "findings"
    samples: int
    """Number of samples in the data set."""
    judged: int
    """Labels with a history to judge them by; 0 where the loss was given no logits."""
    noise_rate: float | None
    """Estimated share of wrong labels; None where it is unknown."""
    suspected: int
    """Labels that look wrong."""
    expected: float
    """Expected number of wrong labels among the suspected: the sum of their confidences."""
    weak: str = ""
    """Why no label can be judged, where the model has learnt too little for that; empty otherwise."""
    suspects: tuple[Suspect, ...]
    """Labels that look wrong, most certain first."""
    hard: tuple[Hard, ...]
    """The hardest samples whose labels seem right, hardest first."""
    groups: int | None
    """Groups of near-copies; None where nobody looked for any."""
    spare: int | None
    """Samples that another one of their group can represent; None where nobody looked."""
    copies: tuple[CopyGroup, ...]
    """Groups of near-copies, largest first."""
    class_count: int = 0
    """Number of classes in the data set."""
    classes: tuple[ClassFinding, ...] = ()
    """The classes in order; of very many, the hardest."""
    confusions: tuple[Confusion, ...] = ()
    """The pairs of classes that are confused most often."""
    visits: VisitFinding | None = None
    """How often samples were trained on; None where the number of windows is unknown."""
    not_finite: int = 0
    """Losses that were NaN or infinite."""
