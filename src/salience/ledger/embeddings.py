"""Where each sample lies in feature space: the mean of its features over visits, and how much visits scatter around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import ConfigError
from salience.ledger.columns import COUNT_LIMIT

Vectors = npt.NDArray[np.float32]

SCATTER_DECAY = 0.9995
"""Factor on the scatter after each batch: the model changes, and old batches say little about the scatter now."""
MIN_VISITS_PER_DIRECTION = 32
"""With this many visits per direction, the scatter is known well enough to update it from only some of the batches."""
SCATTER_BATCH_STRIDE = 4
"""Then one batch in this many updates it. The first id of a batch decides, so that a resumed run uses the same ones."""


class Embeddings:
    """float16 means [n, width] (256 bytes per sample at width 128), visits, and the scatter of single visits [width, width]."""

    def __init__(self, n: int, width: int) -> None:
        self.n, self.width = n, width
        self.mean = np.zeros((n, width), dtype=np.float16)
        self.visits = np.zeros(n, dtype=np.uint16)
        self.scatter = np.zeros((width, width), dtype=np.float64)
        """Sum over visits of the outer product of (visit - mean of the sample) with itself; old visits fade."""
        self.weight = 0.0
        """Number of visits in `scatter`; old ones fade."""

    @classmethod
    def given(cls, vectors: npt.ArrayLike, n: int) -> Embeddings:
        """Embeddings from the user's own vectors [n, width], which have no scatter."""
        array = np.asarray(vectors)
        if array.ndim != 2 or len(array) != n or array.dtype.kind not in "fiu":
            raise ConfigError(
                f"embeddings have shape {array.shape} of {array.dtype}; they must be {n} rows of numbers, one per sample."
            )
        if not np.isfinite(array).all():
            raise ConfigError("embeddings hold NaN or infinite numbers; leave no sample without a vector.")
        made = cls(n, array.shape[1])
        spread = float(np.abs(array).max()) or 1.0  # float16 ends at 65,504
        made.mean[:] = array / spread
        made.visits[:] = COUNT_LIMIT
        return made

    @property
    def typical_visits(self) -> float:
        return float(self.visits.mean())

    def record(self, ids: npt.NDArray[np.int64], vectors: Vectors) -> None:
        """Enter a visit of each of `ids`, vectors float32 [B, width]:  m += (v - m) / k. Skips vectors that are not finite."""
        v = torch.from_numpy(vectors)
        if not torch.isfinite(v.sum()):
            whole = np.isfinite(vectors).all(axis=1)
            ids, v = ids[whole], torch.from_numpy(vectors[whole])
        visits = self.visits.take(ids)
        seen = torch.from_numpy(visits.astype(np.float32)).unsqueeze(1)
        mean = torch.from_numpy(self.mean.take(ids, axis=0)).float()
        step = v - mean
        self.mean[ids] = mean.addcdiv_(step, seen + 1).half().numpy()
        self.visits[ids] = np.minimum(visits, COUNT_LIMIT - 1) + 1
        if len(ids) and (
            self.weight < MIN_VISITS_PER_DIRECTION * self.width or int(ids[0]) % SCATTER_BATCH_STRIDE == 0
        ):
            self._scatter(step, seen)

    def _scatter(self, step: Tensor, seen: Tensor) -> None:
        """Update the scatter. Distances to a mean of k other visits are too long by sqrt((k + 1) / k); first visits have none.

        Uses torch, since the threads that NumPy starts for a product of this size cost more than the product.
        """
        apart = step.mul_((seen / (seen + 1)).sqrt_())
        self.scatter *= SCATTER_DECAY
        self.scatter += (apart.T @ apart).numpy()
        self.weight = SCATTER_DECAY * self.weight + int(torch.count_nonzero(seen))

    def copy(self) -> Embeddings:
        """A snapshot for a thread that reads it while more visits are recorded."""
        return Embeddings.from_state(self.state_dict())

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "mean": self.mean.copy(),
            "visits": self.visits.astype(np.int32),
            "scatter": self.scatter.copy(),
            "weight": np.array([self.weight]),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[Any]]) -> Embeddings:
        made = cls(*state["mean"].shape)
        made.mean[:], made.visits[:], made.scatter[:] = state["mean"], state["visits"], state["scatter"]
        made.weight = float(state["weight"][0])
        return made
