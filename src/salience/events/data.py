"""What happened to the data of a run: keys that were matched, windows of a stream, batches by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsBatched:
    """A window was cut into batches of similar length."""

    kind: ClassVar[str] = "lengths"
    window: int
    """Window index."""
    batches: int = 0
    """Batches over all ranks."""
    tokens: int = 0
    """Tokens of its samples."""
    padded: int = 0
    """The same with padding to the longest sample of each batch."""
    plain: int = 0
    """The same in batches of equal numbers of samples, in the order of the plan."""
    padding_saved: float = 0.0
    """1 - padded / plain: share of the tokens that need not be computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysMatched:
    """Samples were found in a ledger by their keys, or a data set has grown."""

    kind: ClassVar[str] = "keys"
    known: int = 0
    """Samples that the ledger has."""
    new: int = 0
    """Samples that it did not have."""
    gone: int = 0
    """Its rows whose samples are no longer there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRead:
    """The samples of a window were read from a stream."""

    kind: ClassVar[str] = "stream"
    window_pass: int = 0
    """Pass through the stream, starting at 0."""
    buffered: int = 0
    """Samples in the buffer."""
    new: int = 0
    """Samples of these that had not been seen before."""
    repeated: int = 0
    """Samples left out because one with the same key is in the buffer."""
    empty: int = 0
    """Samples left out because they are None."""
    read: int = 0
    """Samples read of this pass so far."""
    rows: int = 0
    """Rows of the ledger: different keys so far."""
    buffer_bytes: int = 0
    """Memory of the buffer, estimated from some samples."""
    keys_bytes: int = 0
    """Memory of the keys, estimated from some of them."""
    last: bool = False
    """True for the last window of a pass."""
