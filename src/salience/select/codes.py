"""Class numbers as codes no larger than the data, so that counts per class never take more memory than the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.integer[Any]]

MAX_CODES_PER_SAMPLE, MAX_CODES = 2, 1 << 16
"""Class numbers are used as they are up to this many per sample, or this many."""


def class_codes(*labels: Labels) -> tuple[int, tuple[Labels, ...]]:
    """The number of codes, and the arrays with equal codes for equal classes; negative numbers (not known) become -1.

    Codes are the class numbers themselves if those are small. Larger ones (hashes, ids from a database) are numbered
    in ascending order, so that an array over the codes stays as small as the data.
    """
    highest = max(int(label.max(initial=-1)) for label in labels)
    if highest < max(MAX_CODES, MAX_CODES_PER_SAMPLE * max(len(label) for label in labels)):
        return highest + 1, tuple(label if label.min(initial=0) >= -1 else np.maximum(label, -1) for label in labels)
    present = np.unique(np.concatenate([np.unique(label) for label in labels]))
    present = present[present >= 0]
    return len(present), tuple(np.where(label >= 0, np.searchsorted(present, label), -1) for label in labels)
