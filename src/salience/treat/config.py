"""How samples are augmented, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from salience.errors import ConfigError, did_you_mean
from salience.feed.sizes import parse_bytes
from salience.treat.resolution import curve_of

Kind = Literal["fresh", "reuse", "echo", "auto", "resolution"]


@dataclass(frozen=True, slots=True)
class Treat:
    """How the stages of `augment=` are run; `treat="reuse"` is short for `treat=Treat("reuse")`."""

    kind: Kind = "fresh"
    """"fresh": every stage runs at every visit. "reuse": an intermediate serves several visits. "echo": several views of
    each sample that is read. "auto": chosen by the measured times. "resolution": smaller images in a part of the run."""
    memory: int | str = "2GiB"
    """Bytes of intermediates kept, on each node."""
    split: int | None = None
    """Number of stages before the intermediate; None = the number that saves most."""
    r_max: int = 4
    """Maximum number of visits made from one intermediate."""
    views: int | Literal["auto"] | Callable[[float], float] = "auto"
    """Mean number of views per sample for "echo"; "auto" derives it from measured times, a function from progress."""
    distance: int = 2
    """Minimum number of batches between two views of a sample."""
    strength: bool = False
    """Pass the sample's importance, from 0 to 1, to stages with a keyword `strength`."""
    adapt: bool = False
    """Stages with a curve become stronger if training accuracy leaves validation behind, and weaker if it does not."""
    sizes: str | Callable[[float], float] = "rise"
    """"resolution": share of the full side over the run; "rise", "valley", "ramp", or a function of progress."""
    low: float = 0.5
    """"resolution": the smallest share of the side."""
    until: float = 0.55
    """"resolution": the progress from which on images have their full size."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"treat has no kind {self.kind!r}.{did_you_mean(self.kind, get_args(Kind))}")
        for name, least in (("r_max", 1), ("distance", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"treat: {name} is {getattr(self, name)}; it must be at least {least}.")
        if self.r_max > 255:
            raise ConfigError(f"treat: r_max is {self.r_max}; it must be at most 255.")
        if not callable(self.views) and self.views != "auto" and not 1 <= self.views <= MOST_VIEWS:
            raise ConfigError(
                f'treat: views is {self.views}; it must be "auto", from 1 to {MOST_VIEWS}, or a function of progress.'
            )
        for name in ("low", "until"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"treat: {name} is {getattr(self, name)}; it must be above 0 and at most 1.")
        curve_of(self.sizes, self.low, self.until)
        if self.bytes < 0:
            raise ConfigError(f"treat: memory is {self.memory}; it must be at least 0.")

    @property
    def bytes(self) -> int:
        return parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory

    @classmethod
    def of(cls, what: Treat | str | None) -> Treat:
        return what if isinstance(what, Treat) else cls("fresh" if what is None else what)  # pyright: ignore[reportArgumentType]


MOST_VIEWS = 16
"""Maximum number of views of one sample in one window."""
