"""What a run found out about its samples, as values: labels that look wrong, hard samples, near-copies, classes."""

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
